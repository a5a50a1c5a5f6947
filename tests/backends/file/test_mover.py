"""Renames between a file store and another directory: what is moved, and in which order synced."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hicachectl.backends.base import Status
from hicachectl.backends.disk.directory import Directory
from hicachectl.backends.file.store import FileStore
from hicachectl.backends.object_files import mover as mover_module
from hicachectl.backends.object_files.mover import FileMover
from hicachectl.backends.object_files.tree import ObjectTree
from hicachectl.backends.urls import parse_url

if TYPE_CHECKING:
    from collections.abc import Iterator

KEY = b"a.bin"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    path = tmp_path / "store"
    path.mkdir()
    (path / "a.bin").write_bytes(b"a value")
    return path


@pytest.fixture
def aside(tmp_path: Path) -> Path:
    path = tmp_path / "aside"
    path.mkdir()
    return path


@pytest.fixture
def mover(store: Path, aside: Path) -> Iterator[FileMover]:
    with (
        FileStore.from_url(parse_url(str(store))) as opened,
        Directory.named(str(aside), writes=True) as directory,
    ):
        found = opened.mover(directory)
        assert isinstance(found, FileMover)
        with found:
            yield found


def test_names_with_new_files_are_synced_first_and_directions_apart(
    mover: FileMover, monkeypatch: pytest.MonkeyPatch, store: Path
) -> None:
    """Proves that a crash at any time leaves each object one of its names."""
    synced: list[str] = []
    monkeypatch.setattr(ObjectTree, "sync", lambda *_: synced.append("store"))
    monkeypatch.setattr(mover_module, "sync_directory", lambda _: synced.append("aside"))
    (store / "b.bin").write_bytes(b"another")
    assert mover.take(KEY, "0") == mover.take(b"b.bin", "1") == Status.OK
    assert synced == []
    assert mover.put_back("1", b"b.bin") == Status.OK
    assert synced == ["aside", "store"]
    assert mover.put_back("0", KEY) == Status.OK
    mover.flush(into_store=True)
    assert synced[2:] == ["store", "aside"]
    assert mover.take(KEY, "0") == Status.OK
    assert len(synced) == 4  # nothing was left of the other direction
    mover.flush(into_store=False)
    assert synced[4:] == ["aside", "store"]
    assert mover.put_back("0", KEY) == mover.take(KEY, "0") == Status.OK
    assert synced[6:] == ["store", "aside"]


@pytest.mark.parametrize("name", ["../store/a.bin", "..", "a/b", ""])
def test_names_that_lead_elsewhere_are_refused(mover: FileMover, name: str) -> None:
    assert mover.take(KEY, "0") == Status.OK
    for call in (
        lambda: mover.take(os.fsencode(name), "1"),
        lambda: mover.take(KEY, name),
        lambda: mover.put_back(name, b"b.bin"),
        lambda: mover.put_back("0", os.fsencode(name)),
        lambda: mover.drop_double(os.fsencode(name), "0"),
        lambda: mover.drop_double(KEY, name),
    ):
        with pytest.raises(OSError, match="key"):
            call()


@pytest.mark.parametrize("kind", ["link", "fifo"])
def test_only_regular_files_come_back(
    mover: FileMover, store: Path, aside: Path, kind: str
) -> None:
    if kind == "link":
        (aside / "0").symlink_to(store / "a.bin")
    else:
        os.mkfifo(aside / "0")
    with pytest.raises(OSError, match="not a regular file in the quarantine"):
        mover.put_back("0", b"b.bin")
    assert not (store / "b.bin").is_symlink()
    assert not (store / "b.bin").exists()


def test_a_link_in_place_of_an_object_is_left_alone(
    mover: FileMover, store: Path, aside: Path
) -> None:
    (store / "link.bin").symlink_to(store / "a.bin")
    assert mover.take(b"link.bin", "0") == Status.CHANGED
    (aside / "1").write_bytes(b"held")
    (store / "to_aside.bin").symlink_to(aside / "1")
    mover.drop_double(b"to_aside.bin", "1")
    assert (store / "link.bin").is_symlink()
    assert (store / "to_aside.bin").is_symlink()


def test_a_closed_mover_leaves_no_descriptor(mover: FileMover) -> None:
    def count() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before = count()
    mover.close()
    assert count() == before - 1
    mover.close()
    assert count() == before - 1


def test_a_removed_directory_is_named(mover: FileMover, store: Path, aside: Path) -> None:
    aside.rmdir()
    with pytest.raises(OSError, match="the quarantine directory was removed; run again"):
        mover.take(KEY, "0")
    assert (store / "a.bin").read_bytes() == b"a value"


def test_the_key_of_a_double_is_removed_and_nothing_else(
    mover: FileMover, store: Path, aside: Path
) -> None:
    """Proves that equal bytes or a link do not make a double."""
    mover.drop_double(KEY, "0")  # there is none
    (aside / "0").write_bytes(b"a value")
    (aside / "1").symlink_to(store / "a.bin")
    for name in ("0", "1"):
        mover.drop_double(KEY, name)
        assert (store / "a.bin").read_bytes() == b"a value"
    os.link(store / "a.bin", aside / "2")
    mover.drop_double(KEY, "2")
    assert not (store / "a.bin").exists()
    assert (aside / "2").read_bytes() == b"a value"


@pytest.mark.parametrize("removes", [True, False])
def test_an_object_from_before_a_clear_makes_room(
    mover: FileMover, store: Path, aside: Path, monkeypatch: pytest.MonkeyPatch, removes: bool
) -> None:
    """Proves that a file that a writer puts there meanwhile stays."""

    def remove(key: bytes) -> bool:
        if removes:
            (store / os.fsdecode(key)).unlink()
        return True

    (aside / "0").write_bytes(b"held")
    monkeypatch.setattr(mover, "_remove_stale", remove)
    assert mover.put_back("0", KEY) == (Status.OK if removes else Status.EXISTS)
    assert (store / "a.bin").read_bytes() == (b"held" if removes else b"a value")
    assert (aside / "0").exists() == (not removes)
