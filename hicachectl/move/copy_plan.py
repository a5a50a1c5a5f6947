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

    from hicachectl.formats.arrays import IntArray
    from hicachectl.move.batches import CopyOptions
    from hicachectl.move.survey import Survey

# Groups left incomplete by an earlier run come first.
_ORDER = (Action.COMPLETE, Action.COPY, Action.COMPARE, Action.CLEAR, Action.REPLACE)


@dataclass(frozen=True, slots=True, eq=False)
class SurveyPlan:
    """The groups of one survey, with an action for each.

    actions: [n] Action of each group.
    """

    survey: Survey
    actions: npt.NDArray[np.int8]

    def count(self, *wanted: Action) -> int:
        """Return the number of groups with these actions."""
        return int(np.isin(self.actions, wanted).sum())

    def demand(self) -> tuple[int, int]:
        """Return the number of objects and of bytes to write."""
        writes, replaces = np.isin(self.actions, WRITING), self.actions == Action.REPLACE
        wanted, lacking = self.survey.wanted, self.survey.lacking
        objects, nbytes = (
            int(np.where(replaces, whole, rest)[writes].sum())
            for whole, rest in ((wanted.counts, lacking.counts), (wanted.sums, lacking.sums))
        )
        return objects, nbytes

    def leave_too_large(self, options: CopyOptions) -> tuple[int, list[Problem]]:
        """Leave out groups larger than --buffer-bytes.

        Return their number, and a problem for each of the first MOST_PROBLEMS.
        """
        count, problems = 0, list[Problem]()
        for work in self._works(np.arange(len(self.actions))):
            nbytes = work.bytes_in_memory(verify=options.verify)
            large = nbytes > options.buffer_bytes
            items = work.items[large]
            self.actions[items] = Action.NOTHING
            count += len(items)
            named = items[: MOST_PROBLEMS - len(problems)]
            pages = self.survey.pages.take(pa.array(named)).to_pylist()
            problems += [
                too_large(page, need, options.buffer_bytes)
                for page, need in zip(pages, nbytes[large].tolist(), strict=False)
            ]
        return count, problems

    def conflicts(self) -> list[Problem]:
        """Return a problem for each of the first groups in conflict."""
        return conflicts(self.survey, np.flatnonzero(self.actions == Action.CONFLICT))

    def works(self, newest_ns: IntArray) -> Iterator[PageWork]:
        """Yield the work of all groups, one action after another.

        Within an action, the oldest groups come first: servers write parents before children.
        newest_ns: [n] mtime of each group's newest object.
        """
        first_rows = np.full(len(self.actions), np.iinfo(np.int64).max)
        for block in self.survey.rows.blocks:
            np.minimum.at(first_rows, block.owners, block.values)
        yield from self._works(np.lexsort((first_rows, newest_ns)))

    def _works(self, order: IntArray) -> Iterator[PageWork]:
        for action in _ORDER:
            items = order[self.actions[order] == action]
            if len(items):
                yield PageWork(self.survey, items, action)
