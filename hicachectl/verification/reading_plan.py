"""Plan which objects to read, in which order, and in which tasks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from hicachectl.backends.arena import place
from hicachectl.backends.base import Status
from hicachectl.backends.page_tables import PageTables
from hicachectl.io.pipeline import DEFAULT_BUFFER_BYTES, batches

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    import numpy.typing as npt

    from hicachectl.backends.base import Store
    from hicachectl.checks.values import ValueChecker
    from hicachectl.device.checker import DeviceChecker
    from hicachectl.formats.arrays import IntArray
    from hicachectl.formats.spec import ObjectSpec
    from hicachectl.io.pipeline import Task
    from hicachectl.pages.inventory import Inventory

    Window = tuple[int, int]

# Small enough to stay in the CPU's cache while checked, large enough to make the overhead of a
# task small: with half the size, two threads read 20% less in the same time; with a quarter, 40%.
TASK_BYTES = 16 << 20
_TASK_OBJECTS = 256
# A task takes at most this share of a second of --bwlimit, so that the rate is even.
_LIMITED_SECONDS = 0.25
# Objects of one kind are read together within a window of the listing, so a run that is cut short
# has read whole pages, not only one rank's objects. If the store lists offsets, windows follow
# the offsets: a window is a stretch of each file.
_WINDOW_OBJECTS = 8192
_LEAST_WINDOW_OBJECTS = 1024
_HOLES_AT_ONCE = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingPlan:
    """Objects to read, digest and check.

    rows: [n] int64, objects to read.
    capacities: [n] int64, bytes to read of each.
    digest: [n] bool.
    expected: known specs by affix id.
    checkers: value checkers by affix id, for objects of `sizes[affix]` bytes.
    sizes: expected sizes by affix id; the last is for foreign keys.
    jobs: number of reading threads or processes.
    confirm: rule out writers that interfere, see `Confirm.read_confirmed`.
    device: digests and checks in place of the CPU.
    """

    rows: IntArray
    capacities: IntArray
    digest: npt.NDArray[np.bool_]
    expected: Mapping[int, ObjectSpec]
    checkers: Mapping[int, ValueChecker]
    sizes: IntArray
    buffer_bytes: int = DEFAULT_BUFFER_BYTES
    bytes_per_second: int | None = None
    jobs: int | None = None
    deadline: float | None = None
    confirm: bool = False
    device: DeviceChecker | None = None

    def without(self, left_out: npt.NDArray[np.bool_]) -> ReadingPlan:
        """Return the plan without some of the rows, [n] bool."""
        return self._picked(~left_out) if left_out.any() else self

    def only(self, chosen: npt.NDArray[np.bool_]) -> ReadingPlan:
        """Return a plan of some of the rows, [n] bool, with `confirm` set."""
        return replace(self._picked(chosen), confirm=True)

    def ordered(self, places: IntArray | None) -> ReadingPlan:
        """Return the plan in the order of places, [objects]; unchanged if None."""
        if places is None:
            return self
        return self._picked(np.argsort(places[self.rows], kind="stable"))

    def _picked(self, chosen: npt.NDArray[np.bool_] | IntArray) -> ReadingPlan:
        return replace(
            self,
            rows=self.rows[chosen],
            capacities=self.capacities[chosen],
            digest=self.digest[chosen],
        )


def unwritten(store: Store, inventory: Inventory, plan: ReadingPlan) -> npt.NDArray[np.bool_]:
    """Return which planned objects have bytes that were never written: [rows of the plan]."""
    hollow = np.zeros(len(plan.rows), dtype=np.bool_)
    if not isinstance(store, PageTables):
        return hollow
    for start in range(0, len(plan.rows), _HOLES_AT_ONCE):
        rows = inventory.take(plan.rows[start : start + _HOLES_AT_ONCE])
        found = np.flatnonzero(store.holes(rows))
        if len(found):
            where = store.confirm(rows.take(found))
            hollow[start + found[where == Status.OK]] = True
    return hollow


def windows_of(count: int, *, readers: int = 1) -> list[Window]:
    """Cut the listing into windows.

    For several readers the last windows are smaller, so all finish together.
    """
    least = _WINDOW_OBJECTS if readers == 1 else _LEAST_WINDOW_OBJECTS
    windows = []
    start = 0
    while start < count:
        size = min(_WINDOW_OBJECTS, max(least, (count - start) // (2 * readers)))
        windows.append((start, min(start + size, count)))
        start += size
    return windows


def places_of(inventory: Inventory) -> IntArray | None:
    """Return each object's offset in its file: [objects]; None if the store lists no offsets."""
    if "locator" not in inventory.objects.column_names:
        return None
    places: IntArray = inventory.objects.column("locator").fill_null(0).to_numpy()
    return places


def tasks_of(plan: ReadingPlan, inventory: Inventory, windows: Iterable[Window]) -> Iterator[Task]:
    """Cut each window into tasks of objects of one size, and of one affix or file.

    If the store lists offsets, adjacent objects are read together, such as the K and V of a page
    on 3FS; in memory the objects of each affix follow one another.
    """
    affix_ids, places = inventory.affix_ids, places_of(inventory)
    most_objects, most_bytes = _TASK_OBJECTS, min(TASK_BYTES, plan.buffer_bytes // 2)
    kinds = np.arange(len(inventory.table.affixes) + 1)
    if plan.device is not None:
        most_bytes = plan.device.slab_bytes
    elif places is not None:
        kinds = _prefix_ids(inventory)
    if plan.bytes_per_second is not None:
        most_bytes = max(1, min(most_bytes, int(plan.bytes_per_second * _LIMITED_SECONDS)))
    for start, stop in windows:
        window, window_sizes = plan.rows[start:stop], plan.capacities[start:stop]
        kind = kinds[affix_ids[window]]
        order = np.lexsort((window if places is None else places[window], window_sizes, kind))
        window, kind, window_sizes = window[order], kind[order], window_sizes[order]
        changes = np.flatnonzero((np.diff(kind) != 0) | (np.diff(window_sizes) != 0)) + 1
        for part, part_sizes in zip(
            np.split(window, changes), np.split(window_sizes, changes), strict=True
        ):
            if plan.device is not None:
                most_objects = _in_slab(plan.device, int(part_sizes.max(initial=1)))
            for task in batches(part, part_sizes, most_objects=most_objects, most_bytes=most_bytes):
                by_affix = np.argsort(affix_ids[task.rows], kind="stable")
                yield replace(task, rows=task.rows[by_affix])


def _in_slab(device: DeviceChecker, nbytes: int) -> int:
    """Return how many objects of a size fit in a device's slab, as the arena places them."""
    _, step = place(np.array([max(1, nbytes)]))
    return max(1, min(device.most_objects, device.slab_bytes // step))


def _prefix_ids(inventory: Inventory) -> IntArray:
    """Return a number for each key prefix, by affix id: on 3FS, for each file."""
    prefixes = [prefix for prefix, _ in inventory.table.affixes]
    ids = {prefix: number for number, prefix in enumerate(dict.fromkeys(prefixes))}
    return np.array([*(ids[prefix] for prefix in prefixes), len(ids)], dtype=np.int64)
