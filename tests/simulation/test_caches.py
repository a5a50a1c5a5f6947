"""Sizes of pages in stores, and caches that are replayed one capacity at a time."""

from __future__ import annotations

import numpy as np
import pytest

from hicachectl.formats.eviction import Policy
from hicachectl.simulation.caches import PluginPages, Start, cache_of
from hicachectl.simulation.replay import replay
from hicachectl.simulation.sizes import PageFile, PageSizes, Room
from tests.formats import small_models
from tests.simulation.traces import Trace

REPLAYED = [Policy.HICACHEFILE, Policy.HF3FS, Policy.PLUGIN, Policy.MOONCAKE]
KV, STATE = PageFile("kv", 10), PageFile("mamba", 30, window=1, anchor=False)
HYBRID = PageSizes((Room((STATE, KV), copies=2),), known=True)


def test_sizes_follow_the_rooms_of_each_store() -> None:
    hybrid = small_models.profile(small_models.mla(), small_models.gdn(), tp=2)
    files = PageSizes.of(hybrid, Policy.HICACHEFILE)
    # The first rank writes the page that all ranks share; each writes its own states.
    assert [[file.pool for file in room.files] for room in files.rooms] == [
        ["mamba", "kv"],
        ["mamba"],
    ]
    assert files.limits == 2
    assert not files.uniform
    tables = PageSizes.of(hybrid, Policy.HF3FS)
    assert [len(room.files) for room in tables.rooms] == [2, 1]
    store = PageSizes.of(hybrid, Policy.MOONCAKE)
    assert store.limits == 1
    for sizes in (files, tables, store):
        assert (sizes.page_bytes, sizes.trailing_bytes) == (384, 1536)
        assert sizes.rooms[-1].files[-1].anchor == (sizes is not files)

    staged = PageSizes.of(
        small_models.profile(small_models.mha(layers=5), tp=2, pp=2), Policy.HICACHEFILE
    )
    assert [(room.files[0].nbytes, room.copies) for room in staged.rooms] == [(384, 2), (576, 2)]
    assert staged.uniform
    assert staged.pages(3840) == 2


def test_blocks_have_one_unit() -> None:
    assert PageSizes.of(None, Policy.LRU) == PageSizes()
    assert PageSizes().pages(7) == 7


@pytest.mark.parametrize("policy", [*REPLAYED, Policy.LRU])
def test_a_prefix_is_served_up_to_its_longest_with_all_objects(policy: Policy) -> None:
    """States lie at the end of a node: of a shorter prefix, only that of an earlier end."""
    cache = cache_of(policy, 1 << 20, HYBRID, parents=np.array([-1, 0, 1, 2, 3], np.int32))
    cache.write([0, 1, 2], 0.0)
    assert cache.held([0, 1]) == 0
    assert cache.held([0, 1, 2]) == cache.held([0, 1, 2, 3, 4]) == 3
    cache.read([0, 1, 2], 1.0)
    cache.write([3, 4], 1.0)
    assert cache.held([0, 1, 2, 3]) == 3
    assert cache.held([0, 1, 2, 3, 4]) == 5


@pytest.mark.parametrize("policy", [*REPLAYED, Policy.LRU])
@pytest.mark.parametrize("states", [False, True])
def test_a_cache_begins_with_a_store(policy: Policy, states: bool) -> None:
    trace = Trace([[0, 0], [0, 0, 1]])
    start = Start(np.array([1, 0, 9]), np.array([states, False, False]))
    sizes = HYBRID if states else PageSizes((Room((KV,)),), known=True)
    runs = replay(policy, trace.requests, [1 << 20, 0], sizes, start=start)
    assert runs.tolist() == [[2, 2], [0, 0]]


@pytest.mark.parametrize("policy", REPLAYED)
def test_the_oldest_pages_are_evicted(policy: Policy) -> None:
    cache = cache_of(policy, 4000, PageSizes((Room((PageFile("kv", 100),)),)), lease=0.0)
    for page in range(100):
        hours = page * 4000.0
        cache.write([page], hours)
        cache.read([page], hours)
        if page >= 20:
            cache.read([3], hours)
    held = [page for page in range(100) if cache.held([page])]
    assert 30 <= len(held) <= 40
    assert held == [3, *range(101 - len(held), 100)]


def test_a_leased_object_is_not_evicted() -> None:
    sizes = PageSizes((Room((PageFile("kv", 100),)),))
    cache = cache_of(Policy.MOONCAKE, 1000, sizes, lease=5.0)
    cache.write([0, 1, 2, 3], 0.0)
    cache.read([0, 1], 0.0)
    cache.write([*range(10, 17)], 1.0)
    assert [cache.held([page]) for page in (0, 1, 2, 3)] == [1, 1, 0, 0]
    cache.write([*range(20, 30)], 6.0)
    assert cache.held([0]) == cache.held([1]) == 0


def test_a_batch_that_finds_too_few_pages_loses_them() -> None:
    """SGLang's 3FS metadata server takes the oldest pages before it finds too few."""
    cache = cache_of(Policy.HF3FS, 300, PageSizes((Room((PageFile("kv", 100),)),)))
    cache.write([0, 1, 2], 0.0)
    cache.write([3, 4, 5, 6], 0.0)
    assert not any(cache.held([page]) for page in range(7))
    cache.write([0], 0.0)
    assert not cache.held([0])


def test_the_plugin_marks_a_page_once_an_hour() -> None:
    """The mount notes the first read after each write or mark; a read within an hour marks none."""
    pages = PluginPages([PageFile("kv", 100)], 1000, 0)

    def order(*reads: tuple[int, float]) -> list[int]:
        for page, time in reads:
            pages.read([page], time)
        return list(pages._held)

    pages.write([0, 1, 2], 0.0)
    assert order((0, 1.0)) == [1, 2, 0]
    assert order((1, 2.0), (0, 1800.0)) == [2, 0, 1]
    assert order((0, 3602.0)) == [2, 1, 0]
    assert order((1, 3602.0), (0, 3610.0)) == [2, 1, 0]
    assert order((1, 3700.0)) == [2, 0, 1]
