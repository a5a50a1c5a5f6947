"""Measure all value checks together, in one thread, against bare passes over the same memory.

    python -m tests.bench.bench_values

numpy's add.reduce reads each byte once and does nothing else. If torch is installed, a plain
isfinite pass in one thread is measured too, in cases that are all floats.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from hicachectl.checks.values import ValueChecker
from tests.bench.runner import timed
from tests.checks.value_cases import DEEPSEEK, GDN, INDEXER, LLAMA_8B, expected_of, profile_of
from tests.kvgen import KvGenerator, uniform_noise

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hicachectl.formats.spec import ObjectSpec

TOTAL_BYTES = 400 << 20
ROUNDS = 5
ALIGNMENT = 4096

STATES = GDN | {"layers": 36}


def cases() -> Iterator[tuple[str, int, int, list[dict[str, Any]]]]:
    """Yield name, page size, objects checked together, tables of pools (the last is checked)."""
    small = LLAMA_8B | {"layers": 13}
    yield "bf16 K/V, 8.4 MB", 64, 1, [LLAMA_8B]
    yield "bf16 MLA, 4.5 MB", 64, 1, [DEEPSEEK]
    yield "bf16 K/V, 53 KB", 1, 64, [small]
    yield "bf16 K/V, 53 KB, one by one", 1, 1, [small]
    yield "bf16 K/V, 131 KB, page 16", 16, 32, [LLAMA_8B | {"layers": 2}]
    yield "fp8 K/V, 4.2 MB", 64, 1, [LLAMA_8B | {"dtype": "float8_e4m3fn"}]
    yield "656-byte rows, 2.6 MB", 64, 1, [DEEPSEEK | {"row": "fp8_scaled"}]
    yield "656-byte rows, 40 KB", 1, 64, [DEEPSEEK | {"row": "fp8_scaled"}]
    yield "indexer, 515 KB", 64, 8, [DEEPSEEK, INDEXER]
    yield "mamba, 77 MB", 64, 1, [LLAMA_8B, STATES]


def main() -> None:
    print(f"{TOTAL_BYTES >> 20} MiB, best of {ROUNDS}, one thread; GB/s")
    print(f"{'':32}{'checks':>8}{'add.reduce':>12}{'ratio':>8}{'noise':>8}{'torch':>8}")
    for name, page_size, together, pools in cases():
        profile = profile_of(*pools, page_size=page_size, layout="page_first_direct")
        expected = expected_of(profile, profile.pools[-1].name)
        generator = KvGenerator(expected, profile, seed=1)
        count = max(2, TOTAL_BYTES // expected.nbytes)
        slab = aligned_slab(expected, count)
        slab[:] = np.resize(generator.objects(range(min(count, 64))), slab.shape)
        checker = ValueChecker(expected, profile)
        ours = rate(slab, partial(check_all, checker, slab, together))
        bare = rate(slab, partial(read_all, slab, together))
        slab[:] = np.resize(uniform_noise(expected, profile, min(count, 16), 1), slab.shape)
        noise = rate(slab, partial(check_all, checker, slab, together))
        floats = pools[-1].get("dtype") == "bfloat16" or pools[-1].get("row") == "bf16"
        torch = torch_rate(slab, together) if floats else ""
        print(f"{name:32}{ours:8.2f}{bare:12.2f}{ours / bare:8.2f}{noise:8.2f}{torch:>8}")


def aligned_slab(expected: ObjectSpec, count: int) -> np.ndarray:
    """Return objects at aligned offsets of one mapping, as the pipeline reads them."""
    stride = -(-expected.nbytes // ALIGNMENT) * ALIGNMENT
    return np.zeros((count, stride), np.uint8)[:, : expected.nbytes]


def check_all(checker: ValueChecker, slab: np.ndarray, together: int) -> None:
    for start in range(0, len(slab), together):
        issues = checker.check(slab[start : start + together])
        assert not issues, issues


def read_all(slab: np.ndarray, together: int) -> None:
    whole = slab.shape[1] // 8 * 8
    for start in range(0, len(slab), together):
        np.add.reduce(slab[start : start + together, :whole].view(np.uint64), axis=None)


def torch_rate(slab: np.ndarray, together: int) -> str:
    try:
        import torch
    except ImportError:
        return "-"
    torch.set_num_threads(1)
    values = torch.from_numpy(slab.view(np.int16)).view(torch.bfloat16)

    def check() -> None:
        for start in range(0, len(slab), together):
            assert bool(torch.isfinite(values[start : start + together]).all())

    return f"{rate(slab, check):.2f}"


def rate(slab: np.ndarray, work: Callable[[], None]) -> float:
    return slab.size / min(timed(work)() for _ in range(ROUNDS)) / 1e9


if __name__ == "__main__":
    main()
