"""Replay requests through a warmed LRU cache, for every capacity at once.

Rules of the replay:

- The cache holds C blocks. The first C blocks of an order warm it, worst first, so the best block
is the most recently used. A cold cache starts empty.
- A request hits the longest prefix of its blocks in the cache. A block is worth min(block_tokens,
remaining tokens of the prompt) tokens.
- Then all blocks of the request are used, deepest first, so its leaf is evicted first, as in
SGLang's radix cache. Blocks beyond C are evicted, least recently used first.

An LRU cache of C blocks holds the last C blocks used, for any C. So warming changes only the first
use of each warmed block. That use is a hit if fewer than C other blocks were used since: blocks of
better rank, and blocks that earlier requests used (its stack distance).
`tests/prewarming/test_replay.py` compares this with a cache simulated block by block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

if TYPE_CHECKING:
    import numpy.typing as npt

    from hicachectl.requests.chains import Requests

    Index = npt.NDArray[np.int64]
    Floats = npt.NDArray[np.float64]


class FirstUses(NamedTuple):
    """First uses, by later requests, of blocks that earlier requests used; in order of use.

    blocks: index among the names of the earlier requests.
    requests: the request that uses the block first.
    tokens: number that a hit saves.
    before: number of distinct blocks that the later requests used before.
    """

    blocks: Index
    requests: Index
    tokens: Floats
    before: Index


def part(requests: Requests, start: int, stop: int) -> Requests:
    """Return requests [start, stop)."""
    return requests.take(np.arange(start, stop))


def first_uses(known: Requests, later: Requests) -> FirstUses:
    """Find the first use in `later` of each block of `known`; names are block ids."""
    request = np.repeat(np.arange(len(later)), np.diff(later.offsets))
    depth = later.forest.depths[later.blocks]
    _, first = np.unique(later.blocks, return_index=True)
    first.sort()
    before = np.searchsorted(first, later.offsets[request[first]])  # blocks of the requests before
    names = pa.array(later.names[later.blocks[first]])
    place = pc.index_in(names, value_set=pa.array(known.names)).fill_null(-1).to_numpy()
    found = place >= 0
    first, place, before = first[found], place[found], before[found]
    rest = later.tokens[request[first]] - later.block_tokens * depth[first]
    tokens = np.clip(rest, 0, later.block_tokens).astype(np.float64)
    return FirstUses(place, request[first], tokens, before)


def warmed_tokens(order: Index, uses: FirstUses, blocks: int, capacities: list[int]) -> Floats:
    """Return the tokens that warming in an order saves, for each capacity."""
    rank = np.full(blocks, np.iinfo(np.int64).max // 2)
    rank[order] = np.arange(len(order))
    ranks = rank[uses.blocks]
    distance = ranks + uses.before - _better_before(ranks, uses.requests)
    return np.array([uses.tokens[distance < capacity].sum() for capacity in capacities])


def clairvoyant(uses: FirstUses) -> Index:
    """Return the known blocks in the order of their first use."""
    return uses.blocks


def _better_before(ranks: Index, requests: Index) -> Index:
    """Count for each use the blocks of better rank that earlier requests used."""
    place = np.argsort(np.argsort(ranks, kind="stable")) + 1
    tree = [0] * (len(ranks) + 1)
    counts = np.zeros(len(ranks), np.int64)
    pending: list[int] = []
    for use, (at, request) in enumerate(zip(place.tolist(), requests.tolist(), strict=True)):
        if pending and request != requests[use - 1]:
            for position in pending:
                _add(tree, position)
            pending.clear()
        counts[use] = _sum(tree, at - 1)
        pending.append(at)
    return counts


def _add(tree: list[int], position: int) -> None:
    while position < len(tree):
        tree[position] += 1
        position += position & -position


def _sum(tree: list[int], position: int) -> int:
    total = 0
    while position:
        total += tree[position]
        position &= position - 1
    return total
