"""Plan the pages to copy into a store: the best first, within a budget."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.formats.errors import UsageError
from hicachectl.move.batches import WRITING, Action, CopyOptions
from hicachectl.move.copy_plan import CopyPlan
from hicachectl.move.survey import decide
from hicachectl.pages.group_table import WHOLE
from hicachectl.prewarming.choice import PageChoice
from hicachectl.prewarming.outcome import PlanFacts
from hicachectl.prewarming.ranking import rank_by_value
from hicachectl.requests.hits import find_hits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    import numpy.typing as npt

    from hicachectl.formats.arrays import BoolArray, IntArray
    from hicachectl.formats.profile import Profile
    from hicachectl.move.survey import Survey
    from hicachectl.pages.groups import PageGroups
    from hicachectl.pages.inventory import Inventory
    from hicachectl.profiles.acceptance import Acceptance
    from hicachectl.requests.chains import Requests
    from hicachectl.requests.hits import Hits


_MINUTE_NS = 60 * 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class PrewarmRequest:
    """Requests or pages to copy into a store, and limits on copying.

    profile: profile of the source.
    requests: None if prefixes are unknown; whole pages are then copied.
    pages: pages to copy without requests, best first; None: all pages, newest first.
    in_others: pages named only in groups of other deployments.
    rank: takes requests, and returns the rank of each of their distinct pages by value. 0 is best;
        a page ranks behind all pages before it in its chains.
    destination_profile: profile of the destination's servers; None: the same.
    served: profiles of the destination's live servers by URL, to count usable pages for.
    allow_empty: accept a source without pages.
    """

    profile: Profile
    requests: Requests | None = None
    pages: pa.StringArray | None = None
    in_others: pa.StringArray | None = None
    rank: Callable[[Requests], IntArray] = rank_by_value
    destination_profile: Profile | None = None
    served: Mapping[str, Profile] = field(default_factory=dict)
    budget_bytes: int | None = None
    budget_pages: int | None = None
    deadline_seconds: float | None = None
    dry_run: bool = False
    allow_empty: bool = False
    options: CopyOptions = field(default_factory=CopyOptions)

    @property
    def has_budget(self) -> bool:
        """Whether bytes or pages are limited."""
        return self.budget_bytes is not None or self.budget_pages is not None

    @property
    def target(self) -> Profile:
        """The destination's profile."""
        return self.destination_profile or self.profile


@dataclass(slots=True)
class PagePlan:
    """Pages to copy, best first.

    parents: page before each item of `pages` in its chain; null if unknown.
    depths: number of pages before each item in its chain; 0 if unknown.
    names: pages that servers could restore from the source.
    """

    pages: CopyPlan
    parents: pa.StringArray
    depths: IntArray
    names: pa.StringArray
    facts: PlanFacts

    def rows(self) -> pa.Table:
        """Return the pages to copy, best first."""
        return pa.table(
            {
                "page": self.pages.survey.pages.take(pa.array(self.pages.items)),
                "parent": self.parents,
                "depth": pa.array(self.depths),
                "bytes": pa.array(self.pages.cost),
            }
        )


def plan_chains(
    inventory: Inventory,
    groups: PageGroups,
    survey: Survey,
    request: PrewarmRequest,
    acceptance: Acceptance,
) -> tuple[PagePlan, Hits]:
    """Choose the pages of chains that servers can restore, best first, within the budget.

    Also return the hits of the chains in the source. acceptance: see `find_hits`.
    """
    assert request.requests is not None
    hits = find_hits(inventory, 0, request.requests, own=True, acceptance=acceptance)
    requested = len(hits.page_names)
    usable = hits.chains.cut(hits.usable_pages)
    names, forest = usable.page_names, usable.forest
    choice = PageChoice(survey, hits, names, request.rank(usable))
    there = int((choice.actions == Action.SKIP).sum())
    cut = False
    if request.has_budget:
        cut = choice.fit(request.budget_bytes, request.budget_pages)
    wanted = choice.wanted()
    items = wanted[np.isin(choice.actions[wanted], WRITING)]
    places = choice.names_of(items)
    parents = forest.parents[places]
    plan = PagePlan(
        pages=CopyPlan(
            inventory=inventory,
            groups=groups,
            survey=choice.survey,
            order=wanted,
            actions=choice.actions,
        ),
        parents=names.take(pa.array(parents, mask=parents < 0)),
        depths=forest.depths[places].astype(np.int64),
        names=names,
        facts=PlanFacts(
            requested=requested,
            there=there,
            missing=requested - len(names),
            requested_tokens=request.requests.requested_tokens(request.target.page_size),
            cut=cut,
        ),
    )
    return plan, hits


def plan_pages(
    inventory: Inventory,
    groups: PageGroups,
    survey: Survey,
    request: PrewarmRequest,
    refused: Iterable[tuple[BoolArray, str]] = (),
) -> PagePlan:
    """Choose whole pages with unknown prefixes; refused: groups to leave out, and why.

    Listed pages keep their order. Otherwise the newest minute is first, and within it the oldest
    page, since no page is older than the pages before it in its chain.
    """
    whole = groups.states[survey.groups] == WHOLE
    asked = int(whole.sum())
    for left, _ in refused:
        whole &= ~left[survey.groups]
    if request.pages is not None:
        rank = pc.index_in(survey.pages, value_set=request.pages.cast(survey.pages.type))
        whole &= rank.is_valid().to_numpy(zero_copy_only=False)
        if request.in_others is not None:
            whole &= ~pc.is_in(survey.pages, value_set=request.in_others).to_numpy(
                zero_copy_only=False
            )
        turn, asked = rank.fill_null(-1).to_numpy(), len(pc.unique(request.pages))
    else:
        if not groups.has_times and request.has_budget:
            raise UsageError(
                "--all with a budget copies the newest pages, but the source keeps no timestamps; "
                "give --pages, or leave out --budget and --budget-pages"
            )
        turn = _newest_minute_first(groups.newest_ns[survey.groups])
    actions = decide(survey, whole, "skip")
    there = int((actions == Action.SKIP).sum())
    order = np.argsort(turn, kind="stable")
    items = order[np.isin(actions[order], WRITING)]
    beyond = items[~_within_budget(survey.lacking.sums[items], request)]
    actions[beyond] = Action.NOTHING
    order = order[actions[order] != Action.NOTHING]
    pages = CopyPlan(inventory, groups, survey, order, actions)
    kept = len(pages.items)
    names = survey.pages.filter(pa.array(whole))
    return PagePlan(
        pages=pages,
        parents=pa.nulls(kept, pa.string()),
        depths=np.zeros(kept, dtype=np.int64),
        names=names,
        facts=PlanFacts(
            chained=False,
            requested=asked,
            there=there,
            missing=asked - len(names),
            requested_tokens=asked * request.target.page_size,
            cut=bool(len(beyond)),
        ),
    )


def _newest_minute_first(times_ns: IntArray) -> IntArray:
    order = np.lexsort((times_ns, -(times_ns // _MINUTE_NS)))
    turn = np.empty(len(order), dtype=np.int64)
    turn[order] = np.arange(len(order))
    return turn


def _within_budget(cost: IntArray, request: PrewarmRequest) -> npt.NDArray[np.bool_]:
    """Return which pages fit, in order, until one exceeds the budget."""
    fits = np.ones(len(cost), dtype=np.bool_)
    if request.budget_bytes is not None:
        fits &= np.cumsum(cost) <= request.budget_bytes
    if request.budget_pages is not None:
        fits[request.budget_pages :] = False
    return fits
