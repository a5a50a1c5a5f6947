"""Copy objects from one store to another, and read each copy back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from hicachectl.backends.arena import ALIGNMENT, Arena, place
from hicachectl.backends.base import IntArray, Result, Status, Store
from hicachectl.backends.capabilities import copier_of, keep_as_private

if TYPE_CHECKING:
    from collections.abc import Iterator

BUFFER_BYTES = 512 << 20  # touched only as far as objects need it


def copy_objects(
    source: Store, rows: Any, target: Store, target_rows: Any, sizes: IntArray
) -> Result:
    """Copy whole objects to keys that must be free; no OK copy has other bytes than its source.

    rows, target_rows: of the two stores, in one order. sizes: [n] int64.
    Statuses: OK, GONE from the source, EXISTS or FULL in the target, ERROR.
    """
    statuses = np.zeros(len(sizes), dtype=np.uint8)
    errors: dict[int, str] = {}
    arena = _shared_arena(source, target)
    half = arena.nbytes // 2 // ALIGNMENT * ALIGNMENT
    copier = copier_of(target, source)
    for chunk in _chunks(sizes, half, statuses, errors):
        read = source.read_into(rows.take(chunk), offsets := place(sizes[chunk])[0], sizes[chunk])
        good = chunk[_settle(read, chunk, statuses, errors)]
        offsets = offsets[np.isin(chunk, good)]
        some = target_rows.take(good)
        if copier is not None:
            written = copier.copy_from(
                source, rows.take(good), some, sizes[good], if_absent=True, preserve=True
            )
        else:
            keep_as_private(target, source)
            written = target.write_from(some, offsets, sizes[good], if_absent=True)
        kept = _settle(written, good, statuses, errors)
        good, offsets = good[kept], offsets[kept]
        copies = target.read_into(target_rows.take(good), offsets + half, sizes[good])
        _settle(copies, good, statuses, errors)
        _compare(arena, half, good[copies.ok], offsets[copies.ok], sizes, statuses, errors)
    return Result(statuses, errors)


def same_bytes(one: Store, row: Any, other: Store, other_row: Any, nbytes: int) -> bool:
    """Say whether an object of each of two stores has the same `nbytes` bytes."""
    arena = _shared_arena(one, other)
    half = arena.nbytes // 2
    size = np.array([nbytes], dtype=np.int64)
    offset = np.zeros(1, dtype=np.int64)
    return (
        nbytes <= half
        and one.read_into(row, offset, size).all_ok
        and other.read_into(other_row, offset + half, size).all_ok
        and np.array_equal(arena.view(0, nbytes), arena.view(half, nbytes))
    )


def _shared_arena(source: Store, target: Store) -> Arena:
    for store in (source, target):
        if store.arena is not None and len(store.arena.memory):  # not closed since
            arena = store.arena
            break
    else:
        arena = Arena(BUFFER_BYTES)
    for store in (source, target):
        if store.arena is not arena:
            store.attach(arena)
    return arena


def _chunks(
    sizes: IntArray, room: int, statuses: Any, errors: dict[int, str]
) -> Iterator[IntArray]:
    """Split into runs of rows that fit the room together; one that never does is an error."""
    chunk: list[int] = []
    used = 0
    for row, size in enumerate((-(-sizes // ALIGNMENT) * ALIGNMENT).tolist()):
        if size > room:
            statuses[row] = Status.ERROR
            errors[row] = f"larger than the buffer of {room} bytes"
            continue
        if used + size > room:
            yield np.array(chunk, dtype=np.int64)
            chunk, used = [], 0
        chunk.append(row)
        used += size
    if chunk:
        yield np.array(chunk, dtype=np.int64)


def _settle(result: Result, rows: IntArray, statuses: Any, errors: dict[int, str]) -> Any:
    """Take over what became of some rows; which of them are OK."""
    statuses[rows] = result.statuses
    for index, message in result.errors.items():
        errors[int(rows[index])] = message
    resized = np.isin(result.statuses, (Status.SHORT, Status.OVERSIZED, Status.CHANGED))
    for row in rows[resized].tolist():
        statuses[row] = Status.ERROR
        errors[row] = "it changed while it was read"
    return result.ok


def _compare(
    arena: Arena,
    half: int,
    rows: IntArray,
    offsets: IntArray,
    sizes: IntArray,
    statuses: Any,
    errors: dict[int, str],
) -> None:
    for row, offset in zip(rows.tolist(), offsets.tolist(), strict=True):
        size = int(sizes[row])
        if not np.array_equal(arena.view(offset, size), arena.view(half + offset, size)):
            statuses[row] = Status.ERROR
            errors[row] = "the copy reads back with other bytes"
