"""Have live servers pull prefixes from the store into their own memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hicachectl.formats.errors import StoreUnavailable
from hicachectl.prewarm.through_server import ThroughServer, dp_ranks, prefix_of
from hicachectl.profiles.server import fetch_server
from hicachectl.requests.chains import Hashing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from hicachectl.formats.profile import Profile
    from hicachectl.pages.inventory import IntArray
    from hicachectl.prewarm.through_server import PullResult
    from hicachectl.requests.files import Request


_JOBS = 8  # requests at once


Ranks = tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class LiveServer:
    """What a server says of itself: its /server_info, and the DP ranks with caches of their own."""

    info: Mapping[str, Any]
    ranks: Ranks


def live_servers(urls: Sequence[str]) -> dict[str, LiveServer]:
    """Ask each server for its deployment.

    Raises StoreUnavailable, UsageError for a bad URL, and ProfileError for an impossible size.
    """
    infos = {url: fetch_server(url).info for url in urls}
    return {url: LiveServer(info, dp_ranks(info)) for url, info in infos.items()}


@dataclass(slots=True)
class PullReport:
    """What one server has done; whole whenever the pulling is interrupted.

    pulled: of each request, at each DP rank. complete: whether it was asked for all. error: what
    made it be given up, if anything did.
    """

    server: str
    pulled: list[PullResult]
    complete: bool = False
    error: str | None = None

    def document(self, page_size: int) -> dict[str, Any]:
        """Count the requests that failed and the tokens that were cached, and list the requests."""
        pulled = list(self.pulled)
        return {
            "server": self.server,
            "requests": [_row(one, page_size) for one in pulled],
            "failed": sum(bool(one.error) for one in pulled),
            "cached_tokens": sum(one.cached_tokens for one in pulled),
            "complete": self.complete,
            "error": self.error,
        }


def pull(
    servers: Mapping[str, LiveServer],
    asked: Callable[[], Iterable[tuple[int, Request]]],
    usable_pages: IntArray,
    profile: Profile,
    *,
    jobs: int | None = None,
    deadline: float | None = None,
    reports: list[PullReport],
    on_done: Callable[[int], None] = lambda requests: None,
) -> None:
    """Ask each server, at each of its DP ranks, for the prefixes that the store has.

    asked: gives requests with their numbers, for each server anew. usable_pages: by those numbers.
    deadline: in terms of time.monotonic(). reports: gets one of each server that is asked.
    """
    hashing = Hashing.of(profile)
    for url, live in servers.items():
        server = ThroughServer(url, ranks=live.ranks, jobs=_JOBS if jobs is None else jobs)
        report = PullReport(url, server.pulled)
        reports.append(report)
        prefixes = (
            prefix_of(number, request, int(usable_pages[number]), hashing)
            for number, request in asked()
            if usable_pages[number]
        )
        try:
            server.pull(prefixes, deadline, on_done)
            report.complete = server.complete
        except StoreUnavailable as lost:
            report.error = str(lost)


def _row(pulled: PullResult, page_size: int) -> dict[str, Any]:
    return {
        "request": pulled.number,
        "dp_rank": pulled.dp_rank,
        "tokens": pulled.pages * page_size,
        "cached_tokens": pulled.cached_tokens,
        "cached_tokens_details": pulled.sources or None,
        "error": pulled.error or None,
    }
