"""Marks on unfinished writes.

A killed run leaves its mark behind. The next run of the same request takes over this mark, and so
finds the unfinished writes of the killed run.

A file in the user's state directory, named by a hash of the request, has the mark. The process that
uses the mark holds the file's lock. A run that ends without an exception leaves no unfinished
writes, and removes the file.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from hicachectl.backends.capabilities import Resumable
from hicachectl.backends.disk.directory import Directory
from hicachectl.backends.disk.durable import is_named, lock, make_directories
from hicachectl.formats.errors import UsageError
from hicachectl.formats.wording import failed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicachectl.backends.base import Store

_OWNER_BYTES = 8
_OWNER = re.compile(rb"[0-9a-f]{%d}" % (2 * _OWNER_BYTES))
_NAME_DIGITS = 32


class RequestHeldError(UsageError):
    """Another process is carrying out the same request."""


@dataclass(frozen=True, slots=True)
class RunMark:
    """Mark on the unfinished writes of one process.

    owner: 16 hexadecimal digits. Two living processes use the same digits only if they attempt the
        same part of a run.
    ended: marks of processes that have ended, or whose work this process has done instead. Their
        unfinished writes can be removed.
    remark: message for the user, or "".
    """

    owner: str
    ended: tuple[str, ...] = ()
    remark: str = ""

    @classmethod
    def new(cls, remark: str = "") -> Self:
        """Return a mark that no other process uses."""
        return cls(os.urandom(_OWNER_BYTES).hex(), remark=remark)

    def put(self, *stores: Store) -> None:
        """Remove unfinished writes of ended processes, and mark unfinished writes from now on.

        Stores that do not mark writes are left alone. Raises StoreUnavailable.
        """
        for store in stores:
            if isinstance(store, Resumable):
                for ended in self.ended:
                    store.own_temporaries(ended, sweep=True)
                store.own_temporaries(self.owner, sweep=False)


@contextmanager
def held_mark(request: bytes) -> Iterator[RunMark]:
    """Yield the mark of a request, and hold its lock until the block ends.

    If the state directory cannot be used, the mark is new, and its remark says so.
    request: text that is equal only for equal requests.
    Raises RequestHeldError if another process holds the mark. Raises UntrustedError.
    """
    name = hashlib.sha256(request).hexdigest()[:_NAME_DIGITS]
    place = _state_directory()
    with ExitStack() as held:
        directory: Directory | None = None
        try:
            if not place.is_absolute():
                raise OSError(errno.ENOENT, "The user has no home directory")
            make_directories(place)
            directory = held.enter_context(Directory.named(str(place), writes=True))
            descriptor = _locked(directory, name)
            held.callback(os.close, descriptor)
            mark = _mark_in(descriptor)
        except OSError as error:
            directory = None
            why = failed(place, "keep a mark of this run", error)
            mark = RunMark.new(
                f"{why}, so if this run is killed, no later run removes its unfinished files; set "
                "XDG_STATE_HOME to a writable directory, or use hicachectl rm --temporaries"
            )
        yield mark
        if directory is not None:
            with suppress(OSError):
                directory.remove(name)


def _state_directory() -> Path:
    """Return the directory of marks, below XDG_STATE_HOME or else ~/.local/state."""
    base = Path(os.environ.get("XDG_STATE_HOME") or "")
    if not base.is_absolute():
        base = Path(os.path.expanduser("~"), ".local/state")  # noqa: PTH111 - it never fails
    return base / "hicachectl" / "marks"


def _locked(directory: Directory, name: str) -> int:
    """Open and lock the file of a mark. Raises OSError, RequestHeldError, UntrustedError."""
    while True:
        descriptor = directory.open_lock(name)
        try:
            if not lock(descriptor, optional=True):
                raise RequestHeldError(
                    f"{directory.path}/{name}: another process runs the same command; run again "
                    "after it has ended"
                )
            if is_named(descriptor, name, directory.descriptor):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # the process that held the lock has removed this file


def _mark_in(descriptor: int) -> RunMark:
    """Return the mark in a locked file. Write a new mark into a new file. Raises OSError."""
    content = os.pread(descriptor, 2 * _OWNER_BYTES + 1, 0)
    if _OWNER.fullmatch(content):
        owner = content.decode()
        return RunMark(owner, ended=(owner,))
    mark = RunMark.new()
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, mark.owner.encode(), 0)
    return mark
