"""What the jobs of several commands share: identities of their runs, and limits of a part."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hicachectl.backends.capabilities import Archive, Leases
from hicachectl.formats.errors import UsageError
from hicachectl.formats.profile import profile_to_mapping

if TYPE_CHECKING:
    from hicachectl.backends.base import Store
    from hicachectl.formats.profile import Profile
    from hicachectl.pages.selection import Selection


def selection_identity(selection: Selection) -> dict[str, Any]:
    """Return the members of a run's identity for filters.

    An age means another time in each process, so the time of --since is the lister's.
    """
    return {
        "--model": selection.model or None,
        "--pool": selection.pool or None,
        "--page": selection.page or None,
        "--since": None if selection.since is None else "given",
    }


def profile_identity(name: str, profile: Profile | None) -> dict[str, Any]:
    """Return the members of a run's identity for a profile, one for each field."""
    mapping = {} if profile is None else profile_to_mapping(profile)
    return {f"{name}: {field}": value for field, value in mapping.items()}


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


def jobs_of_part(jobs: int | None, usual: int, divided: int, *read: Store) -> int | None:
    """Return the number of jobs of a part; None for the command's default.

    jobs: as given by --jobs. usual: default number of one process. read: stores to be read. If
    reads grant leases, all parts together then keep about as many objects leased as one process.
    """
    if jobs is None and any(isinstance(store, Leases) for store in read):
        return max(1, usual // divided)
    return jobs
