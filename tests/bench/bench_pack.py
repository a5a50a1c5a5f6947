"""Packs against plain zstd -1: compression, writing and reading; run by hand.

    python -m tests.bench.bench_pack [--directory DIR] [--megabytes 512] [--threads 2] [--cpu]
                                     [--only WORDS]

Objects come from tests/kvgen.py and lie in memory. A pack is written as a migration writes it, to
the end of its index, and read with read_into, digests checked. Beside it, in the same file system:

- library: the same zstd library at level 1 with as many threads, one frame per object, one context
  for each thread;
- command: `zstd -1 -T2` of a file with the same bytes, and `zstd -t`, which decompresses and writes
  nothing.

Page caches are warm. The ways take turns; medians of the rounds count. The pack syncs after each
call of 64 MiB, the library's file once at its end, the command never; --directory /dev/shm avoids
the disk. --cpu counts CPU seconds of all threads, for machines that others use too.
"""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import zstandard

from hicachectl.backends.arena import Arena, place
from hicachectl.backends.pack.store import PackStore
from hicachectl.backends.testing import rows_of
from tests.bench.runner import Command, alternating, options_of, scratch, timed
from tests.checks.value_cases import DEEPSEEK, GDN, LLAMA_8B, expected_of, profile_of
from tests.kvgen import KvGenerator

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator

    from hicachectl.formats.arrays import IntArray

STATES = GDN | {"layers": 6, "conv": ()}
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
    for name, page_size, pools in (
        ("bf16 MLA, 4.5 MB", 64, [DEEPSEEK]),
        ("bf16 K/V, 8.4 MB", 64, [LLAMA_8B]),
        ("bf16 K/V, 53 KB", 1, [LLAMA_8B | {"layers": 13}]),
        ("fp8 K/V, 4.2 MB", 64, [LLAMA_8B | {"dtype": "float8_e4m3fn"}]),
        ("656-byte rows, 2.6 MB", 64, [DEEPSEEK | {"row": "fp8_scaled"}]),
        ("mamba fp32, 12.6 MB", 64, [LLAMA_8B, STATES]),
    ):
        profile = profile_of(*pools, page_size=page_size)
        one = expected_of(profile, "mamba" if len(pools) > 1 else "kv")
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
    own = threading.local()

    def compress(index: int) -> bytes:
        if not hasattr(own, "compressor"):
            own.compressor = zstandard.ZstdCompressor(level=1)
        frame: bytes = own.compressor.compress(case.view(index))
        return frame

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
    own = threading.local()

    def restore(index: int) -> None:
        if not hasattr(own, "decompressor"):
            own.decompressor = zstandard.ZstdDecompressor()
        data = os.pread(stream.fileno(), lengths[index], ends[index] - lengths[index])
        case.view(index)[:] = own.decompressor.decompress(data)

    with path.open("rb") as stream, ThreadPoolExecutor(threads) as pool:
        list(pool.map(restore, range(len(lengths))))


def measure(case: Case, directory: Path, options: argparse.Namespace) -> str:
    """Return a row of the table; compare every restored byte once."""
    pack, frames, threads = directory / "x.hcpack", directory / "x.zst", options.threads
    plain, packed = directory / "plain", directory / "plain.zst"
    clock = time.process_time if options.cpu else time.perf_counter
    original = case.arena.array.copy()
    lengths: list[int] = []
    with plain.open("wb") as stream:
        for index in range(len(case.sizes)):
            stream.write(case.view(index))

    def write_frames() -> None:
        lengths[:] = write_zstd(case, frames, threads)

    def command(*words: object) -> Callable[[], float]:
        run = Command("zstd", f"-T{threads}", "-q", "-f", *words)

        def seconds() -> float:
            wall = run()
            return run.processor_s if options.cpu else wall

        return seconds

    # Each round writes before it reads.
    acts: dict[str, Callable[[], float]] = {
        "write": timed(partial(write_pack, case, pack, threads), clock),
        "library write": timed(write_frames, clock),
        "command write": command("-1", plain, "-o", packed),
        "read": timed(partial(read_pack, case, pack, threads), clock),
        "library read": timed(partial(read_zstd, case, frames, threads, lengths), clock),
        "command read": command("-t", packed),
    }
    for name in list(acts)[:3]:
        acts[name]()
    turns = alternating(acts, options.rounds, 0)
    case.arena.array[:] = 0
    read_pack(case, pack, threads)
    assert (case.arena.array == original).all()
    row = [case.name]
    row += [f"{case.nbytes / path.stat().st_size:.3f}x" for path in (pack, frames)]
    for act in ("write", "read"):
        row += [f"{case.nbytes / turns.median(act) / 1e6:.0f}"]
        row += [f"{turns.ratio(f'{other} {act}', to=act):.2f}" for other in ("library", "command")]
    for path in (plain, packed):
        path.unlink()
    return f"| {' | '.join(row)} |"


def main() -> None:
    """Measure and print: compression, MB/s of the pack, and its share of the others' speed."""
    options = options_of(
        __doc__, directory=Path, megabytes=512, threads=2, rounds=3, cpu=False, only=""
    )
    with scratch(options.directory) as folder:
        for case in cases(options.megabytes * 10**6):
            if options.only in case.name:
                print(measure(case, folder, options), flush=True)


if __name__ == "__main__":
    main()
