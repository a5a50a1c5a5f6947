"""Have live servers pull prefixes from the store into their own memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hicachectl.chains import Hashing
from hicachectl.formats.errors import StoreUnavailable
from hicachectl.server import fetch_server
from hicachectl.through_server import ThroughServer, dp_ranks, prefix_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from hicachectl.formats.profile import Profile
    from hicachectl.inventory import IntArray
    from hicachectl.requests import Request
    from hicachectl.through_server import Pulled


_JOBS = 8  # requests at once


Ranks = tuple[int | None, ...]


def ranks_of(urls: Sequence[str]) -> dict[str, Ranks]:
    """Ask each server for its DP ranks. Raises StoreUnavailable, and UsageError for a bad URL."""
    return {url: dp_ranks(fetch_server(url).info) for url in urls}


def pull(
    servers: Mapping[str, Ranks],
    asked: Callable[[], Iterable[tuple[int, Request]]],
    usable_pages: IntArray,
    profile: Profile,
    *,
    jobs: int | None = None,
    deadline: float | None = None,
    reports: list[dict[str, Any]],
    on_done: Callable[[int], None] = lambda requests: None,
) -> None:
    """Ask each server, at each of its DP ranks, for the prefixes that the store has.

    asked: gives requests with their numbers, for each server anew. usable_pages: by those numbers.
    deadline: in terms of time.monotonic(). reports: gets for each server, also when this is
    interrupted, how many requests failed, the tokens that were cached, of each request where they
    came from, and what made the server be given up, if anything did.
    """
    hashing = Hashing.of(profile)
    for url, ranks in servers.items():
        server = ThroughServer(url, ranks=ranks, jobs=_JOBS if jobs is None else jobs)
        prefixes = (
            prefix_of(number, request, int(usable_pages[number]), hashing)
            for number, request in asked()
            if usable_pages[number]
        )
        rows: list[dict[str, Any]] = []
        error, ended = None, False
        try:
            for pulled in server.pull(prefixes, deadline):
                rows.append(_row(pulled, profile.page_size))
                on_done(1)
            ended = server.complete
        except StoreUnavailable as lost:
            error = str(lost)
        finally:
            rows += [_row(pulled, profile.page_size) for pulled in server.unclaimed]
            reports.append(
                {
                    "server": url,
                    "requests": rows,
                    "failed": sum(row["error"] is not None for row in rows),
                    "cached_tokens": sum(row["cached_tokens"] for row in rows),
                    "complete": ended,
                    "error": error,
                }
            )


def _row(pulled: Pulled, page_size: int) -> dict[str, Any]:
    return {
        "request": pulled.number,
        "dp_rank": pulled.dp_rank,
        "tokens": pulled.pages * page_size,
        "cached_tokens": pulled.cached_tokens,
        "cached_tokens_details": pulled.sources or None,
        "error": pulled.error or None,
    }
