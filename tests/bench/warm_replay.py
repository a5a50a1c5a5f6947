"""Replay requests through an LRU cache that was warmed, for every capacity at once.

Rules of the replay:

- The cache holds C blocks. It is warmed worst first with the first C blocks of an order, so that
  the best is the most recently used; cold, it starts empty.
- A request hits the longest prefix of its blocks that the cache holds, and a block is worth
  min(block_tokens, tokens of the prompt left) tokens.
- Then all its blocks are used, the deepest first, so that of one request the leaf goes first, as
  in SGLang's radix cache; what is over C leaves, least recently used first.

An LRU cache of C blocks holds the C blocks last used, whatever C is. So warming changes only the
first use of each warmed block, which hits where fewer than C other blocks were used since: those
of better rank, and those that requests used before it (its stack distance).
`tests/prewarm/test_replay.py` compares with a cache that is played block by block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from hicachectl.prewarm.trace import Trace

    Index = npt.NDArray[np.int64]
    Floats = npt.NDArray[np.float64]


class FirstUses(NamedTuple):
    """First uses, by later requests, of the blocks that earlier ones used; in their order.

    blocks: their index in the forest. requests: which one uses it first. tokens: what a hit saves.
    before: distinct blocks that the later requests used before.
    """

    blocks: Index
    requests: Index
    tokens: Floats
    before: Index


def part(trace: Trace, start: int, stop: int) -> Trace:
    """Return some of a trace's requests, with a forest of the blocks that they use."""
    from hicachectl.prewarm.forest import grow_forest
    from hicachectl.prewarm.trace import Trace as Part

    first, last = trace.offsets[start], trace.offsets[stop]
    used, blocks = np.unique(trace.blocks[first:last], return_inverse=True)
    offsets = trace.offsets[start : stop + 1] - first
    return Part(
        None if trace.times is None else trace.times[start:stop],
        offsets,
        blocks.astype(np.int32),
        trace.input_tokens[start:stop],
        trace.output_tokens[start:stop],
        trace.block_tokens,
        grow_forest(trace.forest.names[used], blocks.astype(np.int32), offsets),
    )


def first_uses(known: Trace, later: Trace) -> FirstUses:
    """Find the first use in `later` of each block of `known`; names are block ids."""
    request = np.repeat(np.arange(len(later)), np.diff(later.offsets))
    depth = later.forest.depths[later.blocks]
    _, first = np.unique(later.blocks, return_index=True)
    first.sort()
    before = np.searchsorted(first, later.offsets[request[first]])  # of the requests before
    names = later.forest.names[later.blocks[first]]
    place = np.minimum(np.searchsorted(known.forest.names, names), len(known.forest) - 1)
    found = known.forest.names[place] == names
    first, place, before = first[found], place[found], before[found]
    rest = later.input_tokens[request[first]] - later.block_tokens * depth[first]
    tokens = np.clip(rest, 0, later.block_tokens).astype(np.float64)
    return FirstUses(place, request[first], tokens, before)


def warmed_tokens(order: Index, uses: FirstUses, blocks: int, capacities: list[int]) -> Floats:
    """Count the tokens that warming in an order saves, for each capacity."""
    rank = np.full(blocks, np.iinfo(np.int64).max // 2)
    rank[order] = np.arange(len(order))
    ranks = rank[uses.blocks]
    distance = ranks + uses.before - _better_before(ranks, uses.requests)
    return np.array([uses.tokens[distance < capacity].sum() for capacity in capacities])


def clairvoyant(uses: FirstUses) -> Index:
    """Order the known blocks by their first use."""
    return uses.blocks


def _better_before(ranks: Index, requests: Index) -> Index:
    """Count for each use the better ranked blocks that requests before it used."""
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
