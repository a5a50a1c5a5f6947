"""Processes take room from one number, however they end."""

from __future__ import annotations

import fcntl
import os
import threading
from typing import TYPE_CHECKING

import pytest

from hicachectl.backends.sglang.ledger import Ledger

if TYPE_CHECKING:
    from pathlib import Path


def ledger(path: Path, *, limit: int = 1000, shared: bool = True) -> Ledger:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    return Ledger(descriptor, limit, threading.Event(), shared=shared)


@pytest.mark.parametrize("shared", [True, False])
def test_room_is_taken_up_to_the_limit(tmp_path: Path, shared: bool) -> None:
    """Before the first listing, the directory is taken to be nearly full."""
    high = threading.Event()
    descriptor = os.open(tmp_path / "used", os.O_RDWR | os.O_CREAT, 0o600)
    one = Ledger(descriptor, 1000, high, shared=shared)
    assert not one.take(51)
    assert high.is_set()
    assert one.take(50)
    assert one.correct(100, 0, one.total) == 100
    high.clear()
    assert one.take(20)
    assert one.total == 120
    assert not high.is_set()
    assert one.take(861)
    assert high.is_set()  # the evictor shall begin before writers wait
    one.give(2000)
    assert one.total == 0
    one.close()
    with pytest.raises(OSError, match="the ledger is closed"):
        one.take(1)


def test_a_share_is_taken_at_a_time_and_comes_back(tmp_path: Path) -> None:
    """Writes and their failures seldom touch the file; a process keeps a few shares at most."""
    share = 100
    one, other = (ledger(tmp_path / "used", limit=1024 * share) for _ in range(2))
    one.correct(0, 0, one.total)
    assert one.take(1)
    assert other.total == share + 1
    for _ in range(share):
        assert one.take(1)
    assert other.total == share + 1  # all of it is written
    one.give(4 * share)
    assert other.total == share + 1
    one.give(1)
    assert other.total == 0  # at 5 shares too many, as the file holds less than that
    assert one.take(share)
    assert other.total == 0
    assert one.take(1)
    assert other.total == share + 1
    one.close()
    assert other.total == 1
    other.close()


def test_room_that_cannot_be_returned_now_is_returned_later(tmp_path: Path) -> None:
    one = ledger(tmp_path / "used")
    one.correct(100, 0, one.total)
    stopped = os.open(tmp_path / "used", os.O_RDWR)
    fcntl.flock(stopped, fcntl.LOCK_EX)
    one.give(30)
    os.close(stopped)
    assert one.total == 100
    one.give(10)
    assert one.total == 60
    one.close()


def test_a_listing_counts_what_was_taken_meanwhile_once(tmp_path: Path) -> None:
    """`later` objects were taken since: only a number that is not shared needs them."""
    one, other = ledger(tmp_path / "used"), ledger(tmp_path / "used")
    one.correct(100, 0, one.total)
    before = one.total
    assert other.take(30)
    assert one.correct(90, 30, before) == 120
    alone = ledger(tmp_path / "alone", shared=False)
    alone.correct(100, 0, alone.total)
    assert alone.correct(90, 300, alone.total) == 390
    for each in (one, other, alone):
        each.close()


def test_threads_and_descriptors_share_one_number(tmp_path: Path) -> None:
    ledgers = [ledger(tmp_path / "used") for _ in range(4)]
    ledgers[0].correct(0, 0, ledgers[0].total)
    taken = [0] * 4

    def take(index: int) -> None:
        for _ in range(100):
            taken[index] += 3 * ledgers[index].take(3)

    threads = [threading.Thread(target=take, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(taken) == ledgers[0].total == 999
    for each in ledgers:
        each.close()


def test_a_lock_that_is_never_released_is_not_waited_for(tmp_path: Path) -> None:
    one = ledger(tmp_path / "used")
    stopped = os.open(tmp_path / "used", os.O_RDWR)
    fcntl.flock(stopped, fcntl.LOCK_EX)
    with pytest.raises(BlockingIOError):
        one.take(1)
    os.close(stopped)
    assert one.take(1)
    one.close()


def test_a_number_that_is_none_counts_as_nearly_full(tmp_path: Path) -> None:
    (tmp_path / "used").write_bytes(b"abc")
    one = ledger(tmp_path / "used")
    assert one.total == 950
    (tmp_path / "used").write_bytes(b"\xff" * 8)
    assert one.total == 0
    one.close()
