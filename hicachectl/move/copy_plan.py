"""Plans of copies: an action for each page group of a survey."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from hicachectl.move.batches import WRITING, Action
from hicachectl.move.results import MOST_PROBLEMS, Problem
from hicachectl.move.survey import conflicts
from hicachectl.move.work import PageWork, too_large

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from hicachectl.formats.arrays import BoolArray, IntArray
    from hicachectl.move.batches import CopyOptions
    from hicachectl.move.survey import Survey
    from hicachectl.pages.groups import PageGroups
    from hicachectl.pages.inventory import Inventory

# Groups left incomplete by an earlier run come first.
_ORDER = (Action.COMPLETE, Action.COPY, Action.COMPARE, Action.CLEAR, Action.REPLACE)


@dataclass(frozen=True, slots=True, eq=False)
class CopyPlan:
    """Page groups of one survey to copy, with an action for each.

    order: survey rows of the groups, in the order in which they are copied.
    actions: [n] Action of each row of the survey.
    """

    inventory: Inventory
    groups: PageGroups
    survey: Survey
    order: IntArray
    actions: npt.NDArray[np.int8]

    def rows(self, *wanted: Action) -> IntArray:
        """Return the survey rows with these actions, in order."""
        rows: IntArray = self.order[np.isin(self.actions[self.order], wanted)]
        return rows

    def count(self, *wanted: Action) -> int:
        """Return the number of groups with these actions."""
        return len(self.rows(*wanted))

    @property
    def items(self) -> IntArray:
        """Survey rows of the groups to write, in order."""
        return self.rows(*WRITING)

    @property
    def cost(self) -> IntArray:
        """Bytes that each item adds to the destination."""
        return self.survey.lacking.sums[self.items]

    def demand(self) -> tuple[int, int]:
        """Return the number of objects and of bytes to write."""
        items, wanted, lacking = self.items, self.survey.wanted, self.survey.lacking
        replaces = self.actions[items] == Action.REPLACE
        objects, nbytes = (
            int(np.where(replaces, whole[items], rest[items]).sum())
            for whole, rest in ((wanted.counts, lacking.counts), (wanted.sums, lacking.sums))
        )
        return objects, nbytes

    def leave_too_large(self, options: CopyOptions) -> tuple[int, list[Problem]]:
        """Leave out groups larger than --buffer-bytes.

        Return their number, and a problem for each of the first MOST_PROBLEMS.
        """
        count, problems = 0, list[Problem]()
        for work in self.works():
            large, named = large_groups(work, options, MOST_PROBLEMS - len(problems))
            self.actions[work.items[large]] = Action.NOTHING
            count += int(large.sum())
            problems += named
        return count, problems

    def conflicts(self) -> list[Problem]:
        """Return a problem for each of the first groups in conflict."""
        return conflicts(self.survey, self.rows(Action.CONFLICT))

    def works(self) -> Iterator[PageWork]:
        """Yield the work of all groups, one action after another, in order."""
        for action in _ORDER:
            items = self.rows(action)
            if len(items):
                yield PageWork(self.survey, items, action)

    def works_together(self) -> Iterator[PageWork]:
        """Yield all copies in order, then the comparisons.

        COMPLETE also copies groups without any object in the destination.
        """
        action = Action.COMPLETE if self.count(Action.COMPLETE) else Action.COPY
        yield PageWork(self.survey, self.items, action)
        if self.count(Action.COMPARE):
            yield PageWork(self.survey, self.rows(Action.COMPARE), Action.COMPARE)


def oldest_first(survey: Survey, newest_ns: IntArray) -> IntArray:
    """Return the rows of a survey, the oldest groups first: servers write parents before children.

    newest_ns: [n] mtime of each group's newest object.
    """
    first_rows = np.full(len(survey.groups), np.iinfo(np.int64).max)
    for block in survey.rows.blocks:
        np.minimum.at(first_rows, block.owners, block.values)
    return np.lexsort((first_rows, newest_ns))


def large_groups(
    work: PageWork, options: CopyOptions, most: int | None = None
) -> tuple[BoolArray, list[Problem]]:
    """Return which items are larger than --buffer-bytes, and a problem for the first `most`."""
    nbytes = work.bytes_in_memory(verify=options.verify)
    large = nbytes > options.buffer_bytes
    named = np.flatnonzero(large)[:most]
    pages = work.survey.pages.take(pa.array(work.items[named])).to_pylist()
    return large, [
        too_large(page, need, options.buffer_bytes)
        for page, need in zip(pages, nbytes[named].tolist(), strict=True)
    ]
