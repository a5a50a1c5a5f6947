"""Copy bytes into open files, from memory or another file, in the kernel if possible."""

from __future__ import annotations

import ctypes
import errno
import os
import threading

from hicachectl.backends.disk.durable import UNSUPPORTED

# Bytes per call, which fit the processor's cache. Larger calls cost up to four times the processor
# time: Linux (6.18, ext4) searches the page cache for large folios.
WRITE_BYTES = 256 << 10
# Writeback of files of at least this size starts at once, to shorten the batch's sync. For smaller
# files the calls cost more than they save.
_EARLY_BYTES = 256 << 10
# Errors of copy_file_range if missing, or unable to copy between file systems.
_NOT_BY_THE_SYSTEM = UNSUPPORTED | {errno.EXDEV}

_SYNC_FILE_RANGE_WRITE = 2
_LIBC = ctypes.CDLL(None, use_errno=True)


def write_bytes(data: memoryview, target: int) -> None:
    """Write `data` to a new file. Raises OSError."""
    done = 0
    while done < len(data):
        done += os.write(target, data[done : done + WRITE_BYTES])
    _begin_to_store(target, len(data))


def copy_bytes(source: int, nbytes: int, target: int) -> None:
    """Copy the first `nbytes` of an open file to another, sharing disk blocks if possible.

    Raises OSError, and EOFError if the source is shorter.
    """
    done = 0
    while done < nbytes:
        try:
            count = os.copy_file_range(source, target, nbytes - done, done, done)
        except OSError as error:
            if error.errno not in _NOT_BY_THE_SYSTEM:
                raise
            break
        if not count:  # end of file, or a file system that cannot copy and returns 0
            break
        done += count
    if done < nbytes:
        _copy_by_memory(source, nbytes, target, done)
    _begin_to_store(target, nbytes)


def _begin_to_store(descriptor: int, nbytes: int) -> None:
    """Start the writeback of a file; a later sync reports its errors."""
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
    """Return this thread's buffer: allocating one per file would cost more than the copy."""
    if not hasattr(_OWN, "buffer"):
        _OWN.buffer = memoryview(bytearray(WRITE_BYTES))
    buffer: memoryview = _OWN.buffer
    return buffer
