"""Earlier uses of each block, and the request that each request continues."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from hicachectl.requests.chains import Requests

MOST_COUNTED = 255  # uses, in `Uses.earlier`


@dataclass(frozen=True, eq=False, slots=True)
class Uses:
    """Uses of blocks.

    previous: [references] int32, the last earlier request that used the block; -1: none.
    earlier:  [references] uint8, number of earlier uses, at most `MOST_COUNTED`.
    last:     [blocks] int32, the last request that used the block.
    counts:   [blocks] int32, requests that used the block.
    """

    previous: npt.NDArray[np.int32]
    earlier: npt.NDArray[np.uint8]
    last: npt.NDArray[np.int32]
    counts: npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False, slots=True)
class Conversations:
    """Links between requests, as turns of conversations; all [requests].

    known:  int64, leading blocks that were used before.
    source: int32, the earlier request that this request continues; -1: none.
    turns:  int32, number of earlier requests of the conversation.
    first:  int32, the conversation's first request.
    left:   int32, the first request that continues this one; blocks that the later one does not use
            are left behind. If none continues, the number of requests.
    """

    known: npt.NDArray[np.int64]
    source: npt.NDArray[np.int32]
    turns: npt.NDArray[np.int32]
    first: npt.NDArray[np.int32]
    left: npt.NDArray[np.int32]


def walk_uses(requests: Requests) -> Uses:
    """Return the uses of the blocks. Requests are in the order of time."""
    blocks = requests.blocks
    last = np.full(len(requests.names), -1, np.int32)
    counts = np.zeros(len(requests.names), np.int32)
    previous = np.empty(len(blocks), np.int32)
    earlier = np.empty(len(blocks), np.uint8)
    start = 0
    for request, end in enumerate(requests.offsets[1:].tolist()):
        chain = blocks[start:end]  # distinct: a block has one depth
        previous[start:end] = last[chain]
        used = counts[chain]
        earlier[start:end] = np.minimum(used, MOST_COUNTED)
        counts[chain] = used + 1
        last[chain] = request
        start = end
    return Uses(previous, earlier, last, counts)


def link_requests(requests: Requests, uses: Uses) -> Conversations:
    """Link each request to the last earlier request that used the same deepest known block.

    If a block has more uses than the conversation has requests, several conversations share the
    block as a prompt; it then links no requests.
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
