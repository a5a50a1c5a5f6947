"""Finish a prewarm: mark pages as recently used, and count what servers can restore."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.backends.capabilities import Touch
from hicachectl.move.batches import Action
from hicachectl.move.destination import survey_destination
from hicachectl.move.survey import decide
from hicachectl.pages.naming import profile_document
from hicachectl.prewarming.outcome import FinishFacts
from hicachectl.requests.restorable import count_usable, stamp_remarks

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicachectl.backends.base import Store
    from hicachectl.formats.arrays import IntArray
    from hicachectl.move.copy_plan import CopyPlan
    from hicachectl.move.survey import Survey
    from hicachectl.prewarming.page_plan import PrewarmRequest

ENDING_SECONDS = 10.0  # for touches after a deadline or signal, and again for the last listing


def after(moment: float | None) -> float | None:
    """Return the time limit for the steps after copying; None: no limit."""
    return None if moment is None else max(moment, time.monotonic()) + ENDING_SECONDS


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


def finish_facts(
    destination: Store,
    request: PrewarmRequest,
    pages: CopyPlan,
    names: pa.StringArray,
    *,
    without: pa.StringArray | None = None,
    until: float | None = None,
) -> tuple[FinishFacts, IntArray]:
    """Count what servers can restore from the destination; also return [chains] usable pages.

    names: see `PagePlan`.
    without: pages of which the destination has other objects.
    until: `time.monotonic()` of the end; if the listing is not done then, no page counts as usable.
    """
    page_size = request.target.page_size
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
            facts.usable_tokens = _whole_pages(destination, pages, without, on_batch) * page_size
        else:
            found = count_usable(
                destination,
                request.target,
                request.served,
                request.requests,
                without=without,
                on_batch=on_batch,
            )
            usable, hits = found.pages, found.target
            held = hits.page_names.filter(pa.array(hits.needed().any(axis=1)))
            facts.usable_tokens = int(usable.sum()) * page_size
            facts.served_tokens = int(found.served.sum()) * page_size
            facts.only_there = int(pc.invert(pc.is_in(held, value_set=names)).true_count)
            facts.deployment = profile_document(found.deployment)
            facts.remarks += found.remarks
    except TimeoutError:
        facts.remarks.append(
            f"{destination.url}: listing took too long; usable tokens are unknown and reported as "
            "0; count them with hicachectl hits"
        )
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
