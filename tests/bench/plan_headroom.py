"""Show what separates a plan from a clairvoyant warm-up: its choice, its order, or chance.

    python -m tests.bench.plan_headroom --trace conversation_trace.jsonl

For the first split of `bench_prewarm_plan`, at each capacity C, the captured share of:

- captured: the plan.
- choice: the plan's first C blocks in the order of their first use, which no plan can know.
- own set: the blocks that the clairvoyant warm-up uses, in the plan's order.
- by chance: the plan in futures drawn from its own chances, mean and standard deviation. Blocks
with the same last request are used together there.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hicachectl.prewarming.ranking import rank_blocks
from hicachectl.prewarming.value.reuse import fit_reuse
from hicachectl.prewarming.value.traits import walk_uses
from hicachectl.requests.chains import requests_of
from hicachectl.requests.reading import read_requests
from tests.bench.bench_prewarm_plan import CAPACITIES, SPLITS
from tests.bench.runner import options_of
from tests.bench.warm_replay import FirstUses, clairvoyant, first_uses, part, warmed_tokens

if TYPE_CHECKING:
    import numpy.typing as npt

    from hicachectl.requests.chains import Requests

    Index = npt.NDArray[np.int64]
    Floats = npt.NDArray[np.float64]

FUTURES = 200
STEPS = 120  # time steps until a cold cache has filled


def main() -> None:
    trace = requests_of(read_requests(options_of(__doc__, trace=Path).trace), None)
    start, middle, end = (int(share * len(trace)) for share in SPLITS[0])
    known, later = part(trace, start, middle), part(trace, middle, end)
    order, uses = rank_blocks(known).order, first_uses(known, later)
    print(f"{'C':>8}", *(f"{name:>9}" for name in ("captured", "choice", "own set", "by chance")))
    for capacity in CAPACITIES:
        rank = ranks(order, len(known.names))[uses.blocks]
        useful = uses.before < capacity
        orders = (
            order,
            uses.blocks[rank < capacity],
            uses.blocks[useful][np.argsort(rank[useful])],
        )
        shares = [captured(one, uses, len(known.names), capacity) for one in orders]
        drawn = drawn_shares(known, order, capacity)
        print(
            f"{capacity:8,}",
            *(f"{share:9.3f}" for share in shares),
            f"{drawn.mean():9.3f} ± {drawn.std():.3f}",
            flush=True,
        )


def ranks(order: Index, blocks: int) -> Index:
    rank = np.full(blocks, blocks)
    rank[order] = np.arange(len(order))
    return rank


def captured(order: Index, uses: FirstUses, blocks: int, capacity: int) -> float:
    """Return the share of the clairvoyant gain."""
    best = warmed_tokens(clairvoyant(uses), uses, blocks, [capacity])
    return float((warmed_tokens(order, uses, blocks, [capacity]) / np.maximum(best, 1))[0])


def drawn_shares(known: Requests, order: Index, capacity: int) -> Floats:
    """Return the shares that an order captures in futures drawn from the trace's chances."""
    assert known.times is not None
    now = float(known.times[-1])
    uses = walk_uses(known)
    reuse = fit_reuse(known, known.times, now, uses)
    assert reuse is not None
    rate = len(known.names) / reuse.span  # distinct blocks used per unit of time
    moments = np.linspace(0, 1.2 * capacity / rate, STEPS + 1)
    found = [chances for _, chances in reuse.chances(list(moments))]
    chances = np.concatenate(found, axis=1)[:, reuse.group_of]
    random = np.random.default_rng(3)
    shares = []
    for _ in range(FUTURES):
        luck = random.random(len(known))[uses.last]
        step = (chances < luck).sum(0)
        blocks = np.flatnonzero(step < len(moments))
        blocks = blocks[np.lexsort((known.forest.depths[blocks], step[blocks]))]
        before = (moments[step[blocks]] * rate).astype(np.int64)
        tokens = np.full(len(blocks), float(known.block_tokens))
        future = FirstUses(blocks, step[blocks], tokens, before)
        shares.append(captured(order, future, len(known.names), capacity))
    return np.array(shares)


if __name__ == "__main__":
    main()
