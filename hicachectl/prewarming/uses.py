"""Who used each block before, and which request each request continues."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from hicachectl.prewarming.trace import Trace

MOST_COUNTED = 255  # uses a reference tells apart


@dataclass(frozen=True, eq=False, slots=True)
class Uses:
    """The uses of blocks, as one walk through the trace finds them.

    previous: [references] int32, the request that used the block before this one; -1: none.
    earlier:  [references] uint8, how often it was used before, `MOST_COUNTED` at most.
    last:     [blocks] int32, the last request that used the block.
    counts:   [blocks] int32, requests that used it.
    """

    previous: npt.NDArray[np.int32]
    earlier: npt.NDArray[np.uint8]
    last: npt.NDArray[np.int32]
    counts: npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False, slots=True)
class Links:
    """How each request relates to the ones before it; all [requests].

    known:  int64, leading blocks that were used before.
    source: int32, the request that last used the deepest known block; -1: none.
    turns:  int32, requests in a row that each carried on the chain of the one before.
    """

    known: npt.NDArray[np.int64]
    source: npt.NDArray[np.int32]
    turns: npt.NDArray[np.int32]


def walk_uses(trace: Trace) -> Uses:
    """Walk through the requests once, in their order."""
    blocks = trace.blocks
    last = np.full(len(trace.forest), -1, np.int32)
    counts = np.zeros(len(trace.forest), np.int32)
    previous = np.empty(len(blocks), np.int32)
    earlier = np.empty(len(blocks), np.uint8)
    start = 0
    for request, end in enumerate(trace.offsets[1:].tolist()):
        chain = blocks[start:end]  # distinct, for a block stands at one depth
        previous[start:end] = last[chain]
        used = counts[chain]
        earlier[start:end] = np.minimum(used, MOST_COUNTED)
        counts[chain] = used + 1
        last[chain] = request
        start = end
    return Uses(previous, earlier, last, counts)


def link_requests(trace: Trace, uses: Uses) -> Links:
    """Link each request to the one that left the longest part of its prefix behind."""
    lengths = np.diff(trace.offsets)
    fresh = np.zeros(len(trace.blocks) + 1, np.int64)
    np.cumsum(uses.previous < 0, out=fresh[1:])
    known = lengths - np.diff(fresh[trace.offsets])
    source = np.full(len(trace), -1, np.int32)
    some = known > 0
    source[some] = uses.previous[trace.offsets[:-1][some] + known[some] - 1]
    # The last block of a prompt is mostly not full, and then no prefix of the next one.
    continues = some & (known >= lengths[source] - 1) & (known > 1)
    turns = [0] * len(trace)
    for request in np.flatnonzero(continues).tolist():
        turns[request] = turns[source[request]] + 1
    return Links(known, source, np.array(turns, np.int32))
