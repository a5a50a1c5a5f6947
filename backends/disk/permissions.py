"""Who may read what: so that no file is made more readable than what it was made from."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

NOBODY = -1
_LIST = 0o5  # what a user needs of a directory to find and to open its files


@dataclass(frozen=True, slots=True)
class Permissions:
    """Permission bits, and the group that those of the group are for.

    group None: no group in particular. owner: who may read beside them, None where everyone may,
    NOBODY where the sources have several owners. The bits of the owner are not restricted.
    """

    bits: int = 0o777
    group: int | None = None
    owner: int | None = None

    @classmethod
    def of_file(cls, facts: os.stat_result) -> Permissions:
        """Who may read a file, by what the system says of it."""
        bits = facts.st_mode & 0o777 | 0o700
        bits |= (bits & 0o444) >> 2  # as a directory would have them
        return cls(bits, facts.st_gid, None if bits & 0o004 else facts.st_uid)

    @classmethod
    def within(cls, directory: os.stat_result) -> Permissions:
        """Who may read the files of a directory, as far as the directory decides."""
        bits = 0o700
        for shift in (3, 0):
            if directory.st_mode >> shift & _LIST == _LIST:
                bits |= 0o7 << shift
        return cls(bits, directory.st_gid, None if bits & 0o004 else directory.st_uid)

    def may_own(self, user: int) -> bool:
        """Say whether a file of these permissions can be given to a user."""
        return self.owner in (None, user)

    def for_group(self, group: int) -> int:
        """Return the bits for a file of a group; another group gets no more than everyone."""
        return self.bits if group == self.group else with_foreign_group(self.bits)

    def both(self, other: Permissions) -> Permissions:
        """Who has both permissions."""
        owner = self.owner if other.owner in (None, self.owner) else other.owner
        if None not in (self.owner, other.owner) and self.owner != other.owner:
            owner = NOBODY
        if self.group == other.group:
            return Permissions(self.bits & other.bits, self.group, owner)
        mine, theirs = with_foreign_group(self.bits), with_foreign_group(other.bits)
        if mine == self.bits:  # the group has nothing of its own
            return Permissions(mine & other.bits, other.group, owner)
        if theirs == other.bits:
            return Permissions(self.bits & theirs, self.group, owner)
        return Permissions(mine & theirs, None, owner)


def with_foreign_group(mode: int) -> int:
    """Return the permissions of a copy whose group is not the source's.

    What the source gave to its group alone is not for the members of another one.
    """
    return stat.S_IMODE(mode) & (~0o070 | (mode & 0o007) << 3)


def give_file(descriptor: int, owner: int, group: int, *, mode: int | None = None) -> None:
    """Give an open file to a user and a group, as far as the system lets us.

    mode: what its permissions become; else they stay. Where the group cannot be changed, it gets
    no more than everyone. Raises OSError.
    """
    facts = os.fstat(descriptor)
    if (facts.st_uid, facts.st_gid) != (owner, group):
        try:
            os.fchown(descriptor, owner if not os.geteuid() else -1, group)
        except OSError:
            if facts.st_gid != group:
                mode = with_foreign_group(facts.st_mode if mode is None else mode)
    if mode is not None:
        os.fchmod(descriptor, stat.S_IMODE(mode) & 0o777)


def as_umask_says(permissions: Permissions, group: int) -> int:
    """Return the mode of a new file of a group, as open(2) would make it."""
    return 0o666 & permissions.for_group(group) & ~_umask()


def _umask() -> int:
    # os.umask can only ask by changing it, for all threads.
    with suppress(OSError):
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        for line in status.splitlines():
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    current = os.umask(0o077)
    os.umask(current)
    return current
