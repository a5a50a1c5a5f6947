"""Verify a store: scan, read, check, report."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.backends.base import take_rows
from hicachectl.backends.capabilities import Confirm
from hicachectl.checks.catalogs import MISMATCH, Digested, carry_forward, compare
from hicachectl.checks.findings import combine, severity_ranks, without_repeats
from hicachectl.checks.registry import (
    DIGESTS,
    GROUPS,
    SEVERITIES,
    VALUES,
    CheckInput,
    Need,
    checks,
    group_names,
    reading_groups,
    value_groups,
)
from hicachectl.checks.replicas import NO_REPLICAS, replica_sets
from hicachectl.checks.sizes import expected_sizes
from hicachectl.device.devices import DEFAULT_DEVICE_BYTES, open_checker, refuse_missing
from hicachectl.formats.spec import UNKNOWN_SIZE
from hicachectl.formats.wording import over_buffer
from hicachectl.io.pipeline import DEFAULT_BUFFER_BYTES
from hicachectl.pages.group_table import ORPHAN, PARTIAL
from hicachectl.pages.groups import PageGroups
from hicachectl.pages.inventory import Inventory, take_inventory
from hicachectl.pages.selection import EVERYTHING, Selection, select
from hicachectl.pages.unmatched import explain_selection
from hicachectl.profiles.identities import Expected, expected_identities
from hicachectl.text.vocabulary import LOCK
from hicachectl.verify.coverage import (
    compares_own,
    impossible_checks,
    indistinct_dtypes,
    reading_gaps,
    trailer_gaps,
    unjudged,
    unmet_needs,
)
from hicachectl.verify.in_flight import changed_groups, groups_in_flight
from hicachectl.verify.live_tables import saved_tables
from hicachectl.verify.reading import (
    ReadingResult,
    known_specs,
    read_objects,
    readable_sizes,
    value_checkers,
)
from hicachectl.verify.reading_plan import ReadingPlan, unwritten

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import numpy.typing as npt

    from hicachectl.backends.base import Store
    from hicachectl.checks.registry import Check
    from hicachectl.device.checker import DeviceChecker
    from hicachectl.formats.catalog import Catalog
    from hicachectl.formats.profile import Profile
    from hicachectl.pages.groups import BoolArray
    from hicachectl.verify.sampling import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyRequest:
    """Options of a verification.

    checks: names of check groups. identity: fields that show a rewrite if one differs from its
    recorded value; empty: all fields of the store. time_limit_seconds: no read begins after this
    time. repairs: note each object's version. devices: from
    `hicachectl.device.devices.parse_devices`; device_bytes: memory on each.
    """

    profile: Profile | None = None
    checks: tuple[str, ...] = field(default_factory=group_names)
    selection: Selection = EVERYTHING
    grace_seconds: float = 60.0
    sample: Sample | None = None
    time_limit_seconds: float | None = None
    catalog: Catalog | None = None
    update_catalog: bool = False
    identity: tuple[str, ...] = ()
    weights_version: str = ""
    repairs: bool = False
    devices: tuple[str, ...] = ("cpu",)
    device_bytes: int = DEFAULT_DEVICE_BYTES
    buffer_bytes: int = DEFAULT_BUFFER_BYTES
    bytes_per_second: int | None = None
    jobs: int | None = None

    @property
    def real_profile(self) -> Profile | None:
        """The profile, unless it was inferred from the store."""
        return None if self.profile is None or self.profile.inferred else self.profile

    @property
    def has_catalog(self) -> bool:
        """Whether digests are compared with a catalog, or recorded in one."""
        return self.catalog is not None or self.update_catalog

    def unmet(self, store: Store) -> dict[Need, str]:
        """Return the unmet needs of checks on a store, with the reasons."""
        return unmet_needs(store, self.profile, has_catalog=self.has_catalog)

    def impossible(self, store: Store) -> dict[str, str]:
        """Return the reason for each group of checks that cannot run on a store."""
        return impossible_checks(self.checks, self.unmet(store))


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """Result of a verification; `document` has the members of the JSON contract.

    inventory, groups: for a repair. catalog: the updated one, if requested.
    """

    document: dict[str, Any]
    findings: pa.Table
    remarks: tuple[str, ...]
    inventory: Inventory
    groups: PageGroups
    catalog: Catalog | None

    def reaches(self, severity: str) -> bool:
        """Return whether any finding is at least this severe."""
        return bool((severity_ranks(self.findings) >= SEVERITIES.index(severity)).any())


def not_begun(store: str) -> dict[str, Any]:
    """Return the document of a verification that a lock prevented."""
    return {
        "store": store,
        "profile": None,
        "objects": 0,
        "pages": 0,
        "bytes": 0,
        "seconds": 0.0,
        "complete": False,
        "stopped_by": LOCK,
        "gone": 0,
        "in_flight": 0,
        "sampled": 0,
        "objects_read": 0,
        "bytes_read": 0,
        "device": None,
        "repaired": 0,
        "quarantined": 0,
        "checks": [],
        "skipped_checks": [],
        "findings": None,
        "counts": {},
    }


def verify_store(
    store: Store,
    request: VerifyRequest,
    *,
    on_listed: Callable[[int], None] = lambda objects: None,
    on_read: Callable[[int, int], None] = lambda nbytes, total: None,
    on_wait: Callable[[float, int], None] = lambda seconds, pages: None,
) -> VerifyReport:
    """Scan a store, run the checks, and return their report.

    Groups younger than the grace are in flight: no check judges them. If the store keeps no times,
    incomplete groups are looked up again after the grace. on_listed takes objects listed; on_read,
    bytes read and total to read; on_wait, seconds to wait and number of incomplete groups. Raises
    StoreUnavailable, and ProfileError if the profile contradicts the store.
    """
    return _Verification(store, request).report(on_listed, on_read, on_wait)


@dataclass(slots=True)
class _Verification:
    store: Store
    request: VerifyRequest
    started: float = field(default_factory=time.monotonic)
    now_ns: int = field(default_factory=time.time_ns)
    planned: dict[str, int] = field(default_factory=dict)  # objects to read, by check
    unread: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    expected: Expected = field(default_factory=Expected)
    undigested: int = 0  # objects not read, since the store has no digests of them

    def report(
        self,
        on_listed: Callable[[int], None],
        on_read: Callable[[int, int], None],
        on_wait: Callable[[float, int], None],
    ) -> VerifyReport:
        request = self.request
        self.expected = expected_identities(self.store, request.real_profile)
        if self._reads:  # before a long listing, and for an empty store too
            refuse_missing(request.devices)
        tables = saved_tables(self.store) if GROUPS.name in request.checks else None
        listed = take_inventory(
            self.store, request.profile, columns=self._columns(), on_batch=on_listed
        )
        inventory = select(listed, replace(request.selection, pool=""))
        groups = PageGroups(inventory)
        in_flight = groups_in_flight(
            self.store,
            groups,
            now_ns=self.now_ns,
            listing_ns=int((time.monotonic() - self.started) * 1e9),
            grace_ns=self._grace_ns,
        )
        gone = 0
        if "mtime_ns" in self.store.traits.columns:
            moved, gone = changed_groups(self.store, inventory, groups, ~in_flight)
            in_flight |= moved
        plan = self._plan(inventory, groups, in_flight)
        remarks: list[str] = []
        with self._device(inventory, plan, remarks) as device:
            plan = replace(plan, device=device)
            reading = self._read(inventory, plan, on_read)
        if "mtime_ns" not in self.store.traits.columns:
            in_flight, gone = self._look_again(inventory, groups, on_wait)
        reading.gone += gone
        outcome, digested = self._compared(inventory, reading)
        untold: dict[str, str] = {}
        given = CheckInput(
            store=self.store,
            inventory=inventory,
            groups=groups,
            in_flight=in_flight,
            profile=request.profile,
            weights_version=request.weights_version,
            now_ns=self.now_ns,
            grace_ns=self._grace_ns,
            tables=tables,
            digests=reading.digests,
            digested=reading.digested,
            compared=outcome if self._digests else None,
            remark=remarks.append,
            skip=untold.__setitem__,
        )
        unmet = request.unmet(self.store)
        able = [check for check in checks(request.checks) if check.needs.isdisjoint(unmet)]
        found = _found(given, reading, able)
        if request.selection.pool:
            found = found.filter(pc.equal(found.column("pool"), request.selection.pool))
        catalog = None
        if request.update_catalog:
            catalog = carry_forward(
                request.catalog,
                self._records(inventory, digested, reading),
                outcome,
                store=self.store.url,
                present=listed.objects.column("key").combine_chunks(),
                now_ns=self.now_ns,
            )
        impossible = impossible_checks(request.checks, unmet)
        skipped = self._skipped(given, listed, plan, reading, impossible) | untold
        ran = [name for name in request.checks if self._ran(name, impossible, skipped)]
        document = self._document(given, plan, reading, found)
        return VerifyReport(
            document=document | {"checks": ran, "skipped_checks": list(skipped)},
            findings=found,
            remarks=(
                *remarks,
                *(f"{check}: {why}" for check, why in skipped.items()),
                *self.store.remarks,
            ),
            inventory=inventory,
            groups=groups,
            catalog=catalog,
        )

    def _columns(self) -> list[str]:
        replicas = any(Need.REPLICAS in check.needs for check in checks(self.request.checks))
        wanted = {"version": self.request.repairs, "replicas": replicas}
        return [
            name for name, needed in wanted.items() if needed and name in self.store.traits.columns
        ]

    @property
    def _grace_ns(self) -> int:
        return int(self.request.grace_seconds * 1e9)

    def _look_again(
        self, inventory: Inventory, groups: PageGroups, on_wait: Callable[[float, int], None]
    ) -> tuple[BoolArray, int]:
        """Wait until the grace has passed, and look up incomplete groups again.

        Returns which groups have changed, and how many objects are gone.
        """
        suspects = int(np.isin(groups.states, (PARTIAL, ORPHAN)).sum())
        left = self.started + self.request.grace_seconds - time.monotonic()
        if suspects and left > 0:
            on_wait(left, suspects)
            time.sleep(left)
        settled = np.ones(len(groups), dtype=np.bool_)
        return changed_groups(self.store, inventory, groups, settled)

    @property
    def _digests(self) -> bool:
        """Whether objects are digested for a catalog."""
        return self.request.has_catalog and DIGESTS.name in self.request.checks

    @property
    def _own_digests(self) -> bool:
        """Whether objects are read so that the store compares its digests and identities."""
        asked = DIGESTS.name in self.request.checks
        return asked and compares_own(self.store, self.request.real_profile)

    def _has_own_digest(self, inventory: Inventory) -> BoolArray:
        """Return which objects the store may compare with its digests: [objects]."""
        has: BoolArray = np.full(len(inventory.objects), self._own_digests)
        if self.expected.marked:
            affixes = inventory.table.affixes
            has &= inventory.by_affix([end in self.expected.marked for _, end in affixes], False)
        return has

    @property
    def _reads(self) -> bool:
        return bool(self._value_groups) or self._digests or self._own_digests

    @property
    def _value_groups(self) -> tuple[str, ...]:
        if self.request.real_profile is None:
            return ()
        return tuple(group for group in self.request.checks if group in value_groups())

    def _plan(self, inventory: Inventory, groups: PageGroups, in_flight: BoolArray) -> ReadingPlan:
        """Plan to read the sampled objects that a check needs, if not in flight."""
        known = known_specs(inventory.table)
        checkers = value_checkers(known, self.request.profile, self._value_groups)
        replicated = replica_sets(inventory.table) != NO_REPLICAS
        ids = inventory.affix_ids
        of_group = groups.of_object
        own = self._has_own_digest(inventory)
        chosen = np.append(~in_flight, False)[of_group] | (own & (of_group < 0))  # foreign objects
        if self.request.selection.pool:
            chosen &= inventory.of_pool(self.request.selection.pool)
        if self.request.sample is not None:
            chosen &= np.append(self.request.sample.contains(groups.pages), False)[of_group]
        expected = expected_sizes(inventory.table)
        sizes = readable_sizes(inventory, expected)
        chosen &= sizes != UNKNOWN_SIZE
        # An object that claims a huge size must not end the run. The check of sizes reports it, if
        # a size is expected.
        huge = chosen & (sizes > self.request.buffer_bytes) & (sizes != expected[ids])
        chosen &= ~huge
        self.unread = np.flatnonzero(huge & (expected[ids] == UNKNOWN_SIZE))
        of_replicas = replicated[ids] & (VALUES.name in self._value_groups)
        digest = chosen & (of_group >= 0) & (self._digests | of_replicas)
        valued = np.zeros(len(chosen), dtype=np.bool_)
        for group in self._value_groups:
            affixes = [affix for affix, checker in checkers.items() if group in checker.groups]
            of_affix = np.zeros(len(inventory.table.affixes) + 1, dtype=np.bool_)
            of_affix[affixes] = True
            checked = chosen & of_affix[ids]
            self.planned[group] = int(checked.sum())
            valued |= checked
        compared = chosen & (self._digests | own)
        if self._digests or self._own_digests:
            self.planned[DIGESTS.name] = int(compared.sum())
        read = digest | valued | compared
        self.undigested = int((chosen & ~read).sum())
        rows = np.flatnonzero(read)
        limit = self.request.time_limit_seconds
        return ReadingPlan(
            rows=rows,
            capacities=sizes[rows],
            digest=digest[rows],
            expected=known,
            checkers=checkers,
            sizes=expected,
            buffer_bytes=self.request.buffer_bytes,
            bytes_per_second=self.request.bytes_per_second,
            jobs=self.request.jobs,
            deadline=None if limit is None else self.started + limit,
        )

    def _read(
        self, inventory: Inventory, plan: ReadingPlan, on_read: Callable[[int, int], None]
    ) -> ReadingResult:
        """Read the planned objects; read damaged ones again if a writer may have interfered."""
        total = int(plan.capacities.sum())
        hollow = unwritten(self.store, inventory, plan)
        reading = read_objects(
            self.store, inventory, plan.without(hollow), on_read=lambda n: on_read(n, total)
        )
        if isinstance(self.store, Confirm):
            outcome, digested = self._compared(inventory, reading)
            suspects = np.union1d(reading.suspects(), digested[outcome == MISMATCH])
            again = plan.only(np.isin(plan.rows, suspects))
            reading.replace(again.rows, read_objects(self.store, inventory, again))
        reading.objects += int(hollow.sum())
        for row in plan.rows[hollow].tolist():
            why = "the page was never written: servers would read zeros"
            reading.report("unwritten-page", row, why)
        for row in self.unread.tolist():
            nbytes = inventory.objects.column("nbytes")[row].as_py()
            why = f"not read: {over_buffer(nbytes, self.request.buffer_bytes)}"
            reading.report("unreadable", row, why)
        return reading

    @contextmanager
    def _device(
        self, inventory: Inventory, plan: ReadingPlan, remarks: list[str]
    ) -> Iterator[DeviceChecker | None]:
        """Open the device; yield None for the CPU."""
        if not len(plan.rows) or not (plan.checkers or plan.digest.any()):
            yield None
            return
        largest = int(plan.capacities.argmax())
        key = inventory.objects.column("key")[int(plan.rows[largest])].as_py()
        with open_checker(
            self.request.devices,
            device_bytes=self.request.device_bytes,
            buffer_bytes=self.request.buffer_bytes,
            largest=int(plan.capacities[largest]),
            largest_name=key.decode(errors="backslashreplace"),
            remark=remarks.append,
        ) as device:
            yield device
            if device is not None and device.failure is not None:
                remarks.append(f"The CPU did the rest: {device.failure}")

    def _compared(
        self, inventory: Inventory, reading: ReadingResult
    ) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.int64]]:
        """Return each digested object's change since the catalog, and its row."""
        rows = np.flatnonzero(reading.digested) if self._digests else np.zeros(0, dtype=np.int64)
        if self.request.catalog is None:
            return np.zeros(len(rows), dtype=np.int8), rows
        fields = self.request.identity or self.store.traits.version_fields
        records = self._records(inventory, rows, reading)
        return compare(self.request.catalog, records, fields), rows

    def _records(
        self, inventory: Inventory, rows: npt.NDArray[np.int64], reading: ReadingResult
    ) -> Digested:
        some = rows if len(rows) < len(inventory.objects) else None
        objects = inventory.objects.select(["key", "nbytes"])
        if some is not None:
            objects = take_rows(objects, some)
        pools = [r.coordinate.pool if r.coordinate else None for r in inventory.table.resolved]
        ids = pa.array(inventory.affix_ids[rows], mask=inventory.affix_ids[rows] < 0)
        return Digested(
            keys=objects.column("key").combine_chunks(),
            pages=inventory.pages(some).combine_chunks(),
            pools=pa.array(pools, pa.string()).take(ids),
            nbytes=objects.column("nbytes").fill_null(0).to_numpy(),
            identities=reading.versions[rows],
            identity_fields=self.store.traits.version_fields,
            digests=reading.digests[rows],
        )

    def _skipped(
        self,
        given: CheckInput,
        listed: Inventory,
        plan: ReadingPlan,
        reading: ReadingResult,
        impossible: dict[str, str],
    ) -> dict[str, str]:
        """Return the name and the reason of everything not judged, for stderr."""
        inventory, groups = given.inventory, given.groups
        request = self.request
        pool = request.selection.pool
        has_pool = not pool or inventory.of_pool(pool).any()
        if not has_pool or not (len(groups) or reading.objects):
            return {"everything": explain_selection(self.store, listed, request.selection)}
        gaps = reading_gaps(
            {check: n for check, n in self.planned.items() if check not in impossible},
            rows=len(plan.rows),
            reached=reading.objects,
            groups=len(groups),
            in_flight=int(given.in_flight.sum()),
            sampled=request.sample is not None,
        )
        valued = plan.checkers.values() if self.planned.get(VALUES.name) else ()
        skipped: dict[str, str] = {}
        of_trailers: Iterable[tuple[str, str]] = ()
        if self.expected.marked and DIGESTS.name in request.checks:
            without = reading.undigested + self.undigested
            if self.expected.identities and not without:
                valued = ()  # an identity states the dtype
            of_trailers = trailer_gaps(
                reading.compared, 0 if self._digests else without, self.expected
            )
        for name, why in (
            *impossible.items(),
            *gaps,
            *of_trailers,
            *indistinct_dtypes(valued),
            *unjudged(inventory, groups, request.checks, request.real_profile),
        ):
            skipped[name] = f"{skipped[name]}; {why}" if name in skipped else why
        return skipped

    def _document(
        self, given: CheckInput, plan: ReadingPlan, reading: ReadingResult, found: pa.Table
    ) -> dict[str, Any]:
        inventory, groups = given.inventory, given.groups
        profile = self.request.real_profile
        codes, counts = np.unique(found.column("code").to_pylist(), return_counts=True)
        read_groups = groups.of_object[plan.rows]
        nbytes = pc.sum(inventory.objects.column("nbytes"), skip_nulls=False, min_count=0)
        return not_begun(self.store.url) | {
            "profile": "inferred" if profile is None else profile.model,
            "objects": len(inventory.objects),
            "pages": _distinct(groups.page_ids),
            "bytes": nbytes.as_py(),
            "seconds": round(time.monotonic() - self.started, 3),
            "complete": reading.complete,
            "stopped_by": None if reading.complete else "deadline",
            "gone": reading.gone,
            "in_flight": int(given.in_flight.sum()),
            "sampled": _distinct(groups.page_ids[read_groups[read_groups >= 0]]),
            "objects_read": reading.objects,
            "bytes_read": reading.bytes_read,
            "device": "cpu" if plan.device is None else ",".join(plan.device.names),
            "counts": dict(zip(codes.tolist(), counts.tolist(), strict=True)),
        }

    def _ran(self, check: str, impossible: dict[str, str], skipped: dict[str, str]) -> bool:
        """Return whether a check ran; a reading check in `skipped` did not."""
        if check in reading_groups():
            return bool(self.planned.get(check)) and check not in skipped
        return check not in impossible


def _found(given: CheckInput, reading: ReadingResult, able: list[Check]) -> pa.Table:
    """Return the findings of the checks and of the reading.

    If a check of page tables and the reading report the same fault of an object, only the check's
    finding is kept: its detail is more precise.
    """
    found = {check: list(check.find(given)) for check in able}
    of_tables = [
        table for check in able if Need.PAGE_TABLES in check.needs for table in found[check]
    ]
    of_reading = reading.findings(given.inventory)
    return combine(
        [
            *chain.from_iterable(found.values()),
            *(without_repeats(table, of_tables) for table in of_reading),
        ]
    )


def _distinct(ids: npt.NDArray[np.int64]) -> int:
    """Return the number of distinct small numbers, without a sort."""
    return int(np.count_nonzero(np.bincount(ids)))
