"""Cache simulators of others, asked for the hit tokens of a trace."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tests.skips import need_module

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from hicachectl.formats.arrays import IntArray
    from hicachectl.requests.chains import Requests
    from hicachectl.simulation.replay import Runs


class Point(NamedTuple):
    """What kvcache-simulator counts at one capacity, in the later half of the requests.

    hit: tokens of the leading blocks that the cache held.
    tokens: tokens of the prompts.
    """

    hit: int
    tokens: int


def kvcache_points(
    lines: Iterable[str], policy: str, capacities: Sequence[int], block_size: int
) -> dict[int, Point]:
    """Return the points of kvcache-simulator, "lru" or "optimal", by capacity in blocks.

    It leaves out a capacity that the earlier half of the requests does not fill.
    """
    trace = need_module("kvcache_sim.trace").parse_trace_lines(lines, block_size=block_size)
    plan = need_module("kvcache_sim.plan").build_execution_plan(trace)
    simulate = need_module("kvcache_sim.policies").simulate_policy
    points = {capacity: simulate(plan, policy, capacity) for capacity in capacities}
    return {
        capacity: Point(point.hitTokens, point.totalTokens)
        for capacity, point in points.items()
        if point.measurementMode == "fixed_window"
    }


def hit_tokens(requests: Requests, runs: Runs) -> IntArray:
    """Return the prompt tokens in the leading blocks: [capacities, requests]."""
    tokens: IntArray = np.minimum(runs.astype(np.int64) * requests.block_tokens, requests.tokens)
    return tokens


def lines_of(rows: Iterable[object]) -> list[str]:
    """Return the lines of a trace."""
    return [json.dumps(row) for row in rows]
