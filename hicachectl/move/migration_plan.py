"""What a migration is asked to do, and what is done with each page group of its source."""

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
    from hicachectl.pages.groups import BoolArray
    from hicachectl.pages.inventory import IntArray, Inventory
    from hicachectl.requests.files import PageList

# What an earlier run left half done at the destination comes first.
_ORDER = (Action.COMPLETE, Action.COPY, Action.COMPARE, Action.REPLACE)


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationRequest:
    """What to copy, and how.

    profile: of the deployment that wrote the source; None: as far as its keys tell, and then
    every object keeps key and bytes. destination_profile: of what it is to become, None: the same.
    pages: only these.
    partial, damaged: also groups that are not whole, or have findings of severity error.
    resume: go on from the journal of an earlier run.
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
    """The page groups of a source, and what is done with each.

    actions:  for each survey [n] the action of each of its groups.
    remarks:  what stays behind, and why.
    too_large, problems: groups that do not fit into the buffer, and the first of them.
    """

    inventory: Inventory
    groups: PageGroups
    surveys: list[Survey]
    actions: list[npt.NDArray[np.int8]] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    too_large: int = 0
    problems: list[Problem] = field(default_factory=list)

    def count(self, *wanted: Action) -> int:
        """Count the groups with one of some actions."""
        return sum(int(np.isin(actions, wanted).sum()) for actions in self.actions)

    def works(self) -> Iterator[PageWork]:
        """Give every group its turn: those first that an earlier run left half done.

        Then by age, the oldest first, as their writer made them: parents before children.
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
        """Count objects and bytes that will be written."""
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
        """Leave out the groups that need more memory than --buffer-bytes, and note each."""
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

        What the journal says was copied (and compared, where that is asked for) is not replaced
        or compared again. What is there for another reason is compared before it is removed from
        the source, and so is what an interrupted run may have written without reading it back.
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
        """List the groups that an interrupted run has removed from the source in part.

        They were compared before; the rest of them is removed where the destination still has all
        that is made of them, in its size.
        """
        for survey, actions in zip(self.surveys, self.actions, strict=True):
            unfinished = _among(survey, earlier.unremoved(survey.route.name))
            unfinished &= actions == Action.NOTHING
            _, lacks, differs = compare(survey.touched, survey.there)
            items = np.flatnonzero(unfinished & ~lacks & ~differs & ~survey.strays)
            if len(items):
                yield survey, items


def plan_migration(
    stores: StorePair, request: MigrationRequest, on_listed: Callable[[int], None]
) -> MigrationPlan:
    """List both stores, and decide what is done with each group."""
    source = stores.source
    # What is removed from the source is told by its version from what a server wrote since.
    columns = {"version"} & source.traits.columns if request.options.move else ()
    listed = take_inventory(source, request.profile, columns=columns, on_batch=on_listed)
    inventory = select(listed, request.selection)
    groups = PageGroups(inventory)
    surveys = stores.survey(inventory, groups, on_batch=on_listed)
    plan = MigrationPlan(inventory, groups, surveys)
    chosen = np.ones(len(groups), dtype=np.bool_)
    named = None if request.pages is None else NamedGroups(request.pages, groups)
    if named is not None:
        chosen &= named.chosen
    if not len(groups):
        plan.remarks.append(explain_selection(source, listed, request.selection))
    elif not chosen.any():
        plan.remarks.append("nothing matches --pages-from")

    unfit = np.zeros(len(groups), dtype=np.bool_)
    for survey in surveys:
        unfit[survey.groups] = survey.unfit
    reasons = [
        *_reasons(source, inventory, groups, request, [s.route.deployment_id for s in surveys]),
        (unfit, "with objects whose size is unknown or not the profile's"),
    ]
    for behind, why in reasons:
        count = int((chosen & behind).sum())
        chosen &= ~behind
        if count:
            plan.remarks.append(f"left behind: {_counted(count, 'page')} {why}")
    plan.actions = [decide(survey, chosen[survey.groups], request.if_exists) for survey in surveys]
    if foreign := int(inventory.is_foreign.sum()):
        why = "whose keys are not understood; hicachectl verify lists them"
        plan.remarks.append(f"left behind: {_counted(foreign, 'object')} {why}")
    if named is not None and named.unmatched:
        rows = _counted(named.unmatched, "row")
        plan.remarks.append(f"{rows} of --pages-from name no group of SRC")
    return plan


def _reasons(
    source: Store,
    inventory: Inventory,
    groups: PageGroups,
    request: MigrationRequest,
    deployments: Collection[int],
) -> Iterator[tuple[BoolArray, str]]:
    """Give the groups that stay behind, [groups] each, and why. deployments: those of routes."""
    ambiguous = groups.deployment_ids == UNRESOLVED
    others = ~np.isin(groups.deployment_ids, list(deployments)) & ~ambiguous
    yield others, "of other deployments than the profile's"
    yield ambiguous, "with ambiguous keys, which hicachectl ls describes"
    in_flight = _in_flight(groups, request.grace_seconds)
    yield in_flight, "being written; run again for them"
    if not request.partial:
        yield groups.states != WHOLE, "not whole (--include-partial)"
    if not request.damaged:
        damaged = _damaged(source, inventory, groups, in_flight)
        yield damaged, "with errors that hicachectl verify lists (--include-damaged)"


def _in_flight(groups: PageGroups, grace_seconds: float) -> BoolArray:
    """Return which groups a server may be writing: young ones, where the store has times."""
    age = time.time_ns() - groups.newest_ns
    young: BoolArray = (age < int(grace_seconds * 1e9)) & (groups.states != WHOLE)
    return young


def _damaged(
    source: Store, inventory: Inventory, groups: PageGroups, in_flight: BoolArray
) -> BoolArray:
    """Return which groups have findings of severity error that listing can tell: [groups]."""
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
