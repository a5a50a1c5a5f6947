"""A command whose work can be divided: the interface between commands and runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from hicachectl.formats.errors import FormatError

if TYPE_CHECKING:
    import pyarrow as pa

    from hicachectl.backends.disk.directory import Directory, Trust
    from hicachectl.backends.disk.permissions import Permissions
    from hicachectl.parts.manifest import Manifest, Published
    from hicachectl.parts.records import Record, RecordForm, StageResult
    from hicachectl.results import Result

Tables = Mapping[str, Callable[[], "pa.Table"]]  # each call reads the table

# Number of parts, or a function of the number of objects.
PartCount = int | Callable[[int], int]

# Module of each command that can be divided; its KIND is the command's `Kind`.
MODULES = {
    "migrate": "hicachectl.parts.migrate",
    "prewarm": "hicachectl.parts.prewarm",
    "verify": "hicachectl.parts.verify",
}


@dataclass(frozen=True, slots=True)
class PartInput:
    """Input of one attempt at a part. Another attempt may be working at the same time.

    owner: 16 hex digits that mark the unfinished writes of all attempts at the part.
    tables: the part's own tables, from `Job.tables`.
    divided: number by which limits of the whole run are divided.
    parts_here: number of parts that this machine does at once, or 1 if that is not known.
    seconds_of: function that takes a limit on the seconds of the whole run, and returns this
        part's.
    age: function that returns the seconds since the listing began, by the run directory's clock.
    """

    manifest: Manifest
    part: int
    owner: str
    tables: Tables
    divided: int
    parts_here: int
    seconds_of: Callable[[float], float]
    age: Callable[[], float]


@dataclass(frozen=True, slots=True)
class Kind:
    """A command that can be divided.

    schemas: schemas of the results' tables, by name.
    merge: function that returns the result of the whole run. It takes results by part, without the
        missing ones, and the result of `finish`; it opens no store.
    said: function that returns messages on what a part did not do.
    parts_fail: whether a part that is not settled ends with exit status 4. Else only `merge` does.
    finishes: whether the process of the last part calls `finish`.
    """

    command: str
    schemas: Mapping[str, pa.Schema]
    merge: Callable[[Manifest, Mapping[int, Record], Record | None], Result]
    said: Callable[[Manifest, RecordForm], Iterable[str]]
    parts_fail: bool = True
    finishes: bool = False


class Job(Protocol):
    """A command with its options and open stores.

    identity: values that must be equal in all parts of a run, by the name in messages: `store`,
        `destination` (URLs without secrets), and options such as `--checks`; compared as JSON.
    options: all other decisions of the lister for all parts.
    permissions: who may read the run directory.
    trust: who may write the run directory.
    Methods raise HicacheError.
    """

    kind: Kind
    identity: dict[str, Any]
    options: dict[str, Any]
    permissions: Permissions
    trust: Trust

    def publish(
        self, folder: Directory, parts: PartCount, on_listed: Callable[[int], None]
    ) -> Published:
        """List and plan for all parts; write the tables to a new folder.

        on_listed: takes the number of new objects.
        """

    def tables(self, folder: Directory, manifest: Manifest, part: int) -> Tables:
        """Return the tables that a part works on."""

    def work(self, given: PartInput, on_progress: Callable[[int, int], None]) -> StageResult:
        """Do the work of a part. on_progress: takes new and total bytes read or copied."""

    def finish(
        self, folder: Directory, manifest: Manifest, results: Mapping[int, Record]
    ) -> StageResult:
        """Finish the run after the results of all parts. folder: with the published tables."""


def kind_of(command: str, source: str) -> Kind:
    """Return a command's kind. Raises FormatError, naming `source`, for an unknown command."""
    module = MODULES.get(command)
    if module is None:
        raise FormatError(
            f"{source}: is a run of {command!r:.40}, which has no parts; give another run"
        )
    kind: Kind = import_module(module).KIND
    return kind
