"""List run directories, describe a run, and delete old runs.

A purge first renames the directory of a run, so that no process continues the run. It removes only
files of a run. It removes the manifest last, because the manifest names the stores that decide
whose files are trusted.
"""

from __future__ import annotations

import re
import stat
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from shlex import quote
from typing import TYPE_CHECKING, Any, TypedDict

import msgspec
import pyarrow as pa

from hicachectl.backends.disk.directory import Directory
from hicachectl.backends.disk.io import Closing, file_system_ns
from hicachectl.formats.documents import storable
from hicachectl.formats.errors import FormatError, HicacheError, UntrustedError, UsageError
from hicachectl.formats.quarantine import PURGED
from hicachectl.formats.wording import reason_of
from hicachectl.move.quarantine import (
    BUSY,
    FAILED,
    HALF_PURGED,
    PURGED_RUN,
    UNREADABLE,
    WOULD_PURGE,
    PurgeReport,
)
from hicachectl.parts.directory import LISTING_PREFIX, PARTS, STORES, RunDirectory, usage_errors
from hicachectl.parts.job import kind_of
from hicachectl.parts.manifest import MANIFEST
from hicachectl.parts.results import FINISH, MERGED_FILE, is_finished, result_of, spans
from hicachectl.text.jsontext import schema_of
from hicachectl.text.units import Ago, counted

if TYPE_CHECKING:
    import os
    from collections.abc import Generator, Iterable, Iterator
    from pathlib import Path

    from hicachectl.parts.manifest import Manifest

# States of a run directory. Further states come from `move.quarantine`.
LISTING, UNFINISHED, FINISHED, MERGED = "listing", "unfinished", "finished", "merged"
# States of a part.
DONE, NOT_COMPLETE, MISSING, DAMAGED = "done", "not-complete", "missing", "damaged"

_TEMPORARY = r"\.hicachectl-[0-9a-f-]+\.tmp"
_ATTEMPT = r"(\.json|-[0-9a-f]{16}-\w+\.parquet)"
_LISTING_FOLDER = rf"{LISTING_PREFIX}[0-9a-f]{{16}}"
_FOLDERS = re.compile(rf"{PARTS}|{_LISTING_FOLDER}")
# Files in a run directory, by their paths there.
_FILES = re.compile(
    rf"{re.escape(MANIFEST)}|{re.escape(MERGED_FILE)}|{FINISH}{_ATTEMPT}|{_TEMPORARY}"
    rf"|{PARTS}/([0-9]{{5}}{_ATTEMPT}|{_TEMPORARY})"
    rf"|{_LISTING_FOLDER}/(\w[\w.-]*\.parquet|{_TEMPORARY})",
    re.ASCII,
)


class RunDirectoryRow(msgspec.Struct, kw_only=True):
    """Row of a run directory. A value that is unknown is None."""

    run: str
    command: str | None
    stores: list[str]
    listed: float | None
    parts: int | None
    done: int | None
    changed: float | None
    nbytes: int | None
    state: str


class RunDirectoriesDocument(msgspec.Struct, kw_only=True):
    """Document of `runs list`."""

    directory: str
    count: int
    bytes: int
    runs: list[RunDirectoryRow] | None = None


class RunDirectoryPurge(msgspec.Struct, kw_only=True):
    """Document of `runs purge`."""

    directory: str
    count: int
    bytes: int
    unmerged: int = 0
    failed: int
    complete: bool = True
    stopped_by: str | None = None
    dry_run: bool
    runs: list[RunDirectoryRow] | None = None


class PartRow(TypedDict):
    """Row of a part. For a part without a result, host, ended and seconds are None."""

    part: int
    host: str | None
    ended: float | None
    seconds: float | None
    state: str


class RunStatusDocument(RunDirectoryRow, kw_only=True):
    """Document of `runs status`."""

    missing_parts: list[int]
    next: str
    results: list[PartRow] | None = None


RUN_DIRECTORIES = schema_of(RunDirectoryRow)
PART_ROWS = schema_of(PartRow)


@dataclass(frozen=True, slots=True)
class RunStatus:
    """Description of a run and its parts.

    rows: a row for each part, in the columns of `PART_ROWS`.
    remarks: messages about damaged results of parts.
    """

    document: RunStatusDocument
    rows: pa.Table
    remarks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _OpenRun(Closing):
    """A run directory. It is open unless it is unreadable.

    name: name of the directory in its parent.
    path: path of the directory for messages.
    row: members of a `RunDirectoryRow`.
    run: the open directory; None if it is unreadable.
    manifest: manifest of the run; None if it is not published or is unreadable.
    error: why the directory is unreadable; None if it is readable.
    """

    name: str
    path: Path
    row: dict[str, Any]
    run: RunDirectory | None = None
    manifest: Manifest | None = None
    error: HicacheError | None = None

    def close(self) -> None:
        """Close the directory, which ends a lock."""
        if self.run is not None:
            self.run.close()


def list_runs(path: Path) -> PurgeReport:
    """List the run directories in a directory. If the path names a run, list only this run.

    Raises UsageError if the directory cannot be read.
    """
    rows, left = list[dict[str, Any]](), list[str]()
    with (
        _directories(path, writes=False) as (parent, names),
        closing(_runs(parent, names, left, writes=False)) as runs,
    ):
        rows.extend(opened.row for opened in runs)
    return PurgeReport(_table(rows), left=tuple(left))


def run_status(path: Path) -> RunStatus:
    """Describe a run and each of its parts.

    Raises UsageError if the path names no run; FormatError, UsageError or UntrustedError if the run
    is unreadable.
    """
    with usage_errors(path), Directory.named(str(path), writes=False) as folder:
        opened = _described(folder, path.absolute().name, path, writes=False)
    if opened is None:
        raise UsageError(f"{path}: has no {MANIFEST}; run part 0 first, or check the path")
    if opened.error is not None:
        raise opened.error
    remarks: list[str] = []
    with opened:
        rows = list(_parts(opened, remarks))
    missing = [row["part"] for row in rows if row["state"] == MISSING]
    members = {**opened.row, "run": storable(str(path)), "missing_parts": missing}
    document = RunStatusDocument(**members, next=_next_step(path, opened.row, missing))
    return RunStatus(document, pa.Table.from_pylist(rows, schema=PART_ROWS), tuple(remarks))


def purge_runs(
    path: Path, before: float, *, unmerged: bool = False, dry_run: bool = False
) -> PurgeReport:
    """Delete the merged runs in which nothing has changed since a time. Complete earlier purges.

    before: Unix seconds. An `Ago` is measured by the clock of the directory's file system, except
        in a dry run.
    unmerged: whether to delete runs that were not merged, too.
    Raises UsageError if the directory cannot be read.
    """
    rows, left, failures = list[dict[str, Any]](), list[str](), list[tuple[str, str]]()
    kept = 0
    with (
        _directories(path, writes=not dry_run) as (parent, names),
        closing(_runs(parent, names, left, writes=not dry_run)) as runs,
    ):
        if isinstance(before, Ago) and not dry_run:
            before = before.by(file_system_ns(parent.descriptor))
        for opened in runs:
            state, changed = opened.row["state"], opened.row["changed"]
            is_old = changed is not None and changed < before
            if state == UNREADABLE or not (is_old or state == HALF_PURGED):
                continue
            if state not in (HALF_PURGED, MERGED) and not unmerged:
                kept += 1
                continue
            state = WOULD_PURGE if dry_run else _purged(parent, opened, failures, left)
            rows.append({**opened.row, "state": state})
    return PurgeReport(
        _table(rows),
        tuple(failures),
        tuple(left),
        remarks=(f"{path}: {counted(kept, 'run')} not merged, and kept; see --unmerged",)[:kept],
        counts={"unmerged": kept},
    )


@contextmanager
def _directories(path: Path, *, writes: bool) -> Iterator[tuple[Directory, list[Path]]]:
    """Open a directory of runs. Yield this directory, and the paths of the directories in it.

    If the path names a run, yield the directory above the run, and only the path of the run.
    An OSError becomes UsageError, also if the block raises it.
    """
    with usage_errors(path), Directory.named(str(path), writes=writes) as here:
        entries = here.entries()
        if _is_run(path.absolute().name, entries):
            real = path.resolve()
            with Directory.named(str(real.parent), writes=writes) as parent:
                yield parent, [real]
            return
        names = [name for name, facts in entries.items() if stat.S_ISDIR(facts.st_mode)]
        # Complete earlier purges first, because the name of a purged run may be in use again.
        yield here, [path / name for name in sorted(names, key=lambda n: not n.endswith(PURGED))]


def _is_run(name: str, entries: Iterable[str]) -> bool:
    """Return whether a directory is the directory of a run, by its name and its entries."""
    names = list(entries)
    if MANIFEST in names or any(re.fullmatch(_LISTING_FOLDER, one) for one in names):
        return True
    return name.endswith(PURGED) and all(one == PARTS or _FILES.fullmatch(one) for one in names)


def _runs(
    parent: Directory, paths: Iterable[Path], left: list[str], *, writes: bool
) -> Generator[_OpenRun, None, None]:
    """Yield each run directory. It is open until the next one is requested.

    left: list to which messages about unreadable directories are added.
    """
    for path in paths:
        try:
            folder = parent.directory(path.name, any_owner=True)
        except FileNotFoundError:  # another process may just have removed the run
            continue
        except PermissionError as error:
            left.append(f"{path}: cannot be read: {reason_of(error)}; run as its owner")
            continue
        with folder:
            opened = _described(folder, path.name, path, writes=writes)
        if opened is not None:
            with opened:
                if opened.error is not None:
                    left.append(str(opened.error))
                yield opened


def _described(folder: Directory, name: str, path: Path, *, writes: bool) -> _OpenRun | None:
    """Return a run directory, which is open unless it is unreadable; None for another directory."""
    if not _is_run(name, folder.entries()):
        return None
    row: dict[str, Any] = dict.fromkeys(RunDirectoryRow.__annotations__)
    row |= {"run": storable(name), "stores": [], "state": UNREADABLE}
    run = None
    try:
        run = RunDirectory.of(folder, path, writes=writes, any_release=True)
        manifest = run.manifest(any_release=True)
        row["state"] = _fill(row, run, manifest)
        if name.endswith(PURGED):
            row["state"] = HALF_PURGED
    except (FormatError, UntrustedError, UsageError) as error:
        if run is not None:
            run.close()
        return _OpenRun(name, path, row, error=error)
    return _OpenRun(name, path, row, run, manifest)


def _fill(row: dict[str, Any], run: RunDirectory, manifest: Manifest | None) -> str:
    """Fill the row of a run, and return its state."""
    with usage_errors(run.path):
        facts = [facts for *_, facts in _entries(run.directory)]
    of_files = [one for one in facts if stat.S_ISREG(one.st_mode)]
    row["nbytes"] = sum(one.st_size for one in of_files)
    # Until a lister writes a file, the run has only the lister's folder.
    row["changed"] = max((one.st_mtime for one in of_files or facts), default=None)
    if manifest is None:
        return LISTING
    kind = kind_of(manifest.command, str(run.path))
    stores = (manifest.identity.get(member) for member in STORES)
    row |= {
        "command": manifest.command,
        "stores": [storable(str(store)) for store in stores if store is not None],
        "listed": manifest.published.listing_ns / 1e9,
        "parts": manifest.parts,
        "done": len(run.parts_with_result() & set(range(manifest.parts))),
    }
    if not is_finished(run, manifest, kind):
        return UNFINISHED
    with usage_errors(run.path):
        return MERGED if run.directory.has(MERGED_FILE) else FINISHED


def _entries(directory: Directory) -> Iterator[tuple[Directory, str, str, os.stat_result]]:
    """Yield the entries of a run directory and of its folders. A folder comes after its entries.

    For each entry, yield the open directory that has it, its name there, its path in the run
    directory and its stat.
    """
    for name, facts in directory.entries().items():
        if stat.S_ISDIR(facts.st_mode) and _FOLDERS.fullmatch(name):
            with suppress(FileNotFoundError), directory.directory(name) as folder:
                for inner, facts_of_inner in folder.entries().items():
                    yield folder, inner, f"{name}/{inner}", facts_of_inner
        yield directory, name, name, facts


def _parts(opened: _OpenRun, remarks: list[str]) -> Iterator[PartRow]:
    """Yield the row of each part.

    remarks: list to which messages about damaged results are added.
    """
    run, manifest = opened.run, opened.manifest
    if run is None or manifest is None:
        return
    kind = kind_of(manifest.command, str(run.path))
    have = run.parts_with_result()
    for part in range(manifest.parts):
        row = PartRow(part=part, host=None, ended=None, seconds=None, state=MISSING)
        if part in have:
            try:
                form = result_of(run, manifest, kind, part).form
            except (FormatError, UntrustedError) as error:
                remarks.append(str(error))
                row["state"] = DAMAGED
            else:
                row |= {"host": storable(form.host), "ended": form.ended_ns / 1e9}
                row |= {"seconds": form.seconds, "state": DONE if form.settled else NOT_COMPLETE}
        yield row


def _next_step(path: Path, row: dict[str, Any], missing: list[int]) -> str:
    run = quote(storable(str(path)))
    if row["state"] == LISTING:
        return "part 0 lists the store; if its process has ended, run part 0 again"
    if row["state"] == HALF_PURGED:
        return f"hicachectl runs purge {run} --before 0s --yes"
    if missing:
        return (
            f"run {spans(missing)} of {row['parts']} with --run {run} and the other parts' options"
        )
    if row["state"] == UNFINISHED:
        return f"run any part again with --run {run}, which finishes the run"
    return f"hicachectl merge {run}{' --again' if row['state'] == MERGED else ''}"


def _purged(
    parent: Directory, opened: _OpenRun, failures: list[tuple[str, str]], left: list[str]
) -> str:
    """Delete a run. Return its new state.

    failures, left: lists to which messages are added; see `PurgeReport`.
    """
    assert opened.run is not None  # an unreadable run is not deleted
    directory, name = opened.run.directory, opened.name
    try:
        if not directory.lock() or not directory.is_still(name, parent):
            left.append(
                f"{opened.path}: another process is working on it; run again after it has ended"
            )
            return BUSY
        _refuse_other_entries(directory)
        if not name.endswith(PURGED):
            name += PURGED
            parent.rename(opened.name, name)
            parent.sync()
        _remove(parent, name, directory)
    except OSError as error:
        why = f"cannot be purged: {reason_of(error)}; check its files, then run again"
        failures.append((str(opened.path), why))
        return FAILED
    except (UsageError, UntrustedError) as error:
        failures.append((str(opened.path), f"not purged: {error}"))
        return FAILED
    return PURGED_RUN


def _is_of_run(path: str, facts: os.stat_result) -> bool:
    """Return whether an entry is a file or folder of a run, by its path in the run directory."""
    known = _FILES if stat.S_ISREG(facts.st_mode) else _FOLDERS
    return known.fullmatch(path) is not None


def _refuse_other_entries(directory: Directory) -> None:
    """Raise UsageError for an entry that is no file or folder of a run.

    Also raises OSError and UntrustedError.
    """
    for folder, name, path, facts in _entries(directory):
        folder.check(name, facts)
        if not _is_of_run(path, facts):
            raise UsageError(
                f"{directory.path}/{path}: is not a file of a run; move it away, then run again"
            )


def _remove(parent: Directory, name: str, directory: Directory) -> None:
    """Remove a run directory and its entries. Remove the manifest last.

    Raises OSError, for example if another process has added a file since the check.
    """
    for folder, entry, path, facts in _entries(directory):
        if path != MANIFEST and _is_of_run(path, facts):
            remove = folder.remove_directory if stat.S_ISDIR(facts.st_mode) else folder.remove
            with suppress(FileNotFoundError):
                remove(entry)
    with suppress(FileNotFoundError):
        directory.remove(MANIFEST)
    parent.remove_directory(name)
    parent.sync()


def _table(rows: list[dict[str, Any]]) -> pa.Table:
    return pa.Table.from_pylist(rows, schema=RUN_DIRECTORIES)
