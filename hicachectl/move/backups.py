"""Copies of page groups as backups, read back and compared."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from hicachectl.backends.arena import Arena, place
from hicachectl.backends.base import Result, Status
from hicachectl.backends.capabilities import as_stored
from hicachectl.move.batches import Action, CopyBatch, CopyOptions, aligned, cut
from hicachectl.move.copying import Executor
from hicachectl.move.order import Failures, GroupObjects, publish
from hicachectl.move.results import GroupStatus, MoveResult
from hicachectl.pages.group_table import ABSENT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hicachectl.backends.base import BoolArray, IntArray, Store

MEMORY_BYTES = 512 << 20  # address space, used as needed
_BATCH_BYTES = 64 << 20  # in memory, including the bytes read back


@contextmanager
def copy_memory(store: Store, nbytes: int = MEMORY_BYTES) -> Iterator[Arena]:
    """Attach an arena to a store, for many calls of `copy_groups`."""
    with Arena(nbytes) as arena:
        store.attach(arena)
        try:
            yield arena
        finally:
            store.detach()


def copy_groups(
    source: Store,
    rows: pa.Table,
    destination: Store,
    targets: pa.Table,
    objects: GroupObjects,
    sizes: IntArray,
    pages: pa.StringArray,
    *,
    arena: Arena,
    on_gone: str | None = None,
) -> MoveResult:
    """Copy objects of groups to unused keys; read back and compare each copy.

    rows, targets: [n] objects as rows of source and destination.
    objects: groups and keys. sizes: [n] bytes. pages: [k] page hash of each group.
    on_gone: message that fails a group whose source object vanished; None: skip the object.
    arena: from `copy_memory`, attached to one store. Each object takes room twice, to write and to
    read back. A group that does not fit is copied object by object; an object that does not fit
    fails.

    Return each group as DONE, FAILED or CONFLICT. Raises StoreUnavailable.
    """
    result = MoveResult.of(pages, objects=len(objects))

    def include(batch: _Batch, copied: MoveResult) -> None:
        result.written[batch.places[copied.written]] = True
        result.include(batch.groups, copied)

    options = CopyOptions(buffer_bytes=arena.nbytes, verify=True)
    executor: Executor[_Batch] = Executor(
        source, rows, destination, options,
        arena=arena, failures=_failures(on_gone), preserve=True,
    )  # fmt: skip
    need = np.zeros(len(pages), dtype=np.int64)
    np.add.at(need, objects.owners, 2 * aligned(sizes))
    large = need > arena.nbytes
    lone = np.bincount(objects.owners, minlength=len(pages)) == 1
    for at in np.flatnonzero((large & lone)[objects.owners]).tolist():
        why = f"{sizes[at]} bytes, but at most {arena.nbytes // 2} fit into the copy buffer"
        key = objects.keys[at].as_py()
        result.fail(int(objects.owners[at]), GroupStatus.FAILED, key, why)
    fitting = np.flatnonzero(~large)
    batches = _batches(targets, objects, sizes, result, executor, fitting, arena.nbytes)
    with as_stored(source, destination):  # a backup of damage is as damaged
        executor.run(batches, on_done=include)
    result.full = executor.full.is_set()

    def copy_alone(places: IntArray) -> MoveResult:
        some, owners = pa.array(places), np.arange(len(places))
        return copy_groups(
            source, rows.take(some), destination, targets.take(some),
            GroupObjects(objects.keys.take(some), owners, objects.anchors[places]), sizes[places],
            pages.take(pa.array(objects.owners[places])), arena=arena, on_gone=on_gone,
        )  # fmt: skip

    def undo(places: IntArray) -> Result:
        return destination.undo_writes(targets.take(pa.array(places)))

    by_object = np.flatnonzero((large & ~lone)[objects.owners])
    if len(by_object):
        _copy_by_object(objects, by_object, result, copy_alone, undo, executor.failures)
        result.nbytes += int(sizes[by_object[result.written[by_object]]].sum())
    return result


def _copy_by_object(
    objects: GroupObjects,
    chosen: IntArray,
    result: MoveResult,
    copy_alone: Callable[[IntArray], MoveResult],
    undo: Callable[[IntArray], Result],
    failures: Failures,
) -> None:
    """Publish groups that do not fit into memory, object by object.

    chosen: indices of their objects. copy_alone: copies each object as a separate group.
    """

    def write(places: IntArray) -> Result:
        copied = copy_alone(places)
        result.full |= copied.full
        statuses = np.full(len(places), Status.ERROR, dtype=np.uint8)
        statuses[copied.open] = Status.GONE  # left out
        statuses[copied.written] = Status.OK
        statuses[copied.statuses == GroupStatus.CONFLICT] = Status.EXISTS
        return Result(statuses, {each.group: each.detail for each in copied.problems})

    written = publish(objects, chosen, result, write=write, undo=undo, failures=failures)
    result.written |= written
    result.objects += int(written.sum())


def _failures(on_gone: str | None) -> Failures:
    """Return the rules of a backup: existing objects are conflicts, even with equal bytes."""
    changed = (Status.SHORT, Status.OVERSIZED, Status.CHANGED)
    gone = GroupStatus.DONE if on_gone is None else GroupStatus.FAILED
    return Failures(
        statuses={Status.EXISTS: GroupStatus.CONFLICT, Status.GONE: gone},
        details={
            **dict.fromkeys(changed, "changed while being read"),
            **({} if on_gone is None else {Status.GONE: on_gone}),
        },
        differs="the copy differs from the original; check the disk and memory",
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Batch(CopyBatch):
    """Batch of a backup: the same objects are read and written, in the same order.

    groups: [k], places: [n] indices of groups and objects.
    """

    groups: IntArray = field(kw_only=True)
    places: IntArray = field(kw_only=True)

    def key_read(self, index: int, listed: pa.Table) -> bytes:
        key: bytes = self.objects.keys[index].as_py()
        return key


def _batches(
    targets: pa.Table,
    objects: GroupObjects,
    sizes: IntArray,
    result: MoveResult,
    executor: Executor[_Batch],
    fitting: IntArray,
    buffer_bytes: int,
) -> Iterator[_Batch]:
    order = np.argsort(objects.owners, kind="stable")
    order = order[np.isin(objects.owners[order], fitting)]
    groups, starts, counts = np.unique(objects.owners[order], return_index=True, return_counts=True)
    need = np.add.reduceat(2 * aligned(sizes[order]), starts) if len(order) else starts
    spans = cut(
        need,
        counts,
        first_bytes=_BATCH_BYTES,
        most_bytes=min(_BATCH_BYTES, buffer_bytes),
        most_objects=max(1, len(order)),
    )
    for span in spans:
        some = order[starts[span.start] : starts[span.stop - 1] + counts[span.stop - 1]]
        own, rows = groups[span], pa.array(some)
        owners = np.searchsorted(own, objects.owners[some])
        offsets, nbytes = place(sizes[some])
        yield _Batch(
            rows=some,
            capacities=sizes[some],
            room=nbytes,
            name=f"{len(own)} pages",
            action=Action.COPY,
            pages=result.pages.take(pa.array(own)),
            owners=owners,
            objects=GroupObjects(objects.keys.take(rows), owners, objects.anchors[some]),
            targets=targets.take(rows),
            sizes=sizes[some],
            offsets=offsets,
            there=np.full(len(some), ABSENT),
            origins=some,
            by_system=executor.copies,
            transforms=(),
            back=nbytes,
            groups=own,
            places=some,
        )


def same_bytes(
    one: Store, rows: pa.Table, other: Store, other_rows: pa.Table, sizes: IntArray, *, arena: Arena
) -> BoolArray:
    """Return which objects have the same bytes in two stores: [n].

    rows, other_rows: [n] objects as rows of each store. sizes: [n] bytes.
    arena: from `copy_memory`, attached to one store. An object counts as different if both copies
    do not fit.
    """
    same = np.zeros(len(sizes), dtype=np.bool_)
    with ExitStack() as exits:
        exits.enter_context(as_stored(one, other))
        for store in (one, other):
            if store.arena is not arena:
                store.attach(arena)
                exits.callback(store.detach)
        for n, nbytes in enumerate(sizes.tolist()):
            (_, back), size = place(sizes[n : n + 1]), sizes[n : n + 1]
            same[n] = (
                back + nbytes <= arena.nbytes
                and one.read_into(rows.slice(n, 1), np.array([0]), size).all_ok
                and other.read_into(other_rows.slice(n, 1), np.array([back]), size).all_ok
                and np.array_equal(arena.view(0, nbytes), arena.view(back, nbytes))
            )
    return same
