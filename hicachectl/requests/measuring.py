"""Measure how far a store serves requests: what `hits` returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow.compute as pc

from hicachectl.formats.profile import PREFETCH_THRESHOLD
from hicachectl.pages.inventory import take_inventory
from hicachectl.pages.naming import deployment_document
from hicachectl.pages.selection import EVERYTHING, Selection
from hicachectl.pages.unmatched import explain_selection
from hicachectl.profiles.acceptance import acceptance_of
from hicachectl.profiles.identities import expected_identities
from hicachectl.profiles.inference import choose_deployment
from hicachectl.requests.elsewhere import find_elsewhere, miss_remarks
from hicachectl.requests.hit_rows import hit_remarks, hit_rows
from hicachectl.requests.hits import find_hits, inventory_of_chains
from hicachectl.text.units import counted

if TYPE_CHECKING:
    from collections.abc import Callable

    import pyarrow as pa

    from hicachectl.backends.base import Store
    from hicachectl.formats.profile import Profile
    from hicachectl.pages.inventory import Inventory
    from hicachectl.requests.chains import Requests
    from hicachectl.requests.elsewhere import Elsewhere
    from hicachectl.requests.hits import Hits


@dataclass(frozen=True, slots=True)
class HitsReport:
    """How much of each request a store can serve.

    rows: a row per request, with the members of a chain in `hits --format json`. document: the
    members beside the chains. remarks: what these do not show.
    """

    rows: pa.Table
    document: dict[str, Any]
    remarks: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HitsRequest:
    """Requests to measure.

    profile: profile of the servers; None: the one deployment of the store that `choice` fits.
    threshold: the servers' prefetch threshold in tokens; None: what the profile states, else
        SGLang's default.
    """

    requests: Requests
    profile: Profile | None = None
    choice: Selection = EVERYTHING
    threshold: int | None = None


def measure_hits(
    store: Store, request: HitsRequest, *, on_listed: Callable[[int], None] = lambda objects: None
) -> HitsReport:
    """Return how far servers can restore each request, and what else the store has of them.

    Raises ProfileError if the profile contradicts the store, or `choice` fits several deployments;
    StoreUnavailable.
    """
    profile, requests = request.profile, request.requests
    inventory = (
        take_inventory(store, on_batch=on_listed)
        if profile is None
        else inventory_of_chains(store, profile, requests, only_others=True, on_batch=on_listed)
    )
    return measure_listed(store, inventory, request)[1]


def measure_listed(
    store: Store, inventory: Inventory, request: HitsRequest
) -> tuple[Hits, HitsReport]:
    """Return the hits in objects that are listed, and `measure_hits` of them."""
    profile = request.profile
    hits = find_hits(
        inventory,
        _deployment(inventory, request),
        request.requests,
        acceptance=acceptance_of(store, inventory, profile),
    )
    elsewhere = find_elsewhere(inventory, hits)
    page_size, threshold = request.requests.page_size, request.threshold
    if threshold is None:
        threshold = PREFETCH_THRESHOLD if profile is None else profile.prefetch_threshold
    rows = hit_rows(hits, page_size, threshold, elsewhere)
    remarks = [
        *store.remarks,
        *hit_remarks(hits, inventory, expected_identities(store, profile)),
        *miss_remarks(store, inventory, hits, elsewhere),
    ]
    if hits.deployment is None:
        remarks.append(explain_selection(store, inventory, EVERYTHING))
    remarks += _threshold_remarks(rows, threshold)
    return hits, HitsReport(
        rows=rows,
        document=_document(hits, rows, page_size, elsewhere),
        remarks=tuple(remarks),
    )


def _threshold_remarks(rows: pa.Table, threshold: int) -> list[str]:
    """Return a remark if usable pages of requests are not fetched. rows: those of `hit_rows`."""
    below = pc.sum(pc.less(rows["served_tokens"], rows["usable_tokens"])).as_py()
    if not below:
        return []
    return [
        f"{counted(below, 'request')}: fewer tokens are usable than the prefetch threshold of the "
        f"servers ({threshold}), so they fetch none; --prefetch-threshold states another one"
    ]


def _deployment(inventory: Inventory, request: HitsRequest) -> int | None:
    """Return the index of the measured deployment; None if the store has no pages."""
    if request.profile is not None:
        return 0  # assign_affixes puts the profile's deployment first
    if not inventory.table.deployments and not any(r.readings for r in inventory.table.resolved):
        return None
    return choose_deployment(inventory, request.choice)


def _document(
    hits: Hits, rows: pa.Table, page_size: int | None, elsewhere: list[Elsewhere]
) -> dict[str, Any]:
    usable = int(hits.usable_pages.sum()) * (page_size or 1)
    requested = (
        int(hits.chains.reach.sum())
        if page_size is None
        else hits.chains.requested_tokens(page_size)
    )
    own = hits.deployment
    return {
        "deployment": None if own is None else deployment_document(own, page_size),
        "requested_tokens": None if page_size is None else requested,
        "usable_tokens": None if page_size is None else usable,
        "served_tokens": None if page_size is None else pc.sum(rows["served_tokens"]).as_py() or 0,
        "usable_share": usable / requested if requested else None,
        "elsewhere": [one.document for one in elsewhere],
    }
