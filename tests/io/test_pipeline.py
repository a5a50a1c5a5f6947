"""The pipeline: every object once, bounded memory, errors raised to the iterating thread."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest

from hicachectl.backends.base import Status, keys_of
from hicachectl.backends.file.store import FileStore
from hicachectl.formats.errors import StoreUnavailable, UsageError
from hicachectl.io import pipeline
from hicachectl.io.pipeline import Loaded, Pace, Pipeline, Task, batches
from tests.stores import put
from tests.waiting import wait_until

if TYPE_CHECKING:
    from pathlib import Path

SIZES = np.array([0, 1, 4095, 4096, 4097, 100_000] * 8, dtype=np.int64)


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    """Objects `0`, `1`, … of SIZES bytes."""
    for number, size in enumerate(SIZES.tolist()):
        put(tmp_path, str(number), size)
    return FileStore(tmp_path)


OBJECTS = pa.table({"key": pa.array([str(n).encode() for n in range(len(SIZES))], pa.binary())})


def tasks(most_objects: int = 5, most_bytes: int = 150_000) -> list[Task]:
    rows = np.arange(len(SIZES))
    return list(batches(rows, SIZES, most_objects=most_objects, most_bytes=most_bytes))


def content(loaded: Loaded) -> list[tuple[int, bytes]]:
    return [(int(r), loaded.view(i).tobytes()) for i, r in enumerate(loaded.task.rows)]


def no_readers() -> bool:
    return not [t for t in threading.enumerate() if t.name.startswith("reader-")]


@pytest.mark.parametrize("jobs", [1, 4])
def test_every_object_is_seen_once_in_a_buffer_for_two_tasks(
    store: FileStore, tmp_path: Path, jobs: int
) -> None:
    seen: dict[int, bytes] = {}
    for part in Pipeline(store, OBJECTS, tasks(), content, buffer_bytes=350_000, jobs=jobs):
        for row, data in part:
            assert row not in seen
            seen[row] = data
    assert seen == {n: (tmp_path / str(n)).read_bytes() for n in range(len(SIZES))}
    assert no_readers()


def test_batches_keep_order_and_limits() -> None:
    parts = tasks(most_objects=3, most_bytes=8192)
    assert np.concatenate([part.rows for part in parts]).tolist() == list(range(len(SIZES)))
    for part in parts:
        assert len(part.rows) <= 3
        assert len(part.rows) == 1 or part.capacities.sum() <= 8192


def test_a_block_shows_equal_objects_in_place(store: FileStore, tmp_path: Path) -> None:
    rows = np.flatnonzero(SIZES == 4097)
    task = Task(rows, SIZES[rows])

    def blocks(loaded: Loaded) -> list[bytes]:
        assert not loaded.block().flags.writeable
        return [row.tobytes() for row in loaded.block()]

    [found] = list(Pipeline(store, OBJECTS, [task], blocks, buffer_bytes=1 << 20))
    assert found == [(tmp_path / str(row)).read_bytes() for row in rows.tolist()]


def test_an_object_that_is_gone_is_a_status(store: FileStore, tmp_path: Path) -> None:
    (tmp_path / "3").unlink()
    statuses: dict[int, int] = {}
    for loaded in Pipeline(store, OBJECTS, tasks(), lambda loaded: loaded):
        statuses |= dict(zip(loaded.task.rows.tolist(), loaded.read.statuses.tolist(), strict=True))
    assert statuses.pop(3) == Status.GONE
    assert set(statuses.values()) == {Status.OK}


def test_a_task_above_the_buffer_is_refused_by_name(store: FileStore) -> None:
    with pytest.raises(UsageError, match="--buffer-bytes"):
        list(Pipeline(store, OBJECTS, tasks(), content, buffer_bytes=8192))
    assert no_readers()


def test_a_lost_store_is_raised_to_the_caller(store: FileStore, tmp_path: Path) -> None:
    class Lost(FileStore):
        def read_into(self, *_: Any, **_options: Any) -> Any:
            raise StoreUnavailable("gone")

    with pytest.raises(StoreUnavailable):
        list(Pipeline(Lost(tmp_path), OBJECTS, tasks(), content))
    assert no_readers()


def test_an_error_of_the_work_is_raised_to_the_caller(store: FileStore) -> None:
    def fail(_loaded: Loaded) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        list(Pipeline(store, OBJECTS, tasks(), fail))
    assert no_readers()


def test_leaving_early_ends_the_readers(store: FileStore) -> None:
    many = tasks(most_objects=1) * 50
    iterator = iter(Pipeline(store, OBJECTS, many, content, jobs=4))
    next(iterator)
    iterator.close()
    assert no_readers()


@pytest.mark.slow
def test_a_slow_consumer_holds_the_readers_back(store: FileStore) -> None:
    done: list[int] = []
    many = [Task(np.array([1]), np.array([1]))] * 1000
    pipeline = Pipeline(store, OBJECTS, many, lambda _: done.append(1), jobs=2)
    iterator = iter(pipeline)
    next(iterator)
    wait_until(lambda: len(done) >= 65)
    time.sleep(0.05)
    assert len(done) <= 70  # 64 in the queue, and one per reader
    assert len(list(iterator)) == 999


def test_towards_a_destination_no_task_begins_far_before_one_is_done(store: FileStore) -> None:
    """With two jobs, at most four tasks begin while the first, slow task is unfinished."""
    begun: list[int] = []
    may_end = threading.Event()

    def work(loaded: Loaded) -> None:
        begun.append(row := int(loaded.task.rows[0]))
        assert row or may_end.wait(60)

    many = [Task(np.array([row]), SIZES[row : row + 1]) for row in range(20)]
    results = iter(Pipeline(store, OBJECTS, many, work, jobs=2, destination=store))
    for _ in range(3):
        next(results)
    wait_until(lambda: 0 in begun)
    time.sleep(0.05)
    assert sorted(begun) == [0, 1, 2, 3]
    may_end.set()
    assert len(list(results)) == 17
    assert no_readers()


def test_leaving_early_does_not_wait_for_a_turn(store: FileStore) -> None:
    def fail_late(loaded: Loaded) -> None:
        if int(loaded.task.rows[0]) == 0:
            time.sleep(0.1)
            raise ZeroDivisionError

    rows = [Task(np.array([n]), SIZES[n : n + 1]) for n in range(len(SIZES))]
    with pytest.raises(ZeroDivisionError):
        list(Pipeline(store, OBJECTS, rows, fail_late, jobs=3, destination=store))
    assert no_readers()


def test_a_deadline_ends_the_run_between_tasks(store: FileStore) -> None:
    pipeline = Pipeline(store, OBJECTS, tasks(), content, deadline=time.monotonic() - 1)
    assert list(pipeline) == []
    assert not pipeline.complete
    whole = Pipeline(store, OBJECTS, tasks(), content, deadline=time.monotonic() + 60)
    assert len(list(whole)) == len(tasks())
    assert whole.complete


def test_a_pace_does_not_outlast_the_deadline(store: FileStore) -> None:
    began = time.monotonic()
    pipeline = Pipeline(
        store, OBJECTS, tasks(), content, pace=Pace(1), deadline=time.monotonic() + 0.2
    )
    list(pipeline)
    assert not pipeline.complete
    assert time.monotonic() - began < 10


def test_large_objects_are_announced_before_they_are_read_and_small_ones_not(
    store: FileStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "_AHEAD_BYTES", 200_000)
    seen: list[tuple[str, list[bytes]]] = []

    class Told(FileStore):
        announced_bytes = 100_000

        def expect(self, rows: Any, capacities: Any) -> None:
            seen.append(("told", keys_of(rows)))
            super().expect(rows, capacities)

        def read_into(self, rows: Any, *arguments: Any, **options: Any) -> Any:
            seen.append(("read", keys_of(rows)))
            return super().read_into(rows, *arguments, **options)

    each = tasks(most_objects=1)
    assert len(list(Pipeline(Told(tmp_path), OBJECTS, each, content, jobs=1))) == len(each)
    large = [b"%d" % row for row in np.flatnonzero(SIZES == 100_000)]
    told = [keys[0] for verb, keys in seen if verb == "told"]
    assert [keys[0] for verb, keys in seen if verb == "read"] == [b"%d" % n for n in range(48)]
    assert set(told) <= set(large)
    assert len(set(told)) == len(told) > 0
    for key in told:
        assert seen.index(("told", [key])) < seen.index(("read", [key]))
    only_large = [task for task in each if task.capacities[0] == 100_000]
    seen.clear()
    list(Pipeline(Told(tmp_path), OBJECTS, only_large, content, jobs=1))
    # The first is read without an announcement; the others are announced.
    assert [verb for verb, _ in seen[:3]] == ["told", "read", "told"]
    assert {keys[0] for verb, keys in seen if verb == "told"} == set(large[1:])
