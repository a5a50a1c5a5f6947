"""Put the pages that are worth having into a store, the most valuable first."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.formats.errors import UnsupportedByBackend, UsageError
from hicachectl.groups import PageGroups
from hicachectl.hits import find_hits, inventory_of_chains
from hicachectl.inventory import take_inventory
from hicachectl.migrating.carrying import Carrier
from hicachectl.migrating.decisions import Action, decide
from hicachectl.migrating.delivery import Problem
from hicachectl.migrating.preparing import find_router, settle_grammar
from hicachectl.migrating.survey import ABSENT, survey_destination, survey_source
from hicachectl.migrating.watching import Touching, Watch
from hicachectl.prewarm_plan import Plan, Request, plan_chains, plan_pages

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicachectl.backends.base import Store
    from hicachectl.inventory import IntArray
    from hicachectl.migrating.delivery import Delivered

__all__ = ["EVICTS", "FULL", "Outcome", "Request", "prewarm", "usable_from"]

BUDGET = "budget"
DEADLINE = "deadline"
FULL = "destination full"
EVICTS = "destination evicts"


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
    grammar = settle_grammar(source, destination)
    routes_of = find_router(source, destination, grammar, request.profile, request.target)
    destination.use_profile(request.target)
    inventory = (
        take_inventory(source, request.profile, on_batch=on_listed)
        if request.chains is None
        else inventory_of_chains(source, request.profile, request.chains, on_batch=on_listed)
    )
    groups = PageGroups(inventory)
    survey = survey_source(inventory, groups, routes_of(inventory)[0])
    survey_destination(destination, [survey], grammar, on_batch=on_listed)
    plan = (
        plan_pages(groups, survey, request)
        if request.chains is None
        else plan_chains(inventory, survey, request.chains, request)
    )
    rows = plan.rows()
    total = int(plan.cost.sum())
    if request.dry_run:
        outcome = _finished(plan, source, destination, request, started)
        outcome.document |= {"copied_pages": len(plan.items), "bytes": total}
        outcome.document["failed"] = len(plan.conflicts)
        outcome.plan, outcome.problems = rows, _conflicts(plan)
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
    tally = carrier.carry(plan.orders(), on_done=on_done)
    Touching(destination, survey).touch(plan.wanted)
    outcome = _finished(plan, source, destination, request, started)
    outcome.plan = rows
    outcome.problems = [*_conflicts(plan), *tally.problems]
    reason = _reason(tally.full, watch, tally.complete, plan)
    outcome.document |= {
        "copied_pages": tally.pages,
        "bytes": tally.nbytes,
        "not_pinned": plan.there + partly if request.manner.pin else 0,
        "gone": tally.gone,
        "failed": tally.failed + tally.conflicts + len(plan.conflicts),
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


def _reason(full: bool, watch: Watch, complete: bool, plan: Plan) -> str | None:
    if full:
        return FULL
    if watch.lost():
        return EVICTS
    if not complete:
        return DEADLINE
    return BUDGET if plan.cut else None


def _finished(
    plan: Plan,
    source: Store,
    destination: Store,
    request: Request,
    started: float,
) -> Outcome:
    """Say what servers can restore from the destination in the end.

    What they can of pages that the source could not give was there already.
    """
    there, missing = plan.there, plan.missing
    if request.chains is None:
        usable = np.array([_whole_pages(plan, destination)], dtype=np.int64)
    else:
        found = inventory_of_chains(destination, request.target, request.chains)
        hits = find_hits(found, 0, request.chains)
        usable = hits.usable_pages
        held = hits.page_names.filter(pa.array(hits.needed().any(axis=1)))
        more = int(pc.invert(pc.is_in(held, value_set=plan.names)).true_count)
        there, missing = there + more, missing - more
    document = _document(source, destination, plan.requested, there, missing)
    return _outcome(document, usable, request, started, cut=plan.cut)


def _whole_pages(plan: Plan, destination: Store) -> int:
    """Count the pages asked for that the destination has whole by now."""
    survey = replace(plan.survey, there=np.full_like(plan.survey.there, ABSENT))
    survey_destination(destination, [survey], destination.grammar)
    wanted = np.zeros(len(survey.groups), dtype=np.bool_)
    wanted[plan.wanted] = True
    return int((decide(survey, wanted, "skip") == Action.SKIP).sum())


def _conflicts(plan: Plan) -> list[Problem]:
    """Name the pages of which the destination has another object."""
    pages = plan.survey.pages.take(pa.array(plan.conflicts)).to_pylist()
    why = "the destination has an object of another size under one of its keys"
    return [Problem(page, None, why) for page in pages]


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
