"""A limit on bytes a second, shared by threads."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class Pace:
    """Make callers wait so that on average no more bytes pass a second than allowed.

    The first bytes pass at once. Nothing that was not used is saved up.
    """

    def __init__(
        self, bytes_per_second: int, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._rate = bytes_per_second
        self._clock = clock
        self._lock = threading.Lock()
        self._free_at = clock()

    def wait(self, nbytes: int, stopped: threading.Event) -> None:
        """Wait for the turn of `nbytes`, or until `stopped` is set."""
        with self._lock:
            now = self._clock()
            begin = max(now, self._free_at)
            self._free_at = begin + nbytes / self._rate
        stopped.wait(begin - now)
