"""Ctrl-C and SIGTERM at a time that suits: not while what they have interrupted is being ended.

What a signal raises can get lost: it is raised wherever the main thread is, and where C code that
has called Python (numpy looking for an attribute, Arrow for a module) takes any exception for a
no, the run would go on as if nothing had been.
"""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def raised_once() -> Iterator[None]:
    """Let the first of them be raised in the block, and ignore those that follow it."""
    raised = False

    def first(act: Callable[[], None]) -> None:
        nonlocal raised
        if not raised:
            raised = True
            act()

    with _handled(first):
        yield


@contextmanager
def deferred() -> Iterator[None]:
    """Let them wait until the block has ended, and raise the first of them then."""
    waiting: list[Callable[[], None]] = []
    with _handled(waiting.append):
        yield
    for act in waiting[:1]:
        act()


@contextmanager
def persistent() -> Iterator[Callable[[], None]]:
    """Let none get lost in the block: give a function that raises again what they have raised.

    So does the end of the block. Who catches what a signal has raised does so outside.
    """
    raised: BaseException | None = None

    def note(act: Callable[[], None]) -> None:
        nonlocal raised
        try:
            act()
        except BaseException as error:
            raised = error
            raise

    def check() -> None:
        if raised is not None:
            raise raised

    with _handled(note):
        yield check
        check()


@contextmanager
def _handled(handle: Callable[[Callable[[], None]], None]) -> Iterator[None]:
    """Give signals, as calls of what would have handled them, to `handle`.

    Only the main thread gets any: in others nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in _SIGNALS}

    def pass_on(number: int, frame: FrameType | None) -> None:
        handler = before[signal.Signals(number)]
        if callable(handler):
            handle(lambda: handler(number, frame))

    changed = [number for number, handler in before.items() if callable(handler)]
    try:
        for number in changed:
            signal.signal(number, pass_on)
        yield
    finally:
        for number in changed:
            signal.signal(number, before[number])
