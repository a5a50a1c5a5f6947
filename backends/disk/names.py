"""Names and versions of files that are objects. File names are bytes and need not be text."""

from __future__ import annotations

import errno
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import os

OWN_PREFIX = b".hicachectl"
VERSION = struct.Struct("<QqqQ")  # inode, mtime and ctime in ns, size
_EARLIEST_NS, _LATEST_NS = -(1 << 63), (1 << 63) - 1


def is_file_name(key: bytes) -> bool:
    """Return whether `check_key` accepts a key."""
    try:
        check_key(key)
    except OSError:
        return False
    return True


def check_key(key: bytes) -> None:
    """Raise OSError if a key cannot name a file in the directory itself."""
    if b"/" in key or b"\0" in key or key in (b"", b".", b".."):
        raise OSError(errno.EINVAL, "the key cannot be a file name")


def are_plain(keys: list[bytes]) -> bool:
    """Return True if a quick test shows that `check_key` accepts all keys."""
    joined = b"".join(keys)
    return (
        b"/" not in joined and b"\0" not in joined and len(min(keys, key=len, default=b"...")) > 2
    )


def check_new_key(key: bytes) -> None:
    """Raise OSError if a key cannot name a new object."""
    check_key(key)
    if key.startswith(OWN_PREFIX):
        raise OSError(errno.EINVAL, "names that start with .hicachectl are reserved for hicachectl")


def storable_ns(time_ns: int) -> int:
    """Limit a file's time to 64 bits, because a file system can hold times after the year 2262."""
    return min(max(time_ns, _EARLIEST_NS), _LATEST_NS)


def version_of(st: os.stat_result) -> bytes:
    """Return bytes that change when a writer replaces or changes the file."""
    return VERSION.pack(*version_fields(st))


def version_fields(st: os.stat_result) -> tuple[int, int, int, int]:
    """Return the fields of `VERSION` for a file."""
    times = storable_ns(st.st_mtime_ns), storable_ns(st.st_ctime_ns)
    return st.st_ino, *times, st.st_size
