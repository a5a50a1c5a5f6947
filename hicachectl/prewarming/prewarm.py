"""Copy the most valuable pages into a store, and make live servers load them from there."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.backends.capabilities import Pins, Touch
from hicachectl.formats.errors import StoreUnavailable, UnsupportedByBackend
from hicachectl.io.interrupts import persistent
from hicachectl.move.destination import survey_destination
from hicachectl.move.pinning import pin_keys
from hicachectl.move.run_mark import RunMark
from hicachectl.move.runs import CopyRun
from hicachectl.move.store_pair import StorePair
from hicachectl.move.survey import Action, decide
from hicachectl.pages.groups import PageGroups
from hicachectl.pages.naming import profile_document
from hicachectl.pages.scanning import take_inventory
from hicachectl.pages.selection import EVERYTHING, explain_selection
from hicachectl.prewarming.outcome import (
    EVICTS,
    FinishFacts,
    PrewarmFacts,
    PrewarmOutcome,
    outcome_of,
)
from hicachectl.prewarming.page_plan import exclude_wrong_sizes, plan_chains, plan_pages
from hicachectl.prewarming.ranking import prefixes_worth_asking
from hicachectl.prewarming.through_server import ThroughServer, dp_ranks, prefix_of
from hicachectl.profiles.server import fetch_server
from hicachectl.requests.elsewhere import find_elsewhere, miss_remarks
from hicachectl.requests.hits import inventory_of_chains
from hicachectl.requests.restorable import count_usable, stamp_remarks
from hicachectl.text.vocabulary import DEADLINE, FULL

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from hicachectl.backends.base import Store
    from hicachectl.formats.arrays import IntArray
    from hicachectl.move.copy_plan import CopyPlan, PageBatch
    from hicachectl.move.results import MoveResult
    from hicachectl.move.survey import Survey
    from hicachectl.prewarming.page_plan import PagePlan, PrewarmRequest
    from hicachectl.prewarming.through_server import Prefix
    from hicachectl.requests.forms import Request


# Most objects to watch. The objects written first are the most valuable, and are evicted first.
WATCHED = 256
_WATCH_SECONDS = 2.0  # shortest time between two checks of the watched objects


def copy_pages(
    warming: Warming,
    pages: CopyPlan,
    facts: PrewarmFacts,
    on_copied: Callable[[int, int], None],
    best: pa.StringArray | None = None,
) -> None:
    """Copy wanted pages in the order of the plan.

    facts: sums to which the copy adds. An interrupt leaves them correct.
    best: first pages of the whole plan, which another part may have copied; None for a run that is
        not in parts.
    on_copied: see `prewarm`.
    Raises the exceptions of `prewarm`.
    """
    if warming.pins_only_writes:
        facts.not_pinned += pages.count(Action.COMPLETE)
    copying = CopyRun(warming, pages.groups, facts)
    watch = Watch(warming.destination, pages.survey)
    if best is not None:
        watch.add(best, written=False)

    def on_done(batch: PageBatch, done: MoveResult) -> None:
        watch.add(batch.pages.filter(pa.array(done.open)))
        if watch.lost():
            copying.stop()

    try:
        copying.copy([pages], on_copied, on_done=on_done)
    finally:
        facts.remarks += warming.source.remarks
    if not facts.stopped_by and (watch.lost() or not facts.complete):
        facts.stopped_by = EVICTS if watch.lost() else DEADLINE
    facts.settled = not facts.failed and facts.stopped_by != FULL


def pages_with_problems(parts: Iterable[PrewarmFacts]) -> pa.StringArray:
    """Return the pages that problems name. The destination may still have objects of them."""
    return pa.array(sorted({p.page for part in parts for p in part.problems}), pa.string())


class Watch:
    """Watch over the objects that were written first, to see if the destination evicts them."""

    def __init__(self, store: Store, survey: Survey) -> None:
        self._store = store
        self._route = survey.route
        anchors = (n for n, target in enumerate(survey.route.targets) if target.anchor)
        self._anchor = next(anchors, 0)
        self._keys = pa.array([], pa.binary())
        self._next = 0.0
        self._lost = False

    def add(self, pages: pa.StringArray, *, written: bool = True) -> None:
        """Watch the anchors of pages. One watch has WATCHED anchors at most.

        written: whether this run wrote the pages. Of other pages, only anchors that exist are
            watched.
        """
        some = pages[: WATCHED - len(self._keys)]
        keys = self._route.keys(np.full(len(some), self._anchor), some)
        if not written:
            keys = keys.filter(pa.array(self._store.exists(pa.table({"key": keys}))))
        self._keys = pa.concat_arrays([self._keys, keys])

    def lost(self) -> bool:
        """Return whether a watched object is missing. Ask the store only every few seconds."""
        if self._lost or not len(self._keys) or time.monotonic() < self._next:
            return self._lost
        self._next = time.monotonic() + _WATCH_SECONDS
        self._lost = not self._store.exists(pa.table({"key": self._keys})).all()
        return self._lost


# Seconds that touches may take after a deadline or signal. After a signal, the last listing may
# take as many more.
ENDING_SECONDS = 10.0


def after(moment: float | None) -> float | None:
    """Return the time at which a step after the copy must end; None for no limit.

    moment: deadline of the copy, as `time.monotonic()`; None for no deadline.
    """
    return None if moment is None else max(moment, time.monotonic()) + ENDING_SECONDS


def touch_pages(
    store: Store, survey: Survey, items: IntArray, *, until: float | None = None
) -> None:
    """Mark pages as most recently used, if the store keeps an order of use.

    The least valuable pages are touched first, and the end of a chain before its beginning. So the
    most valuable pages become the most recently used. If time is short, less valuable pages are not
    touched.
    items: survey rows, most valuable first.
    until: `time.monotonic()` of the end; None for no limit. Only the last call of the store may end
        later.
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
            # If time is short, skip calls, but make the last call in any case, because it touches
            # the most valuable pages.
            affordable = int(made * (until - now) / max(now - begun, 1e-9))
            at = max(at, calls - max(affordable, 1))


def pin_pages(
    warming: Warming, pages: CopyPlan, others: pa.StringArray
) -> tuple[int, float | None]:
    """Pin the requested pages that the destination now has.

    Pin nothing without --pin, or if the destination can pin only objects that are being written.
    others: requested pages that only the destination has.
    Return how many requested pages could not be pinned, and the Unix seconds at which the pins end.
    """
    store, options, survey = warming.destination, warming.options, pages.survey
    if not options.pin or warming.pins_only_writes:
        return 0, None
    assert isinstance(store, Pins)
    until = time.time() + options.pin_seconds
    of, targets, _ = survey.wanted.objects(pages.order)
    keys = survey.keys(pages.order[of], targets)
    bad = pin_keys(store, keys, options.pin_seconds)[0]
    objects, unpinned = (np.bincount(rows, minlength=len(pages.order)) for rows in (of, of[bad]))
    # A page without any pinned object was not copied.
    not_pinned = int(((unpinned > 0) & (unpinned < objects)).sum())

    # Which objects of the other pages are optional is unknown, so any object may be missing.
    count = len(survey.route.targets)
    of, targets = np.repeat(np.arange(len(others)), count), np.tile(np.arange(count), len(others))
    keys = survey.route.keys(targets, others.take(pa.array(of)))
    bad = pin_keys(store, keys, options.pin_seconds)[0]
    return not_pinned + int(bad.reshape(-1, count).all(axis=1).sum()), until


def finish_facts(
    destination: Store,
    request: PrewarmRequest,
    pages: CopyPlan | None,
    names: pa.StringArray,
    *,
    without: pa.StringArray | None = None,
    until: float | None = None,
    pin: Callable[[pa.StringArray], tuple[int, float | None]] | None = None,
) -> tuple[FinishFacts, IntArray]:
    """Count the pages that servers can restore from the destination.

    pages: planned copies; None if no copy was planned.
    names: see `PagePlan`.
    without: pages whose copy had a problem. They count as missing, although the destination may
        have objects of them.
    until: `time.monotonic()` of the end; None for no limit. If the listing takes longer, no page
        counts as usable.
    pin: `pin_pages` for the planned pages; None to pin nothing.
    Return the facts, and the number of usable pages of each chain: [chains].
    """
    page_size = request.target.page_size
    others = pa.array([], pa.string())
    usable = np.zeros(0 if request.requests is None else len(request.requests), dtype=np.int64)
    facts = FinishFacts(
        served_tokens=None if request.requests is None else 0,
        deployment=profile_document(request.target),
        remarks=stamp_remarks(destination, request.target),
    )

    def on_batch(_objects: int) -> None:
        if until is not None and time.monotonic() > until:
            raise TimeoutError

    try:
        if request.requests is None:
            assert pages is not None
            facts.usable_tokens = _whole_pages(destination, pages, without, on_batch) * page_size
        else:
            found = count_usable(
                destination,
                request.target,
                request.served,
                request.requests,
                explains=pages is None,
                needs_pages=pages is None and not request.allow_empty,
                without=without,
                on_batch=on_batch,
            )
            usable, hits = found.pages, found.target
            held = hits.page_names.filter(pa.array(hits.needed().any(axis=1)))
            facts.usable_tokens = int(usable.sum()) * page_size
            facts.served_tokens = int(found.served.sum()) * page_size
            others = held.filter(pc.invert(pc.is_in(held, value_set=names)))
            facts.only_there = len(others)
            facts.deployment = profile_document(found.deployment)
            facts.remarks += found.remarks
    except TimeoutError:
        facts.remarks.append(
            f"{destination.url}: listing took too long; usable tokens are unknown and reported as "
            "0; count them with hicachectl hits"
        )
    if pin is not None:
        facts.not_pinned, facts.pinned_until = pin(others)
    return facts, usable


def _whole_pages(
    destination: Store,
    pages: CopyPlan,
    without: pa.StringArray | None,
    on_batch: Callable[[int], None],
) -> int:
    (survey,) = survey_destination(
        destination, [pages.survey], destination.grammar, on_batch=on_batch
    )
    wanted = np.zeros(len(survey.groups), dtype=np.bool_)
    wanted[pages.order] = True
    if without is not None and len(without):
        wanted &= ~pc.is_in(survey.pages, value_set=without).to_numpy(zero_copy_only=False)
    return int(np.isin(decide(survey, wanted, "skip"), (Action.SKIP, Action.COMPARE)).sum())


class Warming(StorePair):
    """Checked request of a prewarm between two stores."""

    def __init__(self, source: Store, destination: Store, request: PrewarmRequest) -> None:
        """Check the request. With --pin, also set the destination to pin what it writes.

        Raises UsageError, ProfileError, UnsupportedByBackend.
        """
        self.pins_only_writes = False  # whether the destination cannot pin existing objects
        if request.options.pin:
            if not isinstance(destination, Pins):
                raise UnsupportedByBackend(
                    f"{destination.url}: cannot pin objects; leave out --pin"
                )
            destination.pin_writes(request.options.pin_seconds)
            self.pins_only_writes = not destination.can_pin(request.options.pin_seconds)
        self.request = request
        super().__init__(source, destination, request.profile, request.target, request.options)
        if self.trailers.keeps:
            # Once a directory has trailers, its servers refuse objects without a trailer.
            self.trailers = replace(self.trailers, bare=False)


def plan_prewarm(
    warming: Warming, *, on_listed: Callable[[int], None] = lambda objects: None
) -> PagePlan:
    """List both stores, and choose the pages to copy. Raises as `prewarm` does."""
    source, request, trailers = warming.source, warming.request, warming.trailers
    needs_pages = not request.allow_empty
    inventory = (
        take_inventory(source, request.profile, needs_pages=needs_pages, on_batch=on_listed)
        if request.requests is None
        else inventory_of_chains(
            source, request.profile, request.requests, needs_pages=needs_pages, on_batch=on_listed
        )
    )
    groups = PageGroups(inventory)
    (survey,) = warming.survey(groups, first_only=True, on_batch=on_listed)
    survey, wrong_sizes = exclude_wrong_sizes(survey, whole_groups=request.requests is None)
    if request.requests is None:
        plan = plan_pages(groups, survey, request, trailers.refused(groups))
        missed = [] if len(groups) else [explain_selection(source, inventory, EVERYTHING)]
    else:
        accepted = trailers.acceptance(inventory)
        plan, hits = plan_chains(groups, survey, request, accepted)
        elsewhere = find_elsewhere(inventory, hits)
        missed = miss_remarks(source, inventory, hits, elsewhere)
    pages = plan.pages
    asked = set(_pages_to_fit(plan, request).to_pylist()) if wrong_sizes else set()
    left_out = [problem for problem in wrong_sizes if problem.page in asked]
    pages.exclude_oversized(warming.options, plan.facts)
    plan.facts.fail(left_out)
    if warming.pins_only_writes and not request.dry_run:
        plan.facts.not_pinned = plan.facts.skipped + pages.count(Action.COMPARE)
    plan.facts.remarks += [*warming.remarks, *missed]
    return plan


def _pages_to_fit(plan: PagePlan, request: PrewarmRequest) -> pa.StringArray:
    """Return the requested pages that may be missing because an object has a wrong size.

    If the request has chains, these are pages that a server can take from a store
    (`Requests.reach`), but cannot restore from the source.
    """
    if request.requests is None:
        return plan.names
    asked = request.requests.within_reach().page_names
    return asked.filter(pc.invert(pc.is_in(asked, value_set=plan.names)))


def prewarm(
    source: Store,
    destination: Store,
    request: PrewarmRequest,
    *,
    on_listed: Callable[[int], None] = lambda objects: None,
    on_copied: Callable[[int, int], None] = lambda nbytes, total: None,
) -> PrewarmOutcome:
    """Copy the requested pages that servers could restore and that the destination lacks.

    on_listed: function that is called with the number of objects of each listed batch.
    on_copied: function that is called with the bytes of each finished batch, and the bytes of the
        whole plan.
    Raises UsageError, ProfileError and UnsupportedByBackend before the first write, and
    StoreUnavailable at any time.
    """
    started = time.monotonic()
    if (seconds := request.deadline_seconds) is not None:
        request = replace(request, options=replace(request.options, deadline=started + seconds))
    warming = Warming(source, destination, request)
    plan = plan_prewarm(warming, on_listed=on_listed)
    interruption: BaseException | None = None
    if request.dry_run:
        plan.pages.rehearse(plan.facts)
        plan.facts.remarks += source.remarks
        finish, usable = finish_facts(destination, request, plan.pages, plan.names)
    else:
        finish, usable, interruption = _executed(warming, plan, on_copied)
    took = time.monotonic() - started
    outcome = outcome_of([plan.facts], finish, source.url, destination.url, took)
    outcome.usable_pages, outcome.plan = usable, plan.rows()
    if interruption is not None:
        outcome.interrupt(interruption)
    return outcome


def _executed(
    warming: Warming, plan: PagePlan, on_copied: Callable[[int, int], None]
) -> tuple[FinishFacts, IntArray, BaseException | None]:
    """Copy, touch and count pages. After an interrupt, touching and counting have time limits.

    Return the results of `finish_facts`, and the exception of an interrupt; None without one.
    """
    destination = warming.destination
    # In a pack, the mark also takes over the writes of a killed run, so that closing finishes the
    # pack even if no page is missing.
    RunMark.new().put(destination)
    count = partial(
        finish_facts,
        destination,
        warming.request,
        plan.pages,
        plan.names,
        pin=partial(pin_pages, warming, plan.pages),
    )
    survey, wanted = plan.pages.survey, plan.pages.order
    try:
        with persistent():
            copy_pages(warming, plan.pages, plan.facts, on_copied)
            touch_pages(destination, survey, wanted, until=after(warming.options.deadline))
            return *count(without=pages_with_problems([plan.facts])), None
    except BaseException as error:
        # An error ends the run here. After an interrupt, the report still needs the counts.
        if isinstance(error, Exception):
            raise
        touch_pages(destination, survey, wanted, until=after(time.monotonic()))
        without, until = pages_with_problems([plan.facts]), after(time.monotonic())
        return *count(without=without, until=until), error


def usable_from(store: Store, request: PrewarmRequest) -> PrewarmOutcome:
    """Return the outcome of a run that copies nothing: what servers can restore now.

    request: request with chains.
    """
    assert request.requests is not None
    started = time.monotonic()
    asked = len(request.requests.within_reach().page_names)
    tokens = request.requests.requested_tokens(request.target.page_size)
    facts = PrewarmFacts(requested=asked, missing=asked, requested_tokens=tokens)
    finish, usable = finish_facts(store, request, None, pa.array([], pa.string()))
    outcome = outcome_of([facts], finish, None, store.url, time.monotonic() - started)
    outcome.usable_pages = usable
    return outcome


_JOBS = 8  # most requests that a server gets at the same time, without --jobs

Ranks = tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class LiveServer:
    """A live server.

    info: its /server_info reply.
    ranks: its DP ranks, each with its own cache; (None,) for a single rank.
    """

    info: Mapping[str, Any]
    ranks: Ranks


def live_servers(urls: Sequence[str]) -> dict[str, LiveServer]:
    """Ask each server for its /server_info. Return the servers by URL.

    Raises StoreUnavailable, UsageError for a bad URL, and ProfileError for an impossible number of
    ranks.
    """
    infos = {url: fetch_server(url, "--through-server").info for url in urls}
    return {url: LiveServer(info, dp_ranks(info)) for url, info in infos.items()}


def pull(
    servers: Mapping[str, LiveServer],
    request: PrewarmRequest,
    usable_pages: IntArray,
    read_again: Callable[[list[int]], Iterable[Request]],
    *,
    deadline: float | None = None,
    pulling: list[ThroughServer],
    on_done: Callable[[int], None] = lambda requests: None,
) -> None:
    """Request each usable prefix once from each server and DP rank, the most valuable first.

    usable_pages: [requests] number of usable pages of each request in the store.
    read_again: function that yields the requests at given byte offsets of the input.
    deadline: `time.monotonic()` of the end; None for no limit.
    pulling: list to which each server is added before its first request.
    on_done: function that is called with the number of requests that have just ended.
    """
    requests = request.requests
    assert requests is not None
    assert requests.starts is not None
    assert requests.hashing is not None
    hashing = requests.hashing
    # A server restores a trailing state only for a request that ends at it. So with trailing pools,
    # also request the prefixes that are part of longer prefixes.
    longest_only = not any(pool.trailing for pool in request.target.pools)
    chosen = prefixes_worth_asking(requests, usable_pages, request.rank, longest_only=longest_only)
    starts = requests.starts[chosen].tolist()

    def prefixes() -> Iterator[Prefix]:
        for number, found in zip(chosen.tolist(), read_again(starts), strict=True):
            yield prefix_of(number, found, int(usable_pages[number]), hashing)

    for url, live in servers.items():
        server = ThroughServer(url, ranks=live.ranks, jobs=request.options.jobs or _JOBS)
        pulling.append(server)
        with suppress(StoreUnavailable):  # the server's document has the error
            server.pull(prefixes(), deadline, on_done)
