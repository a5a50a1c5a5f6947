"""Calls of stores in forked processes, where so many wait that Python's lock limits the threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Self

import numpy as np

from hicachectl.backends.base import joined
from hicachectl.backends.capabilities import Spreads
from hicachectl.backends.disk.io import Closing
from hicachectl.io.forking import Callees

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicachectl.backends.base import Result, Rows, Store

# With fewer calls at once, or fewer objects, threads are as fast.
_CALLS = 32
_OBJECTS = 4096
# Processes that remove objects. A batch has no use for more.
_REMOVERS = 4


def forked_calls(
    count: int, stores: Sequence[Store], make: Callable[[], object], *, objects: int
) -> Callees | None:
    """Fork processes that call the methods of an object on stores; None where threads are as fast.

    Each process has a share of the stores' calls at once, and a Python lock of its own. A number of
    calls that was given, and not found, gets no processes.
    make: returns the object; called in each process.
    objects: the number of objects in all calls together.
    """
    spreading = [one.concurrency for one in stores if isinstance(one, Spreads)]
    if count < 2 or objects < _OBJECTS or len(spreading) < len(stores):
        return None
    if any(one.jobs is not None for one in spreading):
        return None
    if max(one.highest() for one in spreading) < _CALLS:
        return None

    def begin() -> object:
        for one in spreading:
            one.share(count)
        return make()

    for one in spreading:
        one.close()  # none of its threads holds a lock during the fork
    try:
        return Callees(count, begin)
    except OSError:  # the system refuses them
        return None


class Remover(Closing):
    """Removes objects from a store as `Store.delete` does, in several processes where that pays.

    Leaving the with block waits for the removals that have begun.
    """

    def __init__(self, store: Store, *, objects: int) -> None:
        """objects: the number of objects that will be removed, or more."""
        self._store = store
        self._processes = forked_calls(_REMOVERS, (store,), lambda: store, objects=objects)
        self._threads = None if self._processes is None else ThreadPoolExecutor(_REMOVERS, "remove")

    def __enter__(self) -> Self:
        return self

    def close(self) -> None:
        """End the processes."""
        if self._threads is not None:
            self._threads.shutdown()
        if self._processes is not None:
            self._processes.close()

    def delete(self, rows: Rows) -> Result:
        """See `Store.delete`."""
        processes, threads = self._processes, self._threads
        if processes is None or threads is None:
            return self._store.delete(rows)
        parts = [part for part in np.array_split(np.arange(len(rows)), len(processes)) if len(part)]
        begun = [threads.submit(processes.call, "delete", rows.take(part)) for part in parts]
        return joined(len(rows), zip(parts, (one.result() for one in begun), strict=True))
