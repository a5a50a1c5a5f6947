"""Estimate from the times of batches how fast prompts are read, and compare with computing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hicachectl.bench.sample import BATCH_PAGES
from hicachectl.doctor.exposition import STAGE_SECONDS, UNCACHED, look_at
from hicachectl.profiles.server import server_service

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicachectl.bench.reads import Timing

_LONGEST_TOKENS = 1_000_000  # the longest prompt that is compared
_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of reads.

    start: seconds for each batch, besides its pages.
    page: seconds for each page.
    """

    start: float
    page: float

    def seconds(self, pages: int) -> float:
        """Return the seconds in which a rank reads some pages, batch after batch."""
        return -(-pages // BATCH_PAGES) * self.start + pages * self.page

    def faster_from(self, page_tokens: int, threshold: int, prefill: float) -> int | None:
        """Return the length in tokens from which on prompts are read faster than computed.

        Return None if no prompt that is compared is read faster.

        threshold: fewest tokens that servers restore.
        prefill: number of tokens that a server computes in a second.
        """
        least = max(1, -(-threshold // page_tokens))
        pages = np.arange(least, max(least, _LONGEST_TOKENS // page_tokens) + 1)
        reading = -(-pages // BATCH_PAGES) * self.start + pages * self.page
        # Each new batch adds its start, so a longer prompt can again be read more slowly than
        # computed. Take the length after the last such prompt.
        slower = np.flatnonzero(reading >= pages * page_tokens / prefill)
        first = int(slower[-1]) + 1 if len(slower) else 0
        return int(pages[first]) * page_tokens if first < len(pages) else None


def cost_of(timings: Sequence[Timing]) -> Cost:
    """Return the cost of a batch and a page, from the medians of full and of short batches."""
    full = max(timing.pages for timing in timings)
    shorts = [timing for timing in timings if timing.pages < full]
    whole = float(np.median([timing.seconds for timing in timings if timing.pages == full]))
    if shorts:
        few = shorts[0].pages
        part = float(np.median([timing.seconds for timing in shorts]))
        page = (whole - part) / (full - few)
        if page > 0:
            return Cost(max(0.0, part - few * page), page)
    return Cost(0.0, whole / full)


def prefill_of(url: str) -> tuple[float | None, str]:
    """Return the rate at which a live server computes a prompt, in tokens a second, and "".

    If the server's metrics do not show the rate, return None and the reason. Requests that a server
    computes together each count the time of all of them. So this is the rate of one prompt, not of
    the server.
    Raises UsageError.
    Sources: sglang srt/observability/metrics_collector.py, and req_time_stats.py ::
    PREFILL_FORWARD.
    """
    service, base = server_service(url, "--server", timeout_s=_TIMEOUT_S)
    try:
        look = look_at(service, base)
    finally:
        service.close()
    if look.problem:
        return None, look.problem
    tokens = look.value(f"{UNCACHED}_sum")
    seconds = look.value(STAGE_SECONDS, stage="prefill_forward")
    if not tokens or not seconds:
        return None, "The server has computed no prompt yet; send it prompts, or give --prefill"
    return tokens / seconds, ""
