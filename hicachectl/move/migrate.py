"""Migrate page groups to another store, unchanged or transformed for another deployment."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from hicachectl.backends.base import Status
from hicachectl.backends.capabilities import Confirm, Leases, Resumable
from hicachectl.formats.errors import StoreUnavailable, UsageError
from hicachectl.io.pipeline import Pipeline, batches
from hicachectl.move.batches import WRITING, Action
from hicachectl.move.journal import (
    Journal,
    JournalHeld,
    journal_path,
    profile_text,
    read_journal,
)
from hicachectl.move.migration_plan import plan_migration
from hicachectl.move.results import GroupStatus, RunResult
from hicachectl.move.runs import CopyRun
from hicachectl.move.survey import StorePair
from hicachectl.move.trailers import plan_trailers
from hicachectl.text.units import counted, human_size
from hicachectl.text.vocabulary import LOCK

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from hicachectl.backends.base import Store
    from hicachectl.move.batches import CopyOptions
    from hicachectl.move.migration_plan import MigrationPlan, MigrationRequest
    from hicachectl.move.results import MoveResult, Problem
    from hicachectl.move.work import PageBatch
    from hicachectl.pages.inventory import IntArray

FULL = "destination full"
_SAMPLE_BYTES = 64 << 20  # read to estimate how long a migration takes
_SAMPLE_OBJECTS = 1024


@dataclass(slots=True)
class MigrationOutcome:
    """Outcome of a migration or dry run.

    document: the command's JSON. problems: conflicts and failures. remarks: other messages.
    journal: path, if the migration is incomplete.
    """

    document: dict[str, Any]
    problems: list[Problem]
    remarks: list[str]
    journal: Path | None = None

    @property
    def all_well(self) -> bool:
        """Whether no group failed or conflicted, and the destination had room."""
        document = self.document
        troubled = document["failed"] or document["conflicts"]
        return not troubled and document["stopped_by"] != FULL


def migrate(
    source: Store,
    destination: Store,
    request: MigrationRequest,
    *,
    on_listed: Callable[[int], None] = lambda objects: None,
    on_begun: Callable[[], None] = lambda: None,
    on_moved: Callable[[int, int], None] = lambda nbytes, total: None,
) -> MigrationOutcome:
    """Copy page groups from one store to another.

    on_begun: called before the first write. on_moved: called with each batch's bytes written, and
    the bytes of the whole migration.

    Raises UsageError, ProfileError and UnsupportedByBackend before the first write,
    StoreUnavailable if a store is lost. An interrupt finishes or rolls back begun batches; the
    journal lists completed groups.
    """
    migration = _Migration(source, destination, request)
    plan = migration.plan(on_listed)
    if request.dry_run:
        return migration.rehearse(plan)
    return migration.carry_out(plan, on_begun, on_moved)


def not_begun(source: str, destination: str) -> MigrationOutcome:
    """Return the outcome of a migration between two URLs whose lock is held."""
    document: dict[str, Any] = {"source": source, "destination": destination}
    counts = ("pages", "objects", "bytes", "skipped", "gone", "conflicts", "failed", "moved")
    document |= dict.fromkeys(counts, 0)
    document |= {"seconds": 0.0, "resumed": 0, "complete": False, "stopped_by": LOCK}
    return MigrationOutcome({**document, "problems": []}, [], [])


class _Migration:
    def __init__(self, source: Store, destination: Store, request: MigrationRequest) -> None:
        """Check the request; read the journal."""
        self._started = time.monotonic()
        self._source = source
        self._destination = destination
        self._request = request
        if not destination.traits.writes:
            raise UsageError(
                f"{destination.url}: objects cannot be written to this store; give another "
                "destination"
            )
        if request.options.move and not source.traits.deletes:
            raise UsageError(
                f"{source.url}: objects cannot be deleted from this store; leave out --move"
            )
        target = request.destination_profile or request.profile
        self._stores = StorePair(source, destination, request.profile, target)
        self._trailers = plan_trailers(self._stores, request.options.trailers)
        self._options = replace(request.options, keeps_trailers=self._trailers.keeps)
        self._identity = {
            "source": source.url,
            "destination": destination.url,
            "grammar": self._stores.grammar,
            "profile": None if target is None else profile_text(target),
            "move": request.options.move,
        }
        self._journal_path, self._place_remark = journal_path(self._identity)
        self._progress = read_journal(self._journal_path, self._identity)
        self._earlier = self._progress if request.resume else None

    def plan(self, on_listed: Callable[[int], None]) -> MigrationPlan:
        plan = plan_migration(self._stores, self._request, self._trailers, on_listed)
        plan.settle_existing(self._request, self._earlier)
        plan.leave_too_large(self._request.options)
        return plan

    def rehearse(self, plan: MigrationPlan) -> MigrationOutcome:
        result = RunResult()
        result.objects, result.nbytes = plan.demand()
        result.counts[GroupStatus.DONE] = plan.count(*WRITING)
        result.counts[GroupStatus.SAME] = plan.count(Action.COMPARE)
        outcome = self._outcome(plan, result)
        outcome.document["estimated_seconds"] = _estimated_seconds(
            self._source, plan, self._request.options, result.nbytes
        )
        if (lack := self._lacking(result.nbytes)) is not None:
            outcome.remarks.append(lack)
        return outcome

    def carry_out(
        self,
        plan: MigrationPlan,
        on_begun: Callable[[], None],
        on_moved: Callable[[int, int], None],
    ) -> MigrationOutcome:
        options, total = self._options, plan.demand()[1]
        try:
            opened = Journal(
                self._journal_path,
                self._identity,
                earlier=self._progress,
                fresh=self._earlier is None,
                durable=options.move,  # only deletions from the source depend on the journal
            )
        except JournalHeld as held:
            outcome = self._outcome(plan, RunResult(complete=False), is_held=True)
            outcome.remarks.append(str(held))
            return outcome
        with opened as journal:
            if isinstance(self._destination, Resumable):
                self._destination.own_temporaries(journal.owner, sweep=self._progress is not None)
            lack = self._lacking(total)
            if lack is not None and self._request.space_check:
                raise StoreUnavailable(lack)
            on_begun()
            run = CopyRun(
                self._source, plan.inventory, plan.groups, self._destination, options, journal
            )
            if options.move and self._earlier is not None:
                for survey, items in plan.left_in_source(self._earlier):
                    run.remove(survey, items)

            def on_done(_batch: PageBatch, done: MoveResult) -> None:
                on_moved(done.nbytes, max(total, 1))

            result = run.copy(plan.works(), on_done=on_done)
            if plan.count(Action.SKIP):
                self._destination.flush()  # the report counts skipped pages as copied, too
            ended = result.complete and not result.count(GroupStatus.FAILED)
            if ended:
                journal.end()
        outcome = self._outcome(plan, result)
        outcome.journal = None if ended else self._journal_path
        if self._destination.traits.evicts and (lack is not None or result.full):
            outcome.remarks.append(
                f"{self._destination.url}: the pages need more room than is free, and this store "
                "evicts: the pages copied first may be evicted already; copy fewer pages (--match, "
                "--pages-from)"
            )
        return outcome

    def _lacking(self, nbytes: int) -> str | None:
        """Return a message if the destination lacks room."""
        free = self._destination.free_bytes()
        if free is None or nbytes <= free:
            return None
        return (
            f"{self._destination.url}: {human_size(nbytes)} to write, but only {human_size(free)} "
            "free; choose fewer pages (--match, --pages-from), make room or give --no-space-check"
        )

    def _outcome(
        self, plan: MigrationPlan, result: RunResult, *, is_held: bool = False
    ) -> MigrationOutcome:
        earlier = self._earlier
        problems = [*plan.problems, *result.problems]
        document = {
            "source": self._source.url,
            "destination": self._destination.url,
            "pages": result.count(GroupStatus.DONE),
            "objects": result.objects,
            "bytes": result.nbytes,
            "skipped": plan.count(Action.SKIP) + result.count(GroupStatus.SAME),
            "gone": result.count(GroupStatus.GONE),
            "conflicts": result.count(GroupStatus.CONFLICT) + plan.count(Action.CONFLICT),
            "failed": result.count(GroupStatus.FAILED) + plan.too_large,
            "moved": result.moved,
            "seconds": round(time.monotonic() - self._started, 3),
            "resumed": 0 if earlier is None else earlier.pages,
            "complete": result.complete,
            "stopped_by": LOCK if is_held else FULL if result.full else None,
            "problems": [{"page": p.page, "key": p.key, "detail": p.detail} for p in problems],
        }
        remarks = list(plan.remarks)
        if self._place_remark:
            remarks.append(self._place_remark)
        if self._progress is not None and earlier is None:
            remarks.append(
                "An earlier run of this migration was interrupted after "
                f"{counted(self._progress.pages, 'page')}; without --resume, this run did "
                "not use the journal of that run"
            )
        return MigrationOutcome(document, problems, [*remarks, *self._source.remarks])


def _estimated_seconds(
    source: Store, plan: MigrationPlan, options: CopyOptions, nbytes: int
) -> float | None:
    """Return the seconds to read `nbytes`, from a sample; None if reading has side effects.

    Writing overlaps with reading and is not measured; a slower destination takes longer.
    """
    if options.bytes_per_second is not None:
        return nbytes / options.bytes_per_second
    if isinstance(source, (Leases, Confirm)):
        return None
    rows, sizes = _sample(plan)
    if not len(rows):
        return 0.0
    began = time.monotonic()
    pipeline = Pipeline(
        source,
        plan.inventory.objects,
        batches(rows, sizes, most_objects=_SAMPLE_OBJECTS, most_bytes=8 << 20),
        lambda loaded: int(loaded.read.nbytes[loaded.read.statuses == Status.OK].sum()),
        buffer_bytes=options.buffer_bytes,
        jobs=options.jobs,
        identify=False,
    )
    read = sum(pipeline)
    spent = time.monotonic() - began
    return nbytes / read * spent if read else None


def _sample(plan: MigrationPlan) -> tuple[IntArray, IntArray]:
    """Return rows and sizes of the first objects to read."""
    rows = sizes = np.zeros(0, dtype=np.int64)
    if (work := next(plan.works(), None)) is not None:
        _, _, rows = work.survey.rows.objects(work.items[:_SAMPLE_OBJECTS])
        sizes = work.survey.sizes[rows]
    fits = np.cumsum(sizes) <= _SAMPLE_BYTES
    fits[:1] = True
    fits[_SAMPLE_OBJECTS:] = False
    return rows[fits], sizes[fits]
