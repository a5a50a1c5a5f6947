"""Compare orders of eviction at equal capacity, on traces of block ids.

    python -m tests.bench.bench_eviction --traces conversation_trace.jsonl,synthetic_trace.jsonl

Orders: the share of the prompt tokens that a cache serves, at capacities that are shares of the
distinct blocks. The plug-in notes the first use of a page after its write, and then one an hour; in
"24 times slower", each second of the trace takes 24.

Freeing: a full HiCacheFile, used by the first half of the trace, loses half of its pages, as by
`rm --free` (oldest first) or `rm --free --trace` (least value first, by the first half). Then it
serves the second half. The clairvoyant choice keeps the pages in the order of their next use.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.formats.eviction import Policy
from hicachectl.prewarming.ranking import rank_by_value
from hicachectl.requests.reading import Trace
from hicachectl.simulation.caches import Start
from hicachectl.simulation.replay import replay, replay_files, replay_lru
from hicachectl.simulation.sizes import PageSizes
from tests.bench.runner import options_of
from tests.bench.warm_replay import clairvoyant, first_uses, part
from tests.simulation.peers import hit_tokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from hicachectl.requests.chains import Requests
    from hicachectl.simulation.replay import Runs

    Index = npt.NDArray[np.int64]

# Capacities, in shares of the distinct blocks.
SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.7)
RATIO = 0.9  # HiCacheFile's default


def main() -> None:
    arguments = options_of(__doc__, traces=str)
    if arguments.traces is None:
        raise SystemExit("needs --traces")
    for name in arguments.traces.split(","):
        trace = Trace([name]).requests(None).in_time_order()
        print(f"{Path(name).name}: {len(trace):,} requests, {len(trace.names):,} blocks")
        measure_orders(trace)
        measure_freeing(trace)


def measure_orders(trace: Requests) -> None:
    """Print the share of tokens that each order serves."""
    capacities = [int(share * len(trace.names)) for share in SHARES]
    print_row("order", [f"{capacity:,}" for capacity in capacities])
    found: dict[str, Runs] = {
        "leaves first": replay_lru(trace, capacities, leaves_first=True),
        "heads first": replay_lru(trace, capacities, leaves_first=False),
        "HiCacheFile": replay_files(trace, capacities, RATIO),
        "heads first, 0.95": replay_lru(
            trace, [int(0.95 * size) for size in capacities], leaves_first=False
        ),
        "clairvoyant": replay(Policy.OPTIMAL, trace, capacities, PageSizes()),
    }
    assert trace.times is not None
    assert trace.seconds_per_unit is not None
    seconds = (trace.times - trace.times[0]) * trace.seconds_per_unit
    for name, slower in (("plug-in", 1), ("24 times slower", 24)):
        found[name] = replay(
            Policy.PLUGIN, trace, capacities, PageSizes(), seconds=seconds * slower
        )
    for name, runs in found.items():
        print_row(name, shares(trace, runs))


def measure_freeing(trace: Requests) -> None:
    """Print the share of the later half's tokens that a store serves after half of it was freed."""
    half = len(trace) // 2
    known, later = part(trace, 0, half), part(trace, half, len(trace))
    capacities = [int(share * len(known.names)) for share in SHARES]
    numbers = numbers_among(known, later)
    last = np.zeros(len(known.names), np.int64)
    np.maximum.at(last, known.blocks, np.arange(len(known.blocks)))
    by_use = np.argsort(-last)  # the most recently used first
    soon = np.full(len(known.names), len(later.blocks))
    order = clairvoyant(first_uses(known, later))
    soon[order] = np.arange(len(order))
    keys = {
        "oldest first": -last,
        "least value first": rank_by_value(known),
        "clairvoyant": soon,
    }
    print_row("freed", [f"{capacity:,}" for capacity in capacities])
    found: dict[str, list[str]] = {name: [] for name in ("nothing", *keys)}
    for capacity in capacities:
        held = by_use[:capacity]
        kept = {"nothing": held}
        for name, key in keys.items():
            best = held[np.argsort(key[held], kind="stable")[: capacity // 2]]
            kept[name] = best
        for name, pages in kept.items():
            in_order = pages[np.argsort(last[pages])]
            runs = replay_files(later, [capacity], RATIO, start=Start(numbers[in_order]))
            found[name] += shares(later, runs)
    for name, row in found.items():
        print_row(name, row)


def numbers_among(known: Requests, later: Requests) -> Index:
    """Return the number that each known block has in later requests, or one above them."""
    places = pc.index_in(pa.array(known.names), value_set=pa.array(later.names))
    found = places.fill_null(-1).to_numpy().astype(np.int64)
    return np.where(found < 0, len(later.names) + np.arange(len(found)), found)


def shares(requests: Requests, runs: Runs) -> list[str]:
    """Return the share of the prompt tokens that is served at each capacity."""
    return [f"{hit_tokens(requests, run).sum() / requests.tokens.sum():.4f}" for run in runs]


def print_row(name: str, row: Sequence[str]) -> None:
    print(f"{name:>18}", *(f"{value:>8}" for value in row), flush=True)


if __name__ == "__main__":
    main()
