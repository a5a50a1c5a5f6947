"""The one data path: read, work on and release a store's objects in bounded memory.

N reader threads take tasks in order. Each reserves a slab of the arena for a whole task, reads the
task with one call of the store, works on it in place, and releases the slab. Memory is the arena,
whatever the size of the store: a reader waits for room, and until its results are taken.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

from hicachectl.backends.arena import Arena, ReservationCancelledError, SlabAllocator, place
from hicachectl.backends.capabilities import Announces, Confirm
from hicachectl.io.interrupts import deferred, persistent

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator

    import numpy.typing as npt
    import pyarrow as pa

    from hicachectl.backends.base import IntArray, ReadResult, Store
    from hicachectl.io.pacing import Pace

DEFAULT_BUFFER_BYTES = 1 << 30
_QUEUED_RESULTS = 64  # finished tasks whose results are not taken yet
# Objects announced to a store in advance: enough to keep a disk busy while the readers work.
_AHEAD_BYTES = 64 << 20
# Tasks per job that may begin after an unfinished one: if that one fails, objects written after it
# are of less use.
_TURNS_AHEAD = 2

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """Objects that must be in memory together.

    rows: [n] int64, row numbers of the object table; capacities: [n] int64, bytes of each.
    room: bytes that the work needs after them. name: for messages.
    """

    rows: IntArray
    capacities: IntArray
    room: int = 0
    name: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes to read from the store."""
        return int(self.capacities.sum())


@dataclass(slots=True, eq=False)
class _Upcoming:
    """A drawn task, its number, and its objects once needed."""

    task: Task
    number: int
    named: pa.Table | None = None


@dataclass(slots=True, eq=False)
class Loaded:
    """A task whose objects were read, as far as possible.

    offsets: [n] int64 into the arena; 4 KiB-aligned, equal steps for equal capacities.
    room:    offset of the task's room in the arena, 4 KiB-aligned.
    read:    the store's answer for each object.
    """

    task: Task
    arena: Arena
    offsets: IntArray
    room: int
    read: ReadResult

    def view(self, index: int) -> npt.NDArray[np.uint8]:
        """Return the bytes of one object, in place."""
        return self.arena.view(int(self.offsets[index]), int(self.task.capacities[index]))

    def contents(self, chosen: IntArray) -> Iterator[memoryview]:
        """Yield the chosen objects in place; memoryviews are faster to create than arrays."""
        memory = self.arena.memory
        starts = self.offsets[chosen]
        ends = starts + self.task.capacities[chosen]
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            yield memory[start:end]

    def block(self) -> npt.NDArray[np.uint8]:
        """Return all objects, of equal capacities, in place: [n, nbytes], rows strided."""
        nbytes = int(self.task.capacities[0])
        step = int(self.offsets[1] - self.offsets[0]) if len(self.offsets) > 1 else nbytes
        first = self.arena.view(int(self.offsets[0]), step * (len(self.offsets) - 1) + nbytes)
        return np.lib.stride_tricks.as_strided(
            first, shape=(len(self.offsets), nbytes), strides=(step, 1), writeable=False
        )


class Pipeline(Generic[T]):
    """Run a function over tasks; iterate once for its results, in the order of completion.

    The iterating thread raises the first error of a reader, such as a lost store or a task larger
    than the buffer. If the iteration ends early, by `close` or an exception, the readers end after
    their current tasks.
    """

    def __init__(
        self,
        store: Store,
        objects: pa.Table,
        tasks: Iterable[Task],
        work: Callable[[Loaded], T],
        *,
        buffer_bytes: int = DEFAULT_BUFFER_BYTES,
        jobs: int | None = None,
        deadline: float | None = None,
        pace: Pace | None = None,
        identify: bool = True,
        confirm: bool = False,
        destination: Store | None = None,
        arena: Arena | None = None,
    ) -> None:
        """Prepare; nothing starts before the iteration.

        objects:  columns of a scan; tasks name objects by row.
        work:     called in reader threads.
        deadline: `time.monotonic()` after which no task begins.
        identify: whether versions of objects are needed.
        confirm:  read with `Confirm.read_confirmed`.
        destination: a store that the work writes to, from the same memory. No task begins while
                  one far before it is unfinished.
        arena:    memory to use instead of a new buffer; stores attached to it stay attached.
        """
        self.complete = True  # after the iteration: whether every task began
        self._store = store
        # Columns that reading needs; taking rows of a chunked table is slow.
        wanted = [name for name in ("key", "locator") if name in objects.column_names]
        self._objects = objects.select(wanted).combine_chunks()
        self._tasks = iter(tasks)
        self._ahead: deque[_Upcoming] = deque()  # drawn, not begun
        self._ahead_bytes = 0
        self._drawn = 0
        self._at_work: set[int] = set()  # numbers of tasks
        self._next = threading.Condition()
        self._work = work
        self._announces = store if isinstance(store, Announces) else None
        self._jobs = jobs or min(store.limits.parallel_reads, len(os.sched_getaffinity(0)))
        # Jobs that also write do not read all the time, so more jobs than readers are allowed.
        readers = self._jobs if destination is None else store.limits.parallel_reads
        self._most_at_once = None if destination is None else _TURNS_AHEAD * self._jobs
        self._reading = threading.BoundedSemaphore(max(1, readers))
        self._buffer_bytes = buffer_bytes
        self._deadline = deadline
        self._pace = pace
        self._identify = identify
        self._read_call = store.read_into
        if confirm and isinstance(store, Confirm):
            self._read_call = store.read_confirmed
        self._stores = (store,) if destination is None else (store, destination)
        self._arena = arena
        self._stopped = threading.Event()
        self._results: queue.Queue[tuple[T] | BaseException | None] = queue.Queue(_QUEUED_RESULTS)

    def __iter__(self) -> Generator[T, None, None]:
        named = any(store.limits.named_arena for store in self._stores)
        arena = self._arena or Arena(self._buffer_bytes, named=named)
        allocator = SlabAllocator(arena.nbytes)
        attached = [store for store in self._stores if store.arena is not arena]
        for store in attached:
            store.attach(arena)
        readers = [
            threading.Thread(target=self._read, args=(arena, allocator), name=f"reader-{number}")
            for number in range(self._jobs)
        ]
        try:
            with deferred():  # every started thread is waited for below
                for reader in readers:
                    reader.start()
            running = len(readers)
            with persistent() as check:
                while running:
                    item = self._results.get()
                    if isinstance(item, BaseException):
                        raise item
                    if item is None:
                        running -= 1
                    else:
                        yield item[0]
                        check()
        finally:
            with deferred():  # readers finish their tasks, so their memory must stay
                self._stopped.set()
                allocator.cancel()
                while any(reader.is_alive() for reader in readers):
                    with suppress(queue.Empty):  # a reader may wait for room in the queue
                        self._results.get(timeout=0.01)
                for store in attached:
                    store.detach()
                if self._arena is None:
                    arena.close()

    def _read(self, arena: Arena, allocator: SlabAllocator) -> None:
        end: BaseException | None = None
        try:
            while (taken := self._take()) is not None:
                upcoming, fresh = taken
                try:
                    self._announce(fresh, but=upcoming)
                    result = self._one(upcoming, arena, allocator)
                finally:
                    self._end(upcoming)
                self._results.put((result,))
        except ReservationCancelledError:
            pass
        except BaseException as error:
            end = error
        self._results.put(end)

    def _take(self) -> tuple[_Upcoming, list[_Upcoming]] | None:
        """Begin the next task when it is due; return it and the newly drawn tasks to announce."""
        with self._next:
            self._next.wait_for(self._is_due)
            if self._stopped.is_set():
                return None
            fresh = self._look_ahead()
            if not self._ahead:
                return None
            if self._deadline is not None and time.monotonic() > self._deadline:
                self.complete = False
                return None
            taken = self._ahead.popleft()
            self._ahead_bytes -= taken.task.nbytes
            self._at_work.add(taken.number)
            return taken, fresh

    def _is_due(self) -> bool:
        """Return whether the next task may begin, or none will."""
        if self._most_at_once is None or not self._at_work or self._stopped.is_set():
            return True
        begun = self._drawn - len(self._ahead)
        return begun - min(self._at_work) < self._most_at_once

    def _end(self, upcoming: _Upcoming) -> None:
        with self._next:
            self._at_work.remove(upcoming.number)
            self._next.notify_all()

    def _announce(self, fresh: list[_Upcoming], *, but: _Upcoming) -> None:
        for upcoming in fresh:
            if self._announces is not None and upcoming is not but:
                upcoming.named = self._named(upcoming.task.rows)
                self._announces.expect(upcoming.named, upcoming.task.capacities)

    def _look_ahead(self) -> list[_Upcoming]:
        """Draw upcoming tasks; return those to announce."""
        fresh = []
        while not self._ahead or self._ahead_bytes < _AHEAD_BYTES:
            task = next(self._tasks, None)
            if task is None:
                break
            self._ahead.append(_Upcoming(task, self._drawn))
            self._drawn += 1
            self._ahead_bytes += task.nbytes
            if self._announces is None:
                break
            if int(task.capacities.max(initial=0)) < self._announces.announced_bytes:
                break
            fresh.append(self._ahead[-1])
        return fresh

    def _named(self, rows: IntArray) -> pa.Table:
        """Return the objects of rows; consecutive rows need no copy."""
        if len(rows) and rows[-1] - rows[0] + 1 == len(rows) and (np.diff(rows) == 1).all():
            return self._objects.slice(int(rows[0]), len(rows))
        return self._objects.take(rows)

    def _one(self, upcoming: _Upcoming, arena: Arena, allocator: SlabAllocator) -> T:
        task, named = upcoming.task, upcoming.named  # another thread may set `named` now
        offsets, nbytes = place(task.capacities)
        name = task.name or f"a task of {len(task.rows)} objects"
        slab = allocator.reserve(max(nbytes + task.room, 1), name=name)
        try:
            offsets = np.asarray(offsets) + slab.offset
            self._keep_pace(task.nbytes)
            if named is None:
                named = self._named(task.rows)
            with self._reading:
                read = self._read_call(named, offsets, task.capacities, identify=self._identify)
            return self._work(Loaded(task, arena, offsets, slab.offset + nbytes, read))
        finally:
            slab.release()

    def _keep_pace(self, nbytes: int) -> None:
        """Wait for the turn of a read; end the reader if the deadline comes first."""
        if self._pace is None or self._pace.wait(nbytes, self._stopped, deadline=self._deadline):
            return
        self.complete = False
        raise ReservationCancelledError


def batches(
    rows: IntArray, capacities: IntArray, *, most_objects: int, most_bytes: int
) -> Iterator[Task]:
    """Yield tasks of consecutive rows; only a single object may exceed the limits."""
    if not len(rows):
        return
    ends = np.cumsum(capacities)
    start = 0
    while start < len(rows):
        before = ends[start - 1] if start else 0
        end = int(np.searchsorted(ends, before + most_bytes, side="right"))
        end = min(max(end, start + 1), start + most_objects, len(rows))
        yield Task(rows[start:end], capacities[start:end])
        start = end
