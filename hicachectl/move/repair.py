"""Carry out a repair plan: page groups leave a store for its quarantine, or for good.

Each batch of groups has a durable record before anything of it moves; a run that finds the
record of one that was killed finishes it.
"""

from __future__ import annotations

import errno
import os
import time
from collections import Counter
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.backends.base import Status
from hicachectl.backends.capabilities import SideFiles, open_mover
from hicachectl.formats.errors import StoreUnavailable, UsageError
from hicachectl.move.batching import BATCH_OBJECTS, Planned, Planner
from hicachectl.move.quarantine import BEGUN, Batch, Quarantine, Run, batches, runs, sweep
from hicachectl.move.records import Facts, Mode, Record, TakenGroup, TakenObject, total_bytes
from hicachectl.move.relocation import copy_objects
from hicachectl.move.removal import Deleting, MovingOut, Standing, Work, look, take_away
from hicachectl.pages.deployments import UNRESOLVED
from hicachectl.pages.groups import UNKNOWN_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from hicachectl.backends.base import Store
    from hicachectl.backends.capabilities import Mover
    from hicachectl.backends.disk.directory import Directory
    from hicachectl.move.planning import RepairPlan
    from hicachectl.pages.groups import PageGroups
    from hicachectl.pages.inventory import IntArray, Inventory

SETTLE_SECONDS = 1.0  # longer than a server takes from a page's sidecars to its anchor
LIVE_SECONDS = 300.0  # a store that was written to so recently has a writer

REMOVED = "removed"
WOULD_REMOVE = "would-remove"  # in a dry run
GONE = "gone"  # it had vanished before we came
KEPT = "kept"  # a server has rewritten what was wrong with it
IN_FLIGHT = "in-flight"  # removed; a server is writing it anew
FAILED = "failed"

ROWS = pa.schema(
    [
        ("page", pa.string()),
        ("model", pa.string()),
        ("tag", pa.string()),
        ("objects", pa.int64()),
        ("nbytes", pa.int64()),
        ("state", pa.string()),
    ]
)


@dataclass(frozen=True, slots=True)
class RepairOutcome:
    """What a repair did.

    repaired: groups taken away. quarantined, deleted: objects. gone: objects that had vanished.
    kept: groups left alone, since a server had rewritten what was wrong. nbytes: taken away, None
    where a size is not known.
    failed: (key or place, message). remaining: groups that should have gone and are still there.
    rows: page, model, tag, objects, nbytes and state of each group that was tried.
    quarantine: where the objects are; None where nothing is kept. unrecorded: folders of the
    quarantine whose objects no record names; left alone, since they may be the only copies.
    """

    repaired: int = 0
    quarantined: int = 0
    deleted: int = 0
    gone: int = 0
    kept: int = 0
    nbytes: int | None = 0
    failed: tuple[tuple[str, str], ...] = ()
    remaining: int = 0
    rows: pa.Table = field(default_factory=ROWS.empty_table)
    quarantine: str | None = None
    unrecorded: tuple[str, ...] = ()


def run_repair(
    store: Store,
    inventory: Inventory,
    groups: PageGroups,
    plan: RepairPlan,
    *,
    mode: Mode,
    quarantine: str | None = None,
    dry_run: bool = False,
    settle_seconds: float = SETTLE_SECONDS,
    on_progress: Callable[[int], None] = lambda groups: None,
) -> RepairOutcome:
    """Take the groups of a plan out of the store.

    inventory: with the column `version` where the store has versions, so that objects rewritten
    since the scan are told from damaged ones. mode delete keeps nothing; its quarantine then has
    only the records of what is being done.
    settle_seconds: how long to watch a store with a writer for pages it has half written.
    on_progress is told how many groups were dealt with. Raises UsageError on a quarantine that
    cannot be one, StoreUnavailable; what happens to one object is in the outcome.
    """
    place = quarantine_of(store, quarantine)
    if place is None and mode == "quarantine":
        raise UsageError(f"{store.url}: name a directory for its objects: --quarantine DIR")
    if dry_run:
        return _rehearse(groups, plan, mode, place)
    planner = Planner(inventory, groups, plan)
    newest_ns = int(groups.newest_ns.max()) if len(groups) else 0
    live = newest_ns > time.time_ns() - int(LIVE_SECONDS * 1e9)
    with _Worker(store, place, mode) as worker:
        for planned in planner.batches():
            worker.work(planned)
            on_progress(len(planned))
            if worker.full:
                break
        if live:
            worker.settle(settle_seconds)
        return worker.outcome(untried=len(planner) - worker.tried)


def finish_unfinished(store: Store, quarantine: str | None = None) -> RepairOutcome:
    """Complete what runs that were killed had begun on this store.

    To be called before the scan by every run that removes something. What another process is
    working on is left to it. Raises FormatError on a damaged record, UntrustedError for links and
    for files of owners who are not trusted, both before anything is changed; StoreUnavailable.
    """
    outcome = RepairOutcome()
    place = quarantine_of(store, quarantine)
    with _opened(place, writes=True) as directory:
        if directory is None:
            return outcome
        for _ in _unfinished(store, place, directory):
            pass  # each is checked before anything is changed
        for name, run in runs(directory):
            if run.lock():
                for batch in _unfinished_of(run, store, place):
                    worker = _Worker(store, place, batch.record.mode)
                    worker.finish(batch)
                    outcome = _added(outcome, worker.outcome())
                unrecorded = sweep(run, directory, name)
                outcome = replace(outcome, unrecorded=(*outcome.unrecorded, *unrecorded))
    return outcome


def count_unfinished(store: Store, quarantine: str | None = None) -> int:
    """Count the groups that `finish_unfinished` would complete. Raises as that does."""
    place = quarantine_of(store, quarantine)
    with _opened(place, writes=False) as directory:
        return sum(
            len(batch.record.groups)
            for run, batch in _unfinished(store, place, directory)
            if run.lock()
        )


def quarantine_of(store: Store, quarantine: str | None) -> Quarantine | None:
    """Return a store's quarantine: the one named, else the one beside the store.

    None where none is named and the store has no place. Raises UsageError where it cannot be.
    """
    from hicachectl.backends.urls import parse_url

    beside = store.side_directory() if isinstance(store, SideFiles) else None
    if quarantine is None:
        return None if beside is None else Quarantine(store)
    url = parse_url(quarantine)
    path = Path(url.path)
    if url.scheme != "file" or (path.exists() and not path.is_dir()):
        raise UsageError(f"--quarantine {quarantine}: must be a directory")
    if beside is not None and os.path.realpath(path) == os.path.realpath(beside.parent):
        raise UsageError(f"--quarantine {quarantine}: is the store itself")
    return Quarantine(store, path)


@contextmanager
def _opened(place: Quarantine | None, *, writes: bool) -> Iterator[Directory | None]:
    """Open a quarantine that is there; writes: the files in it are to be changed."""
    directory = None
    try:
        if place is not None:
            directory = place.find(writes=writes)
        yield directory
    except OSError as error:
        raise StoreUnavailable(
            f"cannot work in {place and place.path}: {error.strerror}"
        ) from error
    finally:
        if directory is not None:
            directory.close()


def _unfinished(
    store: Store, place: Quarantine | None, directory: Directory | None
) -> Iterator[tuple[Directory, Batch]]:
    """Check a quarantine; give the batches that `finish_unfinished` would complete, with runs."""
    for _, run in runs(directory) if directory is not None else ():
        for batch in _unfinished_of(run, store, place):
            batch.held()
            yield run, batch


def _unfinished_of(run: Directory, store: Store, place: Quarantine | None) -> Iterator[Batch]:
    """Batches of a run that were begun on this store; beside it lie its own, wherever it moved."""
    for batch in batches(run, lambda suffix: suffix == BEGUN):
        record = batch.record
        own = place is not None and place.own
        if record.scheme == store.grammar and (own or record.store == store.url):
            yield batch


def _added(one: RepairOutcome, other: RepairOutcome) -> RepairOutcome:
    return RepairOutcome(
        repaired=one.repaired + other.repaired,
        quarantined=one.quarantined + other.quarantined,
        deleted=one.deleted + other.deleted,
        gone=one.gone + other.gone,
        kept=one.kept + other.kept,
        nbytes=total_bytes([one.nbytes, other.nbytes]),
        failed=one.failed + other.failed,
        remaining=one.remaining + other.remaining,
        rows=pa.concat_tables([one.rows, other.rows]),
        quarantine=one.quarantine or other.quarantine,
        unrecorded=one.unrecorded + other.unrecorded,
    )


def _rehearse(
    groups: PageGroups, plan: RepairPlan, mode: Mode, place: Quarantine | None
) -> RepairOutcome:
    """Return the outcome of a repair in which nothing fails or changes meanwhile."""
    rows = _planned_rows(groups, plan.groups)
    objects = pc.sum(rows.column("objects")).as_py() or 0
    keeps = mode == "quarantine"
    return RepairOutcome(
        repaired=len(rows),
        quarantined=objects if keeps else 0,
        deleted=0 if keeps else objects,
        nbytes=groups.total_bytes(plan.groups),
        rows=rows,
        quarantine=str(place.path) if place is not None and keeps else None,
    )


def _planned_rows(groups: PageGroups, chosen: IntArray) -> pa.Table:
    """Make the row of each chosen group, for a repair that is not done."""
    deployments = groups.deployment_ids[chosen]
    which = pa.array(deployments, mask=deployments == UNRESOLVED)
    nbytes = groups.nbytes[chosen]
    columns = {
        "page": groups.pages_at(chosen),
        "model": pa.array([d.model or None for d in groups.deployments], pa.string()).take(which),
        "tag": pa.array([d.tag or None for d in groups.deployments], pa.string()).take(which),
        "objects": groups.object_counts[chosen],
        "nbytes": pa.array(nbytes, mask=nbytes == UNKNOWN_BYTES),
        "state": pa.repeat(WOULD_REMOVE, len(chosen)),
    }
    return pa.table(columns, schema=ROWS)


class _Ledger:
    """Notes what became of each group."""

    def __init__(self) -> None:
        self.columns: dict[str, list[Any]] = {name: [] for name in ROWS.names}

    def note(
        self, page: str, model: str, tag: str, sizes: Sequence[int | None], state: str
    ) -> None:
        row = (page, model or None, tag or None, len(sizes), total_bytes(sizes), state)
        for column, value in zip(self.columns.values(), row, strict=True):
            column.append(value)

    def table(self) -> pa.Table:
        return pa.table(self.columns, schema=ROWS)


class _Worker:
    """Takes batches of groups out of one store."""

    def __init__(self, store: Store, place: Quarantine | None, mode: Mode) -> None:
        self.full = False  # the quarantine has no room: nothing more is begun
        self._store = store
        self._place = place
        self._mode: Mode = mode
        self._run = None if place is None else Run(place)
        self._ledger = _Ledger()
        self._watched: dict[int, TakenGroup] = {}  # row of the ledger to the group, to be settled
        self._counts: Counter[str] = Counter()
        self._sizes: list[int | None] = []  # of the groups taken away
        self._failed: list[tuple[str, str]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._run is not None:
            self._run.close()

    @property
    def tried(self) -> int:
        """How many groups the ledger has."""
        return len(self._ledger.columns["page"])

    def work(self, planned: Sequence[Planned]) -> None:
        """Take a batch away, from its record to its end."""
        works = self._as_they_are(planned)
        bad = [work for work in works if work.standing is Standing.BAD]
        if bad:
            self._carry_out(bad, self._mode)
        for work in works:
            self._note(work)

    def finish(self, batch: Batch) -> None:
        """Take away what is left of the groups of a batch that a killed run had begun."""
        batch.take_up()
        held = batch.held()
        works = [
            Work(group, touched=any(o.file in held for o in group.objects))
            for group in batch.record.groups
        ]
        with ExitStack() as exits:
            mover = open_mover(self._store, batch.folder)
            if mover is not None:
                exits.enter_context(mover)
                _drop_doubles(mover, batch.record.groups, held)
            elif batch.record.mode == "quarantine":
                for work in works:
                    work.error = _lost_copy(work.group, held)
            self._take(works, batch, mover)
        for work in works:
            self._note(work)

    def settle(self, seconds: float) -> None:
        """Look after the groups taken away, and take what a server half wrote of them meanwhile.

        One that had looked for a sidecar just before it was taken writes its anchor later.
        """
        deadline = time.monotonic() + seconds
        while self._watched and time.monotonic() < deadline:
            time.sleep(min(0.2, seconds / 5))
            bad = [w for w in self._unsettled().values() if w.standing is Standing.BAD]
            if bad:
                self._carry_out(bad, "delete")
                self._counts["new"] += sum(work.removed + work.new for work in bad)
        for row in self._unsettled():
            self._ledger.columns["state"][row] = IN_FLIGHT

    def outcome(self, untried: int = 0) -> RepairOutcome:
        """Sum up."""
        states = Counter(self._ledger.columns["state"])
        keeps = self._mode == "quarantine"
        taken = self._counts["taken"]
        return RepairOutcome(
            repaired=states[REMOVED] + states[IN_FLIGHT],
            quarantined=taken if keeps else 0,
            deleted=self._counts["new"] + (0 if keeps else taken),
            gone=self._counts["gone"],
            kept=states[KEPT],
            nbytes=total_bytes(self._sizes),
            failed=tuple(self._failed),
            remaining=states[FAILED] + untried,
            rows=self._ledger.table(),
            quarantine=str(self._place.path) if self._place is not None and keeps else None,
        )

    def _as_they_are(self, planned: Sequence[Planned]) -> list[Work]:
        """Look at planned groups again: what has changed since the scan is not what was found."""
        bare = [TakenGroup(p.page, p.model, p.tag, p.shape, ()) for p in planned]
        seen = look(self._store, bare)
        works = []
        files = 0
        for plan, group in zip(planned, bare, strict=True):
            there = seen.of(group)
            work = Work(plan.as_it_is(there, files), gone=len(plan.scanned.keys() - there.keys()))
            work.standing = work.judge(there)
            works.append(work)
            files += len(there)
        return works

    def _carry_out(self, works: Sequence[Work], mode: Mode) -> None:
        """Take groups away under a record, with copies of them where they cannot be moved."""
        if self._run is None:  # mode delete, and no place for a record
            take_away(self._store, works, Deleting(self._store))
            return
        with ExitStack() as exits:
            try:
                batch = exits.enter_context(self._run.new_batch())
                mover = open_mover(self._store, batch.folder)
                if mover is not None:
                    exits.enter_context(mover)
                copies = mover is None and mode == "quarantine"
                with batch.copying() if copies else nullcontext():
                    if copies:
                        self._copy(works, batch)
                    works = [work for work in works if work.error is None]
                    if not works:
                        return
                    groups = tuple(work.group for work in works)
                    record = Record(self._store.url, self._store.grammar, mode, time.time(), groups)
                    batch.begin(record)
            except OSError as error:
                self._refuse(works, error)
                return
            self._take(works, batch, mover)

    def _take(self, works: Sequence[Work], batch: Batch, mover: Mover | None) -> None:
        """Take recorded groups away; the record is done once none of them has failed."""
        exit_ = Deleting(self._store) if mover is None else MovingOut(mover)
        take_away(self._store, [work for work in works if work.error is None], exit_)
        if any(work.error is not None for work in works):
            return
        try:
            if batch.record.mode == "delete":
                batch.discard()
            else:
                untouched = (w.standing is Standing.SOUND and not w.touched for w in works)
                batch.write([w.group for w, kept in zip(works, untouched, strict=True) if not kept])
        except OSError as error:
            # The record of what was begun is there, and the next run finishes it.
            self._failed.append((batch.run.path, error.strerror or str(error)))

    def _copy(self, works: Sequence[Work], batch: Batch) -> None:
        """Copy every object of some groups; a group of which one fails stays, without copies."""
        from hicachectl.backends.file.store import FileStore

        seen = look(self._store, (work.group for work in works))
        objects = [
            (w, o, seen.places.get(w.group.key(o.slot))) for w in works for o in w.group.objects
        ]
        there = [(work, taken, place) for work, taken, place in objects if place is not None]
        sizes = np.array([taken.facts.nbytes or 0 for _, taken, _ in there], dtype=np.int64)
        rows = seen.rows.take(pa.array([place for _, _, place in there], pa.int64()))
        names = pa.table(
            {
                "key": pa.array([str(taken.file).encode() for _, taken, _ in there], pa.binary()),
                "mtime_ns": pa.array([taken.facts.mtime_ns for _, taken, _ in there], pa.int64()),
            }
        )
        with FileStore.within(batch.folder) as target:
            result = copy_objects(self._store, rows, target, names, sizes)
        self.full |= bool((result.statuses == Status.FULL).any())
        for number, message in result.errors.items():
            work, taken, _ = there[number]
            work.error = work.error or (work.group.key(taken.slot), f"cannot be copied: {message}")
        self._forget_changed(
            works, batch, {t.file for (_, t, _), ok in zip(there, result.ok, strict=True) if ok}
        )

    def _forget_changed(self, works: Sequence[Work], batch: Batch, copied: set[int]) -> None:
        """Record only copies of what is still there as it was copied; remove the others."""
        seen = look(self._store, (work.group for work in works))
        for work in works:
            there = seen.of(work.group)
            kept = tuple(
                taken
                for taken in work.group.objects
                if taken.file in copied
                and work.error is None
                and (taken.slot not in there or taken.facts.same(there[taken.slot]))
            )
            for taken in work.group.objects:
                if taken not in kept:
                    with suppress(FileNotFoundError):
                        batch.folder.remove(str(taken.file))
            work.group = replace(work.group, objects=kept)

    def _refuse(self, works: Sequence[Work], error: OSError) -> None:
        """Give up a batch that has no record: nothing of it was touched."""
        where = str(self._place.path) if self._place is not None else ""
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise StoreUnavailable(
                f"cannot write to the quarantine {where}: {error.strerror}"
            ) from error
        self.full = True
        self._failed.append((where, error.strerror or str(error)))
        for work in works:
            work.error = b"", ""

    def _note(self, work: Work) -> None:
        """Enter in the ledger what became of a group."""
        self._counts["gone"] += work.gone
        self._counts["new"] += work.new
        self._counts["taken"] += work.removed
        sizes = [taken.facts.nbytes for taken in work.group.objects]
        if work.touched:
            self._sizes.append(total_bytes(sizes))
        if work.error is not None:
            state = FAILED
            if work.error[1]:
                self._failed.append(
                    (work.error[0].decode(errors="backslashreplace"), work.error[1])
                )
        elif work.touched:
            state = REMOVED
            self._watched[self.tried] = replace(work.group, objects=(), findings=())
        else:
            state = {Standing.NOTHING: GONE, Standing.SOUND: KEPT}.get(work.standing, IN_FLIGHT)
        group = work.group
        self._ledger.note(group.page, group.model, group.tag, sizes, state)

    def _unsettled(self) -> dict[int, Work]:
        """Look at the watched groups; give those of which something is there that is not whole."""
        unsettled: dict[int, Work] = {}
        files = 0
        rows = list(self._watched)
        for start in range(0, len(rows), BATCH_OBJECTS):
            some = rows[start : start + BATCH_OBJECTS]
            seen = look(self._store, (self._watched[row] for row in some))
            for row in some:
                there = seen.of(self._watched[row])
                work = Work(self._watched[row])
                work.standing = work.judge(there)
                if work.standing in (Standing.COMING, Standing.BAD):
                    work.group = replace(work.group, objects=_unblamed(there, files))
                    unsettled[row] = work
                    files += len(there)
        return unsettled


def _drop_doubles(mover: Mover, groups: Sequence[TakenGroup], held: Collection[int]) -> None:
    """Take out of the store what a power failure has left in both places: anchors first."""
    for anchor in (True, False):
        for group in groups:
            for taken in group.objects:
                if taken.file in held and group.shape[taken.slot].anchor == anchor:
                    mover.drop_double(group.key(taken.slot), str(taken.file))


def _lost_copy(group: TakenGroup, held: Collection[int]) -> tuple[bytes, str] | None:
    """Name an object of which the quarantine no longer has the copy, so that it must not go."""
    for taken in group.objects:
        if taken.file not in held:
            return group.key(taken.slot), "its copy is in the quarantine no more"
    return None


def _unblamed(there: Mapping[int, Facts], first_file: int) -> tuple[TakenObject, ...]:
    """Describe objects of which none is unwanted once their group is whole."""
    return tuple(
        TakenObject(slot, number, False, facts)
        for number, (slot, facts) in enumerate(there.items(), first_file)
    )
