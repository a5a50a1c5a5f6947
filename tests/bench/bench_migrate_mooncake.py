"""File store to Mooncake, against a bare loop of batch_put_from over memory; run by hand.

    python -m tests.bench.bench_migrate_mooncake [--pages 2048] [--bytes 1048576] [--runs 5]

Starts a master and a storage process on this machine. The bare loop puts as many objects of the
same sizes, in batches of 128, from one thread and from one registered buffer that already holds
them. Ours is the work of `hicachectl migrate` after both stores are listed: reading files (on tmpfs
unless --dir names another place), splitting them into K and V objects, and putting these. Ours
includes the setup of client and buffer; the bare loop has both before it begins. Prints median
throughputs, the median ratio, and the peak memory of the process.
"""

from __future__ import annotations

import os
import resource
import time
from itertools import count
from typing import TYPE_CHECKING

from hicachectl.backends.arena import Arena
from hicachectl.backends.base import open_store
from hicachectl.backends.mooncake.store import MooncakeStore
from hicachectl.backends.urls import parse_url
from hicachectl.formats.kinds.pool import Pool
from hicachectl.formats.profile import Profile
from hicachectl.move.migration import MigrationRequest, migrate
from hicachectl.move.runs import CopyRun
from hicachectl.move.store_pair import CopyOptions
from tests.bench.bench_migrate_files import fill
from tests.bench.runner import alternating, options_of, scratch
from tests.mooncake_cluster import Cluster

if TYPE_CHECKING:
    from pathlib import Path

BATCH = 128
TOKENS, HEADS, CHANNELS = 64, 1, 128


def profile_of(nbytes: int) -> Profile:
    """Return a deployment of TP 1 with so many bytes per page file, K and V together."""
    layers = nbytes // (2 * TOKENS * HEADS * CHANNELS * 2)
    pool = Pool(
        name="kv", kind="mha", dtype="bfloat16", layers=layers, kv_heads=HEADS, head_dim=CHANNELS
    )
    return Profile(model="bench", page_size=TOKENS, layout="page_first", pools=(pool,))


def bare(store: MooncakeStore, objects: int, nbytes: int, run: int) -> float:
    """Return the seconds to put objects from memory with Mooncake's own class."""
    client = store._data()._store
    slot = -(-nbytes // 4096) * 4096
    with Arena(slot * BATCH) as arena:
        arena.array[:] = 1
        assert client.register_buffer(arena.address, arena.nbytes) == 0
        began = time.perf_counter()
        for start in range(0, objects, BATCH):
            keys = [f"bare_{run}_{n:064x}_0_k" for n in range(start, min(start + BATCH, objects))]
            addresses = [arena.address + slot * n for n in range(len(keys))]
            assert not any(client.batch_put_from(keys, addresses, [nbytes] * len(keys)))
        seconds = time.perf_counter() - began
        client.unregister_buffer(arena.address)
    return seconds


def ours(source: Path, url: str, profile: Profile, options: CopyOptions) -> float:
    """Return the seconds to copy, after listing."""
    spent = [0.0]
    copy = CopyRun.copy

    def timed(run: CopyRun, *arguments: object, **options: object) -> object:
        began = time.perf_counter()
        result = copy(run, *arguments, **options)  # type: ignore[arg-type]
        spent[0] = time.perf_counter() - began
        return result

    CopyRun.copy = timed  # type: ignore[method-assign,assignment]
    try:
        with open_store(str(source)) as one, open_store(url) as other:
            outcome = migrate(one, other, MigrationRequest(profile=profile, options=options))
        assert not outcome.failed, outcome.document
        assert outcome.document["pages"]
    finally:
        CopyRun.copy = copy  # type: ignore[method-assign]
    return spent[0]


def main() -> None:
    """Measure and print."""
    options = options_of(__doc__, pages=2048, bytes=1 << 20, runs=5, jobs=int, dir="/dev/shm")
    profile = profile_of(options.bytes)
    total = options.pages * options.bytes
    with (
        scratch(options.dir) as folder,
        Cluster(segment_bytes=2 * total + (64 << 20), lease_ms=1) as cluster,
    ):
        os.environ["XDG_STATE_HOME"] = str(folder)
        fill(folder / "s", options.pages, ["_bench_0_1"], options.bytes)
        runs = count()

        def put_alone() -> float:
            with MooncakeStore.from_url(parse_url(cluster.url)) as store:
                seconds = bare(store, 2 * options.pages, options.bytes // 2, next(runs))
            cluster.clear()
            return seconds

        def migrate_all() -> float:
            chosen = CopyOptions(jobs=options.jobs)
            seconds = ours(folder / "s", cluster.url, profile, chosen)
            cluster.clear()
            return seconds

        turns = alternating({"bare": put_alone, "ours": migrate_all}, options.runs)
        print(
            f"{options.pages} pages of {options.bytes} bytes: bare "
            f"{total / turns.median('bare') / 1e9:.2f} GB/s, ours "
            f"{total / turns.median('ours') / 1e9:.2f} GB/s, ratio "
            f"{turns.ratio('bare', to='ours'):.2f}, "
            f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10} MiB of memory at most"
        )


if __name__ == "__main__":
    main()
