"""Migrations between two file stores, with copies made by the system."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hicachectl.backends.arena import Arena
from hicachectl.backends.file.store import FileStore
from hicachectl.formats.errors import StoreUnavailable
from hicachectl.io.pipeline import Pace
from hicachectl.move import copy_plan
from tests.move.migrations import PAGES, migrated, profile_file
from tests.stores import contents, put_pages

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.conftest import Invoke

SMALL = ("--buffer-bytes", "512KiB", "--jobs", "1")


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Record the keys of each call that copies."""
    calls: list[list[str]] = []

    def note(origins: list[str]) -> None:
        calls.append(origins)

    before_each_copy(monkeypatch, note)
    return calls


def before_each_copy(monkeypatch: pytest.MonkeyPatch, then: Callable[[list[str]], object]) -> None:
    copy_from = FileStore.copy_from

    def copy(store: FileStore, source: Any, origins: Any, *more: Any, **options: Any) -> Any:
        then([key.decode() for key in origins.column("key").to_pylist()])
        return copy_from(store, source, origins, *more, **options)

    monkeypatch.setattr(FileStore, "copy_from", copy)


@pytest.mark.parametrize(
    ("options", "copied"),
    [
        ((), True),
        (("--to-model", "new/name"), True),
        (("--verify",), False),
        (("--to-tp", "1"), False),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_objects_are_copied_where_their_bytes_stay_and_are_not_compared(
    invoke: Invoke,
    source: Path,
    target: Path,
    tmp_path: Path,
    copies: list[list[str]],
    options: tuple[str, ...],
    copied: bool,
) -> None:
    profile = profile_file(tmp_path / "profile.toml")
    assert migrated(invoke, source, target, "--profile", profile, *options)["pages"] == PAGES
    names = [name for call in copies for name in call]
    assert sorted(names) == (sorted(contents(source)) if copied else [])


def test_the_buffer_is_not_touched(
    invoke: Invoke, source: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    touched: list[bool] = []
    close = Arena.close

    def closing(arena: Arena) -> None:
        touched.append(bool(arena.array.any()))
        close(arena)

    monkeypatch.setattr(Arena, "close", closing)
    migrated(invoke, source, target, "--buffer-bytes", "4MiB")
    assert touched == [False]
    assert contents(target) == contents(source)


def test_sidecars_whose_anchor_leaves_the_source_are_taken_back(
    invoke: Invoke, source: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = next(name[:64] for name in contents(source) if "mamba" in name)
    anchors = [name for name in contents(source) if name[:64] == page and "mamba" not in name]
    seen: list[set[str]] = []

    def evict(names: list[str]) -> None:
        if set(anchors) & set(names):
            seen.append({name for name in contents(target) if name.startswith(page)})
            (source / anchors[0]).unlink(missing_ok=True)

    before_each_copy(monkeypatch, evict)
    document = migrated(invoke, source, target)
    assert (document["gone"], document["failed"], document["pages"]) == (1, 0, PAGES - 1)
    assert all("mamba" in name for name in seen[0])
    assert seen[0]
    assert not [name for name in contents(target) if name.startswith((page, "."))]


def test_a_source_that_is_cut_short_while_it_is_copied_fails_its_page_alone(
    invoke: Invoke, source: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = sorted(contents(source))[0]
    copy = os.copy_file_range

    def cut(one: int, other: int, count: int, *offsets: int) -> int:
        if Path(f"/proc/self/fd/{one}").readlink().name == name:
            count = copy(one, other, count // 2, *offsets)
            os.truncate(source / name, count)
            return count
        return copy(one, other, count, *offsets)

    monkeypatch.setattr(os, "copy_file_range", cut)
    document = migrated(invoke, source, target, exit_code=4)
    assert (document["failed"], document["pages"]) == (1, PAGES - 1)
    (problem,) = document["problems"]
    detail = "shorter than when it was listed; run again"
    assert (problem["key"], problem["detail"]) == (name, detail)
    assert not [left for left in contents(target) if left.startswith((name[:64], "."))]


def test_a_copy_goes_to_another_file_system(
    invoke: Invoke, source: Path, other_file_system: Path, copies: list[list[str]]
) -> None:
    migrated(invoke, source, other_file_system / "target")
    assert copies
    assert contents(other_file_system / "target") == contents(source)


def test_what_is_copied_counts_for_the_limit_of_bytes_a_second(
    invoke: Invoke, source: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed: list[int] = []

    def wait(_: Pace, nbytes: int, *__: object, **___: object) -> bool:
        passed.append(nbytes)
        return True

    monkeypatch.setattr(Pace, "wait", wait)
    migrated(invoke, source, target, *SMALL, "--bwlimit", "1GiB")
    assert sum(passed) == sum(len(data) for data, _ in contents(source).values())
    assert len(passed) > 1


def test_pages_of_one_age_are_copied_from_all_over_the_listing(
    invoke: Invoke, tmp_path: Path, copies: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Older ones come first; the others alternate between the folders that the listing goes by."""
    monkeypatch.setattr(copy_plan, "_APART", 3)
    put_pages(tmp_path / "store", range(7), "_m")
    with FileStore(tmp_path / "store") as store:
        keys = [key.decode() for batch in store.scan() for key in batch["key"].to_pylist()]
    os.utime(tmp_path / "store" / keys[5], (1, 1))
    migrated(invoke, tmp_path / "store", tmp_path / "copy")
    assert [key for call in copies for key in call] == [keys[n] for n in (5, 0, 3, 6, 1, 4, 2)]


@pytest.mark.usefixtures("forks")
@pytest.mark.parametrize("jobs", [(), ("--jobs", "8")], ids=["found", "given"])
def test_processes_copy_unless_the_calls_at_once_are_given(
    invoke: Invoke,
    source: Path,
    target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    jobs: tuple[str, ...],
) -> None:
    """Shares of a given number would not leave any to this process."""
    copiers = tmp_path / "copiers"

    def note(_: list[str]) -> None:
        with copiers.open("a") as file:
            file.write(f"{os.getpid()}\n")

    before_each_copy(monkeypatch, note)
    assert migrated(invoke, source, target, *jobs)["pages"] == PAGES
    assert contents(target) == contents(source)
    assert (str(os.getpid()) in copiers.read_text().split()) == bool(jobs)


@pytest.mark.usefixtures("forks")
def test_a_process_that_is_killed_ends_the_run_and_the_next_one_completes_it(
    invoke: Invoke, source: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    us = os.getpid()

    def die(_: list[str]) -> None:
        if os.getpid() != us:
            os.kill(os.getpid(), signal.SIGKILL)

    with monkeypatch.context() as killing:
        before_each_copy(killing, die)
        failed = invoke("migrate", source, target, exit_code=2)
    assert "was killed by signal 9" in failed.stderr
    assert migrated(invoke, source, target)["pages"] == PAGES
    assert contents(target) == contents(source)


@pytest.mark.usefixtures("forks")
def test_a_store_that_a_process_loses_is_lost(
    invoke: Invoke, source: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose(_: list[str]) -> None:
        raise StoreUnavailable("/mnt: cannot use the store: Stale file handle")

    before_each_copy(monkeypatch, lose)
    failed = invoke("migrate", source, target, exit_code=3)
    assert "/mnt: cannot use the store: Stale file handle" in failed.stderr
