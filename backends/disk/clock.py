"""The clock of a file system, which for network file systems is the file server's."""

from __future__ import annotations

import os


def file_system_ns(directory: int) -> int:
    """Return the present time of an open directory's file system, Unix nanoseconds.

    Times of files are compared with it: this host's clock may differ from the file server's. The
    directory is touched, and its ctime is the time. No file is made that a kill could leave, or for
    which a full file system has no room. Raises OSError without the right to write.
    """
    os.utime(directory)  # "now", which NFS clients leave to the server
    return os.fstat(directory).st_ctime_ns
