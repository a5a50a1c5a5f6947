"""Restore page groups from the runs of a quarantine. Never overwrite an existing object."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.backends.base import Result, Status, batch_spans
from hicachectl.backends.capabilities import Trailed, jobs_of, mover_of
from hicachectl.backends.disk.names import VERSION
from hicachectl.backends.runs import open_run
from hicachectl.backends.urls import without_secrets
from hicachectl.formats.errors import UnfinishedPackError, UsageError
from hicachectl.formats.objects import PAGE_DIGITS
from hicachectl.formats.trailer import TRAILER_BYTES
from hicachectl.move.copies import copier
from hicachectl.move.destination import refuse_other_owner
from hicachectl.move.order import Failures, GroupObjects, publish
from hicachectl.move.quarantine import (
    Quarantine,
    Run,
    earlier_remark,
    opened_run,
    read_findings,
    remove_if_empty,
    remove_run,
    run_folders,
)
from hicachectl.move.results import (
    RESTORED,
    WOULD_RESTORE,
    GroupReport,
    GroupStatus,
    MoveResult,
    RestoredGroup,
    page_columns,
    states_of,
)
from hicachectl.pages.census import column_sum, column_sums
from hicachectl.pages.group_table import ABSENT
from hicachectl.pages.groups import PageGroups
from hicachectl.pages.scanning import take_inventory
from hicachectl.pages.selection import EVERYTHING, Selection
from hicachectl.text.jsontext import schema_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from hicachectl.backends.base import Store
    from hicachectl.backends.disk.directory import Directory
    from hicachectl.formats.arrays import BoolArray, IntArray
    from hicachectl.formats.profile import Profile
    from hicachectl.move.copies import Copier
    from hicachectl.pages.inventory import Inventory

_BATCH_OBJECTS = 1024
_EPOCH_MARGIN_NS = 10_000_000  # times of a file system can be 10 ms too early
_NO_MORE = "missing from the quarantine"
_IN_STORE = (
    "already exists in the store; to restore this page, first remove the page from the store with "
    "hicachectl rm"
)
_CLEARED = (
    "a server has cleared the store since the page was quarantined; hicachectl quarantine purge "
    "deletes it"
)

_COLUMNS = schema_of(RestoredGroup)


def restore_groups(
    store: Store,
    quarantine: Path,
    *,
    profile: Profile | None = None,
    selection: Selection = EVERYTHING,
    dry_run: bool = False,
    on_progress: Callable[[int], None] = lambda groups: None,
) -> GroupReport:
    """Restore the selected groups of a quarantine, sidecars first, and remove them from their runs.

    A group is a conflict and stays in its run if the store has another object under one of its
    keys. If the store already has an equal object there, this is no conflict.

    The newest run is restored first. If a removal was killed, its run has the anchor of a page, and
    the next run has sidecars of the page. These sidecars must return to the store before the
    anchor.

    Each row also has `codes`, the codes of the findings that caused the removal. If the group has a
    problem, `detail` says which.

    profile: profile of the pages' deployment. A 3FS store that plug-in servers use needs this
        profile, with its weights.

    Raises, before any change:

    - ProfileError if the store's keys name no deployment, and its pages are of another deployment.
    - UsageError if the quarantine is missing, has a run of another kind of store, or has only runs
    of an earlier form.
    - FormatError if run.json or findings.jsonl of a run is damaged.
    - UntrustedError if an entry is a link or its owner is not trusted.

    Raises StoreUnavailable at any time.
    """
    place = Quarantine(quarantine, store)
    tables, left, origins = [_COLUMNS.empty_table()], list[str](), list[str]()
    busy = lost = 0
    with place.opened(writes=not dry_run) as directory:
        names = run_folders(directory, place.only)
        _refuse_unusable(store, directory, names)
        refuse_other_owner(store, profile, claims=not dry_run)
        for name in reversed(names):
            with opened_run(directory, name, writes=not dry_run) as run:
                if isinstance(run, str):
                    left.append(earlier_remark(run))
                elif run is not None and not run.folder.lock():
                    busy += 1
                elif run is not None and (held := _opened(run, left, jobs_of(store))) is not None:
                    with held, copier(store, held) as memory:
                        one = _OneRun(store, run, held, memory, profile, dry_run=dry_run)
                        tables += one.put_back(selection, on_progress)
                        left += held.remarks
                    lost += one.lost
                    # The store's own quarantine moves with the store, so another path in its runs
                    # is an earlier path of this store.
                    origins += [] if place.own else one.origins
                    if not dry_run:
                        one.tidy(directory)
    rows = pa.concat_tables(tables)
    done = rows.filter(pc.equal(rows.column("state"), WOULD_RESTORE if dry_run else RESTORED))
    return GroupReport(
        rows=rows,
        moved=column_sum(done.column("objects")) or 0,
        gone=lost,
        nbytes=column_sum(done.column("nbytes")),
        busy=busy,
        left=tuple(left),
        origins=tuple(dict.fromkeys(origins)),
    )


def _refuse_unusable(store: Store, quarantine: Directory, names: Iterable[str]) -> None:
    """Raise UsageError for a run of another kind of store, or if all runs are of an earlier form.

    Raise FormatError if the findings of a run are damaged.
    """
    usable, earlier = False, ""
    for name in names:
        with opened_run(quarantine, name, writes=False) as run:
            if isinstance(run, str):
                earlier = run
            elif run is not None:
                usable = True
                if run.form.grammar != store.grammar:
                    raise UsageError(
                        f"{run.folder.path}: its pages are from {run.form.store}, a "
                        f"{run.form.grammar} store; {store.url} is a {store.grammar} store; give a "
                        f"{run.form.grammar} store"
                    )
                for _ in read_findings(run.folder):
                    pass
    if earlier and not usable:
        raise UsageError(earlier_remark(earlier))


def _opened(run: Run, left: list[str], jobs: int | None) -> Store | None:
    """Open a locked run as a store. If the run cannot be restored, return None.

    left: list to which a remark is added if the run cannot be restored.
    """
    why = "its purge was interrupted; complete it with hicachectl quarantine purge"
    if not run.is_purged:
        try:
            return open_run(run.folder, run.form, jobs=jobs)
        except UnfinishedPackError:
            why = "its repair was interrupted before the first page left the store"
    left.append(f"{run.folder.path}: left alone, because {why}")
    return None


class _OneRun:
    """Restore of one run.

    restored: number of restored groups.
    lost: number of objects that vanished from the run during the restore.
    origins: URL of the store from which the run's pages were removed. Empty if this is the store to
        which they return, or if the selection has no page of the run.
    """

    def __init__(
        self,
        store: Store,
        run: Run,
        held: Store,
        memory: Copier,
        profile: Profile | None,
        *,
        dry_run: bool,
    ) -> None:
        """List the run. held: the run opened as a store."""
        self.restored = self.lost = 0
        self.origins: list[str] = []
        self._store = store
        self._run = run
        self._held = held
        self._dry_run = dry_run
        self._mover = None if dry_run else mover_of(store, held)
        self._copier = memory
        # The run may have damaged objects, which may contradict the profile. Restore them anyway.
        self._inventory: Inventory = take_inventory(
            held, profile, columns=tuple({"version"} & held.traits.columns),
            on_contradiction=lambda why: None,
        )  # fmt: skip
        self.groups = PageGroups(self._inventory)
        self._anchors = self._inventory.table.anchors[self._inventory.affix_ids]
        self._codes: dict[tuple[str | None, str | None], set[str]] = defaultdict(set)
        for reason in read_findings(run.folder):
            self._codes[reason.page, reason.group].add(reason.code)

    def put_back(
        self, selection: Selection, on_progress: Callable[[int], None]
    ) -> Iterator[pa.Table]:
        """Restore the selected groups. Yield tables with a row for each group."""
        chosen = np.flatnonzero(selection.chosen(self.groups))
        origin = self._run.form.store
        self.origins = (
            [origin] if len(chosen) and origin != without_secrets(self._store.url) else []
        )
        _, offsets = self.groups.objects_of(chosen)
        for span in batch_spans(np.diff(offsets), _BATCH_OBJECTS):
            yield self._put_back(chosen[span])
            on_progress(len(chosen[span]))

    def tidy(self, quarantine: Directory) -> None:
        """Remove the run if all its groups were restored.

        A pack keeps the objects that were restored. A run in a pack is therefore removed if this
        restore has restored all its groups. Any other run is removed if it has no objects left.
        """
        if self.restored == len(self.groups) and self._held.traits.append_only:
            remove_run(quarantine, self._run.name, self._run.folder)
        else:
            remove_if_empty(quarantine, self._run, jobs_of(self._store))

    def _put_back(self, batch: IntArray) -> pa.Table:
        """Restore some groups. Return a row for each. batch: numbers of the groups."""
        places, offsets = self.groups.objects_of(batch)
        owners = np.repeat(np.arange(len(batch)), np.diff(offsets))
        rows = self._inventory.take(places)
        result = MoveResult.of(self.groups.pages_at(batch))
        objects = GroupObjects(rows.column("key").combine_chunks(), owners, self._anchors[places])
        double = self._assess(rows, objects, result)
        refused = ~result.open  # the report names refused groups first
        if not self._dry_run and result.open.any():
            self._publish(rows, objects, result, double)
        self.restored += int(result.open.sum())
        report = self._report(batch, rows, owners, result, double)
        return report.take(pa.array(np.argsort(~refused, kind="stable")))

    def _assess(self, rows: pa.Table, objects: GroupObjects, result: MoveResult) -> BoolArray:
        """Fail groups that cannot be restored.

        Return which objects the store already has with equal bytes: [n].
        """
        store = self._store
        columns = ["nbytes", *sorted({"locator"} & store.traits.columns)]
        seen, at = store.find(objects.keys, columns)
        present = at != ABSENT
        sizes = _sizes_of(rows)
        equal = np.zeros(len(objects), dtype=np.bool_)
        existing = np.flatnonzero(present)
        known = seen.column("nbytes").take(pa.array(at[existing]))
        existing = existing[pc.equal(known, pa.array(sizes[existing])).fill_null(True).to_numpy()]
        equal[existing] = self._copier.same(
            store, seen.take(pa.array(at[existing])),
            self._held, rows.take(pa.array(existing)), sizes[existing],
        )  # fmt: skip
        for n in np.flatnonzero(present & ~equal).tolist():
            self._fail(objects, n, result, GroupStatus.CONFLICT, _IN_STORE)
        if isinstance(store, Trailed):
            since_ns = int(self._run.form.begin * 1e9) - _EPOCH_MARGIN_NS
            for n in np.flatnonzero(store.cleared_since(rows, since_ns)).tolist():
                self._fail(objects, n, result, GroupStatus.FAILED, _CLEARED)
        return equal

    def _fail(
        self, objects: GroupObjects, n: int, result: MoveResult, status: GroupStatus, why: str
    ) -> None:
        result.fail(int(objects.owners[n]), status, objects.keys[n].as_py(), why)

    def _publish(
        self, rows: pa.Table, objects: GroupObjects, result: MoveResult, double: BoolArray
    ) -> None:
        """Put objects of open groups into the store. Remove them from the run, unless it is a pack.

        double: [n] whether the store already has the object with equal bytes.
        """
        ready = result.open[objects.owners]
        if isinstance(self._store, Trailed) and isinstance(self._held, Trailed):
            trailed = _trailed_kinds(rows.filter(pa.array(ready)))
            markers = self._held.markers()
            self._store.add_markers(m for m in markers if (m.suffix, m.nbytes) in trailed)
        if (ready & double).any():
            # An earlier restore may have written these objects, and been killed before it synced.
            self._store.flush()
        mover = self._mover
        written = publish(
            objects,
            np.flatnonzero(ready & ~double),
            result,
            write=lambda places: self._write(rows, places),
            undo=lambda places: self._undo(rows, places),
            # No anchor is durable before its sidecars.
            flush=(lambda: None) if mover is None else lambda: mover.flush(into_store=True),
            failures=_FAILURES,
        )
        if not self._held.traits.append_only:
            copied = double | written if mover is None else double
            back = np.flatnonzero(copied & result.open[objects.owners])
            self._held.delete(rows.select(["key"]).take(pa.array(back)))

    def _write(self, rows: pa.Table, places: IntArray) -> Result:
        some = rows.take(pa.array(places))
        if self._mover is not None:
            found = _restored(self._mover.put_back(some.select(["key"])))
        else:
            new = some.select(["key", "mtime_ns"])
            found = self._copier.copy(self._held, some, self._store, new, _sizes_of(some))
        self.lost += int((found.statuses == Status.GONE).sum())
        return found

    def _undo(self, rows: pa.Table, places: IntArray) -> Result:
        some = rows.select(["key"]).take(pa.array(places))
        if self._mover is None:
            return self._store.undo_writes(some)
        found = _restored(self._mover.take(some))
        self._mover.flush(into_store=False)
        return found

    def _report(
        self,
        batch: IntArray,
        rows: pa.Table,
        owners: IntArray,
        result: MoveResult,
        double: BoolArray,
    ) -> pa.Table:
        """Return a row for each group of a batch."""
        groups = self.groups
        labels = [groups.labels[number] for number in groups.label_ids[batch].tolist()]
        # Of restored groups, count only the objects that the store did not already have.
        counted = np.flatnonzero(~double | ~result.open[owners])
        sizes = rows.column("nbytes").take(pa.array(counted))
        details = {p.group: f"{p.key}: {p.detail}" for p in reversed(result.problems)}
        columns = [
            *page_columns(groups, batch),
            np.bincount(owners[counted], minlength=len(batch)),
            column_sums(sizes, owners[counted], len(batch)),
            [
                sorted(self._codes.get(pair, ()))
                for pair in zip(result.pages.to_pylist(), labels, strict=True)
            ],
            states_of(result.statuses, WOULD_RESTORE if self._dry_run else RESTORED),
            pa.array(map(details.get, range(len(batch))), pa.string()),
        ]
        return pa.table(columns, schema=_COLUMNS)


_CHANGED = dict.fromkeys(
    (Status.SHORT, Status.OVERSIZED, Status.CHANGED), "changed while being read"
)
_FAILURES = Failures(
    statuses={Status.EXISTS: GroupStatus.CONFLICT},
    details={**_CHANGED, Status.EXISTS: _IN_STORE, Status.GONE: _NO_MORE},
)


def _sizes_of(rows: pa.Table) -> IntArray:
    sizes: IntArray = rows.column("nbytes").fill_null(0).to_numpy()
    return sizes


def _trailed_kinds(rows: pa.Table) -> set[tuple[str, int]]:
    """Return (suffix, size) of the objects that have trailers, in a store of files."""
    columns = (rows.column(name).to_pylist() for name in ("key", "nbytes", "version"))
    return {
        (key[PAGE_DIGITS:].decode(), nbytes)
        for key, nbytes, version in zip(*columns, strict=True)
        if VERSION.unpack(version)[-1] == nbytes + TRAILER_BYTES
    }


def _restored(found: Result) -> Result:
    """Return the result of a mover, with its messages worded for a restore."""
    return Result(
        found.statuses, {row: f"cannot be restored: {why}" for row, why in found.errors.items()}
    )
