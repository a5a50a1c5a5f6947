"""Reading in forked processes gives the same results as in threads."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from blake3 import blake3

from hicachectl.backends.base import Limits
from hicachectl.backends.file.store import FileStore
from hicachectl.checks.findings import combine
from hicachectl.formats.errors import StoreUnavailable, UsageError
from hicachectl.io import pipeline
from hicachectl.pages.scanning import take_inventory
from hicachectl.verification import reading, reading_plan
from hicachectl.verification.reading import ReadingResult, read_objects
from hicachectl.verification.reading_plan import ReadingPlan, known_specs, value_checkers
from tests.move.repairs import DSA, dsa_store, indexer, kv

if TYPE_CHECKING:
    from pathlib import Path

    from hicachectl.backends.base import Store
    from hicachectl.pages.inventory import Inventory

PAGES = 150
OBJECTS = 2 * PAGES


class Forks:
    """Record the processes that are started."""

    def __init__(self) -> None:
        self.pids: list[int] = []
        self._fork = os.fork

    def __call__(self) -> int:
        pid = self._fork()
        self.pids.append(pid)
        return pid

    @property
    def count(self) -> int:
        return len(self.pids)


@pytest.fixture
def forks(monkeypatch: pytest.MonkeyPatch) -> Forks:
    """Fork for few objects, as if there were three processors, and use small windows."""
    monkeypatch.setattr(reading, "_FORK_OBJECTS", OBJECTS)
    monkeypatch.setattr(reading_plan, "_LEAST_WINDOW_OBJECTS", 16)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2})
    counter = Forks()
    monkeypatch.setattr(os, "fork", counter)
    return counter


def planned(inventory: Inventory, **options: Any) -> ReadingPlan:
    count = len(inventory.objects)
    return ReadingPlan(
        rows=np.arange(count),
        capacities=inventory.objects.column("nbytes").to_numpy(),
        digest=np.arange(count) % 5 != 0,
        noted=np.arange(count) % 3 != 0,
        expected={},
        checkers=value_checkers(known_specs(inventory.table), DSA),
        sizes=inventory.table.expected_sizes,
        **options,
    )


def read(store: Store, *, jobs: int | None = 3, **options: Any) -> tuple[Inventory, ReadingResult]:
    inventory = take_inventory(store, DSA)
    return inventory, read_objects(store, inventory, planned(inventory, jobs=jobs, **options))


def damage(directory: Path) -> None:
    """Make one object of each kind of damage that only reading finds."""
    os.truncate(directory / kv(3), 100)
    with (directory / kv(4)).open("ab") as stream:
        stream.write(b"more")
    (directory / indexer(5)).unlink()
    (directory / kv(6)).unlink()
    (directory / kv(6)).symlink_to(kv(7))
    for number in range(20, 60):
        with (directory / kv(number)).open("r+b") as stream:
            stream.write(b"\xff" * 64)  # NaN
    with (directory / indexer(61)).open("r+b") as stream:
        stream.write(bytes(os.path.getsize(directory / indexer(61))))  # noqa: PTH202


@pytest.mark.slow
def test_processes_find_what_threads_find(tmp_path: Path, forks: Forks) -> None:
    store = FileStore(dsa_store(tmp_path, PAGES))
    inventory = take_inventory(store, DSA)
    damage(tmp_path)
    told: list[int] = []
    by_processes = read_objects(store, inventory, planned(inventory, jobs=3), on_read=told.append)
    assert forks.count == 3
    by_thread = read_objects(store, inventory, planned(inventory, jobs=1))
    assert forks.count == 3
    ours, theirs = (
        combine(result.findings(inventory)).to_pylist() for result in (by_processes, by_thread)
    )
    assert ours == theirs
    assert {"truncated", "oversized", "unreadable", "nan", "all-zero"} <= {f["code"] for f in ours}
    assert sum(f["code"] == "nan" for f in ours) >= 40
    assert by_processes.counts.gone == by_thread.counts.gone == 1
    assert by_processes.counts.bytes_read == by_thread.counts.bytes_read > 0
    assert by_processes.counts.complete
    assert by_thread.counts.complete
    for name in ("digests", "versions", "digested"):
        assert np.array_equal(getattr(by_processes, name), getattr(by_thread, name)), name
    assert sum(told) == sum(inventory.objects.column("nbytes").to_pylist())


@pytest.mark.parametrize("checked", [False, True])
def test_pieces_find_what_whole_objects_find(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checked: bool
) -> None:
    """Objects without value checks need no memory as a whole; the results are the same."""
    store = FileStore(dsa_store(tmp_path, 30))
    os.truncate(tmp_path / kv(2), 100)
    inventory = take_inventory(store, DSA)
    os.truncate(tmp_path / kv(3), 100)
    (tmp_path / indexer(5)).unlink()
    plan = planned(inventory) if checked else replace(planned(inventory), checkers={})
    read_into, read = FileStore.read_into, list[int]()

    def noted(self: FileStore, rows: Any, *arguments: Any, **options: Any) -> Any:
        read.append(len(rows))
        return read_into(self, rows, *arguments, **options)

    monkeypatch.setattr(FileStore, "read_into", noted)
    whole = read_objects(store, inventory, plan)
    assert sum(read) == len(inventory.objects)
    monkeypatch.setattr(reading_plan, "_PIECES_FROM", 1)
    read.clear()
    pieces = read_objects(store, inventory, plan)
    assert sum(read) == (len(inventory.objects) - 1 if checked else 0)
    for name in ("digests", "versions", "digested", "tried", "whole"):
        assert np.array_equal(getattr(pieces, name), getattr(whole, name)), name
    assert pieces.counts == whole.counts
    found = [combine(one.findings(inventory)).to_pylist() for one in (pieces, whole)]
    assert found[0] == found[1]


def test_an_object_in_pieces_may_exceed_the_buffer(tmp_path: Path) -> None:
    store = FileStore(dsa_store(tmp_path, 1))
    os.truncate(tmp_path / kv(0), 3 << 20)
    _, result = read(store, jobs=1, buffer_bytes=1 << 20)
    assert result.whole.sum() == 2


@pytest.mark.slow
def test_every_object_gets_its_own_digest(tmp_path: Path, forks: Forks) -> None:
    with FileStore(dsa_store(tmp_path, PAGES)) as store:
        inventory, result = read(store)
    assert forks.count == 3
    assert result.digested.sum() == OBJECTS * 4 // 5
    for row in np.flatnonzero(result.digested).tolist():
        content = (tmp_path / inventory.objects.column("key")[row].as_py().decode()).read_bytes()
        assert result.digests[row].tobytes() == blake3(content).digest()


@pytest.mark.slow
@pytest.mark.parametrize(("calls", "jobs", "processes"), [(6, None, 3), (7, None, 8), (7, 5, 5)])
def test_many_calls_at_once_are_those_of_more_processes(
    tmp_path: Path, forks: Forks, calls: int, jobs: int | None, processes: int
) -> None:
    """Where more than two calls at once for each processor pay, further processes read."""
    with FileStore(dsa_store(tmp_path, PAGES)) as store:
        store.concurrency.limit(calls)
        _, result = read(store, jobs=jobs)
    assert forks.count == processes
    assert result.digested.sum() == OBJECTS * 4 // 5


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [1, 3])
def test_a_deadline_that_has_passed_reads_nothing(tmp_path: Path, forks: Forks, jobs: int) -> None:
    with FileStore(dsa_store(tmp_path, PAGES)) as store:
        _, result = read(store, jobs=jobs, deadline=time.monotonic() - 1)
    assert not result.counts.complete
    assert not result.digested.any()
    assert result.counts.bytes_read == 0


@pytest.mark.slow
def test_a_deadline_ends_every_process(
    tmp_path: Path, forks: Forks, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]  # in each process
    monkeypatch.setattr(pipeline, "time", SimpleNamespace(monotonic=lambda: now[0]))

    class Slow(FileStore):
        def read_into(self, *arguments: Any, **options: Any) -> Any:
            now[0] += 60
            return super().read_into(*arguments, **options)

    with Slow(dsa_store(tmp_path, PAGES)) as store:
        _, result = read(store, deadline=90.0)
    assert forks.count == 3
    assert not result.counts.complete
    assert 0 < result.digested.sum() < OBJECTS * 4 // 5


@pytest.mark.slow
def test_a_store_that_is_lost_in_a_process_is_the_callers_error(
    tmp_path: Path, forks: Forks
) -> None:
    class Lost(FileStore):
        def read_into(self, *_: Any, **_options: Any) -> Any:
            raise StoreUnavailable(f"{self.path}: gone")

    with Lost(dsa_store(tmp_path, PAGES)) as store, pytest.raises(StoreUnavailable, match="gone"):
        read(store)
    assert forks.count == 3


@pytest.mark.slow
def test_a_process_that_is_killed_is_the_callers_error(tmp_path: Path, forks: Forks) -> None:
    class Fatal(FileStore):
        def read_into(self, *_: Any, **_options: Any) -> Any:
            os.kill(os.getpid(), 9)

    with (
        Fatal(dsa_store(tmp_path, PAGES)) as store,
        pytest.raises(UsageError, match="signal 9"),
    ):
        read(store)


@pytest.mark.slow
def test_ctrl_c_ends_the_processes(tmp_path: Path, forks: Forks) -> None:
    def interrupt(_nbytes: int) -> None:
        raise KeyboardInterrupt

    with FileStore(dsa_store(tmp_path, PAGES)) as store:
        inventory = take_inventory(store, DSA)
        with pytest.raises(KeyboardInterrupt):
            read_objects(store, inventory, planned(inventory, jobs=3), on_read=interrupt)
    assert forks.count == 3
    for pid in forks.pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_without_processes_to_be_had_threads_read(
    tmp_path: Path, forks: Forks, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", refuse)
    with FileStore(dsa_store(tmp_path, PAGES)) as store:
        _, result = read(store)
    assert result.digested.sum() == OBJECTS * 4 // 5


@pytest.mark.slow
def test_threads_read_what_processes_have_no_part_in(tmp_path: Path, forks: Forks) -> None:
    class Unforkable(FileStore):
        limits = Limits(batch_objects=256, batch_bytes=1 << 20, parallel_reads=2, parallel_writes=1)

    dsa_store(tmp_path, PAGES)
    with Unforkable(tmp_path) as unforkable:
        read(unforkable)
    with FileStore(tmp_path) as store:
        read(store, buffer_bytes=31 << 20)  # too little for two
        (tmp_path / kv(0)).unlink()
        read(store)  # too few objects
        (tmp_path / kv(0)).touch()
        os.truncate(tmp_path / kv(1), 40 << 20)
        read(store, buffer_bytes=64 << 20)  # too little for two of the largest object
    assert forks.count == 0
