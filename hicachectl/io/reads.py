"""Read a store's objects by their rows in a table, in this process or in forked ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from hicachectl.backends.arena import Arena
from hicachectl.backends.base import attached
from hicachectl.backends.capabilities import Confirm, Digesting, ReadsAhead, Spreads
from hicachectl.backends.disk.io import Closing
from hicachectl.io.forking import Callees

if TYPE_CHECKING:
    import numpy.typing as npt
    import pyarrow as pa

    from hicachectl.backends.base import ReadResult, Store
    from hicachectl.formats.arrays import BoolArray, IntArray


class ObjectReads:
    """Reads of the objects of a table. Thread-safe."""

    def __init__(self, store: Store, objects: pa.Table) -> None:
        """Keep the columns that reads need.

        objects: columns of a scan.
        """
        self._store = store
        # Keep only columns that reads need, in one chunk, because taking rows of a table with
        # several chunks is slow.
        wanted = [name for name in ("key", "locator") if name in objects.column_names]
        self._objects = objects.select(wanted).combine_chunks()

    def read(
        self,
        rows: IntArray,
        offsets: IntArray,
        capacities: IntArray,
        *,
        identify: bool,
        confirm: bool,
    ) -> ReadResult:
        """Read objects into the store's arena, as `Store.read_into` does.

        rows: [n] int64 rows of the table.
        confirm: whether to read with `Confirm.read_confirmed`, if the store has it.
        """
        store = self._store
        read = store.read_into
        if confirm and isinstance(store, Confirm):
            read = store.read_confirmed
        return read(self._named(rows), offsets, capacities, identify=identify)

    def digest(
        self, rows: IntArray, capacities: IntArray, wanted: BoolArray
    ) -> tuple[ReadResult, npt.NDArray[np.uint8]]:
        """Read and digest objects, as `Digesting.digest` does. The store must be `Digesting`."""
        assert isinstance(self._store, Digesting)
        return self._store.digest(self._named(rows), capacities, wanted)

    def expect(self, rows: IntArray, capacities: IntArray) -> None:
        """Announce objects that will be read, if the store takes announcements."""
        if isinstance(self._store, ReadsAhead):
            self._store.expect(self._named(rows), capacities)

    def _named(self, rows: IntArray) -> pa.Table:
        """Return the objects of rows. Consecutive rows are not copied."""
        if len(rows) and rows[-1] - rows[0] + 1 == len(rows) and (np.diff(rows) == 1).all():
            return self._objects.slice(int(rows[0]), len(rows))
        return self._objects.take(rows)


class ReadingProcesses(Closing):
    """Forked processes that read as `ObjectReads` does, each under a Python lock of its own.

    Only rows and statuses go through pipes.
    arena: memory that the processes share with this process. They read objects into it.
    """

    def __init__(self, store: Store, objects: pa.Table, count: int, *, buffer_bytes: int) -> None:
        """Start `count` processes, or fewer if the system allows no more.

        objects: columns of a scan.
        Raises OSError if no process can start, and UsageError if there is no memory for the arena.
        """
        reads = ObjectReads(store, objects)  # the processes share the table

        def reads_of_share() -> ObjectReads:
            if isinstance(store, Spreads):
                store.concurrency.share(count)
            self.arena.populate()
            return reads

        self.arena = Arena(buffer_bytes, named=store.limits.named_arena)
        try:
            with attached(self.arena, store):
                self._processes = Callees(count, reads_of_share)
        except BaseException:
            self.arena.close()
            raise
        self.count = len(self._processes)

    def read(self, *arguments: Any, **options: Any) -> ReadResult:
        """Read in a process; see `ObjectReads.read`."""
        result: ReadResult = self._processes.call("read", *arguments, **options)
        return result

    def expect(self, *arguments: Any) -> None:
        """Announce objects in a process; see `ObjectReads.expect`."""
        self._processes.call("expect", *arguments)

    def close(self) -> None:
        """End the processes and free the arena."""
        self._processes.close()
        self.arena.close()
