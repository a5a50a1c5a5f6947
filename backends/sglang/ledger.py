"""The bytes that the processes of one suffix take together: a number in a locked file.

Writers take room before they write, so the total stays below the limit however many processes
write. Who evicts gives room back, and sets the number after each listing.
"""

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

_FORM = struct.Struct("<q")
HIGH = 0.98  # share of the limit above which the evictor works
_ASSUMED = 0.95  # share of the limit taken as used before the first listing
_LOCK_WAIT_S, _LOCK_PAUSE_S = 0.2, 0.0002


class Ledger:
    """The total of one suffix. Several threads may use it at once. All methods raise OSError.

    limit: bytes that the total may reach. is_high: the total was above HIGH when last set.
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
            data = os.pread(self._descriptor, _FORM.size, 0)
            total = max(0, int(_FORM.unpack(data)[0])) if len(data) == _FORM.size else None
        if total is None:
            total = int(_ASSUMED * self.limit)
        return total

    def _write(self, total: int) -> None:
        self._own = total
        self.is_high = total > HIGH * self.limit
        if self._shared:
            os.pwrite(self._descriptor, _FORM.pack(total), 0)

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
