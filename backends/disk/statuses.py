"""Read and write statuses, the files in which ranks with the plug-in describe themselves.

The files lie in `.hicachectl/status/` of a store. `formats.plugin_status` has their form.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hicachectl.backends.disk.io import entries_of
from hicachectl.backends.disk.names import OWN_PREFIX
from hicachectl.formats.errors import FormatError, UntrustedError
from hicachectl.formats.plugin_status import (
    MAX_STATUS_BYTES,
    MAX_STATUSES,
    STATUS_DIRECTORY,
    PluginStatus,
    dump_status,
    is_status_name,
    parse_status,
)
from hicachectl.formats.wording import reason_of

if TYPE_CHECKING:
    from hicachectl.backends.disk.directory import Directory

# Standings of a rank.
# closed: its backend was detached.
# ended: its process ended without a detach.
# silent: its file is so old that the process must have ended, or hangs.
# serving: none of these.
CLOSED, ENDED, SILENT, SERVING = STANDINGS = ("closed", "ended", "silent", "serving")
# Seconds for which statuses are kept. Fleets restart so often that a week of statuses would exceed
# MAX_STATUSES.
_KEPT_S = 86400.0
# Two readings of the start of one process differ by less than this. The boot time, on which they
# depend, is in whole seconds.
_CLOCKS_DIFFER_S = 2.0
_START_FIELD = 19  # index of the field starttime after the name in parentheses, see proc(5)
_ENDED = ("Z", "X")  # states of a zombie and of a dead process, see proc(5)


class RankStatus(NamedTuple):
    """A rank's status, and its standing, one of STANDINGS."""

    status: PluginStatus
    standing: str


class StoreStatuses(NamedTuple):
    """The statuses of a store.

    statuses: statuses sorted by the names of their files.
    problems: messages about files that were not read.
    """

    statuses: tuple[RankStatus, ...]
    problems: tuple[str, ...]


def write_status(directory: Directory, status: PluginStatus) -> None:
    """Write a rank's status. The write is not durable.

    directory: directory of the store.
    Raises OSError, UntrustedError.
    """
    with (
        directory.make_directory(os.fsdecode(OWN_PREFIX), exist_ok=True) as side,
        side.make_directory(STATUS_DIRECTORY, exist_ok=True) as statuses,
    ):
        statuses.write(status.name, dump_status(status), shared=True, durable=False)


def read_statuses(side: Directory) -> StoreStatuses:
    """Return the statuses in a store's `.hicachectl`. Raises OSError, UntrustedError."""
    found, problems = list[RankStatus](), list[str]()
    with suppress(FileNotFoundError), side.directory(STATUS_DIRECTORY) as statuses:
        names, left = _names(statuses)
        if left:
            problems.append(
                f"{statuses.path}: has more than {MAX_STATUSES} files; the rest is not read"
            )
        for name in names:
            try:
                status = _read(statuses, name)
                found.append(RankStatus(status, standing(status)))
            except FileNotFoundError:  # removed since it was listed
                continue
            except (FormatError, UntrustedError) as error:
                problems.append(str(error))
            except OSError as error:
                problems.append(f"{statuses.path}/{name}: {reason_of(error)}")
    return StoreStatuses(tuple(found), tuple(problems))


def remove_ended(directory: Directory, own: PluginStatus) -> None:
    """Remove old statuses, and statuses of ranks that have ended on this host.

    own: this rank's status, which stays.
    Raises OSError, UntrustedError.
    """
    with (
        directory.directory(os.fsdecode(OWN_PREFIX)) as side,
        side.directory(STATUS_DIRECTORY) as statuses,
    ):
        for name in set(_names(statuses)[0]) - {own.name}:
            with suppress(OSError, FormatError, UntrustedError):
                status = _read(statuses, name)
                gone = _runs(status) is False
                if gone or own.written_ns - status.written_ns > _KEPT_S * 1e9:
                    statuses.remove(name)


def standing(status: PluginStatus) -> str:
    """Return the present standing of a rank, which is one of STANDINGS."""
    if status.closed:
        return CLOSED
    if _runs(status) is False:
        return ENDED
    return SILENT if status.is_old(time.time_ns()) else SERVING


def this_host() -> tuple[str, int]:
    """Return the name of this host, and the PID namespace of this process; 0 if it is unknown."""
    try:
        namespace = Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        namespace = 0
    return os.uname().nodename, namespace


def process_start_ns(pid: int) -> int | None:
    """Return the start of a process, Unix ns; None if it has ended, 0 if the start is unknown."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        fields = text.rpartition(")")[2].split()
        if fields[0] in _ENDED:
            return None
        ticks = int(fields[_START_FIELD])
        lines = Path("/proc/stat").read_text(encoding="ascii", errors="replace").splitlines()
        boot = next(int(line.split()[1]) for line in lines if line.startswith("btime "))
    except (FileNotFoundError, ProcessLookupError):
        return None
    except (OSError, ValueError, IndexError, StopIteration):
        return 0
    return boot * 10**9 + ticks * 10**9 // os.sysconf("SC_CLK_TCK")


def _runs(status: PluginStatus) -> bool | None:
    """Return whether a status's process runs; None if this host cannot tell."""
    if not status.pid_namespace or (status.host, status.pid_namespace) != this_host():
        return None
    start_ns = process_start_ns(status.pid)
    if not start_ns:
        return None if start_ns == 0 else False
    return abs(start_ns - status.started_ns) <= _CLOCKS_DIFFER_S * 1e9


def _names(statuses: Directory) -> tuple[list[str], bool]:
    """Return the sorted names of at most MAX_STATUSES files, and whether more files exist."""
    with entries_of(statuses.descriptor) as entries:
        names = [entry.name for entry in islice(entries, MAX_STATUSES + 1)]
    return sorted(name for name in names[:MAX_STATUSES] if is_status_name(name)), len(names) > (
        MAX_STATUSES
    )


def _read(statuses: Directory, name: str) -> PluginStatus:
    return parse_status(statuses.read(name, MAX_STATUS_BYTES + 1), f"{statuses.path}/{name}")
