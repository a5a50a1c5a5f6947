"""Read the names in a directory, thousands with each system call and without a stat.

Python's `os.scandir` reads only 32 KiB of names at a time. Its `is_file` makes a stat of each file
if the directory does not tell the kinds of its entries (NFS without READDIRPLUS).
"""

from __future__ import annotations

import ctypes
import errno
import os
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hicachectl.backends.disk.io import LIBC, OPEN_DIRECTORY, closing_descriptor

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    Bytes = npt.NDArray[np.uint8]

# d_type of dirent.h
UNKNOWN, DIRECTORY, REGULAR = 0, 4, 8

# Bytes of entries for each call. They hold some ten thousand names, so few requests go to a file
# server.
_CALL_BYTES = 1 << 20
# Offsets of fields in an entry of getdents64(2). An entry ends with the name, a NUL, and padding to
# a multiple of 8 bytes.
_LENGTH, _KIND, _NAME = 16, 18, 19
_SHORTEST = 24  # bytes of the shortest entry


class Entries(NamedTuple):
    """Some entries of a directory.

    names: names of the entries.
    kinds: [names] uint8, UNKNOWN, DIRECTORY, REGULAR or others of dirent.h.
    """

    names: list[str]
    kinds: Bytes


def entries_in(directory: int) -> Iterator[Entries]:
    """Yield the entries of an open directory, without `.` and `..`. Raises OSError.

    A directory that is removed meanwhile has no further entries.
    The descriptor's own read position stays, so several readers may run at once.
    """
    with closing_descriptor(os.open(".", OPEN_DIRECTORY, dir_fd=directory)) as own:
        if not hasattr(LIBC, "getdents64"):
            names = os.listdir(own)  # noqa: PTH208 - no path
            yield Entries(names, np.full(len(names), UNKNOWN, dtype=np.uint8))
            return
        block = np.empty(_CALL_BYTES, dtype=np.uint8)
        address = ctypes.c_void_p(block.ctypes.data)
        while count := LIBC.getdents64(own, address, _CALL_BYTES):
            if count < 0:
                number = ctypes.get_errno()
                if number == errno.ENOENT:  # readdir(3) takes this error for the end, too
                    return
                raise OSError(number, os.strerror(number))
            yield _parsed(block[:count].tobytes())


def _parsed(written: bytes) -> Entries:
    """Parse entries. written: bytes from getdents64(2)."""
    block = np.frombuffer(written, dtype=np.uint8)
    starts = _starts(written)
    stops = np.append(starts[1:], len(block))
    tails = block.reshape(-1, 8)[stops // 8 - 1]
    is_end = tails == 0
    # In the shortest entries, the last eight bytes begin with fields before the name.
    is_end[stops - starts == _SHORTEST, : _NAME - _LENGTH] = False
    begins, ends = starts + _NAME, stops - 8 + is_end.argmax(axis=1)
    text = written.decode("latin-1")  # one character a byte
    names = [text[begin:end] for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)]
    if not "".join(names).isascii():
        names = [os.fsdecode(name.encode("latin-1")) for name in names]
    kinds = block[starts + _KIND]
    lengths = ends - begins
    for number in np.flatnonzero(lengths <= len("..")).tolist()[::-1]:
        if names[number] in {".", ".."}:
            del names[number]
            kinds = np.delete(kinds, number)
    return Entries(names, kinds)


def _starts(written: bytes) -> npt.NDArray[np.int64]:
    """Return the offset of each entry, found by the lengths in the entries."""
    lengths = memoryview(written).cast("H")
    at, starts = _LENGTH // 2, list[int]()
    while at < len(lengths):
        starts.append(at)
        at += lengths[at] >> 1
    return np.array(starts, dtype=np.int64) * 2 - _LENGTH
