"""Count the pages that the plug-in moves and refuses; log refusals at a bounded rate.

`formats.plugin_status` has the names of the counts. A process keeps its counts when the backend is
detached and attached again. If SGLang exports metrics, the counts are among these metrics.
"""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict, deque
from itertools import repeat
from typing import TYPE_CHECKING

from hicachectl.backends.sglang.log import logger
from hicachectl.formats.plugin_status import COUNTED

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicachectl.formats.plugin_status import Failed, Noted, Refused, Removed, Stage

    Export = Callable[[str, str, int], None]

_SECONDS_PER_LINE = 10.0  # shortest time between two log lines of one reason
# With --enable-metrics, SGLang sets this variable in its processes (utils/common.py ::
# set_prometheus_multiproc_dir). prometheus_client must not be imported before the variable is set.
_EXPORTED = "PROMETHEUS_MULTIPROC_DIR"


class Tally:
    """Counts of one rank by kind and name. Several threads may count at once.

    Kinds are `tokens`, `refused`, `noted`, `removed` and `failed`: see `plugin_status.COUNTED`.

    excluded: texts, by reason, that say why all pages are misses until the next attach.
    """

    def __init__(self) -> None:
        self.excluded: dict[str, str] = {}
        self._lock = threading.Lock()
        self._counts = {kind: defaultdict[str, int](int) for kind in COUNTED}
        self._export: Export | None = None

    def add(self, kind: str, name: str, count: int) -> None:
        """Add to a count, and to its exported metric."""
        with self._lock:
            self._counts[kind][name] += count
        if self._export is not None:
            try:
                self._export(kind, name, count)
            except Exception as error:  # caught, because a metric must not cost a page
                self._export = None
                logger.warning("metrics: no longer exported: %r", error)

    def of(self, kind: str) -> dict[str, int]:
        """Return the counts of a kind by name."""
        with self._lock:
            return dict(self._counts[kind])

    def begin(self, ranks: Sequence[int]) -> None:
        """Begin an attachment; export the counts if SGLang exports metrics.

        ranks: see `exported.LABELS`.
        """
        self.excluded = {}
        if self._export is None and _EXPORTED in os.environ:
            try:
                from hicachectl.backends.sglang.exported import exporter

                self._export = exporter(ranks)
            # prometheus_client is missing, or cannot write its files, for example.
            except Exception as error:
                logger.warning("metrics: not exported: %r", error)


_tallies: dict[tuple[str, ...], Tally] = {}


def tally_of(stores: Sequence[str]) -> Tally:
    """Return this process's counts for a list of stores.

    stores: URLs without secrets.
    """
    return _tallies.setdefault(tuple(stores), Tally())


class Counters:
    """Count events of one store. Log a reason's first event at once, and later events in sums.

    place: name of the store in messages.
    tally: counts that all stores of one rank share.
    """

    def __init__(self, place: str, tally: Tally | None = None) -> None:
        self.place = place
        self.tally = tally or Tally()
        self._lock = threading.Lock()
        self._logged: dict[str, tuple[float, int]] = {}  # time of the last line, count since then
        self._noted: set[str] = set()

    def moved(self, stage: Stage, tokens: int) -> None:
        """Count tokens of pages that reached a stage."""
        if tokens:
            self.tally.add("tokens", stage, tokens)

    def count(self, reason: Refused, pages: int) -> None:
        """Count pages that are misses or failed writes. Log nothing."""
        if pages:
            self.tally.add("refused", reason, pages)

    def removed(self, reason: Removed, files: int) -> None:
        """Count files that were removed."""
        self.tally.add("removed", reason, files)

    def noted(self, reason: Noted, detail: str) -> None:
        """Count a page that is served in spite of a reason; log the first page of each reason."""
        self.tally.add("noted", reason, 1)
        with self._lock:
            first = reason not in self._noted
            self._noted.add(reason)
        if first:
            logger.info("%s: %s: %s; later pages are only counted", self.place, reason, detail)

    def refused(self, reason: Refused, detail: str, pages: int = 1) -> None:
        """Count pages that are misses or failed writes, and log at a bounded rate."""
        self.tally.add("refused", reason, pages)
        self._warn(reason, detail, pages, "pages")

    def failed(self, reason: Failed, detail: str) -> None:
        """Count an operation that failed, and log at a bounded rate."""
        self.tally.add("failed", reason, 1)
        self._warn(reason, detail, 1, "times")

    def excluded(self, reason: Refused, detail: str) -> None:
        """Log, as an error, why all pages are misses until the next attach."""
        self.tally.excluded[reason] = f"{self.place}: {detail}"
        logger.error(
            "%s: %s: %s; all its pages are misses until the next attach", self.place, reason, detail
        )

    def _warn(self, reason: str, detail: str, count: int, unit: str) -> None:
        now = time.monotonic()
        with self._lock:
            at, before = self._logged.get(reason, (-_SECONDS_PER_LINE, 0))
            if now - at < _SECONDS_PER_LINE:
                self._logged[reason] = at, before + count
                return
            self._logged[reason] = now, 0
        count += before
        since = "" if count == 1 else f" ({count} {unit} since the last line)"
        logger.warning("%s: %s: %s%s", self.place, reason, detail, since)


class Moved:
    """Reads or writes since the last `take`. Threads may `add` while another thread takes."""

    def __init__(self) -> None:
        self._samples: deque[tuple[int, float]] = deque()

    def add(self, pages: int, nbytes: int, seconds: float) -> None:
        """Add a call's pages.

        nbytes: bytes of a page.
        seconds: duration of the call.
        """
        self._samples.append((pages, pages * nbytes / seconds / 1e9))

    def take(self) -> list[tuple[int, float]]:
        """Return pages and GB/s of each call since the last `take`."""
        # Samples that other threads add from now on stay for the next `take`.
        return [self._samples.popleft() for _ in repeat(None, len(self._samples))]
