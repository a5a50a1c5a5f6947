"""A limit on bytes a second, shared by threads."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from hicachectl.formats.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable


class Pace:
    """Make callers wait so that on average no more bytes pass a second than allowed.

    The first bytes pass at once. Nothing that was not used is saved up.
    """

    def __init__(
        self, bytes_per_second: int, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Begin now. Raises UsageError for a pace of nothing, which would never end."""
        if bytes_per_second < 1:
            raise UsageError("--bwlimit: give at least one byte a second")
        self._rate = bytes_per_second
        self._clock = clock
        self._lock = threading.Lock()
        self._free_at = clock()

    def wait(self, nbytes: int, stopped: threading.Event, *, deadline: float | None = None) -> bool:
        """Wait for the turn of `nbytes`; False when `stopped` is set or the deadline comes first.

        deadline: on the clock of this pace.
        """
        with self._lock:
            now = self._clock()
            begin = max(now, self._free_at)
            self._free_at = begin + nbytes / self._rate
        in_time = deadline is None or begin <= deadline
        until = begin if in_time or deadline is None else deadline
        return not stopped.wait(max(0.0, until - now)) and in_time
