"""Migration requests, and plans with an action for each page group of the source."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.checks.findings import combine
from hicachectl.checks.group import check_groups
from hicachectl.checks.registry import CheckInput
from hicachectl.checks.sizes import check_sizes
from hicachectl.move.batches import WRITING, Action, CopyOptions
from hicachectl.move.planning import plan_repair
from hicachectl.move.results import MOST_PROBLEMS
from hicachectl.move.survey import compare, decide
from hicachectl.move.work import PageWork, too_large
from hicachectl.pages.deployments import UNRESOLVED
from hicachectl.pages.group_table import WHOLE
from hicachectl.pages.groups import PageGroups
from hicachectl.pages.inventory import take_inventory
from hicachectl.pages.selection import EVERYTHING, Selection, select
from hicachectl.pages.unmatched import explain_selection
from hicachectl.requests.page_lists import NamedGroups
from hicachectl.verify.live_tables import check_tables, saved_tables

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    import numpy.typing as npt

    from hicachectl.backends.base import Store
    from hicachectl.formats.profile import Profile
    from hicachectl.move.journal import Progress
    from hicachectl.move.results import Problem
    from hicachectl.move.survey import IfExists, StorePair, Survey
    from hicachectl.move.trailers import TrailerPlan
    from hicachectl.pages.groups import BoolArray
    from hicachectl.pages.inventory import IntArray, Inventory
    from hicachectl.requests.files import PageList

# Groups left incomplete by an earlier run come first.
_ORDER = (Action.COMPLETE, Action.COPY, Action.COMPARE, Action.REPLACE)


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationRequest:
    """Pages to copy, and options of the migration.

    profile: of the source; None: only its keys are known, so every object keeps key and bytes.
    destination_profile: of the new deployment; None: the same as `profile`. pages: only these.
    partial, damaged: include groups that are not whole, or have findings of severity error.
    resume: continue from an earlier run's journal.
    """

    profile: Profile | None = None
    destination_profile: Profile | None = None
    selection: Selection = EVERYTHING
    pages: PageList | None = None
    grace_seconds: float = 60.0
    if_exists: IfExists = "skip"
    partial: bool = False
    damaged: bool = False
    resume: bool = False
    dry_run: bool = False
    space_check: bool = True
    options: CopyOptions = field(default_factory=CopyOptions)


@dataclass(slots=True)
class MigrationPlan:
    """Page groups of a source, with an action for each.

    actions:  for each survey, [n] the action of each group.
    remarks:  groups not copied, and why.
    too_large: number of groups that do not fit into the buffer. problems: the first of them.
    """

    inventory: Inventory
    groups: PageGroups
    surveys: list[Survey]
    actions: list[npt.NDArray[np.int8]] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    too_large: int = 0
    problems: list[Problem] = field(default_factory=list)

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
        objects = nbytes = 0
        for survey, actions in zip(self.surveys, self.actions, strict=True):
            for table, chosen in (
                (survey.lacking, np.isin(actions, WRITING) & (actions != Action.REPLACE)),
                (survey.wanted, actions == Action.REPLACE),
            ):
                objects += int(table.counts[chosen].sum())
                nbytes += int(table.sums[chosen].sum())
        return objects, nbytes

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

    def settle_existing(self, request: MigrationRequest, earlier: Progress | None) -> None:
        """Settle the actions of groups that the destination has whole.

        Groups that the journal lists as copied are not replaced again; verified groups are not
        compared again. A move compares all others before it removes them from the source. A resumed
        run with --verify compares groups that may not have been read back.
        """
        options = request.options
        compares = options.move or (options.verify and request.resume)
        for survey, actions in zip(self.surveys, self.actions, strict=True):
            verified: Collection[str] = ()
            if earlier is not None:
                name, verified = survey.route.name, earlier.verified[survey.route.name]
                reads = compares or request.if_exists == "verify"
                settled = _among(survey, verified if reads else earlier.copied[name])
                whole = decide(survey, actions != Action.NOTHING, "skip") == Action.SKIP
                actions[whole & settled] = Action.SKIP
            if compares:
                skipped = actions == Action.SKIP
                if not options.move:
                    skipped &= ~_among(survey, verified)
                actions[skipped] = Action.COMPARE

    def left_in_source(self, earlier: Progress) -> Iterator[tuple[Survey, IntArray]]:
        """Yield groups that an interrupted run compared and partly removed from the source.

        Their other objects may be removed if the destination still has all targets in the right
        size.
        """
        for survey, actions in zip(self.surveys, self.actions, strict=True):
            unfinished = _among(survey, earlier.unremoved(survey.route.name))
            unfinished &= actions == Action.NOTHING
            _, lacks, differs = compare(survey.touched, survey.there)
            items = np.flatnonzero(unfinished & ~lacks & ~differs & ~survey.strays)
            if len(items):
                yield survey, items


def plan_migration(
    stores: StorePair,
    request: MigrationRequest,
    trailers: TrailerPlan,
    on_listed: Callable[[int], None],
) -> MigrationPlan:
    """List both stores, and choose an action for each group."""
    source = stores.source
    # A move needs versions: objects rewritten since the listing must stay.
    columns = {"version"} & source.traits.columns if request.options.move else ()
    listed = take_inventory(source, request.profile, columns=columns, on_batch=on_listed)
    inventory = select(listed, request.selection)
    groups = PageGroups(inventory)
    surveys = [
        trailers.with_foreign(survey, inventory.objects)
        for survey in stores.survey(inventory, groups, on_batch=on_listed)
    ]
    plan = MigrationPlan(inventory, groups, surveys, remarks=[*filter(None, [trailers.remark])])
    chosen = np.ones(len(groups), dtype=np.bool_)
    named = None if request.pages is None else NamedGroups(request.pages, groups)
    if named is not None:
        chosen &= named.chosen
    if not len(groups):
        plan.remarks.append(explain_selection(source, listed, request.selection))
    elif not chosen.any():
        plan.remarks.append("No page of SRC matches --pages-from; hicachectl ls lists its pages")

    unfit = np.zeros(len(groups), dtype=np.bool_)
    for survey in surveys:
        unfit[survey.groups] = survey.unfit
    reasons = [
        *_reasons(source, inventory, groups, request, [s.route.deployment_id for s in surveys]),
        (unfit, "with objects of unknown or wrong size; hicachectl verify lists wrong sizes"),
        *trailers.refused(inventory, groups),
    ]
    for behind, why in reasons:
        count = int((chosen & behind).sum())
        chosen &= ~behind
        if count:
            plan.remarks.append(f"Not copied: {_counted(count, 'page')} {why}")
    plan.actions = [decide(survey, chosen[survey.groups], request.if_exists) for survey in surveys]
    if count := sum(
        int((s.foreign & (a == Action.CONFLICT)).sum())
        for s, a in zip(surveys, plan.actions, strict=True)
    ):
        plan.remarks.append(
            f"In conflict: {_counted(count, 'page')} of which {stores.destination.url} has objects "
            "that plug-in servers refuse: of other weights, dtype or layout, from before a server "
            "cleared the store, or without a trailer; --if-exists overwrite replaces them"
        )
    if foreign := int(inventory.is_foreign.sum()):
        why = "with unknown keys; hicachectl verify lists them"
        plan.remarks.append(f"Not copied: {_counted(foreign, 'object')} {why}")
    if named is not None and named.unmatched:
        rows = _counted(named.unmatched, "row")
        plan.remarks.append(f"--pages-from: {rows} without a matching group in SRC")
    return plan


def _reasons(
    source: Store,
    inventory: Inventory,
    groups: PageGroups,
    request: MigrationRequest,
    deployments: Collection[int],
) -> Iterator[tuple[BoolArray, str]]:
    """Yield groups not to copy, [groups], and the reason. deployments: to copy."""
    ambiguous = groups.deployment_ids == UNRESOLVED
    others = ~np.isin(groups.deployment_ids, list(deployments)) & ~ambiguous
    yield others, "written by another deployment than the profile's"
    yield ambiguous, "with ambiguous keys; hicachectl ls describes them"
    in_flight = _in_flight(groups, request.grace_seconds)
    yield in_flight, "still being written; run again to copy them"
    if not request.partial:
        yield groups.states != WHOLE, "not whole; --include-partial copies them"
    if not request.damaged:
        damaged = _damaged(source, inventory, groups, in_flight)
        yield damaged, "with errors; hicachectl verify lists them, --include-damaged copies them"


def _in_flight(groups: PageGroups, grace_seconds: float) -> BoolArray:
    """Return which groups a server may be writing: young and not whole.

    A store without times has no young groups.
    """
    age = time.time_ns() - groups.newest_ns
    young: BoolArray = (age < int(grace_seconds * 1e9)) & (groups.states != WHOLE)
    return young


def _damaged(
    source: Store, inventory: Inventory, groups: PageGroups, in_flight: BoolArray
) -> BoolArray:
    """Return which groups have errors visible in a listing: [groups]."""
    tables, _ = check_tables(source, saved_tables(source), grace_seconds=0)
    given = CheckInput(store=source, inventory=inventory, groups=groups, in_flight=in_flight)
    found = combine([*check_groups(given), *check_sizes(given), *tables])
    damaged = np.zeros(len(groups), dtype=np.bool_)
    damaged[plan_repair(groups, found).groups] = True
    return damaged


def _among(survey: Survey, pages: Collection[str]) -> BoolArray:
    named = pa.array(sorted(pages), pa.string())
    found: BoolArray = pc.is_in(survey.pages, value_set=named).to_numpy(zero_copy_only=False)
    return found.copy()


def _counted(count: int, thing: str) -> str:
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"
