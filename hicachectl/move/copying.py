"""Copy page groups from one store to another.

The threads of a pipeline read source objects, transform them, publish the results and, if asked,
read the results back. Groups that fail are rolled back.
"""

from __future__ import annotations

import threading
from contextlib import closing, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from hicachectl.backends.arena import place
from hicachectl.backends.base import Result, Status, in_batches
from hicachectl.backends.capabilities import (
    Confirm,
    RacyWrites,
    Trailed,
    copier_of,
    keep_as_private,
)
from hicachectl.formats.wording import conflict
from hicachectl.io.forked_calls import forked_calls
from hicachectl.io.pipeline import Loaded, Pace, Pipeline
from hicachectl.move.order import OF_MIGRATION, publish, remove_once, roll_back
from hicachectl.move.results import GroupStatus, MoveResult
from hicachectl.move.survey import COMPARING, READS_BACK, Action
from hicachectl.pages.group_table import ABSENT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from hicachectl.backends.arena import Arena
    from hicachectl.backends.base import Store
    from hicachectl.backends.capabilities import SystemCopy
    from hicachectl.formats.arrays import BoolArray, IntArray
    from hicachectl.io.forking import Callees
    from hicachectl.move.copy_plan import PageBatch
    from hicachectl.move.store_pair import StorePair

_HEAD_BYTES = 1024  # usually enough for an object's key and index row in a pack


class _SystemCopies:
    """Copies of one source's objects that the destination makes by itself."""

    def __init__(self, copier: SystemCopy, source: Store) -> None:
        self._copier = copier
        self._source = source

    def copy_from(self, *rows_and_sizes: Any, if_absent: bool) -> Result:
        """Copy as `SystemCopy.copy_from` does."""
        return self._copier.copy_from(self._source, *rows_and_sizes, if_absent=if_absent)


class Executor:
    """Executor of copies from one store to another.

    full:   event that is set when the destination has no room for an object.
    copies: whether the destination copies objects of the source by itself.
    racy:   the destination if another writer can win the race for a key, else None.
    read_back: function that reads objects of the destination.
    """

    def __init__(
        self,
        stores: StorePair,
        objects: pa.Table,
        on_copied: Callable[[PageBatch, MoveResult], None],
    ) -> None:
        """Prepare the copies. Read nothing yet.

        objects: the source's listing. Batches refer to the rows of this listing.
        on_copied: function that is called in the thread that copied the batch, even if `run` ends
            early.
        """
        source, destination = stores.source, stores.destination
        self.destination = destination
        self.full = threading.Event()
        self._source = source
        # Keep only the columns that reading needs, in one chunk, because `take` from many chunks is
        # slow.
        wanted = [name for name in ("key", "locator") if name in objects.column_names]
        self._objects = objects.select(wanted).combine_chunks()
        self.options = stores.options
        self._keeps_trailers = stores.trailers.keeps
        self._on_copied = on_copied
        self._copier = copier_of(destination, source)
        self.copies = self._copier is not None
        self._processes: Callees | None = None  # forked processes that call `_SystemCopies`
        self.racy = destination if isinstance(destination, RacyWrites) else None
        keep_as_private(destination, source, listing=True)
        if self.racy is not None:
            # A lost race does no harm, because another writer's object under the same key belongs
            # to the same page.
            self.racy.confirms_writes = False
        # The destination's listing does not say where new objects are. Only a query of its server
        # does.
        self.read_back = destination.read_into
        if isinstance(destination, Confirm):
            self.read_back = destination.read_confirmed
        self._stopped = threading.Event()
        self._writing = threading.BoundedSemaphore(max(1, destination.limits.parallel_writes))
        self._counting = threading.Lock()
        self._promised = 0  # bytes reserved for batches being written

    def stop(self) -> None:
        """Begin no further batch."""
        self._stopped.set()

    @property
    def stopped(self) -> bool:
        """Whether `stop` was called."""
        return self._stopped.is_set()

    def run(
        self,
        batches: Iterable[PageBatch],
        *,
        jobs: int,
        on_done: Callable[[PageBatch, MoveResult], None],
    ) -> bool:
        """Copy batches in order. Return whether all batches were begun.

        on_done: function that is called in the thread that called `run`.
        If an exception ends the run, batches already begun are finished first. Raises
        StoreUnavailable, and UsageError if a batch is larger than the buffer.
        """
        options = self.options
        pipeline = Pipeline(
            self._source,
            self._objects,
            batches,
            self._copy,
            buffer_bytes=options.buffer_bytes,
            jobs=jobs,
            deadline=options.deadline,
            pace=None if options.bytes_per_second is None else Pace(options.bytes_per_second),
            identify=False,
            confirm=isinstance(self._source, Confirm) and self._source.confirms,
            destination=self.destination,
        )
        if self._copier is not None:
            copies = _SystemCopies(self._copier, self._source)
            both = (self._source, self.destination)
            self._processes = forked_calls(jobs, both, lambda: copies, objects=len(self._objects))
        with self._processes or nullcontext(), closing(iter(pipeline)) as results:
            for batch, result in results:
                on_done(batch, result)
        return pipeline.complete and not self.stopped

    def _copy(self, loaded: Loaded) -> tuple[PageBatch, MoveResult]:
        batch: PageBatch = loaded.task  # type: ignore[assignment]
        result = MoveResult.of(batch.pages)
        if self.full.is_set() or self.stopped:
            # After `stop`, write nothing. After a group without room, servers could not use these
            # groups, because the pages of their prefix would be missing.
            result.statuses[:] = GroupStatus.NO_ROOM
        else:
            self._publish(batch, loaded, result)
            # The rest of a moved group leaves the source only if the destination has equal objects.
            if batch.action is Action.CLEAR:
                result.statuses[result.statuses != GroupStatus.SAME] = GroupStatus.KEPT
        self._on_copied(batch, result)
        return batch, result

    def _publish(self, batch: PageBatch, loaded: Loaded, result: MoveResult) -> None:
        self._fail_unread(batch, loaded, result)
        if not result.open.any():
            return
        # Offsets of a batch count from the start of its memory, which lies at `base` in the arena.
        base = int(loaded.offsets[0]) if len(loaded.offsets) else loaded.room
        memory = loaded.arena.array[base : loaded.room + batch.room]
        for transform in batch.transforms:
            transform.apply(memory)
        with self._room_for(batch) as has_room:
            if has_room:
                _BatchCopy(self, batch, loaded.arena, base, result).run()
            else:
                self.full.set()
                for group in np.flatnonzero(result.open).tolist():
                    OF_MIGRATION.settle(
                        result, group, None, Status.FULL, "no room left at the destination"
                    )

    def _fail_unread(self, batch: PageBatch, loaded: Loaded, result: MoveResult) -> None:
        """Fail groups with an object that could not be read."""
        read = loaded.read
        for index in np.flatnonzero(read.statuses).tolist():
            group, status = int(batch.owners[index]), Status(int(read.statuses[index]))
            why = f"cannot be read: {read.errors.get(index, 'the store gives no reason')}"
            OF_MIGRATION.settle(result, group, batch.key_read(index, self._objects), status, why)

    @contextmanager
    def _room_for(self, batch: PageBatch) -> Iterator[bool]:
        """Reserve the room of a batch while it is written. Yield whether there is enough room.

        Only append-only stores are checked, because there a write that is rolled back frees no
        room.
        """
        new = (batch.existing == ABSENT) | (batch.action is Action.REPLACE)
        nbytes = int((batch.sizes[new] + _HEAD_BYTES).sum())
        with self._counting:
            appends = self.destination.traits.append_only
            free = self.destination.free_bytes() if appends else None
            has_room = free is None or self._promised + nbytes <= free
            self._promised += has_room * nbytes
        try:
            yield has_room
        finally:
            with self._counting:
                self._promised -= has_room * nbytes

    def write(self, batch: PageBatch, places: IntArray, offsets: IntArray) -> Result:
        """Write objects, let the destination copy them, or give files trailers.

        places: indices of the objects in the batch.
        offsets: [places] offsets in the arena.
        """
        rows, sizes = batch.targets.take(pa.array(places)), batch.sizes[places]
        if_absent = batch.action is not Action.REPLACE
        with self._writing:
            if batch.action is Action.ADOPT:
                assert isinstance(self.destination, Trailed)
                written = self.destination.adopt(rows, sizes)
            elif self._copier is None or not (batch.by_system or self._keeps_trailers):
                keep_as_private(self.destination, self._source)
                written = self.destination.write_from(rows, offsets, sizes, if_absent=if_absent)
            else:
                origins = self._objects.take(pa.array(batch.origins[places]))
                copy: Callable[..., Result] = _SystemCopies(self._copier, self._source).copy_from
                if self._processes is not None:
                    copy = partial(self._processes.call, "copy_from")
                written = copy(origins, rows, sizes, if_absent=if_absent)
        if (written.statuses == Status.FULL).any():
            self.full.set()
        return written


class _BatchCopy:
    """Write of one batch to the destination, after its source objects were read.

    If the destination copies the objects by itself, no object was read.
    """

    def __init__(
        self, executor: Executor, batch: PageBatch, arena: Arena, base: int, result: MoveResult
    ) -> None:
        self._executor = executor
        self._store = executor.destination
        self._batch = batch
        self._arena = arena
        self._base = base
        self._offsets = batch.offsets + base
        self._result = result
        self._written = np.zeros(len(batch.objects), dtype=np.bool_)  # written by this run
        self._equal = np.zeros(len(batch.objects), dtype=np.bool_)  # compared and equal

    def run(self) -> None:
        """Compare existing objects, write missing objects, roll back unfinished groups."""
        batch, result, executor = self._batch, self._result, self._executor
        existing = np.flatnonzero(self._open() & (batch.existing != ABSENT))
        if batch.action in READS_BACK:
            self._compare(existing)
        if batch.action is Action.REPLACE and self._store.traits.deletes:
            remove_once(batch.objects, existing, remove=self._delete, on_error=self._not_replaced)
        missing = self._open() & ~self._equal
        if batch.action is Action.ADOPT:
            missing &= batch.existing == ABSENT  # existing targets need no new trailer
        if batch.action is Action.CLEAR:  # only remove the rest of a moved group, never copy it
            result.statuses[batch.objects.owners[missing]] = GroupStatus.KEPT
        self._written = publish(
            batch.objects,
            np.flatnonzero(missing),
            result,
            write=self._write,
            undo=self._undo,
        )
        if executor.options.verify:
            self._compare(np.flatnonzero(self._written & self._open()), ours=True)
            roll_back(batch.objects, self._written, result, undo=self._undo)
        kept = self._written & self._open()
        result.objects, result.nbytes = int(kept.sum()), int(batch.sizes[kept].sum())
        if batch.action in COMPARING:
            same = result.open
            same[batch.objects.owners[kept]] = False
            result.statuses[same] = GroupStatus.SAME

    def _open(self) -> BoolArray:
        """Return which objects belong to an open group: [objects]."""
        is_open: BoolArray = self._result.open[self._batch.objects.owners]
        return is_open

    def _fail(self, at: int, status: GroupStatus, detail: str) -> None:
        objects = self._batch.objects
        self._result.fail(int(objects.owners[at]), status, objects.keys[at].as_py(), detail)

    def _not_replaced(self, at: int, why: str) -> None:
        self._fail(at, GroupStatus.FAILED, f"cannot be replaced: {why}")

    def _write(self, places: IntArray) -> Result:
        executor, batch = self._executor, self._batch
        return self._each(places, lambda some: executor.write(batch, some, self._offsets[some]))

    def _delete(self, places: IntArray) -> Result:
        return self._each(places, lambda some: self._store.delete(self._targets(some)))

    def _undo(self, places: IntArray) -> Result:
        if self._batch.action is Action.ADOPT:  # a file that got its trailer stays
            return Result(np.zeros(len(places), dtype=np.uint8), {})
        return self._each(places, lambda some: self._store.undo_writes(self._targets(some)))

    def _targets(self, places: IntArray) -> pa.Table:
        return self._batch.targets.take(pa.array(places))

    def _compare(self, places: IntArray, *, ours: bool = False) -> None:
        """Compare the destination's objects with the bytes to write.

        ours: whether this run wrote the objects. If so, other bytes are no conflict: the group is
            FAILED, or RACED if the store is `RacyWrites`.
        """
        sizes = self._batch.sizes
        offsets = np.zeros(len(sizes), dtype=np.int64)
        offsets[places] = place(sizes[places])[0] + self._base + self._batch.back

        def call(some: IntArray) -> Result:
            read = self._executor.read_back(
                self._targets(some), offsets[some], sizes[some], identify=False
            )
            for index, at in enumerate(some.tolist()):
                status = Status(int(read.statuses[index]))
                self._judge(at, status, int(offsets[at]), read.errors.get(index, ""), ours)
            return read

        self._each(places, call)

    def _judge(self, at: int, status: Status, back: int, error: str, ours: bool) -> None:
        size, failed = int(self._batch.sizes[at]), GroupStatus.FAILED
        mine = self._arena.view(int(self._offsets[at]), size)
        if status is Status.OK and np.array_equal(mine, self._arena.view(back, size)):
            self._equal[at] = True
        elif status is Status.GONE and not ours:
            pass  # evicted since the listing, so it will be written
        elif status is Status.GONE:
            self._fail(at, failed, "evicted or deleted before it was read back; run again")
        elif status in (Status.ERROR, Status.UNREACHABLE, Status.DAMAGED):
            self._fail(at, failed, f"cannot be read back: {error}")
        elif status is Status.FOREIGN:
            why = conflict(f"the destination has another object: {error}")
            self._fail(at, GroupStatus.CONFLICT, why)
        elif not ours:
            why = "the destination has other bytes under this key"
            if self._batch.transforms:
                why += ", perhaps in another layout"
            self._fail(at, GroupStatus.CONFLICT, conflict(why))
        elif self._executor.racy is not None:
            self._written[at] = False  # never roll back another writer's object
            why = "another writer has written this key; run again to compare"
            self._fail(at, GroupStatus.RACED, why)
        else:
            why = "the bytes read back differ from the bytes written; check the destination"
            self._fail(at, failed, why)

    def _each(self, places: IntArray, call: Callable[[IntArray], Result]) -> Result:
        """Call a function for batches within the destination's limits. Return the joined result."""
        sizes, limits = self._batch.sizes[places], self._store.limits
        return in_batches(sizes, limits, lambda span: call(places[span]))
