"""Call stores from forked processes, for more calls at once than threads of one process can make.

The threads of a process take turns with its Python lock. Each forked process has a lock of its own.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Self

import numpy as np

from hicachectl.backends.base import in_batches, joined
from hicachectl.backends.capabilities import Spreads
from hicachectl.backends.disk.io import Closing
from hicachectl.io.forking import Callees

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicachectl.backends.base import Result, Rows, Store
    from hicachectl.formats.arrays import IntArray

# With fewer calls at once or fewer objects than these, threads are as fast as processes.
_CALLS = 32
_OBJECTS = 4096
# Processes that remove objects. More processes would not make a batch faster.
_REMOVERS = 4
# A batch has objects in all 256 folders of a store. It is in the order of folders, so the share of
# each process has objects in about this many folders.
_FOLDERS = 256 // _REMOVERS


def forked_calls(
    count: int, stores: Sequence[Store], make: Callable[[], object], *, objects: int
) -> Callees | None:
    """Fork processes that call the methods of an object. These methods call stores.

    The calls that the stores make at once are divided equally among these processes and the parent.
    Fork no process, and return None, in these cases:

    - Threads are as fast.
    - The number of calls was given (--jobs).
    - The system allows no more processes.

    make: function that returns the object. It is called in each process.
    objects: the number of objects in all calls together.
    """
    spreading = [one.concurrency for one in stores if isinstance(one, Spreads)]
    if count < 2 or objects < _OBJECTS or len(spreading) < len(stores):
        return None
    if any(one.jobs is not None for one in spreading):
        return None
    if max(one.highest() for one in spreading) < _CALLS:
        return None

    def share() -> None:
        for one in spreading:
            one.share(count + 1)

    def begin() -> object:
        share()
        return make()

    for one in spreading:
        one.close()  # so that none of its threads holds a lock during the fork
    try:
        processes = Callees(count, begin)
    except OSError:  # the system allows no more processes
        return None
    share()
    return processes


def delete_all(store: Store, rows: Rows) -> Result:
    """Delete objects as `Store.delete` does, however many they are."""
    no_bytes = np.zeros(len(rows), dtype=np.int64)  # only the number of objects is limited
    return in_batches(no_bytes, store.limits, lambda span: store.delete(rows[span]))


def _apart(part: IntArray) -> IntArray:
    """Return rows in an order in which neighbours lie in different folders.

    A file system makes one change at a time in a folder. Threads remove neighbouring rows at the
    same time, so they would wait for each other in one folder.
    part: rows in the order of a listing, which goes folder by folder.
    """
    steps = max(1, len(part) // _FOLDERS)
    return part[np.argsort(np.arange(len(part)) % steps, kind="stable")]


class Remover(Closing):
    """Removes objects from a store as `Store.delete` does, in several processes if this is faster.

    processes: the number of processes; 1 if this process removes the objects itself.
    Leaving the with block waits for the removals that have begun.
    """

    def __init__(self, store: Store, *, objects: int) -> None:
        """Fork the processes, if several are faster than one.

        objects: most objects that will be removed.
        """
        self._store = store
        self._processes = forked_calls(_REMOVERS, (store,), lambda: store, objects=objects)
        self.processes = 1 if self._processes is None else len(self._processes)
        self._threads = (
            None if self.processes == 1 else ThreadPoolExecutor(self.processes, "remove")
        )

    def __enter__(self) -> Self:
        return self

    def close(self) -> None:
        """End the processes."""
        if self._threads is not None:
            self._threads.shutdown()
        if self._processes is not None:
            self._processes.close()

    def delete(self, rows: Rows) -> Result:
        """See `delete_all`."""
        processes, threads, most = self._processes, self._threads, self._store.limits.batch_objects
        if processes is None or threads is None:
            return delete_all(self._store, rows)
        count = max(self.processes, -(-len(rows) // most))
        parts = [_apart(part) for part in np.array_split(np.arange(len(rows)), count) if len(part)]
        begun = [threads.submit(processes.call, "delete", rows.take(part)) for part in parts]
        return joined(len(rows), zip(parts, (one.result() for one in begun), strict=True))
