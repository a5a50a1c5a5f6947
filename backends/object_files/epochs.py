"""Epochs: `clear` makes all objects of a suffix misses at once, without removing them.

The epoch of a suffix is the ctime of a file in `.hicachectl/`. Objects whose ctime is not later are
stale. A rename sets the ctime, so it is the time at which an object got its name; both times are
from the file system's clock. Mtimes are no measure: copies keep them.

Stale objects are no objects of the store: the plug-in removes them after a while.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from hashlib import blake2b
from typing import TYPE_CHECKING

from hicachectl.backends.disk.directory import Directory, Trust
from hicachectl.backends.disk.files import OWN_PREFIX
from hicachectl.formats.errors import UntrustedError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hicachectl.backends.object_files.tree import ObjectTree

_OPEN_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_OPEN_SIDE = _OPEN_FILE | os.O_DIRECTORY
_PREFIX = b"epoch-"


def owner_of(suffix: bytes) -> bytes:
    """Return the 16 hex digits that name a suffix in `.hicachectl/` and in temporary names."""
    return blake2b(suffix, digest_size=8).hexdigest().encode()


def open_side(directory: ObjectTree) -> Directory:
    """Open `.hicachectl` of a directory; create it if missing. Raises OSError, UntrustedError."""
    trust = Trust(os.fstat(directory.descriptor), writes=True)
    with Directory(os.dup(directory.descriptor), directory.path, trust) as here:
        return here.make_directory(os.fsdecode(OWN_PREFIX), exist_ok=True)


def begin_epoch(directory: ObjectTree, suffixes: Iterable[bytes]) -> None:
    """Make all present objects of the suffixes stale. Raises OSError, UntrustedError."""
    with open_side(directory) as side:
        for suffix in suffixes:
            descriptor = side.open_lock(os.fsdecode(_name(suffix)))
            try:
                with suppress(OSError):  # the text is for people, and the disk may be full
                    os.pwrite(descriptor, suffix + b"\n", 0)
                os.utime(descriptor)  # sets the ctime
            finally:
                os.close(descriptor)


def read_epochs(directory: ObjectTree) -> dict[bytes, int]:
    """Return all epochs of a directory, Unix nanoseconds by `owner_of` their suffix.

    Empty if the side directory is missing, or not trusted. Raises OSError.
    """
    found: dict[bytes, int] = {}
    if not directory.side_files:
        return found
    with (
        suppress(FileNotFoundError, PermissionError, UntrustedError),
        directory.outer(writes=False) as here,
        here.directory(os.fsdecode(OWN_PREFIX)) as side,
    ):
        for name in map(os.fsencode, os.listdir(side.descriptor)):  # noqa: PTH208 - no path
            if name.startswith(_PREFIX):
                with suppress(FileNotFoundError):
                    found[name.removeprefix(_PREFIX)] = _known_ctime(name, side.descriptor)
    return found


def _known_ctime(name: bytes, side: int) -> int:
    """Return the ctime of an epoch's file, even an unreadable one; 0 if it is no regular file."""
    try:
        return _ctime(name, side)
    except OSError:
        facts = os.stat(name, dir_fd=side, follow_symlinks=False)
        return facts.st_ctime_ns if stat.S_ISREG(facts.st_mode) else 0


def _ctime(name: bytes, side: int) -> int:
    """Return the ctime of an epoch. Opening the file shows what other hosts did (NFS)."""
    descriptor = os.open(name, _OPEN_FILE, dir_fd=side)
    try:
        return os.fstat(descriptor).st_ctime_ns
    finally:
        os.close(descriptor)


class EpochReader:
    """The epoch of one suffix, as it was when `look` was last called.

    ctime_ns: 0 if there is no epoch.
    """

    def __init__(self, directory: ObjectTree, suffix: bytes) -> None:
        self.ctime_ns = 0
        self._directory = directory
        self._name = _name(suffix)

    def look(self) -> int:
        """Read and return `ctime_ns`; an unreadable epoch leaves it.

        Call it once per call of SGLang.
        """
        try:
            side = os.open(OWN_PREFIX, _OPEN_SIDE, dir_fd=self._directory.descriptor)
            try:
                self.ctime_ns = _ctime(self._name, side)
            finally:
                os.close(side)
        except FileNotFoundError:
            self.ctime_ns = 0
        except OSError:
            pass
        return self.ctime_ns

    def stale(self, facts: os.stat_result) -> bool:
        """Return whether an object got its name before the epoch, or at its very moment."""
        return facts.st_ctime_ns <= self.ctime_ns


def _name(suffix: bytes) -> bytes:
    return _PREFIX + owner_of(suffix)
