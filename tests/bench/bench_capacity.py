"""What the capacity of the plug-in's file store costs; run by hand.

    python -m tests.bench.bench_capacity [--objects 1000000] [--at DIR] [--folders]

Makes empty files of a length (two objects a page) below DIR, on tmpfs by default, and prints:
- how long attaching takes, and the first listing in the background, beside `os.scandir` with a stat
  for each file, alone and as fast as it can;
- the memory of the listing, at its peak and afterwards, in bytes an object;
- the longest time that another thread, which sleeps for 1 ms at a time, got no turn meanwhile,
  beside the same without a listing;
- us per call of what servers call for each page or call;
- pages evicted a second.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from hicachectl.backends.file.folders import ObjectDirectory
from hicachectl.backends.object_files.epochs import EpochReader
from hicachectl.backends.sglang.capacity import Capacity
from hicachectl.backends.sglang.counters import Counters
from hicachectl.backends.sglang.file_pages import Found
from tests.backends.sglang.page_writer import page_files
from tests.bench.runner import options_of, scratch, timed
from tests.stores import page

if TYPE_CHECKING:
    from collections.abc import Callable

KV, INDEXER = b"_model_0_1.bin", b".indexer_model_0_1.bin"
NBYTES = 1 << 20
CALLS = 20000


def fill(directory: ObjectDirectory, pages: int) -> list[bytes]:
    """Make the objects of pages, with times in the past; return the anchors' keys."""
    keys = []
    for number in range(pages):
        name_of_page = page(number).encode()
        for suffix in (INDEXER, KV):
            here, name = directory.place_for_new(name_of_page + suffix)
            descriptor = os.open(name, os.O_CREAT | os.O_WRONLY, dir_fd=here)
            os.truncate(descriptor, NBYTES)
            os.utime(descriptor, (1e9 + number, 1e9 + number))
            os.close(descriptor)
        keys.append(name_of_page + KV)
    return keys


def resident() -> int:
    """Return this process's resident bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


class Watch:
    """Sleeps for 1 ms at a time, and notes the longest pause and the most memory."""

    def __init__(self) -> None:
        self.longest_s, self.most = 0.0, 0
        self._ended = False
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._ended = True
        self._thread.join()

    def _watch(self) -> None:
        last = time.perf_counter()
        while not self._ended:
            time.sleep(0.001)
            now = time.perf_counter()
            self.longest_s = max(self.longest_s, now - last)
            self.most = max(self.most, resident())
            last = now


def scan(directory: ObjectDirectory) -> None:
    """List a directory with sizes, by plain calls."""
    total = 0
    for descriptor in directory.directories():
        own = os.open(".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=descriptor)
        with os.scandir(own) as entries:
            for entry in entries:
                total += entry.stat(follow_symlinks=False).st_size
        os.close(own)


def us_per_call(call: Callable[[int], object], calls: int = CALLS) -> float:
    """Return us per call, the best of five rounds."""
    round_of_calls = timed(lambda: [call(number) for number in range(calls)])
    return min(round_of_calls() for _ in range(5)) / calls * 1e6


def attach(directory: ObjectDirectory, objects: int) -> Capacity:
    """Attach, wait for the first listing, and print what it cost."""
    print(f"scandir and stat          {timed(lambda: scan(directory))():8.2f} s")
    idle = Watch()
    time.sleep(2)
    idle.end()
    counters, before, watch = Counters(directory.path), resident(), Watch()
    begun = time.perf_counter()
    capacity = Capacity(
        directory,
        {KV: True, INDEXER: False},
        max_size=2 * objects * NBYTES,
        counters=counters,
    )
    print(f"attach                    {(time.perf_counter() - begun) * 1e3:8.2f} ms")
    time.sleep(0.05)
    capacity.evict_now()  # waits for the thread
    print(f"listing in the background {time.perf_counter() - begun:8.2f} s")
    watch.end()
    print(f"longest pause             {watch.longest_s * 1e3:8.2f} ms")
    print(f"longest pause when idle   {idle.longest_s * 1e3:8.2f} ms")
    print(f"memory at the peak        {(watch.most - before) / objects:8.1f} bytes an object")
    print(f"memory afterwards         {(resident() - before) / objects:8.1f} bytes an object")
    return capacity


def calls(directory: ObjectDirectory, capacity: Capacity, keys: list[bytes]) -> None:
    """Print us per call."""

    def admit(nbytes: int) -> None:
        capacity.admit(nbytes)
        capacity.release(nbytes)

    key = keys[-1]
    here, name = directory.place(key)
    descriptor = os.open(name, os.O_RDONLY, dir_fd=here)
    old = os.fstat(descriptor)
    os.utime(descriptor)
    recent = os.fstat(descriptor)
    found = Found("", recent)
    epoch, files = EpochReader(directory, KV), page_files(directory)
    pages = [(key, b"") for key in keys]
    timed: dict[str, Callable[[int], object]] = {
        "admit, release": lambda _: admit(1),
        "admit, release 1 GiB": lambda _: admit(1 << 30),
        "touch of a recent page": lambda _: files._touch(descriptor, pages[-1], recent),
        "touch": lambda _: files._touch(descriptor, pages[-1], old),
        "keep": lambda number: files.keep(pages[number % len(pages)], found),
        "look at the epoch": lambda _: epoch.look(),
        "stale": lambda _: epoch.stale(old),
    }
    for what, call in timed.items():
        print(f"{what:25} {us_per_call(call):8.2f} us")
    os.close(descriptor)


def evict(directory: ObjectDirectory, objects: int) -> None:
    """Print how fast pages are evicted."""
    counters = Counters(directory.path)
    capacity = Capacity(
        directory, {KV: True, INDEXER: False}, max_size=objects * NBYTES // 2, counters=counters
    )
    while not counters.tally.of("tokens").get("evicted"):
        time.sleep(0.01)
    first, begun = counters.tally.of("tokens")["evicted"], time.perf_counter()
    time.sleep(3)
    done = counters.tally.of("tokens")["evicted"] - first
    print(f"evicted                   {done / (time.perf_counter() - begun):8.0f} pages a second")
    capacity.close()
    time.sleep(1)  # its thread works on


def main() -> None:
    options = options_of(__doc__, objects=1_000_000, at="/dev/shm", folders=False)
    with (
        scratch(options.at) as path,
        ObjectDirectory.create(str(path), folders=options.folders or None) as directory,
    ):
        keys = fill(directory, options.objects // 2)
        capacity = attach(directory, options.objects)
        calls(directory, capacity, keys[-CALLS // 2 :])
        capacity.close()
        time.sleep(1)
        evict(directory, options.objects)


if __name__ == "__main__":
    main()
