"""What `bench` adds to the reads that it times; run by hand.

    python -m tests.bench.bench_bench --sizes 53000,2097152 --mib 512 [--directory DIR]

Writes a store of random objects for each size, one a page. In turn, `bench` reads it, a loop calls
`Store.read_into` alone for batches of as many objects, and a loop calls open, preadv and close. All
use one thread, and take the bytes out of the page cache. Printed are medians over the rounds:
bench's own overhead is the time of its full batch beside that of the loop over the store, and
beside its own `share_of_bare` stands the share that the two loops have. --cpu counts processor time
instead, for a machine that others use.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING
from unittest import mock

import numpy as np
import pyarrow as pa

from hicachectl.backends.arena import ALIGNMENT, Arena, place
from hicachectl.backends.base import attached, open_store
from hicachectl.backends.capabilities import Spreads
from hicachectl.backends.disk.io import OPEN_FILE
from hicachectl.bench.bench import BenchRequest, bench
from hicachectl.bench.sample import BATCH_PAGES
from tests.bench.bench_digests import fill
from tests.bench.runner import options_of, scratch

if TYPE_CHECKING:
    from argparse import Namespace
    from pathlib import Path

_REGION_BYTES = 32 << 20
NAMES = ("store", "bare")


class Loops:
    """Loops over the batches of a directory, each of which returns the seconds of its batches."""

    def __init__(self, directory: Path, nbytes: int) -> None:
        names = sorted(os.fsencode(path.name) for path in directory.glob("*.bin"))
        room = -(-nbytes // ALIGNMENT) * ALIGNMENT
        self._step = min(BATCH_PAGES, max(1, _REGION_BYTES // room))
        starts = range(0, len(names) - BATCH_PAGES + 1, BATCH_PAGES)
        self._batches = [names[start : start + BATCH_PAGES] for start in starts]
        self._nbytes, self._directory = nbytes, directory
        self._store = open_store(str(directory))
        assert isinstance(self._store, Spreads)
        self._store.concurrency.limit(1)
        self._arena = Arena(max(_REGION_BYTES, room))
        self._arena.array[::ALIGNMENT] = 0

    def store(self) -> list[float]:
        """Call `read_into`, and nothing else."""
        seconds = []
        with attached(self._arena, self._store):
            for batch in self._batches:
                calls = []
                for names in self._calls(batch):
                    rows = pa.table({"key": pa.array(names, pa.binary())})
                    sizes = np.full(len(names), self._nbytes, dtype=np.int64)
                    calls.append((rows, place(sizes)[0], sizes))
                began = time.perf_counter()
                for call in calls:
                    self._store.read_into(*call, identify=False)
                seconds.append(time.perf_counter() - began)
        return seconds

    def bare(self) -> list[float]:
        """Call open, preadv and close."""
        seconds, memory = [], self._arena.memory
        directory = os.open(self._directory, os.O_RDONLY)
        for batch in self._batches:
            calls = self._calls(batch)
            starts = place(np.full(self._step, self._nbytes))[0].tolist()
            began = time.perf_counter()
            for names in calls:
                for name, start in zip(names, starts, strict=False):
                    file = os.open(name, OPEN_FILE | os.O_NOATIME, dir_fd=directory)
                    os.preadv(file, (memory[start : start + self._nbytes],), 0)
                    os.close(file)
            seconds.append(time.perf_counter() - began)
        os.close(directory)
        return seconds

    def _calls(self, batch: list[bytes]) -> list[list[bytes]]:
        return [batch[at : at + self._step] for at in range(0, len(batch), self._step)]


def benched(directory: Path, most: int) -> tuple[float, float]:
    """Return the seconds of a full batch, and `share_of_bare`."""
    with open_store(str(directory)) as store:
        (row,) = bench([store], BenchRequest(ranks=1, most_bytes=most)).rows.to_pylist()
    assert row["cache"] == "cached"
    return row["p50_seconds"], row["share_of_bare"]


def main() -> None:
    """Measure and print."""
    options = options_of(
        __doc__, sizes="53000,2097152", mib=512, cpu=False, directory="/dev/shm", runs=7
    )
    clock = time.thread_time if options.cpu else time.perf_counter
    with mock.patch("time.perf_counter", clock):
        _measure(options)


def _measure(options: Namespace) -> None:
    total = options.mib << 20
    print("| bytes an object | own overhead | of bare, bench | of bare, loops | bare, GB/s |")
    print("|---|---|---|---|---|")
    for nbytes in map(int, options.sizes.split(",")):
        with scratch(options.directory) as directory:
            fill(directory, total // nbytes, nbytes)
            loops, found = Loops(directory, nbytes), []
            for run in range(options.runs + 1):
                ours = benched(directory, total)
                turns = [loops.store, loops.bare][:: 1 - 2 * (run % 2)]
                seconds = {turn.__name__: float(np.median(turn())) for turn in turns}
                found.append([*ours, *map(seconds.get, NAMES)])
            p50, share, store, loop = np.array(found[1:], dtype=float).T
            print(
                f"| {nbytes:,} | {np.median(p50 / store) - 1:+.1%} | {np.median(share):.2f} | "
                f"{np.median(loop / store):.2f} | "
                f"{BATCH_PAGES * nbytes / np.median(loop) / 1e9:.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
