"""Replay requests on caches of given capacities, to find how many leading pages each request hits.

A request hits its leading pages that the cache holds, at most as many as its reach, the number of
pages that a server can take from a store. Then it writes its other pages, and all its pages count
as used. `distances` describes the arrays. Results are
[capacities, requests] int32.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from hicachectl.formats.eviction import Policy
from hicachectl.simulation.caches import LEASE_S, WATERMARK, Start, cache_of
from hicachectl.simulation.compiled import compiled
from hicachectl.simulation.distances import rank_pages

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    import numpy.typing as npt

    from hicachectl.formats.arrays import IntArray
    from hicachectl.requests.chains import Requests
    from hicachectl.simulation.caches import Cache
    from hicachectl.simulation.distances import Blocks
    from hicachectl.simulation.sizes import PageSizes

    Runs = npt.NDArray[np.int32]
    Seconds = npt.NDArray[np.float64]


def replay(
    policy: Policy,
    requests: Requests,
    capacities: Sequence[int],
    sizes: PageSizes,
    *,
    ratio: float = 0.9,
    watermark: float = WATERMARK,
    least: int = 0,
    start: Start | None = None,
    seconds: Seconds | None = None,
) -> Runs:
    """Return the hits of each request at each capacity.

    capacities: bytes of the whole store; pages if the sizes are unknown.
    ratio: eviction_ratio of HiCacheFile.
    watermark: eviction_high_watermark_ratio of Mooncake's master.
    least: least number of leading pages that a server reads. If fewer are held, it reads none.
    start: pages that the cache holds at the start.
    seconds: [requests] times of the requests, ascending; None if unknown.

    One pass over the requests gives the hits of `lru` at all capacities if there are no trailing
    pools, and the hits of `hicachefile` if each rank writes a page as one object. Each capacity of
    other caches needs its own pass, which takes some microseconds for each page. The bound
    `optimal` ignores the objects of trailing pools.
    """
    if policy is Policy.OPTIMAL:
        runs = replay_optimal(requests, [*map(sizes.pages, capacities)], start)
    elif policy is Policy.LRU and not sizes.trailing_bytes:
        pages = [*map(sizes.pages, capacities)]
        runs = replay_lru(requests, pages, leaves_first=True, start=start)
    elif policy is Policy.HICACHEFILE and sizes.uniform:
        limits = [capacity // sizes.limits for capacity in capacities]
        nbytes = {room.files[0].nbytes for room in sizes.rooms}
        runs = replay_files(requests, limits, ratio, nbytes, start)
    else:
        parents = requests.forest.parents if policy is Policy.LRU else None
        runs = np.empty((len(capacities), len(requests)), np.int32)
        for row, capacity in enumerate(capacities):
            cache = cache_of(
                policy,
                capacity,
                sizes,
                parents=parents,
                ratio=ratio,
                watermark=watermark,
                lease=0.0 if seconds is None else LEASE_S,
                start=start,
            )
            runs[row] = replay_cache(requests, cache, least=least, seconds=seconds)
    return np.where(runs >= least, runs, 0) if least > 1 else runs


def replay_cache(
    requests: Requests, cache: Cache, *, least: int = 0, seconds: Seconds | None = None
) -> Runs:
    """Return the hits of one cache: [requests]. least, seconds: see `replay`."""
    runs = np.empty(len(requests), np.int32)
    times = np.zeros(len(requests)) if seconds is None else seconds
    rows = zip(
        pairwise(requests.offsets.tolist()), requests.reach.tolist(), times.tolist(), strict=True
    )
    for row, ((first, end), reach, time) in enumerate(rows):
        pages = requests.blocks[first:end].tolist()
        run = cache.held(pages[:reach])
        runs[row] = run = run if run >= least else 0
        if run:
            cache.read(pages[:run], time)
        if run < len(pages):
            cache.write(pages[run:], time)
    return runs


def replay_lru(
    requests: Requests,
    capacities: Sequence[int],
    *,
    leaves_first: bool,
    start: Start | None = None,
) -> Runs:
    """Return the hits of caches that evict the least recently used page.

    capacities: numbers of pages.
    leaves_first: see `rank_pages`.
    start: pages that the cache holds at the start. With `leaves_first`, the result is exact only if
        each page stands after the pages that continue it.
    """
    blocks, offsets, reach, distinct = _begun(requests, start, leaves_first=leaves_first)
    before = rank_pages(blocks, offsets, distinct, leaves_first=leaves_first).before
    runs = np.empty((len(capacities), len(reach)), np.int32)
    order = np.argsort(capacities, kind="stable")
    _lru_runs(before, offsets, reach, np.array(capacities, np.int64)[order], order, runs)
    return runs[:, len(reach) - len(requests) :]


@compiled
def _lru_runs(
    before: Blocks,
    offsets: IntArray,
    reach: IntArray,
    capacities: IntArray,
    rows: IntArray,
    runs: Runs,
) -> None:
    """Fill the hits of ascending capacities.

    A cache holds the pages whose ranks (see `distances`) are at most its capacity.

    rows: row of `runs` for each capacity.
    """
    for request in range(len(reach)):
        start, row = offsets[request], 0
        for place in range(reach[request]):
            while row < len(capacities) and before[start + place] > capacities[row]:
                runs[rows[row], request] = place
                row += 1
            if row == len(capacities):
                break
        for larger in range(row, len(capacities)):
            runs[rows[larger], request] = reach[request]


def replay_files(
    requests: Requests,
    limits: Sequence[int],
    ratio: float,
    nbytes: Collection[int] = (1,),
    start: Start | None = None,
) -> Runs:
    """Return the hits of HiCacheFile, which evicts down to a ratio of its limit.

    limits: values of max_size, in bytes of one rank.
    ratio: eviction_ratio.
    nbytes: different sizes that a page has on the ranks. All ranks use pages in the same order. A
        page is a hit if all ranks hold it.
    start: pages that the cache holds at the start.
    Source: SGLang mem_cache/storage/file/lru_file_evictor.py :: LRUFileEvictor.
    """
    blocks, offsets, reach, distinct = _begun(requests, start, leaves_first=False)
    before, touched = rank_pages(blocks, offsets, distinct, leaves_first=False)
    assert touched is not None
    first = len(reach) - len(requests)
    started = int(offsets[first])
    offsets, reach = offsets[first:], reach[first:]
    runs = np.full((len(limits), len(requests)), np.iinfo(np.int32).max, np.int32)
    for size in nbytes:
        most = np.array(limits, np.int64) // size
        kept = np.array([int(limit * ratio) // size for limit in limits], np.int64)
        held = np.where(started <= most, started, kept)
        _file_runs(before, touched, offsets, reach, most, kept, held, runs)
    return runs


@compiled
def _file_runs(
    before: Blocks,
    touched: Blocks,
    offsets: IntArray,
    reach: IntArray,
    capacities: IntArray,
    kept: IntArray,
    held: IntArray,
    runs: Runs,
) -> None:
    """Lower `runs` to the hits of one rank, at each capacity.

    The rank always holds the `held` most recently used pages. If a write would exceed the capacity,
    the rank evicts pages until `kept` pages are left, including the page to write.
    """
    for request in range(len(reach)):
        start, end = offsets[request], offsets[request + 1]
        for row in range(len(capacities)):
            most, holds = capacities[row], held[row]
            run = 0
            while run < reach[request] and before[start + run] <= holds:
                run += 1
            runs[row, request] = min(runs[row, request], run)
            for at in range(start, end):
                if touched[at] > holds and most:
                    if holds + 1 > most:
                        holds = min(holds, max(kept[row] - 1, 0))
                    holds += 1
            held[row] = holds


def replay_optimal(
    requests: Requests, capacities: Sequence[int], start: Start | None = None
) -> Runs:
    """Return the hits of a cache that knows all later requests, and evicts only leaves.

    The cache evicts the page with the furthest next use. A page is next used before the pages that
    continue it, or together with them. If several pages have the same next use, the last page of
    their chain is evicted first.
    capacities: numbers of pages.
    start: pages that the cache holds at the start.
    """
    if start is not None:
        # Pages with the same next use must stand in the order of their chain.
        depths = np.zeros(max(len(requests.names), start.pages.max(initial=-1) + 1), np.int32)
        depths[: len(requests.names)] = requests.forest.depths
        start = Start(start.pages[np.argsort(depths[start.pages], kind="stable")])
    blocks, offsets, reach, distinct = _begun(requests, start, leaves_first=False)
    following = _next_requests(blocks, offsets, distinct)
    runs = np.zeros((len(capacities), len(reach)), np.int32)
    for row, capacity in enumerate(capacities):
        _optimal_runs(blocks, offsets, reach, following, distinct, capacity, runs[row])
    return runs[:, len(reach) - len(requests) :]


def _begun(
    requests: Requests, start: Start | None, *, leaves_first: bool
) -> tuple[Blocks, IntArray, IntArray, int]:
    """Return blocks, offsets, reach and the number of distinct blocks.

    The pages of `start` become a first request, which hits nothing.
    """
    if start is None:
        return requests.blocks, requests.offsets, requests.reach, len(requests.names)
    pages = start.pages[::-1] if leaves_first else start.pages
    return (
        np.concatenate([pages.astype(np.int32), requests.blocks]),
        np.append(0, requests.offsets + len(pages)),
        np.append(0, requests.reach),
        max(len(requests.names), int(pages.max(initial=-1)) + 1),
    )


def _next_requests(blocks: Blocks, offsets: IntArray, distinct: int) -> Blocks:
    """Return the next request that uses the page of each reference: [references].

    For a page without a next use, this is the number of all requests.
    """
    following = np.empty(len(blocks), np.int32)
    last = np.full(distinct, len(offsets) - 1, np.int32)
    _fill_next(blocks, offsets, last, following)
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

    Each held page stands in the queue of the next request that uses it. All pages of a queue belong
    to the chain of this request. A page joins its queue after the pages that continue it, so the
    front of a queue is the last page of the chain. `ready` is a heap of the queues that are not
    empty, the queue with the furthest next use first.
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
        fronts[request] = -1  # this request uses all pages of its queue
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
