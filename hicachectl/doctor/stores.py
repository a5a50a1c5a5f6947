"""Checks of `doctor` about one store: what `verify` of a sample, its times and its space say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hicachectl.formats.errors import HicacheError, UsageError
from hicachectl.pages.in_flight import ListingTime
from hicachectl.pages.scanning import take_inventory

if TYPE_CHECKING:
    from hicachectl.backends.base import Store
    from hicachectl.doctor.checks import Check
    from hicachectl.formats.profile import Profile
    from hicachectl.pages.inventory import Inventory

SAMPLE_PAGES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSeen:
    """A store that was opened and listed once, and the servers to judge it by.

    url: the store, without secrets.
    store: the open store; None if it could not be opened.
    inventory: all objects; None if they could not be listed.
    problem: why the store could not be opened or listed, and the next step, else "".
    contradiction: how the profile contradicts all objects of its deployment, else "".
    listing: time of the listing; None without one.
    profile: profile of the servers, or of the options; None if unknown.
    started: start of the first server, Unix seconds; None if unknown.
    weights: fingerprints of the servers' weights, as their plug-in states them; empty if unknown.
    sample_pages: number of pages to read; 0 reads none.
    """

    url: str
    store: Store | None = None
    inventory: Inventory | None = None
    problem: str = ""
    contradiction: str = ""
    listing: ListingTime | None = None
    profile: Profile | None = None
    started: float | None = None
    weights: frozenset[str] = frozenset()
    sample_pages: int = SAMPLE_PAGES


def see_store(
    store: Store,
    profile: Profile | None = None,
    *,
    started: float | None = None,
    weights: frozenset[str] = frozenset(),
    sample_pages: int = SAMPLE_PAGES,
) -> StoreSeen:
    """List an open store once, for all checks.

    Arguments: see `StoreSeen`. An error of the store becomes `problem`. Raises UsageError.
    """
    contradictions: list[str] = []
    inventory, problem, listing = None, "", None
    try:
        listing = ListingTime.now(store, changes=False)
        inventory = take_inventory(
            store, profile, only_others=True, on_contradiction=contradictions.append
        )
        listing = listing.ended()
    except UsageError:
        raise
    except HicacheError as error:
        problem = str(error)
    return StoreSeen(
        url=store.url,
        store=store,
        inventory=inventory,
        problem=problem,
        contradiction=contradictions[0] if contradictions else "",
        listing=listing,
        profile=profile,
        started=started,
        weights=weights,
        sample_pages=sample_pages,
    )


def store_checks(seen: StoreSeen) -> list[Check]:
    """Return what a store itself says, in the order of causes.

    At most a sample of the pages is read, and nothing is changed.
    """
    return []
