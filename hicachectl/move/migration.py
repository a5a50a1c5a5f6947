"""Migration requests, and their stores and journals."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from hicachectl.formats.errors import UsageError
from hicachectl.move.batches import CopyOptions
from hicachectl.move.journal import (
    Journal,
    JournalFiles,
    journal_path,
    profile_text,
    read_journals,
)
from hicachectl.move.store_pair import StorePair
from hicachectl.move.temporaries import mark_writes
from hicachectl.move.trailers import plan_trailers
from hicachectl.pages.in_flight import ListingTime
from hicachectl.pages.selection import EVERYTHING, Selection
from hicachectl.text.units import counted
from hicachectl.text.vocabulary import DEFAULT_GRACE_SECONDS

if TYPE_CHECKING:
    from hicachectl.backends.base import Store
    from hicachectl.formats.profile import Profile
    from hicachectl.move.survey import IfExists
    from hicachectl.requests.files import PageList

MOVE, OVERWRITE = "--move", "--if-exists overwrite"


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationRequest:
    """Pages to copy, and options of the migration.

    profile: of the source; None: only its keys are known, so every object keeps key and bytes.
    destination_profile: of the new deployment; None: the same as `profile`. pages: only these.
    partial, damaged: include groups that are not whole, or have findings of severity error.
    resume: continue from an earlier run's journal. allow_empty: accept a source without pages.
    """

    profile: Profile | None = None
    destination_profile: Profile | None = None
    selection: Selection = EVERYTHING
    pages: PageList | None = None
    grace_seconds: float = DEFAULT_GRACE_SECONDS
    if_exists: IfExists = "skip"
    partial: bool = False
    damaged: bool = False
    resume: bool = False
    allow_empty: bool = False
    dry_run: bool = False
    space_check: bool = True
    options: CopyOptions = field(default_factory=CopyOptions)

    @property
    def needs_pages(self) -> bool:
        """Whether a source without pages is refused; an earlier move may have emptied it."""
        return not (self.allow_empty or self.options.move)

    @property
    def labelled(self) -> int:
        """Number of listed rows that name a group."""
        return 0 if self.pages is None else self.pages.labelled


class Migration:
    """A request between two stores, checked, with the progress of its earlier runs.

    stores: the pair. trailers: how they are copied. options: of the copies.
    columns: to list of the source, besides those that every listing has.
    earlier: progress to continue from; None: none. remarks: about the request and its journal.
    """

    def __init__(
        self,
        source: Store,
        destination: Store,
        request: MigrationRequest,
        journals: JournalFiles | None = None,
    ) -> None:
        """Check the request; read the journals.

        journals: of this migration, all to be continued; None: the one of the user's state
        directory, continued if the request says so. Raises UsageError, ProfileError,
        UnsupportedByBackend, and FormatError if a journal is damaged.
        """
        if not destination.traits.writes:
            raise UsageError(
                f"{destination.url}: objects cannot be written to this store; give another "
                "destination"
            )
        if request.options.move and not source.traits.deletes:
            raise UsageError(
                f"{source.url}: objects cannot be deleted from this store; leave out --move"
            )
        self.source = source
        self.destination = destination
        self.request = request
        target = request.destination_profile or request.profile
        self.stores = StorePair(source, destination, request.profile, target)
        if request.options.move:
            self.stores.refuse_removals(MOVE)
        elif request.if_exists == "overwrite":
            self.stores.refuse_removals(OVERWRITE)
        self.trailers = plan_trailers(self.stores, request.options.trailers)
        self.options = replace(request.options, keeps_trailers=self.trailers.keeps)
        # A move needs versions: objects rewritten since the listing must stay.
        self.columns = {"version"} & source.traits.columns if request.options.move else set[str]()
        self.remarks = [*self.stores.remarks, *filter(None, [self.trailers.remark])]
        self._identity = {
            "source": source.url,
            "destination": destination.url,
            "grammar": self.stores.grammar,
            "profile": None if target is None else profile_text(target),
            "move": request.options.move,
        }
        self._fresh = journals is None and not request.resume
        if journals is None:
            path, place_remark = journal_path(self._identity)
            journals = JournalFiles(path, (path,))
            self.remarks += filter(None, [place_remark])
        self.journals = journals
        self._progress = read_journals(journals.earlier, self._identity)
        self.earlier = None if self._fresh else self._progress
        if self._progress is not None and self.earlier is None:
            self.remarks.append(
                "An earlier run of this migration was interrupted after "
                f"{counted(self._progress.pages, 'page')}; without --resume, this run did "
                "not use the journal of that run"
            )

    def listing_time(self) -> ListingTime:
        """Note the start of the listing of the source, which a copy does not change.

        Raises StoreUnavailable.
        """
        changes = self.request.options.move and not self.request.dry_run
        return ListingTime.now(self.source, changes=changes)

    def begin(self) -> Journal:
        """Open this run's journal; remove unfinished writes of earlier runs.

        Raises JournalHeld, UsageError, StoreUnavailable.
        """
        journal = Journal(
            self.journals,
            self._identity,
            earlier=self._progress,
            fresh=self._fresh,
            durable=self.options.move,  # only deletions from the source depend on the journal
        )
        try:
            marks = [] if self._progress is None else self._progress.marks
            earlier = {*marks, *self.journals.unfinished}
            mark_writes(self.destination, journal.owner, earlier)
            if self.options.move:
                # A killed run can leave its probe in the source.
                mark_writes(self.source, journal.owner, earlier)
        except BaseException:
            journal.close()
            raise
        return journal
