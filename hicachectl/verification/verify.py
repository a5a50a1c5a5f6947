"""Check a whole store in one process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicachectl.pages.inventory import take_inventory
from hicachectl.verification.part import check_part, listing_findings, start_run

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicachectl.backends.base import Store
    from hicachectl.verification.part import PartCheck
    from hicachectl.verification.request import VerifyRequest


def check_store(
    store: Store,
    request: VerifyRequest,
    *,
    on_listed: Callable[[int], None] = lambda objects: None,
    on_read: Callable[[int, int], None] = lambda nbytes, total: None,
    on_wait: Callable[[float, int], None] = lambda seconds, pages: None,
) -> PartCheck:
    """Scan a store and run the checks of its objects; the whole store is one part.

    Groups younger than the grace are in flight: no check judges them. If the store keeps no times,
    incomplete groups are looked up again after the grace.
    on_listed: takes the number of objects listed.
    on_read: takes bytes read and total to read.
    on_wait: takes seconds to wait and the number of incomplete groups.
    Raises StoreUnavailable, also for a store without pages, and ProfileError if the profile
    contradicts the store.
    """
    start = start_run(store, request)
    listed = take_inventory(
        store,
        request.profile,
        columns=request.columns(store),
        needs_pages=not request.allow_empty,
        on_batch=on_listed,
    )
    found = listing_findings(store, request, start.listing.start_ns)
    checked = check_part(store, request, listed, start.listed(), on_read=on_read, on_wait=on_wait)
    return checked.with_findings(found)
