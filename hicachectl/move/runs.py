"""Copy page groups in order, retry raced groups, and remove moved groups from the source."""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from hicachectl.backends.capabilities import Leases
from hicachectl.move.copy_plan import PageWork
from hicachectl.move.copying import Executor
from hicachectl.move.results import CopyFacts, GroupStatus, MoveResult, Problem
from hicachectl.move.survey import COMPARING, READS_BACK, Action
from hicachectl.move.trial import PAGES as TRIAL_PAGES
from hicachectl.move.trial import Trial
from hicachectl.move.withdrawal import withdraw_listed
from hicachectl.text.vocabulary import FULL

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from hicachectl.formats.arrays import IntArray
    from hicachectl.move.copy_plan import CopyPlan, PageBatch
    from hicachectl.move.store_pair import StorePair
    from hicachectl.move.survey import Survey
    from hicachectl.pages.groups import PageGroups

# Batches are large enough that objects share calls and syncs, and small enough that several run at
# once.
_BATCH_BYTES = 64 << 20
_LEAST_OBJECTS = 256
_LAST_BYTES = 256 << 10  # bytes of a batch when the destination is nearly full
# Waits before each retry of raced groups, so that their writer can finish. Mooncake drops the
# unfinished objects of a killed writer after 30 s.
_WAIT_SECONDS = (0.5, 1.5, 4.0, 10.0, 20.0)
_LEASE_SECONDS = 15.0  # usually longer than a lease that a store grants for a read


class CopyRun:
    """Copy of page groups. With the option `move`, it also removes the groups from the source.

    facts: sums over all batches so far.
    """

    def __init__(self, stores: StorePair, groups: PageGroups, facts: CopyFacts) -> None:
        """Prepare the copy, and claim the destination (`StorePair.claim`).

        groups: the groups of the source.
        facts: the sums that the copy adds to.
        Raises ProfileError, StoreUnavailable.
        """
        stores.claim()
        self.facts = facts
        self._source = stores.source
        self._adopts = stores.adopts
        self._groups = groups
        self._destination = stores.destination
        self._options = stores.options
        self._jobs = stores.jobs
        self._executor = Executor(stores, groups.inventory.objects, self._copied)
        self._lock = threading.Lock()
        # Rows of the groups, for each survey.
        self._raced: dict[Survey, list[int]] = defaultdict(list)
        self._without_room: dict[Survey, list[int]] = defaultdict(list)
        self._left_out = False  # whether some batches were not begun
        # Groups to remove from the source, each with the time at which the leases of its reads end.
        self._leaving: deque[tuple[float, Survey, IntArray]] = deque()
        self._trial = Trial(stores.source, stores.destination, groups)
        # Pages that could not be read into memory for their trial. They leave the source only after
        # the trial has passed with other pages.
        self._untried: list[tuple[Survey, IntArray]] = []

    def stop(self) -> None:
        """Begin no further batch."""
        self._executor.stop()

    def copy(
        self,
        plans: Sequence[CopyPlan],
        on_copied: Callable[[int, int], None],
        *,
        on_done: Callable[[PageBatch, MoveResult], None] = lambda batch, result: None,
    ) -> None:
        """Copy the groups of plans in order.

        on_copied: takes the bytes written of each batch, and the bytes of the plans.
        on_done: takes each batch and its result.
        Both functions are called in the thread that called `copy`.
        If an exception ends the copy, batches already begun are finished first.
        Raises StoreUnavailable, and UsageError if a group is larger than the buffer.
        """
        total = max(sum(plan.demand()[1] for plan in plans), 1)

        def noted(batch: PageBatch, result: MoveResult) -> None:
            on_copied(result.nbytes, total)
            on_done(batch, result)

        works, full = [work for plan in plans for work in plan.works()], self._executor.full
        rest = works
        if self._options.move and works:
            # The trial removes pages while no pass is running, so a short pass comes first.
            self._pass([works[0].only(slice(TRIAL_PAGES))], noted)
            self._remove(self._free(all_=True))
            rest = [works[0].only(slice(TRIAL_PAGES, None)), *works[1:]]
        self._pass(rest, noted)
        if full.is_set() and not self._executor.stopped:
            self._fill_up(works, noted)
        for seconds in _WAIT_SECONDS:
            if not self._raced or full.is_set():
                break
            time.sleep(seconds)
            self._try_again(noted)
        for survey, items in self._raced.items():
            why = "another writer is writing this page or was killed while writing it; run again"
            self._fail(survey, np.array(items), why)
        self._remove(self._free(all_=True))
        self._trial.finish()
        for survey, unread in self._untried:
            why = "copied, but still in the source, because it cannot be read again"
            self._fail(survey, unread, why)
        if any(plan.count(Action.SKIP, *COMPARING) for plan in plans):
            # Skipped and compared pages count as copied, and another writer may not have synced
            # them.
            self._destination.flush()
        if full.is_set():
            self.facts.complete, self.facts.stopped_by = False, FULL

    def _pass(
        self,
        works: Sequence[PageWork],
        on_done: Callable[[PageBatch, MoveResult], None],
        *,
        alone: bool = False,
    ) -> None:
        """Copy the groups of some works. alone: whether to copy small batches one after another."""
        options = self._options
        jobs = 1 if alone else self._jobs
        most_bytes = min(_LAST_BYTES if alone else _BATCH_BYTES, options.buffer_bytes // jobs)
        batches = self._batches(works, most_bytes)
        self.facts.complete &= self._executor.run(batches, jobs=jobs, on_done=on_done)

    def _batches(self, works: Iterable[PageWork], most_bytes: int) -> Iterator[PageBatch]:
        executor = self._executor
        most_objects = max(_LEAST_OBJECTS, self._destination.limits.batch_objects)
        cut = (
            work.batches(
                verify=self._options.verify,
                copies=executor.copies,
                most_bytes=most_bytes,
                most_objects=most_objects,
            )
            for work in works
        )
        for batch in chain.from_iterable(cut):
            if executor.full.is_set() or executor.stopped:
                self._left_out = True
                return
            yield batch

    def _fill_up(
        self, works: Sequence[PageWork], on_done: Callable[[PageBatch, MoveResult], None]
    ) -> None:
        """Retry the groups that found no room, one batch at a time, until the destination is full.

        Concurrent batches competed for the last room, and were rolled back. Now there may be room
        for some of them.
        """
        left_out, begun = self._left_out, self._without_room
        last = [work.only(np.isin(work.items, begun[work.survey])) for work in works]
        self._executor.full.clear()
        self._pass(last, on_done, alone=True)
        if left_out:
            self._executor.full.set()

    def _try_again(self, on_done: Callable[[PageBatch, MoveResult], None]) -> None:
        """Retry raced groups. Compare the objects that exist now, and write the missing objects.

        A store drops the unfinished objects of a killed writer after some time.
        """
        works = []
        for listed, items in self._raced.items():
            chosen = np.array(sorted(items))
            if self._adopts:
                works.append(PageWork(listed, chosen, Action.ADOPT))
            else:
                works.append(PageWork(listed.as_if_written(chosen), chosen, Action.COMPLETE))
        self._raced.clear()
        self._pass(works, on_done)

    def _copied(self, batch: PageBatch, result: MoveResult) -> None:
        """Count a batch's result, and remove the completed groups of a move from the source."""
        survey, options = batch.survey, self._options
        done = batch.items[np.isin(result.statuses, (GroupStatus.DONE, GroupStatus.SAME))]
        if options.move:
            if batch.action is not Action.CLEAR:
                left_over = survey.left_over[done]
                why = "copied, but kept in the source, because some of its objects were not copied"
                self._fail(survey, done[left_over], why)
                done = done[~left_over]
            if len(done) and batch.action in READS_BACK:
                # After the removal from the source, only the copy is left, and another writer of
                # equal objects may not have synced them.
                self._destination.flush()
        with self._lock:
            self.facts.add(result)
            for status, groups in (
                (GroupStatus.NO_ROOM, self._without_room),
                (GroupStatus.RACED, self._raced),
            ):
                if len(some := batch.items[result.statuses == status]):
                    groups[survey] += some.tolist()
        if options.move and len(done):
            wait = _LEASE_SECONDS if isinstance(self._source, Leases) else 0.0
            self._leaving.append((time.monotonic() + wait, survey, done))
            if self._trial.passed:
                self._remove(self._free())

    def _fail(self, survey: Survey, items: IntArray, why: str) -> None:
        pages = survey.pages.take(pa.array(items)).to_pylist()
        with self._lock:
            self.facts.fail([Problem(page, None, why) for page in pages])

    def _free(self, *, all_: bool = False) -> Iterator[tuple[Survey, IntArray]]:
        """Yield the groups to remove whose leases have ended.

        all_: whether to yield all groups, even if their leases have not ended.
        """
        while True:
            with self._lock:
                if not self._leaving or not (all_ or self._leaving[0][0] <= time.monotonic()):
                    return
                _, survey, items = self._leaving.popleft()
            yield survey, items

    def _remove(self, leaving: Iterable[tuple[Survey, IntArray]]) -> None:
        """Remove groups from the source. Until the trial has passed, remove one group at a time."""
        for survey, items in leaving:
            tried = 0
            while tried < len(items) and not self._trial.passed:
                item = items[tried : tried + 1]
                tried += 1
                removed = self._trial.remove(survey, int(item[0]))
                if removed is None:
                    self._untried.append((survey, item))
                else:
                    self._note_removed(removed)
            self._withdraw(survey, items[tried:])
        if self._trial.passed:
            with self._lock:
                untried, self._untried = self._untried, []
            for survey, items in untried:
                self._withdraw(survey, items)

    def _withdraw(self, survey: Survey, items: IntArray) -> None:
        if len(items):
            numbers = survey.groups[items]
            self._note_removed(withdraw_listed(self._source, self._groups, numbers))

    def _note_removed(self, removed: MoveResult) -> None:
        """Count a removal's result."""
        gone = np.isin(removed.statuses, (GroupStatus.DONE, GroupStatus.GONE))
        stays = np.isin(removed.statuses, (GroupStatus.KEPT, GroupStatus.IN_FLIGHT))
        kept = removed.pages.filter(pa.array(stays)).to_pylist()
        with self._lock:
            self.facts.moved += int(gone.sum())
            why = "copied, but still in the source"
            failed = [replace(p, detail=f"{why}: {p.detail}") for p in removed.problems]
            self.facts.fail(failed)
            why += ", because a server has written to it meanwhile; run again"
            self.facts.fail([Problem(page, None, why) for page in kept])
