"""Order the blocks of requests by the value of warming them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow.compute as pc

from hicachectl.formats.errors import UsageError
from hicachectl.formats.spec import page_bytes
from hicachectl.prewarming.value.reuse import reuse_values
from hicachectl.prewarming.value.uses import Uses, walk_uses
from hicachectl.requests.forest import prefix_closed

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt
    import pyarrow as pa

    from hicachectl.formats.arrays import IntArray
    from hicachectl.formats.profile import Profile
    from hicachectl.requests.chains import Requests

    Rank = Callable[[Requests], IntArray]


@dataclass(frozen=True, eq=False, slots=True)
class RankedBlocks:
    """Blocks to warm, best first; no block comes before a block of its prefix.

    requests: the requests that use the blocks.
    order: [ranked] int64, indices into the names of the requests.
    values: [ranked] float64, not increasing: chance that a request uses the block, averaged over
        horizons (`value.reuse`); if no block was used twice, the time of the last use; without
        times, `uses`.
    uses: [ranked] int32, number of requests that used the block.
    last_seen: [ranked] float64, time of the last use; None if unknown.
    """

    requests: Requests
    order: IntArray
    values: npt.NDArray[np.float64]
    uses: npt.NDArray[np.int32]
    last_seen: npt.NDArray[np.float64] | None

    def __len__(self) -> int:
        return len(self.order)


def rank_blocks(requests: Requests, *, budget: int | None = None) -> RankedBlocks:
    """Order all blocks of requests by the savings expected from warming them.

    The expectation starts one mean request interval after the last request. Blocks of equal value
    keep the order of their first use: one chain after another, so that each prefix is copied with
    the states at its end. budget: maximum number of blocks.
    """
    requests = requests.in_time_order()
    forest = requests.forest  # refuses a block with two prefixes, which could repeat in a chain
    uses = walk_uses(requests)
    closed = prefix_closed(forest, _values(requests, uses))
    order = np.argsort(-closed, kind="stable")[:budget]
    seen = None if requests.times is None else requests.times[uses.last[order]]
    return RankedBlocks(requests, order, closed[order], uses.counts[order], seen)


def rank_by_value(requests: Requests) -> IntArray:
    """Return the rank of each distinct page of requests; 0 is the best."""
    ranked = rank_blocks(requests)
    rank = np.empty(len(ranked), dtype=np.int64)
    rank[ranked.order] = np.arange(len(ranked))
    return rank


def rank_by_plan(pages: pa.StringArray) -> Rank:
    """Return a function that ranks the pages of requests in the order of a plan: `pages`."""

    def rank(requests: Requests) -> IntArray:
        names = requests.page_names
        places = pc.index_in(names, value_set=pages.cast(names.type)).to_numpy()
        ranks = np.empty(len(places), dtype=np.int64)
        ranks[np.argsort(places, kind="stable")] = np.arange(len(places))
        return ranks

    return rank


def pages_within(budget: int, profile: Profile | None, *, hashed: bool) -> int:
    """Return how many pages fit, with the objects of all ranks but without trailing pools.

    budget: bytes of a file store. Raises UsageError if the size of a page is unknown.
    """
    if not hashed:
        raise UsageError("--budget: block ids have no size; give --budget-pages")
    if profile is None:
        raise UsageError("--budget: page sizes need a profile; give --profile, or --budget-pages")
    page = page_bytes(profile)
    if not page:
        raise UsageError("--budget: the profile does not give a page's bytes; give --budget-pages")
    return budget // page


def prefixes_worth_asking(
    requests: Requests, usable_pages: IntArray, rank: Rank, *, longest_only: bool
) -> IntArray:
    """Return the indices of requests that contain each usable prefix once, best first.

    longest_only: leave out a prefix that another usable prefix continues.
    """
    usable = requests.cut(usable_pages)
    asked = np.flatnonzero(usable_pages)
    last = usable.blocks[usable.offsets[asked + 1] - 1]
    if longest_only:
        parents = usable.forest.parents
        continued = np.zeros(len(parents), dtype=np.bool_)
        continued[parents[parents >= 0]] = True
        asked, last = asked[~continued[last]], last[~continued[last]]
    _, first = np.unique(last, return_index=True)
    chosen: IntArray = asked[first][np.argsort(rank(usable)[last[first]], kind="stable")]
    return chosen


def _values(requests: Requests, uses: Uses) -> npt.NDArray[np.float64]:
    times = requests.times
    if times is None or not len(requests):
        return uses.counts.astype(np.float64)
    if times[-1] <= times[0]:  # all times are equal: use the order instead
        times = np.arange(len(requests), dtype=np.float64)
    now = float(times[-1] + (times[-1] - times[0]) / len(times))
    values = reuse_values(requests, times, now, uses)
    return values if values.any() else times[uses.last]
