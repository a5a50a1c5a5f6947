"""The background thread that keeps a rank's objects within their limits, and sweeps.

One process evicts a suffix: the one that holds the lock on a file in `.hicachectl/`. The others
try for the lock, and get it when that process ends.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import struct
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from hicachectl.backends.disk.durable import is_named, lock
from hicachectl.backends.file.folders import ObjectDirectory
from hicachectl.backends.object_files.epochs import open_side, owner_of
from hicachectl.backends.sglang.sweeping import Sweeper
from hicachectl.formats.errors import HicacheError
from hicachectl.formats.wording import reason_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicachectl.backends.sglang.counters import Counters
    from hicachectl.backends.sglang.sweeping import Listing

logger = logging.getLogger("hicachectl.sglang")

_TOTAL = struct.Struct("<q")  # the content of a ledger
_HIGH = 0.98  # share of the limit above which the evictor works
_ASSUMED = 0.95  # share of the limit taken as used before the first listing
_LOCK_WAIT_S, _LOCK_PAUSE_S = 0.2, 0.0002
_LOW = 0.96  # eviction starts above _HIGH, and ends at this share of the limit
_LISTED_AT = 0.75  # below this share of the limit, nothing needs to be listed
_KNOWN_AT_LEAST = 0.25  # if listed objects fill less of the limit, list again
_WRITTEN_AT_LEAST = 0.05  # write this share of the limit before listing again
# Of the missing space in one turn, since several suffixes may evict at once.
_FREE_SPACE_STEP, _FREE_SPACE_LEAST = 0.25, 64 << 20
_FREE_SPACE_MARGIN = 0.05  # share of the free space to keep
_TICK_S, _BUSY_TICK_S, _LOCK_EVERY_S, _EPOCH_EVERY_S = 0.25, 0.02, 2.0, 1.0
_LISTED_AGAIN_S = 60.0  # at the earliest, while too little can be evicted
_SWEEP_EVERY_S, _LIMIT_SWEEP_S = 3600.0, 300.0
_LONGEST_TURN_S, _LONGEST_JOIN_S = 0.5, 0.5
_REST_S = 0.001  # after 64 stale objects
_LOST_PAUSE_S = 5.0


class Evictor:
    """Evicts, if this process holds the lock of the suffixes.

    suffixes: the first is the anchor's if has_anchor. limit: bytes of all objects; 0 for none.
    min_free: bytes of the file system that stay free; 0 for none.
    alone: evict without the lock; the ledger is then this process's own.
    """

    def __init__(
        self,
        directory: ObjectDirectory,
        suffixes: tuple[bytes, ...],
        *,
        has_anchor: bool,
        limit: int,
        min_free: int,
        alone: bool,
        counters: Counters,
    ) -> None:
        """Open the control files, and the directory anew. Raises OSError, UntrustedError."""
        # The thread may outlive the caller's descriptor.
        self._directory = ObjectDirectory.within(directory.path, os.dup(directory.descriptor))
        self.wake = threading.Event()
        self._has_anchor = has_anchor
        self._limit = limit
        self._min_free = min_free
        self._alone = alone
        self._counters = counters
        self._suffixes = suffixes
        owner = os.fsdecode(owner_of(suffixes[0]))
        # A process without a limit must not keep one with a limit from evicting.
        self._lock_name = f"evictor-{owner}" if limit else f"sweeper-{owner}"
        self._ledger_name = f"used-{owner}"
        self._working = threading.Lock()  # one turn at a time
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="hicachectl-evict", daemon=True)
        self._unused = 0
        self._holds = False
        self._busy = False  # the last turn evicted
        self._lock_file = -1
        self._ledger: Ledger | None = None
        self._forget()
        try:
            self._open()
        except BaseException:
            self._close_files()
            raise

    # control files

    @property
    def ledger(self) -> Ledger:
        """Return the ledger of the suffixes; only with a limit."""
        assert self._ledger is not None
        return self._ledger

    def _open(self) -> None:
        self._sweeper = Sweeper(self._directory, self._suffixes, has_anchor=self._has_anchor)
        with open_side(self._directory) as side:
            if self._limit:
                used = side.open_lock(self._ledger_name)
                self._ledger = Ledger(used, self._limit, shared=not self._alone)
            self._lock_file = side.open_lock(self._lock_name)  # last: it shows that all are open

    def _reopen_if_gone(self) -> None:
        """Open the control files again if they were replaced, or some could not be opened."""
        here = self._directory.descriptor
        if self._directory.vanished:
            if not Path(self._directory.path).exists():
                raise FileNotFoundError(errno.ENOENT, "the directory is gone")
            self._directory.reopen()
        elif self._lock_file >= 0 and is_named(
            self._lock_file, f".hicachectl/{self._lock_name}", here
        ):
            return
        self._close_control()
        self._forget()
        self._open()

    def _close_control(self) -> None:
        self._holds = False
        if self._lock_file >= 0:
            os.close(self._lock_file)
            self._lock_file = -1
        if self._ledger is not None:
            self._ledger.close()

    def _close_files(self) -> None:
        self._close_control()
        self._directory.close()

    def _forget(self) -> None:
        self._listing: Listing | None = None
        self._next = 0  # row
        self._known = 0  # bytes of the rows from there on
        self._expected = 0  # total of the ledger after the listing, minus bytes evicted since
        self._listed_at = self._tried_at = self._looked_at = 0.0  # results of time.monotonic
        self._listing_s = 0.0
        self._epochs: list[int] = []

    # the thread

    def start(self) -> None:
        """Start the thread; it ends with the process, or after `close`. Raises OSError."""
        try:
            self._thread.start()
        except RuntimeError as error:  # the system allows no more threads
            self._close_files()
            raise OSError(errno.EAGAIN, str(error)) from error

    def close(self, unused: int = 0) -> None:
        """Let the thread give unused room back, close the files and end; wait shortly for it."""
        self._unused = unused
        self._ended = True
        self.wake.set()
        self._thread.join(_LONGEST_JOIN_S)

    def turn(self) -> bool:
        """List and evict if it is time. Return whether this process evicts.

        Raises OSError, HicacheError.
        """
        with self._working:
            self._reopen_if_gone()
            if not self._holds and not self._take_lock():
                return False
            if self._listing_is_due():
                self._list()
            missing = self._missing_bytes()
            if missing:
                self._evict(missing)
            return True

    def _run(self) -> None:
        while not self._ended:
            pause = _TICK_S
            try:
                self._busy = False
                self.turn()
                pause = _BUSY_TICK_S if self._busy else _TICK_S
            except (OSError, HicacheError) as error:
                self._counters.refused("unswept", reason_of(error))
                pause = _LOST_PAUSE_S
            except Exception:
                logger.exception("%s: the evictor failed", self._counters.place)
                pause = _LOST_PAUSE_S
            self.wake.wait(pause)
            self.wake.clear()
        with self._working:
            if self._ledger is not None and self._unused:
                with suppress(OSError):
                    self._ledger.give(self._unused)
            self._close_files()

    def _take_lock(self) -> bool:
        now = time.monotonic()
        if not self._alone:
            if self._tried_at and now - self._tried_at < _LOCK_EVERY_S:
                return False
            self._tried_at = now
            if not lock(self._lock_file, optional=True):
                return False
        self._holds = True
        return True

    # listing

    def _listing_is_due(self) -> bool:
        listing = self._listing
        if listing is None or self._is_epoch_new():
            return True
        since = time.monotonic() - self._listed_at
        if since < 3 * self._listing_s:
            return False
        # Others may add objects without a ledger: HiCacheFile, or a migration.
        again_s = max(_LIMIT_SWEEP_S, 20 * self._listing_s) if self._limit else _SWEEP_EVERY_S
        if since >= again_s or (self._limit and self._is_limit_listing_due()):
            return True
        is_short = self._next == len(listing.kinds) and self._missing_bytes() > 0
        return since >= _LISTED_AGAIN_S and (self._alone or is_short)

    def _is_epoch_new(self) -> bool:
        now = time.monotonic()
        if now - self._looked_at < _EPOCH_EVERY_S:
            return False
        self._looked_at = now
        return [epoch.look() for epoch in self._sweeper.epochs] != self._epochs

    def _is_limit_listing_due(self) -> bool:
        total = self.ledger.total
        if self._is_implausible(total):
            return True
        if total < _LISTED_AT * self._limit or self._known > _KNOWN_AT_LEAST * self._limit:
            return False
        return total - self._expected > _WRITTEN_AT_LEAST * self._limit

    def _list(self) -> None:
        """List the objects, set the ledger, and remove stale objects."""
        first = self._listing is None
        self._listing = None  # not two at a time in memory
        begun = time.monotonic()
        before = self.ledger.total if self._limit else 0
        listing = self._sweeper.list(
            lambda: self._ended, measures=bool(self._limit or self._min_free)
        )
        if self._ended:
            return
        self._listing_s = time.monotonic() - begun
        self._listed_at = time.monotonic()
        self._epochs = [epoch.time_ns for epoch in self._sweeper.epochs]
        self._next, self._known = 0, int(listing.sizes.sum())
        self._listing = listing
        if self._limit:
            self._expected = self.ledger.correct(listing.listed, listing.later, before)
        if first:
            self._log(listing)
        self._remove_stale(listing)

    def _log(self, listing: Listing) -> None:
        logger.info(
            "%s: %d objects of this rank, %.3f GiB%s; about %d objects of others, %.3f GiB; "
            "listed in %.1f s",
            self._counters.place,
            len(listing.kinds) + len(listing.stale),
            (listing.listed + listing.later) / 2**30,
            f" of max_size {self._limit / 2**30:.3f} GiB" if self._limit else "",
            listing.others,
            listing.others_bytes / 2**30,
            self._listing_s,
        )

    def _remove_stale(self, listing: Listing) -> None:
        """Remove objects from before their epoch, anchors first."""
        freed = removed = 0
        for number, (page, kind) in enumerate(listing.stale):
            if self._ended:
                return
            with suppress(OSError):
                bytes_free = self._sweeper.remove_stale(page, kind, self._epochs[kind])
                freed += bytes_free
                removed += bytes_free > 0
            if not number % 64:
                self._freed(freed)
                freed = 0
                time.sleep(_REST_S)
        listing.stale.clear()
        self._freed(freed)
        if removed:
            self._counters.count("swept", removed)

    # evicting

    def _is_implausible(self, total: int) -> bool:
        """Return whether the total is more than writers can have taken since the listing."""
        return total > max(self._limit, self._expected) * 1.01

    def _missing_bytes(self) -> int:
        """Return the bytes to evict now; 0 if all limits are kept."""
        total = self.ledger.total if self._limit else 0
        if self._is_implausible(total):
            total = 0
        above = int(total - _LOW * self._limit) if total > _HIGH * self._limit else 0
        space = self._missing_space() if self._min_free else 0
        return max(above, int(space * _FREE_SPACE_STEP), min(space, _FREE_SPACE_LEAST))

    def _missing_space(self) -> int:
        """Return the bytes that must get free, with a margin; 0 if there is enough."""
        space = os.fstatvfs(self._directory.descriptor)
        free = space.f_bavail * space.f_frsize
        margin = min(int(self._min_free * _FREE_SPACE_MARGIN), 1 << 30)
        return max(0, self._min_free + margin - free)

    def _evict(self, nbytes: int) -> None:
        """Evict the least recently used pages until so many bytes are freed."""
        listing, until = self._listing, time.monotonic() + _LONGEST_TURN_S
        if listing is None:
            return
        freed = pages = 0
        while freed < nbytes and self._next < len(listing.kinds):
            if self._ended or time.monotonic() > until:
                break
            start, self._next = self._next, listing.end_of_page(self._next)
            sizes = listing.sizes_of(start, self._next)
            self._known -= sum(sizes.values())
            page = listing.page(start)
            try:
                bytes_free = self._sweeper.remove_page(page, sizes, int(listing.times[start]))
                freed += bytes_free
                pages += bytes_free > 0
            except OSError as error:
                self._counters.refused("unevicted", f"{page}: {reason_of(error)}")
        self._freed(freed)
        if pages:
            self._counters.count("evicted", pages)
        self._busy = freed > 0

    def _freed(self, nbytes: int) -> None:
        self._expected -= nbytes
        if self._limit and nbytes:
            self.ledger.give(nbytes)


class Ledger:
    """The bytes that the processes of one suffix take together: a number in a locked file.

    Writers take room before they write, so the total stays below the limit however many processes
    write. The evicting process returns freed bytes, and corrects the total after each listing.
    Several threads may use it at once. All methods raise OSError.

    limit: bytes that the total may reach. is_high: the total was above _HIGH when last set.
    shared: the number is in the file, for all processes; otherwise it is this process's own.
    """

    def __init__(self, descriptor: int, limit: int, *, shared: bool) -> None:
        """Take over the descriptor of a file that is open for writing; `close` closes it."""
        self.limit = limit
        self.is_high = False
        self._descriptor = descriptor
        self._shared = shared
        self._own: int | None = None
        self._lock = threading.Lock()

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    @property
    def total(self) -> int:
        """Return the bytes in use, those taken and not yet written among them."""
        with self._locked():
            return self._read()

    def take(self, least: int, most: int) -> int:
        """Take `most` bytes of room, or all that is left; 0 if fewer than `least` are left."""
        with self._locked():
            total = self._read()
            taken = min(most, self.limit - total)
            if taken < least:
                return 0
            self._write(total + taken)
            return taken

    def give(self, nbytes: int) -> int:
        """Give room back. Return the total."""
        with self._locked():
            total = max(0, self._read() - nbytes)
            self._write(total)
            return total

    def correct(self, listed: int, later: int, before: int) -> int:
        """Set the total after a listing; return it.

        listed: bytes of the objects that existed when the total was `before`.
        later: bytes of the objects that came while the listing went on.
        """
        with self._locked():
            total = listed + max(0, self._read() - before)
            if not self._shared:  # other processes' objects are known from listings only
                total = max(total, listed + later)
            self._write(total)
            return total

    def _read(self) -> int:
        total = self._own
        if self._shared:
            data = os.pread(self._descriptor, _TOTAL.size, 0)
            total = max(0, int(_TOTAL.unpack(data)[0])) if len(data) == _TOTAL.size else None
        if total is None:
            total = int(_ASSUMED * self.limit)
        return total

    def _write(self, total: int) -> None:
        self._own = total
        self.is_high = total > _HIGH * self.limit
        if self._shared:
            os.pwrite(self._descriptor, _TOTAL.pack(total), 0)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock. Raises OSError: a process that was stopped may hold it for long."""
        with self._lock:
            if not self._shared:
                yield
                return
            if self._descriptor < 0:
                raise OSError(errno.EBADF, "the ledger is closed")
            deadline = time.monotonic() + _LOCK_WAIT_S
            while True:
                try:
                    fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(_LOCK_PAUSE_S)
            try:
                yield
            finally:
                with suppress(OSError):
                    fcntl.flock(self._descriptor, fcntl.LOCK_UN)
