"""Listing a Mooncake store with sizes, against a bare client of the same endpoints; run by hand.

    python tests/bench/bench_mooncake_ls.py [--objects 100000] [--runs 5] [--chunk 1000]

Starts a cluster on loopback and fills it with small objects. Each run measures the bare client and
right afterwards ours. The bare client calls /get_all_keys, then /batch_query_keys for `--chunk`
keys at a time, and parses the replies with the standard library's json. Prints medians of the
pairwise ratios: of the master's endpoints inside one process, and of whole processes.
"""

from __future__ import annotations

import argparse
import hashlib
import http.client
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parents[2]))

from hicachectl.backends.mooncake.master import MasterAdmin
from tests.mooncake_cluster import Cluster

if TYPE_CHECKING:
    from collections.abc import Callable

SUFFIXES = ("_0_k", "_0_v", "_1_k", "_1_v")
OBJECT_BYTES = 512
PUT_KEYS = 1000
QUERY_KEYS = 16384  # keys per query when the store lists


def fill(cluster: Cluster, objects: int) -> None:
    """Put the objects of an MHA model on two ranks."""
    numbers = range(-(-objects // len(SUFFIXES)))
    pages = (hashlib.sha256(str(number).encode()).hexdigest() for number in numbers)
    keys = [f"Qwen-Qwen3-32B_{page}{suffix}" for page in pages for suffix in SUFFIXES]
    values = [bytes(OBJECT_BYTES)] * PUT_KEYS
    for start in range(0, objects, PUT_KEYS):
        chunk = keys[start : min(start + PUT_KEYS, objects)]
        assert cluster.client().put_batch(chunk, values[: len(chunk)]) == 0


def bare(admin: str, chunk: int) -> int:
    """List keys and sizes with only the standard library; return the number of objects."""
    connection = http.client.HTTPConnection(admin)
    connection.request("GET", "/get_all_keys")
    keys = connection.getresponse().read().decode().splitlines()
    sizes: dict[str, int] = {}
    for start in range(0, len(keys), chunk):
        connection.request("GET", "/batch_query_keys?keys=" + ",".join(keys[start : start + chunk]))
        reply = json.loads(connection.getresponse().read())
        for key, item in reply["data"].items():
            sizes[key] = item["values"][0]["size_"]
    return len(sizes)


def ours(admin: MasterAdmin) -> int:
    """List keys, sizes, versions and replicas; return the number of objects."""
    return sum(len(admin.query(keys)) for keys in admin.key_batches(QUERY_KEYS))


def command(*arguments: str) -> Callable[[], int]:
    """Return a function that runs a process to its end."""
    return lambda: subprocess.run(arguments, check=True, stdout=subprocess.DEVNULL).returncode


def seconds(work: Callable[[], int]) -> float:
    """Time one run."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def compare(name: str, theirs: Callable[[], int], mine: Callable[[], int], runs: int) -> None:
    """Print the medians of neighbouring runs."""
    theirs(), mine()  # warm-up
    pairs = [(seconds(theirs), seconds(mine)) for _ in range(runs)]
    ratio = statistics.median(ours_s / bare_s for bare_s, ours_s in pairs)
    bare_s, ours_s = (statistics.median(column) for column in zip(*pairs, strict=True))
    print(f"{name:34} {ours_s:5.2f} s   bare {bare_s:5.2f} s   ratio {ratio:4.2f}", flush=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--objects", type=int, default=100_000)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--chunk", type=int, default=1000)
    parser.add_argument("--bare", metavar="HOST:PORT", help="be the bare client, once")
    options = parser.parse_args()
    if options.bare:
        print(bare(options.bare, options.chunk))
        return
    segment_bytes = max(64 << 20, 4 * OBJECT_BYTES * options.objects)
    with Cluster(segment_bytes) as cluster, tempfile.TemporaryDirectory() as folder:
        fill(cluster, options.objects)
        admin = MasterAdmin(cluster.admin)
        found = ours(admin)
        assert found == bare(cluster.admin, options.chunk) == options.objects, found
        print(f"{options.objects} objects, {options.runs} runs, medians")
        compare(
            "keys, sizes, versions, replicas",
            lambda: bare(cluster.admin, options.chunk),
            lambda: ours(admin),
            options.runs,
        )
        parquet = ("--format", "parquet", "-o", str(Path(folder) / "objects.parquet"))
        alone = (sys.executable, __file__, "--bare", cluster.admin, f"--chunk={options.chunk}")
        cli = (sys.executable, "-m", "hicachectl", "ls", cluster.url, "--objects", *parquet)
        compare("ls --objects --format parquet", command(*alone), command(*cli), options.runs)
        admin.close()


if __name__ == "__main__":
    main()
