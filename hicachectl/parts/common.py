"""Shared by the jobs of several commands: identities of runs, the listing, limits of a part."""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from hicachectl.backends.capabilities import Archive, Leases
from hicachectl.formats.errors import FormatError, UsageError
from hicachectl.formats.profile import profile_to_mapping
from hicachectl.move.run_mark import RunMark
from hicachectl.pages.in_flight import ListingTime
from hicachectl.pages.published import Listing
from hicachectl.parts.manifest import LIST_AGAIN, MANIFEST

if TYPE_CHECKING:
    from hicachectl.backends.base import Store
    from hicachectl.formats.profile import Profile
    from hicachectl.move.batches import CopyOptions
    from hicachectl.pages.selection import PageList, Selection
    from hicachectl.parts.job import PartInput
    from hicachectl.parts.manifest import Manifest

_DIGEST_DIGITS = 12


def selection_identity(selection: Selection) -> dict[str, Any]:
    """Return the members of a run's identity for filters.

    An age means another time in each process, so the times are the lister's.
    """
    members = {f"--{field.name}": getattr(selection, field.name) for field in fields(selection)}
    members |= {name: "given" for name in ("--since", "--before") if members[name] is not None}
    members["--state"] = list(members.pop("--states"))
    if selection.pages is not None:
        members["--pages"] = _shown(selection.pages)
    return members


def published_selection(selection: Selection) -> Selection:
    """Return what the lister publishes of a selection: its times. Each part reads its page list."""
    return replace(selection, pages=None)


def _shown(pages: PageList) -> str:
    """Return a text that differs between lists of pages."""
    text = json.dumps([pages.pages, pages.groups]).encode()
    return f"{len(pages.pages)} rows, SHA-256 {hashlib.sha256(text).hexdigest()[:_DIGEST_DIGITS]}"


def profile_identity(name: str, profile: Profile | None) -> dict[str, Any]:
    """Return the members of a run's identity for a profile, one for each field."""
    mapping = {} if profile is None else profile_to_mapping(profile)
    return {f"{name}: {field}": value for field, value in mapping.items()}


def listing_of(manifest: Manifest, grammar: str, profile: Profile | None) -> Listing:
    """Return the published listing without its objects. Raises FormatError."""
    try:
        return Listing.from_mapping(manifest.published.table, grammar, profile, MANIFEST)
    except FormatError as error:
        raise FormatError(f"{error}; {LIST_AGAIN}") from error


def listing_time(given: PartInput) -> ListingTime:
    """Return when the lister listed the store."""
    published, began = given.manifest.published, time.monotonic() - given.age()
    return ListingTime(
        start_ns=published.listing_ns, duration_ns=published.duration_ns, began=began
    )


def refuse_pack(destination: Store) -> None:
    """Raise UsageError if a destination is a pack."""
    if isinstance(destination, Archive):
        raise UsageError(
            f"{destination.url}: several processes cannot write one pack; give a directory as "
            "destination, or use one process"
        )


def share_of(limit: int | None, divided: int) -> int | None:
    """Return a part's share of a limit of the whole run, at least 1; None without a limit."""
    return None if limit is None else max(1, limit // divided)


def jobs_of_part(jobs: int | None, usual: int, given: PartInput, *read: Store) -> int | None:
    """Return the number of jobs of a part; None for the command's default.

    jobs: number given by --jobs. usual: default number of one process. read: stores to be read. If
    reads grant leases, the parts of a machine then lease about as many objects as one process.
    """
    shared = given.parts_here > 1 and any(isinstance(store, Leases) for store in read)
    if jobs is None and shared:
        return max(1, usual // given.parts_here)
    return jobs


def options_of_part(options: CopyOptions, given: PartInput, *read: Store) -> CopyOptions:
    """Return the options of a part that copies, with its share of the limits of the whole run.

    read: stores to be read.
    """
    return replace(
        options,
        jobs=jobs_of_part(options.jobs, options.job_count, given, *read),
        bytes_per_second=share_of(options.bytes_per_second, given.divided),
    )


def sweep_attempts(given: PartInput, *stores: Store) -> None:
    """Remove the unfinished writes of all attempts at a part. Call it when its work is done.

    Killed attempts left some. An attempt that is at work beside this one loses its own, but this
    one's result comes first.
    """
    RunMark(given.owner, ended=(given.owner,)).put(*stores)
