"""Write pages within a capacity as the plug-in does, here or in a process of its own.

`write DIR LIMIT SECONDS SEED` writes random pages, and says how many. `hold DIR LIMIT` says "holds"
when it evicts, and stays.
"""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from hicachectl.backends.file.folders import ObjectDirectory
from hicachectl.backends.sglang.capacity import Capacity
from hicachectl.backends.sglang.counters import Counters
from hicachectl.backends.sglang.epochs import owner_of
from tests.processes import following

if TYPE_CHECKING:
    from collections.abc import Mapping

KV, INDEXER = b"_m_0_1.bin", b".indexer_m_0_1.bin"
KV_BYTES, INDEXER_BYTES = 16384, 8192
PAGE_BYTES = KV_BYTES + INDEXER_BYTES
SUFFIXES: Mapping[bytes, bool] = {KV: True, INDEXER: False}
_PAGES_OF_A_NODE = 8


def page_hash(number: int) -> str:
    return hashlib.sha256(b"%d" % number).hexdigest()


class PageWriter:
    """Writes pages of two pools, sidecars first."""

    def __init__(self, directory: ObjectDirectory, capacity: Capacity) -> None:
        self.directory = directory
        self.capacity = capacity
        self.refused = 0
        self._token = owner_of(KV) + os.urandom(4).hex().encode()
        self._count = 0

    def write_page(self, number: int) -> bool:
        return self.write(number, INDEXER, INDEXER_BYTES) and self.write(number, KV, KV_BYTES)

    def write(self, number: int, suffix: bytes, nbytes: int) -> bool:
        """Write an object unless it is there; return whether it is there now."""
        key = page_hash(number).encode() + suffix
        if self._keeps(key):
            return True
        if not self.capacity.admit(nbytes):
            self.refused += 1
            return False
        here, name = self.directory.place_for_new(key)
        self._count += 1
        temporary = self.directory.temporary_name(key, self._token, self._count)
        descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, dir_fd=here)
        os.write(descriptor, bytes(nbytes))
        os.close(descriptor)
        os.rename(temporary, name, src_dir_fd=here, dst_dir_fd=here)
        return True

    def _keeps(self, key: bytes) -> bool:
        try:
            here, name = self.directory.place(key)
            return self.capacity.keep(key, os.stat(name, dir_fd=here, follow_symlinks=False))
        except FileNotFoundError:
            return False


def start(*arguments: object) -> subprocess.Popen[str]:
    """Start this program in a process that ends with the caller's."""
    command = (sys.executable, "-m", "tests.backends.sglang.page_writer", *map(str, arguments))
    return subprocess.Popen(
        following(sys.executable, *command),
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[3],
        text=True,
    )


def _write(writer: PageWriter, seconds: float, seed: int) -> int:
    """Write nodes of random pages: all sidecars of a node, then its anchors."""
    numbers, written = random.Random(seed), 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        node = [numbers.randrange(3000) for _ in range(_PAGES_OF_A_NODE)]
        whole = [page for page in node if writer.write(page, INDEXER, INDEXER_BYTES)]
        written += sum(writer.write(page, KV, KV_BYTES) for page in whole)
        if len(whole) < len(node):
            time.sleep(0.005)
    return written


def main(what: str, path: str, limit: str, *arguments: str) -> None:
    directory = ObjectDirectory.create(path)
    capacity = Capacity(directory, SUFFIXES, max_size=int(limit), counters=Counters(path))
    if what == "write":
        print(_write(PageWriter(directory, capacity), float(arguments[0]), int(arguments[1])))
        capacity.close()
        return
    while not capacity.evict_now():
        time.sleep(0.05)
    print("holds", flush=True)
    time.sleep(600)


if __name__ == "__main__":
    main(*sys.argv[1:])
