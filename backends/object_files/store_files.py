"""The files of one store. A failed system call on a file becomes the status of its object."""

from __future__ import annotations

import errno
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

from hicachectl.backends.base import Status
from hicachectl.backends.concurrency import MOST_CALLS, Concurrency
from hicachectl.backends.disk.io import (
    CHECK_MOUNT,
    NO_ROOM,
    OPEN_FEWER,
    TOO_MANY_OPEN,
    allow_descriptors,
    raise_denied,
    raise_lost,
)
from hicachectl.backends.object_files.markers import MarkedSizes
from hicachectl.backends.object_files.trailers import TrailerChecks
from hicachectl.formats.errors import StoreUnavailable, UntrustedError
from hicachectl.formats.objects import PAGE_DIGITS
from hicachectl.formats.wording import failed, reason_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from hicachectl.backends.base import StatusArray
    from hicachectl.backends.object_files.tree import ObjectTree

_WORDS = {
    errno.ELOOP: "a symbolic link, not a regular file",
    errno.ENXIO: "not a regular file",  # open(2) of a socket fails with this error, too
    errno.ENAMETOOLONG: "the key is too long for a file name",
}
_ACTION = "use the store"
_NEXT_STEPS = {
    errno.ENOENT: "check the path, and that its file system is mounted",
    errno.ENOTDIR: "give the directory with the objects",
    errno.EACCES: "run as the server's user or as a member of its group",
    **dict.fromkeys(TOO_MANY_OPEN, OPEN_FEWER),
}
# A call opens at most three files, and the 256 folders of a store stay open.
_DESCRIPTORS = 3 * MOST_CALLS + 256


def unavailable(path: str, error: OSError) -> StoreUnavailable:
    """Return the exception for a store whose directory cannot be used."""
    next_step = _NEXT_STEPS.get(error.errno or 0, CHECK_MOUNT)
    return StoreUnavailable(failed(path, _ACTION, error, next_step))


@contextmanager
def usable(path: str) -> Iterator[None]:
    """Raise the exception of `unavailable` for an OSError in the block."""
    try:
        yield
    except OSError as error:
        raise unavailable(path, error) from error


def not_writable(path: str, error: OSError) -> StoreUnavailable:
    """Return the exception for a store that takes no new file."""
    next_step = "run as the server's user, and check that the file system is writable"
    return StoreUnavailable(failed(path, "write to the store", error, next_step))


class StoreFiles:
    """The files of one store, and statuses for failed calls on them.

    objects: tree of the files.
    sizes: the markers of the store.
    checks: comparisons of objects with their trailers.
    concurrency: the threads that call the file system.
    """

    def __init__(self, objects: ObjectTree) -> None:
        allow_descriptors(_DESCRIPTORS)
        self.objects = objects
        self.sizes = MarkedSizes(objects, self._unavailable)
        self.checks = TrailerChecks(self.sizes.identity_of)
        self.concurrency = Concurrency()

    def status(self, index: int, error: OSError | UntrustedError, errors: dict[int, str]) -> Status:
        """Return a row's status for an error, and enter a message if the status needs it.

        Raises StoreUnavailable if the error shows that the store cannot be used.
        """
        if isinstance(error, UntrustedError):  # the folder is a link, or of an untrusted owner
            errors[index] = str(error)
            return Status.ERROR
        raise_lost(error, self.objects.path, _ACTION)
        if self._removed(error):
            raise self._unavailable(error) from error
        if error.errno == errno.ENOENT:
            return Status.GONE
        if error.errno == errno.EEXIST:
            return Status.EXISTS
        errors[index] = _WORDS.get(error.errno or 0) or reason_of(error)
        return Status.FULL if error.errno in NO_ROOM else Status.ERROR

    def unread(
        self, index: int, key: bytes, error: OSError | UntrustedError, errors: dict[int, str]
    ) -> Status:
        """Return the status of a row that cannot be read, as `status` does.

        Raises DeniedError if this user may not read the object.
        """
        if isinstance(error, OSError):
            raise_denied(error, f"{self.objects.path}: {_start_of(key)}")
        return self.status(index, error, errors)

    def each(
        self,
        kind: str,
        indices: Collection[int],
        act: Callable[[int], Status],
        statuses: StatusArray,
        errors: dict[int, str],
    ) -> None:
        """Set each row's status by `act`, for several rows at once.

        kind: kind of the calls, for `Concurrency.each`.
        act: returns the status of a row, or raises OSError or UntrustedError. Called in several
            threads.
        """
        rows = list(indices)

        def work(start: int, stop: int) -> None:
            for index in rows[start:stop]:
                try:
                    statuses[index] = act(index)
                except (OSError, UntrustedError) as error:
                    statuses[index] = self.status(index, error, errors)

        self.concurrency.each(kind, work, len(rows))

    def synced(
        self,
        sync: Callable[[], None],
        indices: Collection[int],
        statuses: StatusArray,
        errors: dict[int, str],
    ) -> bool:
        """Call `sync`. Return whether it succeeded.

        If it failed, the rows of `indices` with the status OK get the status of the error.
        """
        try:
            sync()
        except OSError as error:
            for index in indices:
                if statuses[index] == Status.OK:
                    statuses[index] = self.status(index, error, errors)
            return False
        return True

    def _unavailable(self, error: OSError) -> StoreUnavailable:
        """Return the exception for an unusable store. Raises ValueError if the store is closed."""
        self._refuse_closed(error)
        return unavailable(self.objects.path, error)

    def _removed(self, error: OSError) -> bool:
        """Return whether a file is missing because a directory of the store was removed."""
        self._refuse_closed(error)
        if error.errno != errno.ENOENT:
            return False
        return not all(os.fstat(root).st_nlink for root in self.objects.roots)

    def _refuse_closed(self, error: OSError) -> None:
        if error.errno == errno.EBADF and self.objects.descriptor < 0:
            raise ValueError("The store is closed") from error


def _start_of(key: bytes) -> str:
    """Return a key as text, shortened to the first digits of its page hash."""
    text = key.decode(errors="backslashreplace")
    return f"page {text[:8]}…" if len(text) > PAGE_DIGITS else text
