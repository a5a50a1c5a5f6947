"""Listing a Mooncake store with sizes, against a bare client of the same endpoints; run by hand.

    python -m tests.bench.bench_mooncake_ls [--objects 100000] [--runs 5] [--chunk 1000]

Starts a cluster on loopback and fills it with small objects. Each run measures the bare client and
right afterwards ours. The bare client calls /get_all_keys, then /batch_query_keys for `--chunk`
keys at a time, and parses the replies with the standard library's json. Prints medians of the
pairwise ratios, for the master's endpoints inside one process and for whole processes. With --bare
HOST:PORT it is the bare client, once.
"""

from __future__ import annotations

import http.client
import json
import sys
from typing import TYPE_CHECKING

from hicachectl.backends.mooncake.master import MasterAdmin
from tests.bench.runner import HICACHECTL, Command, alternating, options_of, scratch, timed
from tests.mooncake_cluster import Cluster
from tests.stores import page

if TYPE_CHECKING:
    from tests.bench.runner import Way

SUFFIXES = ("_0_k", "_0_v", "_1_k", "_1_v")
OBJECT_BYTES = 512
PUT_KEYS = 1000
QUERY_KEYS = 16384  # keys per query when the store lists


def fill(cluster: Cluster, objects: int) -> None:
    """Put the objects of an MHA model on two ranks."""
    pages = map(page, range(-(-objects // len(SUFFIXES))))
    keys = [f"Qwen-Qwen3-32B_{name}{suffix}" for name in pages for suffix in SUFFIXES]
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


def compare(name: str, theirs: Way, mine: Way, runs: int) -> None:
    """Print the medians of neighbouring runs."""
    turns = alternating({"bare": theirs, "ours": mine}, runs)
    print(
        f"{name:34} {turns.median('ours'):5.2f} s   bare {turns.median('bare'):5.2f} s   "
        f"ratio {turns.ratio('ours', to='bare'):4.2f}",
        flush=True,
    )


def main() -> None:
    """Measure and print."""
    options = options_of(__doc__, objects=100_000, runs=5, chunk=1000, bare=str)
    if options.bare:
        print(bare(options.bare, options.chunk))
        return
    segment_bytes = max(64 << 20, 4 * OBJECT_BYTES * options.objects)
    with Cluster(segment_bytes) as cluster, scratch() as folder:
        fill(cluster, options.objects)
        admin = MasterAdmin(cluster.admin)
        found = ours(admin)
        assert found == bare(cluster.admin, options.chunk) == options.objects, found
        print(f"{options.objects} objects, {options.runs} runs, medians")
        compare(
            "keys, sizes, versions, replicas",
            timed(lambda: bare(cluster.admin, options.chunk)),
            timed(lambda: ours(admin)),
            options.runs,
        )
        parquet = ("--format", "parquet", "-o", folder / "objects.parquet")
        program = (sys.executable, "-m", "tests.bench.bench_mooncake_ls", "--bare", cluster.admin)
        alone = Command(*program, f"--chunk={options.chunk}")
        cli = Command(*HICACHECTL, "ls", cluster.url, "--objects", *parquet)
        compare("ls --objects --format parquet", alone, cli, options.runs)
        admin.close()


if __name__ == "__main__":
    main()
