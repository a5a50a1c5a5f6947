"""What a migration has to do: what was asked for, and every group's turn."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from hicachectl.checks.findings import combine
from hicachectl.checks.group import check_groups
from hicachectl.checks.sizes import check_sizes
from hicachectl.move.carrying import MOST_PROBLEMS, Manner, Order
from hicachectl.move.decisions import (
    WRITING,
    Action,
    IfExists,
    Problem,
    decide,
    unreadable,
)
from hicachectl.move.parcels import bytes_in_memory, too_large
from hicachectl.move.planning import plan_repair
from hicachectl.move.survey import Survey, survey_destination, survey_source
from hicachectl.pages.deployments import UNRESOLVED
from hicachectl.pages.group_table import WHOLE
from hicachectl.pages.groups import PageGroups
from hicachectl.pages.inventory import Inventory, take_inventory
from hicachectl.pages.selection import EVERYTHING, Selection, select
from hicachectl.pages.unmatched import explain_selection
from hicachectl.requests.page_lists import NamedGroups
from hicachectl.verify.live_tables import check_tables, saved_tables

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy.typing as npt

    from hicachectl.backends.base import Store
    from hicachectl.formats.profile import Profile
    from hicachectl.move.routes import Route
    from hicachectl.pages.groups import BoolArray
    from hicachectl.pages.inventory import IntArray
    from hicachectl.requests.files import PageList


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to move, and how.

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
    manner: Manner = field(default_factory=Manner)


# What is half done at the destination first; then by age.
_TURNS = (Action.COMPLETE, Action.COPY, Action.COMPARE, Action.REPLACE)


@dataclass(slots=True)
class Agenda:
    """All that is to be done: the source, how it becomes the destination's, and each group's turn.

    actions: for each survey, of each of its groups. Groups that stay behind: damaged, with errors;
    unfit, of sizes that their route does not take; not_whole; in_flight; elsewhere, of other
    deployments; ambiguous, of keys that can be read in several ways; too_large, which do not fit
    into the buffer; problems: the first of these. foreign: objects whose keys are not understood.
    unmatched: listed rows that name no group of the source. nothing: why no page was chosen.
    """

    inventory: Inventory
    groups: PageGroups
    surveys: list[Survey]
    actions: list[npt.NDArray[np.int8]]
    damaged: int = 0
    unfit: int = 0
    not_whole: int = 0
    in_flight: int = 0
    elsewhere: int = 0
    ambiguous: int = 0
    foreign: int = 0
    unmatched: int = 0
    nothing: str = ""
    too_large: int = 0
    problems: list[Problem] = field(default_factory=list)

    def count(self, *wanted: Action) -> int:
        """Count the groups with one of some actions."""
        return sum(int(np.isin(actions, wanted).sum()) for actions in self.actions)

    def orders(self) -> Iterator[Order]:
        """Give every group its turn: those first that an earlier run left half done.

        Then by age, the oldest first, as their writer made them: parents before children.
        """
        for survey, actions in zip(self.surveys, self.actions, strict=True):
            turn = np.lexsort((_first_rows(survey), self.groups.newest_ns[survey.groups]))
            for action in _TURNS:
                items = turn[actions[turn] == action]
                if len(items):
                    yield Order(survey, items, action)

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

    def leave_too_large(self, manner: Manner) -> None:
        """Leave out the groups that need more memory than --buffer-bytes, and note each."""
        for survey, actions in zip(self.surveys, self.actions, strict=True):
            for action in _TURNS:
                items = np.flatnonzero(actions == action)
                nbytes = bytes_in_memory(survey, items, action, reads_back=manner.verify)
                large = nbytes > manner.buffer_bytes
                actions[items[large]] = Action.NOTHING
                self.too_large += int(large.sum())
                for item, need in zip(items[large].tolist(), nbytes[large].tolist(), strict=True):
                    if len(self.problems) == MOST_PROBLEMS:
                        break
                    page = survey.pages[item].as_py()
                    self.problems.append(too_large(page, need, manner.buffer_bytes))

    def remarks(self) -> list[str]:
        """Say what stays behind, and why."""
        kinds = (
            (self.elsewhere, "of other deployments than the profile's"),
            (self.ambiguous, "with ambiguous keys, which hicachectl ls describes"),
            (self.in_flight, "being written; run again for them"),
            (self.not_whole, "not whole (--include-partial)"),
            (self.damaged, "with errors that hicachectl verify lists (--include-damaged)"),
            (self.unfit, "with objects whose size is unknown or not the profile's"),
        )
        said = [self.nothing] if self.nothing else []
        said += [f"left behind: {_counted(count, 'page')} {text}" for count, text in kinds if count]
        if self.foreign:
            text = "whose keys are not understood; hicachectl verify lists them"
            said.append(f"left behind: {_counted(self.foreign, 'object')} {text}")
        if self.unmatched:
            said.append(f"{_counted(self.unmatched, 'row')} of --pages-from name no group of SRC")
        return said


def make_agenda(
    source: Store,
    destination: Store,
    request: Request,
    routes_of: Callable[[Inventory], list[Route]],
    grammar: str,
    on_listed: Callable[[int], None],
) -> Agenda:
    """List both stores, and find what is to be done with each group."""
    listed = take_inventory(source, request.profile, on_batch=on_listed)
    inventory = select(listed, request.selection)
    groups = PageGroups(inventory)
    surveys = survey_source(inventory, groups, routes_of(inventory))
    surveys = survey_destination(destination, surveys, grammar, on_batch=on_listed)
    chosen = np.ones(len(groups), dtype=np.bool_)
    named = None if request.pages is None else NamedGroups(request.pages, groups)
    if named is not None:
        chosen &= named.chosen
    routed = np.isin(groups.deployment_ids, [s.route.deployment_id for s in surveys])
    agenda = Agenda(inventory, groups, surveys, [])
    agenda.unmatched = 0 if named is None else named.unmatched
    agenda.foreign = int(inventory.is_foreign.sum())
    agenda.ambiguous = int((chosen & (groups.deployment_ids == UNRESOLVED)).sum())
    agenda.elsewhere = int((chosen & ~routed).sum()) - agenda.ambiguous
    if not len(groups):
        agenda.nothing = explain_selection(source, listed, request.selection)
    elif not chosen.any():
        agenda.nothing = "nothing matches --pages-from"
    chosen &= routed
    in_flight = _in_flight(groups, request.grace_seconds)
    agenda.in_flight = int((chosen & in_flight).sum())
    chosen &= ~in_flight
    if not request.partial:
        agenda.not_whole = int((chosen & (groups.states != WHOLE)).sum())
        chosen &= groups.states == WHOLE
    if not request.damaged:
        damaged = _damaged(source, inventory, groups, in_flight)
        agenda.damaged = int((chosen & damaged).sum())
        chosen &= ~damaged
    for survey in surveys:
        wanted = chosen[survey.groups]
        agenda.unfit += int((wanted & unreadable(survey)).sum())
        agenda.actions.append(decide(survey, wanted, request.if_exists))
    return agenda


def _first_rows(survey: Survey) -> IntArray:
    """Find the first of each group's sources in the listing: [n]; the largest number without."""
    none = np.iinfo(np.int64).max
    first = np.full(survey.rows.count, none)
    for block in survey.rows.blocks:
        np.minimum.at(first, block.owners, block.values)
    return first


def _in_flight(groups: PageGroups, grace_seconds: float) -> BoolArray:
    """Say which groups a server may be writing: young ones, where the store has times."""
    age = time.time_ns() - groups.newest_ns
    young: BoolArray = (age < int(grace_seconds * 1e9)) & (groups.states != WHOLE)
    return young


def _damaged(
    source: Store, inventory: Inventory, groups: PageGroups, in_flight: BoolArray
) -> BoolArray:
    """Say which groups have findings of severity error that listing can tell: [groups]."""
    tables, _ = check_tables(source, saved_tables(source), grace_seconds=0)
    found = combine(
        [
            *check_groups(inventory, groups, in_flight),
            *check_sizes(inventory, groups, in_flight, source.grammar),
            *tables,
        ]
    )
    damaged = np.zeros(len(groups), dtype=np.bool_)
    damaged[plan_repair(groups, found).groups] = True
    return damaged


def _counted(count: int, thing: str) -> str:
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"
