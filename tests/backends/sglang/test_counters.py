"""Counters of the plug-in: every sample comes once."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING

import pytest

from hicachectl.backends.sglang.counters import Moved

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def impatient_threads() -> Iterator[None]:
    """Let threads switch as often as Python can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-7)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("impatient_threads")
def test_samples_come_once_while_others_are_added() -> None:
    """No call of SGLang is missing in its metrics, or counted twice."""
    moved, threads, samples = Moved(), 4, 50_000
    done = threading.Barrier(threads + 1)

    def add(first: int) -> None:
        for number in range(first, first + samples):
            moved.add(number, 1000, 0.5)
        done.wait()

    adding = [threading.Thread(target=add, args=(n * samples,)) for n in range(threads)]
    for thread in adding:
        thread.start()
    found = []
    while done.n_waiting != threads:
        found += moved.take()
    done.wait()
    for thread in adding:
        thread.join()
    found += moved.take()
    assert sorted(pages for pages, _ in found) == list(range(threads * samples))
    assert moved.take() == []


def test_a_sample_has_pages_and_rate() -> None:
    moved = Moved()
    moved.add(4, 1 << 30, 2.0)
    ((pages, rate),) = moved.take()
    assert (pages, round(rate, 3)) == (4, 2.147)
