"""Forked processes read what this process would, into memory that both have."""

from __future__ import annotations

import os
from ast import literal_eval
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest

from hicachectl.backends.arena import Arena, place
from hicachectl.backends.base import Status, attached
from hicachectl.backends.file.store import FileStore
from hicachectl.formats.errors import DeniedError
from hicachectl.io.reads import ObjectReads, ReadingProcesses

if TYPE_CHECKING:
    from pathlib import Path

    from hicachectl.backends.base import ReadResult

SIZES = np.array([5, 4096, 0, 10_000, 7, 7], dtype=np.int64)
OBJECTS = pa.table({"key": pa.array([str(n).encode() for n in range(len(SIZES))], pa.binary())})
ROWS = np.array([0, 1, 2, 3, 5, 4])


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    """Objects `0`, `1`, … of random bytes; one is missing, and one is short."""
    rng = np.random.default_rng(0)
    for number, size in enumerate(SIZES.tolist()):
        (tmp_path / str(number)).write_bytes(rng.bytes(size))
    (tmp_path / "4").unlink()
    os.truncate(tmp_path / "5", 3)
    return FileStore(tmp_path)


def check_same(one: ReadResult, two: ReadResult) -> None:
    assert one.errors == two.errors
    for name in ("statuses", "nbytes", "versions", "compared", "unranked"):
        np.testing.assert_array_equal(getattr(one, name), getattr(two, name))


def test_processes_read_as_this_process_does(store: FileStore) -> None:
    offsets, total = place(SIZES[ROWS])
    arguments = (ROWS, offsets, SIZES[ROWS])
    with Arena(total) as arena, attached(arena, store):
        expected = ObjectReads(store, OBJECTS).read(*arguments, identify=True, confirm=False)
        content = arena.array.tobytes()
    assert {Status.OK, Status.GONE, Status.SHORT} == {*map(Status, expected.statuses)}
    with ReadingProcesses(store, OBJECTS, 2, buffer_bytes=total) as processes:
        assert processes.count == 2
        assert store.arena is None
        processes.expect(ROWS, SIZES[ROWS])
        found = processes.read(*arguments, identify=True, confirm=False)
        assert processes.arena.array.tobytes() == content
    check_same(found, expected)


def test_an_announcement_reaches_the_store_in_the_process(tmp_path: Path) -> None:
    class Told(FileStore):
        def expect(self, rows: Any, capacities: Any) -> None:
            said = [os.getpid(), rows.column("key").to_pylist(), capacities.tolist()]
            (tmp_path / "said").write_text(repr(said))

    store = Told(tmp_path)
    with ReadingProcesses(store, OBJECTS, 1, buffer_bytes=4096) as processes:
        processes.expect(np.array([3, 1]), SIZES[[3, 1]])
    pid, *told = literal_eval((tmp_path / "said").read_text())
    assert told == [[b"3", b"1"], [10_000, 4096]]
    assert pid != os.getpid()


def test_processes_share_the_calls_at_once_and_have_the_memory_before_they_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    populated: list[int] = []

    class Sharing(FileStore):
        def expect(self, rows: Any, capacities: Any) -> None:
            level = self.concurrency.level("read")
            (tmp_path / "said").write_text(repr([level, populated == [os.getpid()]]))

    monkeypatch.setattr(Arena, "populate", lambda arena: populated.append(os.getpid()))
    store = Sharing(tmp_path)
    store.concurrency.limit(8)
    with ReadingProcesses(store, OBJECTS, 2, buffer_bytes=4096) as processes:
        processes.expect(np.array([0]), SIZES[[0]])
    assert literal_eval((tmp_path / "said").read_text()) == [4, True]
    assert store.concurrency.level("read") == 8


def test_an_error_of_a_read_is_raised_as_it_is(tmp_path: Path) -> None:
    class Denied(FileStore):
        def read_into(self, *_arguments: Any, **_options: Any) -> Any:
            raise DeniedError("object 0: cannot read it")

    first = np.zeros(1, dtype=np.int64)
    with (
        ReadingProcesses(Denied(tmp_path), OBJECTS, 1, buffer_bytes=4096) as processes,
        pytest.raises(DeniedError, match=r"^object 0: cannot read it$"),
    ):
        processes.read(first, first, first, identify=False, confirm=False)


def test_without_a_process_to_be_had_the_memory_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    closed: list[Arena] = []
    close = Arena.close

    def closing(arena: Arena) -> None:
        closed.append(arena)
        close(arena)

    monkeypatch.setattr(os, "fork", refuse)
    monkeypatch.setattr(Arena, "close", closing)
    store = FileStore(tmp_path)
    with pytest.raises(BlockingIOError):
        ReadingProcesses(store, OBJECTS, 2, buffer_bytes=4096)
    assert len(closed) == 1
    assert store.arena is None
