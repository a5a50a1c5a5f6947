"""What each rule of the plug-in adds to a bare loop over small files; run by hand.

    python -m tests.bench.bench_plugin_rules [--dir /dev/shm] [--rounds 20] [--digest xxh3]

Pages of 53 KB in two pieces, in calls of 128. A bare loop asks for, reads and writes them, as in
`bench_plugin`; then it keeps one rule more each time. Prints microseconds of processor time a page,
the best of the rounds for each call, and the plug-in's store against the loop with all rules.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import queue
import threading
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from hicachectl.backends.sglang.calls import Call
from hicachectl.backends.sglang.counters import Counters
from hicachectl.backends.sglang.file_pages import FilePages
from hicachectl.backends.sglang.pools import EvenPages
from hicachectl.backends.sglang.settings import Settings
from hicachectl.backends.urls import parse_url
from hicachectl.formats.trailer import PoolTrailers, digest_function
from tests.backends.sglang.pages import HostPool
from tests.bench.runner import options_of, scratch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

NBYTES, COUNT, BATCH, TRAILER = 53248, 512, 128, 128
SECONDS = 5.0
RULES = {
    "bare": "no rule",
    "thread": "another thread works, so that a store that hangs does not hang SGLang",
    "names": "only page hashes become names of files",
    "places": "the addresses of a call's pages come from its host indices",
    "store": "each call looks whether the directory is still there, and at its epoch",
    "alone": "a page that fails costs itself alone",
    "time": "each page looks at the deadline, a write once more before its rename",
    "memory": "no call ends while a page's host memory is copied or digested",
    "use": "files that were not used for an hour are touched",
}


class Loop:
    """A bare loop that keeps the first rules of RULES."""

    def __init__(self, directory: Path, digest: str, host: EvenPages, rules: int) -> None:
        self.path, self.host, self.rules = directory, host, set(list(RULES)[:rules])
        self.directory = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        self.trailers = PoolTrailers(digest, NBYTES, bytes(16), bytes(24))
        self.digest, self.twice = digest_function(digest), digest != "off"
        self.known = host.pieces(range(COUNT))
        self.memory = (ctypes.c_char * (NBYTES + TRAILER))()
        self.view = memoryview(self.memory).cast("B")
        self.holders: list[None] = []
        self.ended = False
        self.deadline = 0.0
        self.jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.done: queue.SimpleQueue[None] = queue.SimpleQueue()
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self) -> None:
        while True:
            self.jobs.get()()
            self.done.put(None)

    def run(self, name: str, pages: Sequence[str], start: int) -> None:
        work = partial(self.work, getattr(self, name), pages, start)
        if "thread" in self.rules:
            self.jobs.put(work)
            self.done.get(timeout=SECONDS)
        else:
            work()

    def work(self, act: Callable[[str, Any], None], pages: Sequence[str], start: int) -> None:
        rules = self.rules
        self.deadline = time.monotonic() + SECONDS
        pieces: Sequence[Any] = self.known[start : start + len(pages)]
        if "places" in rules and act != self.exists:
            pieces = self.host.pieces(range(start, start + len(pages)))
        if "names" in rules:
            assert [bytes.fromhex(page).hex() for page in pages] == pages
        if "store" in rules:
            assert self.path.stat().st_ino == os.fstat(self.directory).st_ino
            with suppress(FileNotFoundError):
                os.stat("epoch", dir_fd=self.directory)
        self.old = time.time_ns() - 3600 * 10**9
        self.holds, self.touches = "memory" in rules, "use" in rules
        looks, alone = "time" in rules, "alone" in rules
        self.looks = looks
        done = [False] * len(pages)
        for index, (page, own) in enumerate(zip(pages, pieces, strict=True)):
            if looks and time.monotonic() >= self.deadline:
                return
            if alone:
                try:
                    act(page, own)
                    done[index] = True
                except OSError as error:
                    print(error)
            else:
                act(page, own)

    def hold(self) -> None:
        self.holders.append(None)
        if self.ended or time.monotonic() >= self.deadline:
            raise TimeoutError

    def exists(self, page: str, _: Any) -> None:
        descriptor = os.open(f"{page}.kv", os.O_RDONLY, dir_fd=self.directory)
        data = os.pread(descriptor, TRAILER + 1, NBYTES)
        os.close(descriptor)
        assert self.trailers.digest(data, bytes.fromhex(page)) is not None

    def read(self, page: str, pieces: Any) -> None:
        descriptor = os.open(f"{page}.kv", os.O_RDONLY, dir_fd=self.directory)
        facts = os.fstat(descriptor)
        assert os.preadv(descriptor, [self.view], 0) == NBYTES + TRAILER
        if self.touches and facts.st_atime_ns < self.old:
            os.utime(descriptor)
        os.close(descriptor)
        stored = self.trailers.digest(bytes(self.view[NBYTES:]), bytes.fromhex(page))
        assert self.digest([self.view[:NBYTES]]) == stored
        address = ctypes.addressof(self.memory)
        if self.holds:
            self.hold()
        for target, size in pieces:
            ctypes.memmove(target, address, size)
            address += size
        if self.holds:
            self.holders.pop()

    def write(self, page: str, pieces: Any) -> None:
        final = f"{page}.kv"
        with suppress(FileNotFoundError):
            os.close(os.open(final, os.O_RDONLY, dir_fd=self.directory))
            return
        views = [
            memoryview((ctypes.c_char * size).from_address(address)).cast("B")
            for address, size in pieces
        ]
        digest = self.digested(views)
        trailer = self.trailers.dump(bytes.fromhex(page), digest)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        descriptor = os.open(f"{final}.tmp", flags, 0o666, dir_fd=self.directory)
        os.writev(descriptor, [*views, trailer])
        os.close(descriptor)
        if self.twice:
            assert self.digested(views) == digest
        if self.looks and time.monotonic() >= self.deadline:
            raise TimeoutError
        os.rename(f"{final}.tmp", final, src_dir_fd=self.directory, dst_dir_fd=self.directory)

    def digested(self, views: Sequence[memoryview]) -> bytes:
        if self.holds:
            self.hold()
        digest = self.digest(views)
        if self.holds:
            self.holders.pop()
        return digest


class Ours:
    """The plug-in's file store."""

    def __init__(self, directory: Path, digest: str, memory: HostPool, host: EvenPages) -> None:
        self.host = host
        self.pool = dataclasses.replace(memory.pool, host=host)
        url = parse_url(str(directory))
        self.store = FilePages(url, Counters("bench"), Settings(stores=(url,), digest=digest))
        self.store.add(self.pool)

    def run(self, name: str, pages: Sequence[str], start: int) -> None:
        with Call(SECONDS) as call:
            if name == "exists":
                done = self.store.exists(self.pool, pages, call)
            else:
                pieces = self.host.pieces(range(start, start + len(pages)))
                done = getattr(self.store, name)(self.pool, pages, pieces, call)
            assert all(done)


def measure(base: Path, digest: str, rounds: int) -> dict[str, dict[str, float]]:
    """Return microseconds a page, by loop and operation."""
    memory = HostPool(NBYTES, COUNT)
    memory.fill(1)
    (first,) = HostPool.pieces(memory, [0])
    host = EvenPages(1, COUNT, [(address, nbytes, nbytes) for address, nbytes in first])
    users: dict[str, Loop | Ours] = {}
    for rules, name in enumerate(RULES, start=1):
        (base / name).mkdir()
        users[name] = Loop(base / name, digest, host, rules)
    (base / "plug-in").mkdir()
    users["plug-in"] = Ours(base / "plug-in", digest, memory, host)
    pages = [f"{number:064x}" for number in range(COUNT)]
    best: dict[tuple[str, str, int], float] = {}
    for number in range(rounds):
        order = list(users)[number % len(users) :] + list(users)[: number % len(users)]
        for name in users:
            for path in (base / name).glob("[0-9a-f]*"):
                path.unlink()
        for operation in ("write", "exists", "read", "exists", "read"):
            for start in range(0, COUNT, BATCH):
                for name in order:
                    begun = time.process_time()
                    users[name].run(operation, pages[start : start + BATCH], start)
                    seconds = time.process_time() - begun
                    key = (name, operation, start)
                    best[key] = min(best.get(key, seconds), seconds)
    store = users["plug-in"]
    assert isinstance(store, Ours)
    store.store.close()
    operations = ("exists", "read", "write")
    return {
        name: {
            each: sum(best[name, each, at] for at in range(0, COUNT, BATCH)) / COUNT * 1e6
            for each in operations
        }
        for name in users
    }


def main() -> None:
    """Measure, and print a table."""
    options = options_of(__doc__, dir="/dev/shm", rounds=20, digest="xxh3")
    with scratch(options.dir) as base:
        costs = measure(base, options.digest, options.rounds)
    ours = costs["plug-in"]
    for name, own in costs.items():
        reads, writes = own["exists"] + own["read"], own["write"]
        print(
            f"{name:8} exists {own['exists']:6.2f}  read {own['read']:6.2f}  write {writes:6.2f} us"
            f"  plug-in: reads {reads / (ours['exists'] + ours['read']):.2f}"
            f"  writes {writes / ours['write']:.2f}  {RULES.get(name, '')}"
        )


if __name__ == "__main__":
    main()
