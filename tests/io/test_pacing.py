"""Pacing, with a fake clock."""

from __future__ import annotations

import threading

import pytest

from hicachectl.formats.errors import UsageError
from hicachectl.io.pipeline import Pace


class Waits(threading.Event):
    """An event that records the timeouts of its waits."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.seconds.append(timeout)
        return False


def test_each_caller_waits_for_the_bytes_before_it() -> None:
    pace, waits = Pace(100, clock=lambda: 5.0), Waits()
    for nbytes in (50, 200, 1):
        pace.wait(nbytes, waits)
    assert waits.seconds == pytest.approx([0, 0.5, 2.5])


def test_idle_time_is_not_saved_up() -> None:
    now = [0.0]
    pace, waits = Pace(100, clock=lambda: now[0]), Waits()
    pace.wait(100, waits)
    now[0] = 60.0
    pace.wait(100, waits)
    pace.wait(100, waits)
    assert waits.seconds == pytest.approx([0, 0, 1])


def test_a_stopped_run_does_not_wait() -> None:
    stopped = threading.Event()
    stopped.set()
    pace = Pace(1)
    assert not pace.wait(1000, stopped)
    assert not pace.wait(1000, stopped)  # would wait for a quarter of an hour


def test_a_turn_after_the_deadline_is_waited_for_no_longer_than_that() -> None:
    pace, waits = Pace(100, clock=lambda: 5.0), Waits()
    assert pace.wait(1000, waits, deadline=6.0)
    assert not pace.wait(1, waits, deadline=6.0)
    assert waits.seconds == pytest.approx([0, 1])


def test_a_pace_of_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match=r"^bytes_per_second: must be at least 1, but is 0$"):
        Pace(0)
