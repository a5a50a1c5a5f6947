"""Measure all value checks together, in one thread, against bare passes over the same memory.

    python -m tests.bench.bench_values

numpy's add.reduce reads each byte once and does nothing else. If torch is installed, a plain
isfinite pass in one thread is measured too, in cases that are all floats.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from hicachectl.checks.values import ValueChecker
from hicachectl.formats.kinds.pool import Pool, StateTensor
from hicachectl.formats.profile import Profile
from hicachectl.formats.spec import object_specs
from tests.kvgen import KvGenerator, uniform_noise

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hicachectl.formats.spec import ObjectSpec

TOTAL_BYTES = 400 << 20
ROUNDS = 5
ALIGNMENT = 4096

LLAMA = {"kind": "mha", "dtype": "bfloat16", "layers": 32, "kv_heads": 8, "head_dim": 128}
LATENT = {"kind": "mla", "layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
SMALL = {"kind": "mha", "dtype": "bfloat16", "layers": 13, "kv_heads": 8, "head_dim": 128}
INDEXER = {"kind": "dsa_indexer", "layers": 61, "index_head_dim": 128}
STATES = {
    "kind": "mamba",
    "layers": 36,
    "temporal": StateTensor(shape=(32, 128, 128), dtype="float32"),
    "conv": (StateTensor(shape=(8192, 3), dtype="bfloat16"),),
}


def cases() -> Iterator[tuple[str, str, int, int, list[dict[str, Any]]]]:
    """Yield name, pool, page size, objects checked together, and tables of pools."""
    kv: dict[str, Any] = {"name": "kv"}
    yield "bf16 K/V, 8.4 MB", "kv", 64, 1, [kv | LLAMA]
    yield "bf16 MLA, 4.5 MB", "kv", 64, 1, [kv | LATENT | {"row": "bf16"}]
    yield "bf16 K/V, 53 KB", "kv", 1, 64, [kv | SMALL]
    yield "bf16 K/V, 53 KB, one by one", "kv", 1, 1, [kv | SMALL]
    yield "bf16 K/V, 131 KB, page 16", "kv", 16, 32, [kv | SMALL | {"layers": 2, "kv_heads": 8}]
    yield "fp8 K/V, 4.2 MB", "kv", 64, 1, [kv | LLAMA | {"dtype": "float8_e4m3fn"}]
    yield "656-byte rows, 2.6 MB", "kv", 64, 1, [kv | LATENT | {"row": "fp8_scaled"}]
    yield "656-byte rows, 40 KB", "kv", 1, 64, [kv | LATENT | {"row": "fp8_scaled"}]
    mla = kv | LATENT | {"row": "bf16"}
    yield "indexer, 515 KB", "indexer", 64, 8, [mla, {"name": "indexer"} | INDEXER]
    yield "mamba, 77 MB", "mamba", 64, 1, [kv | LLAMA, {"name": "mamba"} | STATES]


def main() -> None:
    print(f"{TOTAL_BYTES >> 20} MiB, best of {ROUNDS}, one thread; GB/s")
    print(f"{'':32}{'checks':>8}{'add.reduce':>12}{'ratio':>8}{'noise':>8}{'torch':>8}")
    for name, pool, page_size, together, pools in cases():
        profile = Profile(
            model="m",
            page_size=page_size,
            layout="page_first_direct",
            pools=tuple(Pool(**table) for table in pools),
        )
        expected = next(e for e in object_specs(profile, "file") if e.coordinate.pool == pool)
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
    best = float("inf")
    for _ in range(ROUNDS):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return slab.size / best / 1e9


if __name__ == "__main__":
    main()
