"""Reading the pages of a 3FS data file through our pipeline, against dd-like reading; run by hand.

    python -m tests.bench.bench_hf3fs_read [--pages 4096] [--bytes 1048576] [--cold] [--server]

Writes a data file and the snapshot of a metadata server, in the order of eviction that SGLang's
first pass leaves (`written`: the last page first) and after much reuse (`mixed`). Reads all pages
in turn: in the order of the file by large blocks into one buffer, as dd does, and by the pipeline
with verify's tasks, whose work does nothing. --cold drops the file from the page cache before each
pass; --server has SGLang's metadata server asked about what was read, as with `server=`. Prints
the median ratio of throughputs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa

from hicachectl.backends.hf3fs import Hf3fsStore
from hicachectl.backends.hf3fs_settings import Hf3fsSettings
from hicachectl.formats.profile import Pool, Profile
from hicachectl.pipeline import Pipeline, batches
from tests.hf3fs_server import MetadataServer

BLOCK_BYTES = 8 << 20
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


def bare(path: Path) -> float:
    """Seconds of reading a file from its start to its end."""
    buffer = bytearray(BLOCK_BYTES)
    began = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass
    return time.perf_counter() - began


def ours(store: Hf3fsStore, rows: pa.Table, nbytes: int) -> float:
    """Seconds of the pipeline, its arena's mapping included."""
    numbers = np.arange(len(rows), dtype=np.int64)
    sizes = np.full(len(rows), nbytes, dtype=np.int64)
    began = time.perf_counter()
    pipeline = Pipeline(
        store,
        rows,
        batches(numbers, sizes, most_objects=TASK_OBJECTS, most_bytes=TASK_BYTES),
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
        pairs = []
        with Hf3fsStore(settings) as store:
            store.use_profile(profile_of(options.bytes))
            rows = pa.Table.from_batches(list(store.scan(("locator", "nbytes"))))
            for _ in range(options.runs + 1):
                if options.cold:
                    drop(data)
                theirs = bare(data)
                if options.cold:
                    drop(data)
                pairs.append((theirs, ours(store, rows, options.bytes)))
        pairs = pairs[1:]
        other, own = (statistics.median(pair[i] for pair in pairs) for i in (0, 1))
        ratio = statistics.median(theirs / mine for theirs, mine in pairs)
        print(
            f"{options.pages} pages of {options.bytes} bytes, {name}, "
            f"{'cold' if options.cold else 'warm'}{', with a server' if server else ''}: "
            f"in order {total / other / 1e9:.2f} GB/s, ours {total / own / 1e9:.2f} GB/s, "
            f"ratio {ratio:.2f}"
        )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pages", type=int, default=4096)
    parser.add_argument("--bytes", type=int, default=1 << 20)
    parser.add_argument("--runs", type=int, default=5)
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
