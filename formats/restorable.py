"""Find the prefixes of page chains that a server can restore, by its pools' hit policies.

A prefix of p pages is restorable if every pool has the pages that its policy needs. With ALL_PAGES,
a pool needs pages 0..p-1. With TRAILING_PAGES, it needs the last `window` of these pages. Ranks
agree on the longest prefix that all ranks can restore. Each rank has a set of lengths that it can
restore. The longest prefix is the maximum of the intersection of these sets, not the minimum of
their maxima.

Source: SGLang srt/mem_cache/hicache_storage.py ::
HiCacheFile.batch_exists_v2; storage/mooncake_store/mooncake_store.py ::
MooncakeStore.batch_exists_v2; hybrid_cache/hybrid_cache_controller.py :: _sync_prefetch_hit_query.

Arrays over positions hold all chains one after another. `offsets` [chains + 1] int64 holds the
start of each chain, and at its end the number of positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicachectl.formats.arrays import BoolArray, IntArray


ALL_PAGES = 0  # window of a pool whose objects all pages of a prefix need
LOAD_BACK_TOKENS = 10  # UnifiedRadixCache.load_back_threshold, which no option changes


@dataclass(frozen=True, slots=True)
class PoolPages:
    """Positions at which a pool has the objects of all ranks.

    present: [positions] bool.
    window: number of last pages of a prefix that need the pool, or ALL_PAGES.
    """

    present: BoolArray
    window: int = ALL_PAGES


def positions_of(offsets: IntArray) -> IntArray:
    """Return the index of each position in its chain: [positions], from 0."""
    lengths = np.diff(offsets)
    return np.arange(offsets[-1], dtype=np.int64) - np.repeat(offsets[:-1], lengths)


def leading_runs(present: BoolArray, offsets: IntArray) -> IntArray:
    """Return each chain's number of pages before its first absent page: [chains]."""
    return first_absent(present, offsets[:-1], offsets[1:]) - offsets[:-1]


def first_absent(present: BoolArray, starts: IntArray, ends: IntArray) -> IntArray:
    """Return the first absent position of each range [start, end), or its end."""
    absent = np.append(np.flatnonzero(~present), len(present))
    found: IntArray = np.minimum(absent[np.searchsorted(absent, starts)], ends)
    return found


def restorable(pools: Sequence[PoolPages], offsets: IntArray) -> BoolArray:
    """Return whether the prefix that ends at each position is restorable: [positions]."""
    places = positions_of(offsets)
    allowed = np.ones(len(places), dtype=np.bool_)
    for pool in pools:
        run = _runs(pool.present, places)
        if pool.window == ALL_PAGES:
            allowed &= run == places + 1
        else:
            allowed &= run >= np.minimum(places + 1, pool.window)
    return allowed


def longest(allowed: BoolArray, offsets: IntArray, lengths: IntArray | None = None) -> IntArray:
    """Return the length in pages of each chain's longest allowed prefix, 0 without one: [chains].

    lengths: [chains] longest prefix to consider, in pages; at most the chain's length.
    """
    found = np.flatnonzero(allowed)
    ends = offsets[1:] if lengths is None else offsets[:-1] + lengths
    last = np.append(-1, found)[np.searchsorted(found, ends)]
    return np.maximum(last + 1 - offsets[:-1], 0)


def least_tokens(threshold: int, *, trailing: bool) -> int:
    """Return the fewest tokens that a server takes from a store for a request.

    threshold: the server's prefetch threshold in tokens. If fewer tokens are usable, the server
        fetches nothing, however long the request is. Only whole pages count. So a threshold acts as
        if it were rounded up to a multiple of the page size.
    trailing: whether servers need at least one pool only at the end of a prefix.

    In the host memory mode `cache`, a server can fetch fewer than LOAD_BACK_TOKENS tokens. It then
    computes them again, except if it loads a trailing pool with them. This matters only if both a
    page and the threshold have fewer tokens than LOAD_BACK_TOKENS.

    Source: SGLang srt/mem_cache/unified_radix_cache.py :: UnifiedRadixCache.prefetch_from_storage,
    _drain_storage_control_queues_impl ("below_threshold") and _load_back_transfers.
    """
    return threshold if trailing else max(threshold, LOAD_BACK_TOKENS)


def fetched(
    usable_pages: IntArray, page_size: int, threshold: int, *, trailing: bool = False
) -> IntArray:
    """Return the pages of each chain that a server takes from a store: [chains].

    usable_pages: pages of the longest restorable prefix. The server has none of these pages in its
        memory.
    threshold, trailing: see `least_tokens`.
    """
    least = least_tokens(threshold, trailing=trailing)
    return np.where(usable_pages * page_size >= least, usable_pages, 0)


def _runs(present: BoolArray, places: IntArray) -> IntArray:
    """Return the number of consecutive present pages up to each position."""
    numbers = np.arange(len(present), dtype=np.int64)
    absent = np.maximum.accumulate(np.where(present, -1, numbers)) if len(present) else numbers
    return np.minimum(numbers - absent, places + 1)
