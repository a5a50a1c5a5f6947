"""Ages are those of the store's file system: this host's clock may be minutes wrong."""

from __future__ import annotations

import errno
import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from hicachectl.backends.base import open_store
from hicachectl.backends.capabilities import Touch, present_ns
from hicachectl.backends.object_files.store import ObjectFiles
from hicachectl.backends.testing import rows_of
from hicachectl.formats.errors import StoreUnavailable
from tests import stores
from tests.move.repairs import default_quarantine, dsa_store, indexer, kv, repaired, shorten
from tests.small_file_system import small_file_system
from tests.waiting import wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Invoke

YOUNG, OLD = 0, 1  # pages
_STRUCTURE = ("--checks", "groups,sizes")
_DESPITE = "--despite-profile"  # two pages are too few to judge a profile by


@pytest.fixture(params=[300, -120])
def skewed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> float:
    """Set this host's clock 5 minutes ahead of the file system's, or 2 behind; return by how much.

    The difference lies between the ages of the young and of the old page.
    """
    skew: float = request.param
    now, now_ns = time.time, time.time_ns
    monkeypatch.setattr(time, "time", lambda: now() + skew)
    monkeypatch.setattr(time, "time_ns", lambda: now_ns() + int(skew * 1e9))
    return skew


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "profile.toml"
    path.write_text(stores.DSA)
    return path


def aged_store(directory: Path, young_s: float, old_s: float) -> Path:
    """Make a store of two pages of these ages, by the clock of the file system."""
    dsa_store(directory, 2)
    for number, age in ((YOUNG, young_s), (OLD, old_s)):
        for name in (kv(number), indexer(number)):
            _date(directory / name, age)
    return directory


def _date(path: Path, age_s: float) -> None:
    os.utime(path)
    moment = path.stat().st_mtime - age_s
    os.utime(path, (moment, moment))


def pages_in(directory: Path) -> list[int]:
    return [number for number in (YOUNG, OLD) if (directory / kv(number)).exists()]


def ages(skew: float, limit_s: float) -> tuple[float, float]:
    """Return ages on both sides of a limit that a host with a wrong clock takes for one side."""
    return limit_s - min(abs(skew) / 2, 50), limit_s + min(abs(skew) / 2, 50)


def test_a_repair_leaves_young_pages(
    invoke: Invoke, tmp_path: Path, profile: Path, skewed: float
) -> None:
    store = aged_store(tmp_path / "store", *ages(skewed, 60))
    for number in (YOUNG, OLD):
        facts = (store / indexer(number)).stat()
        shorten(store / indexer(number))
        os.utime(store / indexer(number), ns=(facts.st_atime_ns, facts.st_mtime_ns))
    repair = ("--profile", profile, *_STRUCTURE, "--repair", "delete", "--yes", _DESPITE)
    document = invoke("verify", store, *repair, "--format", "json", exit_code=4).document
    assert (document["in_flight"], document["repaired"]) == (1, 1)
    assert pages_in(store) == [YOUNG]
    assert [path.name for path in store.iterdir() if path.name.endswith(".tmp")] == []


def test_rm_leaves_young_partial_pages(
    invoke: Invoke, tmp_path: Path, profile: Path, skewed: float
) -> None:
    store = aged_store(tmp_path / "store", *ages(skewed, 60))
    for number in (YOUNG, OLD):
        (store / indexer(number)).unlink()
    rm = ("rm", store, "--state", "partial", "--profile", profile, "--yes", _DESPITE)
    assert (" dated up to 0:0" in invoke(*rm).stderr) == (skewed < 0)
    assert pages_in(store) == [YOUNG]


@pytest.mark.parametrize("options", [(), ("--before", "10m")])
def test_rm_of_temporary_files(
    invoke: Invoke, tmp_path: Path, skewed: float, options: tuple[str, ...]
) -> None:
    store = aged_store(tmp_path / "store", 7200, 7200)
    files = [store / f".hicachectl-{name * 32}.tmp" for name in "01"]
    for file, age in zip(files, ages(skewed, 600 if options else 60), strict=True):
        file.touch()
        _date(file, age)
    invoke("rm", store, "--temporaries", *options, "--yes")
    assert [file.exists() for file in files] == [True, False]
    assert pages_in(store) == [YOUNG, OLD]


@pytest.mark.parametrize("options", [(), ("--since", "1h")])
def test_a_move_leaves_young_pages(
    invoke: Invoke, tmp_path: Path, profile: Path, skewed: float, options: tuple[str, ...]
) -> None:
    """Of partial pages, which a server may be writing."""
    store = aged_store(tmp_path / "store", *ages(skewed, 3600 if options else 60))
    for number in (YOUNG, OLD):
        (store / indexer(number)).unlink()
    partial = ("--include-partial", "--include-damaged")
    move = ("--profile", profile, "--move", "--yes", *partial, *options)
    invoke("migrate", store, tmp_path / "target", *move)
    assert pages_in(store) == [OLD if options else YOUNG]


def test_a_purge_before_an_age(invoke: Invoke, tmp_path: Path, skewed: float) -> None:
    """The run is dated by the store's clock, too, and not by the host's."""
    store = aged_store(tmp_path / "store", 7200, 7200)
    shorten(store / indexer(OLD))
    repaired(store)
    quarantine = default_quarantine(store)
    invoke("quarantine", "purge", quarantine, "--before", "200s", "--yes")
    assert invoke("quarantine", "list", quarantine, "--format", "json").document["count"] == 1
    wait_until(lambda: _is_past(quarantine))
    invoke("quarantine", "purge", quarantine, "--before", "0s", "--yes")
    assert invoke("quarantine", "list", quarantine, "--format", "json").document["count"] == 0


def _is_past(quarantine: Path) -> bool:
    """Return whether the file system's clock is past the newest file of a quarantine."""
    newest = max(path.stat().st_mtime for path in quarantine.rglob("*"))
    probe = quarantine / "probe"
    probe.touch()
    now = probe.stat().st_mtime
    probe.unlink()
    return now > newest + 0.01


@pytest.mark.slow
def test_commands_that_only_look_write_nothing(
    invoke: Invoke, tmp_path: Path, profile: Path, skewed: float
) -> None:
    store = aged_store(tmp_path / "store", 10, 7200)
    before = store.stat().st_mtime_ns
    looks: list[tuple[object, ...]] = [
        ("verify", store, "--profile", profile, *_STRUCTURE),
        ("verify", store, "--profile", profile, *_STRUCTURE, "--repair", "delete", "--dry-run"),
        ("rm", store, "--before", "1h", "--dry-run"),
        ("rm", store, "--temporaries", "--dry-run"),
        ("migrate", store, tmp_path / "target", "--profile", profile, "--since", "1h"),
        ("migrate", store, tmp_path / "other", "--profile", profile, "--move", "--dry-run"),
        ("ls", store),
    ]
    for command in looks:
        invoke(*command)
    assert store.stat().st_mtime_ns == before


@pytest.mark.parametrize("command", ["verify", "show", "repair", "rm", "migrate", "move"])
def test_every_command_takes_a_page_of_the_future_for_settled(
    invoke: Invoke, tmp_path: Path, profile: Path, command: str
) -> None:
    store = aged_store(tmp_path / "store", -3600, -3600)
    (store / indexer(YOUNG)).unlink()
    verify, move = ("verify", store, *_STRUCTURE), ("migrate", store, tmp_path / "target")
    partial = ("--include-partial", "--include-damaged")
    commands: dict[str, tuple[object, ...]] = {
        "verify": verify,
        "show": ("show", store, stores.page(YOUNG)),
        "repair": (*verify, "--repair", "delete", "--yes", "--fail-on", "never", _DESPITE),
        "rm": ("rm", store, "--state", "partial", "--yes", _DESPITE),
        "migrate": (*move, *partial),
        "move": (*move, *partial, "--move", "--yes"),
    }
    done = invoke(*commands[command], "--profile", profile, "--format", "json",
                  exit_code=4 if command == "verify" else 0).document  # fmt: skip
    if command in ("verify", "show"):
        assert "missing-pool" in [each["code"] for each in done["findings"]]
    if command == "migrate":
        assert done["pages"] == 2
    assert pages_in(store) == {"repair": [OLD], "rm": [OLD], "move": []}.get(command, [YOUNG, OLD])


def test_a_touch_is_dated_by_the_file_system(tmp_path: Path, skewed: float) -> None:
    store = aged_store(tmp_path / "store", 7200, 7200)
    with open_store(str(store)) as opened:
        assert isinstance(opened, Touch)
        assert opened.touch(rows_of([kv(OLD).encode()])).all()
    assert abs((store / kv(OLD)).stat().st_mtime - (time.time() - skewed)) < 50


@pytest.mark.parametrize("full", [False, True])
def test_the_clock_of_a_full_file_system(tmp_path: Path, skewed: float, full: bool) -> None:
    with (
        small_file_system(tmp_path / "mount", "1m,nr_inodes=8") as mount,
        open_store(str(mount)) as store,
    ):
        if full:
            with suppress(OSError):  # no space
                while True:
                    (mount / os.urandom(8).hex()).touch()
        asked = present_ns(store, changes=True)
        assert abs(asked - (time.time_ns() - skewed * 1e9)) < 60e9
        assert 0 <= present_ns(store, changes=True) - asked < 60e9
        assert abs(present_ns(store, changes=False) - time.time_ns()) < 60e9


@pytest.mark.parametrize("folders", [True, False])
def test_the_clock_where_the_outer_directory_is_not_writable(
    tmp_path: Path, skewed: float, monkeypatch: pytest.MonkeyPatch, folders: bool
) -> None:
    """The folders tell the time. Where none is writable, nothing can be removed."""
    url = f"file://{tmp_path}/store?folders=hex2" if folders else f"{tmp_path}/store"
    (tmp_path / "store").mkdir()
    with open_store(url, create=True) as store:
        assert isinstance(store, ObjectFiles)
        if folders:
            store.objects.place_for_new(kv(OLD).encode())
        outer, touch = store.objects.descriptor, os.utime

        def refused(place: int) -> None:
            if place == outer:
                raise PermissionError(errno.EACCES, "")
            touch(place)

        monkeypatch.setattr(os, "utime", refused)
        if folders:
            expected = time.time() - skewed
            assert abs(present_ns(store, changes=True) / 1e9 - expected) < 50
        else:
            with pytest.raises(StoreUnavailable, match="write to the store"):
                present_ns(store, changes=True)
