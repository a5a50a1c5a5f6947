"""Measure the cost of re-sharding and re-ordering pages in memory, against copying them.

    python -m tests.bench.bench_relayout [--pages N] [--repeat N]

Pages of Qwen3-32B (64 tokens, 64 layers, 8 KV heads of 128 bfloat16). Prints GB/s of source bytes
by `relayout`, by numpy.copyto of the same bytes, and the median of their ratios; the two take
turns. Counts the CPU time of one thread, so other load matters only through memory bandwidth.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec.structs import replace

from hicachectl.formats.kinds.pool import Pool
from hicachectl.formats.profile import Profile
from hicachectl.formats.transfer import transfer_plan
from hicachectl.kernels.relayout import relayout
from tests.bench.runner import alternating, options_of, timed

if TYPE_CHECKING:
    import argparse

QWEN = Profile(
    model="Qwen/Qwen3-32B",
    page_size=64,
    tp=4,
    pools=(Pool(name="kv", kind="mha", dtype="bfloat16", layers=64, kv_heads=8, head_dim=128),),
)
DIRECT = {"layout": "page_first_direct"}
CASES: tuple[tuple[str, dict[str, Any], dict[str, Any], str], ...] = (
    ("tp 4 to 8, page_first, file", {}, {"tp": 8}, "file"),
    ("tp 4 to 8, page_first_direct, file", DIRECT, {"tp": 8}, "file"),
    ("tp 4 to 8, page_first, mooncake", {}, {"tp": 8}, "mooncake"),
    ("tp 8 to 4, page_first, file", {"tp": 8}, {"tp": 4}, "file"),
    ("pp 1 to 2, page_first, file", {}, {"pp": 2}, "file"),
    ("page_first to page_first_direct, file", {}, DIRECT, "file"),
    ("page_first to page_head, file", {}, {"layout": "page_head"}, "file"),
    ("page_head to page_first, file", {"layout": "page_head"}, {"layout": "page_first"}, "file"),
)


def main() -> None:
    """Print a line for each case."""
    options = options_of(__doc__, pages=16, repeat=11)
    for name, source, destination, grammar in CASES:
        before = replace(QWEN, **source)
        after = replace(before, **destination)
        unit_time(name, before, after, grammar, options)


def unit_time(
    name: str, before: Profile, after: Profile, grammar: str, options: argparse.Namespace
) -> None:
    plan = transfer_plan(before, grammar, after, grammar)
    unit = plan.units[0]
    rng = np.random.default_rng(1)
    sources = [
        rng.integers(0, 256, (options.pages, plan.sources[n].nbytes), dtype=np.uint8)
        for n in unit.sources
    ]
    made = [
        np.ones((options.pages, plan.destinations[n].nbytes), np.uint8) for n in unit.destinations
    ]
    copies = [np.ones_like(pages) for pages in sources]

    def copy() -> None:
        for one, two in zip(copies, sources, strict=True):
            np.copyto(one, two)

    nbytes = sum(pages.nbytes for pages in sources)
    ways = {"copy": copy, "ours": lambda: relayout(unit, sources, made)}
    turns = alternating(
        {way: timed(work, time.thread_time) for way, work in ways.items()}, options.repeat
    )
    plain, moved = turns.seconds.min(axis=0)
    print(
        f"{name:42} {nbytes / moved / 1e9:5.1f} GB/s, copy {nbytes / plain / 1e9:5.1f} GB/s, "
        f"{turns.ratio('ours', to='copy'):.2f}x its time"
    )


if __name__ == "__main__":
    main()
