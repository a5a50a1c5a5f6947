"""USRBIO, 3FS's own read path: the FUSE daemon copies pages directly into shared memory.

This path is used if `hf3fs_fuse` is installed and the prefix is on a 3FS mount. The module follows
3FS's sources. It was tested with a stand-in that copies real bytes, and not with a real 3FS.
Source: 3FS hf3fs_fuse/io.py, src/lib/py/usrbio_binding.cc, src/lib/api/UsrbIo.md.
"""

from __future__ import annotations

import datetime
import errno
import os
import queue
import threading
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from hicachectl.backends.disk.io import open_regular, undo_on_error
from hicachectl.formats.errors import StoreUnavailable

if TYPE_CHECKING:
    from hicachectl.backends.arena import Arena
    from hicachectl.backends.hf3fs.data_files import FilePages
    from hicachectl.formats.arrays import IntArray


RING_ENTRIES = 64
WAIT_SECONDS = 5.0  # maximum wait for the next page; SGLang's client_timeout
_RING_CHECK_MS = 1  # SGLang's value


@dataclass(frozen=True, slots=True)
class Usrbio:
    """The `hf3fs_fuse.io` module, and the store's 3FS mount."""

    module: Any
    mount: str


def find_usrbio(prefix: str) -> Usrbio | None:
    """Return USRBIO for a store; None if the package or the 3FS mount is missing."""
    try:
        io = import_module("hf3fs_fuse.io")
    except ImportError:  # raised also if the package's native part cannot be loaded
        return None
    mount = io.extract_mount_point(str(Path(prefix).parent))
    return Usrbio(io, mount) if mount else None


class UsrbioReader:
    """Reader of pages into one arena, with a ring (3FS's queue of reads) for each reading thread.

    arena: an arena with a name (`Arena(named=True)`). The name is removed once the daemon has
        opened the memory.
    """

    def __init__(self, usrbio: Usrbio, arena: Arena) -> None:
        self._module, self._mount = usrbio.module, usrbio.mount
        # make_iovec expects a multiprocessing SharedMemory and uses these attributes.
        memory = SimpleNamespace(name=arena.name, buf=arena.memory)
        try:
            self._iovec: Any = self._module.make_iovec(memory, self._mount)
        except OSError as error:
            raise self._unavailable(
                f"cannot register the buffer for reads: {error.strerror}"
            ) from error
        arena.forget_name()
        self._lock = threading.Lock()
        self._idle: queue.LifoQueue[Any] = queue.LifoQueue()
        self._files: dict[str, int] = {}

    def close(self) -> None:
        """Release rings, buffer and files. No read may be in progress."""
        with suppress(queue.Empty):
            while True:
                self._idle.get_nowait()
        self._iovec = None
        files, self._files = self._files, {}
        for descriptor in files.values():
            # Otherwise 3FS would still map the descriptor's number to this file.
            self._module.deregister_fd(descriptor)
            os.close(descriptor)

    def read(self, path: str, pages: FilePages, memory: memoryview) -> IntArray:
        """Read pages in file order. Return the bytes read of each page, or -errno: [n] int64."""
        counts = np.full(len(pages.positions), -errno.EIO, dtype=np.int64)
        try:
            descriptor = self._descriptor(path)
            ring = self._ring()
        except OSError as error:
            counts[:] = -(error.errno or errno.EIO)
            return counts
        order = np.argsort(pages.positions, kind="stable")
        for start in range(0, len(order), RING_ENTRIES):
            self._read_some(ring, descriptor, pages, order[start : start + RING_ENTRIES], counts)
        # An exception skips this line, so that a ring that may still be busy is not used again.
        self._idle.put(ring)
        return counts

    def _read_some(
        self, ring: Any, descriptor: int, pages: FilePages, places: IntArray, counts: IntArray
    ) -> None:
        # The numbers must stay alive until the ring returns them, because it refers to them as
        # userdata.
        numbers = places.tolist()
        prepared = 0
        try:
            for at in numbers:
                target = int(pages.targets[at])
                ring.prepare(
                    self._iovec[target : target + pages.nbytes],
                    True,
                    descriptor,
                    int(pages.positions[at]),
                    userdata=at,
                )
                prepared += 1
        except OSError as error:
            counts[numbers[prepared:]] = -(error.errno or errno.EIO)
        while prepared:
            if not (finished := self._wait(ring, prepared)):
                raise self._unavailable(f"no page was read within {WAIT_SECONDS:g} s")
            for piece in finished:
                counts[piece.userdata] = piece.result
            prepared -= len(finished)

    def _wait(self, ring: Any, count: int) -> list[Any]:
        try:
            ring.submit()
            timeout = datetime.timedelta(seconds=WAIT_SECONDS)
            finished: list[Any] = ring.wait(max_results=count, min_results=1, timeout=timeout)
        except OSError as error:
            raise self._unavailable(str(error.strerror)) from error
        return finished

    def _ring(self) -> Any:
        with suppress(queue.Empty):
            return self._idle.get_nowait()
        return self._module.make_ioring(
            self._mount, RING_ENTRIES, for_read=True, timeout=_RING_CHECK_MS, numa=-1
        )

    def _descriptor(self, path: str) -> int:
        with self._lock:
            if path not in self._files:
                descriptor = open_regular(path)
                with undo_on_error(partial(os.close, descriptor)):
                    self._module.register_fd(descriptor)
                self._files[path] = descriptor
            return self._files[path]

    def _unavailable(self, reason: str) -> StoreUnavailable:
        return StoreUnavailable(f"{self._mount}: USRBIO: {reason}; check that hf3fs_fuse runs")
