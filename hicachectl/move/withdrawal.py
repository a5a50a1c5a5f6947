"""Remove page groups from a store, into a run of a quarantine or for good.

The removal of a batch's anchors is durable before the batch's first sidecar leaves. A kill or a
power failure therefore leaves none of these anchors without its sidecars. It may leave sidecars,
which no server finds without their anchor. If objects cannot be renamed into the run, all of them
have durable copies before the first object leaves.
"""

from __future__ import annotations

import errno
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Literal, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.backends.base import Result, Status
from hicachectl.backends.capabilities import Spreads, mover_of, present_ns
from hicachectl.checks.findings import SCHEMA
from hicachectl.formats.errors import StoreUnavailable
from hicachectl.formats.wording import failed, reason_of
from hicachectl.io.forked_calls import Remover, delete_all
from hicachectl.move.copies import MEMORY_BYTES, copier
from hicachectl.move.order import GroupObjects, withdraw
from hicachectl.move.quarantine import NewRun, Quarantine
from hicachectl.move.removal_plan import (
    ListedGroups,
    RemovalBatch,
    StoreLookup,
    look_up,
    plan_removal,
)
from hicachectl.move.results import (
    REMOVED,
    ROWS,
    WOULD_REMOVE,
    GroupReport,
    GroupStatus,
    MoveResult,
    Taken,
    page_columns,
    states_of,
    telling,
)
from hicachectl.pages.census import column_sum
from hicachectl.pages.group_table import ABSENT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future

    import numpy.typing as npt

    from hicachectl.backends.base import Store
    from hicachectl.backends.capabilities import Mover
    from hicachectl.formats.arrays import BoolArray, IntArray
    from hicachectl.move.copies import Copier
    from hicachectl.move.removal_plan import RepairPlan
    from hicachectl.pages.groups import PageGroups

Mode = Literal["quarantine", "delete"]

# Longer than a server takes from the write of a page's sidecars to the write of the page's anchor.
SETTLE_SECONDS = 1.0
# A store counts as live if its newest page was written within this time.
LIVE_SECONDS = 300.0
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EIO)


def remove_groups(
    store: Store,
    groups: PageGroups,
    plan: RepairPlan,
    *,
    mode: Mode,
    quarantine: str | None = None,
    dry_run: bool = False,
    buffer_bytes: int = MEMORY_BYTES,
    on_progress: Callable[[int], None] = lambda groups: None,
    on_end: Callable[[Taken], None] = lambda taken: None,
    then: Callable[[npt.NDArray[np.uint8]], RepairPlan | None] = lambda statuses: None,
) -> GroupReport:
    """Remove the groups of a plan from the store.

    groups: groups of a listing. If the store has versions, the listing needs the column `version`,
        which shows the objects that were rewritten since the listing.
    buffer_bytes: memory for copies. At most `MEMORY_BYTES` are used.
    on_progress: takes the number of groups of each batch.
    on_end: takes the removals so far if a signal or a lost store ends the removal.
    then: takes the GroupStatus of each group of a finished plan. It returns a plan of more groups
        to remove, or None to end.
    If several repairs fill quarantines at once, a group belongs to the repair that takes the
    group's first object. For the other repairs, the group is gone.
    The report names each object that could not be removed.
    Raises StoreUnavailable, and UsageError if the quarantine is unusable.
    """
    place = Quarantine.of(store, quarantine) if mode == "quarantine" else None
    listed = ListedGroups(groups, plan)
    if dry_run:
        return _rehearsed(groups, plan, listed, place)
    newest_ns = int(groups.newest_ns.max()) if len(groups) else 0
    live = newest_ns > present_ns(store, changes=True) - int(LIVE_SECONDS * 1e9)
    run = None
    if place is not None:
        suffixes = {affix[1] for affix in groups.inventory.table.affixes}
        run = NewRun(place, store, _findings_of(plan, groups), suffixes)
    memory_bytes = min(buffer_bytes, MEMORY_BYTES)
    with (
        _Worker(store, groups, run, watches=live, memory_bytes=memory_bytes) as worker,
        telling(worker.taken, on_end),
    ):
        wanted, following = len(listed), then(worker.work(listed, on_progress))
        while following is not None:
            listed = ListedGroups(groups, following)
            wanted += len(listed)
            following = then(worker.work(listed, on_progress))
        worker.settle()
        return worker.result(untried=wanted - worker.tried)


def withdraw_listed(store: Store, groups: PageGroups, numbers: IntArray) -> MoveResult:
    """Delete listed groups from a store.

    A group stays if one of its objects is new or was rewritten since the listing.
    groups: see `remove_groups`.
    numbers: [k] numbers of the groups to delete.
    Return a status for each group: DONE, GONE, KEPT, IN_FLIGHT or FAILED.
    Raises StoreUnavailable.
    """
    order = np.argsort(numbers)
    result = MoveResult.of(groups.pages_at(numbers))
    for listed in ListedGroups(groups, plan_removal(numbers)).batches():
        removal = _Removal.of_listed(store, listed)
        removal.leave()
        removal.result.objects = removal.objects
        places = np.searchsorted(numbers, listed.numbers, sorter=order)
        result.include(order[places], removal.result)
    return result


def _findings_of(plan: RepairPlan, groups: PageGroups) -> pa.Table:
    """Return the findings that are a plan's reasons, each with the label of its group."""
    labels = pa.array(groups.labels, pa.string()).take(pa.array(groups.label_ids[plan.about]))
    return plan.reasons.select(SCHEMA.names).append_column("group", labels)


def _rehearsed(
    groups: PageGroups, plan: RepairPlan, listed: ListedGroups, place: Quarantine | None
) -> GroupReport:
    """Return the report of a dry run, in which every removal succeeds."""
    objects, nbytes = int(listed.counts.sum()), listed.nbytes
    keeps = place is not None
    columns = [*page_columns(groups, plan.groups), listed.counts, nbytes]
    return GroupReport(
        rows=pa.table([*columns, pa.repeat(WOULD_REMOVE, len(listed))], schema=ROWS),
        moved=objects if keeps else 0,
        deleted=0 if keeps else objects,
        nbytes=column_sum(nbytes),
        place=None if place is None else str(place.path),
    )


class _Removal:
    """Page groups of one batch while they leave a store.

    groups: the groups, and their objects at the start.
    touched: [k] whether an object of the group was removed.
    standing: [k] status at the last lookup. It is the final status of a group that is not touched.
    removed: number of removed objects that the batch had at the start.
    new: number of removed objects that servers wrote after the start.
    gone: number of objects that vanished before their removal.
    lookup: result of the last lookup; None once it is outdated.
    mover: renames the objects into the run; None to delete them.
    """

    def __init__(
        self,
        store: Store,
        groups: RemovalBatch,
        *,
        owned: bool = False,
        delete: Callable[[pa.Table], Result] | None = None,
    ) -> None:
        """Prepare the removal.

        owned: whether a group that has lost an anchor belongs to another repair. This repair then
            leaves the group alone.
        delete: function that deletes objects; `delete_all` by default.
        """
        self.groups = groups
        self.result = MoveResult.of(groups.pages)
        self.touched = np.zeros(len(groups), dtype=np.bool_)
        self.removed = self.new = self.gone = 0
        self.standing = np.full(len(groups), GroupStatus.DONE, dtype=np.uint8)
        self.lookup: StoreLookup | None = None
        self.mover: Mover | None = None
        self._owned = owned
        self._store = store
        self._delete_rows = delete or partial(delete_all, store)
        self._left = np.zeros(len(groups.owners), dtype=np.bool_)  # [n] whether the object left

    @classmethod
    def of_listed(
        cls,
        store: Store,
        listed: RemovalBatch,
        *,
        owned: bool = False,
        delete: Callable[[pa.Table], Result] | None = None,
    ) -> Self:
        """Look up listed groups in the store again, and return their removal.

        A finding about an object that has changed since the listing no longer counts.
        """
        lookup = look_up(store, listed)
        unwanted = np.zeros(len(lookup.at), dtype=np.bool_)
        unwanted[listed.cells[lookup.known(listed) & listed.unwanted]] = True
        removal = cls(store, listed.as_seen(lookup, unwanted), owned=owned, delete=delete)
        removal.lookup = lookup
        removal.gone = int((~lookup.present[listed.cells]).sum())
        known = np.ones(len(removal.groups.owners), dtype=np.bool_)
        removal.standing = removal._judged(lookup, known, listed)
        return removal

    @property
    def pending(self) -> IntArray:
        """Indices of the groups that must leave the store and have not failed."""
        return np.flatnonzero(self.result.open & (self.standing == GroupStatus.DONE))

    @property
    def objects(self) -> int:
        """Number of objects removed so far."""
        return self.removed + self.new

    def leave(self) -> None:
        """Remove the pending groups. Then set the status of each open group that lost no object."""
        if len(self.pending):
            withdraw(self.pending, self.result, look_up=self._look_up, remove=self._remove)
        settled = self.result.open & ~self.touched
        self.result.statuses[settled] = self.standing[settled]

    def _judged(
        self, lookup: StoreLookup, known: BoolArray, before: RemovalBatch
    ) -> npt.NDArray[np.uint8]:
        """Return each group's status after a lookup: [k].

        A group that the user chose stays if servers have written to the group since `before`,
        because the user did not choose the new objects. But once an object of the group was
        removed, the new objects are removed, too.
        known: see `RemovalBatch.judge`.
        before: the groups as the listing or an earlier lookup found them.
        """
        standing = self.groups.judge(lookup.present, known)
        if before.by_choice:
            standing[~self.touched & before.written_since(lookup)] = GroupStatus.KEPT
        if self._owned:
            standing[~self.touched & before.begun_by_others(lookup)] = GroupStatus.GONE
        return standing

    def _look_up(self, pending: IntArray) -> GroupObjects:
        groups = self.groups
        if len(groups.shape) == 1:  # each group has one object, so a touched group is gone
            pending = pending[~self.touched[pending]]
        lookup = self.lookup or look_up(self._store, groups, pending)
        self.lookup = None
        known = lookup.known(groups) & ~self._left
        self.standing[pending] = self._judged(lookup, known, groups)[pending]
        owners = groups.cell_owners
        cells = np.flatnonzero(lookup.present & (self.standing[owners] == GroupStatus.DONE))
        recorded = np.full(len(owners), ABSENT, dtype=np.int64)
        recorded[groups.cells[known]] = np.flatnonzero(known)
        # `_rows` has the rows of these objects in the lookup. `_recorded` has their indices in the
        # batch, ABSENT for new objects.
        self._seen = GroupObjects(groups.keys_of(cells), owners[cells], groups.anchors[cells])
        self._rows, self._recorded = lookup.rows.take(pa.array(lookup.at[cells])), recorded[cells]
        return self._seen

    def _remove(self, places: IntArray) -> Result:
        found = (self._delete if self.mover is None else self._take)(places)
        recorded, is_gone = self._recorded[places], found.statuses == Status.GONE
        is_recorded = recorded != ABSENT
        self._left[recorded[is_recorded & (found.ok | is_gone)]] = True
        self.touched[self._seen.owners[places[found.ok]]] = True
        self.gone += int(is_gone.sum())
        self.removed += int((found.ok & is_recorded).sum())
        self.new += int((found.ok & ~is_recorded).sum())
        return found

    def _delete(self, places: IntArray) -> Result:
        return self._delete_rows(self._rows.take(pa.array(places)))

    def _take(self, places: IntArray) -> Result:
        """Rename objects into the run, durably. Delete objects that servers wrote after the start.

        A group belongs to the repair that takes the group's first object in the order of keys. If
        another repair has taken that object, this repair leaves the rest of the group alone.
        """
        assert self.mover is not None
        statuses = np.full(len(places), Status.CHANGED, dtype=np.uint8)
        errors: dict[int, str] = {}
        owners = self._seen.owners[places]
        keys = pa.table({"group": owners, "key": self._seen.keys.take(pa.array(places))})
        by_key = pc.sort_indices(keys, [("group", "ascending"), ("key", "ascending")]).to_numpy()
        left = by_key[self.result.open[owners[by_key]]]
        while len(left):
            # Take all objects of the groups that this repair owns. Of each other group, take only
            # the first object.
            first = np.diff(owners[left], prepend=ABSENT) != 0
            due = self.touched[owners[left]] | first
            for some, found in self._take_all(places, left[due]):
                statuses[some] = found.statuses
                errors |= {int(some[row]): why for row, why in found.errors.items()}
            left = left[~due]
            left = left[self.result.open[owners[left]]]
        try:
            self.mover.flush(into_store=False)
        except OSError as error:
            why = f"removed, but a power failure may bring it back: {reason_of(error)}; run again"
            errors |= dict.fromkeys(np.flatnonzero(statuses == Status.OK).tolist(), why)
            statuses[statuses == Status.OK] = Status.ERROR
        return Result(statuses, errors)

    def _take_all(self, places: IntArray, some: IntArray) -> Iterator[tuple[IntArray, Result]]:
        """Rename the batch's own objects into the run. Delete objects that servers wrote later.

        Yield the result of the deletion, if any, and the result of the renames. Each comes with the
        indices of its objects in `places`.
        places: indices of objects of the last lookup.
        some: indices in `places` of the objects to take.
        """
        assert self.mover is not None
        recorded = self._recorded[places[some]] != ABSENT
        if not recorded.all():
            yield some[~recorded], self._delete(places[some[~recorded]])
        some = some[recorded]
        owners = self._seen.owners[places[some]]
        found = self.mover.take(self._rows.take(pa.array(places[some])))
        self.touched[owners[found.ok]] = True
        for group in np.unique(owners[found.statuses == Status.GONE]).tolist():
            if not self.touched[group]:
                self.result.fail(group, GroupStatus.GONE, None, "")
        yield some, found


class _Worker:
    """Removal of groups from one store.

    run: run that takes the objects; None to delete them.
    watches: whether `settle` watches the removed groups, because servers write to the store.
    """

    def __init__(
        self,
        store: Store,
        groups: PageGroups,
        run: NewRun | None,
        *,
        watches: bool,
        memory_bytes: int,
    ) -> None:
        self.tried = 0
        self._full = False  # whether writes to the quarantine fail, so that no more batches begin
        self._store = store
        self._groups = groups
        self._run = run
        self._memory_bytes = memory_bytes
        self._remover: Remover | None = None
        self._exits = ExitStack()
        self._watches = watches
        self._watched: list[tuple[RemovalBatch, MoveResult, IntArray]] = []
        self._rows: list[pa.Table] = []
        self._results: list[MoveResult] = []
        self._numbers: list[IntArray] = []  # the group numbers of each result
        self._plans = 0  # number of plans begun
        self._plan_of: list[int] = []  # number of each result's plan
        self._sizes = [pa.array([], pa.int64())]  # bytes of the removed groups
        self._moved = self._deleted = self._gone = 0
        self._failures: list[tuple[str, str]] = []
        self._touched = 0
        self._open: _Removal | None = None  # the removal at work

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._exits.close()
        if self._run is not None:
            try:
                self._run.close()
            except OSError as error:
                raise self._unusable(error) from error

    def work(
        self, listed: ListedGroups, on_progress: Callable[[int], None]
    ) -> npt.NDArray[np.uint8]:
        """Remove the groups of a plan.

        Return the status of each group that was tried, in the order of the group numbers.
        on_progress: takes the number of groups of each batch.
        """
        earlier = len(self._results)
        self._plans += 1
        copied: list[_Removal] = []
        with ExitStack() as exits:
            for removal in self._looked_up(listed, exits):
                if self._run is None or not len(removal.pending):
                    self._leave(removal)
                elif (run := self._opened(removal)) is not None:
                    removal.mover = mover_of(self._store, run)
                    if removal.mover is not None:
                        removal.lookup = None  # outdated, because making the run takes time
                        self._leave(removal)
                    else:
                        if not copied:
                            memory = exits.enter_context(
                                copier(self._store, run, self._memory_bytes)
                            )
                        self._copy(removal, run, memory)
                        copied.append(removal)
                self.tried += len(removal.groups)
                on_progress(len(removal.groups))
                if self._full:
                    break
        self._leave_copied(copied)
        statuses = [result.statuses for result in self._results[earlier:]]
        tried = np.concatenate([np.zeros(0, dtype=np.int64), *self._numbers[earlier:]])
        return np.concatenate([np.zeros(0, dtype=np.uint8), *statuses])[np.argsort(tried)]

    def _looked_up(self, listed: ListedGroups, exits: ExitStack) -> Iterator[_Removal]:
        """Yield a removal for each batch.

        If the store does a call with several threads (`Spreads`), a thread looks up the next batch
        while the caller handles this batch.
        """
        if self._remover is None:
            # Forked processes only delete, because a mover renames objects in this process.
            objects = int(listed.counts.sum()) if self._run is None else 0
            self._remover = self._exits.enter_context(Remover(self._store, objects=objects))
        delete, owned = self._remover.delete, self._run is not None
        of_listed = partial(_Removal.of_listed, self._store, owned=owned, delete=delete)
        batches = listed.batches(self._remover.processes)
        if not isinstance(self._store, Spreads):
            yield from map(of_listed, batches)
            return
        thread = exits.enter_context(ThreadPoolExecutor(1, "hicachectl-lookup"))
        ahead: Future[_Removal] | None = None
        for batch in batches:
            following = thread.submit(of_listed, batch)
            if ahead is not None:
                yield ahead.result()
            ahead = following
        if ahead is not None:
            yield ahead.result()

    def _opened(self, removal: _Removal) -> Store | None:
        """Return the run as a store.

        If the quarantine's disk is full or has errors, fail the pending groups and return None.
        Raises StoreUnavailable for any other error.
        """
        assert self._run is not None
        try:
            return self._run.open()
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise self._unusable(error) from error
            self._full = True
            why = f"cannot write to the quarantine: {reason_of(error)}; check its disk, then "
            self._failures.append((self._run.path, f"{why}run again"))
            removal.result.statuses[removal.pending] = GroupStatus.FAILED
            self._leave(removal)
            return None

    def _unusable(self, error: OSError) -> StoreUnavailable:
        where = "" if self._run is None else self._run.path
        next_step = "check its owner and permissions"
        return StoreUnavailable(failed(where, "write to the quarantine", error, next_step))

    def _leave(self, removal: _Removal) -> None:
        self._open = removal
        removal.leave()
        self._open = None
        self._note(removal)

    def _copy(self, removal: _Removal, run: Store, memory: Copier) -> None:
        """Copy the objects of the pending groups. Undo the copies of objects that have changed.

        If an object cannot be copied, its group stays in the store, unless the object has vanished.
        """
        groups, pending = removal.groups, removal.pending
        places = np.flatnonzero(np.isin(groups.owners, pending))
        cells = groups.cells[places]
        assert removal.lookup is not None
        rows = removal.lookup.rows.take(pa.array(removal.lookup.at[cells]))
        removal.lookup = None
        sizes = groups.facts.column("nbytes").fill_null(0).to_numpy()[places]
        new = rows.select(["key", "mtime_ns"])
        found = memory.copy(self._store, rows, run, new, sizes)
        for n in np.flatnonzero(~found.ok).tolist():
            group, status = int(groups.owners[places[n]]), Status(int(found.statuses[n]))
            self._full |= status == Status.FULL
            if status != Status.GONE:
                why = found.errors.get(n, "changed while being read")
                why = f"not copied to quarantine: {why}"
                key = rows.column("key")[n].as_py()
                removal.result.fail(group, GroupStatus.FAILED, key, why)
        lookup = look_up(self._store, groups, pending)
        for group in np.flatnonzero(groups.begun_by_others(lookup)).tolist():
            removal.result.fail(group, GroupStatus.GONE, None, "")
        same = lookup.known(groups)[places] | ~lookup.present[cells]
        drop = found.ok & ~(same & removal.result.open[groups.owners[places]])
        if drop.any():
            run.undo_writes(new.filter(pa.array(drop)))

    def _leave_copied(self, copied: list[_Removal]) -> None:
        """Make all copies durable, and then remove the copied groups from the store."""
        if not copied:
            return
        assert self._run is not None
        run = self._run.open()
        self._run.finish()
        used = False
        for removal in copied:
            self._leave(removal)
            # Keep the copies of a failed group, too, because an object that the store failed to
            # remove may still be gone after a power failure.
            left = removal.touched | (removal.result.statuses == GroupStatus.FAILED)
            used |= bool(left.any())
            stay = np.flatnonzero(~left[removal.groups.owners])
            if len(stay) and not run.traits.append_only:
                keys = removal.groups.keys_of(removal.groups.cells[stay])
                run.undo_writes(pa.table({"key": keys}))
        self._run.unused = not used

    def settle(self) -> None:
        """Watch the removed groups for SETTLE_SECONDS. Remove pages that servers write in part.

        A server that saw a sidecar just before the sidecar's removal does not write this sidecar
        again, but still writes the anchor. The page then has an anchor without this sidecar.
        """
        deadline = time.monotonic() + SETTLE_SECONDS
        while self._watched and time.monotonic() < deadline:
            time.sleep(min(0.2, SETTLE_SECONDS / 5))
            for removal, _, _ in self._unsettled():
                if len(removal.pending):
                    self._open = removal
                    removal.leave()
                    self._open = None
                    self._deleted += removal.objects
        for _, result, places in self._unsettled():
            result.statuses[places] = GroupStatus.IN_FLIGHT

    def taken(self) -> Taken:
        """Return the removals so far. Of the batch at work, only finished calls count."""
        removal, sizes = self._open, self._sizes
        pages, objects = self._touched, self._moved + self._deleted
        if removal is not None:
            pages += int(removal.touched.sum())
            objects += removal.objects
            sizes = [*sizes, removal.groups.nbytes.filter(pa.array(removal.touched))]
        return Taken(pages, objects, column_sum(pa.concat_arrays(sizes)))

    def result(self, untried: int = 0) -> GroupReport:
        """Return the report of all batches. untried: number of groups in no batch that began."""
        states = [states_of(result.statuses, REMOVED) for result in self._results]
        tables = [
            rows.append_column("state", found)
            for rows, found in zip(self._rows, states, strict=True)
        ]
        numbers = np.concatenate([np.zeros(0, dtype=np.int64), *self._numbers])
        counts = np.array([len(some) for some in self._numbers], dtype=np.int64)
        plans = np.repeat(np.array(self._plan_of, dtype=np.int64), counts)
        order = pa.array(np.lexsort((numbers, plans)))
        return GroupReport(
            rows=pa.concat_tables([ROWS.empty_table(), *tables]).take(order),
            moved=self._moved,
            deleted=self._deleted,
            gone=self._gone,
            nbytes=column_sum(pa.concat_arrays(self._sizes)),
            failures=tuple(self._failures),
            untried=untried,
            place=None if self._run is None else self._run.quarantine,
        )

    def _note(self, removal: _Removal) -> None:
        groups, result = removal.groups, removal.result
        self._moved += 0 if self._run is None else removal.removed
        self._deleted += removal.objects if self._run is None else removal.new
        self._gone += removal.gone
        nbytes = groups.nbytes
        self._touched += int(removal.touched.sum())
        self._sizes.append(nbytes.filter(pa.array(removal.touched)))
        problems = sorted(result.problems, key=lambda problem: problem.group)
        self._failures += [(problem.key or "", problem.detail) for problem in problems]
        columns = [*page_columns(self._groups, groups.numbers), groups.counts, nbytes]
        self._rows.append(pa.table(columns, schema=ROWS.remove(ROWS.get_field_index("state"))))
        self._results.append(result)
        self._numbers.append(groups.numbers)
        self._plan_of.append(self._plans)
        places = np.flatnonzero(removal.touched & (result.statuses == GroupStatus.DONE))
        if self._watches and len(places):
            self._watched.append((groups.emptied(places), result, places))

    def _unsettled(self) -> Iterator[tuple[_Removal, MoveResult, IntArray]]:
        """Yield a removal for each watched batch with a group that is present but not whole.

        Each removal comes with the batch's result, and the indices of these groups in this result.
        """
        for groups, result, places in self._watched:
            lookup = look_up(self._store, groups)
            none = np.zeros(0, dtype=np.bool_)
            standing = groups.judge(lookup.present, none)
            open_ = np.isin(standing, (GroupStatus.IN_FLIGHT, GroupStatus.DONE))
            if open_.any():
                # No object counts as unwanted, so a whole group may stay.
                unblamed = np.zeros(len(lookup.at), dtype=np.bool_)
                removal = _Removal(self._store, groups.as_seen(lookup, unblamed))
                removal.standing = standing
                yield removal, result, places[open_]
