"""`lru` and `optimal` serve the same tokens as kvcache-simulator, which replays a trie."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from hicachectl.simulation.replay import replay_lru, replay_optimal
from tests.prewarming.traces import BLOCK_TOKENS, conversations, trace_of
from tests.simulation.peers import Point, hit_tokens, kvcache_points, lines_of
from tests.speed import slow

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicachectl.requests.chains import Requests
    from hicachectl.simulation.replay import Runs

    Replay = Callable[[Requests, Sequence[int]], Runs]


def lru(requests: Requests, capacities: Sequence[int]) -> Runs:
    return replay_lru(requests, capacities, leaves_first=True)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("policy", "replay"), [("lru", lru), slow("optimal", replay_optimal)])
def test_hit_tokens_equal_those_of_kvcache_simulator(
    policy: str, replay: Replay, seed: int
) -> None:
    rows = conversations(seed, requests=150, going_on=0.8)
    requests = trace_of(rows)
    half = len(requests) // 2
    filled = len(np.unique(requests.blocks[: requests.offsets[half]]))
    # Where a request is longer than the cache, kvcache-simulator's lru evicts the block that the
    # same request has just added, and keeps one block less.
    least = 1 if policy == "optimal" else int(np.diff(requests.offsets).max())
    capacities = np.geomspace(least, filled, 12).astype(int).tolist()
    tokens = hit_tokens(requests, replay(requests, capacities))[:, half:].sum(1).tolist()
    whole = int(requests.tokens[half:].sum())
    theirs = kvcache_points(lines_of(rows), policy, [*capacities, filled + 1], BLOCK_TOKENS)
    # The earlier half of the requests does not fill the last capacity.
    assert theirs == {
        capacity: Point(hit, whole) for capacity, hit in zip(capacities, tokens, strict=True)
    }
    assert len(set(tokens)) > 5
