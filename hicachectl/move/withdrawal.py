"""Remove page groups from a store: to its quarantine, or for good.

Each batch of groups has a durable record before anything of it leaves; a run that finds the record
of a killed one finishes it.
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
from hicachectl.backends.capabilities import open_mover
from hicachectl.checks.findings import SCHEMA
from hicachectl.formats.errors import StoreUnavailable, UsageError
from hicachectl.formats.quarantine import BEGUN
from hicachectl.move.backups import MEMORY_BYTES, copy_groups, copy_memory
from hicachectl.move.listed import ListedGroups
from hicachectl.move.order import GroupObjects, Sighting, remove_once, withdraw
from hicachectl.move.planning import RepairPlan
from hicachectl.move.quarantine import Batch, Quarantine, Run, batches, runs, sweep
from hicachectl.move.record_file import Mode, Record
from hicachectl.move.recorded import RecordedGroups, Sight, look
from hicachectl.move.reports import (
    REMOVED,
    ROWS,
    WOULD_REMOVE,
    GroupReport,
    named,
    states_of,
    total,
)
from hicachectl.move.results import GroupStatus, MoveResult
from hicachectl.pages.group_table import ABSENT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hicachectl.backends.base import BoolArray, IntArray, Store
    from hicachectl.backends.capabilities import Mover
    from hicachectl.backends.disk.directory import Directory
    from hicachectl.pages.groups import PageGroups
    from hicachectl.pages.inventory import Inventory

SETTLE_SECONDS = 1.0  # longer than a server takes from a page's sidecars to its anchor
LIVE_SECONDS = 300.0  # a store that was written to so recently has a writer


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
    on_progress: Callable[[int], None] = lambda groups: None,
) -> GroupReport:
    """Remove the groups of a plan from the store.

    inventory: with the column `version` where the store has versions, so that objects rewritten
    since the scan are told from damaged ones. mode delete keeps nothing; its quarantine then has
    only the records of what is being done.
    settle_seconds: how long to watch a store with a writer for pages it has half written.
    buffer_bytes: memory for copies, if less than `MEMORY_BYTES`.
    on_progress is told how many groups were dealt with. Raises UsageError on a quarantine that
    cannot be one, StoreUnavailable; what happens to one object is in the result.
    """
    place = Quarantine.of(store, quarantine)
    if place is None and mode == "quarantine":
        raise UsageError(f"{store.url}: name a directory for its objects: --quarantine DIR")
    listed = ListedGroups(inventory, groups, plan)
    if dry_run:
        return _rehearsed(groups, plan, listed, mode, place)
    newest_ns = int(groups.newest_ns.max()) if len(groups) else 0
    live = newest_ns > time.time_ns() - int(LIVE_SECONDS * 1e9)
    memory_bytes = min(buffer_bytes, MEMORY_BYTES)
    with _Worker(store, place, mode, watches=live, memory_bytes=memory_bytes) as worker:
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
    """Delete groups from a store, as they were listed, without a record of it.

    A group that a server has rewritten since stays where it is whole again.
    inventory: with the column `version` where the store has versions.
    numbers: [k] groups. Return their statuses in this order: DONE, GONE, KEPT, IN_FLIGHT or FAILED.
    Raises StoreUnavailable.
    """
    none = np.zeros(0, dtype=np.int64)
    plan = RepairPlan(numbers, numbers, SCHEMA.empty_table(), none)
    result = MoveResult.of(groups.pages_at(numbers))
    done = 0
    for listed in ListedGroups(inventory, groups, plan).batches():
        removal = _Removal.of_listed(store, listed)
        removal.leave(None)
        removal.result.objects = int(removal.removed.sum() + removal.new.sum())
        result.include(np.arange(done, done + len(listed)), removal.result)
        done += len(listed)
    return result


def finish_removals(store: Store, quarantine: str | None = None) -> GroupReport:
    """Complete what runs that were killed had begun on this store.

    To be called before the scan by every run that removes something. What another process is
    working on is left to it. Raises FormatError on a damaged record, UntrustedError for links and
    for files of owners who are not trusted, both before anything is changed; StoreUnavailable.
    """
    place, unrecorded = Quarantine.of(store, quarantine), list[str]()
    if place is None:
        return GroupReport()
    with place.opened(writes=True) as directory, _Worker(store, None, "delete") as worker:
        if directory is None:
            return GroupReport()
        for _, run in runs(directory):
            for batch in _begun(run, store, place):
                batch.held()  # checked before anything is changed
        for name, run in runs(directory):
            if run.lock():
                for batch in _begun(run, store, place):
                    worker.finish(batch)
                unrecorded += sweep(run, directory, name)
        return replace(worker.result(), unrecorded=tuple(unrecorded))


def count_unfinished(store: Store, quarantine: str | None = None) -> int:
    """Count the groups that `finish_removals` would complete. Raises as that does."""
    place, count = Quarantine.of(store, quarantine), 0
    if place is not None:
        with place.opened(writes=False) as directory:
            for _, run in runs(directory) if directory is not None else ():
                for batch in _begun(run, store, place):
                    batch.held()
                    count += len(batch.record.groups) if run.lock() else 0
    return count


def _begun(run: Directory, store: Store, place: Quarantine) -> Iterator[Batch]:
    """Batches of a run that were begun on this store; beside it lie its own, wherever it moved."""
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
    """Return the result of a run in which nothing fails or changes meanwhile."""
    objects, nbytes = int(listed.counts.sum()), listed.nbytes
    keeps = mode == "quarantine"
    models, tags = listed.names
    states = pa.repeat(WOULD_REMOVE, len(listed))
    columns = [groups.pages_at(plan.groups), *map(named, (models, tags)), listed.counts, nbytes]
    return GroupReport(
        rows=pa.table([*columns, states], schema=ROWS),
        moved=objects if keeps else 0,
        deleted=0 if keeps else objects,
        nbytes=total(nbytes),
        place=str(place.path) if place is not None and keeps else None,
    )


class _Removal:
    """Page groups of one batch while they leave a store.

    groups: as they were when the removal began. result: of groups that nothing was done to, what
    is there tells. touched: [k] groups of which objects have left.
    removed, new: [k] recorded objects that were removed, and others. gone: [k] objects that had
    vanished. sight: what is there, where that was looked at a moment ago.
    """

    def __init__(self, store: Store, groups: RecordedGroups) -> None:
        self.groups = groups
        self.result = MoveResult.of(groups.pages)
        self.touched = np.zeros(len(groups), dtype=np.bool_)
        self.removed, self.new, self.gone = np.zeros((3, len(groups)), dtype=np.int64)
        self.standing = np.full(len(groups), GroupStatus.DONE, dtype=np.uint8)
        self.sight: Sight | None = None
        self._store = store
        self._left = np.zeros(0, dtype=np.bool_)  # [n] recorded objects that have left

    @classmethod
    def of_listed(cls, store: Store, listed: RecordedGroups) -> Self:
        """Look at listed groups again: what has changed since the scan is not what was found."""
        sight = look(store, listed)
        unwanted = np.zeros(len(sight.at), dtype=np.bool_)
        unwanted[listed.cells[sight.known(listed) & listed.unwanted]] = True
        removal = cls(store, listed.as_seen(sight, unwanted))
        removal.sight = sight
        vanished = listed.owners[~sight.present[listed.cells]]
        removal.gone = np.bincount(vanished, minlength=len(listed))
        known = np.ones(len(removal.groups.owners), dtype=np.bool_)
        removal.standing = removal.groups.judge(sight.present, known)
        return removal

    @property
    def pending(self) -> IntArray:
        """The groups that must leave, and of which nothing has failed."""
        return np.flatnonzero(self.result.open & (self.standing == GroupStatus.DONE))

    @property
    def whole_again(self) -> IntArray:
        """The groups that were left alone, since they are whole."""
        return np.flatnonzero(~self.touched & (self.standing == GroupStatus.KEPT))

    def fail(self, place: int, detail: str) -> None:
        """Note that an object kept its group from leaving. place: of the object."""
        groups = self.groups
        (key,) = groups.keys_of(groups.cells[place : place + 1]).to_pylist()
        self.result.fail(int(groups.owners[place]), GroupStatus.FAILED, key, detail)

    def leave(self, mover: Mover | None) -> None:
        """Remove the pending groups: by rename where there is a mover, else by key.

        By rename, a group's anchors and sidecars go within microseconds, and are synced with the
        whole batch: a sync between them would give a server milliseconds in which to write an
        anchor beside a damaged sidecar. A power failure can therefore keep a sidecar's rename and
        lose its anchor's; the record, durable before the first rename, names the page for the next
        run. By key, what a server rewrites right after the look goes as well.
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
                why = f"not certain to be on disk: {error.strerror}"
                self.result.fail(group, GroupStatus.FAILED, b"", why)
        settled = self.result.open & ~self.touched
        self.result.statuses[settled] = self.standing[settled]

    def _look(self, pending: IntArray) -> Sighting:
        groups = self.groups
        sight = self.sight or look(self._store, groups, pending)
        self.sight = None
        known = sight.known(groups) & ~self._left
        self.standing[pending] = groups.judge(sight.present, known)[pending]
        owners = groups.cell_owners
        cells = np.flatnonzero(sight.present & (self.standing[owners] == GroupStatus.DONE))
        recorded = np.full(len(owners), ABSENT, dtype=np.int64)
        recorded[groups.cells[known]] = np.flatnonzero(known)
        # What is unwanted goes right after the anchors: no anchor that comes back may find it.
        unwanted = np.append(groups.unwanted, False)[recorded[cells]]
        cells = cells[np.lexsort((~unwanted, owners[cells]))]
        objects = GroupObjects(groups.keys_of(cells), owners[cells], groups.anchors[cells])
        return Sighting(objects, sight.rows.take(pa.array(sight.at[cells])), recorded[cells])

    def _delete(self, seen: Sighting, places: IntArray) -> Result:
        """Delete objects by key."""
        step = self._store.limits.batch_objects
        statuses, errors = np.zeros(len(places), dtype=np.uint8), {}
        for start in range(0, len(places), step):
            rows = seen.rows.take(pa.array(places[start : start + step]))
            found = self._store.delete(rows)
            statuses[start : start + step] = found.statuses
            errors.update({start + index: why for index, why in found.errors.items()})
        return Result(statuses, errors)

    def _taker(self, mover: Mover, seen: Sighting) -> Callable[[int], Status]:
        """Return what renames an object: a recorded one to the file that its record names."""
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
        """Count what has left."""
        owners, recorded = seen.objects.owners[places], seen.recorded[places]
        is_gone, is_recorded = found.statuses == Status.GONE, recorded != ABSENT
        self._left[recorded[is_recorded & (found.ok | is_gone)]] = True
        self.touched[owners[found.ok]] = True
        np.add.at(self.gone, owners[is_gone], 1)
        np.add.at(self.removed, owners[found.ok & is_recorded], 1)
        np.add.at(self.new, owners[found.ok & ~is_recorded], 1)


class _Worker:
    """Takes batches of groups out of one store."""

    def __init__(
        self,
        store: Store,
        place: Quarantine | None,
        mode: Mode,
        *,
        watches: bool = False,
        memory_bytes: int = MEMORY_BYTES,
    ) -> None:
        self.full = False  # the quarantine has no room: nothing more is begun
        self.tried = 0
        self._store = store
        self._place = place
        self._mode: Mode = mode
        self._run = None if place is None else Run(place)
        self._exits = ExitStack()
        self._memory = cache(lambda: self._exits.enter_context(copy_memory(store, memory_bytes)))
        self._watches = watches
        self._watched: list[tuple[RecordedGroups, MoveResult, IntArray]] = []
        self._rows: list[pa.Table] = []
        self._results: list[MoveResult] = []
        self._sizes = [pa.array([], pa.int64())]  # of the groups taken away
        self._moved = self._deleted = self._gone = 0
        self._failures: list[tuple[str, str]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._exits:
            if self._run is not None:
                self._run.close()

    def work(self, listed: RecordedGroups) -> None:
        """Take a batch away, from its record to its end."""
        removal = _Removal.of_listed(self._store, listed)
        settled = removal.standing != GroupStatus.DONE
        if not settled.all():
            self._carry_out(removal, self._mode)
        removal.result.statuses[settled] = removal.standing[settled]
        self._note(removal, self._mode)

    def finish(self, batch: Batch) -> None:
        """Take away what is left of the groups of a batch that a killed run had begun."""
        batch.take_up()
        removal = _Removal(self._store, batch.record.groups)
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
                    removal.fail(place, "its copy is in the quarantine no more")
            self._take(removal, np.arange(len(groups)), batch, mover)
        self._note(removal, batch.record.mode)

    def settle(self, seconds: float) -> None:
        """Look after the groups taken away, and take what a server half wrote of them meanwhile.

        One that had looked for a sidecar just before it was taken writes its anchor later.
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

    def result(self, untried: int = 0) -> GroupReport:
        """Sum up."""
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
            nbytes=total(pa.concat_arrays(self._sizes)),
            failures=tuple(self._failures),
            untried=untried,
            place=str(self._place.path) if self._place is not None and keeps else None,
        )

    def _carry_out(self, removal: _Removal, mode: Mode) -> None:
        """Take groups away under a record, with copies of them where they cannot be moved."""
        if self._run is None:  # mode delete, and no place for a record
            removal.leave(None)
            return
        removal.sight = None  # it is old once there is a record
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
                    url, scheme, now = self._store.url, self._store.grammar, time.time()
                    batch.begin(Record(url, scheme, mode, now, removal.groups.take(recorded)))
            except OSError as error:
                self._refuse(removal, error)
                return
            self._take(removal, recorded, batch, mover)

    def _take(
        self, removal: _Removal, recorded: IntArray, batch: Batch, mover: Mover | None
    ) -> None:
        """Take recorded groups away; the record is done once none of them has failed."""
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
            # The record of what was begun is there, and the next run finishes it.
            self._failures.append((batch.run.path, error.strerror or str(error)))

    def _copy(self, removal: _Removal, batch: Batch) -> None:
        """Copy every object of the groups that must leave into the folder of the batch.

        A group of which one object fails stays, without copies.
        """
        from hicachectl.backends.file.store import FileStore

        groups, pending = removal.groups, removal.pending
        sight = look(self._store, groups, pending)
        places = np.flatnonzero(sight.present[groups.cells] & np.isin(groups.owners, pending))
        cells, facts = groups.cells[places], groups.facts.take(pa.array(places))
        names = pa.array(groups.files[places]).cast(pa.string()).cast(pa.binary())
        unread = np.zeros(len(places), dtype=np.bool_)  # of a backup no server reads anchors
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
            key, why = (problem.key or "").encode(), f"cannot be copied: {problem.detail}"
            removal.result.fail(problem.group, GroupStatus.FAILED, key, why)
        copied = np.zeros(len(groups.owners), dtype=np.bool_)
        copied[places[copies.written]] = True
        self._forget_changed(removal, batch, copied)

    def _forget_changed(self, removal: _Removal, batch: Batch, copied: BoolArray) -> None:
        """Record only copies of what is still there as it was copied; remove the others."""
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
        """Give up a batch that has no record: nothing of it was touched."""
        where = str(self._place.path) if self._place is not None else ""
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise StoreUnavailable(
                f"cannot write to the quarantine {where}: {error.strerror}"
            ) from error
        self.full = True
        self._failures.append((where, error.strerror or str(error)))
        removal.result.statuses[removal.pending] = GroupStatus.FAILED

    def _note(self, removal: _Removal, mode: Mode) -> None:
        """Enter what became of a batch of groups."""
        groups, result = removal.groups, removal.result
        taken, new = int(removal.removed.sum()), int(removal.new.sum())
        self._moved += taken if mode == "quarantine" else 0
        self._deleted += new if mode == "quarantine" else new + taken
        self._gone += int(removal.gone.sum())
        nbytes = groups.nbytes
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
        """Look at the watched groups; give those of which something is there that is not whole.

        Of each batch of them the result that they are in, and their places there.
        """
        for groups, result, places in self._watched:
            watched = replace(groups)  # what it works out of each cell ends with it
            sight = look(self._store, watched)
            none = np.zeros(0, dtype=np.bool_)
            standing = watched.judge(sight.present, none)
            open_ = np.isin(standing, (GroupStatus.IN_FLIGHT, GroupStatus.DONE))
            if open_.any():
                # None of the objects is unwanted once their group is whole.
                unblamed = np.zeros(len(sight.at), dtype=np.bool_)
                removal = _Removal(self._store, watched.as_seen(sight, unblamed))
                removal.standing = standing
                yield removal, result, places[open_]


def _drop_doubles(mover: Mover, groups: RecordedGroups, held: BoolArray) -> None:
    """Take out of the store what a power failure has left in both places."""
    objects = GroupObjects(
        groups.keys_of(groups.cells), groups.owners, groups.anchors[groups.cells]
    )

    def drop(places: IntArray) -> Result:
        for place in places.tolist():
            mover.drop_double(objects.keys[place].as_py(), str(groups.files[place]))
        return Result(np.zeros(len(places), dtype=np.uint8))

    remove_once(objects, np.flatnonzero(held), remove=drop, on_error=lambda place, why: None)
