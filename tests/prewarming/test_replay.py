"""The bench's replay by stack distances agrees with a simulated cache."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.bench.warm_replay import first_uses, part, warmed_tokens
from tests.prewarming.traces import conversations, trace_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicachectl.requests.chains import Requests


def played(later: Requests, warmed: Sequence[int], capacity: int) -> int:
    """Return the hit tokens of an LRU cache that starts with the best blocks of `warmed`."""
    cache = OrderedDict.fromkeys(reversed(warmed[:capacity]))
    hit = 0
    for request in range(len(later)):
        start, stop = later.offsets[request : request + 2]
        names = later.names[later.blocks[start:stop]].tolist()
        for depth, name in enumerate(names):
            if name not in cache:
                break
            rest = int(later.tokens[request]) - depth * later.block_tokens
            hit += min(later.block_tokens, rest)
        for name in reversed(names):
            cache[name] = None
            cache.move_to_end(name)
        while len(cache) > capacity:
            cache.popitem(last=False)
    return hit


@pytest.mark.slow
@given(seed=st.integers(0, 10_000), capacity=st.integers(20, 200))
def test_gains_equal_those_of_a_cache_played_block_by_block(seed: int, capacity: int) -> None:
    trace = trace_of(conversations(seed, requests=60))
    known, later = part(trace, 0, 30), part(trace, 30, 60)
    order = np.argsort(known.forest.depths, kind="stable")  # parents first
    uses = first_uses(known, later)
    gained = warmed_tokens(order, uses, len(order), [capacity])[0]
    names = known.names[order].tolist()
    assert gained == played(later, names, capacity) - played(later, [], capacity)


def test_a_part_keeps_its_own_blocks_only() -> None:
    trace = trace_of(conversations(1, requests=40))
    later = part(trace, 20, 40)
    start = trace.offsets[20]
    expected = trace.names[trace.blocks[start:]]
    assert np.array_equal(later.names[later.blocks], expected)
    assert later.block_tokens == trace.block_tokens
    assert len(later.names) == len(np.unique(expected))
