"""Defer and repeat SIGINT and SIGTERM, so that cleanup is not interrupted and no signal is lost.

A signal's exception is raised wherever the main thread is. C code that has called Python (numpy
for an attribute, Arrow for a module) may discard the exception, and the run would go on.
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
    """Let the first signal act in the block, and ignore later ones."""
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
    """Defer signals until the end of the block; then the first of them acts."""
    waiting: list[Callable[[], None]] = []
    with _handled(waiting.append):
        yield
    for act in waiting[:1]:
        act()


@contextmanager
def persistent() -> Iterator[Callable[[], None]]:
    """Yield a function that raises again an exception that a signal raised in the block.

    The end of the block also raises the exception, so catch it outside.
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
    """Pass each signal to `handle`, as a call of its previous handler.

    Only the main thread receives signals; other threads change nothing.
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
