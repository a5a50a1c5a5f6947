"""Counters of what the plug-in served and refused, and a log of refusals at a bounded rate."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from itertools import repeat

logger = logging.getLogger("hicachectl.sglang")

_SECONDS_PER_LINE = 10.0  # per reason


class Counters:
    """Counts by reason; the first event of a reason is logged at once, later ones in sums.

    place: the store, in messages.
    """

    def __init__(self, place: str) -> None:
        self.place = place
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._logged: dict[str, tuple[float, int]] = {}

    def count(self, reason: str, pages: int = 1) -> None:
        """Count pages without a log line."""
        with self._lock:
            self._counts[reason] += pages

    def noted(self, reason: str, detail: str) -> None:
        """Count a page that is served all the same, and log the first one."""
        with self._lock:
            self._counts[reason] += 1
            first = self._counts[reason] == 1
        if first:
            logger.info("%s: %s: %s; later ones are only counted", self.place, reason, detail)

    def refused(self, reason: str, detail: str, pages: int = 1) -> None:
        """Count pages that are misses or failed writes, and log at a bounded rate."""
        now = time.monotonic()
        with self._lock:
            self._counts[reason] += pages
            total = self._counts[reason]
            at, before = self._logged.get(reason, (-_SECONDS_PER_LINE, 0))
            if now - at < _SECONDS_PER_LINE:
                return
            self._logged[reason] = now, total
        since = "" if total - before == 1 else f" ({total - before} pages since the last line)"
        logger.warning("%s: %s: %s%s", self.place, reason, detail, since)

    def excluded(self, reason: str, detail: str) -> None:
        """Count and log, as an error, why all pages are misses until the next attach."""
        self.count(reason)
        logger.error(
            "%s: %s: %s; all its pages are misses until the next attach", self.place, reason, detail
        )

    def snapshot(self) -> dict[str, int]:
        """Return all counts by reason."""
        with self._lock:
            return dict(self._counts)


class Moved:
    """Reads or writes since the last `take`. Threads add samples while another one takes them."""

    def __init__(self) -> None:
        self._samples: deque[tuple[int, float]] = deque()

    def add(self, pages: int, nbytes: int, seconds: float) -> None:
        """Add a call's pages. nbytes: bytes of a page. seconds: duration of the call."""
        self._samples.append((pages, pages * nbytes / seconds / 1e9))

    def take(self) -> list[tuple[int, float]]:
        """Return pages and GB/s of each call since the last time; each call comes once."""
        return [self._samples.popleft() for _ in repeat(None, len(self._samples))]
