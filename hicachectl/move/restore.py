"""Restore the runs of a quarantine, sidecars first. Existing objects are never overwritten."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.backends.base import Result, Status
from hicachectl.backends.capabilities import Trailed, mover_of
from hicachectl.backends.disk.names import VERSION
from hicachectl.backends.runs import open_run
from hicachectl.backends.urls import without_secrets
from hicachectl.formats.errors import UnfinishedPackError, UsageError
from hicachectl.formats.objects import ANCHOR, PAGE_DIGITS, Names
from hicachectl.formats.trailer import TRAILER_BYTES
from hicachectl.formats.wording import reason_of
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
    named,
    states_of,
)
from hicachectl.pages.census import column_sum, column_sums
from hicachectl.pages.deployments import UNRESOLVED
from hicachectl.pages.groups import PageGroups
from hicachectl.pages.inventory import take_inventory
from hicachectl.pages.selection import EVERYTHING, Selection
from hicachectl.text.jsontext import schema_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from hicachectl.backends.base import Store
    from hicachectl.backends.disk.directory import Directory
    from hicachectl.formats.arrays import BoolArray, IntArray
    from hicachectl.formats.profile import Profile
    from hicachectl.move.copies import Copier
    from hicachectl.pages.inventory import Inventory

_BATCH_OBJECTS = 1024
_EPOCH_MARGIN_NS = 10_000_000  # file systems count time in steps of up to 10 ms
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
    """Restore the selected groups of a quarantine, and remove them from their runs.

    A group is a conflict and stays in its run if the store has another object under one of its
    keys; an object with equal bytes counts as put back. The newest run comes first: if a removal
    was killed, and the next one took the rest of a page, its sidecars return before its anchors.
    Rows also have `codes` (of the findings that caused the removal) and `detail`.

    profile: profile of the pages' deployment. A 3FS store that servers of the plug-in use needs it,
    with the weights.

    Raises, before any change: ProfileError if the store has pages of another deployment that its
    keys do not name, UsageError if the quarantine is missing, has a run of another kind of store
    or only runs of an earlier form, FormatError if what describes a run is damaged, UntrustedError
    if an entry is a link or its owner is not trusted. Raises StoreUnavailable.
    """
    place = Quarantine(quarantine, store)
    with place.opened(writes=not dry_run) as directory:
        names = run_folders(directory, place.only)
        runs, earlier = 0, ""
        for name in names:
            with opened_run(directory, name, writes=False) as run:
                if isinstance(run, Run):
                    runs += 1
                    _refuse_unusable(store, run)
                elif run is not None:
                    earlier = run
        if earlier and not runs:
            raise UsageError(earlier_remark(earlier))
        refuse_other_owner(store, profile, claims=not dry_run)
        restore = _Restore(store, profile, selection, on_progress, dry_run=dry_run)
        for name in reversed(names):
            with opened_run(directory, name, writes=not dry_run) as run:
                if isinstance(run, str):
                    restore.left.append(earlier_remark(run))
                elif run is not None:
                    restore.take(directory, run, own=place.own)
    return restore.report()


def _refuse_unusable(store: Store, run: Run) -> None:
    """Raise UsageError for a run of another kind of store, FormatError for damaged findings."""
    if run.form.grammar != store.grammar:
        raise UsageError(
            f"{run.folder.path}: its pages are from {run.form.store}, a {run.form.grammar} store; "
            f"{store.url} is a {store.grammar} store; give a {run.form.grammar} store"
        )
    for _ in read_findings(run.folder):
        pass


class _Restore:
    """Restore of several runs. left: remarks on runs that were left alone."""

    def __init__(
        self,
        store: Store,
        profile: Profile | None,
        selection: Selection,
        on_progress: Callable[[int], None],
        *,
        dry_run: bool,
    ) -> None:
        self.left: list[str] = []
        self._store = store
        self._profile = profile
        self._selection = selection
        self._on_progress = on_progress
        self._dry_run = dry_run
        self._tables = [_COLUMNS.empty_table()]
        self._origins: list[str] = []
        self._busy = self._lost = 0

    def take(self, quarantine: Directory, run: Run, *, own: bool) -> None:
        """Restore the selected groups of a run, and remove the run if nothing is left in it.

        own: the quarantine lies in the store's directory, so that it is the store's own, even if
        the directory was moved.
        """
        if not run.folder.lock():
            self._busy += 1
            return
        why = "its purge was interrupted; complete it with hicachectl quarantine purge"
        try:
            held = None if run.is_purged else open_run(run.folder, run.form)
        except UnfinishedPackError:
            why, held = "its repair was interrupted before the first page left the store", None
        if held is None:
            self.left.append(f"{run.folder.path}: left alone: {why}")
            return
        with held, copier(self._store, held) as memory:
            one = _OneRun(self._store, run, held, memory, self._profile, dry_run=self._dry_run)
            chosen = np.flatnonzero(self._selection.chosen(one.groups))
            if len(chosen) and not own and run.form.store != without_secrets(self._store.url):
                self._origins.append(run.form.store)
            for batch in _batches(one.groups, chosen):
                self._tables.append(one.put_back(batch))
                self._on_progress(len(batch))
            self._lost += one.lost
            self.left += held.remarks
            emptied = one.restored == len(one.groups) and held.traits.append_only
        if emptied and not self._dry_run:  # a pack keeps all that was put back
            remove_run(quarantine, run.name, run.folder)
        elif not self._dry_run:
            remove_if_empty(quarantine, run)

    def report(self) -> GroupReport:
        """Return the report of all runs."""
        rows = pa.concat_tables(self._tables)
        state = WOULD_RESTORE if self._dry_run else RESTORED
        done = rows.filter(pc.equal(rows.column("state"), state))
        return GroupReport(
            rows=rows,
            moved=column_sum(done.column("objects")) or 0,
            gone=self._lost,
            nbytes=column_sum(done.column("nbytes")),
            busy=self._busy,
            left=tuple(self.left),
            origins=tuple(dict.fromkeys(self._origins)),
        )


def _batches(groups: PageGroups, chosen: IntArray) -> list[IntArray]:
    """Divide chosen groups into batches of about _BATCH_OBJECTS objects."""
    _, offsets = groups.objects_of(chosen)
    ends = np.unique(
        np.searchsorted(offsets, np.arange(_BATCH_OBJECTS, offsets[-1], _BATCH_OBJECTS))
    )
    return [part for part in np.split(chosen, ends) if len(part)]


class _OneRun:
    """Restore of one run. restored: groups. lost: objects that vanished from the run meanwhile."""

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
        """List the run. held: its objects, as a store."""
        self.restored = self.lost = 0
        self._store = store
        self._run = run
        self._held = held
        self._dry_run = dry_run
        self._mover = None if dry_run else mover_of(store, held)
        self._copier = memory
        # Damaged objects may contradict the profile.
        self._inventory: Inventory = take_inventory(
            held, profile, columns=tuple({"version"} & held.traits.columns),
            on_contradiction=lambda why: None,
        )  # fmt: skip
        self.groups = PageGroups(self._inventory)
        table = self._inventory.table
        anchors = [
            any(reading.pool == ANCHOR for reading in table.resolved[n].readings)
            if spec is None
            else spec.anchor
            for n, spec in enumerate(table.specs)
        ]
        self._anchors = self._inventory.by_affix(anchors, False)
        self._codes: dict[tuple[str | None, str | None], set[str]] = defaultdict(set)
        for reason in read_findings(run.folder):
            self._codes[reason.page, reason.group].add(reason.code)

    def put_back(self, batch: IntArray) -> pa.Table:
        """Restore some groups; return a row for each. batch: numbers of groups."""
        places, offsets = self.groups.objects_of(batch)
        owners = np.repeat(np.arange(len(batch)), np.diff(offsets))
        rows = self._inventory.take(places)
        result = MoveResult.of(self.groups.pages_at(batch))
        objects = GroupObjects(rows.column("key").combine_chunks(), owners, self._anchors[places])
        double = self._assess(rows, objects, result)
        refused = ~result.open  # first in the table
        if not self._dry_run and result.open.any():
            self._publish(rows, objects, result, double)
        self.restored += int(result.open.sum())
        report = self._report(batch, rows, owners, result, double)
        return report.take(pa.array(np.argsort(~refused, kind="stable")))

    def _assess(self, rows: pa.Table, objects: GroupObjects, result: MoveResult) -> BoolArray:
        """Fail groups that cannot be restored; return which objects the store has, equal: [n]."""
        store = self._store
        columns = ["nbytes", *sorted({"locator"} & store.traits.columns)]
        seen = store.look(pa.table({"key": objects.keys}), columns)
        at = pc.index_in(objects.keys, value_set=seen.column("key").combine_chunks())
        present = at.is_valid().to_numpy(zero_copy_only=False)
        sizes = _sizes_of(rows)
        equal = np.zeros(len(objects), dtype=np.bool_)
        there = np.flatnonzero(present)
        known = seen.column("nbytes").take(at.take(pa.array(there)))
        there = there[pc.equal(known, pa.array(sizes[there])).fill_null(True).to_numpy()]
        equal[there] = self._copier.same(
            store, seen.take(at.take(pa.array(there))),
            self._held, rows.take(pa.array(there)), sizes[there],
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
        """Put objects of open groups into the store, and remove copies from the run."""
        ready = result.open[objects.owners]
        if isinstance(self._store, Trailed) and isinstance(self._held, Trailed):
            trailed = _trailed_kinds(rows.filter(pa.array(ready)))
            markers = self._held.markers()
            self._store.add_markers(m for m in markers if (m.suffix, m.nbytes) in trailed)
        if (ready & double).any():
            self._store.flush()  # an earlier restore may have been killed before it synced
        mover = self._mover
        written = publish(
            objects,
            np.flatnonzero(ready & ~double),
            result,
            write=lambda places: self._write(rows, objects, places),
            undo=lambda places: self._undo(rows, objects, places),
            # No anchor is durable before its sidecars.
            flush=(lambda: None) if mover is None else lambda: mover.flush(into_store=True),
            failures=_FAILURES,
        )
        if not self._held.traits.append_only:
            copied = double | written if mover is None else double
            back = np.flatnonzero(copied & result.open[objects.owners])
            self._held.delete(rows.select(["key"]).take(pa.array(back)))

    def _write(self, rows: pa.Table, objects: GroupObjects, places: IntArray) -> Result:
        if self._mover is not None:
            found = _each(objects, places, self._mover.put_back)
        else:
            some = rows.take(pa.array(places))
            new = some.select(["key", "mtime_ns"])
            found = self._copier.copy(self._held, some, self._store, new, _sizes_of(some))
        self.lost += int((found.statuses == Status.GONE).sum())
        return found

    def _undo(self, rows: pa.Table, objects: GroupObjects, places: IntArray) -> Result:
        if self._mover is None:
            return self._store.undo_writes(rows.select(["key"]).take(pa.array(places)))
        found = _each(objects, places, self._mover.take)
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
        groups, deployments = self.groups, self.groups.deployments
        ids = groups.deployment_ids[batch].tolist()
        known = [Names() if n == UNRESOLVED else deployments[n].names for n in ids]
        labels = [groups.labels[number] for number in groups.label_ids[batch].tolist()]
        # In restored groups, only the objects that this run moved count.
        counted = np.flatnonzero(~double | ~result.open[owners])
        sizes = rows.column("nbytes").take(pa.array(counted))
        details = {p.group: f"{p.key}: {p.detail}" for p in reversed(result.problems)}
        columns = {
            "page": result.pages,
            "model": named(pa.array([one.model for one in known], pa.string())),
            "tag": named(pa.array([one.tag for one in known], pa.string())),
            "objects": np.bincount(owners[counted], minlength=len(batch)),
            "nbytes": column_sums(sizes, owners[counted], len(batch)),
            "codes": [
                sorted(self._codes.get(pair, ()))
                for pair in zip(result.pages.to_pylist(), labels, strict=True)
            ],
            "state": states_of(result.statuses, WOULD_RESTORE if self._dry_run else RESTORED),
            "detail": pa.array(map(details.get, range(len(batch))), pa.string()),
        }
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
    """Return suffix and size of the objects of a file store whose files have trailers."""
    columns = (rows.column(name).to_pylist() for name in ("key", "nbytes", "version"))
    return {
        (key[PAGE_DIGITS:].decode(), nbytes)
        for key, nbytes, version in zip(*columns, strict=True)
        if VERSION.unpack(version)[-1] == nbytes + TRAILER_BYTES
    }


def _each(objects: GroupObjects, places: IntArray, call: Callable[[bytes], Status]) -> Result:
    """Call a mover for each object."""
    statuses = np.full(len(places), Status.ERROR, dtype=np.uint8)
    errors: dict[int, str] = {}
    for n, key in enumerate(objects.keys.take(pa.array(places)).to_pylist()):
        try:
            statuses[n] = call(key)
        except OSError as error:
            errors[n] = f"cannot be restored: {reason_of(error)}"
    return Result(statuses, errors)
