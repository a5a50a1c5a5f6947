"""Defer and repeat SIGINT and SIGTERM, so that no signal interrupts a cleanup or is lost.

A signal raises an exception. C code that has called Python, such as numpy reading an attribute or
Arrow importing a module, may discard this exception. The run would then go on, so `persistent`
raises the exception again.
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
    """Handle the first signal in the block. Ignore later signals."""
    raised = False

    def first(act: Callable[[], None]) -> None:
        nonlocal raised
        if not raised:
            raised = True
            act()

    with _handled(first):
        yield


@contextmanager
def deferred() -> Iterator[Callable[[], bool]]:
    """Defer signals until the end of the block. Then handle the first of them.

    Yields a function that returns whether a signal waits.
    """
    waiting: list[Callable[[], None]] = []
    with _handled(waiting.append):
        yield lambda: bool(waiting)
    for act in waiting[:1]:
        act()


@contextmanager
def persistent() -> Iterator[Callable[[], None]]:
    """Raise a signal's exception again at the end of the block.

    Yields a function that raises the exception again before the end, if there was a signal. Catch
    the exception outside the block.
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
    """Call `handle` for each signal, with a function that calls the signal's previous handler.

    Does nothing outside the main thread, because only the main thread receives signals.
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
