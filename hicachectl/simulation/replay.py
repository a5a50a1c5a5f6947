"""Serve chains of pages from caches of given capacities: how many leading pages each request hits.

A request hits its leading pages that the cache holds, at most its reach. Then it writes the others,
and all its pages count as used. Capacities are in pages. Arrays are as in `distances`; results are
[capacities, requests] int32.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from hicachectl.formats.restorable import leading_runs
from hicachectl.simulation.compiled import compiled
from hicachectl.simulation.distances import rank_pages

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from hicachectl.formats.arrays import IntArray
    from hicachectl.requests.chains import Requests
    from hicachectl.simulation.distances import Blocks

    Runs = npt.NDArray[np.int32]

_REFERENCES_AT_ONCE = 1 << 22


def replay_lru(requests: Requests, capacities: Sequence[int], *, leaves_first: bool) -> Runs:
    """Return the hits of caches that evict the least recently used page, down to their capacity.

    leaves_first: as in `rank_pages`.
    """
    ranks = rank_pages(
        requests.blocks, requests.offsets, len(requests.names), leaves_first=leaves_first
    )
    runs = np.empty((len(capacities), len(requests)), np.int32)
    for first, last in _pieces(requests.offsets):
        offsets = requests.offsets[first : last + 1]
        before = ranks.before[offsets[0] : offsets[-1]]
        for row, capacity in enumerate(capacities):
            runs[row, first:last] = leading_runs(before <= capacity, offsets - offsets[0])
    return np.minimum(runs, requests.reach)


def replay_files(requests: Requests, capacities: Sequence[int], ratio: float) -> Runs:
    """Return the hits of HiCacheFile, which evicts down to a ratio of its capacity.

    ratio: eviction_ratio of HiCacheFile. Source: SGLang mem_cache/storage/file/
    lru_file_evictor.py :: LRUFileEvictor.
    """
    before, touched = rank_pages(
        requests.blocks, requests.offsets, len(requests.names), leaves_first=False
    )
    assert touched is not None
    runs = np.empty((len(capacities), len(requests)), np.int32)
    for row, capacity in enumerate(capacities):
        kept = int(capacity * ratio)
        _file_runs(before, touched, requests.offsets, requests.reach, capacity, kept, runs[row])
    return runs


@compiled
def _file_runs(
    before: Blocks,
    touched: Blocks,
    offsets: IntArray,
    reach: IntArray,
    capacity: int,
    kept: int,
    runs: Runs,
) -> None:
    """Fill the hits of one capacity.

    The cache always holds the `held` most recently used pages. A write above the capacity evicts
    until `kept` pages are left with the written one.
    """
    held = 0
    for request in range(len(runs)):
        start, end = offsets[request], offsets[request + 1]
        run = 0
        while run < reach[request] and before[start + run] <= held:
            run += 1
        runs[request] = run
        for at in range(start, end):
            if touched[at] > held:
                if held + 1 > capacity:
                    held = min(held, max(kept - 1, 0))
                held += 1


def replay_optimal(requests: Requests, capacities: Sequence[int]) -> Runs:
    """Return the hits of a cache that knows all later requests, and evicts leaves only.

    It evicts the page whose next use is furthest. A page is used no later than the pages that
    continue it, so of pages with the same next use, the last of the chain goes first.
    """
    following = _next_requests(requests)
    runs = np.zeros((len(capacities), len(requests)), np.int32)
    for row, capacity in enumerate(capacities):
        _optimal_runs(
            requests.blocks,
            requests.offsets,
            requests.reach,
            following,
            len(requests.names),
            capacity,
            runs[row],
        )
    return runs


def _next_requests(requests: Requests) -> Blocks:
    """Return the next request that uses the page of each reference: [references].

    A page without a next use has the number of requests.
    """
    following = np.empty(len(requests.blocks), np.int32)
    last = np.full(len(requests.names), len(requests), np.int32)
    _fill_next(requests.blocks, requests.offsets, last, following)
    return following


@compiled
def _fill_next(blocks: Blocks, offsets: IntArray, last: Blocks, following: Blocks) -> None:
    for request in range(len(offsets) - 2, -1, -1):
        for at in range(offsets[request], offsets[request + 1]):
            following[at] = last[blocks[at]]
            last[blocks[at]] = request


@compiled
def _optimal_runs(
    blocks: Blocks,
    offsets: IntArray,
    reach: IntArray,
    following: Blocks,
    distinct: int,
    capacity: int,
    runs: Runs,
) -> None:
    """Fill the hits of one capacity.

    Held pages stand in queues by their next request. All pages of a queue are of that request's
    chain, and a page joins after the pages that continue it, so the front is the last of the chain.
    `ready` is a heap of the queues that are not empty, the furthest first.
    """
    count = len(runs)
    is_held = np.zeros(distinct, np.bool_)
    fronts = np.full(count + 1, -1, np.int32)
    backs = np.full(count + 1, -1, np.int32)
    behind = np.full(distinct, -1, np.int32)
    ready = np.empty(count + 2, np.int32)
    is_ready = np.zeros(count + 1, np.bool_)
    waiting = held = 0
    for request in range(count):
        start, end = offsets[request], offsets[request + 1]
        run = 0
        while run < reach[request] and is_held[blocks[start + run]]:
            run += 1
        runs[request] = run
        fronts[request] = -1  # its pages are those that this request uses
        for at in range(end - 1, start - 1, -1):
            block = blocks[at]
            if not is_held[block]:
                is_held[block] = True
                held += 1
            queue = following[at]
            behind[block] = -1
            if fronts[queue] < 0:
                fronts[queue] = block
                if not is_ready[queue]:
                    is_ready[queue] = True
                    child = waiting
                    waiting += 1
                    while child and ready[(child - 1) // 2] < queue:
                        ready[child] = ready[(child - 1) // 2]
                        child = (child - 1) // 2
                    ready[child] = queue
            else:
                behind[backs[queue]] = block
            backs[queue] = block
        while held > capacity:
            queue = ready[0]
            block = fronts[queue]
            if block >= 0:
                is_held[block] = False
                held -= 1
                fronts[queue] = behind[block]
                continue
            is_ready[queue] = False
            waiting -= 1
            moved, parent = ready[waiting], 0
            while 2 * parent + 1 < waiting:
                child = 2 * parent + 1
                if child + 1 < waiting and ready[child + 1] > ready[child]:
                    child += 1
                if ready[child] <= moved:
                    break
                ready[parent] = ready[child]
                parent = child
            ready[parent] = moved


def _pieces(offsets: IntArray) -> list[tuple[int, int]]:
    """Return ranges of requests of about `_REFERENCES_AT_ONCE` references."""
    steps = np.arange(0, offsets[-1], _REFERENCES_AT_ONCE)
    bounds = np.unique(np.append(np.searchsorted(offsets, steps), len(offsets) - 1)).tolist()
    return list(pairwise(bounds))
