"""Choose an action for each page group of a migration."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hicachectl.checks.findings import LOCATED_SCHEMA, combine
from hicachectl.checks.registry import CheckInput
from hicachectl.checks.running import listing_findings, located
from hicachectl.move.migration_outcome import MigrationFacts
from hicachectl.move.migration_plan import MigrationPlan, Planned
from hicachectl.move.planning import plan_repair
from hicachectl.move.survey import decide
from hicachectl.pages.deployments import UNRESOLVED
from hicachectl.pages.group_table import WHOLE
from hicachectl.pages.groups import PageGroups
from hicachectl.pages.in_flight import (
    are_incomplete,
    groups_in_flight,
    look_again,
    needs_second_look,
)
from hicachectl.pages.selection import select
from hicachectl.pages.unmatched import explain_selection
from hicachectl.requests.page_lists import NamedGroups
from hicachectl.verification.coverage import unmet_needs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import pyarrow as pa

    from hicachectl.move.migration import Migration
    from hicachectl.move.migration_plan import KeptPlan
    from hicachectl.move.survey import Survey
    from hicachectl.pages.groups import BoolArray
    from hicachectl.pages.in_flight import ListingTime
    from hicachectl.pages.inventory import Inventory

    OnWait = Callable[[float, int], None]


def plan_groups(
    migration: Migration,
    listed: Inventory,
    tables: Sequence[pa.Table],
    listing: ListingTime,
    *,
    asks: bool = False,
    kept: KeptPlan | None = None,
    on_batch: Callable[[int], None] = lambda objects: None,
    on_wait: Callable[[float, int], None] = lambda seconds, pages: None,
) -> MigrationPlan:
    """Plan the migration of listed objects: of the whole source, or of all objects of some pages.

    tables: findings about the source's page tables.
    listing: time of the listing; groups that are young then may still be written.
    asks: see `StorePair.survey`.
    kept: plan of an earlier run of the same objects, to be continued.
    on_wait: see `look_again`.
    Raises ProfileError, StoreUnavailable, and UsageError for a wrong selection.
    """
    request, earlier = migration.request, migration.earlier
    inventory = select(listed, request.selection)
    groups = PageGroups(inventory)
    surveys = [
        migration.trailers.with_foreign(survey, inventory.objects)
        for survey in migration.stores.survey(inventory, groups, asks=asks, on_batch=on_batch)
    ]
    if kept is None:
        choice = _Choice(migration, inventory, groups, surveys)
        choice.make(tables, listing, on_wait)
        facts = choice.facts
        facts.listed = len(listed.objects)
        if not len(groups):
            facts.nothing = explain_selection(migration.source, listed, request.selection)
        wanted = [choice.chosen[survey.groups] for survey in surveys]
    else:
        facts, wanted = kept.facts, kept.active(surveys)
    plan = MigrationPlan(inventory, groups, surveys, facts)
    plan.actions = [
        decide(survey, chosen, request.if_exists)
        for survey, chosen in zip(surveys, wanted, strict=True)
    ]
    plan.settle_existing(request, earlier, continues=request.resume or kept is not None)
    if kept is None:
        plan.planned = [Planned.of(*pair) for pair in zip(surveys, plan.actions, strict=True)]
    else:
        plan.follow(kept, earlier)
    plan.leave_too_large(request.options)
    plan.name_conflicts()
    return plan


class _Choice:
    """Choice of the groups to copy.

    chosen: [groups]. facts: counts of groups by the reason why they are not chosen.
    """

    def __init__(
        self,
        migration: Migration,
        inventory: Inventory,
        groups: PageGroups,
        surveys: Sequence[Survey],
    ) -> None:
        self.chosen = np.ones(len(groups), dtype=np.bool_)
        self.facts = MigrationFacts(groups=len(groups))
        self._migration = migration
        self._request = migration.request
        self._inventory = inventory
        self._groups = groups
        self._surveys = surveys

    def make(self, tables: Sequence[pa.Table], listing: ListingTime, on_wait: OnWait) -> None:
        """Choose. Arguments as in `plan_groups`."""
        facts, inventory = self.facts, self._inventory
        facts.unknown_keys = int(inventory.is_foreign.sum()) - len(inventory.cleared_rows)
        if self._request.pages is not None:
            named = NamedGroups(self._request.pages, self._groups)
            self.chosen &= named.chosen
            facts.matched = named.matched
        facts.named = int(self.chosen.sum())
        for behind, why in self._reasons(tables, listing, on_wait):
            facts.left_out[why] = int((self.chosen & behind).sum())
            self.chosen &= ~behind

    def _reasons(
        self, tables: Sequence[pa.Table], listing: ListingTime, on_wait: OnWait
    ) -> Iterator[tuple[BoolArray, str]]:
        """Yield groups not to copy, [groups], and the reason."""
        request, groups, surveys = self._request, self._groups, self._surveys
        ambiguous = groups.deployment_ids == UNRESOLVED
        routed = np.isin(groups.deployment_ids, [s.route.deployment_id for s in surveys])
        yield ~routed & ~ambiguous, "written by another deployment than the profile's"
        yield ambiguous, "with ambiguous keys; hicachectl ls describes them"
        in_flight = self._in_flight(listing, on_wait)
        yield in_flight, "still being written; run again to copy them"
        if not request.partial:
            yield groups.states != WHOLE, "not whole; --include-partial copies them"
        if not request.damaged:
            yield (
                self._damaged(tables, listing, in_flight),
                "with errors; hicachectl verify lists them, --include-damaged copies them",
            )
        unfit = np.zeros(len(groups), dtype=np.bool_)
        for survey in surveys:
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
        moves = request.options.move and request.partial
        if moves and needs_second_look(source) and (self.chosen & are_incomplete(groups)).any():
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
        unmet = unmet_needs(source, request.profile, has_catalog=False)
        found = combine([*listing_findings(given, unmet), *tables], LOCATED_SCHEMA)
        damaged = np.zeros(len(groups), dtype=np.bool_)
        damaged[plan_repair(located(found, self._inventory, groups)).groups] = True
        return damaged
