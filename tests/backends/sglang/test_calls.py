"""Calls end at their deadline; workers that come back later touch no memory of the caller."""

from __future__ import annotations

import ctypes
import threading
import time
from types import SimpleNamespace

import pytest

from hicachectl.backends.sglang import calls
from hicachectl.backends.sglang.calls import Call, Ended, Workers


def test_all_work_is_done_in_order() -> None:
    workers = Workers(3, "test")
    assert workers.map(Call(5), lambda n: n * n, [(n,) for n in range(20)]) == [
        n * n for n in range(20)
    ]
    workers.close()


def test_a_call_ends_at_its_deadline_while_a_worker_hangs() -> None:
    """Done items count, the hung one does not, and its copy into memory comes too late."""
    workers, release, refused = Workers(2, "test"), threading.Event(), threading.Event()
    target, source = (
        ctypes.create_string_buffer(b"before", 6),
        ctypes.create_string_buffer(b"after!"),
    )
    call = Call(1.5)

    def work(n: int) -> int:
        if n == 1:
            release.wait()
            try:
                call.copy(ctypes.addressof(source), [(ctypes.addressof(target), 6)])
            except Ended:
                refused.set()
                raise
        return n

    begun = time.monotonic()
    assert workers.map(call, work, [(0,), (1,), (2,)]) == [0, None, 2]
    assert time.monotonic() - begun < 20  # the work is released after it
    release.set()
    assert refused.wait(5)
    assert target.raw == b"before"
    workers.close()


def test_bytes_are_copied_piece_after_piece() -> None:
    target, source = ctypes.create_string_buffer(8), ctypes.create_string_buffer(b"abcdef")
    address = ctypes.addressof(target)
    with Call(5) as call:
        call.copy(ctypes.addressof(source), [(address + 4, 2), (address, 4)])
    assert target.raw == b"cdefab\0\0"
    with pytest.raises(Ended):
        call.copy(ctypes.addressof(source), [(address, 1)])


def test_calls_fail_at_once_after_a_deadline_and_work_again_after_a_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hicachectl.backends.sglang.calls._FIRST_PAUSE_S", 1.5)
    workers, release = Workers(1, "test"), threading.Event()
    assert workers.map(Call(0.05), release.wait, [()]) == [None]
    assert workers.paused
    begun = time.monotonic()
    assert workers.map(Call(50), lambda: 1, [()]) == [None]
    assert time.monotonic() - begun < 25
    while workers.paused:
        time.sleep(0.05)
    # A new thread replaced the one that still hangs.
    assert workers.map(Call(5), lambda: 1, [()]) == [1]
    release.set()
    workers.close()


def test_the_first_error_is_raised_after_all_work() -> None:
    workers, done = Workers(2, "test"), []

    def work(n: int) -> None:
        if n == 0:
            raise ValueError("first")
        done.append(n)

    with pytest.raises(ValueError, match="first"):
        workers.map(Call(5), work, [(0,), (1,), (2,)])
    assert sorted(done) == [1, 2]
    workers.close()


def test_a_call_ends_when_those_that_hold_it_let_go() -> None:
    """And nobody holds it afterwards."""
    call, ended = Call(5), threading.Event()
    call.hold()
    call.hold()

    def end() -> None:
        call.end()
        ended.set()

    thread = threading.Thread(target=end)
    thread.start()
    call.let_go()
    assert not ended.wait(0.1)
    call.let_go()
    assert ended.wait(5)
    thread.join()
    with pytest.raises(Ended):
        call.hold()


def test_threads_that_hang_end_when_they_come_back_after_the_close() -> None:
    workers, release = Workers(2, "test-closed"), threading.Event()
    assert workers.map(Call(0.05), release.wait, [(), ()]) == [None, None]
    workers.close()
    assert workers.map(Call(5), lambda: 1, [()]) == [None]
    release.set()
    deadline = time.monotonic() + 5
    while any(thread.name == "test-closed" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_pause_doubles_with_each_hang_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that works makes it short again."""
    now = 100.0
    monkeypatch.setattr(calls, "time", SimpleNamespace(monotonic=lambda: now))
    workers, release = Workers(2, "test"), threading.Event()

    def pause_after_a_hang() -> float:
        nonlocal now
        assert workers.map(Call(0.05), release.wait, [()]) == [None]
        begun = now
        while workers.paused:
            now += 0.5
        return now - begun

    assert [pause_after_a_hang() for _ in range(3)] == [1, 2, 4]
    assert workers.map(Call(5), lambda: 1, [()]) == [1]
    assert pause_after_a_hang() == 1
    release.set()
    workers.close()


def test_a_thread_that_was_replaced_ends_when_it_comes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(calls, "_FIRST_PAUSE_S", 0.0)
    workers, release = Workers(1, "test-replaced"), threading.Event()
    assert workers.map(Call(0.05), release.wait, [()]) == [None]
    assert workers.map(Call(5), lambda: 1, [()]) == [1]

    def threads() -> int:
        return sum(thread.name == "test-replaced" for thread in threading.enumerate())

    assert threads() == 2
    release.set()
    deadline = time.monotonic() + 10
    while threads() > 1:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert workers.map(Call(5), lambda: 1, [()]) == [1]
    workers.close()


def test_work_goes_on_after_the_system_refused_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one thread less than wanted, and with none at all."""
    workers, start = Workers(2, "test"), threading.Thread.start
    left = [0]

    def refuse(thread: threading.Thread) -> None:
        if not left[0]:
            raise RuntimeError("can't start new thread")
        left[0] -= 1
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="thread"):
        workers.map(Call(5), lambda: 1, [(), ()])
    left[0] = 1
    assert workers.map(Call(5), lambda: 1, [(), ()]) == [1, 1]
    monkeypatch.undo()
    assert workers.map(Call(5), lambda: 1, [(), ()]) == [1, 1]
    workers.close()
