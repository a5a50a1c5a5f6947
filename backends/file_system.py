"""What a directory of objects asks of the system, and `os` does not have as it is needed.

Names are bytes: those of files need not be text.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from contextlib import suppress

OWN_PREFIX = b".hicachectl"
# The file system has no such call, or not for this.
UNSUPPORTED = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM})
# The file system itself is gone: no answer about one file means anything.
LOST = frozenset({errno.ESTALE, errno.ENOTCONN, errno.ESHUTDOWN, errno.ENODEV, errno.EHOSTDOWN})
VERSION = struct.Struct("<QqqQ")  # inode, mtime and ctime in ns, size
_RENAME_NOREPLACE = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


def is_file_name(key: bytes) -> bool:
    """Whether `check_key` has nothing against a key."""
    try:
        check_key(key)
    except OSError:
        return False
    return True


def check_key(key: bytes) -> None:
    """Raise OSError for bytes that are no name of a file in this very directory."""
    if b"/" in key or b"\0" in key or key in (b"", b".", b".."):
        raise OSError(errno.EINVAL, "the key cannot be a file name")


def are_plain(keys: list[bytes]) -> bool:
    """Tell at once, of many keys, that `check_key` has nothing against any."""
    joined = b"".join(keys)
    return (
        b"/" not in joined and b"\0" not in joined and len(min(keys, key=len, default=b"...")) > 2
    )


def check_new_key(key: bytes) -> None:
    """Raise OSError for bytes that are no name for an object."""
    check_key(key)
    if key.startswith(OWN_PREFIX):
        raise OSError(errno.EINVAL, "names in .hicachectl are kept for this tool's own files")


def version_of(facts: os.stat_result) -> bytes:
    """Tell a file from what another writer may put in its place."""
    return VERSION.pack(facts.st_ino, facts.st_mtime_ns, facts.st_ctime_ns, facts.st_size)


def rename_noreplace(source: int, old: bytes, target: int, new: bytes) -> bool:
    """Rename unless `new` is there (FileExistsError); False where the system cannot."""
    if not hasattr(_LIBC, "renameat2"):
        return False
    if not _LIBC.renameat2(source, old, target, new, _RENAME_NOREPLACE):
        return True
    number = ctypes.get_errno()
    if number in UNSUPPORTED:
        return False
    raise OSError(number, os.strerror(number))


def sync_file_system(directory: int) -> bool:
    """Make all files of a directory's file system durable; False where there is no such call."""
    if not hasattr(_LIBC, "syncfs"):
        return False
    if not _LIBC.syncfs(directory):
        return True
    number = ctypes.get_errno()
    if number == errno.ENOSYS:  # some sandboxes have no such call
        return False
    raise OSError(number, os.strerror(number))


def sync_directory(directory: int) -> None:
    """Make the names in a directory durable, where the file system needs to be told."""
    try:
        os.fsync(directory)
    except OSError as error:
        if error.errno not in UNSUPPORTED:  # some network file systems need none
            raise


def sync_names(path: str | os.PathLike[str]) -> None:
    """Make the names in the directory at a path durable. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sync_directory(descriptor)
    finally:
        os.close(descriptor)


def make_directories(path: str | os.PathLike[str]) -> list[str]:
    """Make a directory and its missing parents, durably; return those made, innermost first.

    Raises OSError. Directories that another process makes meanwhile are not returned.
    """
    missing = []
    here = os.path.abspath(path)  # noqa: PTH100 - keeps names that are not UTF-8
    while not os.path.lexists(here):
        missing.append(here)
        here = os.path.dirname(here)  # noqa: PTH120
    made: list[str] = []
    for directory in reversed(missing):
        with suppress(FileExistsError):
            os.mkdir(directory)  # noqa: PTH102
            made.insert(0, directory)
        sync_names(os.path.dirname(directory))  # noqa: PTH120
    return made


def read_ahead(descriptor: int, nbytes: int) -> None:
    """Begin to read a file, unless its last page is in memory: then all is, as a rule.

    The question costs 1 us; the advice alone, on 4.5 MB that are in memory, 60 us.
    """
    try:
        os.preadv(descriptor, (bytearray(1),), max(0, nbytes - 1), os.RWF_NOWAIT)
    except OSError as error:
        if error.errno not in {errno.EAGAIN, *UNSUPPORTED}:
            raise
        os.posix_fadvise(descriptor, 0, nbytes, os.POSIX_FADV_WILLNEED)
