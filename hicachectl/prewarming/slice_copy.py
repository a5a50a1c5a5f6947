"""Copy the wanted pages of a plan, or of a slice of one."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from hicachectl.move.batches import Action
from hicachectl.move.results import GroupStatus
from hicachectl.move.runs import CopyRun
from hicachectl.prewarming.outcome import EVICTS, SliceFacts
from hicachectl.text.vocabulary import DEADLINE, FULL

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicachectl.backends.base import Store
    from hicachectl.move.copy_plan import CopyPlan
    from hicachectl.move.results import MoveResult
    from hicachectl.move.survey import Survey
    from hicachectl.move.work import PageBatch
    from hicachectl.prewarming.warming import Warming

WATCHED = 256  # first written objects: the most valuable, and the first to be evicted
_WATCH_SECONDS = 2.0  # between two checks


class SliceCopy:
    """Copy of wanted pages; the facts are those so far, also after an interrupt."""

    def __init__(
        self,
        warming: Warming,
        pages: CopyPlan,
        deadline: float | None,
        best: pa.StringArray | None = None,
    ) -> None:
        """Prepare; nothing is written before `run`.

        deadline: `time.monotonic()` after which no batch is begun. best: the first pages of the
        whole plan that others may have copied. Raises ProfileError, StoreUnavailable.
        """
        warming.stores.claim()
        self._warming = warming
        self._pages = pages
        options = replace(warming.options, deadline=deadline)
        self._copying = CopyRun(
            warming.source, pages.inventory, pages.groups, warming.destination, options
        )
        self._watch = Watch(warming.destination, pages.survey)
        self._conflicting: list[pa.StringArray] = []
        if best is not None:
            self._watch.add_present(best)

    def run(self, on_copied: Callable[[int, int], None]) -> None:
        """Copy the pages in order. Callback and exceptions: see `prewarm`."""
        total = max(int(self._pages.cost.sum()), 1)

        def on_done(batch: PageBatch, done: MoveResult) -> None:
            on_copied(done.nbytes, total)
            self._watch.add(batch, done)
            others = done.statuses == GroupStatus.CONFLICT
            self._conflicting.append(batch.pages.filter(pa.array(others)))
            if self._watch.lost():
                self._copying.stop()

        self._copying.copy(self._pages.works_together(), on_done=on_done)
        if len(self._pages.order) > len(self._pages.items):
            # The result also counts pages that other processes wrote.
            self._warming.destination.flush()

    @property
    def conflicting(self) -> pa.StringArray:
        """Pages so far of which the destination has other objects."""
        return pa.concat_arrays([pa.array([], pa.string()), *self._conflicting])

    @property
    def facts(self) -> SliceFacts:
        """Sums so far."""
        result = self._copying.result
        reason = ""
        if result.full:
            reason = FULL
        elif self._watch.lost():
            reason = EVICTS
        elif not result.complete:
            reason = DEADLINE
        failed = result.count(GroupStatus.FAILED)
        return SliceFacts(
            there=result.count(GroupStatus.SAME),
            copied=result.count(GroupStatus.DONE),
            bytes=result.nbytes,
            not_pinned=self._pages.count(Action.COMPLETE) if self._warming.options.pin else 0,
            gone=result.count(GroupStatus.GONE),
            failed=failed + result.count(GroupStatus.CONFLICT),
            settled=not failed and reason != FULL,
            stopped_by=reason,
            problems=result.problems,
            remarks=list(self._warming.source.remarks),
        )


class Watch:
    """Record of the first written objects, which shows whether the destination evicts them."""

    def __init__(self, store: Store, survey: Survey) -> None:
        self._store = store
        self._route = survey.route
        anchors = (n for n, target in enumerate(survey.route.targets) if target.anchor)
        self._anchor = next(anchors, 0)
        self._keys: list[pa.BinaryArray] = []
        self._count = 0
        self._next = 0.0
        self._lost = False

    def add_present(self, pages: pa.StringArray) -> None:
        """Record the anchors of those pages that the destination has."""
        keys = self._route.keys(np.full(len(pages), self._anchor), pages)
        there = self._store.exists(pa.table({"key": keys}))
        self._add(keys.filter(pa.array(there)))

    def add(self, batch: PageBatch, result: MoveResult) -> None:
        """Record the first anchors written."""
        done = batch.pages.filter(pa.array(result.open))[: WATCHED - self._count]
        self._add(self._route.keys(np.full(len(done), self._anchor), done))

    def _add(self, keys: pa.BinaryArray) -> None:
        if len(keys):
            self._keys.append(keys)
            self._count += len(keys)

    def lost(self) -> bool:
        """Return whether a recorded object is missing; ask the store at most every few seconds."""
        if self._lost or not self._keys or time.monotonic() < self._next:
            return self._lost
        self._next = time.monotonic() + _WATCH_SECONDS
        rows = pa.table({"key": pa.concat_arrays(self._keys)})
        self._lost = not self._store.exists(rows).all()
        return self._lost
