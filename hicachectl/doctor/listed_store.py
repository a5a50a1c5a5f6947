"""A store that was listed once, for all checks of `doctor`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hicachectl.formats.errors import ContradictionError, HicacheError, UsageError
from hicachectl.pages.in_flight import ListingTime
from hicachectl.pages.scanning import take_inventory
from hicachectl.text.vocabulary import SAMPLE_PAGES
from hicachectl.verification.report_text import Mending

if TYPE_CHECKING:
    from fractions import Fraction

    from hicachectl.backends.base import Store
    from hicachectl.formats.profile import Profile
    from hicachectl.pages.inventory import Inventory


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedStore:
    """A store that was opened and listed once, and facts about its servers.

    mending: how suggested commands name the store and the profile.
    store: the open store; None if it could not be opened.
    inventory: all objects; None if they could not be listed.
    problem: why the store could not be opened or listed, and the next step; "" if it was listed.
    contradiction: how the profile contradicts all objects of its deployment; "" if it does not.
    listing: time of the listing; None without one.
    has_servers: whether servers were asked, and their deployments are compared with the store's.
    profile: profile of the servers, or of the options; None if unknown.
    started: start of the first server, Unix seconds; None if unknown.
    weights: names of the weights of the ranks that serve with the plug-in.
    explained: ratios of actual object size to expected object size that the checks of servers'
        deployments explain by a setting.
    is_shared: whether all servers that were asked are known to use the store.
    is_explained: whether a check of a server failed, which can be why the store has no pages.
    sample_pages: number of pages to read; 0 reads none.
    """

    mending: Mending = field(default_factory=Mending)
    store: Store | None = None
    inventory: Inventory | None = None
    problem: str = ""
    contradiction: str = ""
    listing: ListingTime | None = None
    has_servers: bool = False
    profile: Profile | None = None
    started: float | None = None
    weights: frozenset[str] = frozenset()
    explained: frozenset[Fraction] = frozenset()
    is_shared: bool = False
    is_explained: bool = False
    sample_pages: int = SAMPLE_PAGES

    def command(self, name: str, *more: str) -> str:
        """Return a command of hicachectl on the store, with the options of the profile."""
        command = self.mending.command(f"hicachectl {name} STORE OPTIONS")
        return " ".join(filter(None, (command, *more)))


def list_store(
    store: Store, profile: Profile | None = None, *, sample_pages: int = SAMPLE_PAGES
) -> ListedStore:
    """List an open store once, for all checks.

    Arguments: see `ListedStore`. An error of the store becomes `problem`. Raises UsageError.
    """
    contradictions: list[ContradictionError] = []
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
    return ListedStore(
        mending=Mending(store=store.url),
        store=store,
        inventory=inventory,
        problem=problem,
        contradiction=str(contradictions[0]) if contradictions else "",
        listing=listing,
        profile=profile,
        sample_pages=sample_pages,
    )
