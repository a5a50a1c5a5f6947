"""Copy objects between a store and a quarantine run. Copy damaged objects unchanged."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from hicachectl.backends.arena import Arena, place
from hicachectl.backends.base import Result, Status, attached, in_batches, joined
from hicachectl.backends.capabilities import as_stored, copier_of
from hicachectl.move.copy_plan import aligned

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa

    from hicachectl.backends.base import Limits, Store
    from hicachectl.formats.arrays import BoolArray, IntArray

MEMORY_BYTES = 512 << 20  # bytes of address space, of which only the bytes used take memory


@dataclass(frozen=True, slots=True)
class Copier:
    """Copies and compares objects of two stores that are attached to one arena."""

    arena: Arena

    def copy(
        self, source: Store, rows: pa.Table, target: Store, targets: pa.Table, sizes: IntArray
    ) -> Result:
        """Copy objects to unused keys, durably.

        rows, targets: [n] rows of the objects in the source, and in the target.
        sizes: [n] bytes of the objects.
        The result has the status of an object's read if the read failed, else that of its write.
        Raises StoreUnavailable.
        """
        by_system = copier_of(target, source)

        def copied(span: slice) -> Result:
            some, new, nbytes = rows[span], targets[span], sizes[span]
            if by_system is not None:
                return by_system.copy_from(source, some, new, nbytes, if_absent=True, preserve=True)
            if len(nbytes) == 1 and nbytes[0] > self.arena.nbytes:
                why = f"{nbytes[0]} bytes, but at most {self.arena.nbytes} fit into the buffer"
                return Result(np.array([Status.ERROR], dtype=np.uint8), {0: why})
            offsets, _ = place(nbytes)
            found = source.read_into(some, offsets, nbytes, identify=False)
            read = np.flatnonzero(found.ok)
            if not len(read):
                return found
            written = target.write_from(new.take(read), offsets[read], nbytes[read], if_absent=True)
            return joined(len(nbytes), [(slice(None), found), (read, written)])

        return in_batches(aligned(sizes), self._limits(source, target), copied)

    def same(
        self, one: Store, rows: pa.Table, other: Store, other_rows: pa.Table, sizes: IntArray
    ) -> BoolArray:
        """Return which objects have the same bytes in two stores: [n].

        rows, other_rows: [n] rows of the objects in each store.
        sizes: [n] bytes of the objects, equal in both stores.
        An object counts as different if it cannot be read, or if the arena is too small for both
        copies.
        """
        same = np.zeros(len(sizes), dtype=np.bool_)
        for n, nbytes in enumerate(sizes.tolist()):
            (_, back), size = place(sizes[n : n + 1]), sizes[n : n + 1]
            same[n] = (
                back + nbytes <= self.arena.nbytes
                and one.read_into(rows.slice(n, 1), np.array([0]), size).all_ok
                and other.read_into(other_rows.slice(n, 1), np.array([back]), size).all_ok
                and np.array_equal(self.arena.view(0, nbytes), self.arena.view(back, nbytes))
            )
        return same

    def _limits(self, source: Store, target: Store) -> Limits:
        most = min(s.limits.batch_bytes for s in (source, target))
        return replace(
            target.limits,
            batch_objects=min(s.limits.batch_objects for s in (source, target)),
            batch_bytes=min(most, self.arena.nbytes),
        )


@contextmanager
def copier(one: Store, other: Store, nbytes: int = MEMORY_BYTES) -> Iterator[Copier]:
    """Attach memory to two stores, and read their objects as stored until the block ends."""
    with Arena(nbytes) as arena, attached(arena, one, other), as_stored(one, other):
        yield Copier(arena)
