"""Have live servers pull prefixes from the store into their own memory."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from hicachectl.chains import Hashing
from hicachectl.server import fetch_server
from hicachectl.through_server import ThroughServer, dp_ranks, prefix_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicachectl.formats.profile import Profile
    from hicachectl.inventory import IntArray
    from hicachectl.requests import Request


_JOBS = 8  # requests at once


def pull(
    urls: Sequence[str],
    requests: Sequence[Request],
    usable_pages: IntArray,
    profile: Profile,
    *,
    jobs: int | None = None,
    deadline_seconds: float | None = None,
    on_done: Callable[[int], None] = lambda requests: None,
) -> list[dict[str, Any]]:
    """Ask each server, at each of its DP ranks, for the prefixes that the store has.

    usable_pages: [requests]. Gives for each server how many were asked for and failed, the tokens
    that were cached, and of each request where they came from. Raises StoreUnavailable.
    """
    hashing = Hashing.of(profile)
    deadline = None if deadline_seconds is None else time.monotonic() + deadline_seconds
    reports = []
    for url in urls:
        ranks = dp_ranks(fetch_server(url).info)
        server = ThroughServer(url, ranks=ranks, jobs=_JOBS if jobs is None else jobs)
        prefixes = (
            prefix_of(number, request, int(pages), hashing)
            for number, (request, pages) in enumerate(zip(requests, usable_pages, strict=True))
            if pages
        )
        rows: list[dict[str, Any]] = []
        for pulled in server.pull(prefixes, deadline):
            rows.append(
                {
                    "request": pulled.number,
                    "dp_rank": pulled.dp_rank,
                    "tokens": pulled.pages * profile.page_size,
                    "cached_tokens": pulled.cached_tokens,
                    "cached_tokens_details": pulled.sources or None,
                    "error": pulled.error or None,
                }
            )
            on_done(1)
        reports.append(
            {
                "server": url,
                "requests": rows,
                "failed": sum(row["error"] is not None for row in rows),
                "cached_tokens": sum(row["cached_tokens"] for row in rows),
                "complete": server.complete,
            }
        )
    return reports
