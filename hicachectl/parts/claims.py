"""Claims: one process at a time does a piece of work, on hosts whose clocks may differ.

The highest `STEM.K` is the claim that counts. Its holder writes a new number into it every
`BEAT_SECONDS`. Another process takes over, by publishing `STEM.(K+1)`, if the content has not
changed for `STALE_SECONDS` of its own monotonic clock. It need not wait if the holder has released
the claim, or has ended on the same machine, as its lock (flock) shows. No time of one host is
compared with a time of another. No claim is removed, so two takers cannot both win.

A holder that was stopped for long may go on beside its successor until it notices. Everything that
it does must be safe then: attempts have names of their own, and published files are never replaced.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self

from msgspec import Struct

from hicachectl.backends.disk.durable import lock
from hicachectl.formats.documents import parse_json_object
from hicachectl.formats.errors import FormatError, UsageError
from hicachectl.formats.forms import convert

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicachectl.backends.disk.directory import Directory

BEAT_SECONDS = 10.0
STALE_SECONDS = 60.0
LOOK_SECONDS = 1.0  # between two looks at another process's claim, less at first
_FIRST_LOOK_SECONDS = 0.05
_NBYTES = 1024  # of every claim, so that one write renews it in place
_OWNER_BYTES = 8
_MOST_HOST = 64  # characters, as of a Linux host name


class ClaimLostError(UsageError):
    """Another process has taken over the work."""


class Host(NamedTuple):
    """A running system. boot: differs between systems, and after each start."""

    name: str
    boot: str


class Holder(Struct, kw_only=True):
    """Content of a claim, as JSON padded with spaces.

    device: st_dev of the claim. A lock tells of every process that uses the same mounted file
    system: the same device on the same boot. Containers of one host can mount it apart.
    """

    owner: str
    host: str
    boot: str
    device: int
    beat: int
    released: bool


def host_identity() -> Host:
    """Return this host."""
    boot = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return Host(socket.gethostname()[:_MOST_HOST], boot)


class Claim:
    """A held claim; a context manager that releases it.

    attempt: number of earlier holders. owner: 16 hex digits. host: this one's name. taken_ns: time
    of the claim, by the clock of its file system.
    """

    def __init__(
        self, directory: Directory, stem: str, attempt: int, holder: Holder, descriptor: int
    ) -> None:
        """Take over the descriptor of the published claim, and renew it until `release`."""
        self.attempt = attempt
        self.owner = holder.owner
        self.host = holder.host
        self._directory = directory
        self._stem = stem
        self._holder = holder
        self._descriptor = descriptor
        self.taken_ns = os.fstat(descriptor).st_mtime_ns
        self._lost = False
        self._looked = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="claim", daemon=True)
        self._thread.start()

    @classmethod
    def take(
        cls,
        directory: Directory,
        stem: str,
        *,
        done: Callable[[], bool],
        on_wait: Callable[[str], None] = lambda host: None,
    ) -> Self | None:
        """Take a claim; wait for its holder to release it, to end, or to renew it no more.

        done: whether the work is done; it then returns None. on_wait: called once before waiting,
        with the holder's host. The directory must outlive the claim. Raises OSError,
        UntrustedError, UnsupportedByBackend.
        """
        before: bytes | None = None
        number, since, said = -1, 0.0, False
        began = time.monotonic()
        while not done():
            now = time.monotonic()  # before the look: a stop after it must not make a claim stale
            number, content = _newest(directory, stem, max(number, 0))
            if content != before:
                before, since = content, now
            is_stale = now - since >= STALE_SECONDS
            if number < 0 or is_stale or _is_over(directory, stem, content, number):
                mine = _new_holder(directory)
                name = _name(stem, number + 1)
                descriptor = directory.publish_locked(name, _text(mine))
                if descriptor is not None:
                    return cls(directory, stem, number + 1, mine, descriptor)
                number += 1
                continue
            if not said:
                said = True
                holder = _parsed(content)
                on_wait(holder.host if holder else "another process")
            # A short wait becomes little longer, and a long one asks the file system rarely.
            time.sleep(min(LOOK_SECONDS, _FIRST_LOOK_SECONDS + (now - began) / 10))
        return None

    def check(self) -> None:
        """Raise ClaimLostError if another process has taken over. Takes no time as a rule."""
        if not self._lost and time.monotonic() - self._looked > 2 * BEAT_SECONDS:
            self._look()  # this process was stopped, or the renewing thread waits for a disk
        if self._lost:
            raise ClaimLostError(
                f"{self._directory.path}/{self._stem}.{self.attempt}: another process has taken "
                "over this work, which stood still here for too long; nothing is left to do here"
            )

    def release(self) -> None:
        """Let others take the claim at once."""
        if self._descriptor < 0:
            return
        self._ended.set()
        self._thread.join()
        self._holder.released = True
        with suppress(OSError):
            self._write()
        descriptor, self._descriptor = self._descriptor, -1
        os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _renew(self) -> None:
        while not self._ended.wait(BEAT_SECONDS) and not self._lost:
            self._holder.beat += 1
            with suppress(OSError):  # others take over if this goes on
                self._write()
            self._look()

    def _write(self) -> None:
        os.pwrite(self._descriptor, _text(self._holder), 0)
        os.fdatasync(self._descriptor)

    def _look(self) -> None:
        with suppress(OSError):
            self._lost |= self._directory.has(_name(self._stem, self.attempt + 1))
        self._looked = time.monotonic()


def owners_before(directory: Directory, stem: str, attempt: int) -> tuple[str, ...]:
    """Return the owners of the claims before an attempt. Raises OSError, UntrustedError."""
    holders = (_parsed(_content(directory, stem, number)) for number in range(attempt))
    return tuple(holder.owner for holder in holders if holder is not None)


def _name(stem: str, number: int) -> str:
    return f"{stem}.{number}"


def _newest(directory: Directory, stem: str, number: int) -> tuple[int, bytes]:
    """Return the number and content of the highest claim; -1 if there is none."""
    found, content = -1, b""
    with suppress(FileNotFoundError):
        while True:
            content = _content(directory, stem, number)
            found = number
            number += 1
    return found, content


def _content(directory: Directory, stem: str, number: int) -> bytes:
    # Opened each time: NFS asks the server at each open, and may answer a stat from memory.
    return directory.read(_name(stem, number), _NBYTES)


def _is_over(directory: Directory, stem: str, content: bytes, number: int) -> bool:
    """Return whether the holder has released the claim, or has ended on this machine."""
    holder = _parsed(content)
    if holder is None:  # torn by a power failure
        return False
    if holder.released:
        return True
    if not holder.boot or (holder.boot, holder.device) != _here(directory):
        return False
    descriptor = directory.open_lock(_name(stem, number))
    try:
        return lock(descriptor)
    except OSError:  # no locks here
        return False
    finally:
        os.close(descriptor)


def _here(directory: Directory) -> tuple[str, int]:
    return host_identity().boot, os.fstat(directory.descriptor).st_dev


def _new_holder(directory: Directory) -> Holder:
    host = host_identity()
    return Holder(
        owner=os.urandom(_OWNER_BYTES).hex(),
        host=host.name,
        boot=host.boot,
        device=os.fstat(directory.descriptor).st_dev,
        beat=0,
        released=False,
    )


def _text(holder: Holder) -> bytes:
    members = {name: getattr(holder, name) for name in holder.__struct_fields__}
    return json.dumps(members).encode().ljust(_NBYTES - 1) + b"\n"


def _parsed(content: bytes) -> Holder | None:
    try:
        return convert(parse_json_object(content, "claim"), Holder, "claim")
    except FormatError:
        return None
