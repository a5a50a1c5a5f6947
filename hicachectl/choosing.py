"""Which pages of chains are copied, and what of each: no more than prefixes need, best first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.compute as pc

from hicachectl.formats.restorable import leading_runs
from hicachectl.migrating.decisions import Action, decide
from hicachectl.migrating.survey import ABSENT

if TYPE_CHECKING:
    import numpy.typing as npt
    import pyarrow as pa

    from hicachectl.groups import BoolArray
    from hicachectl.hits import Hits
    from hicachectl.inventory import IntArray
    from hicachectl.migrating.survey import Survey

WRITING = (Action.COPY, Action.COMPLETE)


class Choice:
    """What of a survey is wanted, so that the prefixes of chains can be restored.

    hits: what the source has of the chains. names: pages that can be restored, rank: the place of
    each in the order of value. `fit` narrows the choice; the survey's `due` follows it.
    """

    def __init__(self, survey: Survey, hits: Hits, names: pa.StringArray, rank: IntArray) -> None:
        self.actions: npt.NDArray[np.int8] = np.zeros(len(survey.pages), dtype=np.int8)
        self._survey = survey
        self._hits = hits
        self._count = len(names)
        self._due = survey.due.copy()
        self._name_of_item = _places(survey.pages, names)
        self._hit_of_item = _places(survey.pages, hits.page_names)
        worst = np.append(rank, len(names))  # also of what cannot be restored
        self._rank_of_item = worst[self._name_of_item]
        self._rank_of_position = worst[_places(hits.page_names, names)][hits.page_of]
        self._take(hits.usable_pages)

    def fit(self, budget_bytes: int | None, budget_pages: int | None) -> bool:
        """Leave out the least valuable pages until budgets hold the rest; whether any were.

        Fewer pages mean shorter prefixes, and those need states at other ends.
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
        """List the rows of the survey that are wanted, best first."""
        items = np.flatnonzero(self.actions != Action.NOTHING)
        return items[np.argsort(self._rank_of_item[items], kind="stable")]

    def names_of(self, items: IntArray) -> IntArray:
        """Say which of the names rows of the survey are of."""
        return self._name_of_item[items]

    def costs(self, items: IntArray) -> IntArray:
        """Count the bytes that each of some rows brings to the destination."""
        return arriving_bytes(self._survey, items)

    def _take(self, prefix_pages: IntArray) -> None:
        """Want what restoring prefixes of these lengths takes, and no more."""
        survey, needs = self._survey, self._hits.needs
        column_of = np.full(len(survey.route.deployment.specs), -1, dtype=np.int64)
        for column, block in enumerate(needs):
            column_of[block.columns] = column
        none = np.zeros((1, len(needs)), dtype=np.bool_)
        needed: Any = np.vstack([self._hits.needed(prefix_pages), none])[self._hit_of_item]
        chosen = needed.any(axis=1)
        for number, unit in enumerate(survey.route.units):
            columns = np.unique(column_of[survey.route.sources[list(unit.sources)]])
            columns = columns[columns >= 0]  # the others are replicas, or of no page's own
            wanted = needed[:, columns].all(axis=1) if len(columns) else chosen
            survey.due[:, number] = self._due[:, number] & wanted
        self.actions = decide(survey, chosen, "skip")


def arriving_bytes(survey: Survey, items: IntArray) -> IntArray:
    """Count the bytes that each of some groups brings to the destination: [items]."""
    new: BoolArray = survey.needed[items] & (survey.there[items] == ABSENT)
    nbytes: IntArray = (np.maximum(survey.wanted_bytes[items], 0) * new).sum(axis=1)
    return nbytes


def _places(pages: pa.StringArray, among: pa.StringArray) -> IntArray:
    """Say where pages stand among others; -1 where they do not."""
    found = pc.index_in(pages, value_set=among.cast(pages.type))
    places: IntArray = found.fill_null(-1).to_numpy().astype(np.int64)
    return places
