"""Read and work on the objects of a store in bounded memory.

Reader threads take tasks in order. Each thread reserves a slab of the arena for a whole task, and
reads the task with one call of the store. Then the thread works on the objects in place, and
releases the slab. The arena bounds the memory for any size of store. Readers wait while no memory
is free, and while too many results wait to be taken.
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
from hicachectl.backends.base import batch_spans
from hicachectl.backends.capabilities import ReadsAhead, Spreads
from hicachectl.formats.errors import UsageError
from hicachectl.io.interrupts import deferred, persistent
from hicachectl.io.reads import ObjectReads

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator

    import numpy.typing as npt
    import pyarrow as pa

    from hicachectl.backends.base import ReadResult, Store
    from hicachectl.formats.arrays import BoolArray, IntArray
    from hicachectl.io.reads import ReadingProcesses


class Pace:
    """Limit on the average bytes per second.

    The first bytes pass at once. Idle time does not allow more bytes later.
    """

    def __init__(
        self, bytes_per_second: int, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Set the limit. Raises UsageError for less than 1 byte per second.

        clock: function that returns the present time in seconds.
        """
        if bytes_per_second < 1:
            raise UsageError(f"bytes_per_second: must be at least 1, but is {bytes_per_second}")
        self._rate = bytes_per_second
        self._clock = clock
        self._lock = threading.Lock()
        self._free_at = clock()

    def seconds(self, nbytes: int) -> float:
        """Return the seconds that some bytes take."""
        return nbytes / self._rate

    def wait(self, nbytes: int, stopped: threading.Event, *, deadline: float | None = None) -> bool:
        """Wait until `nbytes` may pass. Return False if stopped, or if the deadline comes first.

        deadline: time by `clock`.
        """
        with self._lock:
            now = self._clock()
            begin = max(now, self._free_at)
            self._free_at = begin + self.seconds(nbytes)
        in_time = deadline is None or begin <= deadline
        until = begin if in_time or deadline is None else deadline
        return not stopped.wait(max(0.0, until - now)) and in_time


DEFAULT_BUFFER_BYTES = 1 << 30
_QUEUED_RESULTS = 64  # most results that wait to be taken
# Bytes announced to a store in advance. They keep a disk busy while the readers work.
_AHEAD_BYTES = 64 << 20
# Tasks per job that may begin before an earlier task ends. Few, because objects that later tasks
# wrote are of less use if the earlier task fails.
_TURNS_AHEAD = 2

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """Objects that must be in memory together, or are only digested.

    rows: [n] int64, rows of the object table.
    capacities: [n] int64, bytes of each object.
    room: bytes of the arena that the work needs after the bytes of the objects.
    name: name of the task in messages.
    digested: [n] bool, objects that a `Digesting` store digests while it reads them; None for a
        task whose objects must be in memory. With `digested`, no object is in memory as a whole.
    """

    rows: IntArray
    capacities: IntArray
    room: int = 0
    name: str = ""
    digested: BoolArray | None = None

    @property
    def nbytes(self) -> int:
        """Bytes to read from the store."""
        return int(self.capacities.sum())


@dataclass(slots=True, eq=False)
class _Upcoming:
    """A task and its number."""

    task: Task
    number: int


@dataclass(slots=True, eq=False)
class Loaded:
    """A task after its read. The read may have failed for some objects.

    offsets: [n] int64, place of each object in the arena, aligned to 4 KiB. The steps between
        offsets are equal if the capacities are equal.
    room: offset of the task's room in the arena, aligned to 4 KiB.
    read: status of each object.
    digests: [n, 32] uint8 for a task with `digested`, whose objects are not in memory; else None.
    """

    task: Task
    arena: Arena
    offsets: IntArray
    room: int
    read: ReadResult
    digests: npt.NDArray[np.uint8] | None = None

    def view(self, index: int) -> npt.NDArray[np.uint8]:
        """Return the bytes of one object, without a copy."""
        return self.arena.view(int(self.offsets[index]), int(self.task.capacities[index]))

    def contents(self, chosen: IntArray) -> Iterator[memoryview]:
        """Yield the chosen objects without a copy, as memoryviews.

        Memoryviews are faster to create than arrays.
        """
        memory = self.arena.memory
        starts = self.offsets[chosen]
        ends = starts + self.task.capacities[chosen]
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            yield memory[start:end]

    def block(self) -> npt.NDArray[np.uint8]:
        """Return all objects without a copy: [n, nbytes], strided. Capacities must be equal."""
        nbytes = int(self.task.capacities[0])
        step = int(self.offsets[1] - self.offsets[0]) if len(self.offsets) > 1 else nbytes
        first = self.arena.view(int(self.offsets[0]), step * (len(self.offsets) - 1) + nbytes)
        return np.lib.stride_tricks.as_strided(
            first, shape=(len(self.offsets), nbytes), strides=(step, 1), writeable=False
        )


class Pipeline(Generic[T]):
    """Results of a function over tasks, in order of completion. Iterate only once.

    Iterating raises the first error of a reader, such as a lost store or a task larger than the
    buffer. If the iteration ends early (`close`, an exception), the readers end after their current
    tasks.
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
        processes: ReadingProcesses | None = None,
        waiting: int = 0,
    ) -> None:
        """Prepare the run. Iteration starts the readers.

        objects: columns of a scan. The rows of tasks are indices into this table.
        work: function that reader threads call for each task that was read. It returns the result
            of the task.
        jobs: number of reader threads; None for a number that suits the store.
        deadline: `time.monotonic()` after which no task begins.
        identify: whether to read the versions of objects, too.
        confirm: whether to read with `Confirm.read_confirmed`, if the store has it.
        destination: store that the work writes to, from the same memory. A task then waits until
            tasks far before it have ended.
        processes: processes that do the reads. Their shared arena, of buffer_bytes, takes the place
            of the pipeline's arena.
        waiting: number of further threads, for work that mostly waits.
        """
        self.complete = True  # after the iteration: whether every task began
        self._store = store
        self._processes = processes
        self._object_reads = ObjectReads(store, objects)
        self._reads = processes or self._object_reads
        self._tasks = iter(tasks)
        self._ahead: deque[_Upcoming] = deque()  # tasks taken from the iterator, but not begun
        self._ahead_bytes = 0
        self._drawn = 0
        self._at_work: set[int] = set()  # numbers of tasks that have begun, but not ended
        self._next = threading.Condition()
        self._work = work
        self._announces = store if isinstance(store, ReadsAhead) else None
        few = min(store.limits.parallel_reads, len(os.sched_getaffinity(0)))
        if processes is not None:
            jobs = processes.count
        elif destination is None and isinstance(store, Spreads):
            jobs = min(few, jobs or few)  # the store spreads each call over threads of its own
        self._jobs = (jobs or few) + waiting
        # Jobs that also write do not read all the time. So there may be more jobs than reads at
        # once, and only the reads are limited.
        readers = self._jobs if destination is None else store.limits.parallel_reads
        self._most_at_once = None if destination is None else _TURNS_AHEAD * self._jobs
        self._reading = threading.BoundedSemaphore(max(1, readers))
        self._buffer_bytes = buffer_bytes
        self._deadline = deadline
        self._pace = pace
        self._identify = identify
        self._confirm = confirm
        self._stores = (store,) if destination is None else (store, destination)
        self._stopped = threading.Event()
        self._results: queue.Queue[tuple[T] | BaseException | None] = queue.Queue(_QUEUED_RESULTS)

    def __iter__(self) -> Generator[T, None, None]:
        named = any(store.limits.named_arena for store in self._stores)
        shared = None if self._processes is None else self._processes.arena
        arena = shared or Arena(self._buffer_bytes, named=named)
        allocator = SlabAllocator(arena.nbytes)
        for store in self._stores:
            store.attach(arena)
        readers = [
            threading.Thread(target=self._read, args=(arena, allocator), name=f"reader-{number}")
            for number in range(self._jobs)
        ]
        try:
            with deferred():  # every started thread is joined below
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
            with deferred():  # the arena must outlive the readers, which finish their tasks
                self._stopped.set()
                allocator.cancel()
                while any(reader.is_alive() for reader in readers):
                    with suppress(queue.Empty):  # a reader may wait for room in the queue
                        self._results.get(timeout=0.01)
                for store in self._stores:
                    store.detach()
                if shared is None:
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
        """Wait until the next task may begin. Return this task and the tasks to announce.

        Return None if no more tasks may begin.
        """
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
        """Return whether the next task may begin, or the run has stopped."""
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
            if upcoming is not but:
                self._reads.expect(upcoming.task.rows, upcoming.task.capacities)

    def _look_ahead(self) -> list[_Upcoming]:
        """Take tasks from the iterator in advance. Return the tasks to announce."""
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

    def _one(self, upcoming: _Upcoming, arena: Arena, allocator: SlabAllocator) -> T:
        task = upcoming.task
        if task.digested is not None:
            return self._digest(task, task.digested, arena)
        offsets, nbytes = place(task.capacities)
        name = task.name or f"a task (objects: {len(task.rows)})"
        slab = allocator.reserve(max(nbytes + task.room, 1), name=name)
        try:
            offsets = np.asarray(offsets) + slab.offset
            self._keep_pace(task.nbytes)
            with self._reading:
                read = self._reads.read(
                    task.rows,
                    offsets,
                    task.capacities,
                    identify=self._identify,
                    confirm=self._confirm,
                )
            return self._work(Loaded(task, arena, offsets, slab.offset + nbytes, read))
        finally:
            slab.release()

    def _digest(self, task: Task, wanted: BoolArray, arena: Arena) -> T:
        self._keep_pace(task.nbytes)
        with self._reading:
            read, digests = self._object_reads.digest(task.rows, task.capacities, wanted)
        nowhere = np.zeros(0, dtype=np.int64)
        return self._work(Loaded(task, arena, nowhere, 0, read, digests))

    def _keep_pace(self, nbytes: int) -> None:
        """Wait until a read may begin. End the reader if the deadline comes first."""
        if self._pace is None or self._pace.wait(nbytes, self._stopped, deadline=self._deadline):
            return
        self.complete = False
        raise ReservationCancelledError  # ends the reader without an error; see `_read`


def batches(
    rows: IntArray, capacities: IntArray, *, most_objects: int, most_bytes: int
) -> Iterator[Task]:
    """Yield tasks of consecutive rows. An object larger than `most_bytes` is a task of its own."""
    for span in batch_spans(capacities, most_bytes, most_objects):
        yield Task(rows[span], capacities[span])
