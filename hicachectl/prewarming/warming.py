"""A prewarm between two stores, checked, and its plan."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pyarrow.compute as pc

from hicachectl.backends.capabilities import Pins
from hicachectl.formats.errors import UnsupportedByBackend
from hicachectl.move.batches import Action
from hicachectl.move.results import MOST_PROBLEMS
from hicachectl.move.store_pair import StorePair
from hicachectl.move.trailers import plan_trailers
from hicachectl.pages.groups import PageGroups
from hicachectl.pages.inventory import take_inventory
from hicachectl.pages.selection import EVERYTHING, explain_selection
from hicachectl.prewarming.choice import leave_misfits, leave_too_large
from hicachectl.prewarming.page_plan import plan_chains, plan_pages
from hicachectl.requests.elsewhere import find_elsewhere, miss_remarks
from hicachectl.requests.hits import inventory_of_chains

if TYPE_CHECKING:
    from collections.abc import Callable

    import pyarrow as pa

    from hicachectl.backends.base import Store
    from hicachectl.move.results import Problem
    from hicachectl.move.survey import Survey
    from hicachectl.pages.inventory import Inventory
    from hicachectl.prewarming.page_plan import PagePlan, PrewarmRequest


class Warming:
    """A request between two stores, checked.

    stores: the pair.
    trailers: how trailers are copied.
    options: options of the copies.
    """

    def __init__(self, source: Store, destination: Store, request: PrewarmRequest) -> None:
        """Check the request. Raises UsageError, ProfileError, UnsupportedByBackend."""
        if request.options.pin:
            if not isinstance(destination, Pins):
                raise UnsupportedByBackend(
                    f"{destination.url}: cannot pin objects; leave out --pin"
                )
            destination.pin_writes(request.options.pin_seconds)
        self.source = source
        self.destination = destination
        self.request = request
        self.stores = StorePair(source, destination, request.profile, request.target)
        trailers = plan_trailers(self.stores, request.options.trailers)
        self.options = replace(request.options, keeps_trailers=trailers.keeps)
        # The destination's servers accept no object without a trailer beside others that have one.
        self.trailers = replace(trailers, bare=trailers.bare and not trailers.keeps)

    def survey(
        self,
        inventory: Inventory,
        groups: PageGroups,
        *,
        asks: bool = False,
        on_batch: Callable[[int], None] = lambda objects: None,
    ) -> Survey:
        """Survey both stores. asks: see `StorePair.survey`."""
        (survey,) = self.stores.survey(
            inventory, groups, first_only=True, asks=asks, on_batch=on_batch
        )
        return self.trailers.with_foreign(survey, inventory.objects)


def plan_prewarm(
    warming: Warming, *, on_listed: Callable[[int], None] = lambda objects: None
) -> PagePlan:
    """List both stores and choose the pages to copy. Arguments and exceptions as in `prewarm`."""
    source, request, trailers = warming.source, warming.request, warming.trailers
    needs_pages = not request.allow_empty
    inventory = (
        take_inventory(source, request.profile, needs_pages=needs_pages, on_batch=on_listed)
        if request.requests is None
        else inventory_of_chains(
            source, request.profile, request.requests, needs_pages=needs_pages, on_batch=on_listed
        )
    )
    groups = PageGroups(inventory)
    survey = warming.survey(inventory, groups, on_batch=on_listed)
    survey, misfits = leave_misfits(survey, whole_groups=request.requests is None)
    survey, large = leave_too_large(survey, warming.options)
    if request.requests is None:
        plan = plan_pages(inventory, groups, survey, request, trailers.refused(inventory, groups))
        missed = [] if len(groups) else [explain_selection(source, inventory, EVERYTHING)]
    else:
        accepted = trailers.acceptance(inventory)
        plan, hits = plan_chains(inventory, groups, survey, request, accepted)
        elsewhere = find_elsewhere(inventory, hits)
        missed = miss_remarks(source, inventory, hits, elsewhere)
    pages = plan.pages
    left_out = [
        *_asked_for(misfits, _pages_to_fit(plan, request)),
        *_asked_for(large, plan.names),
    ]
    problems = [*pages.conflicts(), *left_out]
    plan.facts.failed = pages.count(Action.CONFLICT) + len(left_out)
    plan.facts.problems = problems[:MOST_PROBLEMS]
    if request.options.pin and not request.dry_run:
        plan.facts.not_pinned = plan.facts.there + pages.count(Action.COMPARE)
    plan.facts.remarks += [*warming.stores.remarks, *filter(None, [trailers.remark]), *missed]
    return plan


def _pages_to_fit(plan: PagePlan, request: PrewarmRequest) -> pa.StringArray:
    """Return the requested pages that may be missing because an object has a wrong size.

    Pages restorable from the source do not need such objects.
    """
    if request.requests is None:
        return plan.names
    asked = request.requests.within_reach().page_names
    return asked.filter(pc.invert(pc.is_in(asked, value_set=plan.names)))


def _asked_for(left: list[Problem], names: pa.StringArray) -> list[Problem]:
    wanted = set(names.to_pylist()) if left else set()
    return [problem for problem in left if problem.page in wanted]
