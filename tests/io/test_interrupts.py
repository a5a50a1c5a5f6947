"""Interrupts: when a signal's exception is raised, and that none is lost."""

from __future__ import annotations

import signal
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest

from hicachectl.backends.file.store import FileStore
from hicachectl.io.interrupts import deferred, persistent, raised_once
from hicachectl.io.pipeline import Pipeline, batches
from hicachectl.pages.scanning import take_inventory
from tests.move.migrations import demo_store

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from hicachectl.backends.base import Store


class _SignalError(Exception):
    """The exception that the signal raises in these tests."""


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    """Make SIGTERM raise an exception."""

    def handle(_number: int, _frame: object) -> None:
        raise _SignalError

    before = signal.signal(signal.SIGTERM, handle)
    yield
    after = signal.signal(signal.SIGTERM, before)
    assert after is handle


def send() -> None:
    signal.raise_signal(signal.SIGTERM)


class _Asked(type):
    def __getattr__(cls, name: str) -> Any:
        if name == "__array_ufunc__":
            send()
        raise AttributeError(name)


class _Number(int, metaclass=_Asked):
    """A number that sends the signal while numpy looks up an optional attribute."""


def lose() -> None:
    """Let C code discard the signal's exception, as numpy does with members of an enum."""
    assert not (np.arange(3) == _Number(7)).any()


def test_what_c_code_has_cleared_is_raised_again() -> None:
    reached = []

    def work() -> None:
        with persistent() as check:
            lose()
            reached.append("on")
            check()
            reached.append("too far")

    with pytest.raises(_SignalError):
        work()
    assert reached == ["on"]


def test_the_end_of_the_block_raises_it_at_the_latest() -> None:
    with pytest.raises(_SignalError), persistent():
        lose()


def test_without_a_signal_nothing_is_raised() -> None:
    with persistent() as check:
        check()


def test_what_was_raised_and_caught_outside_is_over() -> None:
    caught = []
    try:
        with persistent():
            send()
    except _SignalError:
        caught.append("once")
    with persistent() as check:
        check()
    assert caught == ["once"]


def test_what_was_caught_inside_is_raised_again() -> None:
    with pytest.raises(_SignalError), persistent(), suppress(_SignalError):
        send()


def test_a_pipeline_does_not_go_on_after_a_signal_that_was_lost(tmp_path: Path) -> None:
    done = []

    def work(store: Store) -> None:
        objects = take_inventory(store).objects
        sizes = objects.column("nbytes").to_numpy()
        tasks = batches(np.arange(len(sizes)), sizes, most_objects=1, most_bytes=1 << 20)
        for rows in Pipeline(store, objects, tasks, lambda loaded: loaded.task.rows, jobs=1):
            lose()
            done.append(rows)

    with FileStore(demo_store(tmp_path / "store")) as store, pytest.raises(_SignalError):
        work(store)
    assert len(done) == 1


def test_a_listing_does_not_go_on_after_a_signal_that_was_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = []

    def on_batch(objects: int) -> None:
        lose()
        told.append(objects)

    with FileStore(demo_store(tmp_path / "store")) as store:
        scanned = pa.Table.from_batches(store.scan({"key", "nbytes", "mtime_ns"}))
        some = scanned.to_batches(max_chunksize=5)
        monkeypatch.setattr(store, "scan", lambda columns: iter(some))
        with pytest.raises(_SignalError):
            take_inventory(store, on_batch=on_batch)
    assert told == [5]


def test_only_the_first_is_raised() -> None:
    with raised_once():
        with pytest.raises(_SignalError):
            send()
        send()


def test_a_signal_waits_for_the_end_of_what_must_not_be_interrupted() -> None:
    reached = []

    def work() -> None:
        with deferred():
            send()
            reached.append("end")
        reached.append("too far")

    with pytest.raises(_SignalError):
        work()
    assert reached == ["end"]
