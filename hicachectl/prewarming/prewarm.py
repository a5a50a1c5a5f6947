"""Copy the most valuable pages into a store."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from hicachectl.io.interrupts import persistent
from hicachectl.move.batches import Action
from hicachectl.move.run_mark import RunMark
from hicachectl.pages.naming import profile_document
from hicachectl.prewarming.finish import after, finish_facts, touch_pages
from hicachectl.prewarming.outcome import (
    FinishFacts,
    PlanFacts,
    PrewarmOutcome,
    SliceFacts,
    outcome_of,
)
from hicachectl.prewarming.slice_copy import SliceCopy
from hicachectl.prewarming.warming import Warming, plan_prewarm
from hicachectl.requests.restorable import count_usable, stamp_remarks

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicachectl.backends.base import Store
    from hicachectl.prewarming.page_plan import PagePlan, PrewarmRequest


def prewarm(
    source: Store,
    destination: Store,
    request: PrewarmRequest,
    *,
    on_listed: Callable[[int], None] = lambda objects: None,
    on_copied: Callable[[int, int], None] = lambda nbytes, total: None,
) -> PrewarmOutcome:
    """Copy the requested pages that servers could restore and the destination lacks.

    on_listed: takes the number of objects of each listed batch. on_copied: takes the bytes of each
    finished batch and of the plan. Raises UsageError, ProfileError and UnsupportedByBackend before
    anything is written; StoreUnavailable at any time.
    """
    started = time.monotonic()
    warming = Warming(source, destination, request)
    plan = plan_prewarm(warming, on_listed=on_listed)
    if not request.dry_run:
        return _executed(warming, plan, started, on_copied)
    facts = SliceFacts(
        there=plan.pages.count(Action.COMPARE),
        copied=len(plan.pages.items),
        bytes=int(plan.pages.cost.sum()),
        remarks=list(source.remarks),
    )
    finish, _ = finish_facts(destination, request, plan.pages, plan.names)
    seconds = time.monotonic() - started
    outcome = outcome_of(plan.facts, [facts], finish, source.url, destination.url, seconds)
    outcome.plan = plan.rows()
    return outcome


def _executed(
    warming: Warming, plan: PagePlan, started: float, on_copied: Callable[[int, int], None]
) -> PrewarmOutcome:
    """Copy, touch and count pages; after an interrupt, touching and counting have time limits."""
    request, source, destination = warming.request, warming.source, warming.destination
    # Also finish a pack that a killed run left, even if no page is missing.
    RunMark.new().put(destination)
    seconds = request.deadline_seconds
    deadline = None if seconds is None else started + seconds
    copying = SliceCopy(warming, plan.pages, deadline)
    survey, wanted = plan.pages.survey, plan.pages.order
    interruption = None
    try:
        with persistent():
            copying.run(on_copied)
            touch_pages(destination, survey, wanted, until=after(deadline))
            finish, usable = finish_facts(
                destination, request, plan.pages, plan.names, without=copying.conflicting
            )
    except BaseException as error:
        if isinstance(error, Exception):
            raise
        interruption = error
        touch_pages(destination, survey, wanted, until=after(time.monotonic()))
        finish, usable = finish_facts(
            destination,
            request,
            plan.pages,
            plan.names,
            without=copying.conflicting,
            until=after(time.monotonic()),
        )
    took = time.monotonic() - started
    outcome = outcome_of(plan.facts, [copying.facts], finish, source.url, destination.url, took)
    outcome.usable_pages, outcome.plan = usable, plan.rows()
    if interruption is not None:
        outcome.interrupt(interruption)
    return outcome


def usable_from(store: Store, request: PrewarmRequest) -> PrewarmOutcome:
    """Return the outcome without copying: the pages of the request that servers can now restore.

    The request has chains.
    """
    assert request.requests is not None
    started = time.monotonic()
    found = count_usable(
        store,
        request.target,
        request.served,
        request.requests,
        explains=True,
        needs_pages=not request.allow_empty,
    )
    requested = len(found.target.page_names)
    held = int(found.target.needed().any(axis=1).sum())
    page_size = request.target.page_size
    plan = PlanFacts(
        requested=requested,
        there=held,
        missing=requested - held,
        requested_tokens=request.requests.requested_tokens(page_size),
    )
    finish = FinishFacts(
        usable_tokens=int(found.pages.sum()) * page_size,
        served_tokens=int(found.served.sum()) * page_size,
        deployment=profile_document(found.deployment),
        remarks=[*found.remarks, *stamp_remarks(store, request.target)],
    )
    outcome = outcome_of(plan, [], finish, None, store.url, time.monotonic() - started)
    outcome.usable_pages = found.pages
    return outcome
