"""Known properties of blocks that wait for a next use, and integer codes for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hicachectl.prewarming.value.hazard import Factor

if TYPE_CHECKING:
    import numpy.typing as npt

    from hicachectl.requests.chains import Requests

    Codes = npt.NDArray[np.int64]

MOST_COUNTED = 255  # largest count in `Uses.earlier`, which is uint8


@dataclass(frozen=True, eq=False, slots=True)
class Uses:
    """Uses of blocks.

    previous: [references] int32, last earlier request that used the block; -1 if there is none.
    earlier:  [references] uint8, number of earlier uses, at most `MOST_COUNTED`.
    last:     [blocks] int32, last request that used the block.
    counts:   [blocks] int32, number of requests that used the block.
    """

    previous: npt.NDArray[np.int32]
    earlier: npt.NDArray[np.uint8]
    last: npt.NDArray[np.int32]
    counts: npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False, slots=True)
class Conversations:
    """Links between requests, as turns of conversations. All arrays are [requests].

    known:  int64, number of leading blocks that an earlier request used.
    source: int32, earlier request that this request continues; -1 if there is none.
    turns:  int32, number of earlier requests of the conversation.
    first:  int32, first request of the conversation.
    left:   int32, first request that continues this request, or the number of requests if there is
        none. Blocks that the continuation does not use are left behind.
    """

    known: npt.NDArray[np.int64]
    source: npt.NDArray[np.int32]
    turns: npt.NDArray[np.int32]
    first: npt.NDArray[np.int32]
    left: npt.NDArray[np.int32]


def walk_uses(requests: Requests) -> Uses:
    """Return the uses of the blocks. requests: requests in the order of time."""
    blocks = requests.blocks
    last = np.full(len(requests.names), -1, np.int32)
    counts = np.zeros(len(requests.names), np.int32)
    previous = np.empty(len(blocks), np.int32)
    earlier = np.empty(len(blocks), np.uint8)
    start = 0
    for request, end in enumerate(requests.offsets[1:].tolist()):
        chain = blocks[start:end]  # distinct blocks, because each block has one depth
        previous[start:end] = last[chain]
        used = counts[chain]
        earlier[start:end] = np.minimum(used, MOST_COUNTED)
        counts[chain] = used + 1
        last[chain] = request
        start = end
    return Uses(previous, earlier, last, counts)


def link_requests(requests: Requests, uses: Uses) -> Conversations:
    """Link each request to the last earlier request that used its deepest known block.

    A block with more uses than the conversation has requests is a prompt that several conversations
    share. Such a block links no requests.
    """
    count = len(requests)
    fresh = np.zeros(len(requests.blocks) + 1, np.int64)
    np.cumsum(uses.previous < 0, out=fresh[1:])
    known = np.diff(requests.offsets) - np.diff(fresh[requests.offsets])
    some = np.flatnonzero(known)
    deepest = requests.offsets[some] + known[some] - 1
    source, turns, left = [-1] * count, [0] * count, [count] * count
    first = list(range(count))
    for request, user, used in zip(
        some.tolist(), uses.previous[deepest].tolist(), uses.earlier[deepest].tolist(), strict=True
    ):
        if used <= turns[user] + 1:
            source[request] = user
            turns[request] = turns[user] + 1
            first[request] = first[user]
            left[user] = min(left[user], request)
    return Conversations(
        known, *(np.array(column, np.int32) for column in (source, turns, first, left))
    )


_USES = np.array([2, 3, 5, 9, 17])  # one level for each doubling from 3 on
_TURNS = np.array([1, 2, 3, 5, 9])
_BLOCKS = np.array([1, 2, 4, 16, 64])
_QUANTILES = 12
_FEW_QUANTILES = 6  # fewer levels for a factor that is also split by age
_USE_FACTOR = Factor("uses", len(_USES) + 1)
_DEPTH_FACTOR = Factor("depth", len(_BLOCKS) + 1)
_TAIL_FACTOR = Factor("tail", 2)  # whether the block is the last of a prompt, and partly filled
_LEFT_FACTOR = Factor("left", 2)  # whether the conversation continued without the block


@dataclass(frozen=True, eq=False, slots=True)
class RequestFactors:
    """Codes of requests, which are joined with codes of their blocks.

    factors:  factors in the order of the columns of `codes`.
    requests: [requests, request factors] int64, level of the request in each factor.
    tails:    [requests] int64, depth of the last block if it is partly filled, else -1.
    """

    factors: tuple[Factor, ...]
    requests: Codes
    tails: Codes

    def block_codes(
        self,
        requests: Codes,
        depths: npt.NDArray[np.integer],
        uses: npt.NDArray[np.integer],
        left: npt.NDArray[np.bool_],
    ) -> Codes:
        """Return a small code for each block from its last request, depth, uses and `left`."""
        use = _by_edges(_USES, uses)
        depth = _by_edges(_BLOCKS, depths)
        tail = self.tails[requests] == depths
        codes: Codes = ((use * _DEPTH_FACTOR.levels + depth) * 2 + tail) * 2 + left
        return codes

    @property
    def block_levels(self) -> int:
        """Number of different block codes."""
        return _USE_FACTOR.levels * _DEPTH_FACTOR.levels * 4

    def codes(self, requests: Codes, block_codes: Codes) -> Codes:
        """Return the codes of all factors: [rows, factors]."""
        use, depth = np.divmod(block_codes // 4, _DEPTH_FACTOR.levels)
        tail, left = block_codes // 2 % 2, block_codes % 2
        return np.column_stack((use, depth, tail, left, self.requests[requests]))


def take_traits(
    requests: Requests, links: Conversations, times: npt.NDArray[np.float64]
) -> RequestFactors:
    """Return the codes of each request for properties that may predict its continuation."""
    lengths = np.diff(requests.offsets)
    going_on = links.source >= 0
    pace = np.where(going_on, times - times[links.source], -1.0)
    habit = np.where(going_on, (times - times[links.first]) / np.maximum(links.turns, 1), -1.0)
    columns = {
        Factor("turns", len(_TURNS) + 1, age_groups=4): _by_edges(_TURNS, links.turns),
        Factor("fresh", len(_BLOCKS) + 1): _by_edges(_BLOCKS, lengths - links.known),
        Factor("added", _QUANTILES + 1): _by_quantile(_added_tokens(requests, links)),
        Factor("pace", _QUANTILES + 1): _by_quantile(pace),
        Factor("habit", _FEW_QUANTILES + 1, age_groups=4): _by_quantile(habit, _FEW_QUANTILES),
        Factor("output", _QUANTILES + 1, age_groups=4): _by_quantile(requests.output_tokens),
    }
    tails = np.full(len(requests), -1, np.int64)
    if requests.block_tokens:
        open_ended = requests.tokens % requests.block_tokens > 0
        tails[open_ended] = lengths[open_ended] - 1
    if requests.hashed:  # only full pages have hashes, so no block is partly filled
        tails[:] = -1
    return RequestFactors(
        (_USE_FACTOR, _DEPTH_FACTOR, _TAIL_FACTOR, _LEFT_FACTOR, *columns),
        np.column_stack(list(columns.values())),
        tails,
    )


def _added_tokens(requests: Requests, links: Conversations) -> Codes:
    """Return how many tokens each prompt adds to the previous prompt and answer; -1 if unknown."""
    tokens, before = requests.tokens, links.source
    going_on = before >= 0
    so_far = np.where(going_on, tokens[before], 0)
    answered = np.where(going_on, np.maximum(requests.output_tokens[before], 0), 0)
    known = (tokens >= 0) & (so_far >= 0)
    return np.where(known, np.maximum(tokens - so_far - answered, 0), -1)


def _by_edges(edges: Codes, values: npt.NDArray[np.integer]) -> Codes:
    return np.searchsorted(edges, values, side="right").astype(np.int64)


def _by_quantile(
    values: npt.NDArray[np.int64] | npt.NDArray[np.float64], quantiles: int = _QUANTILES
) -> Codes:
    """Return the quantile of each value, counted from 1. Negative values are unknown and get 0."""
    known = values[values >= 0]
    if not len(known):
        return np.zeros(len(values), np.int64)
    edges = np.unique(np.quantile(known, np.linspace(0, 1, quantiles + 1)[1:-1]))
    return np.where(values < 0, 0, 1 + np.searchsorted(edges, values, side="right"))
