"""Measure the cost of re-sharding and re-ordering pages in memory, against copying them.

    python -m tests.bench.bench_relayout [--megabytes 64] [--threads N] [--rounds N]

Pages of 64 tokens of several models, once with every change of layout or topology that the product
makes of them. Prints GB/s of source bytes by numpy.copyto of the same bytes, and the times that
`relayout` takes of this copy, by numpy and by the loop that numba compiles (compiled before). The
three take turns, each in as many threads with pages of their own, and make the same bytes. Counts
the CPU time of the slowest thread, so other load matters only through memory bandwidth.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec.structs import replace

from hicachectl.formats.transfer import TransferUnit, transfer_plan
from hicachectl.kernels import relayout as kernel
from tests.bench.runner import alternating, options_of
from tests.checks.value_cases import DEEPSEEK, GDN, LLAMA_8B, QWEN3_32B, QWEN3_NEXT, profile_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hicachectl.formats.profile import Profile

    Pages = list[np.ndarray]

DIRECT = {"layout": "page_first_direct"}
HEAD = {"layout": "page_head"}
FIRST = {"layout": "page_first"}
LAYERS = {"layout": "layer_first"}
TP4 = {"tp": 4}
ORDERS: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    (FIRST, DIRECT),
    (DIRECT, FIRST),
    (FIRST, HEAD),
    (HEAD, FIRST),
    (DIRECT, HEAD),
    (HEAD, DIRECT),
    (LAYERS, FIRST),
    (LAYERS, HEAD),
)
SHARDS: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    (TP4, {"tp": 8}),
    ({"tp": 8}, TP4),
    ({"tp": 1}, {"tp": 8}),
    ({"tp": 8}, {"tp": 1}),
    (TP4 | DIRECT, {"tp": 8}),
    (TP4 | {"pp": 1}, {"pp": 2}),
    (TP4 | {"pp": 2}, {"pp": 1}),
)
# name, pools, their changes
MODELS: tuple[tuple[str, list[dict[str, Any]], Any], ...] = (
    ("bf16 K/V", [QWEN3_32B], (*SHARDS, *((TP4 | one, two) for one, two in ORDERS))),
    (
        "fp8 K/V",
        [QWEN3_32B | {"dtype": "float8_e4m3fn"}],
        (*SHARDS[:2], *((TP4 | one, two) for one, two in ORDERS)),
    ),
    ("fp8 K/V, heads of 64", [QWEN3_32B | {"dtype": "float8_e4m3fn", "head_dim": 64}], SHARDS[:2]),
    (
        "bf16 K/V, page size 1",
        [LLAMA_8B | {"layers": 13}],
        tuple((one | {"page_size": 1}, two) for one, two in (*SHARDS[:2], (FIRST, HEAD))),
    ),
    ("bf16 MLA", [DEEPSEEK], (*ORDERS[:2], ({"pp": 1}, {"pp": 2}))),
    ("656-byte rows", [DEEPSEEK | {"row": "fp8_scaled"}], (*ORDERS[:2], ({"pp": 1}, {"pp": 2}))),
    ("Mamba states", [QWEN3_NEXT, GDN], ((TP4 | {"linear_tp": 4}, {"tp": 8, "linear_tp": 8}),)),
)


def cases() -> Iterator[tuple[str, Profile, Profile]]:
    for model, pools, changes in MODELS:
        for source, destination in changes:
            before = profile_of(*pools, **source)
            changed = {
                name: (source.get(name, "page_first"), new) for name, new in destination.items()
            }
            words = " ".join(f"{name} {old} to {new}" for name, (old, new) in changed.items())
            layout = ", page_first_direct" if source == TP4 | DIRECT and "tp" in destination else ""
            yield f"{model}: {words}{layout}", before, replace(before, **destination)


def main() -> None:
    """Print a row for each case."""
    options = options_of(__doc__, megabytes=64, threads=1, rounds=9)
    kernel.COMPILED_AFTER = 1 << 62
    if (compiled := kernel._compiled()) is None:
        raise SystemExit("numba is not installed")
    for name, before, after in cases():
        plan = transfer_plan(before, "file", after, "file")
        units = [unit for unit in plan.units if not unit.identity]
        unit = max(units, key=lambda one: plan.destinations[one.destinations[0]].nbytes)
        sizes = [[plan.sources[n].nbytes for n in unit.sources]]
        sizes += [[plan.destinations[n].nbytes for n in unit.destinations]]
        pages = max(1, options.megabytes * 10**6 // sum(sizes[0]))
        works = [Work(unit, sizes, pages, compiled) for _ in range(options.threads)]
        with ThreadPoolExecutor(options.threads) as pool:
            ways = {
                way: partial(slowest, pool, [getattr(work, way) for work in works])
                for way in ("copy", "numpy", "numba")
            }
            turns = alternating(ways, options.rounds)
        assert all(work.is_equal() for work in works), name
        rate = pages * sum(sizes[0]) / turns.median("copy") / 1e9
        ratios = [f"{turns.ratio(way, to='copy'):.2f}" for way in ("numpy", "numba")]
        print(f"| {name} | {rate:.1f} | {' | '.join(ratios)} |", flush=True)


class Work:
    """The pages of one thread, and the ways to move them."""

    def __init__(
        self,
        unit: TransferUnit,
        sizes: list[list[int]],
        pages: int,
        compiled: Callable[[TransferUnit, Pages, Pages], None],
    ) -> None:
        self._unit, self._compiled = unit, compiled
        rng = np.random.default_rng(1)
        self._sources = [memory_of(pages, nbytes) for nbytes in sizes[0]]
        for source in self._sources:
            source[...] = rng.integers(0, 256, source.shape, dtype=np.uint8)
        self._copies = [memory_of(pages, nbytes) for nbytes in sizes[0]]
        self._made = [[memory_of(pages, nbytes) for nbytes in sizes[1]] for _ in range(2)]

    def copy(self) -> None:
        for copied, source in zip(self._copies, self._sources, strict=True):
            np.copyto(copied, source)

    def numpy(self) -> None:
        kernel.relayout(self._unit, self._sources, self._made[0])

    def numba(self) -> None:
        self._compiled(self._unit, self._sources, self._made[1])

    def is_equal(self) -> bool:
        return all(map(np.array_equal, *self._made))


def memory_of(pages: int, nbytes: int) -> np.ndarray:
    """Return zeros that begin at a page of memory, as objects in the arena do."""
    memory = np.zeros(pages * nbytes + 4096, np.uint8)
    memory[...] = 1
    return memory[-memory.ctypes.data % 4096 :][: pages * nbytes].reshape(pages, nbytes)


def slowest(pool: ThreadPoolExecutor, works: list[Callable[[], None]]) -> float:
    def timed(work: Callable[[], None]) -> float:
        begun = time.thread_time()
        work()
        return time.thread_time() - begun

    return max(pool.map(timed, works))


if __name__ == "__main__":
    main()
