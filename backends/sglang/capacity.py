"""Limit the space that one rank's objects take in a directory; evict pages in a thread.

A rank's anchor and sidecars of a page are evicted together. `max_size` limits all objects of the
rank's suffixes, whichever process wrote them. Each process that writes keeps `min_free_space` free.

Of the processes that write a suffix, only the holder of a lock on a file in `.hicachectl/` evicts.
The other processes keep trying to take the lock, which is released when its holder ends.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from hicachectl.backends.disk.durable import is_named, lock
from hicachectl.backends.disk.io import locks_reach_all_hosts
from hicachectl.backends.file.folders import ObjectDirectory
from hicachectl.backends.object_files.epochs import open_side, owner_of
from hicachectl.backends.sglang.ledger import HIGH, Ledger
from hicachectl.backends.sglang.log import logger
from hicachectl.backends.sglang.sweeping import Sweeper, kinds_of
from hicachectl.formats.errors import HicacheError, UsageError
from hicachectl.formats.wording import reason_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hicachectl.backends.sglang.counters import Counters
    from hicachectl.backends.sglang.sweeping import Listing

_PROBED_EVERY_S, _PROBED_EVERY_BYTES = 1.0, 64 << 20
_LOW = 0.96  # eviction starts above HIGH, and ends at this share of the limit
_LISTED_AT = 0.75  # below this share of the limit, the limit is no reason to list
# The limit is a reason to list again if the pages left to evict fill at most _KNOWN_AT_LEAST of it,
# and writes since the last listing fill more than _WRITTEN_AT_LEAST of it.
_KNOWN_AT_LEAST = 0.25
_WRITTEN_AT_LEAST = 0.05
# A turn (a call of `evict_now`) frees _FREE_SPACE_STEP of the missing space, but at least
# _FREE_SPACE_LEAST bytes. It does not free all missing space, because the processes of other
# suffixes may evict at the same time.
_FREE_SPACE_STEP, _FREE_SPACE_LEAST = 0.25, 64 << 20
_FREE_SPACE_MARGIN = 0.05  # space to free beyond min_free_space, as a share of it
_TICK_S, _BUSY_TICK_S, _LOCK_EVERY_S, _EPOCH_EVERY_S = 0.25, 0.02, 2.0, 1.0
# The shortest time between listings, if the last listing has no page left to evict, or if writes of
# other processes are unknown ("evict": "this").
_LISTED_AGAIN_S = 60.0
_SWEEP_EVERY_S, _LIMIT_SWEEP_S = 3600.0, 300.0
_LONGEST_TURN_S, _LONGEST_JOIN_S = 0.5, 0.5
_REST_S = 0.001  # pause after the removal of 64 stale objects
_LOST_PAUSE_S = 5.0


class Capacity:
    """Space for the objects that one rank writes. Several threads may call the methods at once.

    suffixes: ends of the names of the objects that count, the anchor's first. See `kinds_of`.

    If this process holds the lock of the suffixes, a thread lists the objects and evicts pages.
    Before the first listing, the total that earlier processes left in the file of the `Ledger`
    counts as used. In a directory without this file, 95 % of max_size counts as used.
    """

    def __init__(
        self,
        directory: ObjectDirectory,
        suffixes: Mapping[bytes, bool],
        *,
        max_size: int = 0,
        min_free_space: int = 0,
        evict: str = "owner",
        page_tokens: int = 1,
        counters: Counters,
    ) -> None:
        """Open the control files and the directory anew, and start the thread.

        suffixes: ends of the names of the files that this rank writes, after the page hash; at
            least one. The anchor's suffix has the value True.
        max_size: most bytes of all objects of the suffixes; 0 for no limit.
        min_free_space: bytes to leave free on the file system; 0 for no limit.
        evict: "owner" if the process that holds the lock evicts; "this" if only this process
            evicts.
        page_tokens: tokens of a page.
        Raises OSError and UntrustedError. Raises UsageError for max_size on a file system whose
        locks may not exclude other hosts.
        """
        self._alone = evict == "this"  # evict without the lock, with a ledger of this process only
        if max_size and not self._alone and not locks_reach_all_hosts(directory.descriptor):
            raise UsageError(
                f"{directory.path}: locks of this file system may not exclude other hosts; give "
                'max_size on one host only, with "evict": "this"'
            )
        self.suffixes = kinds_of(suffixes)
        self._has_anchor = any(suffixes.values())
        self._limit = max_size
        self._min_free = min_free_space
        self._counters = counters
        self._page_tokens = page_tokens
        self._probing = threading.Lock()
        self._free = 0  # free bytes at the last probe, minus the bytes admitted since
        self._admitted = 0  # bytes admitted since the probe
        self._probed_at = 0.0
        owner = os.fsdecode(owner_of(self.suffixes[0]))
        # A process without a limit must not keep a process with a limit from evicting.
        self._lock_name = f"evictor-{owner}" if max_size else f"sweeper-{owner}"
        self._ledger_name = f"used-{owner}"
        self._working = threading.Lock()  # one turn at a time
        self._ended = False
        self._wake = threading.Event()
        self._holds = False
        self._busy = False  # the last turn evicted
        self._lock_file = -1
        self._ledger: Ledger | None = None
        # The thread may outlive the caller's descriptor.
        self._directory = ObjectDirectory.within(directory.path, os.dup(directory.descriptor))
        self._forget()
        self._thread = threading.Thread(target=self._run, name="hicachectl-evict", daemon=True)
        try:
            self._open()
            self._thread.start()
        except BaseException as error:
            self._close_files()
            if isinstance(error, RuntimeError):  # the system allows no more threads
                raise OSError(errno.EAGAIN, str(error)) from error
            raise

    # writing

    def admit(self, nbytes: int) -> bool:
        """Reserve space for an object before it is written.

        Return False if the limits leave too little space, or if the ledger or the free space cannot
        be read.
        nbytes: size of the object's file, with trailer. After a failed write, call `release`.
        """
        try:
            # The probe is inlined, because one more Python call is measurable when a small page is
            # written.
            if self._min_free:
                with self._probing:
                    now = time.monotonic()
                    if (
                        now - self._probed_at > _PROBED_EVERY_S
                        or self._admitted > _PROBED_EVERY_BYTES
                    ):
                        self._free = self._free_bytes()
                        self._probed_at, self._admitted = now, 0
                    if self._free - nbytes < self._min_free:
                        self._wake.set()
                        return False
                    self._free -= nbytes
                    self._admitted += nbytes
            return self._ledger is None or self._ledger.take(nbytes)
        except OSError as error:
            self._counters.failed("unreckoned", reason_of(error))
            return False

    def release(self, nbytes: int) -> None:
        """Give back the space of a failed write, or of a file that was replaced or removed."""
        if self._ledger is not None:
            self._ledger.give(nbytes)

    def _free_bytes(self) -> int:
        space = os.fstatvfs(self._directory.descriptor)
        return space.f_bavail * space.f_frsize

    # control files

    def _open(self) -> None:
        self._sweeper = Sweeper(self._directory, self.suffixes, has_anchor=self._has_anchor)
        with open_side(self._directory) as side:
            if self._limit:
                used = side.open_lock(self._ledger_name)
                self._ledger = Ledger(used, self._limit, self._wake, shared=not self._alone)
            # The lock is opened last, so that an open lock shows that all control files are open.
            self._lock_file = side.open_lock(self._lock_name)

    def _reopen_if_gone(self) -> None:
        """Open the control files again if they were replaced, or if one could not be opened."""
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
        self._expected = 0  # total of the ledger after the listing, minus bytes evicted since
        self._listed_at = self._tried_at = self._looked_at = 0.0  # results of time.monotonic
        self._listing_s = 0.0

    # the thread

    def evict_now(self) -> bool:
        """List and evict, if either is due. Return whether this process may evict.

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

    def close(self) -> None:
        """End the thread, and wait for it briefly.

        The thread gives back the unused space, and closes the files.
        """
        self._ended = True
        self._wake.set()
        self._thread.join(_LONGEST_JOIN_S)

    def _run(self) -> None:
        while not self._ended:
            pause = _TICK_S
            try:
                self._busy = False
                self.evict_now()
                pause = _BUSY_TICK_S if self._busy else _TICK_S
            except (OSError, HicacheError) as error:
                self._counters.failed("unswept", reason_of(error))
                pause = _LOST_PAUSE_S
            except Exception as error:
                self._counters.failed("error", f"evictor: {error!r}")
                logger.debug("evictor", exc_info=True)
                pause = _LOST_PAUSE_S
            self._wake.wait(pause)
            self._wake.clear()
        with self._working:
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
        if listing is None or self._is_epoch_new(listing):
            return True
        since = time.monotonic() - self._listed_at
        if since < 3 * self._listing_s:
            return False
        # HiCacheFile and migrations add objects without an entry in the ledger.
        again_s = max(_LIMIT_SWEEP_S, 20 * self._listing_s) if self._limit else _SWEEP_EVERY_S
        if since >= again_s or (self._limit and self._is_limit_listing_due(listing)):
            return True
        is_short = not listing.left and self._missing_bytes() > 0
        return since >= _LISTED_AGAIN_S and (self._alone or is_short)

    def _is_epoch_new(self, listing: Listing) -> bool:
        now = time.monotonic()
        if now - self._looked_at < _EPOCH_EVERY_S:
            return False
        self._looked_at = now
        return self._sweeper.look() != listing.epochs

    def _is_limit_listing_due(self, listing: Listing) -> bool:
        total = self._total()
        if self._is_implausible(total):
            return True
        if total < _LISTED_AT * self._limit or listing.left > _KNOWN_AT_LEAST * self._limit:
            return False
        return total - self._expected > _WRITTEN_AT_LEAST * self._limit

    def _list(self) -> None:
        """List the objects, correct the ledger's total, and remove stale objects."""
        first = self._listing is None
        self._listing = None  # free the old listing before the new one takes memory
        begun = time.monotonic()
        before = self._total()
        listing = self._sweeper.list(
            lambda: self._ended, measures=bool(self._limit or self._min_free)
        )
        if self._ended:
            return
        self._listed_at = time.monotonic()
        self._listing_s = self._listed_at - begun
        self._listing = listing
        if self._ledger is not None:
            self._expected = self._ledger.correct(listing.listed, listing.later, before)
        if first:
            self._log(listing)
        self._remove_stale(listing)

    def _log(self, listing: Listing) -> None:
        logger.info(
            "%s: %d objects of this rank, %.3f GiB%s; %d objects of other ranks or models; listed "
            "in %.1f s",
            self._counters.place,
            len(listing.rows) + len(listing.stale),
            (listing.listed + listing.later) / 2**30,
            f" of max_size {self._limit / 2**30:.3f} GiB" if self._limit else "",
            listing.others,
            self._listing_s,
        )

    def _remove_stale(self, listing: Listing) -> None:
        """Remove objects that are older than their epoch, anchors first."""
        freed = removed = 0
        for number, (page, kind) in enumerate(listing.stale):
            if self._ended:
                return
            with suppress(OSError):
                bytes_free = self._sweeper.remove_stale(page, kind, listing.epochs[kind])
                freed += bytes_free
                removed += bytes_free > 0
            if not number % 64:
                self._freed(freed)
                freed = 0
                time.sleep(_REST_S)
        listing.stale.clear()
        self._freed(freed)
        if removed:
            self._counters.removed("stale", removed)

    # evicting

    def _total(self) -> int:
        """Return the bytes that all processes have taken; 0 without a limit."""
        return 0 if self._ledger is None else self._ledger.total

    def _is_implausible(self, total: int) -> bool:
        """Return whether the total is larger than writers can have made it since the listing."""
        return total > max(self._limit, self._expected) * 1.01

    def _missing_bytes(self) -> int:
        """Return the bytes to evict now; 0 if no limit is exceeded."""
        total = self._total()
        # A wrong number in the ledger must not evict pages. The next listing corrects the number.
        is_high = total > HIGH * self._limit and not self._is_implausible(total)
        above = int(total - _LOW * self._limit) if is_high else 0
        space = self._missing_space() if self._min_free else 0
        return max(above, int(space * _FREE_SPACE_STEP), min(space, _FREE_SPACE_LEAST))

    def _missing_space(self) -> int:
        """Return the bytes to free for min_free_space and its margin; 0 if enough is free."""
        margin = min(int(self._min_free * _FREE_SPACE_MARGIN), 1 << 30)
        return max(0, self._min_free + margin - self._free_bytes())

    def _evict(self, nbytes: int) -> None:
        """Evict the least recently used pages until `nbytes` bytes are freed or the turn ends."""
        listing, until = self._listing, time.monotonic() + _LONGEST_TURN_S
        freed, before = 0, self._sweeper.evicted
        while listing is not None and freed < nbytes:
            if self._ended or time.monotonic() > until or not (oldest := listing.take_page()):
                break
            try:
                freed += self._sweeper.remove_page(*oldest)
            except OSError as error:
                self._counters.failed("unevicted", f"{oldest[0]}: {reason_of(error)}")
        self._freed(freed)
        self._counters.moved("evicted", (self._sweeper.evicted - before) * self._page_tokens)
        self._busy = freed > 0

    def _freed(self, nbytes: int) -> None:
        self._expected -= nbytes
        if nbytes:
            self.release(nbytes)
