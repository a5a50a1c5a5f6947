"""Check the page groups of a store, or of one part of a run."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from hicachectl.backends.capabilities import ReportsLosses
from hicachectl.checks.catalogs import carry_forward
from hicachectl.checks.evidence import EVIDENCE_SCHEMA
from hicachectl.checks.findings import (
    LOCATED_SCHEMA,
    combine_named,
    labelled,
    located,
    name_findings,
)
from hicachectl.checks.page_tables import saved_tables
from hicachectl.checks.registry import (
    GROUPS,
    READING,
    CheckInput,
    CheckListing,
    Scope,
    checks,
)
from hicachectl.device.devices import refuse_missing
from hicachectl.pages.census import column_sum
from hicachectl.pages.groups import PageGroups
from hicachectl.pages.in_flight import (
    ListingTime,
    changed_groups,
    groups_in_flight,
    look_again,
)
from hicachectl.pages.scanning import take_inventory
from hicachectl.pages.selection import explain_selection, select
from hicachectl.pages.tally import tally_of
from hicachectl.profiles.stamps import stamp_differences
from hicachectl.verification.part_result import PartResult, VerifyFacts
from hicachectl.verification.reading import compare_with_catalog, read_chosen
from hicachectl.verification.reading_plan import ReadingReasons, choose_objects
from hicachectl.verification.report import nothing_selected

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from hicachectl.backends.base import Store
    from hicachectl.backends.page_tables import TableState
    from hicachectl.checks.registry import Need
    from hicachectl.formats.arrays import BoolArray
    from hicachectl.formats.catalog import Catalog
    from hicachectl.pages.inventory import Inventory
    from hicachectl.verification.reading import ReadingResult
    from hicachectl.verification.reading_plan import ReadingPlan
    from hicachectl.verification.request import VerifyRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStart:
    """State at the start of a process's work on a store.

    listing: time of the listing, which another process may have made.
    began: `time.monotonic()` at the start of the work.
    tables: page tables before the work; None if the store has none or no check needs them.
    """

    listing: ListingTime
    began: float
    tables: TableState | None = None

    def listed(self) -> RunStart:
        """Return the state with the duration of the listing, which has just ended."""
        return replace(self, listing=self.listing.ended())


@dataclass(frozen=True, slots=True)
class Judged:
    """Objects that the checks of a part judged. All arrays are [objects].

    tried: whether a read of the object was tried and found the object.
    valued: whether the values of the object were checked.
    identified: whether the store compared the identity or digest of the object.
    """

    tried: BoolArray
    valued: BoolArray
    identified: BoolArray


@dataclass(frozen=True, slots=True)
class PartCheck:
    """Result of checking a part, with all that a repair needs.

    result: counts and findings for the report.
    catalog: digests of the part's objects; None if the request updates no catalog.
    listing: time of the listing.
    groups: selected groups.
    in_flight: [groups] whether the group was in flight, so that no check judged it.
    judged: objects that the checks judged.
    """

    result: PartResult
    catalog: Catalog | None
    listing: ListingTime
    groups: PageGroups
    in_flight: BoolArray
    judged: Judged

    @property
    def findings(self) -> pa.Table:
        """Findings of the part for a repair, in the columns of LOCATED_SCHEMA."""
        return combine_named([self.result.found], LOCATED_SCHEMA)


def start_run(store: Store, request: VerifyRequest, *, first: bool = True) -> RunStart:
    """Return the state before the listing.

    first: see `check_part`.
    Raises StoreUnavailable, and UsageError if a requested device is missing.
    """
    # Report a missing device before a long listing, and for an empty store, too.
    if ReadingReasons.of(store, request):
        refuse_missing(request.devices)
    listing = ListingTime.now(store, changes=request.changes)
    tables = saved_tables(store) if first and GROUPS.name in request.checks else None
    return RunStart(listing=listing, began=listing.began, tables=tables)


def lister_findings(store: Store, request: VerifyRequest, now_ns: int) -> pa.Table:
    """Return the findings about the listing that this process has just made.

    They have the columns of RUN_SCHEMA.
    now_ns: Unix time at the start of the listing.
    """
    given = CheckListing(
        store=store, collision=request.collision, grace_start_ns=now_ns - request.grace_ns
    )
    return name_findings(
        (check.name, check.find(given))
        for check in checks(request.checks)
        if check.scope is Scope.LISTING
    )


def lister_remarks(store: Store, request: VerifyRequest, now_ns: int) -> tuple[str, ...]:
    """Return the remarks about a listing, except remarks about losses that are findings."""
    losses = store.losses if isinstance(store, ReportsLosses) else ()
    grace_start_ns = now_ns - request.grace_ns
    said = {str(loss) for loss in losses if loss.changed_ns <= grace_start_ns}
    return tuple(text for text in store.remarks if text not in said)


def check_part(
    store: Store,
    request: VerifyRequest,
    listed: Inventory,
    start: RunStart,
    *,
    first: bool = True,
    on_read: Callable[[int, int], None] = lambda nbytes, total: None,
    on_wait: Callable[[float, int], None] = lambda seconds, pages: None,
) -> PartCheck:
    """Read and check the selected groups of a part.

    listed: all objects of the part.
    start: state before the listing.
    first: whether this part is the first of the run. The first part alone also runs the checks of
        the store itself.
    on_read, on_wait: see `check_store`.
    Raises StoreUnavailable.
    """
    inventory = select(listed, request.selection)
    groups = PageGroups(inventory)
    has_times = "mtime_ns" in store.traits.columns
    grace = request.grace_seconds
    in_flight = groups_in_flight(store, groups, start.listing, grace)
    gone = 0
    if has_times:
        changed, gone = changed_groups(store, groups, ~in_flight, most=request.most_looked_up)
        in_flight |= changed
    limit = request.time_limit_seconds
    choice = choose_objects(
        request,
        ReadingReasons.of(store, request),
        inventory,
        groups,
        in_flight,
        deadline=None if limit is None else start.began + limit,
    )
    remarks: list[str] = []
    reading, devices = read_chosen(store, request, inventory, choice, on_read, remarks.append)
    if not has_times:
        # Without times, groups have no ages. A second look after the grace period shows which
        # groups are in flight. The reading before it has used up a part of the wait.
        in_flight, gone = look_again(
            store, groups, start.listing, grace, most=request.most_looked_up, on_wait=on_wait
        )
    digested = compare_with_catalog(store, request, inventory, reading)
    skipped: dict[str, str] = {}
    differences: list[str] = []
    if first:
        differences = stamp_differences(
            store, request.profile, request.weights_version, remarks.append
        )
    given = CheckInput(
        store=store,
        groups=groups,
        in_flight=in_flight,
        profile=request.profile,
        now_ns=start.listing.start_ns,
        grace_ns=request.grace_ns,
        tables=start.tables,
        stamp_differences=differences,
        digests=reading.digests,
        digested=reading.digested,
        compared=digested if request.compares_catalog else None,
        skip=skipped.__setitem__,
    )
    found = _findings(given, reading, request, request.unmet(store), first=first)
    tally = tally_of(groups)
    counts = reading.counts
    counts.gone += gone
    counts.undigested += choice.undigested
    nothing = nothing_selected(tally, counts)
    read_groups = groups.of_object[choice.plan.rows]
    pages_read = groups.page_ids[read_groups[read_groups >= 0]]
    facts = VerifyFacts(
        nbytes=column_sum(inventory.objects.column("nbytes")),
        in_flight=int(in_flight.sum()),
        sampled=int(np.count_nonzero(np.bincount(pages_read))),
        to_read=len(choice.plan.rows),
        planned=choice.counts,
        reading=counts,
        devices=devices,
        seconds=time.monotonic() - start.began,
        remarks=(*remarks, *lister_remarks(store, request, start.listing.start_ns)),
        skipped=skipped,
        listed=len(listed.objects),
        explained=explain_selection(store, listed, request.selection) if nothing else "",
    )
    catalog = None
    if request.update_catalog:
        catalog = carry_forward(
            request.catalog,
            digested,
            store=store.url,
            listed=listed,
            now_ns=start.listing.start_ns,
        )
    judged = _judged(inventory, choice.plan, reading)
    result = PartResult(facts, tally, found, _evidence(inventory, choice.plan, reading))
    return PartCheck(result, catalog, start.listing, groups, in_flight, judged)


def _judged(inventory: Inventory, plan: ReadingPlan, reading: ReadingResult) -> Judged:
    """Return which objects were judged.

    The values of an object were checked only if the object has its expected size.
    """
    affixes = np.zeros(len(inventory.table.affixes) + 1, dtype=np.bool_)
    affixes[list(plan.checkers)] = True
    ids = inventory.affix_ids[plan.rows]
    valued = np.zeros(len(inventory.objects), dtype=np.bool_)
    valued[plan.rows] = affixes[ids] & (plan.capacities == plan.sizes[ids])
    return Judged(reading.tried, valued & reading.whole, reading.identified)


def _evidence(inventory: Inventory, plan: ReadingPlan, reading: ReadingResult) -> pa.Table:
    """Return facts about the noted objects that were read, in the columns of EVIDENCE_SCHEMA."""
    rows = plan.rows[plan.noted & reading.whole[plan.rows]]
    ids = inventory.affix_ids[rows]
    widths = np.zeros(len(inventory.table.affixes) + 1, dtype=np.uint8)
    ordered = np.zeros(len(widths), dtype=np.bool_)
    for affix, checker in plan.checkers.items():
        widths[affix] = 0 if checker.quartiles is None else checker.quartiles.width
        ordered[affix] = checker.judges_layout
    disordered = np.isin(rows, reading.suspects("layout-mismatch"))
    columns = [
        ids,
        inventory.take(rows, ["mtime_ns"]).column("mtime_ns"),
        widths[ids],
        *reading.quartiles[rows].T,
        pa.array(disordered, mask=~ordered[ids]),
    ]
    return pa.table(
        [
            pa.array(c, field.type) if isinstance(c, np.ndarray) else c
            for c, field in zip(columns, EVIDENCE_SCHEMA, strict=True)
        ],
        schema=EVIDENCE_SCHEMA,
    )


def _findings(
    given: CheckInput,
    reading: ReadingResult,
    request: VerifyRequest,
    unmet: Collection[Need],
    *,
    first: bool,
) -> pa.Table:
    """Return the findings of the checks of a part, and of the reading."""
    scopes = {Scope.OBJECTS, Scope.STORE} if first else {Scope.OBJECTS}
    able = [
        check
        for check in checks(request.checks)
        if check.scope in scopes and check.needs.isdisjoint(unmet)
    ]
    found = name_findings(
        [
            *((check.name, check.find(given)) for check in able),
            (READING, reading.findings(given.inventory)),
        ]
    )
    return labelled(located(found, given.groups), given.groups)


def check_store(
    store: Store,
    request: VerifyRequest,
    *,
    columns: Collection[str] = (),
    on_listed: Callable[[int], None] = lambda objects: None,
    on_read: Callable[[int, int], None] = lambda nbytes, total: None,
    on_wait: Callable[[float, int], None] = lambda seconds, pages: None,
) -> PartCheck:
    """List a store, and check its objects as one part.

    Groups younger than the grace period are in flight, and no check judges them. If the store keeps
    no times, incomplete groups are looked up again after the grace period.
    columns: columns to list besides the columns that the checks need.
    on_listed: takes the number of objects listed so far.
    on_read: takes the bytes of each task read, and the bytes of all tasks.
    on_wait: takes the seconds to wait, and the number of incomplete groups.
    Raises StoreUnavailable, also for a store without pages if the request does not allow this.
    Raises ProfileError if the profile contradicts the store.
    """
    start = start_run(store, request)
    listed = take_inventory(
        store,
        request.profile,
        columns=[*request.columns(store), *columns],
        needs_pages=not request.allow_empty,
        on_batch=on_listed,
    )
    found = lister_findings(store, request, start.listing.start_ns)
    checked = check_part(store, request, listed, start.listed(), on_read=on_read, on_wait=on_wait)
    checked.result.found = pa.concat_tables([found, checked.result.found])
    return checked
