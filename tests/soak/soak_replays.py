"""Stack distances beside plain replays at 20 capacities of a public trace; run by hand.

    HICACHECTL_TRACE=conversation_trace.jsonl python -m pytest -s tests/soak/soak_replays.py

The trace has chained hash_ids, as Mooncake's (FAST25-release/traces). It takes a minute.
"""

from __future__ import annotations

import heapq
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from hicachectl.simulation import replay
from tests.simulation.test_replay import plain_files, plain_lru
from tests.simulation.traces import Trace

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicachectl.simulation.replay import Runs


@pytest.fixture(scope="module")
def trace() -> Trace:
    lines = Path(os.environ["HICACHECTL_TRACE"]).read_text().splitlines()
    chains = [json.loads(line)["hash_ids"] for line in lines]
    return Trace(chains, [len(chain) for chain in chains])


def plain_optimal(trace: Trace, capacity: int) -> list[int]:
    """Evict the held leaf whose next use is furthest, by a heap of leaves."""
    uses: list[list[int]] = [[] for _ in trace.parents]
    for row, chain in enumerate(trace.chains):
        for page in chain:
            uses[page].append(row)
    later = [iter(rows[1:]) for rows in uses]
    held: dict[int, int] = {}
    continued = [0] * len(uses)
    leaves: list[tuple[int, int]] = []
    runs = []
    for row, chain in enumerate(trace.chains):
        runs.append(trace.hits(row, held))
        for page in chain:
            if page not in held and trace.parents[page] >= 0:
                continued[trace.parents[page]] += 1
            held[page] = next(later[page], len(trace.chains))
        for page in chain:
            if not continued[page]:
                heapq.heappush(leaves, (-held[page], page))
        while len(held) > capacity:
            evict_one(trace.parents, held, continued, leaves)
    return runs


def evict_one(
    parents: list[int], held: dict[int, int], continued: list[int], leaves: list[tuple[int, int]]
) -> None:
    """Evict the leaf on top of the heap, unless the entry is out of date.

    held: next use of each held page.
    continued: number of held pages that continue each page.
    """
    after, page = heapq.heappop(leaves)
    if held.get(page) != -after or continued[page]:
        return
    del held[page]
    if (parent := parents[page]) >= 0:
        continued[parent] -= 1
        if not continued[parent] and parent in held:
            heapq.heappush(leaves, (-held[parent], parent))


def capacities_of(trace: Trace) -> list[int]:
    found: list[int] = np.unique(np.geomspace(100, len(trace.parents), 20).astype(int)).tolist()
    return found


def compare(trace: Trace, runs: Runs, plain: Callable[[int], list[int]]) -> None:
    for row, capacity in enumerate(capacities_of(trace)):
        assert runs[row].tolist() == plain(capacity), capacity
        print(f"{capacity:>8} blocks: {runs[row].sum() / len(trace.requests.blocks):.3f} equal")


@pytest.mark.parametrize("leaves", [True, False], ids=["leaves_first", "heads_first"])
def test_lru(trace: Trace, *, leaves: bool) -> None:
    runs = replay.replay_lru(trace.requests, capacities_of(trace), leaves_first=leaves)
    compare(trace, runs, lambda capacity: plain_lru(trace, capacity, [], leaves=leaves))


def test_hicachefile(trace: Trace) -> None:
    runs = replay.replay_files(trace.requests, capacities_of(trace), 0.9)
    compare(trace, runs, lambda capacity: plain_files(trace, capacity, 0.9, 1, []))


def test_optimal(trace: Trace) -> None:
    runs = replay.replay_optimal(trace.requests, capacities_of(trace))
    compare(trace, runs, lambda capacity: plain_optimal(trace, capacity))
