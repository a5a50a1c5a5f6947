"""Directories used through their descriptors, without following links.

An option (STORE, --quarantine, the parent of --lock) may name a directory through links. Every
entry below this directory is opened relative to its parent, without following links or waiting for
a FIFO.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Self

from hicachectl.backends.disk.durable import (
    is_named,
    new_file,
    sync_directory,
    temporary_name,
)
from hicachectl.backends.disk.durable import lock as lock_file
from hicachectl.backends.disk.io import (
    CREATE_FILE,
    OPEN_DIRECTORY,
    OPEN_FILE,
    UNSUPPORTED,
    Closing,
    closing_descriptor,
    entries_of,
    read_up_to,
    undo_on_error,
    write_bytes,
)
from hicachectl.backends.disk.names import OWN_PREFIX
from hicachectl.backends.disk.permissions import Permissions, give_file
from hicachectl.formats.errors import UnsupportedByBackend, UntrustedError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_OPEN_ENTRY = OPEN_DIRECTORY | os.O_NOFOLLOW
_OPEN_FILE = OPEN_FILE | os.O_NOCTTY
_CREATE_FILE = CREATE_FILE & ~os.O_WRONLY | os.O_RDWR
_NO_LINKS = UNSUPPORTED | {errno.EXDEV, errno.EMLINK}
_ROOT = 0
_KINDS = {
    stat.S_IFLNK: "a symbolic link, and links are not followed here",
    stat.S_IFIFO: "a FIFO, not a regular file or directory",
    stat.S_IFSOCK: "a socket, not a regular file or directory",
    stat.S_IFCHR: "a device, not a regular file or directory",
    stat.S_IFBLK: "a device, not a regular file or directory",
    stat.S_IFDIR: "a directory, not a regular file",
    stat.S_IFREG: "a regular file, not a directory",
}


class Trust:
    """Users who may own trusted files below a directory.

    They are this process's user, root, the directory's owner and, if its group may write, the
    group's members. Some file systems (NFS with root squash) give new files another owner. A
    process that may write to the directory creates a file there to learn this owner.
    """

    def __init__(self, st: os.stat_result | None, *, writes: bool) -> None:
        """Derive the users from the stat of a directory.

        st: stat of the directory; None if there is no directory.
        writes: whether this process may create a file in the directory.
        """
        self._may_probe = writes
        self._owners = {_ROOT, os.geteuid()}
        if st is None:
            self.permissions, self._group, self._group_shows = Permissions(), None, False
            return
        self.permissions = Permissions.within(st)
        self._owners.add(st.st_uid)
        self._group = st.st_gid if st.st_mode & stat.S_IWGRP else None
        # If everyone may write to a set-group-ID directory, the group of a file proves nothing.
        self._group_shows = not st.st_mode & stat.S_IWOTH

    def includes(self, st: os.stat_result, directory: int) -> bool:
        """Return whether a file's owner is trusted.

        st: stat of the file.
        directory: descriptor of the directory with the file.
        """
        if st.st_uid in self._owners or self._is_of_group(st):
            return True
        if self._may_probe:
            self._may_probe = False
            self._owners.update(_owner_of_new_files(directory))
        return st.st_uid in self._owners

    def _is_of_group(self, st: os.stat_result) -> bool:
        if self._group is None:
            return False
        if self._group_shows and st.st_gid == self._group:
            return True
        import pwd

        try:
            user = pwd.getpwuid(st.st_uid)
            return self._group in os.getgrouplist(user.pw_name, user.pw_gid)
        except (KeyError, OSError):
            return False


class JointTrust(Trust):
    """Users whom the `Trust` of each given directory includes.

    Without a directory, they are this process's user and root.
    """

    def __init__(self, trusts: Sequence[Trust], *, writes: bool = True) -> None:
        """Join the trusts of several directories. writes: see `Trust`."""
        super().__init__(None, writes=writes)
        self._trusts = trusts

    def includes(self, st: os.stat_result, directory: int) -> bool:
        """See `Trust`."""
        if not self._trusts:
            return super().includes(st, directory)
        return all(trust.includes(st, directory) for trust in self._trusts)


def _stranger(path: str, st: os.stat_result, next_step: str) -> str:
    return (
        f"{path}: belongs to user {st.st_uid}, but only user {os.geteuid()}, root, and the "
        f"store's owner and group are trusted; check its content, then chown it or {next_step}"
    )


def _owner_of_new_files(directory: int) -> set[int]:
    name = b"%s-%s.tmp" % (OWN_PREFIX, os.urandom(16).hex().encode())
    try:
        descriptor = os.open(name, CREATE_FILE, 0o600, dir_fd=directory)
    except OSError:
        return set()
    try:
        return {os.fstat(descriptor).st_uid}
    finally:
        os.close(descriptor)
        os.unlink(name, dir_fd=directory)


def existing_part(path: Path) -> tuple[Path, list[str]]:
    """Return the deepest existing directory of a path, and the missing names below it."""
    found, missing = path.absolute(), list[str]()
    while not found.is_dir() and found != found.parent:
        missing.insert(0, found.name)
        found = found.parent
    return found, missing


class Directory(Closing):
    """An open directory.

    path: path in messages; calls use the descriptor.
    All methods raise OSError. They raise UntrustedError if an entry has an untrusted owner, is not
    of the requested kind, or is neither a regular file nor a directory.
    """

    def __init__(self, descriptor: int, path: str, trust: Trust) -> None:
        """Take over a directory's descriptor, which `close` closes."""
        self.descriptor = descriptor
        self.path = path
        self.trust = trust
        self._stat = os.fstat(descriptor)

    @classmethod
    def named(cls, path: str, *, writes: bool, trust: Trust | None = None) -> Self:
        """Open a directory that an option names, following links.

        writes: see `Trust`.
        trust: `Trust` of the store. By default, it is derived from the directory.
        """
        descriptor = os.open(path, OPEN_DIRECTORY)
        return cls(descriptor, path, trust or Trust(os.fstat(descriptor), writes=writes))

    @classmethod
    def again(cls, descriptor: int, path: str, *, writes: bool) -> Self:
        """Duplicate a directory's descriptor. Trust is derived from the directory."""
        return cls(os.dup(descriptor), path, Trust(os.fstat(descriptor), writes=writes))

    @classmethod
    def at(
        cls, path: Path, *, writes: bool, makes: bool, trust: Trust | None = None
    ) -> Directory | None:
        """Open a directory that an option names; None if it is missing.

        makes: create a missing directory and its missing parents.
        trust: `Trust` of the store. By default, it is derived from the deepest existing directory
            of the path.
        Links are followed down to the deepest existing directory.
        """
        found, missing = existing_part(path)
        if missing and not makes:
            return None
        return cls.named(str(found), writes=writes, trust=trust).descend(missing, makes=makes)

    def descend(self, names: Sequence[str], *, makes: bool) -> Directory | None:
        """Close this directory, and open the directory to which `names` lead from it.

        names: names of the directories on the way, each inside the one before.
        makes: create missing directories. Otherwise return None if a directory is missing.
        """
        here: Directory | None = self
        for name in names:
            if here is None:
                return None
            with here:
                if makes:
                    here = here.make_directory(name, exist_ok=True)
                else:
                    here = here.directory(name) if here.has(name) else None
        return here

    def close(self) -> None:
        """Close the descriptor. This ends the lock that `lock` took."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    # reading

    def entries(self) -> dict[str, os.stat_result]:
        """Return the stat of each entry, sorted by name. The entries are not checked."""
        found = {}
        with entries_of(self.descriptor) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    found[entry.name] = entry.stat(follow_symlinks=False)
        return dict(sorted(found.items()))

    def check(self, name: str, st: os.stat_result, *, any_owner: bool = False) -> None:
        """Raise UntrustedError if the entry is not a trusted owner's regular file or directory."""
        if not (stat.S_ISREG(st.st_mode) or stat.S_ISDIR(st.st_mode)):
            raise self._refusal(name, st)
        if not (any_owner or self.trust.includes(st, self.descriptor)):
            next_step = f"move it out of {self.path}"
            raise UntrustedError(_stranger(self._spell(name), st, next_step))

    def check_owner(self, next_step: str) -> None:
        """Raise UntrustedError if the owner of the directory itself is not trusted.

        next_step: end of the message, after "chown it or".
        """
        if not self.trust.includes(self._stat, self.descriptor):
            raise UntrustedError(_stranger(self.path, self._stat, next_step))

    def has(self, name: str) -> bool:
        """Return whether an entry exists."""
        try:
            os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    @property
    def mode(self) -> int:
        """Permission bits that the directory had when it was opened."""
        return stat.S_IMODE(self._stat.st_mode)

    def directory(self, name: str, *, any_owner: bool = False) -> Directory:
        """Open a sub-directory. any_owner: accept an owner who is not trusted."""
        descriptor = self._open(name, _OPEN_ENTRY)
        with undo_on_error(partial(os.close, descriptor)):
            self.check(name, os.fstat(descriptor), any_owner=any_owner)
            return Directory(descriptor, self._spell(name), self.trust)

    def read(self, name: str, most: int) -> bytes:
        """Read at most `most` bytes of a regular file."""
        with closing_descriptor(self.open_file(name)) as descriptor:
            return read_up_to(descriptor, most)

    def open_file(self, name: str) -> int:
        """Open a regular file for reading. Return its descriptor."""
        return self._checked_file(name, self._open(name, _OPEN_FILE))

    def _open(self, name: str, flags: int, mode: int = 0) -> int:
        try:
            return os.open(name, flags, mode, dir_fd=self.descriptor)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.ENXIO):
                st = os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)
                raise self._refusal(name, st) from error
            raise

    def _refusal(self, name: str, st: os.stat_result) -> UntrustedError:
        kind = _KINDS.get(stat.S_IFMT(st.st_mode), "not a regular file")
        return UntrustedError(f"{self._spell(name)}: is {kind}; move it out of {self.path}")

    def _spell(self, name: str) -> str:
        return os.path.join(self.path, name)  # noqa: PTH118 - names that are not UTF-8

    def open_lock(self, name: str) -> int:
        """Open or create a file for locking. Return its descriptor."""
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        try:
            # In a sticky directory the system may refuse O_CREAT for another user's file.
            descriptor = self._open(name, flags)
        except FileNotFoundError:
            descriptor = self._open(name, flags | os.O_CREAT, 0o666)
        return self._checked_file(name, descriptor)

    def _checked_file(self, name: str, descriptor: int) -> int:
        with undo_on_error(partial(os.close, descriptor)):
            st = os.fstat(descriptor)
            if not stat.S_ISREG(st.st_mode):
                raise self._refusal(name, st)
            self.check(name, st)
        return descriptor

    # writing

    def make_directory(self, name: str, *, exist_ok: bool = False) -> Directory:
        """Create a directory durably and open it.

        Its permissions exceed neither this directory's permissions nor `trust.permissions`. The
        group gets the rights that it has in this directory, whatever the umask. Members of the
        group need them to remove files that other members made.
        exist_ok: open an existing directory instead.
        """
        try:
            os.mkdir(name, self._readable & 0o777 | 0o700, dir_fd=self.descriptor)
        except FileExistsError:
            if not exist_ok:
                raise
            return self.directory(name)
        made = self.directory(name)
        self._give_away(made.descriptor)
        made._stat = st = os.fstat(made.descriptor)
        if st.st_gid == self._stat.st_gid and (lacks := self._readable & 0o070 & ~st.st_mode):
            os.fchmod(made.descriptor, stat.S_IMODE(st.st_mode) | lacks)
            made._stat = os.fstat(made.descriptor)
        self.sync()
        return made

    def write(
        self, name: str, content: bytes, *, shared: bool = False, durable: bool = True
    ) -> None:
        """Write a file atomically, with permissions limited as in `make_directory`.

        shared: several processes may write this file at once.
        durable: sync the file and its name.
        """
        # A fixed temporary name lets the next writer remove what a killed process left. A shared
        # file gets random names, because another process may be writing it.
        temporary = "" if shared else f".{name}.tmp"
        if temporary:  # a killed process may have left the temporary file
            with suppress(FileNotFoundError):
                self.remove(temporary)
        mode = self._readable & 0o666 | 0o600
        with new_file(
            name, mode, partial=temporary, directory=self.descriptor, durable=durable
        ) as descriptor:
            self._give_away(descriptor)
            write_bytes(memoryview(content), descriptor)

    def create(self, name: str) -> int:
        """Create a file with permissions as in `make_directory`. Return its descriptor."""
        descriptor = self._open(name, _CREATE_FILE, self._readable & 0o666 | 0o600)
        with undo_on_error(partial(os.close, descriptor)):
            self._give_away(descriptor)
        return descriptor

    def publish(self, name: str, content: bytes) -> bool:
        """Create a file, whole and durable, if its name is free. Return whether it was created.

        The method uses link(2), which never replaces a file, even if processes of several hosts
        publish the same name at once. Raises UnsupportedByBackend on a file system without links.
        """
        temporary = temporary_name()
        descriptor = self.create(temporary)
        try:
            write_bytes(memoryview(content), descriptor)
            os.fsync(descriptor)
            ours = self._link(temporary, name, descriptor)
            self.sync()
        finally:
            os.close(descriptor)
            with suppress(OSError):
                self.remove(temporary)
        return ours

    def _link(self, temporary: str, name: str, descriptor: int) -> bool:
        here = self.descriptor
        try:
            os.link(temporary, name, src_dir_fd=here, dst_dir_fd=here, follow_symlinks=False)
        except FileExistsError:
            # An NFS client may repeat a call whose answer was lost. Then the name is our own file.
            return is_named(descriptor, name, here)
        except OSError as error:
            if error.errno in _NO_LINKS:
                raise UnsupportedByBackend(
                    f"{self.path}: this file system has no hard links ({error.strerror}), which "
                    "several hosts need to publish files whole; use a directory on NFS, Lustre or "
                    "a local disk"
                ) from error
            raise
        return True

    @property
    def _readable(self) -> int:
        return self._stat.st_mode & self.trust.permissions.for_group(self._stat.st_gid)

    def _give_away(self, descriptor: int) -> None:
        """Give a new entry this directory's group and, as root, this directory's owner.

        The owner is not set if `trust.permissions` forbids it.
        """
        owner = self._stat.st_uid
        if not self.trust.permissions.may_own(owner):
            owner = os.fstat(descriptor).st_uid
        give_file(descriptor, owner, self._stat.st_gid)

    def rename(self, name: str, new: str) -> None:
        """Rename an entry within the directory. A file of the new name is replaced."""
        os.rename(name, new, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)

    def remove(self, name: str) -> None:
        """Unlink a file or a symbolic link."""
        os.unlink(name, dir_fd=self.descriptor)

    def remove_directory(self, name: str) -> None:
        """Remove an empty directory."""
        os.rmdir(name, dir_fd=self.descriptor)

    def sync(self) -> None:
        """Make the names in the directory durable."""
        sync_directory(self.descriptor)

    def is_still(self, name: str, parent: Directory) -> bool:
        """Return whether a name in the parent directory still names this directory."""
        return is_named(self.descriptor, name, parent.descriptor)

    def lock(self) -> bool:
        """Lock the directory until `close`. Return False if another process has the lock.

        On a file system without locks, the method returns True without a lock.
        """
        return lock_file(self.descriptor, optional=True)
