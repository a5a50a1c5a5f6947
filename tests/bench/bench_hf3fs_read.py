"""Reading the pages of a 3FS data file as verify does, against dd-like reading; run by hand.

    python -m tests.bench.bench_hf3fs_read [--pages 4096] [--bytes 1048576] [--cold] [--server PY]

Writes a data file and the snapshot of a metadata server, with two orders of eviction: as SGLang's
first pass leaves it (`written`: the last page first) and after much reuse (`mixed`). Reads all
pages in turn:
- by dd with blocks of 1 MiB, which stay in the CPU cache;
- by fio with the same blocks (psync), if installed;
- in file order into as much memory as two tasks of verify have;
- by `read_objects`, with verify's own tasks and order, and no work on the objects;
- by dd again, which shows how much two equal readings differ here.
--cold drops the file from the page cache before each reading. --parts makes the pages K and V in
turn, under separate keys. Prints median throughputs, the median ratios of ours to the others, and
the range of dd's ratios to itself.

--server starts SGLang's metadata server and measures digesting instead: with confirmation by the
server, against the same without the server. --server has a Python with SGLang.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import time
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hicachectl.backends.hf3fs.settings import Hf3fsSettings
from hicachectl.backends.hf3fs.store import Hf3fsStore
from hicachectl.formats.kinds.pool import Pool
from hicachectl.formats.profile import Profile
from hicachectl.pages.scanning import take_inventory
from hicachectl.verification.reading import read_objects
from hicachectl.verification.reading_plan import ReadingPlan
from tests.bench.runner import alternating, options_of, scratch, timed
from tests.hf3fs_server import MetadataServer

if TYPE_CHECKING:
    import argparse

    from tests.bench.runner import Way

BLOCK_BYTES = 1 << 20
BUFFER_BYTES = 512 << 20
TASK_BYTES = 16 << 20  # as in hicachectl.verification.reading


def profile_of(nbytes: int, *, parts: bool) -> Profile:
    """Return a deployment with kv pages, or K and V parts, of so many bytes."""
    pool = Pool(name="kv", kind="opaque", nbytes=nbytes, replicated=True)
    if parts:
        head_dim = nbytes // 2
        pool = Pool(
            name="kv", kind="mha", dtype="bfloat16", layers=1, kv_heads=1, head_dim=head_dim
        )
    return Profile(model="m", page_size=1, layout="page_first", pools=(pool,))


def fill(path: Path, pages: int, nbytes: int) -> None:
    """Write a data file of random pages."""
    value = np.random.default_rng(0).bytes(nbytes)
    with path.open("wb") as file:
        for _ in range(pages):
            file.write(value)
        os.fsync(file.fileno())


def save_table(path: Path, order: np.ndarray, *, parts: bool) -> None:
    """Write the snapshot of a table with pages in `order`, least recent first."""
    entries = [
        [f"{index // 2:064x}-{'kv'[index % 2]}" if parts else f"{index:064x}", index]
        for index in order.tolist()
    ]
    table = {"num_pages": len(order), "free_pages": [], "key_to_index": entries}
    path.write_text(json.dumps({"0:kv": table}))


def drop(path: Path) -> None:
    """Drop a file from the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def dd(path: Path) -> float:
    """Return the seconds that dd reports for reading a file."""
    command = ["dd", f"if={path}", "of=/dev/null", f"bs={BLOCK_BYTES}"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, "LC_ALL": "C"}
    )
    return float(done.stderr.rpartition(" copied, ")[2].split()[0])


def fio(path: Path) -> float:
    """Return the seconds that fio reports for reading a file; NaN without fio."""
    if shutil.which("fio") is None:
        return float("nan")
    options = ["--rw=read", f"--bs={BLOCK_BYTES}", "--ioengine=psync", "--invalidate=0"]
    command = ["fio", "--name=read", f"--filename={path}", *options, "--readonly"]
    command.append("--output-format=json")
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    read = json.loads(done.stdout)["jobs"][0]["read"]
    return float(read["io_bytes"] / read["bw_bytes"])


def in_order(path: Path) -> float:
    """Return the seconds to read a file from start to end, block by block."""
    memory = memoryview(bytearray(2 * TASK_BYTES))
    blocks = [memory[at : at + BLOCK_BYTES] for at in range(0, len(memory), BLOCK_BYTES)]
    began = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        for block in cycle(blocks):
            if not file.readinto(block):
                break
    return time.perf_counter() - began


def ours(store: Hf3fsStore, *, digest: bool = False, jobs: int | None = None) -> Way:
    """Return a function that times the reads of verify, without the listing."""
    inventory = take_inventory(store, None)
    rows = np.arange(len(inventory.objects), dtype=np.int64)
    plan = ReadingPlan(
        rows=rows,
        capacities=inventory.objects.column("nbytes").to_numpy(),
        digest=np.full(len(rows), digest),
        noted=np.full(len(rows), False),
        expected={},
        checkers={},
        sizes=np.zeros(0, dtype=np.int64),
        buffer_bytes=BUFFER_BYTES,
        jobs=jobs,
    )

    def read() -> None:
        result = read_objects(store, inventory, plan)
        assert result.counts.bytes_read == plan.capacities.sum()
        assert not result.has_issues

    return timed(read)


def open_store(
    stack: contextlib.ExitStack, folder: Path, profile: Profile, server: MetadataServer | None
) -> Hf3fsStore:
    """Open the store in a folder by its snapshot, with or without a server."""
    settings = Hf3fsSettings(
        prefix=str(folder / "hicache"),
        snapshot=str(folder / "metadata.json"),
        server=None if server is None else server.url,
    )
    store = stack.enter_context(Hf3fsStore(settings))
    store.use_profile(profile)
    return store


def speeds(ways: dict[str, Way], options: argparse.Namespace, data: Path) -> dict[str, np.ndarray]:
    """Return throughputs by way and round, GB/s."""

    def cold(way: Way) -> float:
        drop(data)
        return way()

    if options.cold:
        ways = {name: partial(cold, way) for name, way in ways.items()}
    turns = alternating(ways, options.runs)
    return {name: options.pages * options.bytes / turns.of(name) / 1e9 for name in ways}


def measure(options: argparse.Namespace, folder: Path, server: MetadataServer | None) -> None:
    """Measure both orders and print."""
    data, snapshot = folder / "hicache.0.bin", folder / "metadata.json"
    fill(data, options.pages, options.bytes)
    profile = profile_of(options.bytes, parts=options.parts)
    orders = {
        "written": np.arange(options.pages)[::-1],
        "mixed": np.random.default_rng(1).permutation(options.pages),
    }
    for name, order in orders.items():
        save_table(snapshot, order, parts=options.parts)
        title = f"{options.pages} pages of {options.bytes} bytes, {name}"
        title += ", K and V" if options.parts else ""
        title += ", cold" if options.cold else ", warm"
        with contextlib.ExitStack() as stack:
            alone = open_store(stack, folder, profile, None)
            if server is not None:
                server.snapshot.write_bytes(snapshot.read_bytes())
                server.start()
                asking = open_store(stack, folder, profile, server)
                ways = {
                    name: ours(store, digest=True, jobs=options.jobs)
                    for name, store in (("without", alone), ("with", asking))
                }
                found = speeds(ways, options, data)
                print(
                    f"{title}, digested: without a server {np.median(found['without']):.2f} GB/s, "
                    f"with it {np.median(found['with']):.2f} GB/s, "
                    f"ratio {np.median(found['with'] / found['without']):.2f}"
                )
                continue
            ways = {
                "dd": partial(dd, data),
                "fio": partial(fio, data),
                "in order": partial(in_order, data),
                "ours": ours(alone, jobs=options.jobs),
                "dd again": partial(dd, data),
            }
            found = speeds(ways, options, data)
            speed = {name: f"{np.median(rates):.2f}" for name, rates in found.items()}
            own = found["ours"]
            to_dd = np.median(own / ((found["dd"] + found["dd again"]) / 2))
            to_fio, to_order = (np.median(own / found[name]) for name in ("fio", "in order"))
            of_itself = found["dd again"] / found["dd"]
            print(
                f"{title}: dd {speed['dd']} and {speed['dd again']} GB/s, fio {speed['fio']} GB/s, "
                f"in order {speed['in order']} GB/s, ours {speed['ours']} GB/s, of dd {to_dd:.2f}, "
                f"of fio {to_fio:.2f}, of in order {to_order:.2f}; "
                f"dd of itself {of_itself.min():.2f} to {of_itself.max():.2f}"
            )


def main() -> None:
    """Measure and print."""
    options = options_of(
        __doc__, pages=4096, bytes=1 << 20, runs=5, jobs=int, cold=False, parts=False, server=Path,
        dir=Path,
    )  # fmt: skip
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(scratch(options.dir))
        server = stack.enter_context(MetadataServer(options.server)) if options.server else None
        measure(options, folder, server)


if __name__ == "__main__":
    main()
