"""Find, while a command runs, how many calls a store's file system should get at once.

A call on a local file takes processor time. More threads than processors only compete for the
processors and for Python's lock. A call on a network file system waits, and many calls can wait at
once. So the number of calls at once starts at one. It doubles while calls wait and a doubling
raises the number of items per second. It halves if a halving hardly lowers that number.

A thread takes several items together, as a slice. After some slices, the number of calls at once is
judged. A changed number is on trial until the next judgement.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, ParamSpec, TypeVar, cast

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
    from concurrent.futures import ThreadPoolExecutor

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")

MOST_CALLS = 256

# Intended time of a slice. It is long compared with the bookkeeping of a slice, and short compared
# with a run.
_SLICE_SECONDS = 0.005
# Added to the intended time of a slice for each further call at once. Threads need Python's lock
# between slices. Longer slices keep many threads from waiting for the lock.
_TURN_SECONDS = 0.001
# Least time of a slice if calls do not wait, because handing a slice to a thread takes longer than
# some of these calls.
_LONGER_SECONDS = 0.02
# Items in the first slice of a kind of call, while the time of an item is unknown.
_FIRST_ITEMS = 4
# A number of calls at once is judged after at least this many slices and seconds.
_JUDGED_SLICES = 8
_JUDGED_SECONDS = 0.02
# A doubling stays if the items per second grow by the factor _GAIN. A halving stays if at least the
# share _LOSS of the items per second is left.
_GAIN, _LOSS = 1.15, 0.95
# Calls are taken to wait if they use less than this share of the processors' time.
_BUSY = 0.7
# If an item takes longer than this, its call waits for something other than a processor.
_WAIT_SECONDS = 0.0001
# Most judgements after a failed trial that begin no new trial. Each failed trial doubles the number
# of such judgements. The number is small after the first failed trials, because something else may
# have disturbed them.
_MOST_REST = 32
# Most pending slices of a stream for each of its calls at once. This limits how far threads work
# ahead of the reader.
_AHEAD = 4


@dataclass(slots=True)
class _Sums:
    """Sums over the slices since the last judgement.

    items: items done.
    slices: slices done.
    wall: seconds, summed over the slices.
    cpu: seconds of processor time, summed over the slices.
    beside: seconds of each slice times the number of slices at once, summed over the slices.
    """

    items: int = 0
    slices: int = 0
    wall: float = 0.0
    cpu: float = 0.0
    beside: float = 0.0

    @property
    def at_once(self) -> float:
        """Mean number of slices at once."""
        return self.beside / self.wall

    @property
    def rate(self) -> float:
        """Items per second of all threads, by Little's law."""
        return self.at_once * self.items / self.wall

    def waits(self, processors: float) -> bool:
        """Return whether the calls leave much of the time of `processors` processors unused."""
        return self.at_once * self.cpu < _BUSY * self.wall * processors


@dataclass(slots=True)
class _Calls:
    """Calls of one kind, and the number of them that the file system gets at once.

    level: how many calls at once are allowed at present.
    unlocked: whether the calls spend most of their processor time without Python's lock.
    active: number of threads that make calls of this kind, or have a turn (`Concurrency.turn`) to
        make one.
    item_seconds: mean seconds for an item in the last slices; 0 before the first slice.
    """

    level: int
    unlocked: bool
    active: int = 0
    item_seconds: float = 0.0
    _sums: _Sums = field(default_factory=_Sums)
    _tried: tuple[int, float] | None = None  # level and rate before the change on trial
    _failed: int = 0  # failed trials since the last trial that succeeded
    _rest: int = 0  # judgements until the next trial
    _shrinks: bool = False  # the next trial is a halving

    @property
    def waits(self) -> bool:
        """Whether the calls made so far waited for something other than a processor."""
        return self.item_seconds > _WAIT_SECONDS

    def slice_items(self, least: int) -> int:
        """Return the number of items in the next slice."""
        if not self.item_seconds:
            return max(least, _FIRST_ITEMS)
        seconds = _SLICE_SECONDS + _TURN_SECONDS * (self.level - 1)
        if not self.waits:
            seconds = max(seconds, _LONGER_SECONDS)
        return max(least, int(seconds / self.item_seconds))

    def note(
        self, items: int, wall: float, cpu: float, *, most: int, processors: float | None
    ) -> None:
        """Add a slice to the sums. After enough slices, judge the level, which may change it.

        most: the highest level.
        processors: number of processors for the calls; None if the level is fixed.
        """
        # Other processes may keep the processors busy, so a call that does not wait is measured by
        # its processor time.
        seconds = max((wall if wall > _WAIT_SECONDS * items else cpu) / items, 1e-9)
        known = self.item_seconds or seconds
        # First calls take longer than later calls, so the mean falls faster than it rises.
        self.item_seconds = known + (0.25 if seconds > known else 0.75) * (seconds - known)
        sums = self._sums
        sums.items += items
        sums.slices += 1
        sums.wall += wall
        sums.cpu += cpu
        sums.beside += wall * self.active
        enough = max(_JUDGED_SLICES, 2 * self.level)
        if processors is None or sums.slices < enough:
            return
        if sums.wall >= _JUDGED_SECONDS * sums.at_once:
            self._judge(sums, most, processors)
            self._sums = _Sums()

    def _judge(self, sums: _Sums, most: int, processors: float) -> None:
        """End the running trial, if there is one, and begin the next trial, if it is due."""
        if self._tried is not None:
            level, rate = self._tried
            grew, self._tried = self.level > level, None
            if sums.rate < rate * (_GAIN if grew else _LOSS):
                self.level = level
                self._fail(shrinks=grew)
                return
            self._failed, self._shrinks = 0, not grew
        elif self._rest:
            self._rest -= 1
            return
        if self._shrinks:
            wanted = self.level // 2
        elif sums.waits(processors if self.unlocked else min(1.0, processors)):
            wanted = 2 * max(self.level, round(sums.at_once))
        else:
            wanted = self.level
        wanted = max(1, min(wanted, most))
        if wanted == self.level:
            self._fail(shrinks=not self._shrinks)
        else:
            self._tried, self.level = (self.level, sums.rate), wanted

    def _fail(self, *, shrinks: bool) -> None:
        """Let some judgements begin no trial. shrinks: the trial after them is a halving."""
        self._failed += 1
        self._rest, self._shrinks = min(2**self._failed, _MOST_REST), shrinks


@dataclass(slots=True)
class _Run:
    """The slices of one call of `Concurrency.each`.

    next: the first item that no thread has taken.
    helpers: threads besides the caller's that work on a slice.
    error: the first error of a slice.
    """

    work: Callable[[int, int], object]
    count: int
    least: int
    next: int = 0
    helpers: int = 0
    error: BaseException | None = None

    def slice_items(self, calls: _Calls) -> int:
        """Return the number of items in the next slice, which leaves other threads their share."""
        fair = -(-(self.count - self.next) // max(1, calls.level))
        return max(self.least, min(fair, calls.slice_items(1)))


@dataclass(slots=True)
class _Part(Generic[S, T]):
    """A slice of a stream, and its result.

    begun: whether a thread has taken the slice, or no thread may take it any more.
    done: whether the slice has a result or an error.
    """

    items: Sequence[S]
    begun: bool = False
    done: bool = False
    result: T | None = None
    error: BaseException | None = None


class _Thread(threading.local):
    """State of the running thread.

    turn: whether the thread has a turn, the right to make one call at a time.
    """

    turn = False


class Concurrency:
    """The threads that call one store's file system, and how many of them call at once.

    Each kind of call has a name and its own best number of calls at once. Several threads may use
    one instance. A forked child starts its own threads.
    """

    def __init__(self, jobs: int | None = None) -> None:
        """jobs: number of calls at once, of all kinds together. None finds it while calls run."""
        self._fixed = jobs is not None
        self._most = jobs or MOST_CALLS
        self._last = jobs or 1  # the level found last, with which a new kind starts
        self._kinds: dict[str, _Calls] = {}
        self._turns: int  # threads that have a turn
        self._waiting: int  # threads that wait for a turn
        self._thread = _Thread()
        self._processors = float(len(os.sched_getaffinity(0)))
        self._begin_process()
        _all.add(self)

    def _begin_process(self) -> None:
        """Begin without threads. A forked child drops its parent's threads, locks and turns."""
        # A signal handler may raise in Condition.__enter__ while the lock is held. Entering a lock
        # itself leaves no such moment, so `with` takes the lock, and the condition only waits.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._pool: ThreadPoolExecutor | None = None
        self._turns, self._waiting = int(self._thread.turn), 0
        for calls in self._kinds.values():
            calls.active = 0

    @property
    def jobs(self) -> int | None:
        """The fixed number of calls at once; None if it is found while calls run."""
        return self._most if self._fixed else None

    def limit(self, jobs: int) -> None:
        """Fix the number of calls at once, of all kinds together. Do so before the first call."""
        self._fixed, self._most, self._last = True, jobs, jobs

    def share(self, processes: int) -> None:
        """Reduce the calls at once and the processors to the share of this forked process.

        processes: number of processes that share the calls and the processors.
        """
        with self._lock:
            self._processors /= processes
            self._most = max(1, self._most // processes)
            self._last = max(1, self._last // processes)
            for calls in self._kinds.values():
                calls.level = max(1, calls.level // processes)

    def level(self, kind: str) -> int:
        """Return the number of calls of a kind at once, as found so far."""
        with self._lock:
            return self._kinds[kind].level if kind in self._kinds else self._last

    def highest(self) -> int:
        """Return the highest number of calls of one kind at once, as found so far.

        Kinds whose calls do not wait are left out, because a trial may have given them more
        threads.
        """
        with self._lock:
            return max((calls.level for calls in self._kinds.values() if calls.waits), default=1)

    def waits(self, kind: str) -> bool:
        """Return whether the calls of a kind so far waited for something other than a processor."""
        with self._lock:
            return kind in self._kinds and self._kinds[kind].waits

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Wait for a turn, the right to make one call at a time during the block.

        `each` within the block needs no further turn for this thread.
        """
        if self._thread.turn:
            yield
            return
        try:
            with self._lock:
                self._wait_for(lambda: self._turns < self._most)
                self._turns, self._thread.turn = self._turns + 1, True
            yield
        finally:
            with self._lock:
                if self._thread.turn:  # False if a signal ended the wait
                    self._turns, self._thread.turn = self._turns - 1, False
                self._changed.notify_all()

    def each(
        self,
        kind: str,
        work: Callable[[int, int], object],
        count: int,
        *,
        least: int = 1,
        unlocked: bool = False,
    ) -> None:
        """Do `work` for slices of range(count), several at once. The calling thread works, too.

        work: takes start and stop of a slice.
        least: minimum items of a slice; the last slice may have fewer.
        unlocked: whether calls of this kind run mostly without Python's lock, so that several calls
            can use several processors.
        Raises the first error of a slice, once all slices that have begun are done.
        """
        calls, run = self._calls(kind, unlocked=unlocked), _Run(work, count, least)
        try:
            with self.turn(), self._active(calls):
                while (part := self._take(calls, run)) is not None:
                    self._recruit(calls, run)
                    self._do(calls, run, *part)
        finally:
            self._end(run)
        if run.error is not None:
            raise run.error

    def stream(
        self,
        kind: str,
        work: Callable[[Sequence[S]], T],
        lists: Iterable[Sequence[S]],
        *,
        least: int = 1,
        unlocked: bool = False,
    ) -> Generator[T, None, None]:
        """Yield the results of `work` for slices of lists, in order. Other threads work ahead.

        lists: lists of items. Their iterator may call the file system, so one turn stays free for
            it.
        least: minimum items of a slice; the last slice of a list may have fewer.
        unlocked: see `each`.
        Raises the error of a slice in place of its result.
        """
        calls = self._calls(kind, unlocked=unlocked)
        if self._most == 1 or self._thread.turn:
            yield from map(work, filter(len, lists))
            return
        pending: deque[_Part[S, T]] = deque()
        try:
            for items in lists:
                start = 0
                while start < len(items):
                    while not self._may_begin(calls, pending):
                        yield self._result(pending.popleft())
                    part = _Part[S, T](items[start : start + calls.slice_items(least)])
                    pending.append(part)
                    if not self._started(self._do_part, calls, work, part):
                        self._give_back(calls, 0)
                        self._do_part(calls, work, part)
                    start += len(part.items)
            while pending:
                yield self._result(pending.popleft())
        finally:
            with self._lock:
                for part in pending:
                    if not part.begun:
                        part.begun = part.done = True
                        calls.active -= 1
                        self._turns -= 1
                self._changed.notify_all()
                self._changed.wait_for(lambda: all(part.done for part in pending))

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()
        self._pool = None

    def _calls(self, kind: str, *, unlocked: bool) -> _Calls:
        with self._lock:
            if kind not in self._kinds:
                # A level up to the number of processors does not show that calls wait. Calls that
                # hold Python's lock would only compete for the lock, so their level starts at one.
                few = not (unlocked or self._fixed) and self._last <= self._processors
                self._kinds[kind] = _Calls(1 if few else self._last, unlocked)
            return self._kinds[kind]

    def _threads(self) -> ThreadPoolExecutor:
        # Imported late, because every command imports this module.
        from concurrent.futures import ThreadPoolExecutor

        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(
                    self._most, "hicachectl-call", initializer=self._begin_thread
                )
            return self._pool

    def _begin_thread(self) -> None:
        self._thread.turn = True  # `_started` gets each task together with a turn

    def _started(self, work: Callable[P, object], *given: P.args, **named: P.kwargs) -> bool:
        """Give work, and a turn for it, to another thread. Return False if no thread can start."""
        taken = False

        def is_first() -> bool:
            nonlocal taken
            with self._lock:
                first, taken = not taken, True
            return first

        def task() -> None:
            if is_first():
                work(*given, **named)

        try:
            self._threads().submit(task)
        except RuntimeError:
            # The system starts no further thread. An earlier thread may already have the task.
            return not is_first()
        return True

    def _give_back(self, calls: _Calls, turns: int) -> None:
        """Give back turns that got no thread, and limit the turns to the present number."""
        with self._lock:
            calls.active -= turns
            self._turns -= turns
            self._most = max(2, self._turns)
            self._changed.notify_all()

    @contextmanager
    def _active(self, calls: _Calls) -> Iterator[None]:
        with self._lock:
            calls.active += 1
        try:
            yield
        finally:
            with self._lock:
                calls.active -= 1
                self._changed.notify_all()

    def _wait_for(self, may_call: Callable[[], bool]) -> None:
        """Wait until `may_call` is true. Meanwhile, threads that help other runs give up turns."""
        self._waiting += 1
        try:
            self._changed.wait_for(may_call)
        finally:
            self._waiting -= 1

    def _may_begin(self, calls: _Calls, pending: deque[_Part[S, T]]) -> bool:
        """Wait until a slice of a stream may begin, or until the first pending slice is done.

        If the first pending slice is done, return False. Else give the new slice a turn, and return
        True.
        """

        def is_done() -> bool:
            return bool(pending) and pending[0].done

        def may_begin() -> bool:
            few = calls.active < calls.level and len(pending) < _AHEAD * calls.level
            return few and self._turns < self._most - 1

        with self._lock:
            (self._changed.wait_for if pending else self._wait_for)(
                lambda: is_done() or may_begin()
            )
            if is_done() or not may_begin():
                return False
            calls.active += 1
            self._turns += 1
            return True

    def _do_part(self, calls: _Calls, work: Callable[[Sequence[S]], T], part: _Part[S, T]) -> None:
        """Do a slice of a stream, unless a thread has begun it."""
        with self._lock:
            if part.begun:
                return
            part.begun = True
        began, cpu = time.monotonic(), time.thread_time()
        try:
            part.result = work(part.items)
        except BaseException as error:
            part.error = error
            if not isinstance(error, Exception):  # a signal handler has raised it
                raise
        else:
            self._note(calls, len(part.items), began, cpu)
        finally:
            with self._lock:
                part.done = True
                calls.active -= 1
                self._turns -= 1
                self._changed.notify_all()

    def _result(self, part: _Part[S, T]) -> T:
        """Wait for a slice, and return its result. Raises the error of the slice."""
        with self._lock:
            self._changed.wait_for(lambda: part.done)
        if part.error is not None:
            raise part.error
        return cast("T", part.result)

    def _take(self, calls: _Calls, run: _Run) -> tuple[int, int] | None:
        """Return the next slice of a run; None if no items are left."""
        with self._lock:
            start = run.next
            if start >= run.count:
                return None
            run.next = min(run.count, start + run.slice_items(calls))
            return start, run.next

    def _recruit(self, calls: _Calls, run: _Run) -> None:
        """Let other threads work on a run, as many as the limits allow and the slices need."""
        with self._lock:
            left = -(-(run.count - run.next) // run.slice_items(calls))
            wanted = min(calls.level - calls.active, left, self._most - self._turns)
            if wanted <= 0 or self._waiting:
                return
            calls.active += wanted
            self._turns += wanted
        begun = 0
        try:
            while begun < wanted and self._started(self._help, calls, run):
                begun += 1
        finally:  # needed if a signal handler raises an exception, too
            if begun < wanted:
                self._give_back(calls, wanted - begun)

    def _help(self, calls: _Calls, run: _Run) -> None:
        with self._lock:
            run.helpers += 1
        try:
            while self._may_go_on(calls) and (part := self._take(calls, run)) is not None:
                self._do(calls, run, *part)
        finally:
            with self._lock:
                run.helpers -= 1
                calls.active -= 1
                self._turns -= 1
                self._changed.notify_all()

    def _end(self, run: _Run) -> None:
        """Wait for the slices that have begun, and let no other slice begin.

        An interrupt of the wait is raised after the wait, so that no helper runs while the
        caller cleans up.
        """
        interrupt: BaseException | None = None
        while run.next < run.count or run.helpers:
            try:
                with self._lock:
                    run.next = run.count
                    self._changed.wait_for(lambda: not run.helpers)
            except BaseException as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt

    def _may_go_on(self, calls: _Calls) -> bool:
        return calls.active <= calls.level and not self._waiting

    def _do(self, calls: _Calls, run: _Run, start: int, stop: int) -> None:
        """Do a slice of a run. An error lets no further slice of the run begin."""
        began, cpu = time.monotonic(), time.thread_time()
        try:
            run.work(start, stop)
        except BaseException as error:
            with self._lock:
                run.error = run.error or error
                run.next = run.count
            if not isinstance(error, Exception):  # a signal handler has raised it
                raise
        else:
            self._note(calls, stop - start, began, cpu)

    def _note(self, calls: _Calls, items: int, began: float, cpu: float) -> None:
        wall, cpu = time.monotonic() - began, time.thread_time() - cpu
        with self._lock:
            processors = None if self._fixed else self._processors
            calls.note(items, wall, cpu, most=self._most, processors=processors)
            self._last = calls.level


_all: weakref.WeakSet[Concurrency] = weakref.WeakSet()


def _begin_process() -> None:
    for concurrency in _all:
        concurrency._begin_process()


os.register_at_fork(after_in_child=_begin_process)
