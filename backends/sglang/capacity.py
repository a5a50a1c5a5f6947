"""The room that one rank's objects may take in a directory.

The unit is what one rank owns of a page: its anchor and its sidecars go together. `max_size` bounds
all objects of the rank's suffixes, whichever process wrote them; each writer keeps
`min_free_space` free. A background thread evicts (`evictor`).
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from hicachectl.backends.disk.io import LIBC, locks_reach_all_hosts
from hicachectl.backends.object_files.epochs import EpochReader
from hicachectl.backends.sglang.evictor import Evictor
from hicachectl.backends.sglang.sweeping import kinds_of
from hicachectl.formats.errors import UsageError
from hicachectl.formats.kinds.pool import pool_names
from hicachectl.formats.objects import PAGE_DIGITS
from hicachectl.formats.wording import reason_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hicachectl.backends.file.folders import ObjectDirectory
    from hicachectl.backends.sglang.counters import Counters

_ROOM_SHARE = 1024  # one share of max_size is taken from the ledger at a time
_PROBED_EVERY_S, _PROBED_EVERY_BYTES = 1.0, 64 << 20
_CLOSE_WAIT_S = 0.1
_AT_SYMLINK_NOFOLLOW = 0x100
_UTIME_NOW, _UTIME_OMIT = (1 << 30) - 1, (1 << 30) - 2
# Two timespecs: the atime becomes the file system's present time, the mtime stays.
_ATIME_ONLY = (ctypes.c_long * 4)(0, _UTIME_NOW, 0, _UTIME_OMIT)


class Capacity:
    """Room for the objects of one rank. Several threads may use it at once.

    suffixes: suffixes of the objects that count, those of sidecars that may still come among them.

    Until the thread has listed the directory for the first time, the room in use is what the last
    processes left in the ledger, or 95 % of max_size in a directory without one.
    """

    def __init__(
        self,
        directory: ObjectDirectory,
        suffixes: Mapping[bytes, bool],
        *,
        max_size: int = 0,
        min_free_space: int = 0,
        evict: str = "owner",
        counters: Counters,
    ) -> None:
        """Start the thread, if this rank writes anything.

        suffixes: ends of the file names that this rank writes, after the page hash; True for the
        anchor's. max_size, min_free_space: bytes; 0 for no limit. evict: "owner": the process that
        holds the lock evicts; "this": this process evicts, and no other.
        Raises UsageError for max_size where locks do not exclude other hosts, OSError and
        UntrustedError.
        """
        kinds = kinds_of(suffixes, tuple(pool.name for pool in pool_names()))
        self.suffixes = frozenset(kinds)
        self._directory = directory
        self._counters = counters
        self._min_free = min_free_space
        self._lock = threading.Lock()
        self._credit = 0  # bytes taken from the ledger, not yet admitted
        self._chunk = max_size // _ROOM_SHARE
        self._free = 0  # bytes at the last probe, minus the bytes admitted since
        self._admitted = 0  # bytes, since the probe
        self._probed_at = 0.0
        self._epochs: dict[bytes, EpochReader] = {}
        self._limit = max_size if suffixes else 0
        self._evictor: Evictor | None = None
        if not suffixes:
            return
        alone = evict == "this"
        if max_size and not alone and not locks_reach_all_hosts(directory.descriptor):
            raise UsageError(
                f"{directory.path}: locks of this file system may not exclude other hosts, so "
                'max_size needs "evict": "this" on one of them, and no max_size on the others'
            )
        self._evictor = Evictor(
            directory,
            kinds,
            has_anchor=any(suffixes.values()),
            limit=max_size,
            min_free=min_free_space,
            alone=alone,
            counters=counters,
        )
        self._evictor.start()

    # writing

    def admit(self, nbytes: int) -> bool:
        """Take room for an object that is about to be written; False if the store is full.

        nbytes: size of its file, with trailer. Give the room of a failed write back by `release`.
        """
        if not (self._limit or self._min_free):
            return True
        with self._lock:
            try:
                if self._min_free and not self._has_space(nbytes):
                    self._wake()
                    return False
                if self._limit and not self._has_room(nbytes):
                    self._wake()
                    return False
            except OSError as error:
                self._counters.refused("unreckoned", reason_of(error))
                return False
            self._free -= nbytes
            self._admitted += nbytes
            return True

    def release(self, nbytes: int) -> None:
        """Give back the room of a failed write, or of the file that a write replaced."""
        if not self._limit or self._evictor is None:
            return
        with self._lock:
            self._credit += nbytes
            if self._credit > 4 * self._chunk:
                surplus, self._credit = self._credit - self._chunk, self._chunk
                with suppress(OSError):  # the next listing corrects it
                    self._evictor.ledger.give(surplus)

    def removed(self, suffix: bytes, nbytes: int) -> None:
        """Give back the room of a file that was removed, if it counts here."""
        if suffix in self.suffixes:
            self.release(nbytes)

    def keep(self, key: bytes, facts: os.stat_result) -> bool:
        """Mark an object that a writer found in place; False if it has to be written after all.

        facts: its stat, when it was found. Once marked, it is not evicted before the writer has had
        time to write the page's anchor. Raises OSError.
        """
        try:
            here, name = self._directory.place(key)
            if LIBC.utimensat(here, name, _ATIME_ONLY, _AT_SYMLINK_NOFOLLOW):
                # Another user's file cannot be marked.
                os.stat(name, dir_fd=here, follow_symlinks=False)
        except FileNotFoundError:
            return False
        # The mark has set the ctime, which revives an object that a `clear` has made stale.
        epoch = self.epoch(key[PAGE_DIGITS:])
        epoch.look()
        return not epoch.stale(facts)

    # reading

    def used(self, suffix: bytes, descriptor: int, facts: os.stat_result) -> bool:
        """Note that an object of a suffix was read, for the order of eviction.

        descriptor: its open file. facts: its fstat. Return False if a `clear` came meanwhile,
        so that the object has to be removed.
        """
        # A touch sets the ctime, which would revive an object that a `clear` has made stale.
        epoch = self.epoch(suffix)
        epoch.look()
        if epoch.stale(facts):
            return True  # it was not touched
        LIBC.futimens(descriptor, _ATIME_ONLY)
        epoch.look()
        return not epoch.stale(facts)

    def epoch(self, suffix: bytes) -> EpochReader:
        """Return the epoch of a suffix."""
        found = self._epochs.get(suffix)
        if found is None:
            found = self._epochs[suffix] = EpochReader(self._directory, suffix)
        return found

    # the thread

    def evict_now(self) -> bool:
        """Do the thread's work once; return whether this process evicts. Raises OSError."""
        return self._evictor is not None and self._evictor.turn()

    def close(self) -> None:
        """Give unused room back, and let the thread end; wait half a second for it."""
        evictor, self._evictor = self._evictor, None
        if evictor is None:
            return
        credit = 0
        # A writer that hangs in the store keeps the lock; the next listing corrects its room.
        if self._lock.acquire(timeout=_CLOSE_WAIT_S):
            credit, self._credit = self._credit, 0
            self._lock.release()
        evictor.close(credit)

    def _wake(self) -> None:
        if self._evictor is not None:
            self._evictor.wake.set()

    def _has_room(self, nbytes: int) -> bool:
        """Take the object's bytes from the credit, which the ledger fills up."""
        if self._evictor is None:
            return False
        if nbytes > self._credit:
            least = nbytes - self._credit
            taken = self._evictor.ledger.take(least, least + self._chunk)
            if not taken:
                return False
            self._credit += taken
            if self._evictor.ledger.is_high:
                self._wake()
        self._credit -= nbytes
        return True

    def _has_space(self, nbytes: int) -> bool:
        """Return whether the file system has so many bytes more than must stay free."""
        now = time.monotonic()
        old = now - self._probed_at > _PROBED_EVERY_S or self._admitted > _PROBED_EVERY_BYTES
        if old:
            space = os.fstatvfs(self._directory.descriptor)
            self._free = space.f_bavail * space.f_frsize
            self._probed_at, self._admitted = now, 0
        return self._free - nbytes >= self._min_free
