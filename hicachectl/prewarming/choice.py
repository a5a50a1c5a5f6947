"""Choose the objects that prefixes need, within the budget."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.formats.restorable import leading_runs
from hicachectl.formats.spec import fits
from hicachectl.move.batches import WRITING, Action
from hicachectl.move.copy_plan import large_groups
from hicachectl.move.results import Problem
from hicachectl.move.survey import compare, decide, made_of
from hicachectl.move.work import PageWork

if TYPE_CHECKING:
    import numpy.typing as npt

    from hicachectl.formats.arrays import BoolArray, IntArray
    from hicachectl.move.batches import CopyOptions
    from hicachectl.move.routes import Route
    from hicachectl.move.survey import Survey
    from hicachectl.pages.group_table import GroupTable
    from hicachectl.requests.hits import Hits


class PageChoice:
    """Objects of a survey to copy, so that servers can restore prefixes of chains.

    hits: hits of the chains in the source.
    names: pages that servers can restore.
    rank: [names] rank by value, 0 is best. `fit` narrows `actions` and `survey.wanted`.
    """

    def __init__(self, survey: Survey, hits: Hits, names: pa.StringArray, rank: IntArray) -> None:
        self.actions: npt.NDArray[np.int8] = np.zeros(len(survey.pages), dtype=np.int8)
        self.survey = survey
        self._hits = hits
        self._count = len(names)
        self._all = survey.wanted
        self._sets_of_target = _sets_of_targets(survey.route, hits)
        self._name_of_item = _places(survey.pages, names)
        self._hit_of_item = _places(survey.pages, hits.page_names)
        worst = np.append(rank, len(names))  # index -1: pages that cannot be restored rank last
        self._rank_of_item = worst[self._name_of_item]
        self._rank_of_position = worst[_places(hits.page_names, names)][hits.page_of]
        self._take(hits.usable_pages)

    def fit(self, budget_bytes: int | None, budget_pages: int | None) -> bool:
        """Leave out the least valuable pages until the rest fits; return whether any was left out.

        Shorter prefixes need trailing states at other pages, so every trial computes the cost anew.
        """

        def held(count: int) -> bool:
            kept = self._rank_of_position < count
            runs = leading_runs(kept, self._hits.chains.offsets)
            self._take(self._hits.usable_within(runs))
            cost = self.costs(np.flatnonzero(np.isin(self.actions, WRITING)))
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

    def names_of(self, items: IntArray) -> IntArray:
        """Return the index in `names` of each survey row."""
        return self._name_of_item[items]

    def costs(self, items: IntArray) -> IntArray:
        """Return the bytes that each survey row adds to the destination."""
        return self.survey.lacking.sums[items]

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


def leave_too_large(survey: Survey, options: CopyOptions) -> tuple[Survey, list[Problem]]:
    """Leave out groups that do not fit into the buffer; return a problem for each.

    Groups that the destination has stay wanted, unless their bytes must be compared.
    """
    some, lacks, _ = compare(survey.wanted, survey.existing)
    compared = some & ~lacks & survey.unproven
    action = Action.COMPLETE if ((some & lacks) | compared).any() else Action.COPY
    work = PageWork(survey, np.flatnonzero(lacks | compared), action)
    large, problems = large_groups(work, options)
    left = np.zeros(len(survey.groups), dtype=np.bool_)
    left[work.items[large]] = True
    kept = (~left[block.owners] for block in survey.wanted.blocks)
    return replace(survey, wanted=survey.wanted.where(kept)), problems


def leave_misfits(survey: Survey, *, whole_groups: bool) -> tuple[Survey, list[Problem]]:
    """Leave out targets made from objects of a wrong size; return a problem for each group.

    whole_groups: leave out every target of a group with a wrong object. Groups that the destination
    has stay wanted: its objects are compared with the expected sizes, not with the source's.
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
    return replace(survey, sizes=right, wanted=wanted), _misfit_problems(survey, left)


def _misfit_problems(survey: Survey, misfits: GroupTable) -> list[Problem]:
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
    """Return whether each target is made from objects of each needed set: [needs, targets].

    Replicas and optional objects belong to none of these sets.
    """
    of_source = np.zeros((len(hits.needs), len(route.deployment.specs)), dtype=np.bool_)
    for number, block in enumerate(hits.needs):
        of_source[number, block.columns] = True
    of_target = np.zeros((len(hits.needs), len(route.targets)), dtype=np.bool_)
    for unit in route.units:
        of_unit = of_source[:, list(unit.sources)].any(axis=1, keepdims=True)
        of_target[:, list(unit.destinations)] = of_unit
    return of_target


def _places(pages: pa.StringArray, among: pa.StringArray) -> IntArray:
    """Return the index of each page in `among`, -1 if missing."""
    found = pc.index_in(pages, value_set=among.cast(pages.type))
    places: IntArray = found.fill_null(-1).to_numpy().astype(np.int64)
    return places
