"""Migrate page groups to another store, unchanged or transformed for another deployment."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from hicachectl.checks.findings import LOCATED_SCHEMA, combine, listing_findings, located
from hicachectl.checks.page_tables import check_tables, saved_tables
from hicachectl.checks.registry import CheckInput
from hicachectl.formats.errors import StoreUnavailable, UsageError
from hicachectl.move.adopted_values import doubtful_values
from hicachectl.move.copy_plan import CopyPlan, oldest_first
from hicachectl.move.destination import has_whole
from hicachectl.move.migration_outcome import MigrationFacts, lack_of_room, result_of
from hicachectl.move.removal_plan import plan_repair
from hicachectl.move.run_mark import RequestHeldError, held_mark
from hicachectl.move.runs import CopyRun
from hicachectl.move.store_pair import CopyOptions, StorePair
from hicachectl.move.survey import WRITING, Action, compare, decide
from hicachectl.pages.deployments import UNRESOLVED
from hicachectl.pages.group_table import WHOLE
from hicachectl.pages.groups import PageGroups
from hicachectl.pages.in_flight import (
    ListingTime,
    are_incomplete,
    groups_in_flight,
    look_if_needed,
)
from hicachectl.pages.naming import deployment_document, deployment_text, profile_document
from hicachectl.pages.scanning import take_inventory
from hicachectl.pages.selection import EVERYTHING, NamedGroups, Selection, explain_selection, select
from hicachectl.text.units import first_of
from hicachectl.text.vocabulary import DEFAULT_GRACE_SECONDS, FULL
from hicachectl.verification.request import VerifyRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import pyarrow as pa

    from hicachectl.backends.base import Store
    from hicachectl.formats.arrays import BoolArray
    from hicachectl.formats.profile import Profile
    from hicachectl.move.run_mark import RunMark
    from hicachectl.move.survey import IfExists, Survey
    from hicachectl.pages.inventory import Inventory
    from hicachectl.results import Result

    OnWait = Callable[[float, int], None]


MOVE, OVERWRITE = "--move", "--if-exists overwrite"
_BLOCK_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationRequest:
    """Pages to copy, and options of the migration.

    profile: profile of the source; None if only its keys are known, so every object keeps its key
        and bytes.
    destination_profile: profile of the new deployment; None if it is the same as `profile`.
    partial: whether to copy groups that are not whole.
    damaged: whether to copy groups with findings of severity error.
    allow_empty: whether to accept a source without pages.
    """

    profile: Profile | None = None
    destination_profile: Profile | None = None
    selection: Selection = EVERYTHING
    grace_seconds: float = DEFAULT_GRACE_SECONDS
    if_exists: IfExists = "skip"
    partial: bool = False
    damaged: bool = False
    allow_empty: bool = False
    dry_run: bool = False
    space_check: bool = True
    options: CopyOptions = field(default_factory=CopyOptions)

    @property
    def needs_pages(self) -> bool:
        """Whether to refuse a source without pages.

        A move accepts such a source, because an earlier move may have emptied it.
        """
        return not (self.allow_empty or self.options.move)

    @property
    def labelled(self) -> int:
        """Number of rows of the page list that name a group."""
        pages = self.selection.pages
        return 0 if pages is None else pages.labelled

    @property
    def compares(self) -> IfExists:
        """The `if_exists` that applies. With --verify, `skip` becomes `verify`."""
        skips = self.if_exists == "skip" and self.options.verify
        return "verify" if skips else self.if_exists

    @property
    def text(self) -> bytes:
        """Text of all options that decide what the migration does, except the stores.

        Times are left out, because an age such as 2h means another time in each run.
        """
        options = self.options
        decides = replace(
            self,
            selection=replace(self.selection, since=None, before=None),
            options=CopyOptions(
                verify=options.verify, move=options.move, trailers=options.trailers
            ),
        )
        return msgspec.json.encode(decides, order="deterministic")


class Migration(StorePair):
    """Checked request of a migration between two stores.

    columns: additional columns for the listing of the source.
    """

    def __init__(self, source: Store, destination: Store, request: MigrationRequest) -> None:
        """Check the request. Raises UsageError, ProfileError, UnsupportedByBackend."""
        if not destination.traits.writes:
            raise UsageError(
                f"{destination.url}: objects cannot be written to this store; give another "
                "destination"
            )
        if request.options.move and not source.traits.deletes:
            raise UsageError(
                f"{source.url}: objects cannot be deleted from this store; leave out --move"
            )
        self.request = request
        target = request.destination_profile or request.profile
        super().__init__(
            source, destination, request.profile, target, request.options, may_adopt=True
        )
        if self.adopts and request.damaged:
            raise UsageError(
                "--include-damaged: a trailer would prove damaged bytes right; leave out "
                "--include-damaged"
            )
        if request.options.move:
            self.refuse_removals(MOVE)
        elif request.if_exists == "overwrite":
            self.refuse_removals(OVERWRITE)
        # A move does not remove objects that were rewritten since the listing. Versions show which.
        self.columns = {"version"} & source.traits.columns if request.options.move else set[str]()

    @property
    def identity(self) -> bytes:
        """Text that names the migration, equal for equal requests between the same stores."""
        urls = map(os.fsencode, (self.source.url, self.destination.url))
        return b"\0".join((*urls, self.request.text))

    @property
    def deployments(self) -> tuple[str, ...]:
        """Deployments of the source and of the destination, as text; empty if they are equal."""
        profiles = (self.request.profile, self.request.destination_profile)
        texts = [deployment_text(profile_document(each)) for each in profiles if each is not None]
        return tuple(texts) if len(set(texts)) == len(profiles) else ()

    def listing_time(self) -> ListingTime:
        """Return the time at which the listing of the source starts.

        Only moves and adoptions change the source. So only they may create a file there, to learn
        the time of its file system. Raises StoreUnavailable.
        """
        changes = (self.request.options.move or self.adopts) and not self.request.dry_run
        return ListingTime.now(self.source, changes=changes)


@dataclass(frozen=True, slots=True)
class MigrationPlan:
    """Page groups of a source, with an action for each.

    plans: the surveys with their actions.
    facts: sums over the groups that will not be written.
    room: number of bytes that must be free in the destination.
    """

    groups: PageGroups
    plans: list[CopyPlan]
    facts: MigrationFacts
    room: int


def plan_groups(
    migration: Migration,
    listed: Inventory,
    tables: Sequence[pa.Table],
    listing: ListingTime,
    *,
    asks: bool = False,
    on_batch: Callable[[int], None] = lambda objects: None,
    on_wait: Callable[[float, int], None] = lambda seconds, pages: None,
) -> MigrationPlan:
    """Plan the migration of listed objects.

    listed: all objects of the source, or all objects of some pages.
    tables: findings about the page tables of the source.
    listing: time of the listing. Servers may still be writing groups that were young then.
    asks: see `StorePair.survey`.
    on_wait: see `look_again`.
    Raises UsageError for a wrong selection. Raises ProfileError, StoreUnavailable, and the errors
    of `doubtful_values`.
    """
    request = migration.request
    groups = PageGroups(select(listed, request.selection))
    surveys = migration.survey(groups, asks=asks, on_batch=on_batch)
    choice = _Choice(migration, groups, surveys)
    choice.make(tables, listing, on_wait)
    facts = choice.facts
    facts.listed = len(listed.objects)
    if not len(groups):
        facts.nothing = explain_selection(migration.source, listed, request.selection)
    plans = []
    for survey in surveys:
        actions = decide(survey, choice.chosen[survey.groups], request.compares)
        actions[choice.rests[survey.groups]] = Action.CLEAR
        if migration.adopts:
            actions[np.isin(actions, WRITING)] = Action.ADOPT
        order = oldest_first(survey, groups.newest_ns[survey.groups])
        plan = CopyPlan(groups, survey, order, actions)
        plan.exclude_oversized(request.options, facts)
        facts.refused += int((survey.foreign & (actions == Action.CONFLICT)).sum())
        facts.skipped += plan.count(Action.SKIP)
        plans.append(plan)
    if migration.adopts:
        _leave_doubtful(migration, groups, plans, listing, facts)
    return MigrationPlan(groups, plans, facts, _room(migration, plans))


def _leave_doubtful(
    migration: Migration,
    groups: PageGroups,
    plans: Sequence[CopyPlan],
    listing: ListingTime,
    facts: MigrationFacts,
) -> None:
    """Leave out pages with doubtful values. Raises the errors of `doubtful_values`."""
    assert migration.profile is not None  # the trailers name the profile's weights
    adopted = np.zeros(len(groups), dtype=np.bool_)
    for plan in plans:
        adopted[plan.survey.groups[plan.items]] = True
    doubtful = doubtful_values(
        migration.source, migration.profile, groups, adopted, listing, migration.options
    )
    for plan in plans:
        plan.actions[doubtful[plan.survey.groups]] = Action.NOTHING
    facts.left_out["with doubtful values; hicachectl verify lists them"] = int(doubtful.sum())


def _room(migration: Migration, plans: Sequence[CopyPlan]) -> int:
    """Return the bytes that must be free in the destination."""
    demands = [plan.demand() for plan in plans]
    objects, nbytes = sum(demand[0] for demand in demands), sum(demand[1] for demand in demands)
    if not migration.adopts:
        return nbytes
    # While a batch is written, its copies lie beside the old files. A trailer can take one more
    # block of a file system.
    return min(nbytes, migration.options.buffer_bytes) + objects * _BLOCK_BYTES


class _Choice:
    """Choice of the groups to copy.

    chosen: [groups] whether to copy the group.
    rests: [groups] whether the group is the rest of an interrupted move. The destination has the
        whole group, so the rest is removed from the source.
    facts: counts of groups by the reason why they are not chosen.
    """

    def __init__(self, migration: Migration, groups: PageGroups, surveys: Sequence[Survey]) -> None:
        self.chosen = np.ones(len(groups), dtype=np.bool_)
        self.rests = np.zeros(len(groups), dtype=np.bool_)
        self.facts = MigrationFacts(groups=len(groups), adopts=migration.adopts)
        self._migration = migration
        self._request = migration.request
        self._groups = groups
        self._surveys = surveys
        own = [survey.route.deployment_id for survey in surveys]
        self._routed: BoolArray = np.isin(groups.deployment_ids, own)

    def make(self, tables: Sequence[pa.Table], listing: ListingTime, on_wait: OnWait) -> None:
        """Choose the groups. The arguments are those of `plan_groups`."""
        facts, inventory = self.facts, self._groups.inventory
        facts.unknown_keys = int(inventory.is_foreign.sum()) - len(inventory.cleared_rows)
        pages = self._request.selection.pages
        if pages is not None:
            facts.matched = NamedGroups(pages, self._groups).matched
        incomplete = self.chosen & self._routed & are_incomplete(self._groups)
        if self._request.options.move:
            self._find_rests(incomplete)
        for behind, why in self._reasons(tables, listing, on_wait):
            facts.left_out[why] = int((self.chosen & behind).sum())
            self.chosen &= ~behind
        self.rests &= self.chosen
        if self._request.options.move:
            facts.left_in_source = int((incomplete & ~self.chosen).sum())
        self.chosen &= ~self.rests

    def _find_rests(self, incomplete: BoolArray) -> None:
        """Find the groups that an interrupted move has partly removed from the source.

        The destination has such a group whole, with a target for each object left in the source.
        incomplete: [groups].
        """
        for survey in self._surveys:
            _, lacks, differs = compare(survey.touched, survey.existing)
            doubtful = lacks | differs | survey.strays | survey.foreign | survey.unfit
            items = np.flatnonzero(incomplete[survey.groups] & ~doubtful)
            items = items[has_whole(self._migration.destination, survey, items)]
            self.rests[survey.groups[items]] = True

    def _reasons(
        self, tables: Sequence[pa.Table], listing: ListingTime, on_wait: OnWait
    ) -> Iterator[tuple[BoolArray, str]]:
        """Yield masks of groups not to copy, [groups], each with the reason."""
        request, groups = self._request, self._groups
        ambiguous = groups.deployment_ids == UNRESOLVED
        yield ~self._routed & ~ambiguous, self._other_deployments(~self._routed & ~ambiguous)
        yield ambiguous, "with ambiguous keys; hicachectl ls describes them"
        in_flight = self._in_flight(listing, on_wait)
        yield in_flight, "still being written; run again to copy them"
        if not request.partial:
            yield (
                (groups.states != WHOLE) & ~self.rests,
                "not whole; --include-partial copies them",
            )
        if not request.damaged:
            option = "" if self._migration.adopts else ", --include-damaged copies them"
            yield (
                self._damaged(tables, listing, in_flight) & ~self.rests,
                f"with errors; hicachectl verify lists them{option}",
            )
        unfit = np.zeros(len(groups), dtype=np.bool_)
        for survey in self._surveys:
            unfit[survey.groups] = survey.unfit
        yield unfit, "with objects of unknown or wrong size; hicachectl verify lists wrong sizes"
        yield from self._migration.trailers.refused(groups)

    def _other_deployments(self, others: BoolArray) -> str:
        """Return a text that names the deployments left out, and the deployments copied.

        others: [groups] whether the group belongs to a deployment that is left out.
        """
        deployments = self._groups.deployments
        owners = np.unique(self._groups.deployment_ids[others]).tolist()
        own = {survey.route.deployment_id for survey in self._surveys}
        named, mine = (
            first_of(
                deployment_text(deployment_document(deployments[number])) for number in numbers
            )
            for numbers in (owners, own)
        )
        return f"of {named}; only pages of {mine} are copied"

    def _in_flight(self, listing: ListingTime, on_wait: OnWait) -> BoolArray:
        """Return which groups are not whole and may still be being written: [groups].

        Copying such a group does no harm. But its removal may take a sidecar just before a server
        writes the anchor. A move therefore looks again in stores that have no times.
        """
        request, groups, source = self._request, self._groups, self._migration.source
        grace = request.grace_seconds
        in_flight: BoolArray = groups.states != WHOLE
        in_flight &= groups_in_flight(source, groups, listing, grace)
        leaving = np.flatnonzero(self.chosen if request.partial else self.rests)
        if request.options.move:
            in_flight |= look_if_needed(source, groups, listing, grace, leaving, on_wait=on_wait)
        return in_flight

    def _damaged(
        self, tables: Sequence[pa.Table], listing: ListingTime, in_flight: BoolArray
    ) -> BoolArray:
        """Return which groups have errors that a listing shows: [groups]."""
        request, groups, source = self._request, self._groups, self._migration.source
        given = CheckInput(
            store=source,
            groups=groups,
            in_flight=in_flight,
            profile=request.profile,
            now_ns=listing.start_ns,
            grace_ns=int(request.grace_seconds * 1e9),
        )
        unmet = VerifyRequest(profile=request.profile).unmet(source)
        found = combine([*listing_findings(given, unmet), *tables], LOCATED_SCHEMA)
        damaged = np.zeros(len(groups), dtype=np.bool_)
        damaged[plan_repair(located(found, groups)).groups] = True
        return damaged


def migrate(
    source: Store,
    destination: Store,
    request: MigrationRequest,
    *,
    on_listed: Callable[[int], None] = lambda objects: None,
    on_begun: Callable[[], None] = lambda: None,
    on_moved: Callable[[int, int], None] = lambda nbytes, total: None,
    on_wait: Callable[[float, int], None] = lambda seconds, pages: None,
) -> Result:
    """Copy page groups from one store to another.

    on_begun: function that is called before the first write.
    on_moved: takes the bytes written of each batch, and the bytes of the whole migration.
    on_wait: see `pages.in_flight.look_again`.

    After an interrupt, each batch already begun is finished or rolled back.
    Raises UsageError, ProfileError and UnsupportedByBackend before the first write. Raises
    StoreUnavailable if a store is lost or the source has no pages.
    """
    started = time.monotonic()
    migration = Migration(source, destination, request)
    listing = migration.listing_time()
    listed = take_inventory(
        source,
        request.profile,
        columns=migration.columns,
        needs_pages=request.needs_pages,
        on_batch=on_listed,
    )
    listing = listing.ended()
    tables, _ = check_tables(source, saved_tables(source), grace_seconds=0)
    plan = plan_groups(migration, listed, tables, listing, on_batch=on_listed, on_wait=on_wait)
    if request.dry_run:
        facts = rehearse(migration, plan)
    else:
        try:
            with held_mark(migration.identity) as mark:
                facts = carry_out(migration, plan, mark, on_begun=on_begun, on_moved=on_moved)
        except RequestHeldError as held:
            nothing = result_of([MigrationFacts()], source.url, destination.url)
            return nothing.stopped_by_lock(str(held))
    facts.seconds = time.monotonic() - started
    result = result_of(
        [facts],
        source.url,
        destination.url,
        labelled=request.labelled,
        dry_run=request.dry_run,
    )
    if facts.settled:
        return result
    said = "Not complete; run the same command again"
    return replace(result, remarks=[*result.remarks, said], undone=[*result.undone, said])


def rehearse(migration: Migration, plan: MigrationPlan) -> MigrationFacts:
    """Return the facts that a planned migration, or a part of one, would have without failures."""
    facts = plan.facts
    for each in plan.plans:
        each.rehearse(facts)
    facts.room, facts.free_bytes = plan.room, migration.destination.free_bytes()
    facts.deployments = migration.deployments
    facts.remarks += [*migration.remarks, *migration.source.remarks]
    return facts


def carry_out(
    migration: Migration,
    plan: MigrationPlan,
    mark: RunMark,
    *,
    on_begun: Callable[[], None] = lambda: None,
    on_moved: Callable[[int, int], None] = lambda nbytes, total: None,
) -> MigrationFacts:
    """Carry out the plan of a migration or of a part of one. Return the facts without `seconds`.

    mark: mark on the unfinished writes of this process.
    The other arguments, and the errors raised, are those of `migrate`.
    """
    source, destination, moves = migration.source, migration.destination, migration.options.move
    mark.put(destination)
    if moves:
        mark.put(source)  # a killed run can leave its probe there
    free = destination.free_bytes()
    adopts = migration.adopts
    lack = "" if free is None else lack_of_room(destination.url, plan.room, free, adopts=adopts)
    if lack and migration.request.space_check:
        raise StoreUnavailable(lack)
    if moves:
        migration.refuse_one_place(source, MOVE)
    if any(each.count(Action.REPLACE) for each in plan.plans):
        migration.refuse_one_place(destination, OVERWRITE)
    facts = plan.facts
    planned = facts.failed
    run = CopyRun(migration, plan.groups, facts)
    on_begun()
    run.copy(plan.plans, on_moved)
    facts.settled = facts.complete and facts.failed == planned
    facts.remarks += [*migration.remarks, *source.remarks, *filter(None, [mark.remark])]
    if destination.traits.evicts and (lack or facts.stopped_by == FULL):
        facts.remarks.append(
            f"{destination.url}: the pages need more room than is free, and this store "
            "evicts, so the pages copied first may be evicted already; copy fewer pages (--page, "
            "--pages)"
        )
    return facts
