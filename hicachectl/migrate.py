"""Move a store's page groups to another store, as they are or as another deployment has them."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.checks.group import check_groups
from hicachectl.checks.sizes import check_sizes
from hicachectl.findings import combine
from hicachectl.formats.errors import StoreUnavailable, UsageError
from hicachectl.formats.transfer import transfer_plan
from hicachectl.groups import WHOLE, PageGroups
from hicachectl.inventory import Inventory, take_inventory
from hicachectl.migrating.carrying import Carrier, Manner, Order, Removal, Tally
from hicachectl.migrating.decisions import READING, Action, IfExists, decide, unreadable
from hicachectl.migrating.estimate import estimated_seconds
from hicachectl.migrating.journal import Journal, Progress, journal_path, read_journal
from hicachectl.migrating.routes import Route, planned_route, verbatim_routes
from hicachectl.migrating.survey import ABSENT, Survey, survey_destination, survey_source
from hicachectl.output import human_size
from hicachectl.planning import plan_repair
from hicachectl.selection import EVERYTHING, Selection, select
from hicachectl.table_checks import check_tables

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence
    from pathlib import Path

    import numpy.typing as npt

    from hicachectl.backends.base import Store
    from hicachectl.formats.profile import Profile
    from hicachectl.groups import BoolArray
    from hicachectl.migrating.delivery import Delivered, Problem

FULL = "destination full"
DEADLINE = "deadline"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to move, and how.

    profile: of the deployment that wrote the source; None: as far as its keys tell, and then
    every object keeps key and bytes. destination_profile: of what it is to become, None: the same.
    key_scheme: grammar of the keys to be written, None: the destination's own. pages: only these.
    partial, damaged: also groups that are not whole, or have findings of severity error.
    resume: go on from the journal of an earlier run.
    """

    profile: Profile | None = None
    destination_profile: Profile | None = None
    key_scheme: str | None = None
    selection: Selection = EVERYTHING
    pages: Collection[str] | None = None
    grace_seconds: float = 60.0
    if_exists: IfExists = "skip"
    partial: bool = False
    damaged: bool = False
    resume: bool = False
    dry_run: bool = False
    space_check: bool = True
    manner: Manner = field(default_factory=Manner)


@dataclass(slots=True)
class Outcome:
    """What a migration did, or would do.

    document: the members of the JSON contract. problems: conflicts and failures. remarks: what to
    know besides. journal: where its state is kept, where it is not complete.
    """

    document: dict[str, Any]
    problems: list[Problem]
    remarks: list[str]
    journal: Path | None = None

    @property
    def all_well(self) -> bool:
        """Whether nothing failed or conflicted, and the destination had room."""
        document = self.document
        troubled = document["failed"] or document["conflicts"]
        return not troubled and document["stopped_by"] != FULL


@dataclass(slots=True)
class _Agenda:
    """All that is to be done: the source, how it becomes the destination's, and each group's turn.

    actions: for each survey, of each of its groups. skipped, left: groups that the destination
    has, and that were not asked for or cannot be moved; damaged: those of them with errors.
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

    def count(self, *wanted: Action) -> int:
        """Count the groups with one of some actions."""
        return sum(int(np.isin(actions, wanted).sum()) for actions in self.actions)

    def orders(self) -> Iterator[Order]:
        """Give every group its turn: those first that an earlier run left half done.

        Then by age, the oldest first, as their writer made them: parents before children.
        """
        for survey, actions in zip(self.surveys, self.actions, strict=True):
            rows = np.where(survey.rows == ABSENT, np.iinfo(np.int64).max, survey.rows)
            first = rows.min(axis=1, initial=np.iinfo(np.int64).max)
            turn = np.lexsort((first, self.groups.newest_ns[survey.groups]))
            for action in (Action.COMPLETE, Action.COPY, Action.COMPARE, Action.REPLACE):
                items = turn[actions[turn] == action]
                if len(items):
                    yield Order(survey, items, action)

    def demand(self) -> tuple[int, int]:
        """Count objects and bytes that will be written."""
        objects = nbytes = 0
        for survey, actions in zip(self.surveys, self.actions, strict=True):
            writing = np.isin(actions, (Action.COPY, Action.COMPLETE, Action.REPLACE))
            absent = survey.there == ABSENT
            new = survey.needed & (absent | (actions == Action.REPLACE)[:, None])
            new &= writing[:, None]
            objects += int(new.sum())
            nbytes += int(survey.wanted_bytes[new].sum())
        return objects, nbytes


def migrate(
    source: Store,
    destination: Store,
    request: Request,
    *,
    on_listed: Callable[[int], None] = lambda objects: None,
    on_begun: Callable[[], None] = lambda: None,
    on_moved: Callable[[int, int], None] = lambda nbytes, total: None,
) -> Outcome:
    """Copy page groups from a store to another; what is there already stays.

    on_listed is told objects as they are listed, on_moved bytes as groups are done and how many
    there are in all; on_begun is called before anything is written. Raises UsageError,
    ProfileError and UnsupportedByBackend before that, StoreUnavailable for a lost store.
    Interrupted at any point, what was begun is finished or taken back, and the journal says how
    far it came.
    """
    started = time.monotonic()
    _refuse_what_is_lacking(source, destination, request)
    grammar = _grammar(source, destination, request)
    routes_of = _router(source, destination, grammar, request)  # refuses before anything is listed
    _tell_profiles(source, destination, request)
    agenda = _agenda(source, destination, request, routes_of, grammar, on_listed)
    identity = _identity(source, destination, request, grammar)
    path = journal_path(identity)
    progress = read_journal(path, identity)
    earlier = progress if request.resume else None
    _settle_existing(agenda, request, earlier)
    remarks = _remarks(agenda, request, progress)
    objects, nbytes = agenda.demand()
    if request.dry_run:
        _lacks_space(destination, nbytes, refuse=request.space_check)
        tally = Tally(pages=agenda.count(*READING), objects=objects, nbytes=nbytes)
        outcome = _outcome(source, destination, agenda, tally, started, earlier, remarks)
        outcome.document["estimated_seconds"] = estimated_seconds(
            source, agenda.inventory, agenda.orders(), request.manner, nbytes
        )
        return outcome
    with Journal(
        path,
        identity,
        earlier=progress,
        fresh=earlier is None,
        durable=request.manner.move,  # only what is deleted from the source hangs on it
    ) as journal:
        on_begun()
        destination.own_temporaries(journal.owner, sweep=progress is not None)
        tight = _lacks_space(destination, nbytes, refuse=request.space_check)
        recovered = _finish_removals(source, agenda, request, earlier, journal)
        carrier = Carrier(
            source, agenda.inventory, agenda.groups, destination, request.manner, journal
        )
        total = max(nbytes, 1)

        def on_done(delivered: Delivered) -> None:
            on_moved(delivered.nbytes, total)

        tally = carrier.carry(agenda.orders(), on_done=on_done)
        tally.moved += recovered
        kept = not tally.complete or bool(tally.failed)
        if not kept:
            journal.end()
    if destination.evicts and (tight or tally.full):
        remarks.append(
            f"{destination.url}: has not the room, and evicts to make some: what was copied first "
            "may be gone again"
        )
    outcome = _outcome(source, destination, agenda, tally, started, earlier, remarks)
    outcome.journal = path if kept else None
    return outcome


def _refuse_what_is_lacking(source: Store, destination: Store, request: Request) -> None:
    if not destination.supports_writes:
        raise UsageError(f"{destination.url}: cannot be written to")
    if request.manner.move and not source.supports_deletes:
        raise UsageError(f"{source.url}: --move: its objects cannot be deleted; copy without it")


def _grammar(source: Store, destination: Store, request: Request) -> str:
    """Name the grammar of what will be written, and tell the destination."""
    grammar = request.key_scheme
    if grammar is None:
        grammar = source.grammar if destination.open_grammar else destination.grammar
    destination.use_grammar(grammar)
    return grammar


def _transforms(source: Store, grammar: str, request: Request) -> bool:
    """Tell whether objects are to get other keys or bytes."""
    changed = request.destination_profile not in (None, request.profile)
    return changed or grammar != source.grammar


def _router(
    source: Store, destination: Store, grammar: str, request: Request
) -> Callable[[Inventory], list[Route]]:
    """Decide how the source's deployments become the destination's, once it is listed."""
    same = source.url == destination.url
    if not _transforms(source, grammar, request):
        if same:
            raise UsageError(f"{source.url}: source and destination are the same")
        return lambda inventory: list(verbatim_routes(inventory.table.deployments))
    profile = request.profile
    if profile is None or profile.inferred:
        raise UsageError(
            f"{source.url}: keys or bytes are to change, and only a profile says what they mean: "
            "give --profile, or --model-config"
        )
    target = request.destination_profile or profile
    plan = transfer_plan(profile, source.grammar, target, grammar)
    old, new = ({o.coordinate for o in objects} for objects in (plan.sources, plan.destinations))
    if same and old & new:
        raise UsageError(
            f"{source.url}: what is written would get keys of what is read; migrate to another "
            "store, or to another --to-model or --to-tag"
        )
    return lambda inventory: [planned_route(inventory.table.deployments[0], plan, grammar)]


def _tell_profiles(source: Store, destination: Store, request: Request) -> None:
    target = request.destination_profile or request.profile
    if target is not None:
        destination.use_profile(target)


def _agenda(
    source: Store,
    destination: Store,
    request: Request,
    routes_of: Callable[[Inventory], list[Route]],
    grammar: str,
    on_listed: Callable[[int], None],
) -> _Agenda:
    """List both stores, and find what is to be done with each group."""
    listed = take_inventory(source, request.profile, on_batch=on_listed)
    inventory = select(listed, request.selection)
    groups = PageGroups(inventory)
    surveys = [survey_source(inventory, groups, route) for route in routes_of(inventory)]
    survey_destination(destination, surveys, grammar, on_batch=on_listed)
    chosen = _named(groups, request.pages)
    routed = np.isin(groups.deployment_ids, [s.route.deployment_id for s in surveys])
    agenda = _Agenda(inventory, groups, surveys, [])
    agenda.elsewhere = int((chosen & ~routed).sum())
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


def _named(groups: PageGroups, pages: Collection[str] | None) -> BoolArray:
    if pages is None:
        return np.ones(len(groups), dtype=np.bool_)
    wanted = pa.array(sorted(pages), pa.string())
    named: BoolArray = pc.is_in(groups.pages, value_set=wanted).to_numpy(zero_copy_only=False)
    return named.copy()


def _in_flight(groups: PageGroups, grace_seconds: float) -> BoolArray:
    """Say which groups a server may be writing: young ones, where the store has times."""
    age = time.time_ns() - groups.newest_ns
    young: BoolArray = (age < int(grace_seconds * 1e9)) & (groups.states != WHOLE)
    return young


def _damaged(
    source: Store, inventory: Inventory, groups: PageGroups, in_flight: BoolArray
) -> BoolArray:
    """Say which groups have findings of severity error that listing can tell: [groups]."""
    tables, _ = check_tables(source, source.table_state(), grace_seconds=0)
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


def _settle_existing(agenda: _Agenda, request: Request, earlier: Progress | None) -> None:
    """Compare what is there already, where it would else be taken for verified.

    That is before it is deleted from the source, and what an interrupted run may have written
    without reading it back.
    """
    manner = request.manner
    if not (manner.move or (manner.verify and request.resume)):
        return
    for survey, actions in zip(agenda.surveys, agenda.actions, strict=True):
        skipped = actions == Action.SKIP
        if earlier is not None:
            done = pa.array(sorted(earlier.unremoved(survey.route.name)), pa.string())
            skipped &= ~pc.is_in(survey.pages, value_set=done).to_numpy(zero_copy_only=False)
        actions[skipped] = Action.COMPARE


def _finish_removals(
    source: Store,
    agenda: _Agenda,
    request: Request,
    earlier: Progress | None,
    journal: Journal,
) -> int:
    """Delete from the source what an interrupted run had moved and not yet deleted.

    Only where the destination still has all that the source has a part of.
    """
    if earlier is None or not request.manner.move:
        return 0
    removal = Removal(source, agenda.inventory, agenda.groups)
    count = 0
    for survey, actions in zip(agenda.surveys, agenda.actions, strict=True):
        name = survey.route.name
        pages = pa.array(sorted(earlier.unremoved(name)), pa.string())
        moved = pc.is_in(survey.pages, value_set=pages).to_numpy(zero_copy_only=False)
        lacking = (survey.touched & (survey.there == ABSENT)).any(axis=1)
        items = np.flatnonzero(moved & ~lacking & ~survey.strays)
        if len(items):
            removed, _ = removal.remove(survey, items)
            journal.removed(name, removed)
            count += len(removed)
        actions[items] = Action.NOTHING
    return count


def _lacks_space(destination: Store, nbytes: int, *, refuse: bool) -> bool:
    """Say whether a destination lacks the room; refuse: raise StoreUnavailable then."""
    free = destination.free_bytes()
    if free is None or nbytes <= free:
        return False
    if refuse:
        raise StoreUnavailable(
            f"{destination.url}: {human_size(nbytes)} to write, {human_size(free)} free; choose "
            "fewer pages (--match, --pages-from), make room, or give --no-space-check"
        )
    return True


def _identity(source: Store, destination: Store, request: Request, grammar: str) -> dict[str, Any]:
    """Say what makes two runs the same migration."""
    target = request.destination_profile or request.profile
    return {
        "source": source.url,
        "destination": destination.url,
        "grammar": grammar,
        "profile": None if target is None else repr(target),
        "move": request.manner.move,
    }


def _remarks(agenda: _Agenda, request: Request, progress: Progress | None) -> list[str]:
    remarks = []
    for count, text in (
        (agenda.elsewhere, "are of other deployments than the profile's"),
        (agenda.in_flight, "are being written; run again for them"),
        (agenda.not_whole, "are not whole (--include-partial)"),
        (agenda.damaged, "have errors that hicachectl verify lists (--include-damaged)"),
        (agenda.unfit, "have objects whose size is unknown or not the profile's"),
    ):
        if count:
            remarks.append(f"left behind: {count} pages {text}")
    if progress is not None and not request.resume:
        remarks.append(
            f"an earlier run of this migration did not end ({progress.pages} pages were copied); "
            "what it copied is not copied again, and --resume would have gone on from its journal"
        )
    return remarks


def _outcome(
    source: Store,
    destination: Store,
    agenda: _Agenda,
    tally: Tally,
    started: float,
    earlier: Progress | None,
    remarks: Sequence[str],
) -> Outcome:
    conflicts = agenda.count(Action.CONFLICT)
    stopped_by = FULL if tally.full else None if tally.complete else DEADLINE
    document = {
        "source": source.url,
        "destination": destination.url,
        "pages": tally.pages,
        "objects": tally.objects,
        "bytes": tally.nbytes,
        "skipped": agenda.count(Action.SKIP) + tally.same,
        "gone": tally.gone,
        "conflicts": tally.conflicts + conflicts,
        "failed": tally.failed,
        "moved": tally.moved,
        "seconds": round(time.monotonic() - started, 3),
        "resumed": 0 if earlier is None else earlier.pages,
        "complete": tally.complete,
        "stopped_by": stopped_by,
        "problems": [asdict(problem) for problem in tally.problems],
    }
    return Outcome(document, tally.problems, [*remarks, *source.remarks])
