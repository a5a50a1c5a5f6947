"""Forked work: each item done once, each child's end noticed, no process left over."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hicachectl.formats.errors import HicacheError, StoreUnavailable, UsageError
from hicachectl.io.forking import Callees, SharedCounter, Workers
from tests.waiting import PATIENCE_S, alive, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

    Send = Callable[[Any], None]


def children_of(pid: int) -> list[int]:
    """Return the children of a process, with zombies."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            found.append(int(status.parent.name))
    return found


@pytest.mark.slow
def test_every_ticket_is_drawn_once_by_processes_that_race() -> None:
    tickets = SharedCounter()

    def work(send: Send) -> None:
        send(list(tickets.deal(range(5_000))))

    with Workers(8, work) as children:
        drawn = [number for part in children for number in part]
    tickets.close()
    assert sorted(drawn) == list(range(5_000))


@pytest.mark.slow
def test_messages_of_any_size_arrive_whole_and_no_process_is_left() -> None:
    def work(send: Send) -> None:
        for size in (0, 1, 100_000, 300_000):
            send(["é\udc80" * size, size])

    before = set(children_of(os.getpid()))
    with Workers(3, work) as children:
        messages = list(children)
    assert sorted(size for _, size in messages) == sorted([0, 1, 100_000, 300_000] * 3)
    assert all(text == "é\udc80" * size for text, size in messages)
    assert set(children_of(os.getpid())) == before


@pytest.mark.parametrize("kind", [StoreUnavailable, UsageError])
def test_an_error_of_ours_in_a_child_is_raised_as_it_is(kind: type[Exception]) -> None:
    def work(_send: Send) -> None:
        raise kind("what, and the remedy")

    with Workers(2, work) as children, pytest.raises(kind, match=r"^what, and the remedy$"):
        list(children)


def test_a_bug_in_a_child_is_raised_with_its_traceback() -> None:
    def divide_by_nothing(_send: Send) -> None:
        _ = 1 // 0

    with (
        Workers(2, divide_by_nothing) as children,
        pytest.raises(RuntimeError, match=r"(?s)in divide_by_nothing.*ZeroDivisionError"),
    ):
        list(children)


def test_a_child_that_is_killed_is_an_error_and_no_wait_for_ever() -> None:
    before = set(children_of(os.getpid()))

    def work(send: Send) -> None:
        send(os.getpid())
        time.sleep(2 * PATIENCE_S)

    started = time.monotonic()
    with Workers(2, work) as children:
        messages = iter(children)
        os.kill(next(messages), signal.SIGKILL)
        with pytest.raises(UsageError, match=r"signal 9 \(Killed\).*--buffer-bytes"):
            list(messages)
    assert time.monotonic() - started < PATIENCE_S
    assert set(children_of(os.getpid())) == before


def test_leaving_early_ends_children_that_would_send_for_ever() -> None:
    before = set(children_of(os.getpid()))

    def work(send: Send) -> None:
        while True:
            send("x" * 10_000)

    with Workers(2, work) as children:
        assert next(iter(children)) == "x" * 10_000
    assert set(children_of(os.getpid())) == before


def test_children_leave_without_their_parents_output_and_clean_up() -> None:
    code = """
import atexit, sys
from hicachectl.io.forking import Workers
atexit.register(print, "cleaned up")
sys.stdout.write("once ")
try:
    with Workers(3, lambda send: send(1)) as children:
        print(len(list(children)))
finally:
    print("finally")
"""
    found = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True
    )
    assert (found.stdout, found.stderr) == ("once 3\nfinally\ncleaned up\n", "")


SLEEPERS = """
import os, sys, time
from hicachectl.io.forking import Workers
def work(send):
    send(os.getpid())
    time.sleep(600)
with Workers(3, work) as children:
    for pid in children:
        print(pid, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_children_end_with_their_parent_whatever_ends_it(number: signal.Signals) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", SLEEPERS],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert parent.stdout is not None
    pids = [int(parent.stdout.readline()) for _ in range(3)]
    assert all(map(alive, pids))
    parent.send_signal(number)
    parent.wait(PATIENCE_S)
    parent.stdout.close()
    wait_until(lambda: not any(map(alive, pids)))


def test_the_signals_of_a_terminal_or_a_service_are_the_parents_to_answer() -> None:
    def work(send: Send) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(os.getpid(), number)
        send("still here")

    with Workers(2, work) as children:
        assert list(children) == ["still here"] * 2


def test_no_process_to_be_had_is_told_and_fewer_are_made_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fork, left = os.fork, [2]

    def limited() -> int:
        if not left[0]:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        left[0] -= 1
        return fork()

    monkeypatch.setattr(os, "fork", limited)
    with Workers(5, lambda send: send(1)) as children:
        assert list(children) == [1, 1]
    with pytest.raises(BlockingIOError):
        Workers(5, lambda send: send(1))


class Target:
    """Methods that forked processes call."""

    def __init__(self) -> None:
        self.calls = 0

    def pid(self) -> int:
        return os.getpid()

    def pid_when(self, gate: Path) -> int:
        wait_until(gate.exists)
        return os.getpid()

    def counted(self) -> int:
        self.calls += 1
        return self.calls

    def doubled(self, content: bytes, *, times: int = 2) -> bytes:
        return content * times

    def fail(self, error: Exception) -> None:
        raise error

    def unpicklable(self) -> object:
        return threading.Lock()

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def test_calls_run_in_other_processes_that_keep_what_they_have() -> None:
    before, target = set(children_of(os.getpid())), Target()
    target.calls = 7
    with Callees(1, lambda: target) as children:
        assert [children.call("counted") for _ in range(3)] == [8, 9, 10]
        assert children.call("doubled", b"x" * 300_000, times=3) == b"x" * 900_000
        assert children.call("pid") != os.getpid()
    assert target.calls == 7
    assert set(children_of(os.getpid())) == before


def test_each_process_has_one_call_at_a_time(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with Callees(3, Target) as children, ThreadPoolExecutor(5) as threads:
        assert len(children) == 3
        waiting = [threads.submit(children.call, "pid_when", gate) for _ in range(5)]
        gate.touch()
        pids = [one.result() for one in waiting]
    assert len(set(pids)) == 3


@pytest.mark.parametrize("error", [StoreUnavailable("what, and the remedy"), ZeroDivisionError()])
def test_an_error_of_a_call_is_raised_and_the_process_goes_on(error: Exception) -> None:
    ours = isinstance(error, HicacheError)
    said = r"^what, and the remedy$" if ours else r"(?s)in fail\n.*ZeroDivisionError"
    with Callees(1, Target) as children:
        with pytest.raises(type(error) if ours else RuntimeError, match=said):
            children.call("fail", error)
        with pytest.raises(RuntimeError, match="cannot pickle"):
            children.call("unpicklable")
        assert children.call("counted") == 1


def test_a_call_that_kills_its_process_is_an_error_and_so_is_each_later_one() -> None:
    before = set(children_of(os.getpid()))
    with Callees(1, Target) as children:
        with ThreadPoolExecutor(3) as threads:  # two calls wait for the process that dies
            dying = [threads.submit(children.call, "die") for _ in range(3)]
            for one in dying:
                with pytest.raises(UsageError, match=r"signal 9 \(Killed\).*--buffer-bytes"):
                    one.result(PATIENCE_S)
        with pytest.raises(UsageError, match="signal 9"):
            children.call("pid")
    assert set(children_of(os.getpid())) == before


def test_the_answer_to_a_call_that_was_interrupted_is_not_that_to_the_next(
    tmp_path: Path,
) -> None:
    gate = tmp_path / "gate"
    before = signal.signal(signal.SIGUSR1, signal.default_int_handler)
    try:
        with Callees(1, Target) as children:
            interrupt = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGUSR1))
            interrupt.start()
            with pytest.raises(KeyboardInterrupt):
                children.call("pid_when", gate)
            gate.touch()
            with pytest.raises(UsageError, match="ended without a result"):
                children.call("counted")
    finally:
        signal.signal(signal.SIGUSR1, before)
