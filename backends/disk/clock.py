"""The clock of a file system, which for network file systems is the file server's."""

from __future__ import annotations

import os

from hicachectl.backends.disk.durable import CREATE_FILE, NO_ROOM
from hicachectl.backends.disk.files import OWN_PREFIX


def file_system_ns(directory: int, name: bytes = b"") -> int:
    """Return the present time of an open directory's file system, Unix nanoseconds.

    Times of files are compared with it: this host's clock may differ from the file server's. The
    time is the ctime of a new empty file, which is removed at once; on a full file system, the
    ctime of the directory, whose mtime is set.
    name: temporary name of the file; default: random. Raises OSError.
    """
    name = name or b"%s-%s.tmp" % (OWN_PREFIX, os.urandom(16).hex().encode())
    try:
        descriptor = os.open(name, CREATE_FILE, 0o600, dir_fd=directory)
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        os.utime(directory)
        return os.fstat(directory).st_ctime_ns
    try:
        return os.fstat(descriptor).st_ctime_ns
    finally:
        os.close(descriptor)
        os.unlink(name, dir_fd=directory)
