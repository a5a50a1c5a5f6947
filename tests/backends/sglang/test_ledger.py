"""Processes take room from one number, however they end."""

from __future__ import annotations

import fcntl
import os
import threading
from typing import TYPE_CHECKING

import pytest

from hicachectl.backends.sglang.evictor import Ledger

if TYPE_CHECKING:
    from pathlib import Path


def ledger(path: Path, *, shared: bool = True) -> Ledger:
    return Ledger(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), 1000, shared=shared)


@pytest.mark.parametrize("shared", [True, False])
def test_room_is_taken_up_to_the_limit(tmp_path: Path, shared: bool) -> None:
    """Before the first listing, the directory is taken to be nearly full."""
    one = ledger(tmp_path / "used", shared=shared)
    assert one.take(51, 60) == 0
    assert one.take(10, 60) == 50
    assert one.correct(100, 0, one.total) == 100
    assert one.take(10, 20) == 20
    assert one.total == 120
    assert not one.is_high
    assert one.take(10, 5000) == 880
    assert one.is_high
    assert one.give(2000) == 0
    one.close()


def test_a_listing_counts_what_was_taken_meanwhile_once(tmp_path: Path) -> None:
    """`later` objects were taken since: only a number that is not shared needs them."""
    one, other = ledger(tmp_path / "used"), ledger(tmp_path / "used")
    one.correct(100, 0, one.total)
    before = one.total
    assert other.take(30, 30) == 30
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
            taken[index] += ledgers[index].take(1, 3)

    threads = [threading.Thread(target=take, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(taken) == ledgers[0].total == 1000
    for each in ledgers:
        each.close()


def test_a_lock_that_is_never_released_is_not_waited_for(tmp_path: Path) -> None:
    one = ledger(tmp_path / "used")
    stopped = os.open(tmp_path / "used", os.O_RDWR)
    fcntl.flock(stopped, fcntl.LOCK_EX)
    with pytest.raises(BlockingIOError):
        one.take(1, 1)
    os.close(stopped)
    assert one.take(1, 1) == 1
    one.close()


def test_a_number_that_is_none_counts_as_nearly_full(tmp_path: Path) -> None:
    (tmp_path / "used").write_bytes(b"abc")
    one = ledger(tmp_path / "used")
    assert one.total == 950
    (tmp_path / "used").write_bytes(b"\xff" * 8)
    assert one.total == 0
    one.close()
