"""Renames between a file store and a run: what is moved, and in which order synced."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hicachectl.backends.base import Result, Status, open_store
from hicachectl.backends.capabilities import mover_of
from hicachectl.backends.disk import durable
from hicachectl.backends.file.store import FileStore
from hicachectl.backends.object_files.tree import ObjectTree
from hicachectl.backends.testing import rows_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicachectl.backends.capabilities import Mover
    from hicachectl.backends.object_files.mover import FileMover

KEY = b"a.bin"


def taken(mover: Mover, key: bytes) -> Status:
    """Take one object; raise OSError with the message of an error."""
    return _only(mover.take(rows_of([key])))


def put_back(mover: Mover, key: bytes) -> Status:
    """Put one object back; raise OSError with the message of an error."""
    return _only(mover.put_back(rows_of([key])))


def _only(found: Result) -> Status:
    if found.errors:
        raise OSError(found.errors[0])
    return Status(int(found.statuses[0]))


@pytest.fixture
def store(tmp_path: Path) -> Path:
    path = tmp_path / "store"
    path.mkdir()
    (path / "a.bin").write_bytes(b"a value")
    return path


@pytest.fixture
def aside(tmp_path: Path) -> Path:
    """Make the folder of a run."""
    path = tmp_path / "aside"
    path.mkdir()
    return path


@pytest.fixture
def mover(store: Path, aside: Path) -> Iterator[FileMover]:
    with FileStore(store) as opened, FileStore(aside) as run:
        found = opened.mover(run)
        assert found is not None
        yield found


def test_names_with_new_files_are_synced_first_and_directions_apart(
    mover: FileMover, monkeypatch: pytest.MonkeyPatch, store: Path
) -> None:
    """Proves that a crash at any time leaves each object one of its names."""
    synced: list[str] = []
    monkeypatch.setattr(ObjectTree, "sync", lambda tree: synced.append(Path(tree.path).name))
    (store / "b.bin").write_bytes(b"another")
    assert taken(mover, KEY) == taken(mover, b"b.bin") == Status.OK
    assert synced == []
    assert put_back(mover, b"b.bin") == Status.OK
    assert synced == ["aside", "store"]
    assert put_back(mover, KEY) == Status.OK
    mover.flush(into_store=True)
    assert synced[2:] == ["store", "aside"]
    assert taken(mover, KEY) == Status.OK
    assert len(synced) == 4  # nothing was left of the other direction
    mover.flush(into_store=False)
    assert synced[4:] == ["aside", "store"]
    assert put_back(mover, KEY) == taken(mover, KEY) == Status.OK
    assert synced[6:] == ["store", "aside"]


@pytest.mark.parametrize("name", [b"../store/a.bin", b"..", b"a/b", b""])
def test_names_that_lead_elsewhere_are_refused(mover: FileMover, name: bytes) -> None:
    for call in (taken, put_back):
        with pytest.raises(OSError, match="key"):
            call(mover, name)


@pytest.mark.parametrize("kind", ["link", "fifo"])
def test_only_regular_files_come_back(
    mover: FileMover, store: Path, aside: Path, kind: str
) -> None:
    if kind == "link":
        (aside / "b.bin").symlink_to(store / "a.bin")
    else:
        os.mkfifo(aside / "b.bin")
    with pytest.raises(OSError, match="not a regular file in the quarantine"):
        put_back(mover, b"b.bin")
    assert not os.path.lexists(store / "b.bin")


def test_a_link_in_place_of_an_object_is_left_alone(mover: FileMover, store: Path) -> None:
    (store / "link.bin").symlink_to(store / "a.bin")
    assert taken(mover, b"link.bin") == Status.CHANGED
    assert (store / "link.bin").is_symlink()


def test_a_removed_run_is_named(mover: FileMover, store: Path, aside: Path) -> None:
    aside.rmdir()
    with pytest.raises(OSError, match="the quarantine run was removed; run again"):
        taken(mover, KEY)
    assert (store / "a.bin").read_bytes() == b"a value"


@pytest.mark.parametrize("folders", [(False, True), (True, False)], ids=["into folders", "out"])
def test_each_side_has_its_own_folders(tmp_path: Path, folders: tuple[bool, bool]) -> None:
    key = f"{'ab' * 32}_m.bin".encode()
    urls = [
        f"file://{tmp_path}/{name}" + "?folders=hex2" * inner
        for name, inner in zip("xy", folders, strict=True)
    ]
    for name in "xy":
        (tmp_path / name).mkdir()
    places = [tmp_path / n / ("ab" * i) / key.decode() for n, i in zip("xy", folders, strict=True)]
    with open_store(urls[0], create=True) as one, open_store(urls[1], create=True) as other:
        places[0].parent.mkdir(exist_ok=True)
        places[0].write_bytes(b"value")
        mover = mover_of(one, other)
        assert mover is not None
        assert taken(mover, key) == Status.OK
        assert places[1].read_bytes() == b"value"
        assert put_back(mover, key) == Status.OK
        assert places[0].read_bytes() == b"value"


@pytest.mark.parametrize("removes", [True, False])
def test_an_object_from_before_a_clear_makes_room(
    mover: FileMover, store: Path, aside: Path, monkeypatch: pytest.MonkeyPatch, removes: bool
) -> None:
    """Proves that a file that a writer puts there meanwhile stays."""

    def remove(key: bytes) -> bool:
        if removes:
            (store / os.fsdecode(key)).unlink()
        return True

    (aside / "a.bin").write_bytes(b"held")
    monkeypatch.setattr(mover, "_remove_stale", remove)
    assert put_back(mover, KEY) == (Status.OK if removes else Status.EXISTS)
    assert (store / "a.bin").read_bytes() == (b"held" if removes else b"a value")
    assert (aside / "a.bin").exists() == (not removes)


def test_a_new_file_comes_back_although_the_run_of_renames_ends(
    mover: FileMover, monkeypatch: pytest.MonkeyPatch, store: Path
) -> None:
    """A writer replaces an object right before its rename, and a signal ends the next one."""
    rename = durable.rename_noreplace

    def replaced(here: int, name: bytes, there: int, target: bytes) -> bool:
        if name != KEY:
            raise KeyboardInterrupt
        (store / "new").write_bytes(b"a new value")
        (store / "new").rename(store / "a.bin")
        return rename(here, name, there, target)

    (store / "b.bin").write_bytes(b"another")

    def move(here: int, name: bytes, there: int, target: bytes) -> None:
        assert rename(here, name, there, target)

    monkeypatch.setattr(durable, "rename_noreplace", replaced)
    monkeypatch.setattr("hicachectl.backends.object_files.mover.move_noreplace", move)
    with pytest.raises(KeyboardInterrupt):
        mover.take(rows_of([KEY, b"b.bin"]))
    assert (store / "a.bin").read_bytes() == b"a new value"
