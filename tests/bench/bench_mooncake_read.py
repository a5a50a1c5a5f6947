"""Reading a Mooncake cluster through our pipeline, against a bare loop; run by hand.

    python -m tests.bench.bench_mooncake_read [--objects 1024] [--bytes 1000000] [--batch 32]

Starts a cluster on this machine, fills it, and reads everything in turn: by a loop of
`batch_get_into` into one registered buffer, and by the pipeline with equally large tasks and no
work on the objects. Prints the median ratio of throughputs, without connecting and closing.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from hicachectl.backends.arena import Arena, place
from hicachectl.backends.base import open_store
from hicachectl.io.pipeline import Pipeline, batches
from hicachectl.text.terminal import mute_native_logs
from tests.mooncake_cluster import Cluster

if TYPE_CHECKING:
    from hicachectl.backends.base import Store

BUFFER_BYTES = 512 << 20


def fill(client: Any, count: int, nbytes: int) -> list[str]:
    """Put objects of random bytes; return their keys."""
    keys = [f"m_{number:064x}_0_k" for number in range(count)]
    value = np.random.default_rng(0).bytes(nbytes)
    for key in keys:
        assert client.put(key, value) == 0
    return keys


def bare(client: Any, keys: list[str], nbytes: int, batch: int, arena: Arena) -> float:
    """Return the seconds of a plain loop over batches."""
    offsets, _ = place(np.full(batch, nbytes, dtype=np.int64))
    addresses = (arena.address + offsets).tolist()
    began = time.perf_counter()
    for start in range(0, len(keys), batch):
        chunk = keys[start : start + batch]
        sizes = client.batch_get_into(chunk, addresses[: len(chunk)], [nbytes] * len(chunk))
        assert set(sizes) == {nbytes}
    return time.perf_counter() - began


def ours(store: Store, keys: list[str], nbytes: int, batch: int, jobs: int | None) -> float:
    """Return the seconds of the pipeline, with mapping and registration of its arena."""
    objects = pa.table({"key": pa.array([key.encode() for key in keys], pa.binary())})
    rows = np.arange(len(keys), dtype=np.int64)
    sizes = np.full(len(keys), nbytes, dtype=np.int64)
    began = time.perf_counter()
    tasks = batches(rows, sizes, most_objects=batch, most_bytes=BUFFER_BYTES)
    pipeline = Pipeline(
        store,
        objects,
        tasks,
        lambda loaded: loaded.read.all_ok,
        buffer_bytes=BUFFER_BYTES,
        identify=False,
        jobs=jobs,
    )
    assert all(pipeline)
    return time.perf_counter() - began


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--objects", type=int, default=1024)
    parser.add_argument("--bytes", type=int, default=1_000_000)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--jobs", type=int)
    parser.add_argument("--runs", type=int, default=7)
    options = parser.parse_args()
    mute_native_logs()
    total = options.objects * options.bytes
    with Cluster(segment_bytes=total * 3 // 2 + (64 << 20)) as cluster:
        client = cluster.client()
        keys = fill(client, options.objects, options.bytes)
        pairs = []
        with open_store(cluster.url) as store, Arena(BUFFER_BYTES) as arena:
            assert client.register_buffer(arena.address, arena.nbytes) == 0
            for _ in range(options.runs + 1):
                pairs.append(
                    (
                        bare(client, keys, options.bytes, options.batch, arena),
                        ours(store, keys, options.bytes, options.batch, options.jobs),
                    )
                )
            client.unregister_buffer(arena.address)
    pairs = pairs[1:]  # the first pair touches the memory
    other, own = (statistics.median(pair[i] for pair in pairs) for i in (0, 1))
    ratio = statistics.median(theirs / mine for theirs, mine in pairs)
    print(
        f"{options.objects} objects of {options.bytes} bytes, {options.batch} a batch: "
        f"bare {total / other / 1e9:.2f} GB/s, ours {total / own / 1e9:.2f} GB/s, ratio {ratio:.2f}"
    )


if __name__ == "__main__":
    main()
