"""Carry parcels from a store to another through the pipeline: read, make, write, in its threads."""

from __future__ import annotations

import threading
import time
from collections import deque
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from hicachectl.backends.base import Status
from hicachectl.backends.capabilities import Leases, RacyWrites
from hicachectl.backends.hf3fs.page_tables import PageTables
from hicachectl.io.pacing import Pace
from hicachectl.io.pipeline import DEFAULT_BUFFER_BYTES, Loaded, Pipeline
from hicachectl.move.decisions import READS_BACK, Action, Problem
from hicachectl.move.delivery import CHANGES, Delivered, Destination, Fate
from hicachectl.move.parcels import Parcel, parcels

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from hicachectl.backends.base import IntArray, Store
    from hicachectl.move.journal import Journal
    from hicachectl.move.survey import Survey
    from hicachectl.pages.groups import PageGroups
    from hicachectl.pages.inventory import Inventory

_JOBS = 3  # one reads while others write, or wait for the disk
# Large enough that a call is worth it and a sync is shared, small enough that several are at work.
_PARCEL_BYTES = 64 << 20
_LEAST_OBJECTS = 256
_LAST_BYTES = 256 << 10  # of a parcel, while the last room is filled
MOST_PROBLEMS = 1000  # to remember
# Before each pass over what came to the destination meanwhile, for its writer to finish. What a
# killed one had begun Mooncake gives up after 30 s.
_WAIT_SECONDS = (0.5, 1.5, 4.0, 10.0, 20.0)
_LEASE_SECONDS = 15.0  # longer than those that reading grants last, as a rule


@dataclass(frozen=True, slots=True, eq=False)
class Order:
    """Groups of one survey that one thing is done with, in the order in which it is done."""

    survey: Survey
    items: IntArray
    action: Action


@dataclass(frozen=True, slots=True, kw_only=True)
class Manner:
    """How to carry.

    jobs: threads. verify: read back and compare what was written. move: then delete it from the
    source. pin: protect it from eviction, for pin_seconds or as long as the store's default says.
    deadline: `time.monotonic()` after which no parcel is begun.
    """

    buffer_bytes: int = DEFAULT_BUFFER_BYTES
    jobs: int | None = None
    bytes_per_second: int | None = None
    verify: bool = False
    move: bool = False
    pin: bool = False
    pin_seconds: float | None = None
    deadline: float | None = None


@dataclass(slots=True)
class Tally:
    """What has become of the groups so far; pages are those that were written.

    same: pages that were compared and found equal. complete: whether all was begun.
    """

    pages: int = 0
    objects: int = 0
    nbytes: int = 0
    same: int = 0
    gone: int = 0
    conflicts: int = 0
    failed: int = 0
    moved: int = 0
    full: bool = False
    complete: bool = True
    problems: list[Problem] = field(default_factory=list)

    def note(self, problem: Problem) -> None:
        """Remember a problem, unless there are too many."""
        if len(self.problems) < MOST_PROBLEMS:
            self.problems.append(problem)


class Carrier:
    """Carries the groups of orders from one store to another."""

    def __init__(
        self,
        source: Store,
        inventory: Inventory,
        groups: PageGroups,
        destination: Store,
        manner: Manner,
        journal: Journal | None = None,
    ) -> None:
        self.tally = Tally()
        self._source = source
        self._inventory = inventory
        self._manner = manner
        self._journal = journal
        self._to = Destination(destination, source, inventory.objects, verify=manner.verify)
        if isinstance(destination, RacyWrites):
            # Another server's object under the same key is the same page.
            destination.confirms_writes = False
        self._lock = threading.Lock()
        self._again: dict[int, tuple[Survey, list[int]]] = {}
        self._without_room: list[Order] = []
        self._left_out = False  # whether parcels were not even begun
        self._removal = Removal(source, inventory, groups) if manner.move else None
        self._stopped = threading.Event()

    def stop(self) -> None:
        """Begin no further parcel."""
        self._stopped.set()

    def carry(
        self,
        orders: Iterable[Order],
        *,
        on_done: Callable[[Delivered], None] = lambda delivered: None,
    ) -> Tally:
        """Carry out orders, one after the other as far as threads allow.

        on_done is called in the thread that iterates. Interrupted by an exception, the parcels at
        work are finished first. Raises StoreUnavailable, and UsageError for a group that is larger
        than the buffer.
        """
        orders = list(orders)
        self._pass(orders, on_done)
        if self._to.full.is_set() and not self._stopped.is_set():
            self._fill_up(orders, on_done)
        for seconds in _WAIT_SECONDS:
            if not self._again or self._to.full.is_set():
                break
            time.sleep(seconds)
            self._try_again(on_done)
        self._give_up()
        if self._removal is not None:
            self._remove(self._removal.ready(all_=True))
        self.tally.full = self._to.full.is_set()
        self.tally.complete &= not self.tally.full
        return self.tally

    def _pass(
        self,
        orders: Iterable[Order],
        on_done: Callable[[Delivered], None],
        *,
        alone: bool = False,
    ) -> None:
        """Carry out orders. alone: small parcels, one after the other."""
        manner = self._manner
        jobs = 1 if alone else manner.jobs or _JOBS
        most_bytes = min(_LAST_BYTES if alone else _PARCEL_BYTES, manner.buffer_bytes // jobs)
        pipeline = Pipeline(
            self._source,
            self._inventory.objects,
            self._parcels(orders, most_bytes),
            self._work,
            buffer_bytes=manner.buffer_bytes,
            jobs=jobs,
            deadline=manner.deadline,
            pace=None if manner.bytes_per_second is None else Pace(manner.bytes_per_second),
            identify=False,
            confirm=isinstance(self._source, PageTables)
            and self._source.table_server() is not None,
            destination=self._to.store,
        )
        with closing(iter(pipeline)) as results:
            for delivered in results:
                on_done(delivered)
        self.tally.complete &= pipeline.complete and not self._stopped.is_set()

    def _fill_up(self, orders: list[Order], on_done: Callable[[Delivered], None]) -> None:
        """Carry what was begun and had no room once more, until there is none.

        Parcels that take the last room from one another are all taken back, and what one of them
        lacked is there again: alone, and in their order, some of them fit.
        """
        last = []
        for order in orders:
            begun = [
                each.items
                for each in self._without_room
                if each.survey is order.survey and each.action is order.action
            ]
            if begun:
                chosen = order.items[np.isin(order.items, np.concatenate(begun))]
                last.append(replace(order, items=chosen))
        left_out = self._left_out
        self._to.full.clear()
        self._pass(last, on_done, alone=True)
        if left_out:
            self._to.full.set()

    def _parcels(self, orders: Iterable[Order], most_bytes: int) -> Iterator[Parcel]:
        most_objects = max(_LEAST_OBJECTS, self._to.store.limits.batch_objects)
        cut = (
            parcels(
                order.survey,
                order.items,
                order.action,
                reads_back=self._manner.verify,
                copies=self._to.copies,
                most_bytes=most_bytes,
                most_objects=most_objects,
            )
            for order in orders
        )
        for parcel in chain.from_iterable(cut):
            if self._to.full.is_set() or self._stopped.is_set():
                self._left_out = True
                return
            yield parcel

    def _work(self, loaded: Loaded) -> Delivered:
        """Deliver a parcel that was read; runs in a thread of the pipeline."""
        parcel = loaded.task
        assert isinstance(parcel, Parcel)
        base = int(loaded.offsets[0]) if len(loaded.offsets) else loaded.room
        read = Delivered(parcel, np.full(len(parcel.items), Fate.DONE, dtype=np.uint8))
        if self._to.full.is_set() or self._stopped.is_set():
            read.fates[:] = Fate.NO_ROOM  # it would lack the prefix that had none
            self._record(read)
            return read
        self._settle_unread(loaded, read)
        parcel.make(loaded.arena.array[base : loaded.room + parcel.room])
        delivered = self._to.deliver(parcel, loaded.arena, base, read.fates)
        delivered.problems[:0] = read.problems
        self._record(delivered)
        return delivered

    def _settle_unread(self, loaded: Loaded, read: Delivered) -> None:
        """Settle the groups of which an object could not be read."""
        statuses = loaded.read.statuses
        for index in np.flatnonzero(statuses).tolist():
            owner = int(read.parcel.owners[index])
            status = Status(int(statuses[index]))
            key = self._inventory.objects.column("key")[int(read.parcel.rows[index])].as_py()
            if status in (Status.GONE, Status.UNREACHABLE):
                read.fail(owner, Fate.GONE, key, "")
                continue
            why = CHANGES.get(status) or loaded.read.errors.get(index, "cannot be read")
            read.fail(owner, Fate.FAILED, key, why)

    def _record(self, delivered: Delivered) -> None:
        """Count what became of a parcel, and let the journal have what is done."""
        fates, parcel = delivered.fates, delivered.parcel
        done = parcel.items[delivered.done]
        movable = done
        if self._removal is not None:
            left_over = parcel.survey.left_over[done]
            self._keep(parcel.survey, done[left_over])
            movable = done[~left_over]
            if len(movable) and parcel.action in READS_BACK:
                # What is there may be another writer's, and is to be the only copy.
                self._to.store.flush()
        if self._journal is not None and len(movable):
            pages = parcel.survey.pages.take(pa.array(movable))
            verified = self._manner.verify or parcel.action is Action.COMPARE
            self._journal.copied(parcel.survey.route.name, pages, verified=verified)
        with self._lock:
            tally = self.tally
            if parcel.action is Action.COMPARE and not delivered.written:
                tally.same += len(done)
            else:
                tally.pages += len(done)
            tally.objects += delivered.written
            tally.nbytes += delivered.nbytes
            tally.gone += int((fates == Fate.GONE).sum())
            tally.conflicts += int((fates == Fate.CONFLICT).sum())
            tally.failed += int((fates == Fate.FAILED).sum())
            for problem in delivered.problems:
                tally.note(problem)
            without = parcel.items[fates == Fate.NO_ROOM]
            if len(without):
                self._without_room.append(Order(parcel.survey, without, parcel.action))
            again = parcel.items[fates == Fate.AGAIN]
            if len(again):
                rest = self._again.setdefault(id(parcel.survey), (parcel.survey, []))[1]
                rest.extend(again.tolist())
        if self._removal is not None and len(movable):
            self._removal.add(parcel.survey, movable)
            self._remove(self._removal.ready())

    def remove(self, survey: Survey, items: IntArray) -> None:
        """Delete groups from the source, which were compared at the destination before."""
        self._remove([(survey, items)])

    def _try_again(self, on_done: Callable[[Delivered], None]) -> None:
        """Compare what others have finished meanwhile; of what they have not, write one group.

        Once that goes, a killed writer's objects are given up, and the others are written as well.
        """
        again, self._again = self._again, {}
        finished, unfinished = [], []
        for listed, items in again.values():
            chosen = np.array(sorted(items), dtype=np.int64)
            survey = listed.as_if_written(chosen)
            begun = self._to.unfinished(survey, chosen)
            finished.append(Order(survey, chosen[~begun], Action.COMPLETE))
            unfinished.append(Order(survey, chosen[begun], Action.COMPLETE))
        tried = [replace(order, items=order.items[:1]) for order in unfinished]
        self._pass([*finished, *tried], on_done)
        rests = [replace(order, items=order.items[1:]) for order in unfinished]
        rests = [order for order in rests if len(order.items)]
        for order in rests:
            if id(order.survey) in self._again:
                self._again[id(order.survey)][1].extend(order.items.tolist())
        given_up = [order for order in rests if id(order.survey) not in self._again]
        if given_up:
            self._pass(given_up, on_done)

    def _keep(self, survey: Survey, items: IntArray) -> None:
        """Leave groups in the source that the destination has only a part of."""
        with self._lock:
            self.tally.failed += len(items)
            for page in survey.pages.take(pa.array(items)).to_pylist():
                detail = "copied, and left in the source: it has objects that were not copied"
                self.tally.note(Problem(page, None, detail))

    def _remove(self, ready: Iterable[tuple[Survey, IntArray]]) -> None:
        assert self._removal is not None
        for survey, items in ready:
            removed, problems = self._removal.remove(survey, items)
            if self._journal is not None:
                self._journal.removed(survey.route.name, removed)
            with self._lock:
                self.tally.moved += len(removed)
                self.tally.failed += len(problems)
                for problem in problems:
                    self.tally.note(problem)

    def _give_up(self) -> None:
        """Count as failed what others were still writing at the destination."""
        for survey, items in self._again.values():
            self.tally.failed += len(items)
            for page in survey.pages.take(pa.array(items, pa.int64())).to_pylist():
                detail = "is being written by another, or was by one that was killed; run again"
                self.tally.note(Problem(page, None, detail))


class Removal:
    """Deletes groups from a source once they are at their destination.

    Where reading has granted leases, only when those have ended.
    """

    def __init__(self, store: Store, inventory: Inventory, groups: PageGroups) -> None:
        self._store = store
        self._inventory = inventory
        self._groups = groups
        anchors = tuple(spec is not None and spec.anchor for spec in inventory.table.specs)
        self._anchors = inventory.by_affix(anchors, 0) != 0
        self._waiting: deque[tuple[float, Survey, IntArray]] = deque()
        self._lock = threading.Lock()
        self._wait = _LEASE_SECONDS if isinstance(store, Leases) else 0.0

    def add(self, survey: Survey, items: IntArray) -> None:
        """Take groups that are whole at the destination, and compared."""
        with self._lock:
            self._waiting.append((time.monotonic() + self._wait, survey, items))

    def ready(self, *, all_: bool = False) -> Iterator[tuple[Survey, IntArray]]:
        """Give the groups that nothing holds any more."""
        while True:
            with self._lock:
                if not self._waiting or not (all_ or self._waiting[0][0] <= time.monotonic()):
                    return
                _, survey, items = self._waiting.popleft()
            yield survey, items

    def remove(self, survey: Survey, items: IntArray) -> tuple[list[str], list[Problem]]:
        """Delete all objects of groups, anchors first; give the pages, and what went wrong."""
        rows, offsets = self._groups.objects_of(survey.groups[items])
        owners = np.repeat(np.arange(len(items)), np.diff(offsets))
        pages = survey.pages.take(pa.array(items)).to_pylist()
        stuck: dict[int, Problem] = {}
        for stage in (self._anchors[rows], ~self._anchors[rows]):
            chosen = np.flatnonzero(stage & ~np.isin(owners, list(stuck)))
            step = self._store.limits.batch_objects
            for start in range(0, len(chosen), step):
                some = chosen[start : start + step]
                batch = self._inventory.objects.take(pa.array(rows[some]))
                for index, why in self._store.delete(batch).errors.items():
                    owner = int(owners[some[index]])
                    key = batch.column("key")[index].as_py().decode(errors="backslashreplace")
                    detail = f"copied, and cannot be removed from the source: {why}"
                    stuck.setdefault(owner, Problem(pages[owner], key, detail))
        return [p for n, p in enumerate(pages) if n not in stuck], list(stuck.values())
