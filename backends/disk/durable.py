"""Durable names, atomically written files, and locks.

Two writers do not use `new_file`, because it would be slow. `FileStore` syncs each batch of files
with one syncfs. A pack grows in place, with one fdatasync for each batch.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import secrets
import stat
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

from hicachectl.backends.disk.io import (
    CREATE_FILE,
    LIBC,
    OPEN_DIRECTORY,
    UNSUPPORTED,
    closing_descriptor,
)
from hicachectl.backends.disk.permissions import Permissions, new_file_mode
from hicachectl.formats.errors import UsageError
from hicachectl.formats.wording import failed

if TYPE_CHECKING:
    from collections.abc import Iterator

STDOUT = Path("/dev/stdout")
# NFS locks only files that are open for writing. A directory cannot be open for writing, so flock
# of a directory fails with EBADF.
_NO_LOCKS = UNSUPPORTED | {errno.ENOLCK, errno.EBADF, errno.EISDIR}
_RENAME_NOREPLACE = 1
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100  # fcntl.h; names start at the current directory, as in open(2)


# names


def sync_directory(directory: int) -> None:
    """Make the entries of an open directory durable. Raises OSError."""
    try:
        os.fsync(directory)
    except OSError as error:
        if error.errno not in UNSUPPORTED:  # some network file systems need no such sync
            raise


def sync_name(path: str | os.PathLike[str], directory: int | None = None) -> None:
    """Make one name durable by syncing its directory. Raises OSError."""
    parent = os.path.dirname(path) or "."  # noqa: PTH120 - keeps names that are not UTF-8
    with closing_descriptor(os.open(parent, OPEN_DIRECTORY, dir_fd=directory)) as descriptor:
        sync_directory(descriptor)


def sync_file_system(directory: int) -> bool:
    """Make all files of a directory's file system durable. Return False if syncfs is missing."""
    if not hasattr(LIBC, "syncfs"):
        return False
    if not LIBC.syncfs(directory):
        return True
    number = ctypes.get_errno()
    if number == errno.ENOSYS:  # some sandboxes refuse the call
        return False
    raise OSError(number, os.strerror(number))


def make_directories(path: str | os.PathLike[str]) -> list[str]:
    """Create a directory and its missing parents durably. Return the new paths, innermost first.

    Directories that another process creates meanwhile are not returned. Raises OSError.
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
        sync_name(directory)
    return made


def rename_noreplace(source: int | None, old: bytes, target: int | None, new: bytes) -> bool:
    """Rename a file, but replace none. Return False if the system lacks a call for this.

    source, target: descriptors of directories; None if the name is a path.
    Raises OSError, and FileExistsError if `new` exists.
    """
    source = _AT_FDCWD if source is None else source
    target = _AT_FDCWD if target is None else target
    return _rename(source, old, target, new, _RENAME_NOREPLACE)


def exchange(directory: int, one: bytes, other: bytes) -> bool:
    """Swap the names of two files of a directory. Return False if the system cannot do so.

    The swap is atomic, so each name always names a file. Raises OSError, and FileNotFoundError if a
    name is missing.
    """
    return _rename(directory, one, directory, other, _RENAME_EXCHANGE)


def _rename(source: int, old: bytes, target: int, new: bytes, flags: int) -> bool:
    """Call renameat2. Return False if the system or file system lacks the call. Raises OSError."""
    if not hasattr(LIBC, "renameat2"):
        return False
    if not LIBC.renameat2(source, old, target, new, flags):
        return True
    number = ctypes.get_errno()
    if number in UNSUPPORTED:
        return False
    raise OSError(number, os.strerror(number))


def move_noreplace(source: int | None, old: bytes, target: int | None, new: bytes) -> None:
    """Rename a file by `rename_noreplace`. If the system lacks the call, link and unlink the file.

    A crash between link and unlink leaves both names.
    """
    if not rename_noreplace(source, old, target, new):
        os.link(old, new, src_dir_fd=source, dst_dir_fd=target, follow_symlinks=False)
        os.unlink(old, dir_fd=source)


# files


def temporary_name() -> str:
    """Return a name of a temporary file that no other process uses."""
    return f".hicachectl-{os.getpid()}-{secrets.token_hex(8)}.tmp"


@contextmanager
def new_file(
    path: str,
    mode: int,
    *,
    partial: str = "",
    directory: int | None = None,
    replaces: bool = True,
    durable: bool = True,
) -> Iterator[int]:
    """Yield a new file's descriptor. The file gets its name when the block ends normally.

    mode:      permissions while the file is written, less the umask.
    partial:   temporary name in the same directory; by default a random name.
    directory: descriptor of the directory from which `path` starts.
    replaces:  replace an existing file. Otherwise an existing file raises FileExistsError.
    durable:   sync the bytes before the rename, and the name after it.
    Raises OSError.
    """
    # The temporary name is not derived from the file's name, which may have the maximum length.
    partial = partial or temporary_name()
    partial = os.path.join(os.path.dirname(path), partial)  # noqa: PTH118, PTH120
    descriptor = os.open(partial, CREATE_FILE, mode, dir_fd=directory)
    try:
        with closing_descriptor(descriptor):
            yield descriptor
            if durable:
                os.fsync(descriptor)
        if replaces:
            os.rename(partial, path, src_dir_fd=directory, dst_dir_fd=directory)
        else:
            move_noreplace(directory, os.fsencode(partial), directory, os.fsencode(path))
    except BaseException:
        with suppress(OSError):  # report the first error, not an error of this call
            os.unlink(partial, dir_fd=directory)
        raise
    if durable:
        sync_name(path, directory)


@contextmanager
def whole_file(
    path: Path,
    mode: Literal["wb", "w"] = "wb",
    *,
    durable: bool = False,
    permissions: int | None = None,
    readable_by: Permissions | None = None,
) -> Iterator[IO[Any]]:
    """Yield a stream whose content replaces `path` when the block ends normally.

    Symbolic links are followed. Devices, pipes and `STDOUT` are written directly.
    mode: "w" writes UTF-8.
    durable: see `new_file`.
    permissions: mode of the file; by default the mode of the replaced file, or 0o666 less the
        umask.
    readable_by: limit for the permissions of a file that replaces no other file.
    Raises UsageError if the file cannot be written, BrokenPipeError for a closed pipe.
    """
    encoding = None if "b" in mode else "utf-8"
    try:
        # Other programs may append (`>>`) to the file that is standard output, so it must stay.
        if path == STDOUT:
            with open(1, mode, encoding=encoding, closefd=False) as stream:
                yield stream
            return
        found = _stat_of(path)
        if found is not None and not stat.S_ISREG(found.st_mode):
            with path.open(mode, encoding=encoding) as stream:
                yield stream
            return
        if permissions is None and found is not None:
            permissions = stat.S_IMODE(found.st_mode)
        if permissions is None and readable_by is not None:
            permissions = new_file_mode(readable_by, os.getegid())
        at_first = 0o666 if permissions is None else permissions & 0o666
        with new_file(os.path.realpath(path), at_first, durable=durable) as descriptor:
            with open(descriptor, mode, encoding=encoding, closefd=False) as stream:
                yield stream
            if permissions is not None:
                os.fchmod(descriptor, permissions)
    except BrokenPipeError:
        raise
    except OSError as error:
        next_step = "check its directory, permissions and free space"
        raise UsageError(failed(path, "write", error, next_step)) from error


def _stat_of(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except FileNotFoundError:
        return None


# locks


def lock(descriptor: int, *, optional: bool = False) -> bool:
    """Lock an open file (flock) until it is closed. Return False if another process has the lock.

    optional: return True, without a lock, if the file system has no locks.
    Raises OSError.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if not optional or error.errno not in _NO_LOCKS:
            raise
    return True


def is_named(
    descriptor: int, path: str, directory: int | None = None, *, follow: bool = False
) -> bool:
    """Return whether a path still names an open file.

    Call this after `lock`, because the file can be replaced before it is locked.
    follow: whether to follow a link that the path names.
    """
    try:
        st = os.stat(path, dir_fd=directory, follow_symlinks=follow)
    except FileNotFoundError:
        return False
    found = _open_stat(descriptor)
    return found is not None and os.path.samestat(st, found)


def is_linked(descriptor: int) -> bool:
    """Return whether an open file has a name. Raises OSError."""
    found = _open_stat(descriptor)
    return found is not None and found.st_nlink > 0


def _open_stat(descriptor: int) -> os.stat_result | None:
    """Return the stat of an open file; None if another host removed the file from NFS."""
    try:
        return os.fstat(descriptor)
    except OSError as error:
        if error.errno != errno.ESTALE:
            raise
        return None
