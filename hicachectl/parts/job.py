"""The interface between a command whose work can be divided, and the runs that divide it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

from msgspec import Meta, Struct, to_builtins

from hicachectl.backends.capabilities import Archive, Leases, permissions_of, trust_of
from hicachectl.backends.urls import without_secrets
from hicachectl.formats.errors import FormatError, UsageError
from hicachectl.formats.profile import profile_to_mapping
from hicachectl.io.table_files import TableFile, read_table
from hicachectl.move.run_mark import RunMark
from hicachectl.pages.in_flight import ListingTime
from hicachectl.pages.published import Listing
from hicachectl.parts.directory import usage_errors
from hicachectl.parts.manifest import (
    FORM,
    LIST_AGAIN,
    MANIFEST,
    Manifest,
    Moment,
    Owner,
    Seconds,
)

if TYPE_CHECKING:
    import pyarrow as pa

    from hicachectl.backends.base import Store
    from hicachectl.backends.disk.directory import Directory, Trust
    from hicachectl.backends.disk.permissions import Permissions
    from hicachectl.formats.profile import Profile
    from hicachectl.move.migration import MigrationRequest
    from hicachectl.move.store_pair import CopyOptions
    from hicachectl.pages.selection import Selection
    from hicachectl.parts.manifest import Published
    from hicachectl.prewarming.page_plan import PrewarmRequest
    from hicachectl.results import Result

Tables = Mapping[str, Callable[[], "pa.Table"]]  # each call reads the table

# Number of parts, or a function of the number of objects.
PartCount = int | Callable[[int], int]

# Module of each command that can be divided. Each module has the command's `Kind` as KIND.
MODULES = {
    "migrate": "hicachectl.parts.migrate",
    "prewarm": "hicachectl.parts.prewarm",
    "verify": "hicachectl.parts.verify",
}
_DIGEST_DIGITS = 12


@dataclass(frozen=True, slots=True)
class StageResult:
    """Result of a part, or of `Job.finish`.

    facts: sums, flags and texts, as values for JSON.
    tables: tables by name, in the schemas of the job's kind.
    settled: whether the work is complete and nothing failed.
    """

    facts: dict[str, Any]
    tables: dict[str, pa.Table] = field(default_factory=dict)
    settled: bool = True


class RecordForm(Struct, kw_only=True):
    """A result in JSON.

    part: number of the part; -1 for the record of the whole run.
    host: host that did the work.
    ended_ns: end of the work in Unix nanoseconds, by the clock of `host`.
    seconds: duration of the work.
    tables: files beside the record, by table name.
    """

    form: Annotated[int, Meta(ge=FORM, le=FORM)]
    run: Owner
    part: int
    host: str
    ended_ns: Moment
    seconds: Seconds
    settled: bool
    facts: dict[str, Any]
    tables: dict[str, TableFile]


@dataclass(frozen=True, slots=True)
class Record:
    """A published record. Its tables are read when they are asked for.

    next_step: end of the message about a damaged record or table.
    opened: function that opens the record's directory.
    """

    form: RecordForm
    path: str
    next_step: str
    opened: Callable[[], Directory]
    schemas: Mapping[str, pa.Schema]

    @property
    def facts(self) -> dict[str, Any]:
        """The values of the result."""
        return self.form.facts

    def table(self, name: str) -> pa.Table:
        """Read a table. Raises FormatError if the table is missing or damaged."""
        file = self.form.tables.get(name)
        if file is None:
            raise FormatError(f"{self.path}: has no table {name!r}; {self.next_step}")
        with usage_errors(Path(self.path)), self.opened() as directory:
            return read_table(directory, file, self.schemas[name], self.next_step)


class PartInput(Struct, kw_only=True, frozen=True):
    """Input of one attempt at a part. Another attempt may be working at the same time.

    owner: 16 hex digits that mark the unfinished writes of all attempts at the part.
    divided: number by which limits of the whole run are divided.
    parts_here: number of parts that this machine does at once; 1 if the number is not known.
    spent: seconds since the driver of the whole run began; None without a driver.
    began: `time.monotonic()` at the start of the listing. It is computed from the age of the
        manifest by the clock of the run directory's file system.
    """

    manifest: Manifest
    part: int
    owner: str
    divided: int
    parts_here: int = 1
    spent: float | None = None
    began: float

    @property
    def listing_time(self) -> ListingTime:
        """Time at which the lister listed the store."""
        published = self.manifest.published
        return ListingTime(
            start_ns=published.listing_ns, duration_ns=published.duration_ns, began=self.began
        )

    def seconds_of(self, limit: float) -> float:
        """Return the part's share of a limit on the seconds of the whole run.

        With a driver, parts follow one another, so each part may use all seconds that are left.
        """
        return limit / self.divided if self.spent is None else max(limit - self.spent, 0)

    def share_of(self, limit: int | None) -> int | None:
        """Return the part's share of a limit of the whole run, at least 1; None without a limit."""
        return None if limit is None else max(1, limit // self.divided)

    def jobs(self, jobs: int | None, usual: int, *read: Store) -> int | None:
        """Return the number of jobs of the part; None for the command's default.

        jobs: number given by --jobs.
        usual: default number of one process.
        read: stores to be read. If their reads grant leases, the parts of a machine share the usual
            number. Together they then lease about as many objects as one process would.
        """
        shared = self.parts_here > 1 and any(isinstance(store, Leases) for store in read)
        if jobs is None and shared:
            return max(1, usual // self.parts_here)
        return jobs

    def options(self, options: CopyOptions, *read: Store) -> CopyOptions:
        """Return the options of a part that copies, with its share of the whole run's limits.

        read: stores to be read.
        """
        return replace(
            options,
            jobs=self.jobs(options.jobs, options.job_count, *read),
            bytes_per_second=self.share_of(options.bytes_per_second),
        )

    def sweep_attempts(self, *stores: Store) -> None:
        """Remove the unfinished writes of all attempts at the part.

        Call this when this attempt has done the work of the part. Killed attempts leave unfinished
        writes. Another attempt that is still at work loses its unfinished writes, too. This does no
        harm, because this attempt publishes its result first.
        """
        RunMark(self.owner, ended=(self.owner,)).put(*stores)


@dataclass(frozen=True, slots=True)
class Kind:
    """A command that can be divided.

    schemas: schemas of the results' tables, by name.
    merge: function that returns the result of the whole run. It takes the manifest, the results so
        far by part, and the result of `finish`. It opens no store.
    undone: function that returns messages about work that a part did not do.
    parts_fail: whether a part that is not settled ends with exit status 4. Otherwise only `merge`
        ends with this status.
    finishes: whether the process of the last part calls `finish`.
    """

    command: str
    schemas: Mapping[str, pa.Schema]
    merge: Callable[[Manifest, Mapping[int, Record], Record | None], Result]
    undone: Callable[[Manifest, RecordForm], Iterable[str]]
    parts_fail: bool = True
    finishes: bool = False


class Job(Protocol):
    """A command with its options and open stores.

    identity: values that must be equal in all parts of a run, compared as JSON. Their keys are the
        names in messages, such as `store` and `destination` (URLs without secrets), and `--checks`.
    options: further decisions of the lister, which hold for all parts.
    permissions: users who may read the run directory.
    trust: users who may write the run directory.
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
        """List and plan for all parts. Write the tables to a new folder.

        on_listed: takes the number of objects listed since the last call.
        """

    def tables(self, folder: Directory, manifest: Manifest, part: int) -> Tables:
        """Return the tables that a part works on."""

    def work(
        self, given: PartInput, tables: Tables, on_progress: Callable[[int, int], None]
    ) -> StageResult:
        """Do the work of a part.

        tables: the part's own tables, from `Job.tables`.
        on_progress: takes the bytes read or copied since the last call, and those of the whole
            part.
        """

    def finish(
        self, folder: Directory, manifest: Manifest, results: Mapping[int, Record]
    ) -> StageResult:
        """Finish the run after the results of all parts, if the kind of command does that.

        folder: directory of the published tables.
        """
        return StageResult({})


class CopyJob(Job):
    """A command that copies from one open store to another, in parts."""

    def __init__(
        self,
        source: Store,
        destination: Store,
        request: MigrationRequest | PrewarmRequest,
        options: Struct,
        identity: Mapping[str, Any],
    ) -> None:
        """Set the run's identity, which has the stores, the profiles and the given `identity`.

        Raises UsageError for a pack as destination.
        """
        if isinstance(destination, Archive):
            raise UsageError(
                f"{destination.url}: several processes cannot write one pack; give a directory as "
                "destination, or use one process"
            )
        self._source, self._destination = source, destination
        self._profile = profile = request.profile
        self.options = to_builtins(options)
        self.trust = trust_of(source, destination)
        self.permissions = permissions_of(source, listing=True)
        self.identity = {
            "source": without_secrets(source.url),
            "destination": without_secrets(destination.url),
            **profile_identity("profile", profile),
            **profile_identity("destination's profile", request.destination_profile or profile),
            **identity,
        }

    def _listing(self, manifest: Manifest) -> Listing:
        return listing_of(manifest, self._source.grammar, self._profile)


def urls_of(manifest: Manifest) -> tuple[str, str]:
    """Return the URLs of the source and the destination of a run that copies."""
    return str(manifest.identity.get("source")), str(manifest.identity.get("destination"))


def kind_of(command: str, source: str) -> Kind:
    """Return a command's kind. Raises FormatError, naming `source`, for an unknown command."""
    module = MODULES.get(command)
    if module is None:
        raise FormatError(
            f"{source}: is a run of {command!r:.40}, which has no parts; give another run"
        )
    kind: Kind = import_module(module).KIND
    return kind


def selection_identity(selection: Selection) -> dict[str, Any]:
    """Return the members of a run's identity for filters.

    An age such as 2h means another time in each process, so all parts use the lister's times.
    """
    members = {f"--{field.name}": getattr(selection, field.name) for field in fields(selection)}
    members |= {name: "given" for name in ("--since", "--before") if members[name] is not None}
    members["--state"] = list(members.pop("--states"))
    if (pages := selection.pages) is not None:
        text = json.dumps([pages.pages, pages.groups]).encode()
        digest = hashlib.sha256(text).hexdigest()[:_DIGEST_DIGITS]
        members["--pages"] = f"{len(pages.pages)} rows, SHA-256 {digest}"
    return members


def published_selection(selection: Selection) -> Selection:
    """Return a selection without its page list, which the lister need not publish.

    Each part reads the page list itself.
    """
    return replace(selection, pages=None)


def profile_identity(name: str, profile: Profile | None) -> dict[str, Any]:
    """Return the members of a run's identity for a profile, one for each field."""
    mapping = {} if profile is None else profile_to_mapping(profile)
    return {f"{name}: {field}": value for field, value in mapping.items()}


def listing_of(manifest: Manifest, grammar: str, profile: Profile | None) -> Listing:
    """Return the published listing without its objects. Raises FormatError."""
    try:
        return Listing.from_mapping(manifest.published.table, grammar, profile, MANIFEST)
    except FormatError as error:
        raise FormatError(f"{error}; {LIST_AGAIN}") from error
