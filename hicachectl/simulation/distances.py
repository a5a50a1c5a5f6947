"""Stack distances of prefix chains: how much a cache must hold to serve each page of a request.

The rank of a page is the number of different pages used since its last use, including the page
itself. A page that was never used has the rank NEVER. A cache that evicts the least recently used
page holds the pages whose ranks are at most its capacity. One pass over the requests therefore
gives the hits at every capacity.

A reference is one use of a page by a request. The arrays have the chains of all requests, one after
another: `blocks` [references] int32 are the numbers of the pages, and `offsets` [requests + 1]
int64 the places where the chains begin and end. No chain has a page twice.
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
    """Ranks of references. Both arrays are [references] int32.

    before: rank of the page before the request touches any page.
    touched: rank of the page just before it is touched, when the request has touched the earlier
        pages of the chain; None if a request touches the last page of its chain first.
    """

    before: Blocks
    touched: Blocks | None


def rank_pages(blocks: Blocks, offsets: IntArray, distinct: int, *, leaves_first: bool) -> Ranks:
    """Return the rank of every reference.

    distinct: number of distinct blocks.
    leaves_first: whether a request touches its pages from the last to the first, so that the last
        page of a chain is evicted first, as in SGLang's trees. Otherwise the first page is touched
        first, as in HiCacheFile and 3FS.
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

    Every block has one mark, at the position of its last touch. A Fenwick tree counts the marks.
    When all positions are used up, the marks move to the first positions, in their order.
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
    """Return the ranks without compiled loops. A million references take numpy some seconds.

    Let p be the last touch of a block before position s. The rank of the block at s is the number
    of distinct blocks in the touches from p to s. Of these s - p touches, count only the last touch
    of each block: leave out every touch that is repeated before s. The number left out is the
    number of positions before s that have a previous touch of their block after p.
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
    """Return the position of the previous occurrence of each block; -1 if there is none."""
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
        # Sort each piece of this width. Multiples of `step` keep the values of each piece above the
        # values of the piece before, so one search serves all pieces.
        pieces = previous[: total // width * width].reshape(-1, width)
        step = total + 2
        keys = np.sort(pieces, axis=1) + (np.arange(len(pieces)) * step)[:, None]
        asked = np.flatnonzero(ends & width)
        piece = ends[asked] // width - 1
        found = np.searchsorted(keys.ravel(), piece * step + least[asked], side="right")
        counts[asked] += (piece + 1) * width - found
        width *= 2
    return counts
