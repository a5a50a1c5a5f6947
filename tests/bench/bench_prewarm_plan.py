"""Measure plans: their share of a clairvoyant warm-up's savings, and the time to plan.

    python -m tests.bench.bench_prewarm_plan --trace conversation_trace.jsonl
    python -m tests.bench.bench_prewarm_plan --part speed

Quality: a plan from one part of a trace warms an LRU cache, and the requests after that part are
replayed through the cache (`warm_replay` states the rules). The captured share is the plan's gain
in hit tokens over a cold start, divided by the gain of warming the blocks in the order of their
first use. Compared with plain frequency, plain recency and one exponentially decayed count.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hicachectl.prewarming.ranking import rank_blocks
from hicachectl.prewarming.value.traits import walk_uses
from hicachectl.requests.reading import Trace
from tests.bench.runner import HICACHECTL, Command, options_of, scratch, timed
from tests.bench.warm_replay import clairvoyant, first_uses, part, warmed_tokens

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from hicachectl.requests.chains import Requests

    Index = npt.NDArray[np.int64]

# Shares of the trace: plan from the first to the second, replay up to the third.
SPLITS = (
    (0, 0.5, 1), (0, 0.25, 0.75), (0, 0.33, 0.83), (0, 0.4, 0.9), (0, 0.6, 1), (0, 0.75, 1),
    (0.25, 0.5, 1), (0.25, 0.5, 0.75), (0.3, 0.6, 1), (0.4, 0.7, 1), (0.5, 0.75, 1), (0.5, 0.8, 1),
)  # fmt: skip
CAPACITIES = [10_000, 30_000, 100_000]
SHARES = np.geomspace(0.05, 0.9, 10)  # of the known blocks; their mean is the column "all"
DECAY = 0.2  # of the planned span
REQUESTS, BLOCKS = 200_000, 100


def main() -> None:
    # The trace is in Mooncake's format, for quality; the parts are quality and speed.
    arguments = options_of(__doc__, part=str, trace=Path)
    if arguments.part != "speed":
        if arguments.trace is None:
            raise SystemExit("quality needs --trace")
        measure_quality(Trace([str(arguments.trace)]).requests(None))
    if arguments.part != "quality":
        measure_speed()


def ours(known: Requests) -> Index:
    return rank_blocks(known).order


def frequency(known: Requests) -> Index:
    return np.lexsort((known.forest.depths, -walk_uses(known).counts))


def recency(known: Requests) -> Index:
    return np.lexsort((known.forest.depths, -walk_uses(known).last))


def decayed(known: Requests) -> Index:
    age = len(known) - np.repeat(np.arange(len(known)), np.diff(known.offsets))
    weights = np.exp(-age / (DECAY * len(known)))
    return np.lexsort((known.forest.depths, -np.bincount(known.blocks, weights)))


ORDERS: dict[str, Callable[[Requests], Index]] = {
    "ours": ours,
    "frequency": frequency,
    "recency": recency,
    "decayed": decayed,
}


def measure_quality(trace: Requests) -> None:
    """Print the captured share for each order, split and capacity."""
    print(f"{len(trace):,} requests, {len(trace.names):,} blocks of {trace.block_tokens} tokens")
    columns = [f"{capacity:,}" for capacity in CAPACITIES]
    print(f"{'split':>16}  {'order':<9}", *(f"{name:>8}" for name in [*columns, "all"]))
    totals: dict[str, list[npt.NDArray[np.float64]]] = {name: [] for name in ORDERS}
    for split in SPLITS:
        bounds = [int(share * len(trace)) for share in split]
        known, later = part(trace, *bounds[:2]), part(trace, *bounds[1:])
        for name, row in captured(known, later).items():
            totals[name].append(row)
            print_row("-".join(map(str, split)), name, row)
    for name, rows in totals.items():
        print_row("mean", name, np.mean(rows, 0))


def captured(known: Requests, later: Requests) -> dict[str, npt.NDArray[np.float64]]:
    """Return the captured share at each capacity, and the mean over shares of the blocks."""
    uses = first_uses(known, later)
    blocks = len(known.names)
    capacities = [*CAPACITIES, *(int(share * blocks) for share in SHARES)]
    best = np.maximum(warmed_tokens(clairvoyant(uses), uses, blocks, capacities), 1)
    found = {}
    for name, order in ORDERS.items():
        gains = warmed_tokens(order(known), uses, blocks, capacities) / best
        found[name] = np.append(gains[: len(CAPACITIES)], gains[len(CAPACITIES) :].mean())
    return found


def print_row(split: str, name: str, row: npt.NDArray[np.float64]) -> None:
    print(f"{split:>16}  {name:<9}", *(f"{value:8.3f}" for value in row), flush=True)


def measure_speed() -> None:
    """Plan a trace of 20 million block references in a separate process."""
    with scratch() as folder:
        path, output = folder / "trace.jsonl", folder / "plan.jsonl"
        write_conversations(path)
        size = path.stat().st_size / 1e6
        print(f"{REQUESTS:,} requests of {BLOCKS} blocks, {size:,.0f} MB")
        print(f"reading the bytes alone: {timed(lambda: read_whole(path))():.1f} s")
        for budget in (["--budget-pages", "100000"], []):
            plan = Command(
                *HICACHECTL, "prewarm", "--dry-run", "--trace", path, "-o", output, *budget
            )
            seconds = plan()
            rows = f"{output.stat().st_size / 1e6:,.0f} MB of plan"
            print(
                f"prewarm {' '.join(budget)}: {seconds:.1f} s, peak {plan.peak_mb:,.0f} MiB, {rows}"
            )


def read_whole(path: Path) -> None:
    with path.open("rb") as file:
        while file.read(1 << 20):
            pass


def write_conversations(path: Path) -> None:
    """Write requests of conversations; each may continue an earlier one by a few blocks."""
    random = np.random.default_rng(7)
    active: list[list[int]] = []
    fresh = 1
    with path.open("w") as file:
        for request in range(REQUESTS):
            chain = [0]
            if active and random.random() < 0.6:
                at = int(random.integers(len(active)))
                active[at], active[-1] = active[-1], active[at]
                chain = active.pop()
            added = max(BLOCKS - len(chain), 4)
            chain = [*chain[: BLOCKS - added], *range(fresh, fresh + added)]
            fresh += added
            if random.random() < 0.7:
                active.append(chain[: BLOCKS - int(random.integers(1, 60))])
            tokens, out = 512 * BLOCKS - int(random.integers(512)), int(random.integers(1, 900))
            file.write(
                f'{{"timestamp": {request * 17}, "input_length": {tokens}, '
                f'"output_length": {out}, "hash_ids": {chain}}}\n'
            )


if __name__ == "__main__":
    main()
