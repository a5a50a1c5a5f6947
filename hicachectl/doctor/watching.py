"""Look twice at servers and at the pages of their store, some time apart."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hicachectl.doctor.deployments import own_anchors
from hicachectl.doctor.exposition import Look, look_at
from hicachectl.formats.errors import StoreUnavailable
from hicachectl.formats.keys import grammar_of
from hicachectl.formats.keys.table import FOREIGN, KeySplitter, page_starts, page_words
from hicachectl.pages.deployments import assign_affixes
from hicachectl.profiles.server import server_service

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from hicachectl.backends.base import Store
    from hicachectl.doctor.listed_store import ListedStore
    from hicachectl.doctor.live_server import LiveServer
    from hicachectl.formats.keys.base import Affix

    Ids = npt.NDArray[np.int32]
    Words = npt.NDArray[np.uint64]

_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Watched:
    """A server's counters at two moments, and the pages that appeared in the store between them.

    first: look after the listing of the store, so that all pages written after the look are new.
    second: look after the wait.
    new_pages: number of pages of the server's deployment that are new since the listing; None if
        the store was not listed twice.
    """

    first: Look
    second: Look
    new_pages: int | None


def watch(
    servers: Sequence[LiveServer],
    listed: ListedStore,
    seconds: float,
    on_wait: Callable[[float], None] = lambda seconds: None,
) -> list[Watched]:
    """Look at servers, wait, look again, and list the keys of the store again.

    seconds: least time between the two looks. If no server shows counters, there is only one look.
    on_wait: function that is called before the wait, with its seconds.
    """
    first = [_look(server) for server in servers]
    shown = [look.at for look in first if look.samples is not None]
    if not shown:
        return [Watched(look, look, None) for look in first]
    left = max(shown) + seconds - time.monotonic()
    if left > 0:
        on_wait(left)
        time.sleep(left)
    second = [_look(server) for server in servers]
    new = _new_pages(servers, listed)
    return [Watched(*each) for each in zip(first, second, new, strict=True)]


def _look(server: LiveServer) -> Look:
    if server.problem:
        return Look(time.monotonic(), None, server.problem)
    service, base = server_service(server.url, "--server", timeout_s=_TIMEOUT_S)
    try:
        return look_at(service, base)
    finally:
        service.close()


def _new_pages(servers: Sequence[LiveServer], listed: ListedStore) -> list[int | None]:
    """Return how many pages of each server appeared since the store was listed."""
    store, inventory = listed.store, listed.inventory
    if store is None or inventory is None or not store.traits.live:
        return [None for _ in servers]
    try:
        affixes, ids, words = _listed(store)
    except StoreUnavailable:
        return [None for _ in servers]
    table = assign_affixes(affixes, grammar_of(store.grammar), listed.profile)
    found: list[int | None] = []
    for server in servers:
        known = _of(inventory.affix_ids, own_anchors(server, listed, inventory.table))
        now = words[_of(ids, own_anchors(server, listed, table))]
        found.append(len(np.setdiff1d(now, inventory.page_words(known, 0))))
    return found


def _listed(store: Store) -> tuple[list[Affix], Ids, Words]:
    """List the keys of a store. Return the affixes, and each key's affix id and page hash.

    Only the first 64 bits of a page hash are returned.

    Raises StoreUnavailable.
    """
    splitter = KeySplitter()
    ids, words = [np.zeros(0, dtype=np.int32)], [np.zeros(0, dtype=np.uint64)]
    for batch in store.scan(("key",)):
        keys = batch.column("key")
        of_keys = splitter.identify(keys)
        paged = np.flatnonzero(of_keys != FOREIGN)
        ids.append(of_keys[paged])
        words.append(page_words(keys, paged, page_starts(splitter.affixes)[ids[-1]], 0))
    return splitter.affixes, np.concatenate(ids), np.concatenate(words)


def _of(ids: Ids, chosen: set[int]) -> npt.NDArray[np.bool_]:
    return np.isin(ids, np.array(sorted(chosen), dtype=np.int32))
