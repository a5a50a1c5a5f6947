"""Reading the pages of a 3FS data file through our pipeline, against dd-like reading; run by hand.

    python -m tests.bench.bench_hf3fs_read [--pages 4096] [--bytes 1048576] [--cold] [--server]

Writes a data file and the snapshot of a metadata server, in the order of eviction that SGLang's
first pass leaves (`written`: the last page first) and after much reuse (`mixed`). Reads all pages
in turn: by dd with blocks of 1 MiB, which never leave the processor's cache; in the order of the
file into as much memory as two of verify's tasks have; and by the pipeline with such tasks, whose
work does nothing. --cold drops the file from the page cache before each pass; --server has
SGLang's metadata server asked about what was read, as with `server=`. Prints median throughputs,
and the median ratios of ours to both others.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import tempfile
import time
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from hicachectl.backends.hf3fs import Hf3fsStore
from hicachectl.backends.hf3fs_settings import Hf3fsSettings
from hicachectl.formats.profile import Pool, Profile
from hicachectl.pipeline import Pipeline, batches
from tests.hf3fs_server import MetadataServer

if TYPE_CHECKING:
    from collections.abc import Callable

BLOCK_BYTES = 1 << 20
BUFFER_BYTES = 512 << 20
TASK_BYTES, TASK_OBJECTS = 8 << 20, 256  # hicachectl.reading's


def profile_of(nbytes: int) -> Profile:
    """A deployment whose kv pages have so many bytes."""
    pool = Pool(name="kv", kind="opaque", nbytes=nbytes, replicated=True)
    return Profile(model="m", layout="page_first", pools=(pool,))


def fill(path: Path, pages: int, nbytes: int) -> None:
    """Write a data file of random pages."""
    value = np.random.default_rng(0).bytes(nbytes)
    with path.open("wb") as file:
        for _ in range(pages):
            file.write(value)
        os.fsync(file.fileno())


def save_table(path: Path, order: np.ndarray) -> None:
    """Write the snapshot of a table in which `order` gives the pages, least recent first."""
    entries = [[f"{index:064x}", index] for index in order.tolist()]
    table = {"num_pages": len(order), "free_pages": [], "key_to_index": entries}
    path.write_text(json.dumps({"0:kv": table}))


def drop(path: Path) -> None:
    """Have the system forget what it has in memory of a file."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def dd(path: Path) -> float:
    """Seconds that dd says it took to read a file."""
    command = ["dd", f"if={path}", "of=/dev/null", f"bs={BLOCK_BYTES}"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, "LC_ALL": "C"}
    )
    return float(done.stderr.rpartition(" copied, ")[2].split()[0])


def in_order(path: Path) -> float:
    """Seconds of reading a file from its start to its end, one block behind the other."""
    memory = memoryview(bytearray(2 * TASK_BYTES))
    blocks = [memory[at : at + BLOCK_BYTES] for at in range(0, len(memory), BLOCK_BYTES)]
    began = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        for block in cycle(blocks):
            if not file.readinto(block):
                break
    return time.perf_counter() - began


def ours(store: Hf3fsStore, rows: pa.Table, nbytes: int, task_bytes: int) -> float:
    """Seconds of the pipeline, its arena's mapping included."""
    numbers = np.arange(len(rows), dtype=np.int64)
    sizes = np.full(len(rows), nbytes, dtype=np.int64)
    began = time.perf_counter()
    pipeline = Pipeline(
        store,
        rows,
        batches(numbers, sizes, most_objects=TASK_OBJECTS, most_bytes=task_bytes),
        lambda loaded: loaded.read.all_ok,
        buffer_bytes=BUFFER_BYTES,
        identify=False,
    )
    assert all(pipeline)
    return time.perf_counter() - began


def measure(options: argparse.Namespace, folder: Path, server: MetadataServer | None) -> None:
    """Measure both orders and print."""
    data, snapshot = folder / "hicache.0.bin", folder / "metadata.json"
    fill(data, options.pages, options.bytes)
    orders = {
        "written": np.arange(options.pages)[::-1],
        "mixed": np.random.default_rng(1).permutation(options.pages),
    }
    total = options.pages * options.bytes
    for name, order in orders.items():
        save_table(snapshot, order)
        if server is not None:
            server.snapshot.write_bytes(snapshot.read_bytes())
            server.start()
        settings = Hf3fsSettings(
            prefix=str(folder / "hicache"),
            snapshot=str(snapshot),
            server=None if server is None else server.url,
        )
        times = []
        with Hf3fsStore(settings) as store:
            store.use_profile(profile_of(options.bytes))
            rows = pa.Table.from_batches(list(store.scan(("locator", "nbytes"))))
            ways = (
                lambda: dd(data),
                lambda: in_order(data),
                lambda store=store, rows=rows: ours(store, rows, options.bytes, options.task_bytes),
            )
            for _ in range(options.runs + 1):
                times.append([_timed(way, data if options.cold else None) for way in ways])
        # The first touches the memory.
        speeds = total / np.array(times[1:]) / 1e9
        dd_s, order_s, ours_s = np.median(speeds, axis=0)
        ratios = np.median(speeds[:, 2:] / speeds[:, :2], axis=0)
        print(
            f"{options.pages} pages of {options.bytes} bytes, {name}, "
            f"{'cold' if options.cold else 'warm'}{', with a server' if server else ''}: "
            f"dd {dd_s:.2f} GB/s, in order {order_s:.2f} GB/s, ours {ours_s:.2f} GB/s, "
            f"ratios {ratios[0]:.2f} and {ratios[1]:.2f}"
        )


def _timed(way: Callable[[], float], cold: Path | None) -> float:
    if cold is not None:
        drop(cold)
    return way()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pages", type=int, default=4096)
    parser.add_argument("--bytes", type=int, default=1 << 20)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--task-bytes", type=int, default=TASK_BYTES)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--server", type=Path, metavar="PYTHON", help="one that has SGLang")
    parser.add_argument("--dir", type=Path, help="where the file is to lie")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=options.dir)))
        server = stack.enter_context(MetadataServer(options.server)) if options.server else None
        measure(options, folder, server)


if __name__ == "__main__":
    main()
