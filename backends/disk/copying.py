"""Bytes into open files: from memory, or from another file by the system itself where it can."""

from __future__ import annotations

import ctypes
import errno
import os
import threading

from hicachectl.backends.disk.durable import UNSUPPORTED

# Of a call: for larger ones Linux (6.18, ext4) looks for large folios in the page cache, which cost
# up to four times as much processor time as the copy itself. It stays in the processor's cache too.
WRITE_BYTES = 256 << 10
# From what size on a file's way to the disk is begun at once, so that the sync of its batch finds
# little left to do. Smaller ones would cost more calls than that saves.
_EARLY_BYTES = 256 << 10
# The two file systems have no such call, or not between them.
_NOT_BY_THE_SYSTEM = UNSUPPORTED | {errno.EXDEV}

_SYNC_FILE_RANGE_WRITE = 2
_LIBC = ctypes.CDLL(None, use_errno=True)


def write_bytes(data: memoryview, target: int) -> None:
    """Write to a new file. Raises OSError."""
    done = 0
    while done < len(data):
        done += os.write(target, data[done : done + WRITE_BYTES])
    _begin_to_store(target, len(data))


def copy_bytes(source: int, nbytes: int, target: int) -> None:
    """Copy the first bytes of a file to another one, both open; shared where that is possible.

    Raises EOFError where the source has not so many, OSError.
    """
    done = 0
    while done < nbytes:
        try:
            count = os.copy_file_range(source, target, nbytes - done, done, done)
        except OSError as error:
            if error.errno not in _NOT_BY_THE_SYSTEM:
                raise
            break
        if not count:  # the end, or a file system that says so of what it cannot copy
            break
        done += count
    if done < nbytes:
        _copy_by_memory(source, nbytes, target, done)
    _begin_to_store(target, nbytes)


def _begin_to_store(descriptor: int, nbytes: int) -> None:
    """Let the system begin to bring a file to the disk; a later sync tells of errors."""
    if nbytes >= _EARLY_BYTES and hasattr(_LIBC, "sync_file_range"):
        whole = ctypes.c_int64(0), ctypes.c_int64(nbytes)
        _LIBC.sync_file_range(descriptor, *whole, _SYNC_FILE_RANGE_WRITE)


def _copy_by_memory(source: int, nbytes: int, target: int, done: int) -> None:
    buffer = _buffer()
    while done < nbytes:
        count = os.preadv(source, (buffer[: nbytes - done],), done)
        if not count:
            raise EOFError
        written = 0
        while written < count:
            written += os.pwrite(target, buffer[written:count], done + written)
        done += count


_OWN = threading.local()


def _buffer() -> memoryview:
    """Give the memory of this thread: new memory for each file would cost more than the copy."""
    if not hasattr(_OWN, "buffer"):
        _OWN.buffer = memoryview(bytearray(WRITE_BYTES))
    buffer: memoryview = _OWN.buffer
    return buffer
