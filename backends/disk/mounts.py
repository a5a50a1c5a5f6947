"""Facts about file systems: whether flock on a mount excludes other hosts, and the time."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

# Their locks may stay on one host, whatever flock returns: fuse unless the program implements
# them, beegfs unless tuneUseGlobalFileLocks is set, gpfs and 9p by version.
_LOCAL_LOCKS = ("9p", "beegfs", "fuse", "gpfs", "virtiofs")
_LOCAL_LOCK_OPTIONS = {
    "nfs": {"nolock", "local_lock=all", "local_lock=flock"},
    "nfs4": {"nolock", "local_lock=all", "local_lock=flock"},
    "lustre": {"localflock"},
    "cifs": {"nobrl"},
    "smb3": {"nobrl"},
}


def locks_reach_all_hosts(descriptor: int) -> bool:
    """Return whether flock excludes every process that can reach a directory.

    descriptor: the open directory. A local disk has no other hosts. An unknown mount is taken to
    lock, so a failing flock still decides.
    """
    mount = _mount_of(descriptor)
    return mount is None or lock_reach(*mount)


def is_on_fuse(descriptor: int) -> bool:
    """Return whether a program serves the file system of an open file."""
    mount = _mount_of(descriptor)
    return mount is not None and mount[0].startswith("fuse")


def lock_reach(kind: str, options: str) -> bool:
    """Return whether flock reaches all hosts, by a mount's type and file system options."""
    if kind.partition(".")[0] in _LOCAL_LOCKS:  # fuse.NAME; but fuseblk is a local disk
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


def file_system_ns(directory: int) -> int:
    """Return the present time of an open directory's file system, Unix nanoseconds.

    Times of files are compared with it: this host's clock may differ from the file server's. The
    directory is touched, and its ctime is the time. No file is made that a kill could leave, or for
    which a full file system has no room. Raises OSError without the right to write.
    """
    os.utime(directory)  # "now", which NFS clients leave to the server
    return os.fstat(directory).st_ctime_ns
