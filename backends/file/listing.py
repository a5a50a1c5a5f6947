"""Directories of objects as batches of Arrow: names, and what the system says of the files."""

from __future__ import annotations

import os
import stat
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from pyarrow.fs import FileType, LocalFileSystem

from hicachectl.backends.base import scan_batch
from hicachectl.backends.disk.files import LOST, version_of

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

SCAN_ROWS = 16384
_OBJECT_END = ".bin"  # of the names that HiCacheFile gives
# Arrow's stat releases the GIL: two workers keep up with the thread that reads names.
SCAN_WORKERS = 2


@dataclass(slots=True)
class SkippedEntries:
    """Entries named like objects that are neither files nor directories: number, and the first."""

    count: int = 0
    first: str = ""

    def add(self, name: str) -> None:
        """Count an entry."""
        self.count += 1
        self.first = self.first or name


def scan_directory(
    directory: int, path: str, schema: Any, left_out: SkippedEntries
) -> Generator[Any, None, None]:
    """List the regular files of a directory as batches of a scan's schema.

    directory: its descriptor. path: its name. left_out: counts links, FIFOs and the like. A file
    that cannot be asked for its size is listed without one. Raises OSError.
    """
    read = batch_reader(directory, path, schema)
    pending: deque[Any] = deque()
    # Versions need a stat call from Python, where a second thread only fights for the GIL.
    workers = 1 if "version" in schema.names else SCAN_WORKERS
    pool = ThreadPoolExecutor(workers, thread_name_prefix="hicachectl-scan")
    try:
        for names in names_in(directory, left_out):
            pending.append(pool.submit(read, names))
            if len(pending) > workers + 1:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def names_in(directory: int, left_out: SkippedEntries) -> Iterator[list[str]]:
    """Read the names of regular files, some thousands at once."""

    def leave_out(entry: os.DirEntry[str]) -> bool:
        if entry.name.endswith(_OBJECT_END) and not entry.is_dir(follow_symlinks=False):
            left_out.add(entry.name)
        return False

    # A descriptor of its own: scans at the same time must not share a position.
    own = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=directory)
    try:
        with os.scandir(own) as entries:
            names = (
                entry.name
                for entry in entries
                if entry.is_file(follow_symlinks=False) or leave_out(entry)
            )
            while chunk := list(islice(names, SCAN_ROWS)):
                yield chunk
    finally:
        os.close(own)


def batch_reader(directory: int, path: str, schema: Any) -> Callable[[list[str]], Any]:
    """How names become a batch of `schema`: the cheapest way that has all its columns."""

    def only_names(names: list[str]) -> Any:
        return scan_batch(schema, {"key": _key_array(names)}, len(names))

    def read(names: list[str]) -> Any:
        # Arrow takes UTF-8 text only, and asks for no inode.
        arrow = "version" not in schema.names and path.isascii()
        if arrow and "".join(names).isascii():
            with suppress(OSError):  # one file that cannot be asked fails them all
                return _ask_arrow(path, schema, names)
        return ask_each(directory, schema, names)

    return read if {"nbytes", "mtime_ns", "version"} & set(schema.names) else only_names


def _ask_arrow(path: str, schema: Any, names: list[str]) -> Any:
    """Size and mtime by way of Arrow, which asks the system without holding the GIL."""
    prefix = path + "/"
    infos = LocalFileSystem().get_file_info([prefix + name for name in names])
    sizes = [info.size for info in infos]
    if None in sizes:  # vanished, or no longer a file
        kept = [info.type == FileType.File for info in infos]
        names = [name for name, keep in zip(names, kept, strict=True) if keep]
        infos = [info for info, keep in zip(infos, kept, strict=True) if keep]
        sizes = [info.size for info in infos]
    columns = {
        "key": _key_array(names),
        "nbytes": pa.array(sizes, pa.int64()),
        "mtime_ns": pa.array([info.mtime_ns for info in infos], pa.int64()),
    }
    return scan_batch(schema, columns, len(names))


def ask_each(directory: int, schema: Any, names: list[str]) -> Any:
    """Make a batch of `schema` of the files that are there, one stat each. Raises OSError."""
    found: list[str] = []
    facts: list[tuple[int | None, int | None, bytes | None]] = []
    fact: tuple[int | None, int | None, bytes | None]
    for name in names:
        try:
            s = os.stat(name, dir_fd=directory, follow_symlinks=False)
        except FileNotFoundError:
            continue
        except OSError as error:
            if error.errno in LOST:
                raise
            fact = (None, None, None)
        else:
            if not stat.S_ISREG(s.st_mode):
                continue
            fact = s.st_size, s.st_mtime_ns, version_of(s)
        found.append(name)
        facts.append(fact)
    sizes, times, versions = zip(*facts, strict=True) if facts else ((), (), ())
    columns = {
        "key": _key_array(found),
        "nbytes": pa.array(sizes, pa.int64()),
        "mtime_ns": pa.array(times, pa.int64()),
        "version": pa.array(versions, pa.binary()),
    }
    return scan_batch(schema, columns, len(found))


def _key_array(names: list[str]) -> Any:
    """File names as a binary array, from one joined buffer instead of a bytes object each."""
    joined = os.fsencode("".join(names))
    lengths = list(map(len, names))
    if sum(lengths) != len(joined):
        lengths = [len(os.fsencode(name)) for name in names]
    offsets = np.zeros(len(names) + 1, dtype=np.int32)
    np.cumsum(lengths, out=offsets[1:])
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(joined)]
    return pa.Array.from_buffers(pa.binary(), len(names), buffers)
