"""Make live servers load the prefixes that a store has."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hicachectl.formats.errors import StoreUnavailable
from hicachectl.prewarming.ranking import prefixes_worth_asking
from hicachectl.prewarming.through_server import ThroughServer, dp_ranks, prefix_of
from hicachectl.profiles.server import fetch_server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from hicachectl.formats.arrays import IntArray
    from hicachectl.prewarming.page_plan import PrewarmRequest
    from hicachectl.prewarming.through_server import Prefix
    from hicachectl.requests.reading import Request

_JOBS = 8  # requests under way by default

Ranks = tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class LiveServer:
    """A server's /server_info reply, and its DP ranks with separate caches."""

    info: Mapping[str, Any]
    ranks: Ranks


def live_servers(urls: Sequence[str]) -> dict[str, LiveServer]:
    """Return the deployment that each server reports, by URL.

    Raises StoreUnavailable, UsageError for a bad URL, and ProfileError for an impossible size.
    """
    infos = {url: fetch_server(url, "--through-server").info for url in urls}
    return {url: LiveServer(info, dp_ranks(info)) for url, info in infos.items()}


def pull(
    servers: Mapping[str, LiveServer],
    request: PrewarmRequest,
    usable_pages: IntArray,
    read_again: Callable[[list[int]], Iterable[Request]],
    *,
    deadline: float | None = None,
    pulling: list[ThroughServer],
    on_done: Callable[[int], None] = lambda requests: None,
) -> None:
    """Request each usable prefix once from each server and DP rank, the most valuable first.

    usable_pages: [requests] number of pages that the store has of each.
    read_again: yields the requests whose lines begin at some bytes.
    deadline: `time.monotonic()` of the end.
    pulling: receives each server before it is asked.
    """
    requests = request.requests
    assert requests is not None
    assert requests.starts is not None
    assert requests.hashing is not None
    hashing = requests.hashing
    # A trailing pool also has states inside longer prefixes; only a request that ends at
    # a state restores it.
    longest_only = not any(pool.trailing for pool in request.target.pools)
    chosen = prefixes_worth_asking(requests, usable_pages, request.rank, longest_only=longest_only)
    starts = requests.starts[chosen].tolist()

    def prefixes() -> Iterator[Prefix]:
        for number, found in zip(chosen.tolist(), read_again(starts), strict=True):
            yield prefix_of(number, found, int(usable_pages[number]), hashing)

    for url, live in servers.items():
        server = ThroughServer(url, ranks=live.ranks, jobs=request.options.jobs or _JOBS)
        pulling.append(server)
        with suppress(StoreUnavailable):  # the server says so in its document
            server.pull(prefixes(), deadline, on_done)
