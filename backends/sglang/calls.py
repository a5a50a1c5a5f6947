"""Run SGLang's calls in worker threads, each with a deadline.

SGLang frees and reuses host pages after a call returns. It waits at most 10 s for its storage
threads to end (cache_controller.py :: _stop_storage_threads). So a call ends at its deadline,
whatever the store does. A worker that the store delays beyond the deadline must not touch the host
pool.
"""

from __future__ import annotations

import ctypes
import threading
import time
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Self, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

Result = TypeVar("Result")

_MOST_HUNG = 4  # calls fail at once if more threads hang than this multiple of `threads`
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0


class Ended(Exception):
    """Raised in a worker whose call has ended, so that it does not touch the host pool."""


class Call:
    """One call of SGLang.

    deadline: value of time.monotonic() at which the call ends.
    """

    def __init__(self, seconds: float) -> None:
        self.deadline = time.monotonic() + seconds
        self.ended = False
        self._holders: list[None] = []  # an item for each `hold`, until its `let_go`
        self._left: SimpleQueue[None] = SimpleQueue()  # an item for each `let_go` after `end`

    @property
    def seconds_left(self) -> float:
        """Return the seconds until the deadline, at least 0."""
        return max(0.0, self.deadline - time.monotonic())

    def check(self) -> None:
        """Raise Ended after the end of the call, or after its deadline."""
        if self.ended or time.monotonic() >= self.deadline:
            raise Ended

    def hold(self) -> None:
        """Keep the call from ending until `let_go`, for work on host memory that cannot hang.

        Raises Ended.
        """
        # No lock is needed. A holder registers, and then looks at `ended`. `end` sets `ended`, and
        # then looks for holders. So at least one of the two sees the other.
        self._holders.append(None)
        if self.ended or time.monotonic() >= self.deadline:
            self.let_go()
            raise Ended

    def let_go(self) -> None:
        """End a `hold`."""
        self._holders.pop()
        if self.ended:
            self._left.put(None)

    def copy(self, source: int, pieces: Iterable[tuple[int, int]]) -> None:
        """Copy consecutive bytes of our memory to pieces of the host pool, in order.

        source: address of the first byte.
        pieces: target address and number of bytes of each piece.
        Raises Ended if the call has ended, and then copies nothing.
        """
        self.hold()
        try:
            for target, nbytes in pieces:
                ctypes.memmove(target, source, nbytes)
                source += nbytes
        finally:
            self.let_go()

    def end(self) -> None:
        """End the call. Wait for the threads that hold the call; later holds raise Ended."""
        self.ended = True
        while self._holders:
            self._left.get()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


class Workers:
    """Daemon threads that work for calls. A thread that hangs in the store is replaced.

    After a call that was not finished in time, calls fail at once during a pause, which doubles
    with every such call in a row. If too many threads hang, calls fail until enough of them have
    returned.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._name = name
        self._most = threads
        self._queue: SimpleQueue[_Task | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._running = 0  # threads that take new work
        self._hung = 0
        self._closed = False
        self._pause_s = 0.0
        self._paused_until = 0.0

    @property
    def paused(self) -> bool:
        """Whether calls fail at once now."""
        too_many = self._hung > _MOST_HUNG * self._most
        return self._closed or too_many or time.monotonic() < self._paused_until

    @property
    def hanging(self) -> bool:
        """Whether a thread is still busy with abandoned work."""
        return self._hung > 0

    def map(
        self, call: Call, function: Callable[..., Result], work: Sequence[tuple[object, ...]]
    ) -> list[Result | None]:
        """Return function(*arguments) for each item of work; None for an item not done in time.

        If an item was not done in time, `call` has ended. If `function` raises anything other than
        Ended, the first such exception is raised here, after all items have ended or the time is
        over.
        """
        results: list[Result | None] = [None] * len(work)
        if self.paused:
            call.end()
            return results
        done: SimpleQueue[None] = SimpleQueue()  # an item from each task that has ended
        tasks = [
            _Task(partial(function, *arguments), results, position, done)
            for position, arguments in enumerate(work)
        ]
        for task in tasks:
            self._queue.put(task)
        try:
            self._start(len(tasks))
        except RuntimeError:
            for task in tasks:
                task.abandon()
            raise
        try:
            for _ in tasks:
                done.get(timeout=call.seconds_left)
        except Empty:
            call.end()
            self._abandon(tasks)
        else:
            self._pause_s = 0.0
        errors = [task.error for task in tasks if task.error is not None]
        if errors:
            raise errors[0]
        return list(results)  # a copy, because abandoned workers may still change the list

    def close(self) -> None:
        """End the threads; a hanging thread ends when it returns. Later calls fail at once."""
        with self._lock:
            self._closed = True
            count, self._running = self._running, 0
        for _ in range(count):
            self._queue.put(None)

    def _start(self, tasks: int) -> None:
        """Start the missing threads. Raises RuntimeError if no thread runs and none can start."""
        with self._lock:
            missing = 0 if self._closed else min(tasks, self._most) - self._running
            for _ in range(missing):
                try:
                    threading.Thread(target=self._work, name=self._name, daemon=True).start()
                except RuntimeError:  # the system allows no more threads
                    if not self._running:
                        raise
                    return
                self._running += 1

    def _work(self) -> None:
        while (task := self._queue.get()) is not None:
            task.run()
            if task.hung and self._is_extra():
                return

    def _is_extra(self) -> bool:
        """Stop counting this thread as hanging. Return True if it was replaced, and must end."""
        with self._lock:
            self._hung -= 1
            extra = self._closed or self._running >= self._most
            self._running += not extra
            return extra

    def _abandon(self, tasks: Sequence[_Task]) -> None:
        """Replace the threads that hang, drop work that has not begun, and pause."""
        with self._lock:
            for task in tasks:
                if task.abandon():
                    self._hung += 1
                    self._running -= 1
            self._pause_s = min(max(_FIRST_PAUSE_S, 2 * self._pause_s), _LONGEST_PAUSE_S)
            self._paused_until = time.monotonic() + self._pause_s


class _Task:
    """One item of work. The queue `done` gets an item when the work has ended."""

    def __init__(
        self,
        function: Callable[[], object],
        results: list[Any],
        position: int,
        done: SimpleQueue[None],
    ) -> None:
        self._function = function
        self._results = results
        self._position = position
        self._done = done
        self._lock = threading.Lock()
        self._state = "waiting"  # then "running" and at last "ended", or else "dropped"
        self.hung = False
        self.error: Exception | None = None

    def run(self) -> None:
        with self._lock:
            if self._state != "waiting":
                return
            self._state = "running"
        try:
            self._results[self._position] = self._function()
        except Ended:
            pass
        except Exception as error:
            self.error = error
        with self._lock:
            self._state = "ended"
        self._done.put(None)

    def abandon(self) -> bool:
        """Drop the task unless it has begun. Return whether a thread still works on it."""
        with self._lock:
            self.hung = self._state == "running"
            if self._state == "waiting":
                self._state = "dropped"
            return self.hung
