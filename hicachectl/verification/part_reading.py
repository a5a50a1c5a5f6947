"""Choose the objects of a part to read, read them, and compare them with a catalog."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from hicachectl.backends.capabilities import Confirm
from hicachectl.checks.catalogs import Digested, compare, digested_objects
from hicachectl.checks.codes import builtin_codes
from hicachectl.checks.registry import DIGESTS, VALUES
from hicachectl.checks.replicas import NO_REPLICAS, replica_sets
from hicachectl.device.devices import open_checker
from hicachectl.formats.spec import UNKNOWN_SIZE
from hicachectl.formats.wording import over_buffer
from hicachectl.profiles.identities import expected_identities
from hicachectl.verification.coverage import compares_own
from hicachectl.verification.reading import (
    known_specs,
    read_objects,
    readable_sizes,
    value_checkers,
)
from hicachectl.verification.reading_plan import ReadingPlan, unwritten

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hicachectl.backends.base import Store
    from hicachectl.device.checker import DeviceChecker
    from hicachectl.formats.arrays import BoolArray, IntArray
    from hicachectl.pages.groups import PageGroups
    from hicachectl.pages.inventory import Inventory
    from hicachectl.verification.reading import ReadingResult
    from hicachectl.verification.request import VerifyRequest


def compare_with_catalog(
    store: Store, request: VerifyRequest, inventory: Inventory, reading: ReadingResult
) -> Digested:
    """Return the digested objects of a reading, compared with the request's catalog."""
    rows = np.flatnonzero(reading.digested if request.compares_catalog else ())
    fields = store.traits.version_fields
    found = digested_objects(inventory, rows, reading.versions[rows], fields, reading.digests[rows])
    if request.catalog is None:
        return found
    return compare(request.catalog, found, request.identity or fields)


@dataclass(frozen=True, slots=True)
class ReadingReasons:
    """Reasons to read objects of a store; false without any.

    values: groups of value checks.
    catalog: whether objects are digested for a catalog.
    own: whether the store compares objects with its digests and identities.
    marked: suffixes of the keys of such objects; empty if all keys may have them.
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
        """Return which objects the store may compare with its digests: [objects]."""
        has: BoolArray = np.full(len(inventory.objects), self.own)
        if self.marked:
            affixes = inventory.table.affixes
            has &= inventory.by_affix([end in self.marked for _, end in affixes], False)
        return has


@dataclass(frozen=True, slots=True)
class ReadingChoice:
    """Objects to read, and selected objects left out.

    counts: number of objects to read, by check group; one object can serve several groups.
    huge: rows of objects that exceed the buffer.
    undigested: number of objects that no check needs, because the store has no digests of them.
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
    """Choose the sampled objects that a check needs, if not in flight.

    deadline: `time.monotonic()` at which no further read begins.
    """
    known = known_specs(inventory.table)
    checkers = value_checkers(known, request.profile, reasons.values)
    replicated = replica_sets(inventory.table) != NO_REPLICAS
    ids = inventory.affix_ids
    of_group = groups.of_object
    own = reasons.has_own_digest(inventory)
    # Foreign objects have no group; a store may have digests of them.
    chosen = np.append(~in_flight, False)[of_group] | (own & (of_group < 0))
    if request.sample is not None:
        chosen &= np.append(request.sample.contains(groups.pages), False)[of_group]
    expected = inventory.table.expected_sizes
    sizes = readable_sizes(inventory, expected)
    chosen &= sizes != UNKNOWN_SIZE
    # An object that claims a huge size must not end the run. The check of sizes reports it, if a
    # size is expected.
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


def read_chosen(
    store: Store,
    request: VerifyRequest,
    inventory: Inventory,
    choice: ReadingChoice,
    on_read: Callable[[int, int], None],
    remark: Callable[[str], None],
) -> tuple[ReadingResult, tuple[str, ...]]:
    """Read the chosen objects; read damaged ones again if a writer may have interfered.

    Returns also the names of the devices, () for the CPU.
    """
    total = int(choice.plan.capacities.sum())
    with _device(request, inventory, choice.plan, remark) as device:
        plan = replace(choice.plan, device=device)
        hollow = unwritten(store, inventory, plan)
        reading = read_objects(
            store, inventory, plan.without(hollow), on_read=lambda n: on_read(n, total)
        )
        if isinstance(store, Confirm):
            digested = compare_with_catalog(store, request, inventory, reading)
            suspects = np.union1d(reading.suspects(), digested.mismatched)
            again = plan.only(np.isin(plan.rows, suspects))
            reading.replace(again.rows, read_objects(store, inventory, again))
    reading.objects += int(hollow.sum())
    for row in plan.rows[hollow].tolist():
        reading.report("unwritten-page", row, builtin_codes()["unwritten-page"].detail)
    for row in choice.huge.tolist():
        nbytes = inventory.objects.column("nbytes")[row].as_py()
        reading.report("unreadable", row, f"not read: {over_buffer(nbytes, request.buffer_bytes)}")
    return reading, () if device is None else tuple(device.names)


@contextmanager
def _device(
    request: VerifyRequest, inventory: Inventory, plan: ReadingPlan, remark: Callable[[str], None]
) -> Iterator[DeviceChecker | None]:
    """Open the device; yield None for the CPU."""
    if not len(plan.rows) or not (plan.checkers or plan.digest.any()):
        yield None
        return
    largest = int(plan.capacities.argmax())
    key = inventory.objects.column("key")[int(plan.rows[largest])].as_py()
    with open_checker(
        request.devices,
        device_bytes=request.device_bytes,
        buffer_bytes=request.buffer_bytes,
        largest=int(plan.capacities[largest]),
        largest_name=key.decode(errors="backslashreplace"),
        remark=remark,
    ) as device:
        yield device
        if device is not None and device.failure is not None:
            remark(f"The CPU did the rest: {device.failure}")
