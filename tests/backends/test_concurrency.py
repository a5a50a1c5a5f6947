"""Calls at once: every item once, in order, with errors; many where calls wait, few elsewhere."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from functools import partial
from itertools import islice
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicachectl.backends import concurrency as concurrency_module
from hicachectl.backends.concurrency import MOST_CALLS, Concurrency, _Calls
from hicachectl.formats.errors import StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import FrameType

WAIT = 0.002


class Calls:
    """Calls that wait, and the most of them that there were at once."""

    def __init__(self, seconds: float) -> None:
        self.most = 0
        self._seconds = seconds
        self.now = 0
        self._lock = threading.Lock()

    def __call__(self) -> bool:
        with self._lock:
            self.now += 1
            self.most = max(self.most, self.now)
        time.sleep(self._seconds)
        with self._lock:
            self.now -= 1
        return True


@pytest.fixture
def concurrency() -> Iterator[Concurrency]:
    one = Concurrency()
    yield one
    one.close()


@given(st.integers(0, 300), st.integers(1, 50), st.sampled_from([None, 1, 7]))
def test_each_item_is_done_once(count: int, least: int, jobs: int | None) -> None:
    """Slices of `each` cover the range, whatever its length and the number of calls."""
    done = [0] * count

    def work(start: int, stop: int) -> None:
        for index in range(start, stop):
            done[index] += 1

    one = Concurrency(jobs)
    one.each("call", work, count, least=least)
    one.close()
    assert done == [1] * count


@given(st.lists(st.lists(st.integers(), max_size=40), max_size=8), st.sampled_from([None, 1, 7]))
def test_a_stream_keeps_the_order(lists: list[list[int]], jobs: int | None) -> None:
    """The results of a stream, joined, are the items of the lists in order."""
    one = Concurrency(jobs)
    found = [item for part in one.stream("call", list, lists) for item in part]
    one.close()
    assert found == [item for items in lists for item in items]


@pytest.mark.parametrize("jobs", [1, 5])
def test_a_given_number_is_the_most_at_once(jobs: int | None) -> None:
    """With a number given, there are so many calls at once, and never more."""
    calls, one = Calls(WAIT), Concurrency(jobs)
    one.each("each", lambda start, stop: [calls() for _ in range(start, stop)], 100)
    list(one.stream("stream", lambda part: [calls() for _ in part], [range(50), range(50)]))
    one.close()
    assert calls.most == jobs


@pytest.mark.parametrize("way", ["each", "stream"])
def test_calls_that_wait_get_many_threads(concurrency: Concurrency, way: str) -> None:
    """Where calls wait, their number grows far beyond the processors."""
    calls = Calls(WAIT)
    if way == "each":
        concurrency.each(way, lambda start, stop: [calls() for _ in range(start, stop)], 5000)
    else:
        list(concurrency.stream(way, lambda part: [calls() for _ in part], [range(5000)]))
    assert 4 * len(os.sched_getaffinity(0)) < calls.most <= MOST_CALLS


def test_calls_that_use_the_processor_get_few() -> None:
    """Where calls take processor time, no threads join that would only compete for it."""
    calls, processors = _Calls(1, unlocked=True), 2
    for _ in range(1000):
        calls.active = calls.level
        items, cpu = calls.slice_items(1), 0.001
        wall = cpu * max(1.0, calls.level / processors)
        calls.note(items, items * wall, items * cpu, most=MOST_CALLS, processors=processors)
        assert calls.level <= 2 * processors


@pytest.mark.parametrize("jobs", [1, 8])
def test_an_error_ends_the_run_after_the_slices_that_began(jobs: int | None) -> None:
    """`each` raises the error of a slice once no slice runs any more, and begins no other one."""
    running, one = Calls(WAIT), Concurrency(jobs)
    begun: list[int] = []

    def work(start: int, stop: int) -> None:
        for index in range(start, stop):
            begun.append(index)
            if index == 20:
                raise StoreUnavailable("gone")
            running()

    with pytest.raises(StoreUnavailable, match="gone"):
        one.each("call", work, 100_000)
    one.close()
    assert running.now == 0
    assert len(begun) < 10_000


def test_a_stream_that_is_closed_ends_its_slices(concurrency: Concurrency) -> None:
    """A stream left early runs no slice after its close."""
    calls = Calls(WAIT)
    results = concurrency.stream("call", lambda part: [calls() for _ in part], [range(10_000)])
    next(results)
    results.close()
    assert calls.now == 0
    concurrency.each("call", lambda start, stop: None, 10)  # the threads still serve others


def test_a_stream_raises_in_its_turn(concurrency: Concurrency) -> None:
    """Results before a failed slice come first, then its error."""

    def work(part: Sequence[int]) -> list[int]:
        if 30 in part:
            raise StoreUnavailable("gone")
        return list(part)

    found: list[int] = []

    def take() -> None:
        for part in concurrency.stream("call", work, [range(10), range(10, 20), range(20, 40)]):
            found.extend(part)

    with pytest.raises(StoreUnavailable, match="gone"):
        take()
    assert found == list(range(len(found)))
    assert len(found) >= 20


def test_several_threads_share_the_number(concurrency: Concurrency) -> None:
    """Callers at the same time, and the threads that help them, stay within the number."""
    calls, one = Calls(WAIT), Concurrency(8)

    def call() -> None:
        one.each("call", lambda start, stop: [calls() for _ in range(start, stop)], 100)

    callers = [threading.Thread(target=call) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    one.close()
    assert 4 <= calls.most <= 8


@pytest.mark.parametrize("jobs", [1, 2, 6])
def test_all_kinds_together_stay_within_the_number(jobs: int) -> None:
    """Callers of several kinds at the same time, and a stream with its lists, share the number."""
    calls, one = Calls(WAIT), Concurrency(jobs)

    def lists() -> Iterator[range]:
        for _ in range(10):
            calls()
            yield range(10)

    def stream() -> None:
        for part in one.stream("stream", lambda part: [calls() for _ in part], lists()):
            assert all(part)

    def each(kind: str) -> None:
        one.each(kind, lambda start, stop: [calls() for _ in range(start, stop)], 100)

    callers = [threading.Thread(target=each, args=(kind,)) for kind in ("a", "b", "c")]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert calls.most == jobs
    calls.most = 0
    stream()
    one.close()
    assert jobs // 2 < calls.most <= jobs


@pytest.mark.parametrize("jobs", [1, 2])
def test_calls_within_calls_end(jobs: int) -> None:
    """Work that calls again goes on in its turn, where no other turn is free."""
    calls, one = Calls(0), Concurrency(jobs)

    def work(start: int, stop: int) -> None:
        for _ in range(start, stop):
            one.each("inner", lambda start, stop: [calls() for _ in range(start, stop)], 5)
            assert len(list(one.stream("parts", lambda part: [calls() for _ in part], [[1]]))) == 1

    one.each("outer", work, 20)
    one.close()
    assert calls.most <= jobs


def test_processes_share_the_number(concurrency: Concurrency) -> None:
    """A process that has a share of the calls makes so many at once, of old and new kinds."""
    calls, one = Calls(WAIT), Concurrency()
    one.limit(9)
    for kind in ("old", "new"):
        one.each(kind, lambda start, stop: [calls() for _ in range(start, stop)], 200)
        one.share(3)
        assert calls.most == (9 if kind == "old" else 3)
        calls.most = 0
    one.close()
    concurrency.each("call", lambda start, stop: time.sleep(WAIT * (stop - start)), 5000)
    found = concurrency.level("call")
    concurrency.share(2)
    assert concurrency.level("call") == max(1, found // 2)


@pytest.mark.parametrize(("processes", "level"), [(1, 2), (4, 1)])
def test_a_process_judges_by_its_share_of_the_processors(
    monkeypatch: pytest.MonkeyPatch, processes: int, level: int
) -> None:
    """Calls that take 0.4 of a processor wait, unless each process has half a processor."""
    now, used = [0.0], [0.0]
    clocks = SimpleNamespace(monotonic=lambda: now[0], thread_time=lambda: used[0])
    monkeypatch.setattr(concurrency_module, "time", clocks)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    one = Concurrency()
    one.share(processes)

    def work(start: int, stop: int) -> None:
        now[0] += 0.01 * (stop - start)
        used[0] += 0.004 * (stop - start)

    one.each("call", work, 11)  # as many as are judged once
    one.close()
    assert one.level("call") == level


def levels(saturated: int, disturbed: int) -> Iterator[int]:
    """Yield the number of calls at once after each slice of a file system, for ever.

    saturated: calls at once that it serves in 1 ms each; more of them take longer.
    disturbed: a level whose first trial takes twice as long.
    """
    calls, slow = _Calls(1, unlocked=True), max(8, 2 * disturbed)
    while True:
        calls.active = calls.level
        items, seconds = calls.slice_items(1), 0.001 * max(1.0, calls.level / saturated)
        if calls.level == disturbed and slow:
            slow, seconds = slow - 1, 2 * seconds
        calls.note(items, items * seconds, 0.0, most=MOST_CALLS, processors=2.0)
        yield calls.level


@pytest.mark.parametrize("disturbed", [2, 8])
def test_a_disturbance_does_not_keep_the_number_low(disturbed: int) -> None:
    """After some slices that something else held up, the number grows as it did before."""
    assert max(islice(levels(MOST_CALLS, disturbed), 1500)) == MOST_CALLS


def test_trials_become_rare() -> None:
    """Where the file system serves 32 calls at once, most slices run beside 31 others."""
    later = list(islice(levels(32, 0), 20_000, 60_000))
    assert later.count(32) > 0.9 * len(later)


@pytest.mark.parametrize("threads", [0, 1, 5])
def test_a_system_without_further_threads_gets_as_many_calls_as_it_has_threads(
    concurrency: Concurrency, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    """A limit on threads (ulimit -u, a container's) makes a run slower, and does not end it."""
    left, start = [threads], threading.Thread.start

    def limited(thread: threading.Thread) -> None:
        if not left[0]:
            raise RuntimeError("can't start new thread")
        left[0] -= 1
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    calls = Calls(WAIT)
    for _ in range(2):
        done = [False] * 100

        def work(start: int, stop: int, done: list[bool] = done) -> None:
            for index in range(start, stop):
                done[index] = calls()

        concurrency.each("each", work, len(done))
        parts = concurrency.stream("stream", lambda part: [calls() for _ in part], [range(100)])
        assert all(done)
        assert sum(map(len, parts)) == len(done)
    assert min(2, 1 + threads) <= calls.most <= 1 + threads


def test_a_forked_child_has_threads_of_its_own(concurrency: Concurrency) -> None:
    """A child of a process with threads does not wait for those, which it does not have."""
    concurrency.each("call", lambda start, stop: time.sleep(WAIT), 200)
    child = os.fork()
    if not child:
        done = [False] * 500

        def work(start: int, stop: int) -> None:
            done[start:stop] = [True] * (stop - start)
            time.sleep(WAIT)

        concurrency.each("call", work, len(done))
        os._exit(0 if all(done) else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


@pytest.mark.parametrize("way", ["each", "stream"])
def test_no_error_is_lost_that_is_no_ordinary_exception(way: str) -> None:
    """Work that another thread ends with such an error is not taken for done."""

    class Ended(BaseException):
        pass

    caller = threading.current_thread()

    def work(items: int) -> None:
        time.sleep(WAIT * items)
        if threading.current_thread() is not caller:
            raise Ended

    def call() -> None:
        if way == "each":
            one.each(way, lambda start, stop: work(stop - start), 100)
        else:
            list(one.stream(way, lambda part: work(len(part)), [range(100)]))

    with contextlib.closing(Concurrency(4)) as one, pytest.raises(Ended):
        call()


def test_a_child_forked_while_threads_call_has_neither_their_turns_nor_their_locks() -> None:
    """A child that would wait for the parent's threads, which it does not have, waits for ever."""
    one, leave, begun = Concurrency(4), threading.Event(), threading.Semaphore(0)

    def hold(start: int, stop: int) -> None:
        begun.release()
        leave.wait()

    def locked() -> None:
        with one._changed:
            begun.release()
            leave.wait()

    caller = threading.Thread(target=one.each, args=("call", hold, 4))
    locker = threading.Thread(target=locked)
    caller.start()
    for _ in range(4):
        begun.acquire()
    locker.start()
    begun.acquire()
    child = os.fork()
    if not child:
        done = threading.Event()

        def call() -> None:
            one.share(2)
            one.each("call", lambda start, stop: None, 50)
            done.set()

        threading.Thread(target=call, daemon=True).start()
        os._exit(0 if done.wait(5) else 1)
    leave.set()
    for thread in (caller, locker):
        thread.join()
    one.close()
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def interrupted_at(call: int) -> Callable[[FrameType, str, object], None]:
    """Return a trace function that raises KeyboardInterrupt as a Python function is called.

    The interpreter handles signals there.
    call: number of the call, among those to `threading` and to the module under test.
    """
    files, left = {threading.__file__, concurrency_module.__file__}, [call]

    def trace(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename in files:
            left[0] -= 1
            if not left[0]:
                raise KeyboardInterrupt

    return trace


@pytest.mark.parametrize("jobs", [1, 3])
def test_after_an_interrupt_at_any_moment_other_threads_may_call(jobs: int) -> None:
    """No lock stays locked, and no slice of an interrupted run is still at work."""
    running = Calls(WAIT / 10)

    def work(start: int, stop: int) -> None:
        for _ in range(start, stop):
            running()

    def call(one: Concurrency, number: int, ends: list[str]) -> None:
        sys.settrace(interrupted_at(number))
        try:
            one.each("call", work, 9)
            end = "whole"
        except KeyboardInterrupt:
            end = "running" if running.now else "interrupted"
        finally:
            sys.settrace(None)
        ends.append(end)

    number, ends = 0, list[str]()
    while ends[-1:] != ["whole"]:
        number, one = number + 1, Concurrency(jobs)
        calls = partial(call, one, number, ends), partial(one.each, "call", work, 9)
        for made in calls:
            thread = threading.Thread(target=made, daemon=True)
            thread.start()
            thread.join(5)
            assert not thread.is_alive()
        one.close()
    assert number > 20
    assert "running" not in ends
