"""Plans of migrations: an action for each page group of the source."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.move.batches import WRITING, Action
from hicachectl.move.results import MOST_PROBLEMS, GroupStatus
from hicachectl.move.survey import compare, conflicts, decide
from hicachectl.move.work import PageWork, too_large
from hicachectl.pages.group_table import ABSENT

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    import numpy.typing as npt

    from hicachectl.move.batches import CopyOptions
    from hicachectl.move.journal import Progress
    from hicachectl.move.migration import MigrationRequest
    from hicachectl.move.migration_outcome import MigrationFacts
    from hicachectl.move.results import MoveResult, Problem
    from hicachectl.move.survey import Survey
    from hicachectl.move.work import PageBatch
    from hicachectl.pages.groups import BoolArray, PageGroups
    from hicachectl.pages.inventory import IntArray, Inventory

# Groups left incomplete by an earlier run come first.
_ORDER = (Action.COMPLETE, Action.COPY, Action.COMPARE, Action.REPLACE)
_ACTIVE = (*WRITING, Action.COMPARE)

KEPT = pa.schema(
    [
        pa.field("route", pa.int32(), nullable=False),
        pa.field("page", pa.string(), nullable=False),
        pa.field("action", pa.int8(), nullable=False),
        pa.field("objects", pa.int64(), nullable=False),
        pa.field("nbytes", pa.int64(), nullable=False),
    ]
)


class KeptPlan(NamedTuple):
    """A plan as recorded before its first change, for runs that continue it.

    facts: as planned. groups: of KEPT, the groups with an action; `route` counts the surveys.
    """

    facts: MigrationFacts
    groups: pa.Table

    def active(self, surveys: Iterable[Survey]) -> list[BoolArray]:
        """Return which groups of each survey are to be copied or compared: [n] each."""
        return [planned.active for planned in self.planned(surveys)]

    def planned(self, surveys: Iterable[Survey]) -> list[Planned]:
        """Return what the plan says of the groups of each survey."""
        return [self._of(number, survey) for number, survey in enumerate(surveys)]

    def _of(self, number: int, survey: Survey) -> Planned:
        mine = self.groups.filter(pc.equal(self.groups.column("route"), number))
        at = pc.index_in(survey.pages, value_set=mine.column("page").combine_chunks())
        rows = at.fill_null(ABSENT).to_numpy()
        columns = (
            np.append(mine.column(name).to_numpy(), 0)[np.where(rows == ABSENT, -1, rows)]
            for name in ("action", "objects", "nbytes")
        )
        return Planned(*columns)


class Planned(NamedTuple):
    """Actions, and objects and bytes to write, for n groups of a survey: [n] each."""

    actions: npt.NDArray[np.int8]
    objects: IntArray
    nbytes: IntArray

    @classmethod
    def of(cls, survey: Survey, actions: npt.NDArray[np.int8]) -> Planned:
        """Return what the actions would write now."""
        writes, replaces = np.isin(actions, WRITING), actions == Action.REPLACE
        counts = np.where(replaces, survey.wanted.counts, survey.lacking.counts) * writes
        sums = np.where(replaces, survey.wanted.sums, survey.lacking.sums) * writes
        return cls(actions.copy(), counts, sums)

    @property
    def active(self) -> BoolArray:
        """Which groups are to be copied or compared: [n]."""
        return np.isin(self.actions, _ACTIVE)

    def done(self, actions: npt.NDArray[np.int8]) -> BoolArray:
        """Return which groups earlier runs finished. actions: what is left to do: [n]."""
        done: BoolArray = self.active & (actions == Action.SKIP)
        return done


@dataclass(slots=True)
class MigrationPlan:
    """Page groups of a source, with an action for each.

    facts:    numbers of groups not chosen, by reason.
    actions:  for each survey, [n] the action of each group.
    planned:  for each survey, what was planned before the first change. A group planned to be
        written whose action is SKIP was written by an earlier run.
    too_large: number of groups that do not fit into the buffer.
    problems: the first groups that do not fit, or are in conflict.
    statuses: for each survey, [n] the status of each group after its last batch; -1 before.
    """

    inventory: Inventory
    groups: PageGroups
    surveys: list[Survey]
    facts: MigrationFacts
    actions: list[npt.NDArray[np.int8]] = field(default_factory=list)
    planned: list[Planned] = field(default_factory=list)
    too_large: int = 0
    problems: list[Problem] = field(default_factory=list)
    statuses: list[npt.NDArray[np.int8]] = field(init=False)

    def __post_init__(self) -> None:
        self.statuses = [np.full(len(one.groups), -1, dtype=np.int8) for one in self.surveys]

    @property
    def refused(self) -> int:
        """Number of groups in conflict with objects that servers refuse."""
        return sum(
            int((survey.foreign & (actions == Action.CONFLICT)).sum())
            for survey, actions, _ in self._each()
        )

    def count(self, *wanted: Action) -> int:
        """Return the number of groups with these actions."""
        return sum(int(np.isin(actions, wanted).sum()) for actions in self.actions)

    def works(self) -> Iterator[PageWork]:
        """Yield the work of all groups, one action after another.

        Within an action, the oldest groups come first: servers write parents before children.
        """
        for survey, actions in zip(self.surveys, self.actions, strict=True):
            first_rows = np.full(survey.rows.count, np.iinfo(np.int64).max)
            for block in survey.rows.blocks:
                np.minimum.at(first_rows, block.owners, block.values)
            order = np.lexsort((first_rows, self.groups.newest_ns[survey.groups]))
            for action in _ORDER:
                items = order[actions[order] == action]
                if len(items):
                    yield PageWork(survey, items, action)

    def demand(self) -> tuple[int, int]:
        """Return the number of objects and of bytes to write."""
        now = [Planned.of(*pair) for pair in zip(self.surveys, self.actions, strict=True)]
        return sum(int(p.objects.sum()) for p in now), sum(int(p.nbytes.sum()) for p in now)

    def leave_too_large(self, options: CopyOptions) -> None:
        """Leave out groups larger than --buffer-bytes; add a problem for each."""
        for survey, actions in zip(self.surveys, self.actions, strict=True):
            for action in _ORDER:
                work = PageWork(survey, np.flatnonzero(actions == action), action)
                nbytes = work.bytes_in_memory(verify=options.verify)
                large = nbytes > options.buffer_bytes
                items, needs = work.items[large], nbytes[large].tolist()
                actions[items] = Action.NOTHING
                self.too_large += len(items)
                room = MOST_PROBLEMS - len(self.problems)
                for page, need in zip(
                    survey.pages.take(pa.array(items[:room])), needs, strict=False
                ):
                    self.problems.append(too_large(page.as_py(), need, options.buffer_bytes))

    def name_conflicts(self) -> None:
        """Add a problem for each group in conflict."""
        for survey, actions in zip(self.surveys, self.actions, strict=True):
            room = MOST_PROBLEMS - len(self.problems)
            self.problems += conflicts(survey, np.flatnonzero(actions == Action.CONFLICT))[:room]

    def settle_existing(
        self, request: MigrationRequest, earlier: Progress | None, *, continues: bool
    ) -> None:
        """Settle the actions of groups that the destination has whole.

        Groups that the journal lists as copied are not replaced again; verified groups are not
        compared again. A move compares all others before it removes them from the source. With
        --verify, a run that continues another compares groups that may not have been read back.
        """
        options = request.options
        compares = options.move or (options.verify and continues)
        for survey, actions in zip(self.surveys, self.actions, strict=True):
            verified: Collection[str] = ()
            if earlier is not None:
                name, verified = (
                    survey.route.journal_name,
                    earlier.verified[survey.route.journal_name],
                )
                reads = compares or request.if_exists == "verify"
                settled = _among(survey, verified if reads else earlier.copied[name])
                actions[_whole(survey, actions != Action.NOTHING) & settled] = Action.SKIP
            if compares:
                skipped = actions == Action.SKIP
                if not options.move:
                    skipped &= ~_among(survey, verified)
                actions[skipped] = Action.COMPARE

    def follow(self, kept: KeptPlan, earlier: Progress | None) -> None:
        """Change only what the kept plan changes.

        Groups get SKIP that earlier runs compared and left whole, or removed from the source.
        """
        self.planned = kept.planned(self.surveys)
        for survey, actions, planned in self._each():
            active = planned.active
            if earlier is not None:
                name = survey.route.journal_name
                done = _whole(survey, active) & _among(survey, earlier.verified[name])
                actions[done | _among(survey, earlier.removed[name])] = Action.SKIP
            actions[~active] = planned.actions[~active]

    def keep(self) -> KeptPlan:
        """Return the plan as a record."""
        tables = [KEPT.empty_table()]
        for number, (survey, _, planned) in enumerate(self._each()):
            items = np.flatnonzero(planned.actions != Action.NOTHING)
            routes = np.full(len(items), number, dtype=np.int32)
            pages = survey.pages.take(pa.array(items))
            columns = [routes, pages, *(column[items] for column in planned)]
            tables.append(pa.table(columns, schema=KEPT))
        return KeptPlan(self.facts, pa.concat_tables(tables))

    def left_in_source(self, earlier: Progress) -> Iterator[tuple[Survey, IntArray]]:
        """Yield groups that an interrupted run compared, and did not remove from the source.

        These are partly removed groups, and groups of a kept plan. Their objects may be removed if
        the destination still has all targets in the right size.
        """
        for survey, actions, planned in self._each():
            unfinished = _among(survey, earlier.unremoved(survey.route.journal_name))
            unfinished &= (actions == Action.NOTHING) | planned.done(actions)
            _, lacks, differs = compare(survey.touched, survey.there)
            items = np.flatnonzero(unfinished & ~lacks & ~differs & ~survey.strays)
            if len(items):
                yield survey, items

    def note(self, batch: PageBatch, result: MoveResult) -> None:
        """Remember the status of each group of a finished batch."""
        for survey, statuses in zip(self.surveys, self.statuses, strict=True):
            if survey.route is batch.survey.route:
                statuses[batch.items] = result.statuses

    def written_before(self) -> tuple[int, int, int]:
        """Return what earlier runs of a kept plan wrote of the groups that now are whole.

        Return the number of groups that this run did not write to, and of objects and bytes in all.
        """
        pages = objects = nbytes = 0
        for (survey, actions, planned), statuses in zip(self._each(), self.statuses, strict=True):
            begun = np.isin(planned.actions, WRITING)
            whole = begun & ((actions == Action.SKIP) | (statuses == GroupStatus.SAME))
            done = whole | (begun & (statuses == GroupStatus.DONE))
            now = Planned.of(survey, actions)
            pages += int(whole.sum())
            objects += int((planned.objects - now.objects)[done].sum())
            nbytes += int((planned.nbytes - now.nbytes)[done].sum())
        return pages, objects, nbytes

    def removed_before(self, earlier: Progress | None) -> int:
        """Return how many groups of a kept plan earlier runs removed from the source."""
        if earlier is None:
            return 0
        return sum(
            int(
                (
                    planned.done(actions)
                    & _among(survey, earlier.removed[survey.route.journal_name])
                ).sum()
            )
            for survey, actions, planned in self._each()
        )

    def _each(self) -> Iterator[tuple[Survey, npt.NDArray[np.int8], Planned]]:
        return zip(self.surveys, self.actions, self.planned, strict=True)


def _whole(survey: Survey, chosen: BoolArray) -> BoolArray:
    """Return which chosen groups the destination has whole: [n]."""
    return np.isin(decide(survey, chosen, "skip"), (Action.SKIP, Action.COMPARE))


def _among(survey: Survey, pages: Collection[str]) -> BoolArray:
    named = pa.array(sorted(pages), pa.string())
    found: BoolArray = pc.is_in(survey.pages, value_set=named).to_numpy(zero_copy_only=False)
    return found.copy()
