"""Write pages of two pools as the plug-in does, here or in a process of its own.

`write DIR LIMIT COUNT SEED` writes so many random pages. `hold DIR LIMIT` says "holds" when it
evicts, and stays.
"""

from __future__ import annotations

import hashlib
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from hicachectl.backends.file.folders import ObjectDirectory
from hicachectl.backends.sglang.calls import Call
from hicachectl.backends.sglang.capacity import Capacity
from hicachectl.backends.sglang.counters import Counters
from hicachectl.backends.sglang.file_pages import FilePages, PageFiles
from hicachectl.backends.sglang.settings import Settings
from hicachectl.backends.urls import parse_url
from hicachectl.formats.trailer import TRAILER_BYTES
from tests.backends.sglang.pages import HostPool
from tests.processes import following

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

KV, INDEXER = b"_org-model_0_1.bin", b".indexer_org-model_0_1.bin"
KV_BYTES, INDEXER_BYTES = 16384, 8192  # of files
PAGE_BYTES = KV_BYTES + INDEXER_BYTES
SUFFIXES: Mapping[bytes, bool] = {KV: True, INDEXER: False}
PAGES = 3000
_NODE = 8


def page_hash(number: int) -> str:
    return hashlib.sha256(b"%d" % number).hexdigest()


def page_files(directory: ObjectDirectory, suffix: bytes = KV) -> PageFiles:
    """Return the files of a pool that this rank reads and marks, and does not write."""
    settings = Settings(stores=(parse_url(directory.path),))
    pool, counters = HostPool(KV_BYTES - TRAILER_BYTES).pool, Counters("test")
    files = PageFiles(directory, pool, suffix, settings, None, counters)
    files.look()
    return files


class PageWriter:
    """Writes nodes: all sidecars of a node, then its anchors."""

    def __init__(self, path: str, limit: int = 0, min_free: int = 0, *, weights: str = "w") -> None:
        self.counters = Counters(path)
        url = parse_url(path)
        settings = Settings(
            stores=(url,), max_size=limit or None, min_free_space=min_free, threads=2
        )
        self._store = FilePages(url, self.counters, settings)
        self._kv = HostPool(KV_BYTES - TRAILER_BYTES, _NODE, weights=weights)
        self._indexer = HostPool(
            INDEXER_BYTES - TRAILER_BYTES, _NODE, name="indexer", weights=weights
        )
        for host in (self._indexer, self._kv):
            self._store.add(host.pool)

    def write(self, numbers: Sequence[int]) -> int:
        """Write a node; return how many of its pages are there."""
        pages = [page_hash(number) for number in numbers]
        with_sidecar = self._write(self._indexer, pages)
        return len(self._write(self._kv, with_sidecar))

    def _write(self, host: HostPool, pages: list[str]) -> list[str]:
        with Call(8) as call:
            written = self._store.write(host.pool, pages, host.pieces(range(len(pages))), call)
        return [page for page, ok in zip(pages, written, strict=True) if ok]

    def close(self) -> None:
        self._store.close()


def start(*arguments: object) -> subprocess.Popen[str]:
    """Start this program in a process that ends with the caller's."""
    command = (sys.executable, "-m", "tests.backends.sglang.page_writer", *map(str, arguments))
    return subprocess.Popen(
        following(sys.executable, *command),
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[3],
        text=True,
    )


def write_at_random(path: str, limit: int, count: int, seed: int) -> None:
    """Write nodes of random pages until so many pages were written, or found in place."""
    writer, numbers, written = PageWriter(path, limit), random.Random(seed), 0
    while written < count:
        node = writer.write(numbers.sample(range(PAGES), _NODE))
        written += node
        if node < _NODE:
            time.sleep(0.005)
    writer.close()


def hold(path: str, limit: int) -> None:
    """Say when this process evicts, and stay."""
    with ObjectDirectory.create(path) as directory:
        capacity = Capacity(directory, SUFFIXES, max_size=limit, counters=Counters(path))
        while not capacity.evict_now():
            time.sleep(0.05)
        print("holds", flush=True)
        time.sleep(600)


def main(what: str, path: str, limit: str, *arguments: str) -> None:
    if what == "hold":
        hold(path, int(limit))
    else:
        write_at_random(path, int(limit), int(arguments[0]), int(arguments[1]))


if __name__ == "__main__":
    main(*sys.argv[1:])
