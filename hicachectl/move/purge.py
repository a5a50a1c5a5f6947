"""List the runs of a quarantine, and delete old ones for good."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from hicachectl.backends.disk.mounts import file_system_ns
from hicachectl.backends.runs import open_run
from hicachectl.formats.errors import FormatError, UnfinishedPackError, UntrustedError
from hicachectl.formats.quarantine import PURGED
from hicachectl.formats.wording import reason_of
from hicachectl.move.quarantine import (
    Quarantine,
    Run,
    earlier_remark,
    opened_run,
    read_findings,
    remove_leftover,
    remove_run,
    run_folders,
)
from hicachectl.pages.census import column_sum
from hicachectl.pages.groups import PageGroups
from hicachectl.pages.inventory import take_inventory
from hicachectl.text.units import Ago

if TYPE_CHECKING:
    from pathlib import Path

    from hicachectl.backends.disk.directory import Directory

# States of a run. Only kept runs can be restored; kept and half purged runs can be purged.
KEPT, HALF_PURGED, BUSY, EARLIER, UNREADABLE = (
    "kept", "half-purged", "busy", "earlier-form", "unreadable",
)  # fmt: skip
PURGED_RUN, WOULD_PURGE, FAILED = "purged", "would-purge", "failed"

RUNS = pa.schema(
    [
        ("run", pa.string()),
        ("removed", pa.float64()),  # Unix seconds; null if not known
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
    """Runs, as `RUNS`. failures: (run, message). left: remarks on runs that were left alone."""

    rows: pa.Table
    failures: tuple[tuple[str, str], ...] = ()
    left: tuple[str, ...] = ()


def list_runs(quarantine: Path) -> PurgeReport:
    """List the runs of a quarantine, oldest first.

    A run is unreadable if what describes it is damaged, an entry is a link, or its owner is not
    trusted. Raises UsageError if the quarantine is missing, UntrustedError, StoreUnavailable.
    """
    place, rows, left = Quarantine(quarantine), list[dict[str, Any]](), list[str]()
    with place.opened(writes=False) as directory:
        for name in run_folders(directory, place.only):
            try:
                with opened_run(directory, name, writes=False) as run:
                    if run is not None:
                        rows.append(_row(name, run, left))
            except (FormatError, UntrustedError) as error:
                left.append(str(error))
                rows.append(_empty_row(name, UNREADABLE))
    return PurgeReport(pa.Table.from_pylist(rows, schema=RUNS), left=tuple(left))


def purge_runs(quarantine: Path, before: float, *, dry_run: bool = False) -> PurgeReport:
    """Delete the runs whose removal began before a time; complete interrupted purges.

    Busy runs, and runs of an earlier form, stay. before: Unix seconds; an `Ago` counts by the clock
    of the quarantine's file system, unless this is a dry run. Raises as `list_runs`; also
    FormatError and UntrustedError for an unreadable run, before any change.
    """
    place, rows, left = Quarantine(quarantine), list[dict[str, Any]](), list[str]()
    failures: list[tuple[str, str]] = []
    with place.opened(writes=not dry_run) as directory:
        if isinstance(before, Ago) and not dry_run:
            before = before.by(file_system_ns(directory.descriptor))
        for name in run_folders(directory, place.only):
            with opened_run(directory, name, writes=False) as run:
                if run is not None:
                    _row(name, run, [])  # all runs are read before anything is changed
        for name in run_folders(directory, place.only):
            with opened_run(directory, name, writes=not dry_run) as run:
                if run is None:
                    if not dry_run:
                        remove_leftover(directory, name)
                    continue
                row = _row(name, run, left)
                if row["state"] not in (KEPT, HALF_PURGED):
                    rows.append(row)
                elif isinstance(run, Run) and run.form.begin < before:
                    rows.append(row)
                    row["state"] = WOULD_PURGE
                    if not dry_run:
                        row["state"] = _purged(directory, run, failures)
    return PurgeReport(pa.Table.from_pylist(rows, schema=RUNS), tuple(failures), tuple(left))


def _purged(quarantine: Directory, run: Run, failures: list[tuple[str, str]]) -> str:
    """Delete a locked run; return its state.

    The new name shows that the run can no longer be restored, until the next purge completes this
    one.
    """
    try:
        name = run.form.run + PURGED
        if not run.is_purged:
            quarantine.rename(run.name, name)
            quarantine.sync()
        remove_run(quarantine, name, run.folder)
    except OSError as error:
        why = f"cannot be purged: {reason_of(error)}; check its files, then run again"
        failures.append((run.folder.path, why))
        return FAILED
    return PURGED_RUN


def _row(name: str, run: Run | str, left: list[str]) -> dict[str, Any]:
    """Return the row of a run, which is locked unless busy. left: gets remarks."""
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
    with suppress(UnfinishedPackError), open_run(run.folder, run.form) as store:
        inventory = take_inventory(store)
        counts["groups"] = len(PageGroups(inventory))
        counts["objects"] = len(inventory.objects)
        counts["nbytes"] = column_sum(inventory.objects.column("nbytes")) or 0
    return row | counts


def _empty_row(name: str, state: str) -> dict[str, Any]:
    return {"run": name, "codes": [], "state": state}
