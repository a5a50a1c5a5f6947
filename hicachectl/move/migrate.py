"""Move a store's page groups to another store, as they are or as another deployment has them."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from hicachectl.backends.capabilities import Profiled, Resumable
from hicachectl.formats.errors import StoreUnavailable, UsageError
from hicachectl.move.agenda import Agenda, Request, make_agenda
from hicachectl.move.carrying import Carrier, Tally
from hicachectl.move.decisions import WRITING, Action, Problem
from hicachectl.move.estimate import estimated_seconds
from hicachectl.move.journal import (
    Journal,
    JournalHeld,
    Progress,
    journal_path,
    profile_text,
    read_journal,
)
from hicachectl.move.preparing import find_router, settle_grammar
from hicachectl.move.resuming import left_in_source, settle_existing
from hicachectl.text.units import human_size
from hicachectl.text.vocabulary import LOCK

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from hicachectl.backends.base import Store
    from hicachectl.move.delivery import Delivered

FULL = "destination full"


@dataclass(slots=True)
class Outcome:
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
    request: Request,
    *,
    on_listed: Callable[[int], None] = lambda objects: None,
    on_begun: Callable[[], None] = lambda: None,
    on_moved: Callable[[int, int], None] = lambda nbytes, total: None,
) -> Outcome:
    """Copy page groups from a store to another; what is there already stays.

    on_listed is told objects as they are listed, on_moved bytes as groups are done and how many
    there are in all; on_begun is called before anything is written. Raises UsageError,
    ProfileError and UnsupportedByBackend before that, StoreUnavailable for a lost store.
    Interrupted at any point, what was begun is finished or taken back, and the journal says how
    far it came.
    """
    run = _Run(source, destination, request)
    agenda = run.list(on_listed)
    if request.dry_run:
        return run.rehearse(agenda)
    return run.carry(agenda, on_begun, on_moved)


def not_begun(source: str, destination: str) -> Outcome:
    """Return the outcome of a migration between two URLs that another run's lock stopped."""
    document: dict[str, Any] = {"source": source, "destination": destination}
    counts = ("pages", "objects", "bytes", "skipped", "gone", "conflicts", "failed", "moved")
    document |= dict.fromkeys(counts, 0)
    document |= {"seconds": 0.0, "resumed": 0, "complete": False, "stopped_by": LOCK}
    return Outcome({**document, "problems": []}, [], [])


class _Run:
    """One migration, from what was asked for to its outcome."""

    def __init__(self, source: Store, destination: Store, request: Request) -> None:
        """Refuse what cannot be done; nothing has been listed yet."""
        self._started = time.monotonic()
        self._source = source
        self._destination = destination
        self._request = request
        if not destination.traits.writes:
            raise UsageError(f"{destination.url}: cannot be written to")
        if request.manner.move and not source.traits.deletes:
            raise UsageError(
                f"{source.url}: --move: its objects cannot be deleted; copy without it"
            )
        self._target = request.destination_profile or request.profile
        self._grammar = settle_grammar(source, destination)
        self._routes_of = find_router(
            source, destination, self._grammar, request.profile, self._target
        )
        if self._target is not None and isinstance(destination, Profiled):
            destination.use_profile(self._target)
        self._identity = {
            "source": source.url,
            "destination": destination.url,
            "grammar": self._grammar,
            "profile": None if self._target is None else profile_text(self._target),
            "move": request.manner.move,
        }
        self._journal_path, self._place_remark = journal_path(self._identity)
        self._progress = read_journal(self._journal_path, self._identity)
        self._earlier = self._progress if request.resume else None

    def list(self, on_listed: Callable[[int], None]) -> Agenda:
        """List both stores, and give every group its turn."""
        agenda = make_agenda(
            self._source,
            self._destination,
            self._request,
            self._routes_of,
            self._grammar,
            on_listed,
        )
        settle_existing(agenda, self._request, self._earlier)
        agenda.leave_too_large(self._request.manner)
        return agenda

    def rehearse(self, agenda: Agenda) -> Outcome:
        """Say what would be done."""
        objects, nbytes = agenda.demand()
        tally = Tally(pages=agenda.count(*WRITING), objects=objects, nbytes=nbytes)
        tally.same = agenda.count(Action.COMPARE)
        outcome = self._outcome(agenda, tally)
        outcome.document["estimated_seconds"] = estimated_seconds(
            self._source, agenda.inventory, agenda.orders(), self._request.manner, nbytes
        )
        if (lack := self._lacking(nbytes)) is not None:
            outcome.remarks.append(lack)
        return outcome

    def carry(
        self,
        agenda: Agenda,
        on_begun: Callable[[], None],
        on_moved: Callable[[int, int], None],
    ) -> Outcome:
        """Do it."""
        manner, total = self._request.manner, agenda.demand()[1]
        try:
            opened = Journal(
                self._journal_path,
                self._identity,
                earlier=self._progress,
                fresh=self._earlier is None,
                durable=manner.move,  # only what is deleted from the source hangs on it
            )
        except JournalHeld as held:
            outcome = self._outcome(agenda, Tally(complete=False), is_held=True)
            outcome.remarks.append(str(held))
            return outcome
        with opened as journal:
            if isinstance(self._destination, Resumable):
                self._destination.own_temporaries(journal.owner, sweep=self._progress is not None)
            lack = self._lacking(total)
            if lack is not None and self._request.space_check:
                raise StoreUnavailable(lack)
            on_begun()
            carrier = Carrier(
                self._source, agenda.inventory, agenda.groups, self._destination, manner, journal
            )
            if manner.move and self._earlier is not None:
                self._finish_removals(agenda, carrier, self._earlier)

            def on_done(delivered: Delivered) -> None:
                on_moved(delivered.nbytes, max(total, 1))

            tally = carrier.carry(agenda.orders(), on_done=on_done)
            if agenda.count(Action.SKIP):
                self._destination.flush()  # what was there already is reported as well
            ended = tally.complete and not tally.failed
            if ended:
                journal.end()
        outcome = self._outcome(agenda, tally)
        outcome.journal = None if ended else self._journal_path
        if self._destination.traits.evicts and (lack is not None or tally.full):
            outcome.remarks.append(
                f"{self._destination.url}: has not the room, and evicts to make some: what was "
                "copied first may be gone again"
            )
        return outcome

    def _finish_removals(self, agenda: Agenda, carrier: Carrier, earlier: Progress) -> None:
        """Delete what an interrupted run has left of pages that it was deleting."""
        for survey, actions in zip(agenda.surveys, agenda.actions, strict=True):
            items = left_in_source(survey, actions, earlier)
            if len(items):
                carrier.remove(survey, items)

    def _lacking(self, nbytes: int) -> str | None:
        """Say what room the destination lacks."""
        free = self._destination.free_bytes()
        if free is None or nbytes <= free:
            return None
        return (
            f"{self._destination.url}: {human_size(nbytes)} to write, {human_size(free)} free; "
            "choose fewer pages (--match, --pages-from), make room, or give --no-space-check"
        )

    def _outcome(self, agenda: Agenda, tally: Tally, *, is_held: bool = False) -> Outcome:
        earlier = self._earlier
        problems = [*agenda.problems, *tally.problems]
        document = {
            "source": self._source.url,
            "destination": self._destination.url,
            "pages": tally.pages,
            "objects": tally.objects,
            "bytes": tally.nbytes,
            "skipped": agenda.count(Action.SKIP) + tally.same,
            "gone": tally.gone,
            "conflicts": tally.conflicts + agenda.count(Action.CONFLICT),
            "failed": tally.failed + agenda.too_large,
            "moved": tally.moved,
            "seconds": round(time.monotonic() - self._started, 3),
            "resumed": 0 if earlier is None else earlier.pages,
            "complete": tally.complete,
            "stopped_by": LOCK if is_held else FULL if tally.full else None,
            "problems": [asdict(problem) for problem in problems],
        }
        remarks = agenda.remarks()
        if self._place_remark:
            remarks.append(self._place_remark)
        if self._progress is not None and earlier is None:
            remarks.append(
                f"an earlier run of this migration did not end ({self._progress.pages} pages were "
                "copied); what it copied is not copied again, and --resume would have gone on "
                "from its journal"
            )
        return Outcome(document, problems, [*remarks, *self._source.remarks])
