"""Two looks at servers and at the pages of their store, with some time between."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hicachectl.doctor.deployments import own_anchors
from hicachectl.doctor.exposition import Look, look_at
from hicachectl.formats.errors import StoreUnavailable
from hicachectl.formats.keys import grammar_of
from hicachectl.formats.keys.table import KeySplitter, page_starts, page_words
from hicachectl.pages.deployments import assign_affixes
from hicachectl.profiles.server import server_service

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from hicachectl.doctor.live_server import LiveServer
    from hicachectl.doctor.stores import StoreSeen

    Words = npt.NDArray[np.uint64]

_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Watched:
    """A server's counters at two moments, and what appeared in the store between them.

    first: look before the store was listed.
    second: look after the wait.
    new_pages: number of pages of the server's deployment that are new since the listing; None if
        the store was not listed twice.
    """

    first: Look
    second: Look
    new_pages: int | None


def first_looks(servers: Sequence[LiveServer]) -> list[Look]:
    """Return a look at each server's counters."""
    return [_look(server) for server in servers]


def watched(
    servers: Sequence[LiveServer],
    first: Sequence[Look],
    seen: StoreSeen,
    seconds: float,
    on_wait: Callable[[float], None] = lambda seconds: None,
) -> list[Watched]:
    """Wait, look again, and list the keys of the store again.

    first: result of `first_looks`, before the store was listed.
    seconds: least time between the two looks; there is no wait if no server shows counters.
    on_wait: takes the seconds of the wait before it begins.
    """
    shown = [look.at for look in first if look.samples is not None]
    if not shown:
        return [Watched(look, look, None) for look in first]
    left = max(shown) + seconds - time.monotonic()
    if left > 0:
        on_wait(left)
        time.sleep(left)
    second = first_looks(servers)
    new = _new_pages(servers, seen)
    return [Watched(*each) for each in zip(first, second, new, strict=True)]


def _look(server: LiveServer) -> Look:
    if server.problem:
        return Look(time.monotonic(), None, server.problem)
    service, base = server_service(server.url, "--server", timeout_s=_TIMEOUT_S)
    try:
        return look_at(service, base)
    finally:
        service.close()


def _new_pages(servers: Sequence[LiveServer], seen: StoreSeen) -> list[int | None]:
    """Return how many pages of each server appeared since the store was listed."""
    store, inventory = seen.store, seen.inventory
    if store is None or inventory is None or not store.traits.live:
        return [None for _ in servers]
    splitter = KeySplitter()
    try:
        listed = [(keys, splitter.identify(keys)) for keys in _keys(seen)]
    except StoreUnavailable:
        return [None for _ in servers]
    table = assign_affixes(splitter.affixes, grammar_of(store.grammar), seen.profile)
    starts = page_starts(splitter.affixes)
    found: list[int | None] = []
    for server in servers:
        before = own_anchors(server, seen, inventory.table)
        known = inventory.page_words(_of(inventory.affix_ids, before), 0)
        anchors = own_anchors(server, seen, table)
        words: list[Words] = [np.zeros(0, dtype=np.uint64)]
        for keys, ids in listed:
            rows = np.flatnonzero(_of(ids, anchors))
            words.append(page_words(keys, rows, starts[ids[rows]], 0))
        found.append(len(np.setdiff1d(np.concatenate(words), known)))
    return found


def _of(ids: npt.NDArray[np.int32], chosen: set[int]) -> npt.NDArray[np.bool_]:
    return np.isin(ids, np.array(sorted(chosen), dtype=np.int32))


def _keys(seen: StoreSeen) -> list[object]:
    assert seen.store is not None
    return [batch.column("key") for batch in seen.store.scan(("key",))]
