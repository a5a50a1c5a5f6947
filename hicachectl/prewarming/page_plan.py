"""Plan which pages to copy into a store, the best first, within a budget."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.formats.errors import UsageError
from hicachectl.formats.restorable import leading_runs
from hicachectl.formats.spec import fits
from hicachectl.move.copy_plan import CopyPlan
from hicachectl.move.results import Problem
from hicachectl.move.store_pair import CopyOptions
from hicachectl.move.survey import WRITING, Action, decide, made_of
from hicachectl.pages.group_table import WHOLE
from hicachectl.prewarming.outcome import PrewarmFacts
from hicachectl.prewarming.ranking import places_among, rank_by_value
from hicachectl.requests.hits import find_hits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    import numpy.typing as npt

    from hicachectl.formats.arrays import BoolArray, IntArray
    from hicachectl.formats.profile import Profile
    from hicachectl.move.survey import Route, Survey
    from hicachectl.pages.group_table import GroupTable
    from hicachectl.pages.groups import PageGroups
    from hicachectl.profiles.identities import Acceptance
    from hicachectl.requests.chains import Requests
    from hicachectl.requests.hits import Hits


class PageChoice:
    """Choice of the objects to copy, so that servers can restore prefixes of chains.

    survey: survey of the stores; its `wanted` has the chosen objects.
    actions: [survey rows] Action for each page.
    hits: hits of the chains in the source.
    names: pages that servers can restore from the source.
    rank: [names] rank by value; 0 is best.
    name_of_item: [survey rows] index in `names`; -1 if servers cannot restore the page.
    """

    def __init__(self, survey: Survey, hits: Hits, names: pa.StringArray, rank: IntArray) -> None:
        self.actions: npt.NDArray[np.int8] = np.zeros(len(survey.pages), dtype=np.int8)
        self.survey = survey
        self._hits = hits
        self._count = len(names)
        self._all = survey.wanted
        self._sets_of_target = _sets_of_targets(survey.route, hits)
        self.name_of_item = places_among(survey.pages, names)
        self._hit_of_item = places_among(survey.pages, hits.page_names)
        # Pages that are not in `names` have index -1, which selects the appended last rank.
        worst = np.append(rank, len(names))
        self._rank_of_item = worst[self.name_of_item]
        self._rank_of_position = worst[places_among(hits.page_names, names)][hits.page_of]
        self._take(hits.usable_pages)

    def fit(self, budget_bytes: int | None, budget_pages: int | None) -> bool:
        """Leave out the least valuable pages until the rest fits. Return whether any was left out.

        Every step computes the cost anew, because a shorter prefix needs trailing states at another
        page.
        """

        def held(count: int) -> bool:
            kept = self._rank_of_position < count
            runs = leading_runs(kept, self._hits.chains.offsets)
            self._take(self._hits.usable_within(runs))
            cost = self.survey.lacking.sums[np.isin(self.actions, WRITING)]
            over = budget_bytes is not None and int(cost.sum()) > budget_bytes
            many = budget_pages is not None and len(cost) > budget_pages
            return not (over or many)

        if held(self._count):
            return False
        low, high = 0, self._count
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if held(middle) else (low, middle)
        held(low)
        return True

    def wanted(self) -> IntArray:
        """Return the survey rows of wanted pages, best first."""
        items = np.flatnonzero(self.actions != Action.NOTHING)
        return items[np.argsort(self._rank_of_item[items], kind="stable")]

    def _take(self, prefix_pages: IntArray) -> None:
        """Limit the choice to the objects that prefixes of these lengths need."""
        none = np.zeros((1, len(self._hits.needs)), dtype=np.bool_)
        needed: Any = np.vstack([self._hits.needed(prefix_pages), none])[self._hit_of_item]
        chosen = needed.any(axis=1)
        kept = (
            chosen[block.owners]
            & ~(~needed[block.owners] & self._sets_of_target.T[block.positions]).any(axis=1)
            for block in self._all.blocks
        )
        self.survey = replace(self.survey, wanted=self._all.where(kept))
        self.actions = decide(self.survey, chosen, "skip")


def exclude_wrong_sizes(survey: Survey, *, whole_groups: bool) -> tuple[Survey, list[Problem]]:
    """Leave out objects to write that are made from objects of a wrong size.

    Return the survey without them, and a problem for each group that has one.

    Groups that are in the destination stay wanted, because objects of the destination are compared
    with the expected sizes, not with the sizes in the source.
    whole_groups: whether one wrong object leaves out all objects to write of its group.
    """
    route, rows, sizes = survey.route, survey.rows, survey.sizes
    misfits = rows.where(
        ~fits(sizes[block.values], route.sizes[block.positions]) for block in rows.blocks
    )
    if not misfits.counts.any():
        return survey, []
    lacks = survey.lacking.having()
    left = misfits.where(lacks[block.owners] for block in misfits.blocks)
    _, sources, wrong = misfits.objects(np.arange(misfits.count))
    right = sizes.copy()
    right[wrong] = route.sizes[sources]
    wanted = made_of(route, rows, right)
    if whole_groups:
        fine = ~left.having()
        wanted = wanted.where(fine[block.owners] for block in wanted.blocks)
    else:
        wanted = wanted.without(made_of(route, left, right, partly=True))
    return replace(survey, sizes=right, wanted=wanted), _size_problems(survey, left)


def _size_problems(survey: Survey, misfits: GroupTable) -> list[Problem]:
    route, items = survey.route, np.flatnonzero(misfits.having())
    places, sources, rows = misfits.objects(items)
    _, first = np.unique(places, return_index=True)
    columns = (
        survey.pages.take(pa.array(items)).to_pylist(),
        sources[first].tolist(),
        survey.sizes[rows[first]].tolist(),
    )
    problems = []
    for page, source, nbytes in zip(*columns, strict=True):
        before, after = route.sources[source].affix
        why = (
            f"{nbytes} bytes, expected {route.sizes[source]}, so the page is not copied; run "
            "hicachectl verify"
        )
        problems.append(Problem(page, f"{before}{page}{after}", why))
    return problems


def _sets_of_targets(route: Route, hits: Hits) -> BoolArray:
    """Return which targets are made from objects of each block of `hits.needs`: [needs, targets].

    Replicas and optional objects belong to no block.
    """
    of_source = np.zeros((len(hits.needs), len(route.deployment.specs)), dtype=np.bool_)
    for number, block in enumerate(hits.needs):
        of_source[number, block.columns] = True
    of_target = np.zeros((len(hits.needs), len(route.targets)), dtype=np.bool_)
    for unit in route.units:
        of_unit = of_source[:, list(unit.sources)].any(axis=1, keepdims=True)
        of_target[:, list(unit.destinations)] = of_unit
    return of_target


_MINUTE_NS = 60 * 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class PrewarmRequest:
    """Requests or pages to copy into a store, and limits on copying.

    profile: profile of the source.
    requests: requests to warm the destination for; None if prefixes are unknown. Without requests,
        whole pages are copied.
    pages: pages to copy if there are no requests, best first; None for all pages, newest first.
    in_others: pages that the page list names only in groups of other deployments.
    rank: function that returns the rank of each distinct page of requests by value. 0 is best. A
        page ranks behind all pages before it in its chains.
    destination_profile: profile of the destination's servers; None if it is the same as `profile`.
    served: profiles of live servers of the destination, by URL. Usable pages are counted for the
        server that fetches the fewest pages.
    allow_empty: whether to accept a source without pages.
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
        """Profile of the destination's servers."""
        return self.destination_profile or self.profile


@dataclass(slots=True)
class PagePlan:
    """Pages to copy, best first.

    parents: [n] previous page in the chain of each page of the survey; null if unknown.
    depths: [n] number of pages before each page in its chain; 0 if unknown.
    names: pages that servers could restore from the source.
    """

    pages: CopyPlan
    parents: pa.StringArray
    depths: IntArray
    names: pa.StringArray
    facts: PrewarmFacts

    def rows(self) -> pa.Table:
        """Return the pages to copy, best first."""
        items = self.pages.items
        return pa.table(
            {
                "page": self.pages.survey.pages.take(pa.array(items)),
                "parent": self.parents.take(pa.array(items)),
                "depth": pa.array(self.depths[items]),
                "bytes": pa.array(self.pages.cost),
            }
        )


def plan_chains(
    groups: PageGroups,
    survey: Survey,
    request: PrewarmRequest,
    acceptance: Acceptance,
) -> tuple[PagePlan, Hits]:
    """Choose the pages of chains that servers can restore, best first, within the budget.

    acceptance: see `find_hits`.
    Return the plan, and the hits of the chains in the source.
    """
    assert request.requests is not None
    hits = find_hits(groups.inventory, 0, request.requests, own=True, acceptance=acceptance)
    requested = len(hits.page_names)
    usable = hits.chains.cut(hits.usable_pages)
    names, forest = usable.page_names, usable.forest
    choice = PageChoice(survey, hits, names, request.rank(usable))
    skipped = int((choice.actions == Action.SKIP).sum())
    cut = False
    if request.has_budget:
        cut = choice.fit(request.budget_bytes, request.budget_pages)
    # Pages that cannot be restored have index -1, which selects the appended last entry.
    parents, depths = np.append(forest.parents, -1), np.append(forest.depths, 0)
    parents = parents[choice.name_of_item]
    plan = PagePlan(
        pages=CopyPlan(
            groups=groups,
            survey=choice.survey,
            order=choice.wanted(),
            actions=choice.actions,
            together=True,
        ),
        parents=names.take(pa.array(parents, mask=parents < 0)),
        depths=depths[choice.name_of_item].astype(np.int64),
        names=names,
        facts=PrewarmFacts(
            requested=requested,
            skipped=skipped,
            missing=requested - len(names),
            requested_tokens=request.requests.requested_tokens(request.target.page_size),
            cut=cut,
        ),
    )
    return plan, hits


def plan_pages(
    groups: PageGroups,
    survey: Survey,
    request: PrewarmRequest,
    refused: Iterable[tuple[BoolArray, str]] = (),
) -> PagePlan:
    """Choose whole pages whose prefixes are unknown.

    Pages of `request.pages` keep their order. Without these, pages of the newest minute come first.
    Within a minute, the oldest page comes first, because no page is older than its prefix.
    refused: masks of groups to leave out, [groups], each with the reason.
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
        order = np.argsort(rank.fill_null(-1).to_numpy(), kind="stable")
        asked = len(pc.unique(request.pages))
    else:
        if not groups.has_times and request.has_budget:
            raise UsageError(
                "--all with a budget copies the newest pages, but the source keeps no timestamps; "
                "give --pages, or leave out --budget and --budget-pages"
            )
        newest = groups.newest_ns[survey.groups]
        order = np.lexsort((newest, -(newest // _MINUTE_NS)))
    actions = decide(survey, whole, "skip")
    skipped = int((actions == Action.SKIP).sum())
    items = order[np.isin(actions[order], WRITING)]
    beyond = items[~_within_budget(survey.lacking.sums[items], request)]
    actions[beyond] = Action.NOTHING
    order = order[actions[order] != Action.NOTHING]
    count = len(survey.pages)
    names = survey.pages.filter(pa.array(whole))
    return PagePlan(
        pages=CopyPlan(groups, survey, order, actions, together=True),
        parents=pa.nulls(count, pa.string()),
        depths=np.zeros(count, dtype=np.int64),
        names=names,
        facts=PrewarmFacts(
            chained=False,
            requested=asked,
            skipped=skipped,
            missing=asked - len(names),
            requested_tokens=asked * request.target.page_size,
            cut=bool(len(beyond)),
        ),
    )


def _within_budget(cost: IntArray, request: PrewarmRequest) -> npt.NDArray[np.bool_]:
    """Return which pages fit into the budget, in order. cost: [pages] bytes."""
    fits = np.ones(len(cost), dtype=np.bool_)
    if request.budget_bytes is not None:
        fits &= np.cumsum(cost) <= request.budget_bytes
    if request.budget_pages is not None:
        fits[request.budget_pages :] = False
    return fits
