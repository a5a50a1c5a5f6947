"""Move a store's page groups to another store, as they are or as another deployment has them."""

from __future__ import annotations

import time
from dataclasses import dataclass
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
from hicachectl.text.units import human_size
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


def migrate(
    source: Store,
    destination: Store,
    request: MigrationRequest,
    *,
    on_listed: Callable[[int], None] = lambda objects: None,
    on_begun: Callable[[], None] = lambda: None,
    on_moved: Callable[[int, int], None] = lambda nbytes, total: None,
) -> MigrationOutcome:
    """Copy page groups from a store to another; what is there already stays.

    on_listed is told objects as they are listed, on_moved bytes as groups are done and how many
    there are in all; on_begun is called before anything is written. Raises UsageError,
    ProfileError and UnsupportedByBackend before that, StoreUnavailable for a lost store.
    Interrupted at any point, what was begun is finished or taken back, and the journal says how
    far it came.
    """
    migration = _Migration(source, destination, request)
    plan = migration.plan(on_listed)
    if request.dry_run:
        return migration.rehearse(plan)
    return migration.carry_out(plan, on_begun, on_moved)


def not_begun(source: str, destination: str) -> MigrationOutcome:
    """Return the outcome of a migration between two URLs that another run's lock stopped."""
    document: dict[str, Any] = {"source": source, "destination": destination}
    counts = ("pages", "objects", "bytes", "skipped", "gone", "conflicts", "failed", "moved")
    document |= dict.fromkeys(counts, 0)
    document |= {"seconds": 0.0, "resumed": 0, "complete": False, "stopped_by": LOCK}
    return MigrationOutcome({**document, "problems": []}, [], [])


class _Migration:
    """One migration, from what was asked for to its outcome."""

    def __init__(self, source: Store, destination: Store, request: MigrationRequest) -> None:
        """Refuse what cannot be done; nothing has been listed yet."""
        self._started = time.monotonic()
        self._source = source
        self._destination = destination
        self._request = request
        if not destination.traits.writes:
            raise UsageError(f"{destination.url}: cannot be written to")
        if request.options.move and not source.traits.deletes:
            raise UsageError(
                f"{source.url}: --move: its objects cannot be deleted; copy without it"
            )
        target = request.destination_profile or request.profile
        self._stores = StorePair(source, destination, request.profile, target)
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
        """List both stores, and decide what is done with each group."""
        plan = plan_migration(self._stores, self._request, on_listed)
        plan.settle_existing(self._request, self._earlier)
        plan.leave_too_large(self._request.options)
        return plan

    def rehearse(self, plan: MigrationPlan) -> MigrationOutcome:
        """Say what would be done."""
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
        """Copy, and with --move remove from the source."""
        options, total = self._request.options, plan.demand()[1]
        try:
            opened = Journal(
                self._journal_path,
                self._identity,
                earlier=self._progress,
                fresh=self._earlier is None,
                durable=options.move,  # only what is deleted from the source hangs on it
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
                self._destination.flush()  # what was there already is reported as well
            ended = result.complete and not result.count(GroupStatus.FAILED)
            if ended:
                journal.end()
        outcome = self._outcome(plan, result)
        outcome.journal = None if ended else self._journal_path
        if self._destination.traits.evicts and (lack is not None or result.full):
            outcome.remarks.append(
                f"{self._destination.url}: has not the room, and evicts to make some: what was "
                "copied first may be gone again"
            )
        return outcome

    def _lacking(self, nbytes: int) -> str | None:
        """Say what room the destination lacks."""
        free = self._destination.free_bytes()
        if free is None or nbytes <= free:
            return None
        return (
            f"{self._destination.url}: {human_size(nbytes)} to write, {human_size(free)} free; "
            "choose fewer pages (--match, --pages-from), make room, or give --no-space-check"
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
                f"an earlier run of this migration did not end ({self._progress.pages} pages were "
                "copied); what it copied is not copied again, and --resume would have gone on "
                "from its journal"
            )
        return MigrationOutcome(document, problems, [*remarks, *self._source.remarks])


def _estimated_seconds(
    source: Store, plan: MigrationPlan, options: CopyOptions, nbytes: int
) -> float | None:
    """Return how long reading `nbytes` takes, from reading a little; None where that disturbs.

    Writing overlaps with reading, and is not tried: a slower destination takes longer.
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
    """Return rows and sizes of the first objects that would be read."""
    rows = sizes = np.zeros(0, dtype=np.int64)
    if (work := next(plan.works(), None)) is not None:
        _, _, rows = work.survey.rows.objects(work.items[:_SAMPLE_OBJECTS])
        sizes = work.survey.sizes[rows]
    fits = np.cumsum(sizes) <= _SAMPLE_BYTES
    fits[:1] = True
    fits[_SAMPLE_OBJECTS:] = False
    return rows[fits], sizes[fits]
