"""An exhausted quota: whole pages only, exit 4 or one line, and a later run completes."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pytest

from tests.move.migrations import PAGES, demo_store, profile_file
from tests.quotas import PLENTY, run_limited
from tests.small_file_system import small_file_system
from tests.stores import contents

if TYPE_CHECKING:
    from pathlib import Path


def whole_pages(store: Path, source: Path) -> int:
    """Assert that a store has only whole pages of the source; return their number."""
    names = set(contents(store))
    pages = {name[:64] for name in names}
    assert names == {path.name for path in source.glob("*.bin") if path.name[:64] in pages}
    for name in names:
        assert (store / name).read_bytes() == (source / name).read_bytes()
    return len(pages)


@pytest.mark.parametrize(("nbytes", "files"), [(200_000, PLENTY), (0, PLENTY), (PLENTY, 7)])
@pytest.mark.parametrize("command", ["migrate", "prewarm"])
def test_pages_that_were_copied_are_whole_and_a_later_run_copies_the_rest(
    tmp_path: Path, command: str, nbytes: int, files: int
) -> None:
    source, target = demo_store(tmp_path / "source"), tmp_path / "target"
    target.mkdir()
    profile = profile_file(tmp_path / "p.toml")
    arguments: list[object] = {
        "migrate": ["migrate", source, target, "--format", "json"],
        "prewarm": ["prewarm", target, "--from", source, "--all", "--profile", profile],
    }[command]
    done = run_limited(target, nbytes, files, *arguments, home=tmp_path)
    assert "Traceback" not in done.stderr
    document = json.loads(done.stdout)
    assert (done.returncode, document["stopped_by"]) == (4, "destination full"), done.stderr
    copied = whole_pages(target, source)
    assert copied == document["pages" if command == "migrate" else "copied_pages"]
    assert copied < PAGES

    enough = run_limited(target, PLENTY, PLENTY, *arguments, home=tmp_path)
    assert enough.returncode == 0, enough.stderr
    assert whole_pages(target, source) == PAGES
    assert json.loads(enough.stdout)["stopped_by"] is None


@pytest.mark.parametrize(("nbytes", "files"), [(300_000, PLENTY), (0, PLENTY), (PLENTY, 0)])
def test_a_pack_is_not_there_until_it_is_whole(tmp_path: Path, nbytes: int, files: int) -> None:
    source, folder = demo_store(tmp_path / "source"), tmp_path / "packs"
    folder.mkdir()
    arguments = ("migrate", source, f"pack://{folder}/a.hcpack", "--format", "json")
    done = run_limited(folder, nbytes, files, *arguments, home=tmp_path)
    assert "Traceback" not in done.stderr
    assert done.returncode in (3, 4), done.stderr
    assert "quota" in (done.stderr + done.stdout).lower()

    enough = run_limited(folder, PLENTY, PLENTY, *arguments, home=tmp_path)
    assert enough.returncode == 0, enough.stderr
    out = ("migrate", f"pack://{folder}/a.hcpack", tmp_path / "back")
    back = run_limited(folder, PLENTY, PLENTY, *out, home=tmp_path)
    assert back.returncode == 0, back.stderr
    assert whole_pages(tmp_path / "back", source) == PAGES


@pytest.mark.parametrize(
    ("nbytes", "files"), [(0, PLENTY), (100, PLENTY), (PLENTY, 0), (PLENTY, 1)]
)
def test_a_quarantine_without_room_takes_nothing(tmp_path: Path, nbytes: int, files: int) -> None:
    store, profile = demo_store(tmp_path / "store"), profile_file(tmp_path / "p.toml")
    broken = min(file for file in store.glob("*.bin") if ".mamba" not in file.name)
    os.truncate(broken, 100)
    page = broken.name[:64]
    for file in store.glob(f"{page}*"):
        os.utime(file, (1, 1))
    before = contents(store)
    repair = ("verify", store, "--profile", profile, "--repair", "quarantine", "--yes",
              "--format", "json")  # fmt: skip
    done = run_limited(store, nbytes, files, *repair, home=tmp_path)
    assert "Traceback" not in done.stderr
    assert done.returncode in (3, 4), done.stderr
    assert "quota" in (done.stderr + done.stdout).lower()
    assert contents(store) == before

    enough = run_limited(store, PLENTY, PLENTY, *repair, home=tmp_path)
    assert enough.returncode == 4, enough.stderr
    assert contents(store) == {n: found for n, found in before.items() if n[:64] != page}
    quarantine = store / ".hicachectl" / "quarantine"
    back = run_limited(store, PLENTY, PLENTY, "restore", quarantine, store, "--yes", home=tmp_path)
    assert back.returncode == 0, back.stderr
    assert contents(store) == before


@pytest.mark.parametrize(
    ("nbytes", "files"), [(0, PLENTY), (2_000, PLENTY), (PLENTY, 0), (PLENTY, 1)]
)
def test_rm_needs_no_room(tmp_path: Path, nbytes: int, files: int) -> None:
    store = demo_store(tmp_path / "store", 24)
    chosen = ("rm", store, "--tp", "2", "--yes", "--format", "json")
    # The limit also holds for the home directory, with the configuration and the state.
    done = run_limited(tmp_path, nbytes, files, *chosen, home=tmp_path)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert (document["pages"], document["failed"], document["remaining"]) == (24, 0, 0)
    assert not contents(store)
    assert not (store / ".hicachectl" / "quarantine").exists()


def test_rm_makes_room_on_a_full_disk(tmp_path: Path) -> None:
    with small_file_system(tmp_path / "disk", "8m") as disk:
        store = demo_store(disk / "store", 24)
        filler = os.open(disk / "filler", os.O_WRONLY | os.O_CREAT)
        os.posix_fallocate(filler, 0, os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize)
        os.close(filler)
        assert os.statvfs(disk).f_bavail == 0
        done = run_limited(tmp_path / "none", 0, 0, "rm", store, "--tp", "2", "--yes", home=disk)
        assert done.returncode == 0, done.stdout + done.stderr
        assert not contents(store)
        assert os.statvfs(disk).f_bavail > 0
