"""A terminal that answers the questions of the command line."""

from __future__ import annotations

import os
import pty
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def answering(answer: str) -> Iterator[None]:
    """Let stdin be a terminal on which somebody has typed an answer."""
    keyboard, terminal = pty.openpty()
    os.write(keyboard, f"{answer}\n".encode())
    try:
        with os.fdopen(terminal) as stdin, pytest.MonkeyPatch.context() as patched:
            patched.setattr(sys, "stdin", stdin)
            yield
    finally:
        os.close(keyboard)
