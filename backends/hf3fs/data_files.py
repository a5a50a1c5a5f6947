"""Read and write the data files of a 3FS store in place, by system calls.

A file is an array of pages of one size, without keys, lengths or checksums. This module never
creates, resizes or truncates files, but SGLang's clients do. Truncated pages read as zeros after
the file has grown again.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import TYPE_CHECKING

import numpy as np

from hicachectl.backends.disk.io import (
    fill,
    is_in_memory,
    is_on_fuse,
    open_regular,
    raise_denied,
    raise_lost,
    write_all,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicachectl.formats.arrays import BoolArray, IntArray

    Run = tuple[int, int]  # adjacent pages: first index, and the index after the last

CHECK_3FS_MOUNT = "check that 3FS is mounted"

_BLOCK = mmap.PAGESIZE  # O_DIRECT needs multiples of this
_RUN_PAGES = 256  # most pages of one system call, which takes up to IOV_MAX buffers
_RUN_BYTES = 64 << 20
_IN_FLIGHT = 16  # parallel reads, since each waits for the network; SGLang's default numjobs
# Errors of file systems that do not report holes.
_NO_HOLES = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENXIO})


@dataclass(frozen=True, slots=True, eq=False)
class FilePages:
    """Pages of one data file, and their targets.

    positions: [n] int64, bytes from the file's start.
    targets: [n] int64, bytes from the arena's start.
    nbytes: bytes of each page.
    """

    positions: IntArray
    targets: IntArray
    nbytes: int


class DataFiles:
    """Data files, kept open after their first use.

    direct: whether reads bypass the page cache. With None, they do so only on FUSE mounts, where
        the cache can lack other clients' writes.
    """

    def __init__(self, *, direct: bool | None = None) -> None:
        self._direct = direct
        self._lock = threading.Lock()
        self._open: dict[tuple[str, int], int] = {}
        self._past_cache: dict[str, bool] = {}
        self._not_direct: set[str] = set()
        self._waiting: ThreadPoolExecutor | None = None

    def close(self) -> None:
        """Close every file."""
        with self._lock:
            descriptors, self._open = list(self._open.values()), {}
            pool, self._waiting = self._waiting, None
        if pool is not None:
            pool.shutdown()
        for descriptor in descriptors:
            os.close(descriptor)

    def read(self, path: str, pages: FilePages, memory: memoryview) -> IntArray:
        """Read pages in file order, adjacent pages in one system call.

        Return the bytes read of each page, or -errno: [n] int64. Raises StoreUnavailable if the
        file system is lost.
        """
        counts = np.zeros(len(pages.positions), dtype=np.int64)
        if not len(counts):
            return counts
        try:
            past_cache = self._reads_past_cache(path)
            source = self._source(path, pages, past_cache=past_cache)
        except OSError as error:
            _raise_lost(path, error)
            counts[:] = -(error.errno or errno.EIO)
            return counts
        order = np.argsort(pages.positions, kind="stable")
        positions = pages.positions[order].tolist()
        targets = pages.targets[order].tolist()
        views = [memory[target : target + pages.nbytes] for target in targets]
        runs = _runs(pages.positions[order], pages.nbytes)
        if past_cache:
            done = self._waiters().map(lambda run: source.read([run], positions, views), runs)
            counts[order] = list(chain.from_iterable(done))
            if source.direct and (counts == -errno.EINVAL).any():
                self._not_direct.add(path)  # the file opens with O_DIRECT, but cannot be read so
                return self.read(path, pages, memory)
        else:
            with suppress(OSError):  # the read reports the error
                if not is_in_memory(source.descriptor, positions[-1] + pages.nbytes - 1):
                    source.expect(runs, positions)
            counts[order] = source.read(runs, positions, views)
        return counts

    def is_in_memory(self, path: str, position: int) -> bool:
        """Return whether a byte is in the page cache; True if reads bypass it or if unknown."""
        with suppress(OSError):  # the read reports the error
            if not self._reads_past_cache(path):
                return is_in_memory(self._descriptor(path, os.O_RDONLY), position)
        return True

    def expect(self, path: str, positions: IntArray, nbytes: int) -> None:
        """Start reading pages into the page cache."""
        with suppress(OSError):  # the read reports the error
            source = _Source(path, self._descriptor(path, os.O_RDONLY), nbytes)
            ordered = np.sort(positions)
            source.expect(_runs(ordered, nbytes), ordered.tolist())

    def write(self, path: str, position: int, page: memoryview) -> None:
        """Write one page in place. Raises OSError, with EFBIG for a page beyond the file's end."""
        descriptor = self._descriptor(path, os.O_RDWR)
        if position + len(page) > os.fstat(descriptor).st_size:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
        write_all(descriptor, (page,), position)

    def sync(self, path: str) -> None:
        """Make writes durable, and visible to readers that bypass the page cache."""
        os.fdatasync(self._descriptor(path, os.O_RDWR))

    def holes(self, path: str, positions: IntArray, nbytes: int) -> BoolArray:
        """Return which pages have parts that were never written: [n] bool.

        File systems report holes in whole blocks. On a file system that reports no holes, the
        result is False for every page.
        """
        found = np.zeros(len(positions), dtype=np.bool_)
        try:
            descriptor = self._descriptor(path, os.O_RDONLY)
            size = os.fstat(descriptor).st_size
            for at, position in enumerate(positions.tolist()):
                if 0 <= position < size:
                    end = min(position + nbytes, size)
                    found[at] = os.lseek(descriptor, position, os.SEEK_HOLE) < end
        except OSError as error:
            if error.errno not in (*_NO_HOLES, errno.ENOENT):
                _raise_lost(path, error)
        return found

    def size(self, path: str) -> int | None:
        """Return the bytes of a file; None if it cannot be opened."""
        try:
            return os.fstat(self._descriptor(path, os.O_RDONLY)).st_size
        except OSError as error:
            _raise_lost(path, error)
            return None

    def _source(self, path: str, pages: FilePages, *, past_cache: bool) -> _Source:
        places = (pages.targets, pages.positions)
        aligned = not pages.nbytes % _BLOCK and not any((at % _BLOCK).any() for at in places)
        if past_cache and aligned and path not in self._not_direct:
            with suppress(OSError):  # the file system has no O_DIRECT
                descriptor = self._descriptor(path, os.O_RDONLY | os.O_DIRECT)
                return _Source(path, descriptor, pages.nbytes, direct=True)
        descriptor = self._descriptor(path, os.O_RDONLY)
        return _Source(path, descriptor, pages.nbytes, drops_cache=past_cache)

    def _reads_past_cache(self, path: str) -> bool:
        if self._direct is not None:
            return self._direct
        if path not in self._past_cache:
            self._past_cache[path] = is_on_fuse(self._descriptor(path, os.O_RDONLY))
        return self._past_cache[path]

    def _waiters(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._waiting is None:
                self._waiting = ThreadPoolExecutor(_IN_FLIGHT, thread_name_prefix="hicachectl-3fs")
            return self._waiting

    def _descriptor(self, path: str, flags: int) -> int:
        """Open a file once per `flags`. Raises OSError."""
        with self._lock:
            if (path, flags) not in self._open:
                self._open[path, flags] = open_regular(path, flags)
            return self._open[path, flags]


@dataclass(frozen=True, slots=True)
class _Source:
    path: str
    descriptor: int
    nbytes: int  # bytes of a page
    drops_cache: bool = False
    direct: bool = False

    def expect(self, runs: Sequence[Run], positions: Sequence[int]) -> None:
        for first, end in runs:
            nbytes = (end - first) * self.nbytes
            os.posix_fadvise(self.descriptor, positions[first], nbytes, os.POSIX_FADV_WILLNEED)

    def read(
        self, runs: Sequence[Run], positions: Sequence[int], views: Sequence[memoryview]
    ) -> list[int]:
        """Return the bytes read of each page, or -errno."""
        if self.drops_cache:
            for first, end in runs:
                self._drop_cache(positions[first], (end - first) * self.nbytes)
        # Local names are faster, and for small pages this loop takes most of the time.
        read, descriptor = os.preadv, self.descriptor
        start, stop = runs[0][0], runs[-1][1]
        with suppress(OSError):  # _read_each then finds the page that fails
            counts = [read(descriptor, views[first:end], positions[first]) for first, end in runs]
            if sum(counts) == (stop - start) * self.nbytes:
                return [self.nbytes] * (stop - start)
        return self._read_each(positions[start:stop], views[start:stop])

    def _read_each(self, positions: Sequence[int], views: Sequence[memoryview]) -> list[int]:
        """Read pages one by one. A page is short only at the end of the file."""
        return [self._read_one(*page) for page in zip(positions, views, strict=True)]

    def _read_one(self, position: int, view: memoryview) -> int:
        try:
            return fill(self.descriptor, (view,), position)
        except OSError as error:
            _raise_lost(self.path, error)
            return -(error.errno or errno.EIO)

    def _drop_cache(self, position: int, nbytes: int) -> None:
        """Drop bytes from the page cache; bytes not yet on disk stay."""
        start = position // _BLOCK * _BLOCK
        end = -(-(position + nbytes) // _BLOCK) * _BLOCK
        with suppress(OSError):
            os.posix_fadvise(self.descriptor, start, end - start, os.POSIX_FADV_DONTNEED)


def _runs(positions: IntArray, nbytes: int) -> list[Run]:
    """Split ascending positions into runs of adjacent pages, short enough for one system call."""
    if not len(positions):
        return []
    breaks = np.flatnonzero(np.diff(positions) != nbytes) + 1
    edges = [0, *breaks.tolist(), len(positions)]
    most = max(1, min(_RUN_PAGES, _RUN_BYTES // nbytes))
    if len(positions) <= most:
        return list(pairwise(edges))
    return [
        (first, min(first + most, end))
        for start, end in pairwise(edges)
        for first in range(start, end, most)
    ]


def _raise_lost(path: str, error: OSError) -> None:
    raise_lost(error, path, "access the data file", CHECK_3FS_MOUNT)
    raise_denied(error, path)
