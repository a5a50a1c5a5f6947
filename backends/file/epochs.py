"""Epochs: `clear` makes all objects of a suffix misses at once, without removing them.

The epoch of a suffix is the ctime of a file in `.hicachectl/`. Objects whose ctime is not later are
stale. A rename sets the ctime, so it is the time at which an object got its name; both times are
from the file system's clock. Mtimes are no measure: copies keep them.
"""

from __future__ import annotations

import os
from contextlib import suppress
from hashlib import blake2b
from typing import TYPE_CHECKING

from hicachectl.backends.disk.directory import Directory, Trust
from hicachectl.backends.disk.files import OWN_PREFIX

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hicachectl.backends.file.folders import ObjectDirectory

_OPEN_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_OPEN_SIDE = _OPEN_FILE | os.O_DIRECTORY


def owner_of(suffix: bytes) -> bytes:
    """Return the 16 hex digits that name a suffix in `.hicachectl/` and in temporary names."""
    return blake2b(suffix, digest_size=8).hexdigest().encode()


def open_side(directory: ObjectDirectory) -> Directory:
    """Open `.hicachectl` of a directory; create it if missing. Raises OSError, UntrustedError."""
    trust = Trust(os.fstat(directory.descriptor), writes=True)
    with Directory(os.dup(directory.descriptor), directory.path, trust) as here:
        return here.make_directory(os.fsdecode(OWN_PREFIX), exist_ok=True)


def begin_epoch(directory: ObjectDirectory, suffixes: Iterable[bytes]) -> None:
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


class EpochReader:
    """The epoch of one suffix, as it was when `look` was last called.

    ctime_ns: 0 if there is no epoch.
    """

    def __init__(self, directory: ObjectDirectory, suffix: bytes) -> None:
        self.ctime_ns = 0
        self._directory = directory
        self._name = _name(suffix)

    def look(self) -> int:
        """Read and return `ctime_ns`; an unreadable epoch leaves it.

        Call it once per call of SGLang. Opening the file shows what other hosts did (NFS).
        """
        try:
            side = os.open(OWN_PREFIX, _OPEN_SIDE, dir_fd=self._directory.descriptor)
            try:
                descriptor = os.open(self._name, _OPEN_FILE, dir_fd=side)
            finally:
                os.close(side)
            try:
                self.ctime_ns = os.fstat(descriptor).st_ctime_ns
            finally:
                os.close(descriptor)
        except FileNotFoundError:
            self.ctime_ns = 0
        except OSError:
            pass
        return self.ctime_ns

    def stale(self, facts: os.stat_result) -> bool:
        """Return whether an object got its name before the epoch, or at its very moment."""
        return facts.st_ctime_ns <= self.ctime_ns


def _name(suffix: bytes) -> bytes:
    return b"epoch-" + owner_of(suffix)
