"""Quarantines on disk.

A quarantine is a directory of runs, and each run is itself a store (`backends.runs`).

The files that describe a run are durable before the first object leaves the store. A process that
fills or restores a run holds a lock (flock) on the run's folder. Entries of a quarantine are opened
without following links, and their owners are checked (`backends.disk.directory`).
"""

from __future__ import annotations

import errno
import os
import stat
import time
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypedDict

import msgspec
import pyarrow as pa

from hicachectl.backends.base import keys_of
from hicachectl.backends.capabilities import (
    ClearRemovesAll,
    SideFiles,
    Trailed,
    jobs_of,
    present_ns,
)
from hicachectl.backends.concurrency import Concurrency
from hicachectl.backends.disk.directory import Directory
from hicachectl.backends.disk.io import OPEN_DIRECTORY, file_system_ns, write_bytes
from hicachectl.backends.disk.names import OWN_PREFIX
from hicachectl.backends.runs import begin_run, make_run_folder, open_run, open_run_folder, read_run
from hicachectl.formats.errors import (
    FormatError,
    StoreUnavailable,
    UnfinishedPackError,
    UntrustedError,
    UsageError,
)
from hicachectl.formats.forms import decode
from hicachectl.formats.quarantine import (
    FINDINGS_FILE,
    PACK_FILE,
    PURGED,
    RUN,
    RUN_FILE,
    SIDE,
    is_earlier_run,
)
from hicachectl.formats.wording import failed, no_quarantine, reason_of
from hicachectl.pages.census import column_sum
from hicachectl.pages.groups import PageGroups
from hicachectl.pages.scanning import take_inventory
from hicachectl.profiles.identities import markers_of
from hicachectl.text.jsontext import schema_of
from hicachectl.text.units import Ago

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from hicachectl.backends.base import Store
    from hicachectl.backends.runs import RunForm


_ROWS_AT_ONCE = 8192


class Quarantine:
    """Place of a quarantine. The quarantine need not exist.

    path: directory of the quarantine.
    only: name of a run if the given path is the folder of that run, else "".
    own: whether this is the store's default quarantine. It lies in the store's directory, and so
        moves with the store.
    """

    def __init__(self, path: Path | None = None, store: Store | None = None) -> None:
        """Use the quarantine at a path. Without a path, use the store's own quarantine.

        Links in the path are followed as far as a store's directory, but not below this directory.
        Raises UsageError if no path is given and the store has no quarantine of its own.
        """
        self._beside = store if isinstance(store, SideFiles) else None
        side = None if self._beside is None else self._beside.side_directory()
        if path is None and side is None:
            assert store is not None
            raise UsageError(no_quarantine(store.url, nameable=isinstance(store, ClearRemovesAll)))
        self.path: Path = path or side / "quarantine"  # type: ignore[operator]
        self.only = ""
        if names_run(self.path):
            self.path, self.only = self.path.absolute().parent, self.path.absolute().name
        self._below = None if side is None else _parts_below(self.path, side.parent)
        self.own = (
            side is not None
            and not isinstance(store, ClearRemovesAll)
            and self._below == (side.name, "quarantine")
        )

    @classmethod
    def of(cls, store: Store, quarantine: str | None) -> Self:
        """Return the quarantine for a repair of a store.

        quarantine: value of --quarantine; None for the store's own quarantine.
        Raises UsageError if the store has no quarantine of its own, or if the value names no place
        for a quarantine.
        """
        from hicachectl.backends.urls import parse_url

        if quarantine is None:
            return cls(store=store)
        url = parse_url(quarantine)
        path = Path(url.path)
        if not url.kind.directory or (path.exists() and not path.is_dir()):
            raise UsageError(f"--quarantine {quarantine}: not a local directory; give another path")
        if isinstance(store, ClearRemovesAll):
            store.refuse_inside(path, f"--quarantine {quarantine}")
        elif isinstance(store, SideFiles) and os.path.realpath(path) == os.path.realpath(
            store.side_directory().parent
        ):
            raise UsageError(
                f"--quarantine {quarantine}: is the store itself; give another directory"
            )
        if names_run(path):
            raise UsageError(
                f"--quarantine {quarantine}: is a run of a quarantine; give another directory"
            )
        return cls(path, store)

    @contextmanager
    def opened(self, *, writes: bool) -> Iterator[Directory]:
        """Open the directory until the block ends.

        writes: whether files will change.
        Raises UsageError if the directory is missing, and UntrustedError. An OSError becomes
        StoreUnavailable, also if the block raises it.
        """
        directory = None
        try:
            directory = self._open(writes=writes, makes=False)
            if directory is None:
                raise UsageError(
                    f"{self.path}: no such directory; give the quarantine that verify --repair "
                    "named"
                )
            yield directory
        except OSError as error:
            why = failed(self.path, "use the quarantine", error, "check its owner and permissions")
            raise StoreUnavailable(why) from error
        finally:
            if directory is not None:
                directory.close()

    def make(self) -> Directory:
        """Open the directory for writing. Create it if it is missing.

        Raises OSError, UntrustedError.
        """
        made = self._open(writes=True, makes=True)
        if made is None:
            raise FileNotFoundError(errno.ENOENT, "the quarantine cannot be created")
        return made

    def _open(self, *, writes: bool, makes: bool) -> Directory | None:
        side = self._beside
        if side is not None and self._below and self._below[0] == side.side_directory().name:
            here = side.open_side_directory(writes=writes, makes=makes)
            return here and here.descend(self._below[1:], makes=makes)
        trust = None if side is None else side.trust(writes=writes)
        outer, below = _split_at_side(self.path)
        found = Directory.at(outer, writes=writes, makes=makes, trust=trust)
        return found and found.descend(below, makes=makes)


def names_run(path: Path) -> bool:
    """Return whether a path is the folder of a run, even of an earlier form (`is_earlier_run`)."""
    if os.path.lexists(path / SIDE / RUN_FILE):
        return True
    with suppress(OSError):
        return is_earlier_run(path.absolute().name, os.listdir(path))  # noqa: PTH208
    return False


def _split_at_side(path: Path) -> tuple[Path, tuple[str, ...]]:
    """Split a path before the name SIDE, where the directory of a store ends.

    Return the part before SIDE, in which links are allowed, and the names from SIDE on. A path
    without SIDE has no such names.
    """
    parts = path.absolute().parts
    at = len(parts) - parts[::-1].index(SIDE) - 1 if SIDE in parts else len(parts)
    return Path(*parts[:at]), parts[at:]


def _parts_below(path: Path, store: Path) -> tuple[str, ...] | None:
    """Return the names of a path below the store's directory.

    Return None if the path does not lie in this directory.
    """
    try:
        here = store.stat()
    except OSError:
        return None
    path = path.absolute()
    for parent in path.parents:
        with suppress(OSError):
            if os.path.samestat(parent.stat(), here):
                return path.relative_to(parent).parts
    return None


class Run(NamedTuple):
    """A run of a quarantine.

    folder: the open folder of the run.
    form: content of its run.json.
    """

    name: str
    folder: Directory
    form: RunForm

    @property
    def is_purged(self) -> bool:
        """Whether a purge of the run has begun, so that none of its pages can be restored."""
        return self.name == self.form.run + PURGED


def run_folders(quarantine: Directory, only: str = "") -> list[str]:
    """Return the names of the folders in a quarantine, oldest first.

    only: name of the only folder to return; "" for all folders.
    Raises OSError, and UntrustedError if an entry is a link or a special file.
    """
    found = []
    for name, facts in quarantine.entries().items():
        if only in ("", name):
            quarantine.check(name, facts, any_owner=True)
            if stat.S_ISDIR(facts.st_mode):
                found.append(name)
    return found


@contextmanager
def opened_run(quarantine: Directory, name: str, *, writes: bool) -> Iterator[Run | str | None]:
    """Open a folder of a quarantine until the block ends.

    Yield the run. For a run of an earlier form, yield the path of its folder. Yield None if the
    folder has no run or has vanished.
    Raises OSError, UntrustedError, FormatError.
    """
    try:
        folder = open_run_folder(quarantine, name, writes=writes)
    except FileNotFoundError:  # another process may just have removed the run
        yield None
        return
    with folder:
        form = read_run(folder)
        if form is not None:
            if form.run != name.removesuffix(PURGED):
                raise FormatError(
                    f"{folder.path}: its {SIDE}/{RUN_FILE} is of the run {form.run}; give the "
                    "folder that name, or move it out of the quarantine"
                )
            yield Run(name, folder, form)
        else:
            yield folder.path if is_earlier_run(name, folder.entries()) else None


def earlier_remark(path: str) -> str:
    """Return the remark on a run of an earlier form."""
    return (
        f"{path}: left alone, because this quarantine run has an earlier form; restore the run "
        "with the hicachectl that made it, or delete the folder"
    )


class NewRun:
    """The run that a repair fills.

    `open` makes the run's folder and locks it; `close` ends the lock.
    unused: whether `close` removes the run with all copies, because no object has left the store.
    """

    def __init__(
        self, quarantine: Quarantine, store: Store, findings: pa.Table, suffixes: Collection[str]
    ) -> None:
        """Prepare the run. Make no folder yet.

        findings: findings for which the pages are removed.
        suffixes: suffixes of the keys of these pages.
        """
        self.unused = False
        self._quarantine = quarantine
        self._source = store
        self._findings = findings
        self._suffixes = suffixes
        self._parent: Directory | None = None
        self._run: Run | None = None
        self._store: Store | None = None

    @property
    def quarantine(self) -> str:
        """Path of the quarantine."""
        return str(self._quarantine.path)

    @property
    def path(self) -> str:
        """Path for messages: the path of the run, or of the quarantine before the run is made."""
        return str(self._quarantine.path) if self._run is None else self._run.folder.path

    def open(self) -> Store:
        """Return the run as a store to fill. At the first call, make the run.

        The files that describe the run are durable when this method returns. Raises OSError.
        """
        if self._store is None:
            begin_ns = present_ns(self._source, changes=True)
            parent = self._parent = self._quarantine.make()
            folder, name = self._make(parent)
            try:

                def describe(side: Directory, form: RunForm) -> None:
                    self._write_findings(side)
                    self._add_markers(folder, form)

                form = begin_run(folder, name, self._source, begin_ns, describe=describe)
                self._run = Run(name, folder, form)
                self._store = open_run(folder, form, create=True, jobs=jobs_of(self._source))
            except BaseException:
                self._run = None
                with folder, suppress(OSError):
                    remove_run(parent, name, folder)
                raise
        return self._store

    def _make(self, parent: Directory) -> tuple[Directory, str]:
        while True:
            stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
            name = f"{stamp}-{os.urandom(3).hex()}"
            # Until this process has locked the folder, another process may remove it as a leftover.
            with suppress(FileNotFoundError):
                made = make_run_folder(parent, name, self._source)
                if made.lock() and made.is_still(name, parent):
                    return made, name
                made.close()

    def _add_markers(self, folder: Directory, form: RunForm) -> None:
        known = [one for one in markers_of(self._source) if one.suffix in self._suffixes]
        if known:
            with open_run(folder, form) as store:
                assert isinstance(store, Trailed)
                store.add_markers(known)

    def _write_findings(self, side: Directory) -> None:
        encode = msgspec.json.encode
        descriptor = side.create(FINDINGS_FILE)
        try:
            for batch in self._findings.to_batches(max_chunksize=_ROWS_AT_ONCE):
                lines = b"".join(encode(row) + b"\n" for row in batch.to_pylist())
                write_bytes(memoryview(lines), descriptor)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        side.sync()

    def finish(self) -> None:
        """Make the copied objects durable. Afterwards, a run in a pack takes no more objects.

        Raises StoreUnavailable.
        """
        if self._store is not None and self._store.traits.append_only:
            self._store.close()

    def close(self) -> None:
        """Unlock the run. Remove the run first if it is unused or has no object. Raises OSError."""
        try:
            if self._store is not None:
                self._store.close()
            if self._run is not None and self._parent is not None:
                if self.unused:
                    remove_run(
                        self._parent,
                        self._run.name,
                        self._run.folder,
                        jobs=jobs_of(self._source),
                    )
                else:
                    remove_if_empty(self._parent, self._run, jobs_of(self._source))
        finally:
            for directory in (None if self._run is None else self._run.folder, self._parent):
                if directory is not None:
                    directory.close()


def remove_if_empty(quarantine: Directory, run: Run, jobs: int | None) -> None:
    """Remove a locked run if it has no objects. Unfinished copies do not count as objects.

    jobs: see `open_run`.
    Raises OSError, StoreUnavailable.
    """
    try:
        with open_run(run.folder, run.form, jobs=jobs) as store:
            keys = (key for batch in store.scan(("nbytes",)) for key in keys_of(batch))
            empty = all(key.startswith(OWN_PREFIX) for key in keys)
            # A link in the run is no object, but the store has a remark about it. Keep the run.
            empty &= not store.remarks
    except UnfinishedPackError:
        empty = not run.folder.has(PACK_FILE)
    if empty:
        remove_run(quarantine, run.name, run.folder)


def remove_run(
    quarantine: Directory, name: str, folder: Directory, *, jobs: int | None = None
) -> None:
    """Remove a locked run without following links. Remove its run.json last.

    jobs: see `open_run`.
    Raises OSError.
    """
    # While run.json exists, the folder still counts as a run, so a later purge can finish a removal
    # that was interrupted.
    with closing(Concurrency(jobs)) as concurrency:
        _empty(folder.descriptor, concurrency, keep=SIDE)
    with suppress(FileNotFoundError):
        with folder.directory(SIDE) as side:
            _empty(side.descriptor, Concurrency(1), keep=RUN_FILE)
            with suppress(FileNotFoundError):
                side.remove(RUN_FILE)
        folder.remove_directory(SIDE)
    quarantine.remove_directory(name)
    quarantine.sync()


def remove_leftover(quarantine: Directory, name: str) -> None:
    """Remove a folder that a killed process left without a run.json. Raises OSError.

    The process was killed before it wrote run.json, or after it removed this file. A folder with a
    name unlike those of runs, or with entries besides SIDE, stays.
    """
    if not RUN.fullmatch(name.removesuffix(PURGED)):
        return
    with suppress(FileNotFoundError), quarantine.directory(name, any_owner=True) as folder:
        if not set(folder.entries()) - {SIDE} and folder.lock():
            remove_run(quarantine, name, folder)


def _empty(directory: int, concurrency: Concurrency, keep: str = "") -> None:
    """Remove all entries of an open directory, and the content of its folders.

    keep: name of an entry of the directory that stays; "" to keep none.
    """
    names = [name for name in os.listdir(directory) if name != keep]

    def remove(start: int, stop: int) -> None:
        for name in names[start:stop]:
            try:
                os.unlink(name, dir_fd=directory)
            except IsADirectoryError:
                inner = os.open(name, OPEN_DIRECTORY | os.O_NOFOLLOW, dir_fd=directory)
                try:
                    _empty(inner, concurrency)
                finally:
                    os.close(inner)
                os.rmdir(name, dir_fd=directory)

    concurrency.each("remove", remove, len(names))


class Reason(msgspec.Struct):
    """The members of a line of findings.jsonl that `restore` and `quarantine list` show."""

    code: str
    page: str | None = None
    group: str | None = None


def read_findings(folder: Directory) -> Iterator[Reason]:
    """Yield the findings for which the pages of a run were removed.

    Raises OSError, UntrustedError, FormatError.
    """
    with folder.directory(SIDE) as side:
        try:
            descriptor = side.open_file(FINDINGS_FILE)
        except FileNotFoundError:
            return
    decoder = msgspec.json.Decoder(Reason)
    with os.fdopen(descriptor, "rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                yield decode(decoder, line)
            except FormatError as error:
                raise FormatError(
                    f"{folder.path}/{SIDE}/{FINDINGS_FILE}: line {number} is not a finding "
                    f"({str(error)[:200]}); move the file away to go on without it"
                ) from error


# States of a run. A kept run can be restored or purged. A half-purged run can only be purged.
KEPT, HALF_PURGED, BUSY, EARLIER, UNREADABLE = (
    "kept", "half-purged", "busy", "earlier-form", "unreadable",
)  # fmt: skip
PURGED_RUN, WOULD_PURGE, FAILED = "purged", "would-purge", "failed"


class RunRow(TypedDict):
    """Row for a run. A value that is unknown is None."""

    run: str
    removed: float | None
    store: str | None
    groups: int | None
    objects: int | None
    nbytes: int | None
    codes: list[str]
    state: str


class RunsDocument(msgspec.Struct, kw_only=True):
    """Document of `quarantine list`."""

    quarantine: str
    count: int
    pages: int
    objects: int
    bytes: int
    runs: list[RunRow] | None = None


class PurgeDocument(msgspec.Struct, kw_only=True):
    """Document of `quarantine purge`."""

    quarantine: str
    count: int
    pages: int
    objects: int
    bytes: int
    failed: int
    complete: bool = True
    stopped_by: str | None = None
    dry_run: bool
    runs: list[RunRow] | None = None


RUNS = schema_of(RunRow)


@dataclass(frozen=True, slots=True)
class PurgeReport:
    """Report on runs that were listed or purged.

    rows: a row for each run, in the columns of `RUNS` or `parts.runs.RUN_DIRECTORIES`.
    failures: (path of the run, message) for each run that could not be purged.
    left: messages about runs that were left alone.
    remarks: messages about runs that stay because of the options.
    counts: counts that become further members of the document.
    """

    rows: pa.Table
    failures: tuple[tuple[str, str], ...] = ()
    left: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    counts: dict[str, int] = field(default_factory=dict)


def list_runs(quarantine: Path, *, jobs: int | None = None) -> PurgeReport:
    """List the runs of a quarantine, oldest first.

    A run is unreadable if its run.json or findings.jsonl is damaged or a link. It is unreadable,
    too, if the owner of the run or of one of these files is not trusted.
    jobs: see `open_run`.
    Raises UsageError if the quarantine is missing. Raises UntrustedError and StoreUnavailable.
    """
    place, rows, left = Quarantine(quarantine), list[dict[str, Any]](), list[str]()
    with place.opened(writes=False) as directory:
        for name in run_folders(directory, place.only):
            try:
                with opened_run(directory, name, writes=False) as run:
                    if run is not None:
                        rows.append(_row(name, run, left, jobs))
            except (FormatError, UntrustedError) as error:
                left.append(str(error))
                rows.append(_empty_row(name, UNREADABLE))
    return PurgeReport(pa.Table.from_pylist(rows, schema=RUNS), left=tuple(left))


def purge_runs(
    quarantine: Path, before: float, *, dry_run: bool = False, jobs: int | None = None
) -> PurgeReport:
    """Delete the runs that began before a time, and the folders that killed processes left.

    Runs with an interrupted purge are deleted, too, if they began before this time. Busy runs
    and runs of an earlier form stay.
    before: Unix seconds. An `Ago` is measured by the clock of the quarantine's file system, except
        in a dry run.
    jobs: see `open_run`.
    Raises the errors of `list_runs`. If a run is unreadable, raises FormatError or UntrustedError
    before the first change.
    """
    place, rows, left = Quarantine(quarantine), list[dict[str, Any]](), list[str]()
    failures: list[tuple[str, str]] = []
    with place.opened(writes=not dry_run) as directory:
        if isinstance(before, Ago) and not dry_run:
            before = before.by(file_system_ns(directory.descriptor))
        for name in run_folders(directory, place.only):
            with opened_run(directory, name, writes=False) as run:
                if run is not None:
                    _row(name, run, [], jobs)  # an unreadable run raises before the first change
        for name in run_folders(directory, place.only):
            with opened_run(directory, name, writes=not dry_run) as run:
                if run is None:
                    if not dry_run:
                        remove_leftover(directory, name)
                    continue
                row = _row(name, run, left, jobs)
                if row["state"] not in (KEPT, HALF_PURGED):
                    rows.append(row)
                elif isinstance(run, Run) and run.form.begin < before:
                    rows.append(row)
                    row["state"] = WOULD_PURGE
                    if not dry_run:
                        row["state"] = _purged(directory, run, failures, jobs)
    return PurgeReport(pa.Table.from_pylist(rows, schema=RUNS), tuple(failures), tuple(left))


def _purged(
    quarantine: Directory, run: Run, failures: list[tuple[str, str]], jobs: int | None
) -> str:
    """Delete a locked run. Return its new state.

    First rename the run. The new name shows that the run can no longer be restored. If this purge
    is interrupted, the next purge completes the deletion.
    """
    try:
        name = run.form.run + PURGED
        if not run.is_purged:
            quarantine.rename(run.name, name)
            quarantine.sync()
        remove_run(quarantine, name, run.folder, jobs=jobs)
    except OSError as error:
        why = f"cannot be purged: {reason_of(error)}; check its files, then run again"
        failures.append((run.folder.path, why))
        return FAILED
    return PURGED_RUN


def _row(name: str, run: Run | str, left: list[str], jobs: int | None) -> dict[str, Any]:
    """Lock a run and return its row. If another process holds the lock, the run is busy.

    run: the run, or the path of a run of an earlier form.
    left: list to which a remark is added if the run is busy or of an earlier form.
    """
    if isinstance(run, str):
        left.append(earlier_remark(run))
        return _empty_row(name, EARLIER)
    row = _empty_row(run.form.run, HALF_PURGED if run.is_purged else KEPT)
    row |= {"removed": run.form.begin, "store": run.form.store}
    if not run.folder.lock():
        left.append(
            f"{run.folder.path}: another process is working on it; run again after it has ended"
        )
        return row | {"state": BUSY}
    row["codes"] = sorted({reason.code for reason in read_findings(run.folder)})
    counts = dict.fromkeys(("groups", "objects", "nbytes"), 0)
    with suppress(UnfinishedPackError), open_run(run.folder, run.form, jobs=jobs) as store:
        inventory = take_inventory(store)
        counts["groups"] = len(PageGroups(inventory))
        counts["objects"] = len(inventory.objects)
        counts["nbytes"] = column_sum(inventory.objects.column("nbytes")) or 0
    return row | counts


def _empty_row(name: str, state: str) -> dict[str, Any]:
    return {"run": name, "codes": [], "state": state}
