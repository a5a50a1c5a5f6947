"""Permissions that keep new files no more readable than their sources."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

NOBODY = -1
_LIST = 0o5  # rights on a directory that suffice to list and open its files


@dataclass(frozen=True, slots=True)
class Permissions:
    """Permission bits, with the group that the group bits apply to.

    bits: permission bits; the owner always has 0o700.
    group: group of the sources; None if the sources have several groups.
    owner: the only user who may own a copy. None means any user; NOBODY means that the sources
        have several owners.
    """

    bits: int = 0o777
    group: int | None = None
    owner: int | None = None

    @classmethod
    def of_file(cls, st: os.stat_result) -> Permissions:
        """Return the permissions of a file."""
        bits = st.st_mode & 0o777 | 0o700
        bits |= (bits & 0o444) >> 2  # directories made with these bits need x wherever they have r
        return cls(bits, st.st_gid, None if bits & 0o004 else st.st_uid)

    @classmethod
    def within(cls, directory: os.stat_result) -> Permissions:
        """Return the permissions that a directory allows for its files."""
        bits = 0o700
        for shift in (3, 0):
            if directory.st_mode >> shift & _LIST == _LIST:
                bits |= 0o7 << shift
        return cls(bits, directory.st_gid, None if bits & 0o004 else directory.st_uid)

    def may_own(self, user: int) -> bool:
        """Return whether a user may own a file with these permissions."""
        return self.owner in (None, user)

    def for_group(self, group: int) -> int:
        """Return the bits for a file of a group.

        A group other than `self.group` gets only the rights of other users.
        """
        return self.bits if group == self.group else with_foreign_group(self.bits)

    def intersection(self, other: Permissions) -> Permissions:
        """Return the permissions that both this object and `other` grant."""
        owner = self.owner if other.owner in (None, self.owner) else other.owner
        if None not in (self.owner, other.owner) and self.owner != other.owner:
            owner = NOBODY
        if self.group == other.group:
            return Permissions(self.bits & other.bits, self.group, owner)
        mine, theirs = with_foreign_group(self.bits), with_foreign_group(other.bits)
        if mine == self.bits:  # the group has no more rights than other users
            return Permissions(mine & other.bits, other.group, owner)
        if theirs == other.bits:
            return Permissions(self.bits & theirs, self.group, owner)
        return Permissions(mine & theirs, None, owner)


def with_foreign_group(mode: int) -> int:
    """Return the mode of a copy in another group, without the source group's rights."""
    return stat.S_IMODE(mode) & (~0o070 | (mode & 0o007) << 3)


def give_file(descriptor: int, owner: int, group: int, *, mode: int | None = None) -> None:
    """Set an open file's group and, as root, its owner, as far as the system allows.

    mode: new permissions; by default unchanged. If the group cannot be set, the file's group gets
        only the rights of other users.
    Raises OSError.
    """
    st = os.fstat(descriptor)
    if (st.st_uid, st.st_gid) != (owner, group):
        try:
            os.fchown(descriptor, owner if not os.geteuid() else -1, group)
        except OSError:
            if st.st_gid != group:
                mode = with_foreign_group(st.st_mode if mode is None else mode)
    if mode is not None:
        os.fchmod(descriptor, stat.S_IMODE(mode) & 0o777)


def new_file_mode(permissions: Permissions, group: int) -> int:
    """Return the mode of a new file of a group, which is 0o666 within permissions and umask."""
    return 0o666 & permissions.for_group(group) & ~_umask()


def _umask() -> int:
    # os.umask tells the umask only by changing it for all threads, so /proc is read first.
    with suppress(OSError):
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        for line in status.splitlines():
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    current = os.umask(0o077)
    os.umask(current)
    return current
