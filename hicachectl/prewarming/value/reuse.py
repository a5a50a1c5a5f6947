"""Value of warming a block: the chance of a use before a cache evicts the block.

Only the first use counts, because a block that was not warmed is computed at its first use, and
then cached like any other block. So the number of uses ranks blocks badly. How long a cache keeps a
block depends on the cache's size, which is unknown. So the chance is averaged over horizons from
1/32 to all of the trace's span. Chances are measured on the trace (`hazard`), from blocks of the
same age, number of uses, output length and so on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hicachectl.prewarming.value.hazard import Hazards, Waits, age_edges, fit_hazards
from hicachectl.prewarming.value.traits import (
    Conversations,
    RequestFactors,
    Uses,
    link_requests,
    take_traits,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from hicachectl.requests.chains import Requests

    Floats = npt.NDArray[np.float64]
    Index = npt.NDArray[np.int64]

HORIZONS = tuple(0.5**halvings for halvings in range(6))  # shares of the trace's span

_SAMPLED_REQUESTS = 20_000  # requests from which waits are taken, few enough to be fast
_PRIOR_EVENTS = 4.0
_REFERENCES_AT_ONCE = 1 << 20
_GROUPS_AT_ONCE = 1 << 17


@dataclass(frozen=True, eq=False, slots=True)
class Reuse:
    """Expected reuse of blocks after the last request.

    groups: key of each group of blocks with equal chances.
    group_of: [blocks] index of the block's group in `groups`.
    ages: [requests] float64, time since the request.
    span: time since the first request.
    """

    hazards: Hazards
    traits: RequestFactors
    groups: Index
    group_of: Index
    ages: Floats
    span: float

    def chances(self, horizons: Sequence[float]) -> Iterator[tuple[slice, Floats]]:
        """Yield slices of groups, and the chances of a use: [horizons, groups of the slice]."""
        for start in range(0, len(self.groups), _GROUPS_AT_ONCE):
            piece = slice(start, start + _GROUPS_AT_ONCE)
            requests, block_codes = np.divmod(self.groups[piece], self.traits.block_levels)
            codes = self.traits.codes(requests, block_codes)
            yield piece, self.hazards.chances(codes, self.ages[requests], horizons)


def reuse_values(requests: Requests, times: Floats, now: float, uses: Uses) -> Floats:
    """Return each block's chance of a use, averaged over `HORIZONS`: [blocks].

    All values are 0 if no block was used twice. A block may have a higher value than its prefix.
    times: [requests], not decreasing.
    now: time of the estimate, not before the last request.
    """
    reuse = fit_reuse(requests, times, now, uses)
    if reuse is None:
        return np.zeros(len(requests.names))
    means = np.empty(len(reuse.groups))
    for piece, chances in reuse.chances([share * reuse.span for share in HORIZONS]):
        means[piece] = chances.mean(0)
    return means[reuse.group_of]


def fit_reuse(requests: Requests, times: Floats, now: float, uses: Uses) -> Reuse | None:
    """Measure how soon blocks are used again. Return None if no block is used twice."""
    links = link_requests(requests, uses)
    traits = take_traits(requests, links, times)
    waits, codes = _waits(requests, times, now, uses, links, traits)
    if not waits.durations[waits.used].any():
        return None
    span = now - times[0]
    hazards = fit_hazards(
        waits,
        codes,
        traits.factors,
        age_edges(waits.durations[waits.used]),
        longest=span,
        prior=_PRIOR_EVENTS,
    )
    groups, group_of = _alike(requests, uses, links, traits)
    return Reuse(hazards, traits, groups, group_of, now - times, span)


def _waits(
    requests: Requests,
    times: Floats,
    now: float,
    uses: Uses,
    links: Conversations,
    traits: RequestFactors,
) -> tuple[Waits, Index]:
    """Return the waits that began at a sample of requests, and the codes of their cells."""
    stride = -(-len(requests) // _SAMPLED_REQUESTS)
    sampled = np.arange(len(requests)) % stride == 0
    begins, ends, depths, counts = [], [], [], []
    for start in range(0, len(requests.blocks), _REFERENCES_AT_ONCE):
        piece = slice(start, start + _REFERENCES_AT_ONCE)
        previous = uses.previous[piece]
        at = np.flatnonzero((previous >= 0) & sampled[previous])
        begins.append(previous[at])
        ends.append(np.searchsorted(requests.offsets, start + at, side="right") - 1)
        depths.append(requests.forest.depths[requests.blocks[piece][at]])
        counts.append(uses.earlier[piece][at])
    waiting = np.flatnonzero(sampled[uses.last])
    begin = np.concatenate([*begins, uses.last[waiting]]).astype(np.int64)
    end = np.concatenate([*ends, np.full(len(waiting), len(requests))])
    depth = np.concatenate([*depths, requests.forest.depths[waiting]])
    count = np.concatenate([*counts, uses.counts[waiting]])
    return _cells(requests, np.append(times, now), links, traits, (begin, end, depth, count))


def _cells(
    requests: Requests,
    times: Floats,
    links: Conversations,
    traits: RequestFactors,
    waits: tuple[Index, Index, Index, Index],
) -> tuple[Waits, Index]:
    """Return the waits with their cells. A wait is split when its block is left behind.

    times: times of the requests, then the end of the trace.
    waits: for each wait, the requests that began and ended it, and the depth and uses of its block.
    """
    begin, end, depth, count = waits
    # Blocks of a long chain weigh less, because they are not independent.
    weight = 1 / np.sqrt(np.diff(requests.offsets)[begin])
    middle = links.left[begin]
    left = np.less(middle, end)
    at = np.flatnonzero(left)
    every = np.concatenate((np.arange(len(begin)), at, at))
    whole = len(begin)
    # Time after a block was left behind: the whole wait minus the time before.
    behind = np.concatenate((left, np.zeros(len(at), np.bool_), np.ones(len(at), np.bool_)))
    stop = np.concatenate((end, middle[at], middle[at]))
    sign = np.concatenate((np.ones(whole + len(at)), -np.ones(len(at))))
    begin = begin[every]
    key = begin * traits.block_levels
    key += traits.block_codes(begin, depth[every], count[every], behind)
    distinct, cells = np.unique(key, return_inverse=True)
    used = np.less(stop, len(requests)) & (np.arange(len(every)) < whole)
    found = Waits(cells, times[stop] - times[begin], used, sign * weight[every])
    return found, traits.codes(*np.divmod(distinct, traits.block_levels))


def _alike(
    requests: Requests, uses: Uses, links: Conversations, traits: RequestFactors
) -> tuple[Index, Index]:
    """Group blocks that have equal chances, because they have the same last request and code.

    Return the keys of the groups, and the group of each block.
    """
    last = uses.last.astype(np.int64)
    left = np.less(links.left[last], len(requests))
    key = last * traits.block_levels
    key += traits.block_codes(last, requests.forest.depths, uses.counts, left)
    present = np.zeros(len(requests) * traits.block_levels, np.bool_)
    present[key] = True
    return np.flatnonzero(present), (np.cumsum(present) - 1)[key]
