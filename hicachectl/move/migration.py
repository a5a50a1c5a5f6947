"""Migration requests, and their stores."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import msgspec

from hicachectl.formats.errors import UsageError
from hicachectl.move.batches import CopyOptions
from hicachectl.move.store_pair import StorePair
from hicachectl.move.trailers import plan_trailers
from hicachectl.pages.in_flight import ListingTime
from hicachectl.pages.selection import EVERYTHING, Selection
from hicachectl.text.vocabulary import DEFAULT_GRACE_SECONDS

if TYPE_CHECKING:
    from hicachectl.backends.base import Store
    from hicachectl.formats.profile import Profile
    from hicachectl.move.survey import IfExists

MOVE, OVERWRITE = "--move", "--if-exists overwrite"


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationRequest:
    """Pages to copy, and options of the migration.

    profile: profile of the source; None if only its keys are known, so that every object keeps key
        and bytes.
    destination_profile: profile of the new deployment; None for the same as `profile`.
    partial: whether to copy groups that are not whole.
    damaged: whether to copy groups with findings of severity error.
    allow_empty: whether to accept a source without pages.
    """

    profile: Profile | None = None
    destination_profile: Profile | None = None
    selection: Selection = EVERYTHING
    grace_seconds: float = DEFAULT_GRACE_SECONDS
    if_exists: IfExists = "skip"
    partial: bool = False
    damaged: bool = False
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
        pages = self.selection.pages
        return 0 if pages is None else pages.labelled

    @property
    def compares(self) -> IfExists:
        """What to do with groups that the destination has: --verify compares them."""
        skips = self.if_exists == "skip" and self.options.verify
        return "verify" if skips else self.if_exists

    @property
    def text(self) -> bytes:
        """Text of all that decides what the migration does, besides the stores.

        Moments are left out: an age, such as 2h, means another one in each run.
        """
        options = self.options
        decides = replace(
            self,
            selection=replace(self.selection, since=None, before=None),
            options=CopyOptions(
                verify=options.verify, move=options.move, trailers=options.trailers
            ),
        )
        return msgspec.json.encode(decides, order="deterministic")


class Migration:
    """A request between two stores, checked.

    stores: the pair of stores.
    trailers: how the trailers of objects are copied.
    options: options of the copies.
    columns: columns to list of the source, besides those that every listing has.
    remarks: messages about the request.
    """

    def __init__(self, source: Store, destination: Store, request: MigrationRequest) -> None:
        """Check the request. Raises UsageError, ProfileError, UnsupportedByBackend."""
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

    @property
    def identity(self) -> bytes:
        """Text that is equal for migrations that do the same between the same stores."""
        urls = map(os.fsencode, (self.source.url, self.destination.url))
        return b"\0".join((*urls, self.request.text))

    def listing_time(self) -> ListingTime:
        """Note the start of the listing of the source, which a copy does not change.

        Raises StoreUnavailable.
        """
        changes = self.request.options.move and not self.request.dry_run
        return ListingTime.now(self.source, changes=changes)
