"""Remove page groups from a store: into its quarantine, or permanently.

Each batch has a durable record before its first object leaves the store. If the run is killed, the
next run finishes the batch. Only deletions from a full disk go without a record.
"""

from __future__ import annotations

import errno
import os
import time
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Self

import numpy as np
import pyarrow as pa

from hicachectl.backends.base import Result, Status
from hicachectl.backends.capabilities import Trailed, open_mover, present_ns
from hicachectl.formats.errors import StoreUnavailable
from hicachectl.formats.quarantine import BEGUN, DONE
from hicachectl.formats.wording import failed, reason_of
from hicachectl.move.backups import MEMORY_BYTES, copy_groups, copy_memory
from hicachectl.move.listed import ListedGroups
from hicachectl.move.order import GroupObjects, Sighting, remove_once, withdraw
from hicachectl.move.planning import plan_removal
from hicachectl.move.quarantine import (
    Batch,
    Quarantine,
    Run,
    batches,
    marked_runs,
    no_default,
    runs,
    sweep,
)
from hicachectl.move.record_file import Mode, Record
from hicachectl.move.recorded import RecordedGroups, Sight, look
from hicachectl.move.reports import (
    REMOVED,
    ROWS,
    WOULD_REMOVE,
    GroupReport,
    Taken,
    named,
    states_of,
    telling,
)
from hicachectl.move.results import GroupStatus, MoveResult
from hicachectl.pages.byte_sums import column_sum
from hicachectl.pages.group_table import ABSENT
from hicachectl.profiles.identities import markers_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from hicachectl.backends.base import BoolArray, IntArray, Store
    from hicachectl.backends.capabilities import Mover
    from hicachectl.backends.disk.directory import Directory
    from hicachectl.formats.marker import Marker
    from hicachectl.move.planning import RepairPlan
    from hicachectl.pages.groups import PageGroups
    from hicachectl.pages.inventory import Inventory

SETTLE_SECONDS = 1.0  # longer than a server's pause between a page's sidecars and its anchor
LIVE_SECONDS = 300.0  # a store with a more recent write counts as live
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


def remove_groups(
    store: Store,
    inventory: Inventory,
    groups: PageGroups,
    plan: RepairPlan,
    *,
    mode: Mode,
    quarantine: str | None = None,
    dry_run: bool = False,
    settle_seconds: float = SETTLE_SECONDS,
    buffer_bytes: int = MEMORY_BYTES,
    mark: str = "",
    on_progress: Callable[[int], None] = lambda groups: None,
    on_end: Callable[[Taken], None] = lambda taken: None,
) -> GroupReport:
    """Remove the groups of a plan from the store.

    inventory: with the column `version` if the store has versions, to detect objects rewritten
    since the scan.
    mode: "delete" keeps no objects, only records of unfinished batches in the quarantine.
    settle_seconds: how long to watch a live store afterwards for pages half written by servers.
    buffer_bytes: memory for copies, at most `MEMORY_BYTES`. mark: of the run in the quarantine.
    on_end: called if a signal or a lost store ends the removal.
    Raises StoreUnavailable, and UsageError if the quarantine is unusable. Failures of objects are
    in the result.
    """
    place = Quarantine.of(store, quarantine)
    if place is None and mode == "quarantine":
        raise no_default(store)
    listed = ListedGroups(inventory, groups, plan)
    if dry_run:
        return _rehearsed(groups, plan, listed, mode, place)
    newest_ns = int(groups.newest_ns.max()) if len(groups) else 0
    live = newest_ns > present_ns(store, changes=True) - int(LIVE_SECONDS * 1e9)
    memory_bytes = min(buffer_bytes, MEMORY_BYTES)
    with (
        _Worker(store, place, mode, watches=live, memory_bytes=memory_bytes, mark=mark) as worker,
        telling(worker.taken, on_end),
    ):
        for batch in listed.batches():
            worker.work(batch)
            on_progress(len(batch))
            if worker.full:
                break
        worker.settle(settle_seconds)
        return worker.result(untried=len(listed) - worker.tried)


def withdraw_listed(
    store: Store, inventory: Inventory, groups: PageGroups, numbers: IntArray
) -> MoveResult:
    """Delete listed groups from a store, without a record.

    A group with an object that is new or rewritten since the listing stays.
    inventory: as in `remove_groups`.
    numbers: [k] groups. Return a status for each: DONE, GONE, KEPT, IN_FLIGHT or FAILED.
    Raises StoreUnavailable.
    """
    order = np.argsort(numbers)
    plan = plan_removal(groups, numbers, "moved")
    result = MoveResult.of(groups.pages_at(numbers))
    done = 0
    for listed in ListedGroups(inventory, groups, plan).batches():
        removal = _Removal.of_listed(store, listed)
        removal.leave(None)
        removal.result.objects = int(removal.removed.sum() + removal.new.sum())
        result.include(order[done : done + len(listed)], removal.result)
        done += len(listed)
    return result


def finish_removals(
    store: Store, quarantine: str | None = None, *, marks: Collection[str] | None = None
) -> GroupReport:
    """Finish the batches that killed runs began on this store; skip those of running processes.

    Every run that removes groups calls this before its scan. marks: only runs with one of them.
    Raises, before any change, FormatError if a record is damaged, UntrustedError if an entry is a
    link or its owner is not trusted. Raises StoreUnavailable.
    """
    place, unrecorded = Quarantine.of(store, quarantine), list[str]()
    if place is None:
        return GroupReport()
    with place.opened(writes=True) as directory, _Worker(store, None, "delete") as worker:
        if directory is None:
            return GroupReport()
        for _, run in marked_runs(directory, marks):
            for batch in _begun(run, store, place):
                batch.held()  # checked before anything is changed
        for name, run in marked_runs(directory, marks):
            if run.lock():
                for batch in _begun(run, store, place):
                    worker.finish(batch)
                unrecorded += sweep(run, directory, name)
        return replace(worker.result(), unrecorded=tuple(unrecorded))


def count_quarantined(store: Store, quarantine: str | None, marks: Collection[str]) -> int:
    """Count the objects that runs with one of the marks have put into the quarantine."""
    place = Quarantine.of(store, quarantine)
    if place is None:
        return 0
    with place.opened(writes=False) as directory:
        return sum(
            len(batch.record.groups.files)
            for _, run in (marked_runs(directory, marks) if directory is not None else ())
            for batch in batches(run, lambda suffix: suffix == DONE)
        )


def count_unfinished(store: Store, quarantine: str | None = None) -> int:
    """Count the groups that `finish_removals` would complete. Raises the same errors."""
    place, count = Quarantine.of(store, quarantine), 0
    if place is not None:
        with place.opened(writes=False) as directory:
            for _, run in runs(directory) if directory is not None else ():
                for batch in _begun(run, store, place):
                    batch.held()
                    count += len(batch.record.groups) if run.lock() else 0
    return count


def _begun(run: Directory, store: Store, place: Quarantine) -> Iterator[Batch]:
    """Yield the batches of a run that were begun on this store.

    In the store's own quarantine, the URL is not compared: the store's directory may have been
    moved.
    """
    for batch in batches(run, lambda suffix: suffix == BEGUN):
        record = batch.record
        if record.scheme == store.grammar and (place.own or record.store == store.url):
            yield batch


def _rehearsed(
    groups: PageGroups,
    plan: RepairPlan,
    listed: ListedGroups,
    mode: Mode,
    place: Quarantine | None,
) -> GroupReport:
    """Return the report of a dry run, in which every removal succeeds."""
    objects, nbytes = int(listed.counts.sum()), listed.nbytes
    keeps = mode == "quarantine"
    models, tags = listed.names
    states = pa.repeat(WOULD_REMOVE, len(listed))
    columns = [groups.pages_at(plan.groups), *map(named, (models, tags)), listed.counts, nbytes]
    return GroupReport(
        rows=pa.table([*columns, states], schema=ROWS),
        moved=objects if keeps else 0,
        deleted=0 if keeps else objects,
        nbytes=column_sum(nbytes),
        place=str(place.path) if place is not None and keeps else None,
    )


class _Removal:
    """Page groups of one batch while they leave a store.

    groups: with their objects at the start. touched: [k] whether objects were removed.
    standing: [k] status at the last look; the final status of untouched groups.
    removed, new: [k] number of removed objects, recorded and unrecorded.
    gone: [k] number of objects that vanished before their removal.
    sight: result of the last look; None once outdated.
    resumed: whether a killed run began the removal, so objects may have left before.
    """

    def __init__(self, store: Store, groups: RecordedGroups, *, resumed: bool = False) -> None:
        self.groups = groups
        self.resumed = resumed
        self.result = MoveResult.of(groups.pages)
        self.touched = np.zeros(len(groups), dtype=np.bool_)
        self.removed, self.new, self.gone = np.zeros((3, len(groups)), dtype=np.int64)
        self.standing = np.full(len(groups), GroupStatus.DONE, dtype=np.uint8)
        self.sight: Sight | None = None
        self._store = store
        self._left = np.zeros(0, dtype=np.bool_)  # [n] whether the recorded object has left

    @classmethod
    def of_listed(cls, store: Store, listed: RecordedGroups) -> Self:
        """Look up listed groups again: findings about changed objects no longer count."""
        sight = look(store, listed)
        unwanted = np.zeros(len(sight.at), dtype=np.bool_)
        unwanted[listed.cells[sight.known(listed) & listed.unwanted]] = True
        removal = cls(store, listed.as_seen(sight, unwanted))
        removal.sight = sight
        vanished = listed.owners[~sight.present[listed.cells]]
        removal.gone = np.bincount(vanished, minlength=len(listed))
        known = np.ones(len(removal.groups.owners), dtype=np.bool_)
        removal.standing = removal.groups.judge(sight.present, known)
        # Nobody has chosen what servers wrote since the listing.
        removal.standing[listed.by_choice & listed.written_since(sight)] = GroupStatus.KEPT
        return removal

    @property
    def pending(self) -> IntArray:
        """Groups that must leave the store and have not failed."""
        return np.flatnonzero(self.result.open & (self.standing == GroupStatus.DONE))

    @property
    def whole_again(self) -> IntArray:
        """Groups left alone because they are whole."""
        return np.flatnonzero(~self.touched & (self.standing == GroupStatus.KEPT))

    def fail(self, place: int, detail: str) -> None:
        """Fail the group of an object. place: index of the object."""
        groups = self.groups
        (key,) = groups.keys_of(groups.cells[place : place + 1]).to_pylist()
        self.result.fail(int(groups.owners[place]), GroupStatus.FAILED, key, detail)

    def leave(self, mover: Mover | None) -> None:
        """Remove the pending groups: by rename if there is a mover, else by key.

        Renames remove a group within microseconds; one sync follows the whole batch. A sync between
        anchors and sidecars would give a server milliseconds to write an anchor beside a damaged
        sidecar. Without that sync, a power failure may bring back an anchor without its sidecar;
        the next run removes such a page, because the record is durable before the first rename.
        Removal by key also removes objects that a server rewrites right after the look.
        """
        self._left = np.zeros(len(self.groups.owners), dtype=np.bool_)

        if len(self.pending):
            withdraw(
                self.pending,
                self.result,
                look=self._look,
                remove=self._delete,
                take=None if mover is None else partial(self._taker, mover),
                note=self._note,
            )
        try:
            if mover is not None:
                mover.flush(into_store=False)
        except OSError as error:
            for group in np.flatnonzero(self.touched).tolist():
                why = f"removed, but a power failure may undo this: {reason_of(error)}; run again"
                self.result.fail(group, GroupStatus.FAILED, self._key_of(group), why)
        settled = self.result.open & ~self.touched
        self.result.statuses[settled] = self.standing[settled]

    def _key_of(self, group: int) -> bytes:
        """Return the key of a group's anchor or another object; recorded objects first."""
        groups = self.groups
        cells = np.arange(groups.starts[group], groups.starts[group + 1])
        recorded = np.isin(cells, groups.cells)
        order = np.lexsort((~groups.anchors[cells], ~recorded))
        key: bytes = groups.keys_of(cells[order[:1]])[0].as_py()
        return key

    def _look(self, pending: IntArray) -> Sighting:
        groups = self.groups
        sight = self.sight or look(self._store, groups, pending)
        self.sight = None
        known = sight.known(groups) & ~self._left
        standing = groups.judge(sight.present, known)
        standing[self._stays(sight)] = GroupStatus.KEPT
        self.standing[pending] = standing[pending]
        owners = groups.cell_owners
        cells = np.flatnonzero(sight.present & (self.standing[owners] == GroupStatus.DONE))
        recorded = np.full(len(owners), ABSENT, dtype=np.int64)
        recorded[groups.cells[known]] = np.flatnonzero(known)
        # Unwanted objects leave right after the anchors, before servers can write new anchors.
        unwanted = np.append(groups.unwanted, False)[recorded[cells]]
        cells = cells[np.lexsort((~unwanted, owners[cells]))]
        objects = GroupObjects(groups.keys_of(cells), owners[cells], groups.anchors[cells])
        return Sighting(objects, sight.rows.take(pa.array(sight.at[cells])), recorded[cells])

    def _stays(self, sight: Sight) -> BoolArray:
        """Return which groups without a fault were written before their first object left: [k].

        After a killed run, an anchor without its sidecars shows that some objects have left.
        """
        groups = self.groups
        stays = groups.by_choice & ~self.touched & groups.written_since(sight)
        return stays & ~groups.overtaken(sight.present) if self.resumed else stays

    def _delete(self, seen: Sighting, places: IntArray) -> Result:
        step = self._store.limits.batch_objects
        statuses, errors = np.zeros(len(places), dtype=np.uint8), {}
        for start in range(0, len(places), step):
            rows = seen.rows.take(pa.array(places[start : start + step]))
            found = self._store.delete(rows)
            statuses[start : start + step] = found.statuses
            errors.update({start + index: why for index, why in found.errors.items()})
        return Result(statuses, errors)

    def _taker(self, mover: Mover, seen: Sighting) -> Callable[[int], Status]:
        """Return a function that renames an object out of the store, by index.

        A recorded object gets its recorded file number as name, any other object a new name.
        """
        keys = seen.objects.keys.to_pylist()
        versions = seen.rows.column("version").to_pylist()
        recorded = seen.recorded.tolist()
        files = self.groups.files.tolist()

        def take(place: int) -> Status:
            is_new = recorded[place] == ABSENT
            name = f"new-{os.urandom(8).hex()}" if is_new else str(files[recorded[place]])
            return mover.take(keys[place], name, versions[place])

        return take

    def _note(self, seen: Sighting, places: IntArray, found: Result) -> None:
        owners, recorded = seen.objects.owners[places], seen.recorded[places]
        is_gone, is_recorded = found.statuses == Status.GONE, recorded != ABSENT
        self._left[recorded[is_recorded & (found.ok | is_gone)]] = True
        self.touched[owners[found.ok]] = True
        np.add.at(self.gone, owners[is_gone], 1)
        np.add.at(self.removed, owners[found.ok & is_recorded], 1)
        np.add.at(self.new, owners[found.ok & ~is_recorded], 1)


class _Worker:
    """Removal of batches of groups from one store."""

    def __init__(
        self,
        store: Store,
        place: Quarantine | None,
        mode: Mode,
        *,
        watches: bool = False,
        memory_bytes: int = MEMORY_BYTES,
        mark: str = "",
    ) -> None:
        self.full = False  # the quarantine cannot be written to: begin no further batch
        self.tried = 0
        self._store = store
        self._place = place
        self._mode: Mode = mode
        self._run = None if place is None else Run(place, mark)
        self._exits = ExitStack()
        self._memory = cache(lambda: self._exits.enter_context(copy_memory(store, memory_bytes)))
        self._watches = watches
        self._watched: list[tuple[RecordedGroups, MoveResult, IntArray]] = []
        self._rows: list[pa.Table] = []
        self._results: list[MoveResult] = []
        self._sizes = [pa.array([], pa.int64())]  # bytes of the removed groups
        self._moved = self._deleted = self._gone = 0
        self._failures: list[tuple[str, str]] = []
        self._touched = 0
        self._open: _Removal | None = None  # the removal at work

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._exits:
            if self._run is not None:
                self._run.close()

    def work(self, listed: RecordedGroups) -> None:
        """Remove a batch of listed groups; close its record."""
        removal = _Removal.of_listed(self._store, listed)
        settled = removal.standing != GroupStatus.DONE
        if not settled.all():
            self._open = removal
            self._carry_out(removal, self._mode)
            self._open = None
        removal.result.statuses[settled] = removal.standing[settled]
        self._note(removal, self._mode)

    def finish(self, batch: Batch) -> None:
        """Finish a killed run's batch."""
        batch.take_up()
        removal = _Removal(self._store, batch.record.groups, resumed=True)
        groups = removal.groups
        held = np.isin(groups.files, list(batch.held()))
        removal.touched[groups.owners[held]] = True
        with ExitStack() as exits:
            mover = open_mover(self._store, batch.folder)
            if mover is not None:
                exits.enter_context(mover)
                _drop_doubles(mover, groups, held)
            elif batch.record.mode == "quarantine":
                for place in np.flatnonzero(~held).tolist():
                    removal.fail(
                        place,
                        "its copy is missing from the quarantine, so its page was not removed; "
                        f"move {batch.run.path}/{batch.name}{BEGUN} away, then run again",
                    )
            self._take(removal, np.arange(len(groups)), batch, mover)
        self._note(removal, batch.record.mode)

    def settle(self, seconds: float) -> None:
        """Watch the removed groups, and remove pages that servers half wrote meanwhile.

        A server that saw a sidecar just before its removal does not write that sidecar again, but
        later writes the anchor.
        """
        deadline = time.monotonic() + seconds
        while self._watched and time.monotonic() < deadline:
            time.sleep(min(0.2, seconds / 5))
            for removal, _, _ in self._unsettled():
                if len(removal.pending):
                    self._carry_out(removal, "delete")
                    self._deleted += int(removal.removed.sum() + removal.new.sum())
        for _, result, places in self._unsettled():
            result.statuses[places] = GroupStatus.IN_FLIGHT

    def taken(self) -> Taken:
        """Return what was removed so far. Of the batch at work, only finished calls count."""
        removal, sizes = self._open, self._sizes
        pages, objects = self._touched, self._moved + self._deleted
        if removal is not None:
            pages += int(removal.touched.sum())
            objects += int(removal.removed.sum() + removal.new.sum())
            sizes = [*sizes, removal.groups.nbytes.filter(pa.array(removal.touched))]
        return Taken(pages, objects, column_sum(pa.concat_arrays(sizes)))

    def result(self, untried: int = 0) -> GroupReport:
        """Return the report of all batches. untried: number of groups not begun."""
        keeps = self._mode == "quarantine"
        states = [states_of(result.statuses, REMOVED) for result in self._results]
        tables = [
            rows.append_column("state", found)
            for rows, found in zip(self._rows, states, strict=True)
        ]
        return GroupReport(
            rows=pa.concat_tables([ROWS.empty_table(), *tables]),
            moved=self._moved,
            deleted=self._deleted,
            gone=self._gone,
            nbytes=column_sum(pa.concat_arrays(self._sizes)),
            failures=tuple(self._failures),
            untried=untried,
            place=str(self._place.path) if self._place is not None and keeps else None,
        )

    def _carry_out(self, removal: _Removal, mode: Mode) -> None:
        """Record groups and remove them; first copy them if they cannot be renamed.

        On a full disk, mode "delete" goes on without a record, by key: each removal of a group's
        anchors is then durable before its other objects leave. A killed run leaves at most sidecars
        that no server finds. The space serves the records of later batches.
        """
        if self._run is None:  # mode "delete", and no quarantine to keep records in
            removal.leave(None)
            return
        removal.sight = None  # outdated once the record is written
        with ExitStack() as exits:
            try:
                batch = exits.enter_context(self._run.new_batch())
                mover = open_mover(self._store, batch.folder)
                if mover is not None:
                    exits.enter_context(mover)
                copies = mover is None and mode == "quarantine"
                with batch.copying() if copies else nullcontext():
                    if copies:
                        self._copy(removal, batch)
                    recorded = removal.pending
                    if not len(recorded):
                        return
                    batch.begin(self._record(removal.groups.take(recorded), mode))
            except OSError as error:
                if mode == "delete" and error.errno in _NO_ROOM:
                    removal.leave(None)
                else:
                    self._refuse(removal, error)
                return
            self._take(removal, recorded, batch, mover)

    def _record(self, groups: RecordedGroups, mode: Mode) -> Record:
        markers = self._markers_of(groups) if mode == "quarantine" else ()
        began = present_ns(self._store, changes=True) / 1e9
        return Record(self._store.url, self._store.grammar, mode, began, groups, markers)

    def _markers_of(self, groups: RecordedGroups) -> tuple[Marker, ...]:
        """Return the markers of the objects' trailers, and one for each size of an object.

        A store may have markers of thousands of identities.
        """
        suffixes = {slot.suffix for shape in groups.shapes for slot in shape.slots}
        known = [marker for marker in markers_of(self._store) if marker.suffix in suffixes]
        if not known or not isinstance(self._store, Trailed):
            return ()
        rows = pa.table({"key": groups.keys_of(groups.cells)})
        identities = set(self._store.read_trailers(rows).column("identity").to_pylist())
        by_size = {(marker.suffix, marker.nbytes): marker for marker in known}
        used = [marker for marker in known if marker.identity.hash() in identities]
        return tuple(dict.fromkeys([*used, *by_size.values()]))

    def _take(
        self, removal: _Removal, recorded: IntArray, batch: Batch, mover: Mover | None
    ) -> None:
        """Remove recorded groups; close the record if no group failed."""
        removal.leave(mover)
        if (removal.result.statuses[recorded] == GroupStatus.FAILED).any():
            return
        try:
            if batch.record.mode == "delete":
                batch.discard()
            else:
                left = np.setdiff1d(recorded, removal.whole_again)
                batch.write(removal.groups.take(left))
        except OSError as error:
            # The begun record stays, so the next run finishes the batch.
            why = f"cannot write the record of removed pages: {reason_of(error)}; run again"
            self._failures.append((batch.run.path, why))

    def _copy(self, removal: _Removal, batch: Batch) -> None:
        """Copy the objects of the pending groups into the folder of the batch.

        If an object fails, its group stays in the store without copies.
        """
        from hicachectl.backends.file.store import FileStore

        groups, pending = removal.groups, removal.pending
        sight = look(self._store, groups, pending)
        places = np.flatnonzero(sight.present[groups.cells] & np.isin(groups.owners, pending))
        cells, facts = groups.cells[places], groups.facts.take(pa.array(places))
        names = pa.array(groups.files[places]).cast(pa.string()).cast(pa.binary())
        # Servers never read these copies, so none counts as an anchor.
        unread = np.zeros(len(places), dtype=np.bool_)
        with FileStore.within(batch.folder) as target:
            copies = copy_groups(
                self._store,
                sight.rows.take(pa.array(sight.at[cells])),
                target,
                pa.table({"key": names, "mtime_ns": facts.column("mtime_ns")}),
                GroupObjects(groups.keys_of(cells), groups.owners[places], unread),
                facts.column("nbytes").fill_null(0).to_numpy(),
                groups.pages,
                arena=self._memory(),
            )
        self.full |= copies.full
        for problem in copies.problems:
            key, why = (problem.key or "").encode(), f"not copied to quarantine: {problem.detail}"
            removal.result.fail(problem.group, GroupStatus.FAILED, key, why)
        copied = np.zeros(len(groups.owners), dtype=np.bool_)
        copied[places[copies.written]] = True
        self._forget_changed(removal, batch, copied)

    def _forget_changed(self, removal: _Removal, batch: Batch, copied: BoolArray) -> None:
        """Keep copies of unchanged or vanished objects; delete other copies."""
        groups, pending = removal.groups, removal.pending
        sight = look(self._store, groups, pending)
        unchanged = sight.known(groups) | ~sight.present[groups.cells]
        chosen = np.isin(groups.owners, np.flatnonzero(removal.standing == GroupStatus.DONE))
        kept = copied & unchanged & removal.result.open[groups.owners]
        for file in groups.files[chosen & ~kept].tolist():
            with suppress(FileNotFoundError):
                batch.folder.remove(str(file))
        removal.groups = groups.with_objects(kept | ~chosen)

    def _refuse(self, removal: _Removal, error: OSError) -> None:
        """Fail a batch whose record or copies cannot be written; its objects stay."""
        where = str(self._place.path) if self._place is not None else ""
        if error.errno not in (*_NO_ROOM, errno.EIO):
            why = failed(where, "write to the quarantine", error, "check its owner and permissions")
            raise StoreUnavailable(why) from error
        self.full = True
        why = f"cannot write to the quarantine: {reason_of(error)}; check its disk, then run again"
        self._failures.append((where, why))
        removal.result.statuses[removal.pending] = GroupStatus.FAILED

    def _note(self, removal: _Removal, mode: Mode) -> None:
        groups, result = removal.groups, removal.result
        taken, new = int(removal.removed.sum()), int(removal.new.sum())
        self._moved += taken if mode == "quarantine" else 0
        self._deleted += new if mode == "quarantine" else new + taken
        self._gone += int(removal.gone.sum())
        nbytes = groups.nbytes
        self._touched += int(removal.touched.sum())
        self._sizes.append(nbytes.filter(pa.array(removal.touched)))
        problems = sorted(result.problems, key=lambda problem: problem.group)
        self._failures += [(problem.key or "", problem.detail) for problem in problems]
        self.tried += len(groups)
        columns = [groups.pages, named(groups.models), named(groups.tags), groups.counts, nbytes]
        self._rows.append(pa.table(columns, schema=ROWS.remove(ROWS.get_field_index("state"))))
        self._results.append(result)
        places = np.flatnonzero(removal.touched & (result.statuses == GroupStatus.DONE))
        if self._watches and len(places):
            none = np.zeros(len(groups.owners), dtype=np.bool_)
            self._watched.append((groups.with_objects(none).take(places), result, places))

    def _unsettled(self) -> Iterator[tuple[_Removal, MoveResult, IntArray]]:
        """Yield the watched groups that are present but not whole, a batch at a time.

        Each batch comes with its result, and the indices of those groups in the result.
        """
        for groups, result, places in self._watched:
            watched = replace(groups)  # a copy, so that its cached properties are freed
            sight = look(self._store, watched)
            none = np.zeros(0, dtype=np.bool_)
            standing = watched.judge(sight.present, none)
            open_ = np.isin(standing, (GroupStatus.IN_FLIGHT, GroupStatus.DONE))
            if open_.any():
                # No object counts as unwanted: a whole group may stay.
                unblamed = np.zeros(len(sight.at), dtype=np.bool_)
                removal = _Removal(self._store, watched.as_seen(sight, unblamed))
                removal.standing = standing
                yield removal, result, places[open_]


def _drop_doubles(mover: Mover, groups: RecordedGroups, held: BoolArray) -> None:
    """Remove from the store the objects that a power failure left there and in the quarantine."""
    objects = GroupObjects(
        groups.keys_of(groups.cells), groups.owners, groups.anchors[groups.cells]
    )

    def drop(places: IntArray) -> Result:
        for place in places.tolist():
            mover.drop_double(objects.keys[place].as_py(), str(groups.files[place]))
        return Result(np.zeros(len(places), dtype=np.uint8))

    remove_once(objects, np.flatnonzero(held), remove=drop, on_error=lambda place, why: None)
