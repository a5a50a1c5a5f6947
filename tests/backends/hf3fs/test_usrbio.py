"""Tests of backends.hf3fs.usrbio with a stand-in that copies real bytes, not a real 3FS."""

from __future__ import annotations

import errno
import gc
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
import pytest

from hicachectl.backends.arena import Arena
from hicachectl.backends.base import Status
from hicachectl.backends.hf3fs import usrbio as hf3fs_usrbio
from hicachectl.backends.hf3fs.data_files import FilePages
from hicachectl.backends.hf3fs.usrbio import RING_ENTRIES, Usrbio, UsrbioReader, find_usrbio
from hicachectl.backends.testing import read, scanned_rows
from hicachectl.formats.errors import StoreUnavailable
from tests.backends.hf3fs.place import NUM_PAGES, PAGE_BYTES, Place
from tests.backends.hf3fs.usrbio_stand_in import Daemon

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from tests.hf3fs_server import MetadataServer

PAGES = 3 * RING_ENTRIES + 5


@pytest.fixture
def daemon(tmp_path: Path) -> Daemon:
    (tmp_path / "3fs-virt" / "iovs").mkdir(parents=True)
    return Daemon(str(tmp_path))


@pytest.fixture
def data(tmp_path: Path) -> bytes:
    content = np.random.default_rng(0).bytes(PAGES * PAGE_BYTES)
    (tmp_path / "hicache.0.bin").write_bytes(content)
    return content


@pytest.fixture
def arena() -> Iterator[Arena]:
    with Arena(2 * PAGES * PAGE_BYTES, named=True) as arena:
        yield arena


@pytest.fixture
def reader(daemon: Daemon, arena: Arena) -> Iterator[UsrbioReader]:
    reader = UsrbioReader(Usrbio(daemon, daemon.mount), arena)
    yield reader
    reader.close()


def pages_at(indices: npt.NDArray[np.int64], base: int = 0) -> FilePages:
    targets = base + np.arange(len(indices), dtype=np.int64) * PAGE_BYTES
    return FilePages(indices * PAGE_BYTES, targets, PAGE_BYTES)


def test_more_pages_than_a_ring_holds_come_to_their_places(
    reader: UsrbioReader, arena: Arena, data: bytes, tmp_path: Path, daemon: Daemon
) -> None:
    indices = np.random.default_rng(1).permutation(PAGES).astype(np.int64)
    counts = reader.read(str(tmp_path / "hicache.0.bin"), pages_at(indices), arena.memory)
    assert (counts == PAGE_BYTES).all()
    for place, index in enumerate(indices.tolist()):
        found = arena.view(place * PAGE_BYTES, PAGE_BYTES).tobytes()
        assert found == data[index * PAGE_BYTES :][:PAGE_BYTES]
    assert daemon.served == PAGES
    assert daemon.rings == 1


def test_threads_have_rings_of_their_own(
    reader: UsrbioReader, arena: Arena, data: bytes, tmp_path: Path
) -> None:
    indices = np.arange(PAGES, dtype=np.int64)

    def read_often(base: int) -> None:
        for _ in range(10):
            counts = reader.read(
                str(tmp_path / "hicache.0.bin"), pages_at(indices, base), arena.memory
            )
            assert (counts == PAGE_BYTES).all()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(read_often, (0, PAGES * PAGE_BYTES)))
    assert arena.view(0, 2 * PAGES * PAGE_BYTES).tobytes() == 2 * data


def test_the_end_of_the_file_and_errors_are_told_for_each_page(
    reader: UsrbioReader, arena: Arena, data: bytes, tmp_path: Path, daemon: Daemon
) -> None:
    os.truncate(tmp_path / "hicache.0.bin", 3 * PAGE_BYTES + 7)
    daemon.fail[PAGE_BYTES] = -errno.EIO
    counts = reader.read(
        str(tmp_path / "hicache.0.bin"), pages_at(np.arange(5, dtype=np.int64)), arena.memory
    )
    assert counts.tolist() == [PAGE_BYTES, -errno.EIO, PAGE_BYTES, 7, 0]


def test_a_file_that_is_not_there_is_an_error(
    reader: UsrbioReader, arena: Arena, tmp_path: Path
) -> None:
    counts = reader.read(
        str(tmp_path / "hicache.9.bin"), pages_at(np.arange(2, dtype=np.int64)), arena.memory
    )
    assert counts.tolist() == [-errno.ENOENT] * 2


def test_pages_that_cannot_be_prepared_are_errors_and_the_others_come(
    reader: UsrbioReader, arena: Arena, data: bytes, tmp_path: Path, daemon: Daemon
) -> None:
    path = str(tmp_path / "hicache.0.bin")
    one = pages_at(np.arange(1, dtype=np.int64))
    assert reader.read(path, one, arena.memory).tolist() == [PAGE_BYTES]
    daemon.registered.clear()
    assert reader.read(path, one, arena.memory).tolist() == [-errno.EACCES]
    daemon.registered.update(reader._files.values())


def test_a_daemon_that_does_not_answer_is_unavailable(
    reader: UsrbioReader,
    arena: Arena,
    data: bytes,
    tmp_path: Path,
    daemon: Daemon,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hf3fs_usrbio, "WAIT_SECONDS", 0.05)
    daemon.silent = True
    with pytest.raises(StoreUnavailable, match="no page was read within"):
        reader.read(
            str(tmp_path / "hicache.0.bin"), pages_at(np.arange(2, dtype=np.int64)), arena.memory
        )


@pytest.mark.slow
def test_nothing_is_left_behind(daemon: Daemon, arena: Arena, data: bytes, tmp_path: Path) -> None:
    name = arena.name
    assert name is not None
    assert (Path("/dev/shm") / name).exists()
    reader = UsrbioReader(Usrbio(daemon, daemon.mount), arena)
    assert not (Path("/dev/shm") / name).exists()  # a crash after this leaves no file
    links = tmp_path / "3fs-virt" / "iovs"
    assert len(list(links.iterdir())) == 1
    reader.read(
        str(tmp_path / "hicache.0.bin"), pages_at(np.arange(2, dtype=np.int64)), arena.memory
    )
    assert len(daemon.registered) == 1
    reader.close()
    daemon.settle()
    gc.collect()
    assert daemon.registered == set()
    assert list(links.iterdir()) == []


def test_it_is_found_on_a_mount_of_3fs_alone(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    prefix = str(tmp_path / "hicache")
    assert find_usrbio(prefix) is None
    monkeypatch.setitem(sys.modules, "hf3fs_fuse", ModuleType("hf3fs_fuse"))
    monkeypatch.setitem(sys.modules, "hf3fs_fuse.io", daemon)
    assert find_usrbio(prefix) == Usrbio(daemon, daemon.mount)
    assert find_usrbio("/elsewhere/hicache") is None


def test_a_store_on_3fs_reads_by_usrbio_into_a_named_arena_and_else_through_the_mount(
    metadata_server: MetadataServer,
    daemon: Daemon,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setitem(sys.modules, "hf3fs_fuse", ModuleType("hf3fs_fuse"))
    monkeypatch.setitem(sys.modules, "hf3fs_fuse.io", daemon)
    place = Place(metadata_server, tmp_path / "hicache")
    place.create()
    keys = [f"0:kv:{n:064x}-k".encode() for n in range(NUM_PAGES)]
    values = [np.random.default_rng(n).bytes(PAGE_BYTES) for n in range(NUM_PAGES)]
    for key, value in zip(keys, values, strict=True):
        place.put(key, value)
    with place.open() as store:
        assert store.limits.named_arena
        rows = scanned_rows(store, keys)
        for named in (True, False):
            with Arena(NUM_PAGES * PAGE_BYTES, named=named) as arena:
                store.attach(arena)
                result, found = read(store, rows, [PAGE_BYTES] * NUM_PAGES)
                assert result.all_ok
                assert found == values
                assert daemon.served == NUM_PAGES
                store.detach()
        with Arena(NUM_PAGES * PAGE_BYTES, named=True) as arena:
            store.attach(arena)
            place.delete(keys[3])
            result, _ = read(store, rows.slice(3, 2), [PAGE_BYTES] * 2)
            assert result.statuses.tolist() == [Status.GONE, Status.OK]
