"""Put the pages that are worth having into a store, the most valuable first."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.chains import raw_pages
from hicachectl.choosing import WRITING, Choice, arriving_bytes
from hicachectl.formats.errors import UnsupportedByBackend, UsageError
from hicachectl.formats.transfer import transfer_plan
from hicachectl.groups import WHOLE, PageGroups
from hicachectl.hits import find_hits, inventory_of_chains
from hicachectl.inventory import take_inventory
from hicachectl.migrating.carrying import Carrier, Manner, Order
from hicachectl.migrating.decisions import Action, decide
from hicachectl.migrating.routes import planned_route, verbatim_routes
from hicachectl.migrating.survey import Survey, survey_destination, survey_source
from hicachectl.migrating.watching import Touching, Watch
from hicachectl.prewarming.forest import grow_forest

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from hicachectl.backends.base import Store
    from hicachectl.chains import Chains
    from hicachectl.formats.profile import Profile
    from hicachectl.inventory import IntArray, Inventory
    from hicachectl.migrating.delivery import Delivered, Problem
    from hicachectl.migrating.routes import Route

BUDGET = "budget"
DEADLINE = "deadline"
FULL = "destination full"
EVICTS = "destination evicts"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to warm a store with.

    profile: of the source. destination_profile: of the servers of the destination, None: the same.
    chains: what is asked for; None: all whole pages, the newest first within a budget. rank: given
    chains, their distinct pages and which of them each page is, gives the place of each distinct
    page in the order of value, 0 the best; a page never before one that precedes it in a chain.
    """

    profile: Profile
    chains: Chains | None
    rank: Callable[[Chains, pa.StringArray, IntArray], IntArray] | None = None
    destination_profile: Profile | None = None
    budget_bytes: int | None = None
    budget_pages: int | None = None
    deadline_seconds: float | None = None
    dry_run: bool = False
    manner: Manner = field(default_factory=Manner)

    @property
    def target(self) -> Profile:
        """The profile of the destination."""
        return self.destination_profile or self.profile


@dataclass(slots=True)
class Outcome:
    """What was done, or would be.

    document: the members of the JSON contract. problems: pages that failed or are in conflict.
    plan: what was to be copied, best first: page, its parent in a chain, depth, bytes.
    usable_pages: [chains] how far servers can restore each from the destination; for all pages, [1]
    how many are whole there.
    """

    document: dict[str, Any]
    problems: list[Problem]
    remarks: list[str]
    usable_pages: IntArray
    plan: pa.Table | None = None

    @property
    def usable_share(self) -> float:
        """The share of the tokens asked for that servers can restore in the end."""
        wanted = self.document["requested_tokens"]
        return self.document["usable_tokens"] / wanted if wanted else 1.0


@dataclass(slots=True)
class _Plan:
    """What is to be copied.

    wanted: rows of the survey, best first. items: those of them that are to be copied, in the order
    in which they are. cost: bytes that each of these brings to the destination. actions: for every
    row of the survey. parents, depths: of each item in its chain; null and 0 where unknown.
    names: pages that servers could restore from the source. there: pages that the destination has
    of these. missing: pages asked for that are not among them.
    """

    survey: Survey
    wanted: IntArray
    items: IntArray
    cost: IntArray
    actions: npt.NDArray[np.int8]
    parents: pa.StringArray
    depths: IntArray
    names: pa.StringArray
    requested: int
    there: int
    missing: int
    cut: bool


def prewarm(
    source: Store,
    destination: Store,
    request: Request,
    *,
    on_listed: Callable[[int], None] = lambda objects: None,
    on_copied: Callable[[int, int], None] = lambda nbytes, total: None,
) -> Outcome:
    """Copy what is asked for and the destination lacks, as far as servers could restore it.

    on_listed is told objects as they are listed, on_copied bytes as pages are done and how many
    there are in all. Raises UsageError, ProfileError and UnsupportedByBackend before anything is
    written, StoreUnavailable.
    """
    started = time.monotonic()
    if request.manner.pin and not destination.supports_pin:
        raise UnsupportedByBackend(f"{destination.url}: --pin: its objects cannot be pinned")
    route_of = _router(source, destination, request)
    destination.use_profile(request.target)
    inventory = (
        take_inventory(source, request.profile, on_batch=on_listed)
        if request.chains is None
        else inventory_of_chains(source, request.profile, request.chains, on_batch=on_listed)
    )
    groups = PageGroups(inventory)
    survey = survey_source(inventory, groups, route_of(inventory))
    survey_destination(destination, [survey], destination.grammar, on_batch=on_listed)
    plan = (
        _everything(groups, survey, request)
        if request.chains is None
        else _planned(inventory, survey, request.chains, request)
    )
    rows = _plan_rows(plan)
    total = int(plan.cost.sum())
    if request.dry_run:
        outcome = _finished(plan, source, destination, request, started)
        outcome.document |= {"copied_pages": len(plan.items), "bytes": total}
        outcome.plan = rows
        return outcome
    deadline = None if request.deadline_seconds is None else started + request.deadline_seconds
    watch = Watch(destination, survey)
    carrier = Carrier(
        source, inventory, groups, destination, replace(request.manner, deadline=deadline)
    )

    def on_done(delivered: Delivered) -> None:
        on_copied(delivered.nbytes, max(total, 1))
        watch.add(delivered)
        if watch.lost():
            carrier.stop()

    partly = int((plan.actions[plan.items] == Action.COMPLETE).sum())
    tally = carrier.carry(_orders(plan), on_done=on_done)
    Touching(destination, survey).touch(plan.wanted)
    outcome = _finished(plan, source, destination, request, started, copied=tally.pages)
    outcome.plan, outcome.problems = rows, tally.problems
    reason = _reason(tally.full, watch, tally.complete, plan)
    outcome.document |= {
        "copied_pages": tally.pages,
        "bytes": tally.nbytes,
        "not_pinned": plan.there + partly if request.manner.pin else 0,
        "gone": tally.gone,
        "failed": tally.failed + tally.conflicts,
        "complete": reason is None,
        "stopped_by": reason,
    }
    if watch.lost():
        outcome.remarks.append(watch.remark())
    return outcome


def usable_from(store: Store, request: Request) -> Outcome:
    """Say what servers can restore from a store as it is; nothing is copied."""
    if request.chains is None:
        raise UsageError("--all needs a store to copy from: --from SRC")
    started = time.monotonic()
    there = inventory_of_chains(store, request.target, request.chains)
    hits = find_hits(there, 0, request.chains)
    requested = len(hits.page_names)
    held = int(hits.needed().any(axis=1).sum())
    document = _document(None, store, requested, held, requested - held)
    return _outcome(document, hits.usable_pages, request, started, cut=False)


def _reason(full: bool, watch: Watch, complete: bool, plan: _Plan) -> str | None:
    if full:
        return FULL
    if watch.lost():
        return EVICTS
    if not complete:
        return DEADLINE
    return BUDGET if plan.cut else None


def _router(source: Store, destination: Store, request: Request) -> Callable[[Inventory], Route]:
    """Decide how the source's pages become the destination's, once the source is listed."""
    grammar = destination.grammar
    if request.target == request.profile and grammar == source.grammar:
        if source.url == destination.url:
            raise UsageError(f"{source.url}: source and destination are the same")
        return lambda inventory: next(iter(verbatim_routes(inventory.table.deployments[:1])))
    plan = transfer_plan(request.profile, source.grammar, request.target, grammar)
    return lambda inventory: planned_route(inventory.table.deployments[0], plan, grammar)


def _planned(inventory: Inventory, survey: Survey, chains: Chains, request: Request) -> _Plan:
    """Choose what to copy: as much as can be restored, best first, within the budget."""
    assert request.rank is not None  # as there are chains
    hits = find_hits(inventory, 0, chains)
    requested = len(hits.page_names)
    usable = replace(hits.chains, reach=hits.usable_pages).within_reach()
    names, page_of = usable.distinct_pages()
    choice = Choice(survey, hits, names, request.rank(usable, names, page_of))
    there = int((choice.actions == Action.SKIP).sum())
    cut = False
    if request.budget_bytes is not None or request.budget_pages is not None:
        cut = choice.fit(request.budget_bytes, request.budget_pages)
    wanted = choice.wanted()
    items = wanted[np.isin(choice.actions[wanted], WRITING)]
    forest = grow_forest(raw_pages(names), page_of.astype(np.int32), usable.offsets)
    places = choice.names_of(items)
    parents = forest.parents[places]
    return _Plan(
        survey=survey,
        wanted=wanted,
        items=items,
        cost=choice.costs(items),
        actions=choice.actions,
        parents=names.take(pa.array(parents, mask=parents < 0)),
        depths=forest.depths[places].astype(np.int64),
        names=names,
        requested=requested,
        there=there,
        missing=requested - len(names),
        cut=cut,
    )


def _everything(groups: PageGroups, survey: Survey, request: Request) -> _Plan:
    """Choose all whole pages: the newest within the budget, copied in the order of their age.

    What precedes a page in its chain is as old or older, and is so there before it.
    """
    whole = groups.states[survey.groups] == WHOLE
    actions = decide(survey, whole, "skip")
    newest = groups.newest_ns[survey.groups]
    wanted = np.flatnonzero(actions != Action.NOTHING)
    wanted = wanted[np.argsort(-newest[wanted], kind="stable")]
    items = wanted[np.isin(actions[wanted], WRITING)]
    cost = arriving_bytes(survey, items)
    fits = np.ones(len(items), dtype=np.bool_)
    if request.budget_bytes is not None:
        fits &= np.cumsum(cost) <= request.budget_bytes
    if request.budget_pages is not None:
        fits[request.budget_pages :] = False
    kept = items[fits][::-1]
    return _Plan(
        survey=survey,
        wanted=wanted[~np.isin(wanted, items[~fits])],
        items=kept,
        cost=cost[fits][::-1],
        actions=actions,
        parents=pa.nulls(len(kept), pa.string()),
        depths=np.zeros(len(kept), dtype=np.int64),
        names=survey.pages.filter(pa.array(whole)),
        requested=int(whole.sum()),
        there=int((actions == Action.SKIP).sum()),
        missing=0,
        cut=not fits.all(),
    )


def _orders(plan: _Plan) -> list[Order]:
    """Give the pages their turns, none before its prefix.

    A page of which the destination has nothing is completed as it would be copied.
    """
    partly = (plan.actions[plan.items] == Action.COMPLETE).any()
    return [Order(plan.survey, plan.items, Action.COMPLETE if partly else Action.COPY)]


def _finished(
    plan: _Plan,
    source: Store,
    destination: Store,
    request: Request,
    started: float,
    *,
    copied: int = 0,
) -> Outcome:
    """Say what servers can restore from the destination in the end.

    What they can of pages that the source could not give was there already.
    """
    there, missing = plan.there, plan.missing
    if request.chains is None:
        usable = np.array([there + copied], dtype=np.int64)
    else:
        found = inventory_of_chains(destination, request.target, request.chains)
        hits = find_hits(found, 0, request.chains)
        usable = hits.usable_pages
        held = hits.page_names.filter(pa.array(hits.needed().any(axis=1)))
        more = int(pc.invert(pc.is_in(held, value_set=plan.names)).true_count)
        there, missing = there + more, missing - more
    document = _document(source, destination, plan.requested, there, missing)
    return _outcome(document, usable, request, started, cut=plan.cut)


def _document(
    source: Store | None, destination: Store, requested: int, there: int, missing: int
) -> dict[str, Any]:
    return {
        "destination": destination.url,
        "source": source and source.url,
        "requested_pages": requested,
        "already_there": there,
        "copied_pages": 0,
        "bytes": 0,
        "missing_pages": missing,
    }


def _outcome(
    document: dict[str, Any], usable_pages: IntArray, request: Request, started: float, *, cut: bool
) -> Outcome:
    page_size = request.target.page_size
    asked = document["requested_pages"]
    if request.chains is not None:
        asked = int(request.chains.reach.sum())
    document |= {
        "usable_tokens": int(usable_pages.sum()) * page_size,
        "requested_tokens": asked * page_size,
        "not_pinned": 0,
        "gone": 0,
        "failed": 0,
        "seconds": round(time.monotonic() - started, 3),
        "complete": not cut,
        "stopped_by": BUDGET if cut else None,
    }
    return Outcome(document, [], [], usable_pages)


def _plan_rows(plan: _Plan) -> pa.Table:
    """List what is to be copied, best first."""
    pages = plan.survey.pages.take(pa.array(plan.items))
    return pa.table(
        {
            "page": pages,
            "parent": plan.parents,
            "depth": pa.array(plan.depths),
            "bytes": pa.array(plan.cost),
        }
    )
