"""Read, write and copy whole open files, and ask for properties of their file systems."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import stat
import threading
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from hicachectl.formats.errors import DeniedError, StoreUnavailable
from hicachectl.formats.wording import failed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hicachectl.formats.errors import HicacheError

    Buffer = bytes | memoryview

LIBC = ctypes.CDLL(None, use_errno=True)
OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# With O_NONBLOCK, opening a FIFO does not wait for a writer.
OPEN_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
CREATE_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
# Errors of a call that a file system does not have, or refuses for some files.
UNSUPPORTED = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM})
# Errors of a process or host that has too many open files. Such an error says nothing about the
# file. If it became a finding, a repair would remove a healthy page.
TOO_MANY_OPEN = frozenset({errno.EMFILE, errno.ENFILE})
# After these errors, no answer about any file is valid, because the file system is unreachable or
# the process can open no further file.
LOST = TOO_MANY_OPEN | {
    errno.ESTALE,
    errno.ENOTCONN,
    errno.ESHUTDOWN,
    errno.ENODEV,
    errno.EHOSTDOWN,
}
# Errors that tell only that this user may not read the file.
DENIED = frozenset({errno.EACCES, errno.EPERM})
NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})
CHECK_MOUNT = "check that the file system is mounted"
OPEN_FEWER = "raise the limit of open files (ulimit -n), or give a smaller --jobs"
MAY_READ = "run as the server's user, or let your group read its files (umask 027)"
# Bytes for each call, which fit the processor's cache. Larger calls cost up to four times the
# processor time, because Linux (6.18, ext4) searches the page cache for large folios.
WRITE_BYTES = 256 << 10

# On these file systems, flock can succeed and still lock on one host only. On fuse, that happens if
# its program implements no locks; on beegfs, if tuneUseGlobalFileLocks is not set; on gpfs and 9p,
# with some versions.
_LOCAL_LOCKS = ("9p", "beegfs", "fuse", "gpfs", "virtiofs")
_LOCAL_LOCK_OPTIONS = {
    "nfs": {"nolock", "local_lock=all", "local_lock=flock"},
    "nfs4": {"nolock", "local_lock=all", "local_lock=flock"},
    "lustre": {"localflock"},
    "cifs": {"nobrl"},
    "smb3": {"nobrl"},
}
# Errors of copy_file_range where the system lacks it, or cannot copy between two file systems.
_NOT_BY_THE_SYSTEM = UNSUPPORTED | {errno.EXDEV}
# Writeback of files of at least this many bytes starts at once, to shorten the sync of the batch.
# For smaller files, the calls that start it cost more time than they save.
_EARLY_BYTES = 256 << 10
_READ_BYTES = 1 << 20


class Closing:
    """A context manager that closes itself at the end of its block."""

    def close(self) -> None:
        """Release all resources."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def closing_descriptor(descriptor: int) -> Iterator[int]:
    """Close a descriptor at the end of the block."""
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def undo_on_error(undo: Callable[[], object]) -> Iterator[None]:
    """Call `undo` if the block raises an exception or is interrupted."""
    try:
        yield
    except BaseException:
        undo()
        raise


@contextmanager
def errors_as(
    kind: type[HicacheError], place: object, action: str, next_step: str = ""
) -> Iterator[None]:
    """Raise `kind` for an OSError of the block. `wording.failed` takes the other arguments."""
    try:
        yield
    except OSError as error:
        raise kind(failed(place, action, error, next_step)) from error


_MOST_BUFFERS = 1024  # Linux's IOV_MAX
_SYNC_FILE_RANGE_WRITE = 2


def allow_descriptors(more: int) -> None:
    """Raise this process's limit of open files by `more`, as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = soft + more
    with suppress(OSError, ValueError):
        top = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, top), hard))


# file systems


def raise_lost(error: OSError, name: str, action: str, next_step: str = CHECK_MOUNT) -> None:
    """Raise StoreUnavailable for an error after which no answer about any file is valid (LOST)."""
    if error.errno in TOO_MANY_OPEN:
        next_step = OPEN_FEWER
    if error.errno in LOST:
        raise StoreUnavailable(failed(name, action, error, next_step)) from error


def raise_denied(error: OSError, name: str) -> None:
    """Raise DeniedError if an error says that this user may not read a file.

    Such a file is not damaged. If it became a finding, a repair would remove a healthy page.
    """
    if error.errno in DENIED:
        raise DeniedError(failed(name, "read", error, MAY_READ)) from error


def locks_reach_all_hosts(descriptor: int) -> bool:
    """Return whether flock excludes every process that can reach a directory.

    Returns True for a local disk, which no other host reaches. Returns True for an unknown mount,
    too, because flock itself fails on a mount without locks.
    descriptor: the open directory.
    """
    mount = _mount_of(descriptor)
    return mount is None or lock_reach(*mount)


def is_on_fuse(descriptor: int) -> bool:
    """Return whether a program serves the file system of an open file."""
    mount = _mount_of(descriptor)
    return mount is not None and mount[0].startswith("fuse")


def lock_reach(kind: str, options: str) -> bool:
    """Return whether flock reaches all hosts, by a mount's type and file system options."""
    # Types such as fuse.NAME count as fuse. The type fuseblk is a local disk, so it does not match.
    if kind.partition(".")[0] in _LOCAL_LOCKS:
        return False
    return _LOCAL_LOCK_OPTIONS.get(kind, set()).isdisjoint(options.split(","))


def _mount_of(descriptor: int) -> tuple[str, str] | None:
    """Return type and file system options of a descriptor's mount (proc(5), mountinfo)."""
    with suppress(OSError, ValueError, IndexError):
        opened = Path(f"/proc/self/fdinfo/{descriptor}").read_text(encoding="ascii")
        number = next(line.split()[1] for line in opened.splitlines() if line.startswith("mnt_id:"))
        mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace")
        for line in mounts.splitlines():
            fields, _, rest = line.partition(" - ")
            if fields.split()[0] == number:
                kind, _, options = rest.split(" ")[:3]
                return kind, options
    return None


def mount_point(path: str) -> str:
    """Return the directory on which the file system of a path is mounted."""
    here = os.path.realpath(path)
    while not os.path.ismount(here):
        here = os.path.dirname(here)  # noqa: PTH120 - keeps names that are not UTF-8
    return here


def file_system_ns(directory: int) -> int:
    """Return the present time of an open directory's file system, Unix nanoseconds.

    Callers compare the times of files with this time, because this host's clock may differ from the
    file server's clock.
    The call touches the directory and reads its ctime. It makes no file, because a kill would leave
    the file, and a full file system has no room for it. Raises OSError, also if this user may not
    write to the directory.
    """
    os.utime(directory)  # sets the times to "now"; an NFS client lets the server choose that time
    return os.fstat(directory).st_ctime_ns


# reading


def open_regular(path: str | os.PathLike[str], flags: int = os.O_RDONLY) -> int:
    """Open a regular file, through links, without waiting for the writer of a FIFO.

    Raises OSError, also for a file of another kind.
    """
    descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file")
    return descriptor


def fill(descriptor: int, buffers: Sequence[memoryview], offset: int = 0) -> int:
    """Read into buffers until they are full or the file ends. Return the number of bytes read.

    Raises OSError.
    """
    done, total = 0, sum(map(len, buffers))
    while done < total:
        left = _after(buffers, done) if done else buffers
        try:
            count = os.preadv(descriptor, left[:_MOST_BUFFERS], offset + done)
        except OSError as error:
            # O_DIRECT cannot go on within a block, so the file has ended there.
            if not done or error.errno != errno.EINVAL:
                raise
            break
        if not count:
            break
        done += count
    return done


def read_up_to(descriptor: int, most: int, offset: int = 0) -> bytes:
    """Return `most` bytes of a file, or fewer if the file ends. Raises OSError."""
    parts = []
    while most > 0 and (part := os.pread(descriptor, min(most, _READ_BYTES), offset)):
        parts.append(part)
        offset, most = offset + len(part), most - len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def chunks(descriptor: int, nbytes: int, offset: int = 0) -> Iterator[memoryview]:
    """Yield a file's bytes from an offset up to `nbytes`, in memory that the next chunk reuses.

    Raises OSError, and EOFError if the file is shorter.
    """
    buffer = _buffer()
    while offset < nbytes:
        count = os.preadv(descriptor, (buffer[: nbytes - offset],), offset)
        if not count:
            raise EOFError
        yield buffer[:count]
        offset += count


def is_in_memory(descriptor: int, position: int) -> bool:
    """Return whether a byte of a file is in the page cache; False if unknown. Raises OSError."""
    try:
        os.preadv(descriptor, (bytearray(1),), position, os.RWF_NOWAIT)
    except OSError as error:
        if error.errno not in {errno.EAGAIN, *UNSUPPORTED}:
            raise
        return False
    return True


def read_ahead(descriptor: int, nbytes: int) -> None:
    """Start to read a file if its last byte is not in memory.

    If its last byte is in memory, usually the whole file is. The test of one byte takes 1 us. The
    advice to the system takes 60 us for 4.5 MB already in memory.
    Raises OSError.
    """
    if not is_in_memory(descriptor, max(0, nbytes - 1)):
        os.posix_fadvise(descriptor, 0, nbytes, os.POSIX_FADV_WILLNEED)


@contextmanager
def entries_of(directory: int) -> Iterator[Iterator[os.DirEntry[str]]]:
    """Yield the entries of an open directory, beginning with the first. Raises OSError.

    The descriptor's own read position stays, so several scans may run at once.
    """
    with (
        closing_descriptor(os.open(".", OPEN_DIRECTORY, dir_fd=directory)) as own,
        os.scandir(own) as entries,
    ):
        yield entries


# writing


def write_all(descriptor: int, buffers: Sequence[Buffer], offset: int | None = None) -> int:
    """Write buffers one after another. Return the number of bytes written. Raises OSError.

    offset: offset in the file; by default the file's position.
    """
    done, total = 0, sum(map(len, buffers))
    while done < total:
        left = (_after(buffers, done) if done else buffers)[:_MOST_BUFFERS]
        if offset is None:
            done += os.writev(descriptor, left)
        else:
            done += os.pwritev(descriptor, left, offset + done)
    return done


def write_bytes(data: memoryview, target: int) -> None:
    """Write `data` to a new file, and start its writeback. Raises OSError."""
    for start in range(0, len(data), WRITE_BYTES):
        write_all(target, (data[start : start + WRITE_BYTES],))
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
    if done < nbytes:  # a generator for each small file would slow a migration
        for chunk in chunks(source, nbytes, done):
            done += write_all(target, (chunk,), done)
    _begin_to_store(target, nbytes)


def _begin_to_store(descriptor: int, nbytes: int) -> None:
    """Start the writeback of a file; a later sync reports its errors."""
    if nbytes >= _EARLY_BYTES and hasattr(LIBC, "sync_file_range"):
        whole = ctypes.c_int64(0), ctypes.c_int64(nbytes)
        LIBC.sync_file_range(descriptor, *whole, _SYNC_FILE_RANGE_WRITE)


def _after(buffers: Sequence[Any], skipped: int) -> list[Any]:
    """Return buffers without their first `skipped` bytes."""
    left = []
    for buffer in buffers:
        if skipped < len(buffer):
            left.append(buffer[skipped:])
        skipped = max(0, skipped - len(buffer))
    return left


_OWN = threading.local()


def _buffer() -> memoryview:
    """Return this thread's buffer. A new buffer for each file would cost more than the copy."""
    if not hasattr(_OWN, "buffer"):
        _OWN.buffer = memoryview(bytearray(WRITE_BYTES))
    buffer: memoryview = _OWN.buffer
    return buffer
