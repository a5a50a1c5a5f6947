"""Find the prompt tokens that a store serves today, and why it does not serve the other tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from hicachectl.formats.restorable import fetched, positions_of
from hicachectl.pages.groups import PageGroups
from hicachectl.pages.scanning import take_inventory
from hicachectl.profiles.identities import acceptance_of, expected_identities
from hicachectl.requests.elsewhere import find_elsewhere, miss_remarks
from hicachectl.requests.hits import find_hits
from hicachectl.requests.measuring import hit_remarks
from hicachectl.simulation.distances import previous_uses
from hicachectl.simulation.shares import LossRow, prompt_tokens
from hicachectl.simulation.starts import start_from_store

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from hicachectl.backends.base import Store
    from hicachectl.formats.arrays import BoolArray, IntArray
    from hicachectl.formats.profile import Profile
    from hicachectl.pages.inventory import Inventory
    from hicachectl.requests.chains import Requests
    from hicachectl.requests.hits import Hits
    from hicachectl.simulation.caches import Start

FIRST_USE = "first use"
EVICTED = "evicted"
NEVER_WRITTEN = "never written or removed"
NOT_THERE = "evicted, never written or removed"
INCOMPLETE = "incomplete or damaged"
OTHER_DEPLOYMENT = "another deployment"
BELOW_THRESHOLD = "below the threshold"
NOT_LOOKED_UP = "not looked up"
CAUSES = (
    FIRST_USE,
    EVICTED,
    NEVER_WRITTEN,
    NOT_THERE,
    INCOMPLETE,
    OTHER_DEPLOYMENT,
    BELOW_THRESHOLD,
    NOT_LOOKED_UP,
)

_FIRST_UNIX_S = 1e9  # in 2001; smaller times are relative to the start of a trace


@dataclass(frozen=True, slots=True)
class Losses:
    """How many prompt tokens of requests a store serves, and why it does not serve the others.

    tokens: number of all tokens of the prompts.
    served_tokens: number of tokens that servers fetch from the store.
    rows: lost tokens by cause, the largest number first. Their sum is `tokens` less
        `served_tokens`.
    """

    tokens: int
    served_tokens: int
    rows: list[LossRow]


@dataclass(frozen=True, eq=False, slots=True)
class Today:
    """State of a store today.

    nbytes: bytes of all objects of the measured deployment; None if unknown.
    start: pages that the store has whole.
    losses: tokens of the requests that the store serves, and those that it does not serve.
    free_bytes: free bytes of the store; None if unknown.
    remarks: messages about facts that the other members do not show.
    """

    nbytes: int | None
    start: Start
    losses: Losses
    free_bytes: int | None = None
    remarks: tuple[str, ...] = ()


def look_at(
    store: Store,
    profile: Profile,
    requests: Requests,
    threshold: int,
    *,
    counted: BoolArray | None = None,
    allow_empty: bool = False,
    on_listed: Callable[[int], None] = lambda objects: None,
) -> Today:
    """List a store. Return the pages that it has, and the tokens of requests that it serves.

    requests, threshold, counted: see `find_losses`.
    allow_empty: whether to accept a store without pages.
    on_listed: takes the number of objects of each batch of the listing.
    Raises EmptyStore, ProfileError and StoreUnavailable.
    """
    inventory = take_inventory(
        store,
        profile,
        columns={"atime_ns"} & store.traits.columns,
        only_others=True,
        needs_pages=not allow_empty,
        on_batch=on_listed,
    )
    acceptance = acceptance_of(store, inventory, profile)
    hits = find_hits(inventory, 0, requests, acceptance=acceptance)
    today = look_at_listed(PageGroups(inventory), hits, requests, threshold, counted)
    remarks = (
        *store.remarks,
        *hit_remarks(hits, inventory, expected_identities(store, profile)),
        *miss_remarks(store, inventory, hits, find_elsewhere(inventory, hits)),
    )
    return replace(today, free_bytes=store.free_bytes(), remarks=remarks)


def look_at_listed(
    groups: PageGroups,
    hits: Hits,
    requests: Requests,
    threshold: int,
    counted: BoolArray | None = None,
) -> Today:
    """Return the pages that a listed store has, and the tokens of requests that it serves.

    groups: groups of all objects, listed with `atime_ns` if the store has this column.
    hits, requests, threshold, counted: see `find_losses`.
    """
    span = groups.span(0)
    return Today(
        groups.total_bytes(np.arange(span.start, span.stop)),
        start_from_store(groups, requests),
        find_losses(groups.inventory, hits, requests, threshold, counted),
    )


def find_losses(
    inventory: Inventory,
    hits: Hits,
    requests: Requests,
    threshold: int,
    counted: BoolArray | None = None,
) -> Losses:
    """Return the tokens of requests that the measured servers do not fetch, by cause.

    A page that servers lack has a cause of its own. A page that servers have, but that follows a
    missing page, has the cause of the missing page.

    inventory: all objects of the store. The measured servers are of its first deployment.
    hits: the result of `find_hits` for these requests.
    requests: requests of known pages and tokens, in the order of their times.
    threshold: prefetch threshold of the servers, in tokens.
    counted: [requests] whether the tokens of the request count; None to count all.
    """
    size, chains = requests.block_tokens, hits.chains
    usable = hits.usable_pages
    served = fetched(usable, size, threshold, trailing=hits.trailing)
    counts = np.ones(len(chains), np.bool_) if counted is None else counted
    places = positions_of(chains.offsets)
    owners = np.repeat(np.arange(len(chains)), np.diff(chains.offsets))
    lost = (places >= usable[owners]) & counts[owners]
    # Requests take only the pages within `chains.reach` from a store, but write the pages beyond
    # it, too. So search the whole chains.
    earlier = previous_uses(requests.blocks)[requests.offsets[owners] + places]
    causes = _page_causes(inventory, hits)[hits.page_of]
    absent = causes == CAUSES.index(NOT_THERE)
    causes[absent] = _absence(inventory, requests, earlier[absent])
    causes[lost] = _carried(causes[lost], owners[lost])
    tokens = np.bincount(causes[lost], minlength=len(CAUSES)) * size
    tokens[CAUSES.index(BELOW_THRESHOLD)] = int((usable - served)[counts].sum()) * size
    total = int(prompt_tokens(requests)[counts].sum())
    tokens[CAUSES.index(NOT_LOOKED_UP)] = total - int(chains.reach[counts].sum()) * size
    order = np.argsort(-tokens, kind="stable")
    rows: list[LossRow] = [
        {"cause": CAUSES[at], "tokens": int(tokens[at]), "share": int(tokens[at]) / total}
        for at in order.tolist()
        if tokens[at]
    ]
    return Losses(total, int(served[counts].sum()) * size, rows)


def _page_causes(inventory: Inventory, hits: Hits) -> npt.NDArray[np.int64]:
    """Return why servers lack each page: [page_names] indexes in `CAUSES`.

    The value is -1 for pages that servers have.
    """
    causes = np.full(len(hits.page_names), CAUSES.index(NOT_THERE))
    for one in reversed(find_elsewhere(inventory, hits)):
        causes[one.pages] = CAUSES.index(OTHER_DEPLOYMENT)
    causes[hits.begun] = CAUSES.index(INCOMPLETE)
    causes[hits.whole] = -1
    return causes


def _absence(inventory: Inventory, requests: Requests, earlier: IntArray) -> IntArray:
    """Return why the store lacks the page of each reference: [n] indexes in `CAUSES`.

    earlier: [n] index of the previous reference to the page; -1 if there is none.
    """
    causes = np.full(len(earlier), CAUSES.index(NOT_THERE))
    oldest = _oldest_write_s(inventory)
    times, unit = requests.times, requests.seconds_per_unit
    if oldest is not None and times is not None and unit is not None:
        seconds = times * unit
        if seconds.min(initial=np.inf) >= _FIRST_UNIX_S:
            used = seconds[np.searchsorted(requests.offsets, earlier, side="right") - 1]
            causes = np.where(used < oldest, CAUSES.index(EVICTED), CAUSES.index(NEVER_WRITTEN))
    causes[earlier < 0] = CAUSES.index(FIRST_USE)
    return causes


def _oldest_write_s(inventory: Inventory) -> float | None:
    """Return when the oldest object of the measured servers was written; None if unknown.

    The time is in Unix seconds.
    """
    own = inventory.by_affix([one == 0 for one in inventory.table.deployment_ids], False)
    times = inventory.objects.column("mtime_ns").filter(own).drop_null()
    return float(times.to_numpy().min()) / 1e9 if len(times) else None


def _carried(causes: IntArray, owners: IntArray) -> IntArray:
    """Return the cause of each lost page. The pages of a chain stand one after another.

    A page without a cause of its own takes the cause of the page before it in the chain. If no page
    before it has a cause, servers have all these pages. The pages are then lost because a trailing
    pool lacks objects at the end of the prefix.
    causes: [lost] index of the page's own cause; -1 if the page has none.
    owners: [lost] chain of each page.
    """
    numbers = np.arange(len(causes))
    last = np.maximum.accumulate(np.where(causes >= 0, numbers, -1))
    first = np.searchsorted(owners, owners)
    return np.where(last >= first, causes[np.maximum(last, 0)], CAUSES.index(INCOMPLETE))
