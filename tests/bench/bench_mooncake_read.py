"""Reading a Mooncake cluster through our pipeline, against a bare loop; run by hand.

    python -m tests.bench.bench_mooncake_read [--objects 1024] [--bytes 1000000] [--batch 32]

Starts a cluster on this machine, fills it, and reads everything in turn: by a loop of
`batch_get_into` into one registered buffer, and by the pipeline with equally large tasks and no
work on the objects. Prints the median ratio of throughputs, without connecting and closing.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from hicachectl.backends.arena import Arena, place
from hicachectl.backends.base import open_store
from hicachectl.io.pipeline import Pipeline, batches
from hicachectl.text.terminal import mute_native_logs
from tests.bench.runner import alternating, options_of, timed
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


def bare(client: Any, keys: list[str], nbytes: int, batch: int, arena: Arena) -> None:
    """Read batches in a plain loop."""
    offsets, _ = place(np.full(batch, nbytes, dtype=np.int64))
    addresses = (arena.address + offsets).tolist()
    for start in range(0, len(keys), batch):
        chunk = keys[start : start + batch]
        sizes = client.batch_get_into(chunk, addresses[: len(chunk)], [nbytes] * len(chunk))
        assert set(sizes) == {nbytes}


def ours(store: Store, keys: list[str], nbytes: int, batch: int, jobs: int | None) -> None:
    """Read by the pipeline, which maps and registers an arena."""
    objects = pa.table({"key": pa.array([key.encode() for key in keys], pa.binary())})
    rows = np.arange(len(keys), dtype=np.int64)
    sizes = np.full(len(keys), nbytes, dtype=np.int64)
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


def main() -> None:
    """Measure and print."""
    options = options_of(__doc__, objects=1024, bytes=1_000_000, batch=32, jobs=int, runs=7)
    mute_native_logs()
    total = options.objects * options.bytes
    with Cluster(segment_bytes=total * 3 // 2 + (64 << 20)) as cluster:
        client = cluster.client()
        keys = fill(client, options.objects, options.bytes)
        with open_store(cluster.url) as store, Arena(BUFFER_BYTES) as arena:
            assert client.register_buffer(arena.address, arena.nbytes) == 0
            given = (keys, options.bytes, options.batch)
            bare_loop = partial(bare, client, *given, arena)
            ways = {"bare": bare_loop, "ours": partial(ours, store, *given, options.jobs)}
            turns = alternating({name: timed(way) for name, way in ways.items()}, options.runs)
            client.unregister_buffer(arena.address)
    other, own = map(turns.median, ways)
    print(
        f"{options.objects} objects of {options.bytes} bytes, {options.batch} a batch: "
        f"bare {total / other / 1e9:.2f} GB/s, ours {total / own / 1e9:.2f} GB/s, "
        f"ratio {turns.ratio('bare', to='ours'):.2f}"
    )


if __name__ == "__main__":
    main()
