"""How much a cache must hold to serve each page of a request: stack distances of prefix chains.

A cache that evicts the least recently used page holds, at capacity C, the C pages of the lowest
ranks: the rank of a page counts the pages used since its last use, and itself. Ranks are taken
before a request touches anything, so one pass over the requests answers every capacity. A page
that was never used has the rank NEVER.

Requests are chains, one after another: `blocks` [references] int32, `offsets` [requests + 1] int64.
No chain has a page twice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hicachectl.simulation.compiled import compiled, is_compiled

if TYPE_CHECKING:
    import numpy.typing as npt

    from hicachectl.formats.arrays import IntArray

    Blocks = npt.NDArray[np.int32]

NEVER = np.iinfo(np.int32).max


class Ranks(NamedTuple):
    """Ranks of references, [references] int32 each.

    before: rank before the request touches any page.
    touched: rank when the page is touched, after the pages before it; None where the last page of
        a chain is touched first.
    """

    before: Blocks
    touched: Blocks | None


def rank_pages(blocks: Blocks, offsets: IntArray, distinct: int, *, leaves_first: bool) -> Ranks:
    """Return the rank of every reference.

    distinct: number of distinct blocks.
    leaves_first: touch the pages of a request from the last to the first, so that an eviction
        takes the last page of a chain first, as SGLang's trees do. Otherwise, the first page of a
        request is touched first, as HiCacheFile and 3FS do.
    """
    if is_compiled(len(blocks)):
        before = np.empty(len(blocks), np.int32)
        touched = np.empty(0 if leaves_first else len(blocks), np.int32)
        _ranks(blocks, offsets, distinct, leaves_first, before, touched)
        return Ranks(before, None if leaves_first else touched)
    return _ranks_by_sorting(blocks, offsets, leaves_first=leaves_first)


@compiled
def _ranks(
    blocks: Blocks,
    offsets: IntArray,
    distinct: int,
    leaves_first: bool,
    before: Blocks,
    touched: Blocks,
) -> None:
    """Fill `before` and `touched`.

    Every block has one mark, at the position of its last touch. A Fenwick tree counts marks, and
    positions are numbered anew when they are used up.
    """
    longest = 0
    for request in range(len(offsets) - 1):
        longest = max(longest, offsets[request + 1] - offsets[request])
    size = 2 * distinct + longest
    tree = np.zeros(size + 1, np.int32)
    owners = np.full(size + 1, -1, np.int32)
    places = np.zeros(distinct, np.int32)
    last = held = 0
    for request in range(len(offsets) - 1):
        start, end = offsets[request], offsets[request + 1]
        if last + end - start > size:
            last = 0
            for place in range(1, size + 1):
                owner = owners[place]
                owners[place] = -1
                if owner >= 0 and places[owner] == place:
                    last += 1
                    owners[last] = owner
                    places[owner] = last
            for place in range(1, size + 1):
                tree[place] = min(max(last - (place - (place & -place)), 0), place & -place)
        for at in range(start, end):
            place = places[blocks[at]]
            if place == 0:
                before[at] = NEVER
                continue
            count = held
            place -= 1
            while place:
                count -= tree[place]
                place &= place - 1
            before[at] = count
        for step in range(end - start):
            at = end - 1 - step if leaves_first else start + step
            block = blocks[at]
            place = places[block]
            if not leaves_first:
                touched[at] = NEVER
                if place:
                    count = held
                    below = place - 1
                    while below:
                        count -= tree[below]
                        below &= below - 1
                    touched[at] = count
            if place:
                owners[place] = -1
                while place <= size:
                    tree[place] -= 1
                    place += place & -place
            else:
                held += 1
            last += 1
            place = last
            owners[place] = block
            places[block] = place
            while place <= size:
                tree[place] += 1
                place += place & -place


def _ranks_by_sorting(blocks: Blocks, offsets: IntArray, *, leaves_first: bool) -> Ranks:
    """Return the ranks without compiled loops: O(n log n) in numpy, a few seconds a million.

    A touch at position q is followed by another touch of its block before position s if the later
    one, at q' < s, has its previous touch at q. So of the s - p - 1 touches between a block's last
    touch p and s, those count for distinct blocks that no q' < s with a previous touch after p
    repeats.
    """
    starts = np.repeat(offsets[:-1], np.diff(offsets))
    ends = np.repeat(offsets[1:], np.diff(offsets))
    touches = np.arange(len(blocks))
    if leaves_first:
        touches = starts + ends - 1 - touches
    order = np.empty(len(blocks), np.int64)
    order[touches] = np.arange(len(blocks))
    previous = previous_uses(blocks[order])
    last = previous[touches]

    def ranks(now: IntArray) -> Blocks:
        repeated = _count_later(previous, now, last)
        return np.where(last < 0, NEVER, now - last - repeated).astype(np.int32)

    return Ranks(ranks(starts), None if leaves_first else ranks(touches))


def previous_uses(blocks: Blocks) -> IntArray:
    """Return the position of the same block's previous occurrence; -1 for the first."""
    order = np.argsort(blocks, kind="stable")
    again = np.flatnonzero(blocks[order[1:]] == blocks[order[:-1]])
    previous = np.full(len(blocks), -1, np.int64)
    previous[order[again + 1]] = order[again]
    return previous


def _count_later(previous: IntArray, ends: IntArray, least: IntArray) -> IntArray:
    """Return how many of the first `ends` values of `previous` are above `least`: [ends]."""
    counts = np.zeros(len(ends), np.int64)
    total = len(previous)
    width = 1
    while width <= total:
        # The pieces of this width are sorted; adding a step per piece sorts them all.
        pieces = previous[: total // width * width].reshape(-1, width)
        step = total + 2
        keys = np.sort(pieces, axis=1) + (np.arange(len(pieces)) * step)[:, None]
        asked = np.flatnonzero(ends & width)
        piece = ends[asked] // width - 1
        found = np.searchsorted(keys.ravel(), piece * step + least[asked], side="right")
        counts[asked] += (piece + 1) * width - found
        width *= 2
    return counts
