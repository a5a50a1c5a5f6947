"""Packs against plain zstd -1: compression, writing and reading; run by hand.

    python -m tests.bench.bench_pack [--directory DIR] [--megabytes 512] [--threads 2] [--cpu]

Objects come from tests/kvgen.py and lie in memory. A pack is written as a migration writes it, to
the end of its index, and read with read_into, digests checked. zstd is the same library at level 1,
one frame per object, with as many threads, in the same file system. Both page caches are warm.
Pairs run in turn; medians of the rounds count. Both write to the disk, the pack after each call of
64 MiB, zstd's file once at its end; --directory /dev/shm avoids the disk. --cpu counts CPU seconds
of all threads, for machines that others use too: MB per CPU second.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import zstandard

from hicachectl.backends.arena import Arena, place
from hicachectl.backends.pack.store import PackStore
from hicachectl.backends.testing import rows_of
from hicachectl.formats.kinds.pool import Pool, StateTensor
from hicachectl.formats.profile import Profile
from hicachectl.formats.spec import object_specs
from tests.kvgen import KvGenerator

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hicachectl.formats.arrays import IntArray


T = TypeVar("T")

LLAMA = {"kind": "mha", "dtype": "bfloat16", "layers": 32, "kv_heads": 8, "head_dim": 128}
LATENT = {"kind": "mla", "layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
SMALL = {"kind": "mha", "dtype": "bfloat16", "layers": 13, "kv_heads": 8, "head_dim": 128}
STATES = {
    "kind": "mamba",
    "layers": 6,
    "temporal": StateTensor(shape=(32, 128, 128), dtype="float32"),
}
DISTINCT_BYTES = 128 << 20  # made once and repeated; more than a CPU cache holds


class Case(NamedTuple):
    """Objects in memory, ready to be written."""

    name: str
    arena: Arena
    rows: Any
    offsets: IntArray
    sizes: IntArray

    @property
    def nbytes(self) -> int:
        return int(self.sizes.sum())

    def view(self, index: int) -> memoryview:
        start = int(self.offsets[index])
        return self.arena.memory[start : start + int(self.sizes[index])]

    def batches(self, most_bytes: int, most_objects: int) -> list[slice]:
        count = max(1, min(most_bytes // int(self.sizes[0]), most_objects))
        return [slice(at, at + count) for at in range(0, len(self.sizes), count)]


def cases(nbytes: int) -> Iterator[Case]:
    """Return the kinds of objects, `nbytes` of each."""
    kv: dict[str, Any] = {"name": "kv"}
    for name, pool, page_size, pools in (
        ("bf16 MLA, 4.5 MB", "kv", 64, [kv | LATENT | {"row": "bf16"}]),
        ("bf16 K/V, 8.4 MB", "kv", 64, [kv | LLAMA]),
        ("bf16 K/V, 53 KB", "kv", 1, [kv | SMALL]),
        ("fp8 K/V, 4.2 MB", "kv", 64, [kv | LLAMA | {"dtype": "float8_e4m3fn"}]),
        ("656-byte rows, 2.6 MB", "kv", 64, [kv | LATENT | {"row": "fp8_scaled"}]),
        ("mamba fp32, 12.6 MB", "mamba", 64, [kv | LLAMA, {"name": "mamba"} | STATES]),
    ):
        profile = Profile(model="m", page_size=page_size, pools=tuple(Pool(**p) for p in pools))
        expected = object_specs(profile, "file")
        (one,) = [e for e in expected if e.coordinate.pool == pool]
        count = max(1, nbytes // one.nbytes)
        made = KvGenerator(one, profile, 3).objects(
            range(min(count, max(1, DISTINCT_BYTES // one.nbytes)))
        )
        sizes = np.full(count, one.nbytes, dtype=np.int64)
        offsets, total = place(sizes)
        with Arena(total) as arena:
            for index, offset in enumerate(offsets.tolist()):
                arena.view(offset, one.nbytes)[:] = made[index % len(made)]
            keys = [f"{n:064x}_m_0_1.bin".encode() for n in range(count)]
            yield Case(name, arena, rows_of(keys), np.asarray(offsets), sizes)


def write_pack(case: Case, path: Path, threads: int) -> None:
    """Write every object, in calls of the size that the store requests."""
    path.unlink(missing_ok=True)
    with PackStore(str(path), writable=True) as store:
        store.use_grammar("file")
        store.attach(case.arena)

        def write(part: slice) -> None:
            count = len(case.sizes[part])
            rows = case.rows.slice(part.start, count)
            result = store.write_from(rows, case.offsets[part], case.sizes[part], if_absent=True)
            assert result.all_ok

        limits = store.limits
        with ThreadPoolExecutor(min(threads, limits.parallel_writes)) as pool:
            list(pool.map(write, case.batches(limits.batch_bytes, limits.batch_objects)))


def read_pack(case: Case, path: Path, threads: int) -> None:
    """Read every object back to its place."""
    with PackStore(str(path)) as store:
        store.attach(case.arena)
        scanned = pa.Table.from_batches(list(store.scan(("nbytes", "locator"))))
        rows = scanned.sort_by("key").combine_chunks()  # the order of the case

        def read(part: slice) -> None:
            picked = rows.slice(part.start, len(case.sizes[part]))
            result = store.read_into(picked, case.offsets[part], case.sizes[part], identify=False)
            assert result.all_ok

        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(read, case.batches(8 << 20, 256)))


def write_zstd(case: Case, path: Path, threads: int) -> list[int]:
    """Write one frame per object with the library alone; return the bytes of each."""
    path.unlink(missing_ok=True)

    def compress(index: int) -> bytes:
        return zstandard.ZstdCompressor(level=1).compress(case.view(index))

    lengths = []
    with path.open("wb", buffering=0) as stream, ThreadPoolExecutor(threads) as pool:
        for part in case.batches(64 << 20, 1024):
            for frame in pool.map(compress, range(part.start, min(part.stop, len(case.sizes)))):
                stream.write(frame)
                lengths.append(len(frame))
        os.fdatasync(stream.fileno())
    return lengths


def read_zstd(case: Case, path: Path, threads: int, lengths: list[int]) -> None:
    """Restore the frames into memory."""
    ends = np.cumsum(lengths).tolist()

    def restore(index: int) -> None:
        data = os.pread(stream.fileno(), lengths[index], ends[index] - lengths[index])
        case.view(index)[:] = zstandard.ZstdDecompressor().decompress(data)

    with path.open("rb") as stream, ThreadPoolExecutor(threads) as pool:
        list(pool.map(restore, range(len(lengths))))


def timed(act: Callable[[], T], clock: Callable[[], float]) -> tuple[float, T]:
    start = clock()
    done = act()
    return clock() - start, done


def measure(case: Case, directory: Path, options: argparse.Namespace) -> str:
    """Return a line of the table; compare every restored byte once."""
    pack, frames, threads = directory / "x.hcpack", directory / "x.zst", options.threads
    clock = time.process_time if options.cpu else time.perf_counter
    original = case.arena.array.copy()
    seconds: list[tuple[float, ...]] = []
    for _ in range(options.rounds):
        writing, _ = timed(partial(write_pack, case, pack, threads), clock)
        zstd_writing, lengths = timed(partial(write_zstd, case, frames, threads), clock)
        reading, _ = timed(partial(read_pack, case, pack, threads), clock)
        zstd_reading, _ = timed(partial(read_zstd, case, frames, threads, lengths), clock)
        seconds.append((writing, zstd_writing, reading, zstd_reading))
    case.arena.array[:] = 0
    read_pack(case, pack, threads)
    assert (case.arena.array == original).all()
    speeds = [
        case.nbytes / statistics.median(column) / 1e6 for column in zip(*seconds, strict=True)
    ]
    ratios = [case.nbytes / path.stat().st_size for path in (pack, frames)]
    return (
        f"{case.name:24} {ratios[0]:5.3f} {ratios[1]:6.3f}   "
        f"{speeds[0]:6.0f} {speeds[1]:6.0f} {speeds[0] / speeds[1]:5.2f}   "
        f"{speeds[2]:6.0f} {speeds[3]:6.0f} {speeds[2] / speeds[3]:5.2f}"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hicachectl-bench-", dir=options.directory) as scratch:
        print(
            f"{'':24} {'ratio':>5} {'zstd':>6}   write MB/s, zstd, ratio   read MB/s, zstd, ratio"
        )
        for case in cases(options.megabytes * 10**6):
            print(measure(case, Path(scratch), options), flush=True)


if __name__ == "__main__":
    main()
