"""A limit on bytes per second, shared by threads."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from hicachectl.formats.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable


class Pace:
    """Limit on the average bytes per second.

    The first bytes pass at once. Idle time does not allow more bytes later.
    """

    def __init__(
        self, bytes_per_second: int, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Raise UsageError for less than 1 byte per second. clock: returns seconds."""
        if bytes_per_second < 1:
            raise UsageError(f"bytes_per_second: must be at least 1, but is {bytes_per_second}")
        self._rate = bytes_per_second
        self._clock = clock
        self._lock = threading.Lock()
        self._free_at = clock()

    def seconds(self, nbytes: int) -> float:
        """Return the time that some bytes take."""
        return nbytes / self._rate

    def wait(self, nbytes: int, stopped: threading.Event, *, deadline: float | None = None) -> bool:
        """Wait until `nbytes` may pass; return False if stopped, or if the deadline is earlier.

        deadline: a time of `clock`.
        """
        with self._lock:
            now = self._clock()
            begin = max(now, self._free_at)
            self._free_at = begin + self.seconds(nbytes)
        in_time = deadline is None or begin <= deadline
        until = begin if in_time or deadline is None else deadline
        return not stopped.wait(max(0.0, until - now)) and in_time
