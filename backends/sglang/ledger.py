"""Keep count of the bytes that all processes take for one rank's files, in a locked file."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import threading
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

HIGH = 0.98  # share of the limit above which pages are evicted
_TOTAL = struct.Struct("<q")  # the content of the file
_ASSUMED = 0.95  # share of the limit taken as used before the first listing
_SHARES = 1024  # a process takes one share, 1/1024 of the limit, from the file in advance
_MOST_SHARES = 4  # most shares that a process keeps unused
_LOCK_WAIT_S, _LOCK_PAUSE_S = 0.2, 0.0002


class Ledger:
    """The total of the bytes that all processes have taken, and this process's unused part of it.

    Writers take bytes before they write. So writes never bring the total above the limit, however
    many processes write. The process that evicts returns freed bytes, and corrects the total after
    each listing. Several threads may use a ledger at once. `total`, `take` and `correct` raise
    OSError after `close`. They also raise OSError if the lock is not free in time, for example
    because the process that holds it is stopped.

    limit: bytes that the total may reach.
    high: event that is set when a write brings the total above HIGH of the limit, or finds too few
        bytes left.
    shared: whether the total is in the file, for all processes. If False, this process has a total
        of its own.
    """

    def __init__(self, descriptor: int, limit: int, high: threading.Event, *, shared: bool) -> None:
        """Take over the descriptor of a file that is open for writing; `close` closes it."""
        self._limit = limit
        self._share = limit // _SHARES
        self._high = high
        self._descriptor = descriptor
        self._shared = shared
        self._own: int | None = None
        self._credit = 0  # bytes taken from the file, and not yet written
        self._lock = threading.Lock()

    def close(self) -> None:
        """Return the unused bytes to the file, and close the file."""
        with self._lock:
            with suppress(OSError):  # the next listing corrects the total
                self._return(self._credit)
            self._credit = 0
            descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    @property
    def total(self) -> int:
        """Return the bytes in use, including bytes taken and not yet written."""
        with self._lock, self._locked():
            return self._read()

    def take(self, nbytes: int) -> bool:
        """Take bytes for a write; return False if too few are left."""
        with self._lock:
            if nbytes > self._credit:
                self._take_from_file(nbytes - self._credit)
            if nbytes > self._credit:
                return False
            self._credit -= nbytes
            return True

    def give(self, nbytes: int) -> None:
        """Give back the bytes of a failed write, or of a file that was replaced or removed."""
        with self._lock:
            self._credit += nbytes
            if self._credit > _MOST_SHARES * self._share:
                with suppress(OSError):  # a later call returns the bytes
                    self._return(self._credit - self._share)

    def correct(self, listed: int, later: int, before: int) -> int:
        """Set the total after a listing, and return the new total.

        listed: bytes of the objects that existed when the total was `before`.
        later: bytes of the objects that were written during the listing.
        """
        with self._lock, self._locked():
            total = listed + max(0, self._read() - before)
            if not self._shared:  # other processes' objects are known from listings only
                total = max(total, listed + later)
            self._write(total)
            return total

    def _take_from_file(self, least: int) -> None:
        """Take `least` bytes and one more share from the file, or all bytes that are left.

        Take nothing if fewer than `least` bytes are left.
        """
        with self._locked():
            total = self._read()
            taken = min(least + self._share, self._limit - total)
            if taken >= least:
                self._write(total + taken)
                self._credit += taken
        if taken < least or total + taken > HIGH * self._limit:
            self._high.set()

    def _return(self, nbytes: int) -> None:
        """Return unused bytes to the file."""
        with self._locked():
            self._write(max(0, self._read() - nbytes))
            self._credit -= nbytes

    def _read(self) -> int:
        total = self._own
        if self._shared:
            data = os.pread(self._descriptor, _TOTAL.size, 0)
            total = max(0, int(_TOTAL.unpack(data)[0])) if len(data) == _TOTAL.size else None
        return int(_ASSUMED * self._limit) if total is None else total

    def _write(self, total: int) -> None:
        self._own = total
        if self._shared:
            os.pwrite(self._descriptor, _TOTAL.pack(total), 0)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock of the file, which excludes other processes."""
        if self._descriptor < 0:
            raise OSError(errno.EBADF, "the ledger is closed")
        if not self._shared:
            yield
            return
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
