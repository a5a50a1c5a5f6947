"""Copy the most valuable pages into a store."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.backends.capabilities import Pins, Resumable, Touch
from hicachectl.formats.errors import UnsupportedByBackend, UsageError
from hicachectl.io.interrupts import persistent
from hicachectl.move.batches import Action
from hicachectl.move.destination import survey_destination
from hicachectl.move.results import GroupStatus, Problem
from hicachectl.move.runs import CopyRun
from hicachectl.move.store_pair import StorePair
from hicachectl.move.survey import decide
from hicachectl.move.trailers import plan_trailers
from hicachectl.pages.groups import PageGroups
from hicachectl.pages.inventory import take_inventory
from hicachectl.pages.selection import EVERYTHING
from hicachectl.pages.unmatched import explain_selection
from hicachectl.prewarm.choice import leave_misfits, leave_too_large
from hicachectl.prewarm.page_plan import PagePlan, PrewarmRequest, plan_chains, plan_pages
from hicachectl.requests.hits import inventory_of_chains
from hicachectl.requests.restorable import count_usable, deployment_document, stamp_remarks
from hicachectl.text.units import human_size
from hicachectl.text.vocabulary import LOCK

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hicachectl.backends.base import Store
    from hicachectl.formats.profile import Profile
    from hicachectl.move.results import MoveResult
    from hicachectl.move.survey import Survey
    from hicachectl.move.work import PageBatch
    from hicachectl.pages.inventory import IntArray

BUDGET = "budget"
DEADLINE = "deadline"
FULL = "destination full"
EVICTS = "destination evicts"
_WATCHED = 256  # first written objects: the most valuable, and the first to be evicted
_WATCH_SECONDS = 2.0  # between two checks
ENDING_SECONDS = 10.0  # for touches after a deadline or signal, and again for the last listing


@dataclass(slots=True)
class PrewarmOutcome:
    """Result of a run or a dry run.

    document: members of the JSON result. problems: failed or conflicting pages.
    plan: pages to copy, best first: page, parent, depth, bytes.
    usable_pages: [chains] pages that servers can restore from the destination; without chains, [1]
    wanted pages whole there. interruption: exception that ended the copying, such as
    KeyboardInterrupt, to be raised after the report.
    """

    document: dict[str, Any]
    problems: list[Problem]
    remarks: list[str]
    usable_pages: IntArray
    plan: pa.Table | None = None
    interruption: BaseException | None = None

    def interrupt(self, by: BaseException) -> None:
        """Record that a signal ended the run early."""
        self.interruption = by
        reason = "interrupted" if isinstance(by, KeyboardInterrupt) else "terminated"
        self.document |= {"complete": False, "stopped_by": reason}


def not_begun(source: str | None, destination: str) -> PrewarmOutcome:
    """Return the outcome of a run that another process's lock prevented. Takes two URLs."""
    document: dict[str, Any] = {"destination": destination, "source": source}
    counts = ("requested_pages", "already_there", "copied_pages", "bytes", "missing_pages")
    document |= dict.fromkeys((*counts, "usable_tokens", "requested_tokens"), 0)
    document |= {"deployment": None} | dict.fromkeys(("not_pinned", "gone", "failed"), 0)
    document |= {"seconds": 0.0, "complete": False, "stopped_by": LOCK}
    return PrewarmOutcome(document, [], [], np.zeros(0, dtype=np.int64))


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
    if request.options.pin:
        if not isinstance(destination, Pins):
            raise UnsupportedByBackend(f"{destination.url}: cannot pin objects; leave out --pin")
        destination.pin_writes(request.options.pin_seconds)
    stores = StorePair(source, destination, request.profile, request.target)
    trailers = plan_trailers(stores, request.options.trailers)
    inventory = (
        take_inventory(source, request.profile, on_batch=on_listed)
        if request.chains is None
        else inventory_of_chains(source, request.profile, request.chains, on_batch=on_listed)
    )
    groups = PageGroups(inventory)
    (survey,) = stores.survey(inventory, groups, first_only=True, on_batch=on_listed)
    survey = trailers.with_foreign(survey, inventory.objects)
    options = replace(request.options, keeps_trailers=trailers.keeps)
    # The destination's servers accept no object without a trailer beside others that have one.
    trailers = replace(trailers, bare=trailers.bare and not trailers.keeps)
    survey, misfits = leave_misfits(survey, whole_groups=request.chains is None)
    survey, large = leave_too_large(
        survey, verify=options.verify, buffer_bytes=options.buffer_bytes
    )
    plan = (
        plan_pages(groups, survey, request, trailers.refused(inventory, groups))
        if request.chains is None
        else plan_chains(inventory, survey, request, trailers.acceptance(inventory))
    )
    left = [*_asked_for(misfits, _pages_to_fit(plan, request)), *_asked_for(large, plan.names)]
    run = _Prewarming(plan, source, destination, request, started)
    if request.dry_run:
        outcome = _finished(run)
        outcome.document |= {"copied_pages": len(plan.items), "bytes": int(plan.cost.sum())}
        outcome.document["failed"] = len(plan.conflicts)
        outcome.problems = _conflicts(plan)
    else:
        # Also finish a pack that a killed run left, even if no page is missing.
        if isinstance(destination, Resumable):
            destination.own_temporaries(os.urandom(8).hex(), sweep=False)
        timed = replace(options, deadline=run.deadline)
        stores.claim()
        copying = CopyRun(source, inventory, groups, destination, timed)
        outcome = _executed(run, copying, on_copied)
    outcome.document["failed"] += len(left)
    outcome.problems += left
    outcome.plan = plan.rows()
    outcome.remarks += filter(None, [trailers.remark])
    if request.chains is None and not len(groups):
        outcome.remarks.append(explain_selection(source, inventory, EVERYTHING))
    return outcome


class _Prewarming(NamedTuple):
    """A run of a plan. started: `time.monotonic()`."""

    plan: PagePlan
    source: Store
    destination: Store
    request: PrewarmRequest
    started: float

    @property
    def deadline(self) -> float | None:
        seconds = self.request.deadline_seconds
        return None if seconds is None else self.started + seconds


def _executed(
    run: _Prewarming, copying: CopyRun, on_copied: Callable[[int, int], None]
) -> PrewarmOutcome:
    """Copy, touch and count pages; after an interrupt, touching and counting have time limits."""
    plan = run.plan
    total = max(int(plan.cost.sum()), 1)
    watch = Watch(run.destination, plan.survey)
    partly = int((plan.actions[plan.items] == Action.COMPLETE).sum())

    def on_done(batch: PageBatch, done: MoveResult) -> None:
        on_copied(done.nbytes, total)
        watch.add(batch, done)
        if watch.lost():
            copying.stop()

    interruption = None
    try:
        with persistent():
            copying.copy([plan.work()], on_done=on_done)
            if plan.there:
                run.destination.flush()  # the result also counts pages that other writers wrote
            touch_pages(run.destination, plan.survey, plan.wanted, until=_after(run.deadline))
            outcome = _finished(run)
    except BaseException as error:
        if isinstance(error, Exception):
            raise
        interruption = error
        touch_pages(run.destination, plan.survey, plan.wanted, until=_after(time.monotonic()))
        outcome = _finished(run, until=_after(time.monotonic()))
    result = copying.result
    failed = result.count(GroupStatus.FAILED) + result.count(GroupStatus.CONFLICT)
    reason = _reason(result.full, watch, result.complete, plan)
    outcome.problems = [*_conflicts(plan), *result.problems]
    outcome.document |= {
        "copied_pages": result.count(GroupStatus.DONE),
        "bytes": result.nbytes,
        "not_pinned": plan.there + partly if run.request.options.pin else 0,
        "gone": result.count(GroupStatus.GONE),
        "failed": failed + len(plan.conflicts),
        "complete": reason is None,
        "stopped_by": reason,
    }
    if interruption is not None:
        outcome.interrupt(interruption)
    if watch.lost():
        outcome.remarks.append(watch.remark())
    return outcome


class Watch:
    """Record of the first written objects, which shows whether the destination evicts them."""

    def __init__(self, store: Store, survey: Survey) -> None:
        self._store = store
        self._survey = survey
        anchors = (n for n, target in enumerate(survey.route.targets) if target.anchor)
        self._anchor = next(anchors, 0)
        self._keys: list[pa.BinaryArray] = []
        self._count = 0
        self._written = 0
        self._next = 0.0
        self._lost = False

    def add(self, batch: PageBatch, result: MoveResult) -> None:
        """Record the bytes and the first anchors written."""
        self._written += result.nbytes
        done = batch.items[result.open][: _WATCHED - self._count]
        if len(done):
            self._keys.append(self._survey.keys(done, np.full(len(done), self._anchor)))
            self._count += len(done)

    def lost(self) -> bool:
        """Return whether a recorded object is missing; ask the store at most every few seconds."""
        if self._lost or not self._keys or time.monotonic() < self._next:
            return self._lost
        self._next = time.monotonic() + _WATCH_SECONDS
        rows = pa.table({"key": pa.concat_arrays(self._keys)})
        self._lost = not self._store.exists(rows).all()
        return self._lost

    def remark(self) -> str:
        """Return the remark that estimates the destination's capacity."""
        return (
            f"{self._store.url}: evicts newly written objects; it holds about "
            f"{human_size(self._written)} of the requested pages, so set --budget to this size"
        )


def touch_pages(
    store: Store, survey: Survey, items: IntArray, *, until: float | None = None
) -> None:
    """Mark pages as most recently used, if the store keeps such an order.

    The least valuable pages come first, and the leaves of a chain before its root.
    items: survey rows, most valuable first. until: `time.monotonic()` of the end; at most one call
    ends later. If time is short, less valuable pages are left out.
    """
    if not isinstance(store, Touch):
        return
    step = store.limits.batch_objects
    calls = -(-len(items) // step)
    begun, made, at = time.monotonic(), 0, 0
    while at < calls:
        some = items[::-1][at * step : (at + 1) * step]
        of, targets, _ = survey.wanted.objects(some)
        store.touch(pa.table({"key": survey.keys(some[of], targets)}))
        at, made = at + 1, made + 1
        if until is not None:
            now = time.monotonic()
            affordable = int(made * (until - now) / max(now - begun, 1e-9))
            at = max(at, calls - max(affordable, 1))


def usable_from(store: Store, request: PrewarmRequest) -> PrewarmOutcome:
    """Return the outcome without copying: the pages that servers can now restore."""
    if request.chains is None:
        raise UsageError("--all needs a store to copy from; give --from SRC")
    started = time.monotonic()
    found = count_usable(store, request.target, request.served, request.chains)
    requested = len(found.target.page_names)
    held = int(found.target.needed().any(axis=1).sum())
    pages = {"requested": requested, "there": held, "missing": requested - held}
    outcome = _outcome(None, store, request, pages, found.pages, found.deployment, started)
    outcome.remarks += [*found.remarks, *stamp_remarks(store, request.target)]
    return outcome


def _after(moment: float | None) -> float | None:
    """Return the time limit for the steps after copying; None: no limit."""
    return None if moment is None else max(moment, time.monotonic()) + ENDING_SECONDS


def _reason(full: bool, watch: Watch, complete: bool, plan: PagePlan) -> str | None:
    if full:
        return FULL
    if watch.lost():
        return EVICTS
    if not complete:
        return DEADLINE
    return BUDGET if plan.cut else None


def _finished(run: _Prewarming, *, until: float | None = None) -> PrewarmOutcome:
    """Return the outcome, with the pages now restorable from the destination.

    Pages restorable only from the destination count as already there. If the listing is not done
    at `until`, no page counts as usable.
    """
    plan, source, destination, request, started = run
    there, missing = plan.there, plan.missing
    usable = np.zeros(1 if request.chains is None else len(request.chains), dtype=np.int64)
    unseen = False
    deployment, remarks = request.target, stamp_remarks(destination, request.target)

    def on_batch(_objects: int) -> None:
        if until is not None and time.monotonic() > until:
            raise TimeoutError

    try:
        if request.chains is None:
            usable[0] = _whole_pages(plan, destination, on_batch)
        else:
            found = count_usable(
                destination, request.target, request.served, request.chains, on_batch=on_batch
            )
            usable, deployment, hits = found.pages, found.deployment, found.target
            remarks += found.remarks
            held = hits.page_names.filter(pa.array(hits.needed().any(axis=1)))
            more = int(pc.invert(pc.is_in(held, value_set=plan.names)).true_count)
            there, missing = there + more, missing - more
    except TimeoutError:
        unseen = True
    pages = {"requested": plan.requested, "there": there, "missing": missing}
    outcome = _outcome(
        source, destination, request, pages, usable, deployment, started, cut=plan.cut
    )
    outcome.remarks += remarks
    if unseen:
        outcome.remarks.append(
            f"{destination.url}: listing took too long; usable tokens are unknown and reported as "
            "0; count them with hicachectl hits"
        )
    return outcome


def _whole_pages(plan: PagePlan, destination: Store, on_batch: Callable[[int], None]) -> int:
    (survey,) = survey_destination(
        destination, [plan.survey], destination.grammar, on_batch=on_batch
    )
    wanted = np.zeros(len(survey.groups), dtype=np.bool_)
    wanted[plan.wanted] = True
    return int((decide(survey, wanted, "skip") == Action.SKIP).sum())


def _pages_to_fit(plan: PagePlan, request: PrewarmRequest) -> pa.StringArray:
    """Return the requested pages that may be missing because an object has a wrong size.

    Pages restorable from the source do not need such objects.
    """
    if request.chains is None:
        return plan.names
    asked, _ = request.chains.within_reach().distinct_pages()
    return asked.filter(pc.invert(pc.is_in(asked, value_set=plan.names)))


def _asked_for(left: list[Problem], names: pa.StringArray) -> list[Problem]:
    wanted = set(names.to_pylist()) if left else set()
    return [problem for problem in left if problem.page in wanted]


def _conflicts(plan: PagePlan) -> list[Problem]:
    pages = plan.survey.pages.take(pa.array(plan.conflicts)).to_pylist()
    why = (
        "the destination has an object of another size or identity under one of the page's keys; "
        "check both stores with hicachectl verify"
    )
    return [Problem(page, None, why) for page in pages]


def _outcome(
    source: Store | None,
    destination: Store,
    request: PrewarmRequest,
    pages: Mapping[str, int],
    usable_pages: IntArray,
    deployment: Profile,
    started: float,
    *,
    cut: bool = False,
) -> PrewarmOutcome:
    page_size = request.target.page_size
    asked = pages["requested"]
    if request.chains is not None:
        asked = int(request.chains.reach.sum())
    document = {
        "destination": destination.url,
        "source": source and source.url,
        "requested_pages": pages["requested"],
        "already_there": pages["there"],
        "copied_pages": 0,
        "bytes": 0,
        "missing_pages": pages["missing"],
        "usable_tokens": int(usable_pages.sum()) * page_size,
        "requested_tokens": asked * page_size,
        "deployment": deployment_document(deployment),
        "not_pinned": 0,
        "gone": 0,
        "failed": 0,
        "seconds": round(time.monotonic() - started, 3),
        "complete": not cut,
        "stopped_by": BUDGET if cut else None,
    }
    return PrewarmOutcome(document, [], [], usable_pages)
