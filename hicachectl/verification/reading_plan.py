"""Choose the objects to read, and cut them into tasks in the best order."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from hicachectl.backends.arena import place
from hicachectl.backends.base import Status
from hicachectl.backends.page_tables import PageTables
from hicachectl.checks.registry import DIGESTS, VALUES
from hicachectl.checks.replicas import NO_REPLICAS, replica_sets
from hicachectl.formats.spec import UNKNOWN_SIZE
from hicachectl.io.pipeline import DEFAULT_BUFFER_BYTES, batches
from hicachectl.profiles.identities import expected_identities
from hicachectl.verification.request import compares_own

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    import numpy.typing as npt

    from hicachectl.backends.base import Store
    from hicachectl.checks.values import ValueChecker
    from hicachectl.device.checker import DeviceChecker
    from hicachectl.formats.arrays import BoolArray, IntArray
    from hicachectl.formats.profile import Profile
    from hicachectl.formats.spec import ObjectSpec
    from hicachectl.io.pipeline import Task
    from hicachectl.io.reads import ReadingProcesses
    from hicachectl.pages.deployments import AffixTable
    from hicachectl.pages.groups import PageGroups
    from hicachectl.pages.inventory import Inventory
    from hicachectl.verification.request import VerifyRequest

    Window = tuple[int, int]

# Bytes of a task. They stay in the CPU's cache while they are checked, and the overhead of the task
# is small. With half as many bytes, two threads read 20% less in the same time. With a quarter,
# they read 40% less (measured).
TASK_BYTES = 16 << 20
_TASK_OBJECTS = 256
# Least size of objects that are digested in pieces. Smaller objects fit into the processor's cache
# whole, so they need no pieces.
_PIECES_FROM = 1 << 20
# Bytes of a task of objects that are digested in pieces. The task takes no memory of the arena, so
# it can be large. With tasks of 16 MiB, two threads wait for Python's lock so often that the
# same digests take a quarter longer (measured).
_PIECES_TASK_BYTES = 128 << 20
# Most seconds that a task takes at the rate of --bwlimit, so that the rate is even.
_LIMITED_SECONDS = 0.25
# Objects of one affix are read together, but only within a window: this many objects that follow
# one another in the plan. A run that is cut short has therefore read all objects of some pages, not
# the objects of one rank alone. If the store lists offsets, the plan is ordered by offset, and a
# window is a stretch of each file.
_WINDOW_OBJECTS = 8192
_LEAST_WINDOW_OBJECTS = 1024
_HOLES_AT_ONCE = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingPlan:
    """Objects to read, digest and check.

    rows: [n] int64, rows of the objects to read.
    capacities: [n] int64, bytes to read of each object.
    digest: [n] bool, whether to digest the object.
    noted: [n] bool, whether to note the quartiles of the object.
    expected: specs whose tensors a profile describes, by affix id.
    checkers: value checkers by affix id, for objects of `sizes[affix]` bytes.
    sizes: expected sizes by affix id; the last entry is for foreign keys.
    jobs: number of threads or processes that read; None for a number that the pipeline chooses.
    deadline: `time.monotonic()` after which no read begins; None for no limit.
    confirm: whether to rule out writers that interfere, see `Confirm.read_confirmed`.
    device: device that digests and checks instead of the CPU; None for the CPU.
    processes: processes that read objects of the inventory for the device; None if threads read.
    in_pieces: whether the store digests large objects while it reads them, see `Digesting`.
    """

    rows: IntArray
    capacities: IntArray
    digest: npt.NDArray[np.bool_]
    noted: npt.NDArray[np.bool_]
    expected: Mapping[int, ObjectSpec]
    checkers: Mapping[int, ValueChecker]
    sizes: IntArray
    buffer_bytes: int = DEFAULT_BUFFER_BYTES
    bytes_per_second: int | None = None
    jobs: int | None = None
    deadline: float | None = None
    confirm: bool = False
    device: DeviceChecker | None = None
    processes: ReadingProcesses | None = None
    in_pieces: bool = False

    def without(self, left_out: npt.NDArray[np.bool_]) -> ReadingPlan:
        """Return the plan without some objects. left_out: [n] bool."""
        return self._picked(~left_out) if left_out.any() else self

    def known_affix(self, affix: int, nbytes: int) -> int:
        """Return the affix id of an object; -1 if the object does not have its expected size."""
        return affix if nbytes == self.sizes[affix] else -1

    def only(self, chosen: npt.NDArray[np.bool_]) -> ReadingPlan:
        """Return a plan to read only some objects, with `confirm` set. chosen: [n] bool."""
        return replace(self._picked(chosen), confirm=True)

    def ordered(self, places: IntArray | None) -> ReadingPlan:
        """Return the plan in the order of the objects' places.

        places: [objects] place of each object; None to keep the order.
        """
        if places is None:
            return self
        return self._picked(np.argsort(places[self.rows], kind="stable"))

    def _picked(self, chosen: npt.NDArray[np.bool_] | IntArray) -> ReadingPlan:
        return replace(
            self,
            rows=self.rows[chosen],
            capacities=self.capacities[chosen],
            digest=self.digest[chosen],
            noted=self.noted[chosen],
        )


@dataclass(frozen=True, slots=True)
class ReadingReasons:
    """Reasons to read objects of a store. The truth value is False if there is no reason.

    values: requested groups of value checks.
    catalog: whether objects are digested for a catalog.
    own: whether the store compares objects with its own digests and identities.
    marked: key suffixes of objects that may have digests or identities in the store; empty if all
        objects may have them.
    """

    values: tuple[str, ...]
    catalog: bool
    own: bool
    marked: frozenset[str]

    @classmethod
    def of(cls, store: Store, request: VerifyRequest) -> ReadingReasons:
        """Return the reasons to read objects for a request."""
        expected = expected_identities(store, request.real_profile)
        return cls(
            values=request.value_groups,
            catalog=request.compares_catalog,
            own=DIGESTS.name in request.checks and compares_own(store, expected),
            marked=expected.marked,
        )

    def __bool__(self) -> bool:
        return bool(self.values) or self.catalog or self.own

    def has_own_digest(self, inventory: Inventory) -> BoolArray:
        """Return which objects the store may compare with digests of its own: [objects]."""
        has: BoolArray = np.full(len(inventory.objects), self.own)
        if self.marked:
            affixes = inventory.table.affixes
            has &= inventory.by_affix([end in self.marked for _, end in affixes], False)
        return has


@dataclass(frozen=True, slots=True)
class ReadingChoice:
    """Objects to read, and selected objects that are left out.

    counts: number of objects to read, by check group. One object can serve several groups.
    huge: rows of objects that are not read, because they exceed the buffer. An object whose
        expected size is known is left out here, because the check of sizes reports the object.
    undigested: number of objects not read, because the store has no digest of them and no other
        check needs them.
    """

    plan: ReadingPlan
    counts: dict[str, int]
    huge: IntArray
    undigested: int


def choose_objects(
    request: VerifyRequest,
    reasons: ReadingReasons,
    inventory: Inventory,
    groups: PageGroups,
    in_flight: BoolArray,
    deadline: float | None,
) -> ReadingChoice:
    """Choose the objects of the sample that a check needs and that are not in flight.

    deadline: `time.monotonic()` after which no read begins.
    """
    known = known_specs(inventory.table)
    checkers = value_checkers(known, request.profile, reasons.values)
    replicated = replica_sets(inventory.table) != NO_REPLICAS
    ids = inventory.affix_ids
    of_group = groups.of_object
    own = reasons.has_own_digest(inventory)
    # Foreign objects have no group, but the store may have digests of them.
    chosen = np.append(~in_flight, False)[of_group] | (own & (of_group < 0))
    if request.sample is not None:
        chosen &= np.append(request.sample.contains(groups.pages), False)[of_group]
    expected = inventory.table.expected_sizes
    sizes = readable_sizes(inventory, expected)
    chosen &= sizes != UNKNOWN_SIZE
    # A single object with a huge listed size should not end the run. If its expected size is known,
    # the check of sizes reports the object.
    huge = chosen & (sizes > request.buffer_bytes) & (sizes != expected[ids])
    chosen &= ~huge
    of_replicas = replicated[ids] & (VALUES.name in reasons.values)
    digest = chosen & (of_group >= 0) & (reasons.catalog | of_replicas)
    counts = {}
    read = digest.copy()
    for group in reasons.values:
        affixes = [affix for affix, checker in checkers.items() if group in checker.groups]
        of_affix = np.zeros(len(inventory.table.affixes) + 1, dtype=np.bool_)
        of_affix[affixes] = True
        checked = chosen & of_affix[ids]
        counts[group] = int(checked.sum())
        read |= checked
    if reasons.catalog or reasons.own:
        compared = chosen & (reasons.catalog | own)
        counts[DIGESTS.name] = int(compared.sum())
        read |= compared
    rows = np.flatnonzero(read)
    plan = ReadingPlan(
        rows=rows,
        capacities=sizes[rows],
        digest=digest[rows],
        noted=_spread_in_time(inventory, rows, sizes, checkers, request.noted_objects),
        expected=known,
        checkers=checkers,
        sizes=expected,
        buffer_bytes=request.buffer_bytes,
        bytes_per_second=request.bytes_per_second,
        jobs=request.jobs,
        deadline=deadline,
    )
    return ReadingChoice(
        plan=plan,
        counts=counts,
        huge=np.flatnonzero(huge & (expected[ids] == UNKNOWN_SIZE)),
        undigested=int((chosen & ~read).sum()),
    )


def _spread_in_time(
    inventory: Inventory,
    rows: IntArray,
    sizes: IntArray,
    checkers: Mapping[int, ValueChecker],
    most: int,
) -> BoolArray:
    """Choose some objects of each checked affix, evenly spread in the order of writes: [n].

    rows: [n] rows of the objects to read.
    sizes: [objects] bytes to read of each object of the inventory.
    most: largest number of objects of one affix.
    """
    ids = inventory.affix_ids[rows]
    checked = np.zeros(len(inventory.table.affixes) + 1, dtype=np.bool_)
    checked[list(checkers)] = True
    judged = np.flatnonzero(checked[ids] & (sizes[rows] == inventory.table.expected_sizes[ids]))
    times = inventory.objects.column("mtime_ns").fill_null(0).to_numpy()[rows[judged]]
    order = judged[np.lexsort((times, ids[judged]))]
    counts = np.bincount(ids[order], minlength=len(checked))
    rank = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
    count = counts[ids[order]]
    taken = (rank + 1) * most // count > rank * most // count
    chosen = np.zeros(len(rows), dtype=np.bool_)
    chosen[order[taken | (count <= most)]] = True
    return chosen


def known_specs(table: AffixTable) -> dict[int, ObjectSpec]:
    """Return the specs whose tensors a profile describes, by affix id."""
    specs = enumerate(table.specs)
    return {affix: spec for affix, spec in specs if spec is not None and spec.tensors}


def value_checkers(
    known: dict[int, ObjectSpec], profile: Profile | None, groups: Collection[str] | None = None
) -> dict[int, ValueChecker]:
    """Return the checkers by affix id, for the known specs to which a check applies.

    groups: check groups to take checks from; None for all groups.
    """
    if profile is None:
        return {}
    from hicachectl.checks.values import ValueChecker

    checkers = {affix: ValueChecker(spec, profile, groups) for affix, spec in known.items()}
    return {affix: checker for affix, checker in checkers.items() if checker.prepared}


def readable_sizes(inventory: Inventory, expected: IntArray) -> IntArray:
    """Return how many bytes to read of each object: [objects].

    This is the listed size, or the expected size if none is listed. It is UNKNOWN_SIZE if both are
    unknown, and the object then cannot be read.
    """
    listed = inventory.sizes
    sizes: IntArray = np.where(
        listed == UNKNOWN_SIZE, expected[inventory.affix_ids], listed
    ).astype(np.int64)
    return sizes


def unwritten(store: Store, inventory: Inventory, plan: ReadingPlan) -> npt.NDArray[np.bool_]:
    """Return which planned objects were never written: [rows of the plan].

    They lie in holes of their file, and only 3FS stores have such objects. An object counts only if
    its key still maps to the listed place after the hole was found.
    """
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
    """Cut a plan of `count` objects into windows.

    For several readers, the last windows are smaller, so that all readers end at about one time.
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
    """Return each object's offset in its file: [objects]. None if the store lists no offsets."""
    if "locator" not in inventory.objects.column_names:
        return None
    places: IntArray = inventory.objects.column("locator").fill_null(0).to_numpy()
    return places


def tasks_of(plan: ReadingPlan, inventory: Inventory, windows: Iterable[Window]) -> Iterator[Task]:
    """Cut each window into tasks, and yield them.

    All objects of a task have the same size. They also have the same affix, or lie in the same file
    if the store lists offsets and the CPU checks. Neighbours in a file, such as the K and V of a
    page on 3FS, are then read together, but in the task they are ordered by affix. Large objects
    that no value check needs are read in pieces, if the plan allows this.
    """
    affix_ids, places = inventory.affix_ids, places_of(inventory)
    most_objects, most_bytes = _TASK_OBJECTS, min(TASK_BYTES, plan.buffer_bytes // 2)
    kinds = np.arange(len(inventory.table.affixes) + 1)
    if plan.device is not None:
        most_bytes = plan.device.slab_bytes
    elif places is not None:
        kinds = _prefix_ids(inventory)
    wanted = np.zeros(len(inventory.objects), dtype=np.bool_)
    wanted[plan.rows] = plan.digest
    most_in_pieces = _PIECES_TASK_BYTES
    if plan.bytes_per_second is not None:
        limited = max(1, int(plan.bytes_per_second * _LIMITED_SECONDS))
        most_bytes, most_in_pieces = min(most_bytes, limited), min(most_in_pieces, limited)
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
            pieces = plan.in_pieces and _fits_pieces(plan, affix_ids[part], part_sizes)
            most = most_in_pieces if pieces else most_bytes
            for task in batches(part, part_sizes, most_objects=most_objects, most_bytes=most):
                by_affix = np.argsort(affix_ids[task.rows], kind="stable")
                rows = task.rows[by_affix]
                yield replace(task, rows=rows, digested=wanted[rows] if pieces else None)


def _fits_pieces(plan: ReadingPlan, affixes: npt.NDArray[np.int32], sizes: IntArray) -> bool:
    """Return whether objects can be digested in pieces: they are large, and have no value check.

    sizes: sizes of the objects, all equal.
    """
    if plan.device is not None or not len(sizes) or sizes[0] < _PIECES_FROM:
        return False
    known = {plan.known_affix(affix, int(sizes[0])) for affix in np.unique(affixes).tolist()}
    return known.isdisjoint(plan.checkers)


def _in_slab(device: DeviceChecker, nbytes: int) -> int:
    """Return how many objects of a size fit into a slab of the device, as the arena places them."""
    _, step = place(np.array([max(1, nbytes)]))
    return max(1, min(device.most_objects, device.slab_bytes // step))


def _prefix_ids(inventory: Inventory) -> IntArray:
    """Return the number of each affix's key prefix, by affix id.

    On 3FS, the prefix names the file.
    """
    prefixes = [prefix for prefix, _ in inventory.table.affixes]
    ids = {prefix: number for number, prefix in enumerate(dict.fromkeys(prefixes))}
    return np.array([*(ids[prefix] for prefix in prefixes), len(ids)], dtype=np.int64)
