"""List the runs of a quarantine, and delete old ones for good. No store is opened."""

from __future__ import annotations

import stat
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.backends.disk.clock import file_system_ns
from hicachectl.backends.disk.directory import Directory
from hicachectl.formats.errors import (
    FormatError,
    StoreUnavailable,
    UntrustedError,
    UsageError,
)
from hicachectl.formats.quarantine import COPYING, DONE, FOLDER, PURGED, RECORD, RUN
from hicachectl.formats.wording import failed, reason_of
from hicachectl.move.quarantine import batches, is_purged, runs, sweep
from hicachectl.text.units import Ago

if TYPE_CHECKING:
    from collections.abc import Iterator

# States of a run. Only kept runs can be restored; kept and half purged runs can be purged.
KEPT, HALF_PURGED, UNFINISHED, BUSY, UNRECORDED, UNREADABLE = (
    "kept", "half-purged", "unfinished", "busy", "unrecorded", "unreadable",
)  # fmt: skip
PURGED_RUN, WOULD_PURGE, FAILED = "purged", "would-purge", "failed"
_SIDE = ".hicachectl"

RUNS = pa.schema(
    [
        ("run", pa.string()),
        ("removed", pa.float64()),  # Unix seconds of the newest record; null without records
        ("store", pa.string()),
        ("groups", pa.int64()),
        ("objects", pa.int64()),
        ("nbytes", pa.int64()),
        ("codes", pa.list_(pa.string())),  # findings that caused the removals
        ("state", pa.string()),
    ]
)


@dataclass(frozen=True, slots=True)
class PurgeReport:
    """Runs, as `RUNS`. failures: (run, message). unrecorded: folders that stay.

    unreadable: why the contents of some runs are not known.
    """

    rows: pa.Table
    failures: tuple[tuple[str, str], ...] = ()
    unrecorded: tuple[str, ...] = ()
    unreadable: tuple[str, ...] = ()


@dataclass(slots=True)
class _Found:
    """A run's row, and its folders with objects but no record."""

    row: dict[str, Any]
    unrecorded: list[str] = field(default_factory=list)

    def is_old(self, before: float) -> bool:
        removed = self.row["removed"]
        return removed is not None and removed < before


def list_runs(quarantine: Path) -> PurgeReport:
    """List the runs of a quarantine, oldest first.

    A run is unreadable if a record is damaged, an entry is a link, or its owner is not trusted.
    Raises UsageError if the quarantine is missing, UntrustedError, StoreUnavailable.
    """
    unreadable: list[str] = []
    with _opened(quarantine, writes=False) as directory:
        found = [each for _, _, each in _described(directory, unreadable)]
        return replace(_report(found), unreadable=tuple(unreadable))


def purge_runs(quarantine: Path, before: float, *, dry_run: bool = False) -> PurgeReport:
    """Delete the runs whose last page was removed before a time; complete interrupted purges.

    Unfinished and busy runs, and folders without a record, stay. before: Unix seconds; an `Ago`
    counts by the clock of the quarantine's file system, unless this is a dry run. Raises as
    `list_runs`; also FormatError and UntrustedError for an unreadable run, before any change.
    """
    done: list[_Found] = []
    failures: list[tuple[str, str]] = []
    with _opened(quarantine, writes=not dry_run) as directory:
        if isinstance(before, Ago) and not dry_run:
            before = before.by(file_system_ns(directory.descriptor))
        for _ in _described(directory):
            pass  # all entries are checked before anything is changed
        for name, run, found in _described(directory):
            if found.row["state"] in (KEPT, HALF_PURGED) and found.is_old(before):
                found.row["state"] = WOULD_PURGE
                if not dry_run:
                    try:
                        _purge(run, directory, name)
                        found.row["state"] = PURGED_RUN
                    except OSError as error:
                        found.row["state"] = FAILED
                        why = (
                            f"cannot be purged: {reason_of(error)}; check its files, then run again"
                        )
                        failures.append((run.path, why))
            elif found.row["state"] in (KEPT, HALF_PURGED):
                continue
            done.append(found)
    return _report(done, failures)


def _report(found: list[_Found], failures: list[tuple[str, str]] | None = None) -> PurgeReport:
    unrecorded = [folder for each in found for folder in each.unrecorded]
    rows = pa.Table.from_pylist([each.row for each in found], schema=RUNS)
    return PurgeReport(rows, tuple(failures or ()), tuple(unrecorded))


def _purge(run: Directory, parent: Directory, name: str) -> None:
    """Delete a locked run whose batches are done; the record that marks it goes last."""
    if not is_purged(run):
        next(batches(run)).mark_purged()
    for suffix in (DONE, PURGED):
        for batch in batches(run, lambda found, wanted=suffix: found == wanted):  # type: ignore[misc]
            batch.discard()
    sweep(run, parent, name)


def _described(
    directory: Directory, unreadable: list[str] | None = None
) -> Iterator[tuple[str, Directory, _Found]]:
    """Yield name and directory of each run with records or objects, locked unless busy.

    unreadable: takes the reasons of runs that cannot be read; None: raise FormatError or
    UntrustedError.
    """
    for name, run in runs(directory):
        ours = run.lock()
        label = name or Path(run.path).name
        try:
            found = _describe(run, label)
        except (FormatError, UntrustedError) as error:
            if unreadable is None:
                raise
            unreadable.append(str(error))
            yield name, run, _Found({"run": label, "codes": [], "state": UNREADABLE})
            continue
        if not ours:
            found.row["state"] = BUSY
        if found.row["removed"] is not None or found.unrecorded or (not ours and RUN.match(name)):
            yield name, run, found


def _describe(run: Directory, name: str) -> _Found:
    groups = objects = nbytes = 0
    removed, store, unfinished = None, None, False
    codes: set[str] = set()
    for batch in batches(run):
        record = batch.record
        held = batch.held()
        groups += len(record.groups)
        objects += len(held)
        nbytes += sum(held.values())
        removed = max(removed or 0.0, record.began)
        store = record.store
        unfinished |= not batch.done
        found = pc.unique(pc.struct_field(pc.list_flatten(record.groups.findings), "code"))
        codes.update(filter(None, found.to_pylist()))
    state = UNFINISHED if unfinished else HALF_PURGED if is_purged(run) else KEPT
    row = {
        "run": name,
        "removed": removed,
        "store": store,
        "groups": groups,
        "objects": objects,
        "nbytes": nbytes,
        "codes": sorted(codes),
        "state": UNRECORDED if removed is None else state,
    }
    return _Found(row, list(_unrecorded(run)))


def _unrecorded(run: Directory) -> Iterator[str]:
    """Yield the paths of folders with objects that may be the only copies, as `sweep` keeps."""
    entries = run.checked_entries()
    recorded = {match[1] for match in map(RECORD.fullmatch, entries) if match}
    for name, facts in entries.items():
        if not stat.S_ISDIR(facts.st_mode) or not FOLDER.fullmatch(name):
            continue
        if name not in recorded and name + COPYING not in entries:
            with run.directory(name) as folder:
                if folder.entries():
                    yield folder.path


@contextmanager
def _opened(path: Path, *, writes: bool) -> Iterator[Directory]:
    """Open a quarantine. Links are followed down to a store's directory, not below it."""
    directory = None
    try:
        parts = path.absolute().parts
        at = len(parts) - parts[::-1].index(_SIDE) - 1 if _SIDE in parts else len(parts)
        directory = Directory.named(str(Path(*parts[:at])), writes=writes)
        for name in parts[at:]:
            with directory:
                directory = directory.directory(name)
        yield directory
    except FileNotFoundError as error:
        raise UsageError(
            f"{path}: no such directory; give the quarantine that verify --repair named"
        ) from error
    except OSError as error:
        why = failed(path, "use the quarantine", error, "check its owner and permissions")
        raise StoreUnavailable(why) from error
    finally:
        if directory is not None:
            directory.close()
