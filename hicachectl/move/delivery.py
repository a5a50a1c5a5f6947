"""Write a parcel to its destination: sidecars first, anchors last, and nothing half done.

Whoever looks at the destination meanwhile finds each group whole or without its anchor. A group
that cannot be written whole is taken back, its anchors first.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.backends.arena import place
from hicachectl.backends.base import Status, batch_spans
from hicachectl.backends.capabilities import Confirm, RacyWrites, copier_of, keep_as_private
from hicachectl.move.decisions import READS_BACK, Action, Problem
from hicachectl.move.survey import keys_of
from hicachectl.pages.group_table import ABSENT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy.typing as npt

    from hicachectl.backends.arena import Arena
    from hicachectl.backends.base import IntArray, Result, Store
    from hicachectl.move.parcels import Parcel
    from hicachectl.move.survey import Survey
    from hicachectl.pages.groups import BoolArray


class Fate(IntEnum):
    """What became of a group."""

    DONE = 0  # written, or compared and found equal
    GONE = 1  # it left the source before it was read
    FAILED = 2
    CONFLICT = 3  # the destination has other bytes under one of its keys
    NO_ROOM = 4  # not written: the destination is full
    AGAIN = 5  # an object of it came to the destination meanwhile: to be compared with that


_HEAD_BYTES = 1024  # of an object, at most as a rule: its key, and its row in an index
# Whose objects are deleted again, where some were written.
_TAKEN_BACK = (Fate.GONE, Fate.FAILED, Fate.NO_ROOM)
# What the source's object has met with since it was listed.
CHANGES = {
    Status.SHORT: "is shorter than it was listed",
    Status.OVERSIZED: "is longer than it was listed",
    Status.CHANGED: "was written to while it was copied",
}


@dataclass(slots=True, eq=False)
class Delivered:
    """What became of a parcel.

    fates: [groups] of Fate. written, nbytes: objects that were written and stayed.
    """

    parcel: Parcel
    fates: npt.NDArray[np.uint8]
    problems: list[Problem] = field(default_factory=list)
    written: int = 0
    nbytes: int = 0

    def fail(self, owner: int, fate: Fate, key: bytes | None, detail: str) -> None:
        """Settle the fate of a group; the first reason counts."""
        if self.fates[owner] != Fate.DONE:
            return
        self.fates[owner] = fate
        if fate in (Fate.FAILED, Fate.CONFLICT):
            self.note(owner, key, detail)

    def note(self, owner: int, key: bytes | None, detail: str) -> None:
        """Add a problem of a group."""
        page = self.parcel.survey.pages[int(self.parcel.items[owner])].as_py()
        text = None if key is None else key.decode(errors="backslashreplace")
        self.problems.append(Problem(page, text, detail))

    @property
    def done(self) -> IntArray:
        """Which groups are done: places in the parcel."""
        return np.flatnonzero(self.fates == Fate.DONE)


class Destination:
    """A store that parcels are written to, from several threads.

    source: where they come from. objects: the columns of its scan.
    full: set once nothing more should be begun, since the store is full.
    copies: whether the store copies objects of the source by itself.
    racy: the store, where another writer may win a key of ours.
    """

    def __init__(self, store: Store, source: Store, objects: pa.Table, *, verify: bool) -> None:
        self.store = store
        self.source = source
        self.full = threading.Event()
        self._copier = copier_of(store, source)
        self.copies = self._copier is not None
        self.racy = store if isinstance(store, RacyWrites) else None
        keep_as_private(store, source, listing=True)
        self._objects = objects.select(["key"]).combine_chunks() if self.copies else None
        self._times = _times_of(objects)
        self._verify = verify
        self._writing = threading.BoundedSemaphore(max(1, store.limits.parallel_writes))
        self._counting = threading.Lock()
        self._promised = 0  # bytes to the parcels that are being written

    def deliver(
        self, parcel: Parcel, arena: Arena, base: int, fates: npt.NDArray[np.uint8]
    ) -> Delivered:
        """Write what a parcel has become in the arena, from `base` on.

        fates: [groups] DONE for those to be written. Raises StoreUnavailable.
        """
        delivered = Delivered(parcel, fates)
        if not (fates == Fate.DONE).any():
            return delivered
        with self.room_for(parcel) as has_room:
            if has_room:
                _Delivery(self, delivered, arena, base).run()
            else:
                self.full.set()
                fates[fates == Fate.DONE] = Fate.NO_ROOM
        return delivered

    @contextmanager
    def room_for(self, parcel: Parcel) -> Iterator[bool]:
        """Promise the room for a parcel while it is being written; or say that there is none.

        Asked only of a store that does not get it back with what is taken back.
        """
        writes = parcel.writes
        new = (writes.there == ABSENT) | (parcel.action is Action.REPLACE)
        nbytes = int((writes.sizes[new] + _HEAD_BYTES).sum())
        with self._counting:
            free = self.store.free_bytes() if self.store.traits.append_only else None
            has_room = free is None or self._promised + nbytes <= free
            self._promised += has_room * nbytes
        try:
            yield has_room
        finally:
            with self._counting:
                self._promised -= has_room * nbytes

    def rows(self, parcel: Parcel) -> pa.Table:
        """Give the rows of a parcel's writes: keys, and the times of what they were made of."""
        sources = parcel.writes.sources
        places = np.append(parcel.origins, ABSENT)[sources]
        times = self._times.take(pa.array(places, mask=places == ABSENT))
        return pa.table({"key": parcel.keys(), "mtime_ns": times})

    def unfinished(self, survey: Survey, items: IntArray) -> BoolArray:
        """Say of which groups another writer has begun an object that is there: [items]."""
        found = np.zeros(len(items), dtype=np.bool_)
        if self.racy is not None:
            at, targets, _ = survey.there.objects(items)
            pages = survey.pages.take(pa.array(items[at]))
            begun = self.racy.unfinished(pa.table({"key": keys_of(survey.route, targets, pages)}))
            found[at[begun]] = True
        return found

    def put(
        self,
        parcel: Parcel,
        places: IntArray,
        rows: pa.Table,
        offsets: IntArray,
    ) -> Result:
        """Write some of a parcel's objects, or copy them: places among its writes.

        rows, offsets: their keys and times, and where they lie in the arena.
        """
        if_absent = parcel.action is not Action.REPLACE
        sizes = parcel.writes.sizes[places]
        with self._writing:
            if self._copier is None or self._objects is None or not parcel.copied:
                keep_as_private(self.store, self.source)
                return self.store.write_from(rows, offsets, sizes, if_absent=if_absent)
            origins = self._objects.take(pa.array(parcel.origins[parcel.writes.sources[places]]))
            return self._copier.copy_from(self.source, origins, rows, sizes, if_absent=if_absent)


class _Delivery:
    """One parcel on its way."""

    def __init__(self, to: Destination, delivered: Delivered, arena: Arena, base: int) -> None:
        self._to = to
        self._delivered = delivered
        self._parcel = delivered.parcel
        self._arena = arena
        self._base = base
        self._writes = delivered.parcel.writes
        self._offsets = self._writes.offsets + base
        self._rows = to.rows(delivered.parcel)
        self._keys: list[bytes] = self._rows.column("key").to_pylist()
        self._mine = np.zeros(len(self._writes), dtype=np.bool_)  # written by us, just now
        self._equal = np.zeros(len(self._writes), dtype=np.bool_)  # compared, and the same

    def run(self) -> None:
        """Compare what is there, write what is missing, take back what stays half done."""
        action = self._parcel.action
        if action in READS_BACK:
            self._compare(np.flatnonzero(self._open() & (self._writes.there != ABSENT)))
        if action is Action.REPLACE and self._to.store.traits.deletes:
            self._remove(np.flatnonzero(self._open() & (self._writes.there != ABSENT)))
        anchors = self._parcel.anchors()
        for stage in (~anchors, anchors):
            self._write(np.flatnonzero(self._open() & stage & ~self._equal))
            self._leave_out_what_follows()
        self._take_back()
        if self._to._verify:
            self._compare(np.flatnonzero(self._open() & ~self._equal), ours=True)
            self._take_back()
        kept = self._mine & self._open()
        self._delivered.written = int(kept.sum())
        self._delivered.nbytes = int(self._writes.sizes[kept].sum())

    def _leave_out_what_follows(self) -> None:
        """Where a group had no room, write none behind it: they would lack their prefix."""
        fates = self._delivered.fates
        full = np.flatnonzero(fates == Fate.NO_ROOM)
        if len(full):
            behind = np.unique(self._writes.owners[~self._equal])
            behind = behind[(behind > full[0]) & (fates[behind] == Fate.DONE)]
            fates[behind] = Fate.NO_ROOM

    def _open(self) -> BoolArray:
        """Say which writes are of groups that nothing has gone wrong with: [writes]."""
        open_: BoolArray = (self._delivered.fates == Fate.DONE)[self._writes.owners]
        return open_

    def _fail(self, at: int, fate: Fate, detail: str) -> None:
        self._delivered.fail(int(self._writes.owners[at]), fate, self._keys[at], detail)

    def _write(self, places: IntArray) -> None:
        def call(some: IntArray) -> None:
            rows = self._rows.take(pa.array(some))
            result = self._to.put(self._parcel, some, rows, self._offsets[some])
            self._mine[some[result.ok]] = True
            for index in np.flatnonzero(~result.ok).tolist():
                at, status = int(some[index]), Status(int(result.statuses[index]))
                if status is Status.FULL:
                    self._to.full.set()
                    self._fail(at, Fate.NO_ROOM, "")
                elif status is Status.EXISTS:
                    self._writes.there[at] = self._writes.sizes[at]
                    self._fail(at, Fate.AGAIN, "")
                elif status is Status.GONE:
                    self._fail(at, Fate.GONE, "")  # from the source
                else:
                    why = CHANGES.get(status) or result.errors.get(index, "cannot be written")
                    self._fail(at, Fate.FAILED, why)

        self._each(places, call)

    def _compare(self, places: IntArray, *, ours: bool = False) -> None:
        """Read objects of the destination and compare them with what they should be.

        ours: they were just written, so that it is no conflict when they differ.
        """
        back = self._placed_back(places)
        store = self._to.store
        # What is newer than the listing is found by asking where it is.
        read_back = store.read_confirmed if isinstance(store, Confirm) else store.read_into

        def call(some: IntArray) -> None:
            offsets = back[np.searchsorted(places, some)]
            sizes = self._writes.sizes[some]
            read = read_back(self._rows.take(pa.array(some)), offsets, sizes, identify=False)
            for index, at in enumerate(some.tolist()):
                status = Status(int(read.statuses[index]))
                self._judge(at, status, int(offsets[index]), read.errors.get(index, ""), ours)

        self._each(places, call)

    def _judge(self, at: int, status: Status, back: int, error: str, ours: bool) -> None:
        size = int(self._writes.sizes[at])
        mine = self._arena.view(int(self._offsets[at]), size)
        if status is Status.OK and np.array_equal(mine, self._arena.view(back, size)):
            self._equal[at] = True
        elif status is Status.GONE and not ours:
            pass  # evicted since it was listed: to be written
        elif status is Status.GONE:
            self._fail(at, Fate.FAILED, "left the destination before it could be read back")
        elif status in (Status.ERROR, Status.UNREACHABLE, Status.DAMAGED):
            self._fail(at, Fate.FAILED, f"cannot be read back: {error}")
        elif ours and self._to.racy is not None:
            self._mine[at] = False  # of another writer, whose object is not ours to take back
            self._writes.there[at] = size
            self._fail(at, Fate.AGAIN, "")
        elif ours:
            self._fail(at, Fate.FAILED, "reads back with other bytes than were written")
        else:
            self._fail(at, Fate.CONFLICT, "the destination has other bytes under this key")

    def _placed_back(self, places: IntArray) -> IntArray:
        offsets, _ = place(self._writes.sizes[places])
        return offsets + self._base + self._parcel.back

    def _remove(self, places: IntArray) -> None:
        """Delete objects of the destination, anchors first; sidecars stay while an anchor does."""
        anchors = self._parcel.anchors()
        for stage in (anchors, ~anchors):
            chosen = places[stage[places] & self._open()[places]]

            def call(some: IntArray) -> None:
                result = self._to.store.delete(self._rows.take(pa.array(some)))
                for index, why in result.errors.items():
                    self._fail(int(some[index]), Fate.FAILED, f"cannot be replaced: {why}")

            self._each(chosen, call)

    def _take_back(self) -> None:
        """Delete what was written of groups that did not become whole, or differ.

        Where an anchor cannot be deleted the sidecars stay: a server would miss them.
        """
        owners, anchors = self._writes.owners, self._parcel.anchors()
        left = np.flatnonzero(self._mine & ~self._open())
        left = left[np.isin(self._delivered.fates[owners[left]], _TAKEN_BACK)]
        stuck = np.zeros(len(self._delivered.fates), dtype=np.bool_)
        for stage in (anchors, ~anchors):
            chosen = left[stage[left] & ~stuck[owners[left]]]

            def call(some: IntArray) -> None:
                result = self._to.store.undo_writes(self._rows.take(pa.array(some)))
                for index, why in result.errors.items():
                    stuck[owners[some[index]]] = True
                    detail = f"was written, and cannot be taken back: {why}"
                    self._delivered.note(int(owners[some[index]]), self._keys[some[index]], detail)

            self._each(chosen, call)
        self._mine[left] = False

    def _each(self, places: IntArray, call: Callable[[IntArray], object]) -> None:
        for span in batch_spans(self._writes.sizes[places], self._to.store.limits):
            call(places[span])


def _times_of(objects: pa.Table) -> Any:
    """Give the times of a source's objects as one array."""
    if "mtime_ns" not in objects.column_names:
        return pa.nulls(len(objects), pa.int64())
    times = objects.column("mtime_ns").combine_chunks()
    return times if isinstance(times, pa.Array) else pc.cast(times, pa.int64())
