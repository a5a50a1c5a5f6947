"""Which prefixes of page chains a server can restore, by its pools' hit policies.

A prefix of p pages can be restored when every pool agrees: one with ALL_PAGES has its pages
0..p-1, one with TRAILING_PAGES the last ones of these, as many as its window. Ranks agree on the
longest prefix that each of them can restore, which is the longest of the lengths that all have in
common, not the shortest of their longest. Source: SGLang srt/mem_cache/hicache_storage.py ::
HiCacheFile.batch_exists_v2; storage/mooncake_store/mooncake_store.py ::
MooncakeStore.batch_exists_v2; hybrid_cache/hybrid_cache_controller.py :: _sync_prefetch_hit_query.

Chains lie one after another in flat arrays over positions; `offsets` [chains + 1] int64 says where
each begins, from 0 to the number of positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Sequence

BoolArray = npt.NDArray[np.bool_]
IntArray = npt.NDArray[np.int64]

ALL_PAGES = 0  # the window of a pool that every page of a prefix must have


@dataclass(frozen=True, slots=True)
class PoolPages:
    """Where a pool has every object of all ranks.

    present: [positions]. window: how many pages before a prefix's end must have the pool, at least
    1; or ALL_PAGES.
    """

    present: BoolArray
    window: int = ALL_PAGES


def positions_of(offsets: IntArray) -> IntArray:
    """Give each position's place in its chain: [positions], from 0."""
    lengths = np.diff(offsets)
    return np.arange(offsets[-1], dtype=np.int64) - np.repeat(offsets[:-1], lengths)


def leading_runs(present: BoolArray, offsets: IntArray) -> IntArray:
    """Count the pages before each chain's first one that is not present: [chains]."""
    return first_absent(present, offsets[:-1], offsets[1:]) - offsets[:-1]


def first_absent(present: BoolArray, starts: IntArray, ends: IntArray) -> IntArray:
    """Find the first position of each range [start, end) that is not present; its end if none."""
    absent = np.append(np.flatnonzero(~present), len(present))
    found: IntArray = np.minimum(absent[np.searchsorted(absent, starts)], ends)
    return found


def restorable(pools: Sequence[PoolPages], offsets: IntArray) -> BoolArray:
    """Say of each position whether the prefix that ends with it can be restored: [positions]."""
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
    """Give the longest prefix of each chain that is allowed, in pages: [chains], 0 without any.

    lengths: [chains] pages that it has at most, where that is fewer than the chain has.
    """
    found = np.flatnonzero(allowed)
    ends = offsets[1:] if lengths is None else offsets[:-1] + lengths
    last = np.append(-1, found)[np.searchsorted(found, ends)]
    return np.maximum(last + 1 - offsets[:-1], 0)


def _runs(present: BoolArray, places: IntArray) -> IntArray:
    """Count how many pages in a row are present up to each position, in its chain."""
    numbers = np.arange(len(present), dtype=np.int64)
    absent = np.maximum.accumulate(np.where(present, -1, numbers)) if len(present) else numbers
    return np.minimum(numbers - absent, places + 1)
