"""Migrations: the request, its stores, and an action for each page group."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from hicachectl.checks.findings import LOCATED_SCHEMA, combine, listing_findings, located
from hicachectl.checks.registry import CheckInput
from hicachectl.formats.errors import UsageError
from hicachectl.move.batches import Action, CopyOptions
from hicachectl.move.copy_plan import CopyPlan, oldest_first
from hicachectl.move.destination import has_whole
from hicachectl.move.migration_outcome import MigrationFacts
from hicachectl.move.planning import plan_repair
from hicachectl.move.results import MOST_PROBLEMS
from hicachectl.move.store_pair import StorePair, plan_trailers
from hicachectl.move.survey import compare, decide
from hicachectl.pages.deployments import UNRESOLVED
from hicachectl.pages.group_table import WHOLE
from hicachectl.pages.groups import PageGroups
from hicachectl.pages.in_flight import (
    ListingTime,
    are_incomplete,
    groups_in_flight,
    look_again,
    needs_second_look,
)
from hicachectl.pages.selection import EVERYTHING, NamedGroups, Selection, explain_selection, select
from hicachectl.text.vocabulary import DEFAULT_GRACE_SECONDS
from hicachectl.verification.request import VerifyRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import pyarrow as pa

    from hicachectl.backends.base import Store
    from hicachectl.formats.arrays import BoolArray
    from hicachectl.formats.profile import Profile
    from hicachectl.move.survey import IfExists, Survey
    from hicachectl.move.work import PageWork
    from hicachectl.pages.inventory import Inventory

    OnWait = Callable[[float, int], None]


MOVE, OVERWRITE = "--move", "--if-exists overwrite"


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationRequest:
    """Pages to copy, and options of the migration.

    profile: profile of the source; None if only its keys are known, so that every object keeps key
        and bytes.
    destination_profile: profile of the new deployment; None for the same as `profile`.
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
        """Whether a source without pages is refused; an earlier move may have emptied it."""
        return not (self.allow_empty or self.options.move)

    @property
    def labelled(self) -> int:
        """Number of listed rows that name a group."""
        pages = self.selection.pages
        return 0 if pages is None else pages.labelled

    @property
    def compares(self) -> IfExists:
        """What to do with groups that the destination has: --verify compares them."""
        skips = self.if_exists == "skip" and self.options.verify
        return "verify" if skips else self.if_exists

    @property
    def text(self) -> bytes:
        """Text of all that decides what the migration does, besides the stores.

        Moments are left out: an age, such as 2h, means another one in each run.
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


class Migration:
    """A request between two stores, checked.

    stores: the pair of stores.
    trailers: how the trailers of objects are copied.
    options: options of the copies.
    columns: columns to list of the source, besides those that every listing has.
    remarks: messages about the request.
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
        self.source = source
        self.destination = destination
        self.request = request
        target = request.destination_profile or request.profile
        self.stores = StorePair(source, destination, request.profile, target)
        if request.options.move:
            self.stores.refuse_removals(MOVE)
        elif request.if_exists == "overwrite":
            self.stores.refuse_removals(OVERWRITE)
        self.trailers = plan_trailers(self.stores, request.options.trailers)
        self.options = replace(request.options, keeps_trailers=self.trailers.keeps)
        # A move needs versions: objects rewritten since the listing must stay.
        self.columns = {"version"} & source.traits.columns if request.options.move else set[str]()
        self.remarks = [*self.stores.remarks, *filter(None, [self.trailers.remark])]

    @property
    def identity(self) -> bytes:
        """Text that is equal for migrations that do the same between the same stores."""
        urls = map(os.fsencode, (self.source.url, self.destination.url))
        return b"\0".join((*urls, self.request.text))

    def listing_time(self) -> ListingTime:
        """Note the start of the listing of the source, which a copy does not change.

        Raises StoreUnavailable.
        """
        changes = self.request.options.move and not self.request.dry_run
        return ListingTime.now(self.source, changes=changes)


@dataclass(frozen=True, slots=True)
class MigrationPlan:
    """Page groups of a source, with an action for each.

    plans: the surveys with their actions.
    facts: the sums so far, of groups that are not written.
    objects, nbytes: number of objects and bytes to write.
    """

    inventory: Inventory
    groups: PageGroups
    plans: list[CopyPlan]
    facts: MigrationFacts
    objects: int
    nbytes: int

    def count(self, *wanted: Action) -> int:
        """Return the number of groups with these actions."""
        return sum(plan.count(*wanted) for plan in self.plans)

    def works(self) -> Iterator[PageWork]:
        """Yield the work of all groups."""
        for plan in self.plans:
            yield from plan.works()


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
    """Plan the migration of listed objects: the whole source's, or all objects of some pages.

    tables: findings about the source's page tables.
    listing: time of the listing; groups that are young then may still be written.
    asks: see `StorePair.survey`.
    on_wait: see `look_again`.
    Raises ProfileError, StoreUnavailable, and UsageError for a wrong selection.
    """
    request = migration.request
    inventory = select(listed, request.selection)
    groups = PageGroups(inventory)
    surveys = [
        migration.trailers.with_foreign(survey, inventory.objects)
        for survey in migration.stores.survey(inventory, groups, asks=asks, on_batch=on_batch)
    ]
    choice = _Choice(migration, inventory, groups, surveys)
    choice.make(tables, listing, on_wait)
    facts = choice.facts
    facts.listed = len(listed.objects)
    if not len(groups):
        facts.nothing = explain_selection(migration.source, listed, request.selection)
    plans = []
    for survey in surveys:
        actions = decide(survey, choice.chosen[survey.groups], request.compares)
        actions[choice.rests[survey.groups]] = Action.CLEAR
        order = oldest_first(survey, groups.newest_ns[survey.groups])
        plan = CopyPlan(inventory, groups, survey, order, actions)
        large, problems = plan.leave_too_large(request.options)
        facts.failed += large
        facts.conflicts += plan.count(Action.CONFLICT)
        facts.refused += int((survey.foreign & (actions == Action.CONFLICT)).sum())
        facts.skipped += plan.count(Action.SKIP)
        facts.problems += [*problems, *plan.conflicts()]
        plans.append(plan)
    del facts.problems[MOST_PROBLEMS:]
    demands = [plan.demand() for plan in plans]
    objects, nbytes = (sum(each) for each in zip((0, 0), *demands, strict=True))
    return MigrationPlan(inventory, groups, plans, facts, objects, nbytes)


class _Choice:
    """Choice of the groups to copy.

    chosen: [groups] whether to copy the group.
    rests: [groups] whether a move removes the group, which only the destination has whole.
    facts: counts of groups by the reason why they are not chosen.
    """

    def __init__(
        self,
        migration: Migration,
        inventory: Inventory,
        groups: PageGroups,
        surveys: Sequence[Survey],
    ) -> None:
        self.chosen = np.ones(len(groups), dtype=np.bool_)
        self.rests = np.zeros(len(groups), dtype=np.bool_)
        self.facts = MigrationFacts(groups=len(groups))
        self._migration = migration
        self._request = migration.request
        self._inventory = inventory
        self._groups = groups
        self._surveys = surveys
        own = [survey.route.deployment_id for survey in surveys]
        self._routed: BoolArray = np.isin(groups.deployment_ids, own)

    def make(self, tables: Sequence[pa.Table], listing: ListingTime, on_wait: OnWait) -> None:
        """Choose. Arguments as in `plan_groups`."""
        facts, inventory = self.facts, self._inventory
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
        """Find the groups that an interrupted move removed from the source in part.

        The destination has them whole, with a target for each object that the source still has.
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
        """Yield groups not to copy, [groups], and the reason."""
        request, groups = self._request, self._groups
        ambiguous = groups.deployment_ids == UNRESOLVED
        yield ~self._routed & ~ambiguous, "written by another deployment than the profile's"
        yield ambiguous, "with ambiguous keys; hicachectl ls describes them"
        in_flight = self._in_flight(listing, on_wait)
        yield in_flight, "still being written; run again to copy them"
        if not request.partial:
            yield (
                (groups.states != WHOLE) & ~self.rests,
                "not whole; --include-partial copies them",
            )
        if not request.damaged:
            yield (
                self._damaged(tables, listing, in_flight) & ~self.rests,
                "with errors; hicachectl verify lists them, --include-damaged copies them",
            )
        unfit = np.zeros(len(groups), dtype=np.bool_)
        for survey in self._surveys:
            unfit[survey.groups] = survey.unfit
        yield unfit, "with objects of unknown or wrong size; hicachectl verify lists wrong sizes"
        yield from self._migration.trailers.refused(self._inventory, groups)

    def _in_flight(self, listing: ListingTime, on_wait: OnWait) -> BoolArray:
        """Return which groups are not whole, and may still be written: [groups].

        A copy of such a group does no harm; its removal may take a sidecar of a page whose anchor
        comes next. So a move looks again where no times show what is young.
        """
        request, groups, source = self._request, self._groups, self._migration.source
        grace = request.grace_seconds
        in_flight: BoolArray = groups.states != WHOLE
        in_flight &= groups_in_flight(source, groups, listing, grace)
        leaving = self.chosen if request.partial else self.rests
        if (
            request.options.move
            and needs_second_look(source)
            and (leaving & are_incomplete(groups)).any()
        ):
            in_flight |= look_again(
                source, self._inventory, groups, listing, grace, on_wait=on_wait
            )[0]
        return in_flight

    def _damaged(
        self, tables: Sequence[pa.Table], listing: ListingTime, in_flight: BoolArray
    ) -> BoolArray:
        """Return which groups have errors visible in a listing: [groups]."""
        request, groups, source = self._request, self._groups, self._migration.source
        given = CheckInput(
            store=source,
            inventory=self._inventory,
            groups=groups,
            in_flight=in_flight,
            profile=request.profile,
            now_ns=listing.start_ns,
            grace_ns=int(request.grace_seconds * 1e9),
        )
        unmet = VerifyRequest(profile=request.profile).unmet(source)
        found = combine([*listing_findings(given, unmet), *tables], LOCATED_SCHEMA)
        damaged = np.zeros(len(groups), dtype=np.bool_)
        damaged[plan_repair(located(found, self._inventory, groups)).groups] = True
        return damaged
