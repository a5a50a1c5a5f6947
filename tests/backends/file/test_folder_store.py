"""Tests of FileStore on directories with folders: which files count, and where they lie."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hicachectl.backends.arena import Arena
from hicachectl.backends.base import Status, open_store
from hicachectl.backends.file.store import FileStore
from hicachectl.backends.object_files import listing as listings
from hicachectl.backends.testing import ARENA_BYTES, listing, read, rows_of, write
from hicachectl.backends.urls import parse_url
from hicachectl.formats.errors import FormatError, StoreUnavailable, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

KEYS = [f"{n:02x}{n:062x}_m.bin".encode() for n in range(16)]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FileStore]:
    url = parse_url(f"file://{tmp_path}/store?folders=hex2")
    with Arena(ARENA_BYTES) as arena, FileStore.create(url) as opened:
        opened.attach(arena)
        yield opened


def _file(store: FileStore, key: bytes) -> Path:
    return Path(store.path) / os.fsdecode(key[:2]) / os.fsdecode(key)


def test_a_url_makes_a_directory_with_folders_and_never_changes_one(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/new?folders=hex2"
    with pytest.raises(UsageError, match="folders: 'hex3' is not one of hex2"):
        open_store(url.replace("hex2", "hex3"), create=True)
    with open_store(url, create=True):
        assert (tmp_path / "new" / ".hicachectl" / "folders").read_text() == "hex2\n"
    for again in (url, str(tmp_path / "new")):
        with open_store(again) as opened:
            assert isinstance(opened, FileStore)
            assert opened.objects.folders
    (tmp_path / "flat").mkdir()
    with pytest.raises(UsageError, match="not marked as having folders"):
        open_store(f"file://{tmp_path}/flat?folders=hex2")


def test_an_unknown_mark_is_named(tmp_path: Path) -> None:
    (tmp_path / ".hicachectl").mkdir()
    (tmp_path / ".hicachectl" / "folders").write_text("hex3\n")
    with pytest.raises(FormatError, match=r"/\.hicachectl/folders: "):
        FileStore(tmp_path)


def test_objects_lie_in_the_folder_of_their_page(store: FileStore) -> None:
    values = {key: b"%d" % n * 100 for n, key in enumerate(KEYS)}
    assert write(store, values, if_absent=True).all_ok
    assert {key: _file(store, key).read_bytes() for key in KEYS} == values
    names = {path.name for path in Path(store.path).iterdir()}
    assert names == {".hicachectl", *(os.fsdecode(key[:2]) for key in KEYS)}
    assert listing(store) == {key: len(value) for key, value in values.items()}
    columns = ("nbytes", "mtime_ns", "version")
    rows = [row for batch in store.scan(columns) for row in batch.to_pylist()]
    assert sorted(rows, key=str) == sorted(store.look(rows_of(KEYS)).to_pylist(), key=str)


def test_files_elsewhere_are_named_and_left_alone(store: FileStore) -> None:
    """Proves that a file which no call could reach by its key is not listed."""
    write(store, dict.fromkeys(KEYS[:2], b"abc"), if_absent=True)
    base = Path(store.path)
    shutil.copy(_file(store, KEYS[0]), base / os.fsdecode(KEYS[2]))  # HiCacheFile would write it
    shutil.copy(_file(store, KEYS[0]), _file(store, KEYS[1]).with_name(os.fsdecode(KEYS[3])))
    for folder in ("zz", "0", "AB", "00.bin"):
        (base / folder).mkdir()
        (base / folder / os.fsdecode(KEYS[4])).write_bytes(b"abc")
    (base / "00" / "01").mkdir()
    (base / "00" / "01" / os.fsdecode(KEYS[5])).write_bytes(b"abc")
    (base / "README.txt").write_bytes(b"abc")
    assert set(listing(store)) == {*KEYS[:2], b"README.txt"}
    (remark,) = store.remarks
    assert "ignored 2 files outside the folders of their keys" in remark
    assert not store.exists(rows_of(KEYS[2:6])).any()
    assert read(store, rows_of([b"README.txt"]), [3])[1] == [b"abc"]


def test_keys_without_a_folder_are_not_written(store: FileStore) -> None:
    result = write(store, {b"README": b"abc", KEYS[0]: b"abc"}, if_absent=True)
    assert result.statuses.tolist() == [Status.ERROR, Status.OK]
    assert "hex digits" in result.errors[0]


def test_unfinished_writes_are_listed_removed_and_swept(store: FileStore) -> None:
    """Proves that temporary files in folders are found by their names alone."""
    mine, theirs = "0" * 16, "1" * 16
    left = {}
    for owner in (mine, theirs):
        store.own_temporaries(owner, sweep=False)
        for key in KEYS[3:5]:
            file = store._writer.write_temporary(key, lambda _: None, None)
            left[file.name] = owner
            assert _file(store, key).with_name(os.fsdecode(file.name)).exists()
    assert set(listing(store)) == set(left)
    store.own_temporaries(mine, sweep=True)
    others = [name for name, owner in left.items() if owner == theirs]
    assert set(listing(store)) == set(others)
    assert store.delete(rows_of(others)).all_ok
    assert listing(store) == {}


def test_a_folder_that_vanishes_loses_its_objects_only(store: FileStore) -> None:
    write(store, dict.fromkeys(KEYS, b"abc"), if_absent=True)
    shutil.rmtree(_file(store, KEYS[7]).parent)
    rows = rows_of(KEYS[6:9])
    gone = [Status.OK, Status.GONE, Status.OK]
    assert read(store, rows, [3] * 3)[0].statuses.tolist() == gone
    assert store.exists(rows).tolist() == [True, False, True]
    assert len(store.look(rows)) == 2
    assert store.touch(rows).tolist() == [True, False, True]
    assert store.delete(rows).statuses.tolist() == gone
    assert write(store, {KEYS[7]: b"new"}, if_absent=True).all_ok
    assert _file(store, KEYS[7]).read_bytes() == b"new"


@pytest.mark.parametrize("gone", ["folder", "store"])
def test_a_directory_removed_during_a_listing(
    store: FileStore, monkeypatch: pytest.MonkeyPatch, gone: str
) -> None:
    """Without a folder, the objects of the others are listed; without the store, no listing ends.

    A part of a store must not pass for the whole.
    """
    write(store, dict.fromkeys(KEYS, b"abc"), if_absent=True)
    removed = {"folder": _file(store, KEYS[7]).parent, "store": Path(store.path)}[gone]
    files_in = listings.files_in

    def remove_first(directory: int) -> Iterator[listings.Found]:
        if removed.exists() and os.path.samestat(os.fstat(directory), removed.stat()):
            shutil.rmtree(removed)
        return files_in(directory)

    monkeypatch.setattr(listings, "files_in", remove_first)
    if gone == "folder":
        assert sorted(listing(store)) == sorted(set(KEYS) - {KEYS[7]})
    else:
        with pytest.raises(StoreUnavailable, match="No such file or directory"):
            listing(store)


def test_many_folders_are_synced_at_once(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Proves that a batch over many folders costs no sync for each of them."""
    write(store, dict.fromkeys(KEYS, b"abc"), if_absent=True)  # makes the folders
    calls: list[int] = []
    monkeypatch.setattr(os, "fsync", calls.append)
    assert write(store, dict.fromkeys(KEYS, b"ABC"), if_absent=False).all_ok
    assert store.delete(rows_of(KEYS)).all_ok
    assert calls == []
    assert write(store, dict.fromkeys(KEYS[:3], b"abc"), if_absent=False).all_ok
    assert len(set(calls)) == 3
