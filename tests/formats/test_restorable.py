"""Restorable prefixes: examples that were run on SGLang, and a reference written page by page."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicachectl.formats.restorable import (
    ALL_PAGES,
    PoolPages,
    first_absent,
    leading_runs,
    longest,
    restorable,
)

Pools = list[tuple[int, set[int]]]  # window, pages present

# HiCacheFile.batch_exists_v2 answered each of these: (pools, restorable lengths).
_ALL = {0, 1, 2, 3}
EXAMPLES: list[tuple[Pools, list[int]]] = [
    ([(ALL_PAGES, _ALL), (1, {1})], [2]),
    ([(ALL_PAGES, _ALL), (ALL_PAGES, {0})], [1]),
    ([(ALL_PAGES, _ALL), (1, set())], []),
    ([(ALL_PAGES, _ALL), (1, {1, 3})], [2, 4]),
    ([(ALL_PAGES, _ALL), (2, {1, 2})], [3]),
    ([(ALL_PAGES, {0, 1, 3}), (1, {3})], []),
    ([(ALL_PAGES, _ALL), (ALL_PAGES, {0, 1, 2}), (1, {3})], []),
    ([(ALL_PAGES, _ALL)], [1, 2, 3, 4]),
    # A prefix shorter than the window needs all its pages.
    ([(ALL_PAGES, _ALL), (3, {0, 1, 3})], [1, 2]),
]


@pytest.mark.parametrize(("pools", "lengths"), EXAMPLES)
def test_lengths_are_those_that_sglang_gives(pools: Pools, lengths: list[int]) -> None:
    offsets = np.array([0, 4])
    masks = [PoolPages(np.isin(np.arange(4), list(pages)), window) for window, pages in pools]
    allowed = restorable(masks, offsets)
    assert (np.flatnonzero(allowed) + 1).tolist() == lengths
    assert longest(allowed, offsets).tolist() == [max(lengths, default=0)]


_CHAINS = st.lists(st.integers(0, 7), max_size=6)
_WINDOWS = st.lists(st.sampled_from([ALL_PAGES, 1, 2, 3, 1 << 40]), min_size=1, max_size=4)


@given(_CHAINS, _WINDOWS, st.data())
def test_flat_chains_agree_with_a_page_by_page_twin(
    lengths: list[int], windows: list[int], data: st.DataObject
) -> None:
    offsets = np.array([0, *accumulate(lengths)], dtype=np.int64)
    bits = [data.draw(st.integers(0, (1 << sum(lengths)) - 1)) for _ in windows]
    masks = [[bool(number >> at & 1) for at in range(sum(lengths))] for number in bits]
    pools = [PoolPages(np.array(m, np.bool_), w) for m, w in zip(masks, windows, strict=True)]
    allowed = restorable(pools, offsets)
    runs = leading_runs(pools[0].present, offsets)
    most = [data.draw(st.integers(0, length)) for length in lengths]
    cut = longest(allowed, offsets, np.array(most, dtype=np.int64))
    for chain, (start, length) in enumerate(zip(offsets, lengths, strict=False)):
        own = [mask[start : start + length] for mask in masks]
        wanted = [p for p in range(1, length + 1) if _fits(own, windows, p)]
        assert (np.flatnonzero(allowed[start : start + length]) + 1).tolist() == wanted
        assert longest(allowed, offsets)[chain] == max(wanted, default=0)
        assert cut[chain] == max((p for p in wanted if p <= most[chain]), default=0)
        assert runs[chain] == (own[0].index(False) if False in own[0] else length)


def _fits(masks: list[list[bool]], windows: list[int], p: int) -> bool:
    return all(
        all(mask[0 if window == ALL_PAGES else max(0, p - window) : p])
        for mask, window in zip(masks, windows, strict=True)
    )


def test_no_chains_and_empty_chains_have_nothing_to_restore() -> None:
    nothing = np.zeros(0, np.bool_)
    for offsets in (np.array([0]), np.array([0, 0, 0])):
        allowed = restorable([PoolPages(nothing), PoolPages(nothing, 1)], offsets)
        assert longest(allowed, offsets).tolist() == [0] * (len(offsets) - 1)


def test_first_absent_looks_within_its_range_only() -> None:
    present = np.array([True, False, True, True, False])
    starts, ends = np.array([0, 2, 2, 4, 5]), np.array([5, 4, 5, 4, 5])
    assert first_absent(present, starts, ends).tolist() == [1, 4, 4, 4, 5]
