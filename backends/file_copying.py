"""Bytes from one open file to another, by the system itself where it can."""

from __future__ import annotations

import errno
import os
import threading

# Of a call: for larger ones Linux (6.18, ext4) looks for large folios in the page cache, which cost
# up to four times as much processor time as the copy itself. It stays in the processor's cache too.
WRITE_BYTES = 256 << 10
# The two file systems have no such call, or not between them.
_NOT_BY_THE_SYSTEM = frozenset(
    {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM}
)


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
