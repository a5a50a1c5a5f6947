"""A list of stores. The first is written, unless it is a pack; the others are read on a miss.

All objects of a page come from one store. The list remembers this store, because SGLang asks for a
page in several calls. The calls ask what exists, then for the anchor, then for sidecars, and then
for trailing states, which only the last pages of a prefix have (cache_controller.py ::
_page_transfer_kv_batch, hybrid_cache_controller.py :: _page_transfer_sidecar).
"""

from __future__ import annotations

import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from hicachectl.backends.sglang.calls import Call
from hicachectl.backends.sglang.counters import Counters, tally_of
from hicachectl.backends.sglang.file_pages import FilePages
from hicachectl.backends.sglang.log import logger
from hicachectl.formats.objects import ANCHOR

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from hicachectl.backends.sglang.page_store import PageStore, Pieces, ServedPool
    from hicachectl.backends.sglang.settings import Settings
    from hicachectl.backends.urls import StoreUrl
    from hicachectl.formats.arrays import BoolArray

_LEAST_SECONDS = 0.05  # a store that is asked with less time left would count as hanging
_MOST_CHOICES = 1 << 16  # most pages that have a remembered store


class StoreList:
    """The stores of a server, in the order of its setting `store`."""

    def __init__(
        self, stores: Sequence[PageStore], counters: Counters, *, writes: bool = True
    ) -> None:
        """Serve from at least one store.

        counters: the plug-in's counters.
        writes: whether the first store is written.
        """
        self.counters = counters
        self.writes = writes
        self._stores = list(stores)
        self._read = self._stores  # stores that are read; fewer after a `clear`
        self._pools: dict[str, ServedPool] = {}  # the pools last asked for
        self._lock = threading.Lock()
        # Positions of stores, by page. `_chosen` has the store that `exists` chose, and `_anchored`
        # the store from which the anchor was last read. Both are used only with several stores.
        self._chosen: dict[str, int] = {}
        self._anchored: dict[str, int] = {}

    def add(self, pool: ServedPool) -> None:
        """Serve a pool. Raises ValueError if a store can never hold it."""
        for store in self._stores:
            store.add(pool)
        self._pools[pool.name] = pool

    def open(self, call: Call) -> None:
        """Open the stores."""
        for place, store in enumerate(self._stores):
            with _share(call, len(self._stores) - place) as share:
                store.open(share)

    def exists(self, pools: Sequence[ServedPool], pages: Sequence[str], call: Call) -> BoolArray:
        """Return which pages of each pool can be read: [pools, pages] bool.

        Of the stores that have a page whole, the page comes from the store with most of its
        trailing states. If several stores have equally many, the page comes from the first of these
        stores. A page that no store has whole comes from the first store.
        """
        stores = self._read
        present = np.zeros((len(pools), len(pages)), dtype=np.bool_)
        if len(stores) < 2:
            for store in stores:
                _ask(store, pools, pages, call, present)
            return present
        chosen = np.zeros(len(pages), dtype=np.int64)
        best = np.full(len(pages), -1, dtype=np.int64)
        undecided = np.arange(len(pages))  # pages of which a later store may have more objects
        for place, store in enumerate(stores):
            if not len(undecided) or call.seconds_left < _LEAST_SECONDS:
                break
            found = np.zeros((len(pools), len(undecided)), dtype=np.bool_)
            with _share(call, len(stores) - place) as share:
                _ask(store, pools, [pages[n] for n in undecided.tolist()], share, found)
            scores = _scores(pools, found)
            better = scores > best[undecided]
            taken = undecided[better]
            present[:, taken] = found[:, better]
            chosen[taken], best[taken] = place, scores[better]
            undecided = undecided[best[undecided] < _best_score(pools)]
        with self._lock:
            self._pools.update((pool.name, pool) for pool in pools)
            _remember(self._chosen, zip(pages, chosen.tolist(), strict=True))
        return present

    def read(
        self, pool: ServedPool, pages: Sequence[str], pieces: Sequence[Pieces], call: Call
    ) -> list[bool]:
        """Read pages into host memory, each from its store. Return which pages were read whole."""
        stores = self._read
        if not stores:
            return [False] * len(pages)
        if len(stores) == 1:
            return stores[0].read(pool, pages, pieces, call)
        sources = self._sources(pool, pages, call)
        done = [False] * len(pages)
        places = sorted(set(sources))
        for turn, place in enumerate(places):
            if call.seconds_left < _LEAST_SECONDS:
                self.counters.count("timeout", sum(source in places[turn:] for source in sources))
                break
            mine = [n for n, source in enumerate(sources) if source == place]
            with _share(call, len(places) - turn) as share:
                read = stores[place].read(
                    pool, [pages[n] for n in mine], [pieces[n] for n in mine], share
                )
            for n, ok in zip(mine, read, strict=True):
                done[n] = ok
        self._note(pool, pages, sources, done)
        return done

    def write(
        self, pool: ServedPool, pages: Sequence[str], pieces: Sequence[Pieces], call: Call
    ) -> list[bool]:
        """Write pages to the first store, if it is written.

        Return which pages this store has now.
        """
        if not self.writes:
            self.counters.count("unwritable", len(pages))
            return [False] * len(pages)
        return self._stores[0].write(pool, pages, pieces, call)

    def clear(self, call: Call) -> None:
        """Make this rank's objects misses in the store that is written.

        Read no other store until the next attach.
        """
        # If `writes`, one store is written, and the others are only read.
        if len(self._stores) > int(self.writes):
            logger.info(
                "%s: cleared; stores that are only read stay as they are, and are read again "
                "after the next attach",
                self.counters.place,
            )
        self._read = self._stores[: int(self.writes)]
        for store in self._read:
            store.clear(call)

    def close(self) -> None:
        """Release everything, even if a store raises; later calls are misses."""
        with ExitStack() as stack:
            for store in self._stores:
                stack.callback(store.close)

    def _sources(self, pool: ServedPool, pages: Sequence[str], call: Call) -> list[int]:
        """Return the position of each page's store. A sidecar comes from its anchor's store."""
        found = self._remembered(pool, pages)
        if unknown := [page for page, place in zip(pages, found, strict=True) if place is None]:
            self.exists(list(self._pools.values()), unknown, call)
            found = self._remembered(pool, pages)
        return [place or 0 for place in found]

    def _remembered(self, pool: ServedPool, pages: Sequence[str]) -> list[int | None]:
        with self._lock:
            chosen = [self._chosen.get(page) for page in pages]
            if pool.name == ANCHOR:
                return chosen
            return [
                self._anchored.get(page, place) for page, place in zip(pages, chosen, strict=True)
            ]

    def _note(
        self, pool: ServedPool, pages: Sequence[str], sources: list[int], done: list[bool]
    ) -> None:
        """Remember the stores of anchors that were read. Forget the stores of pages not read."""
        with self._lock:
            for page, ok in zip(pages, done, strict=True):
                if not ok:
                    self._chosen.pop(page, None)
                    self._anchored.pop(page, None)
            if pool.name == ANCHOR:
                read = zip(pages, sources, done, strict=True)
                _remember(self._anchored, ((page, place) for page, place, ok in read if ok))


def _share(call: Call, stores: int) -> Call:
    """Return a call for one store, with an equal share of the time that `call` has left.

    A store that hangs uses up only its share, so the next store still has time to answer.
    """
    return Call(call.seconds_left / stores)


def _ask(
    store: PageStore,
    pools: Sequence[ServedPool],
    pages: Sequence[str],
    call: Call,
    present: BoolArray,
) -> None:
    """Set in `present` which pages a store has: [pools, pages] bool.

    For the second and later pools, the store is asked only for pages that it has of the first pool.
    """
    asked = np.arange(len(pages))
    for row, pool in enumerate(pools):
        if not len(asked):
            return
        present[row, asked] = store.exists(pool, [pages[n] for n in asked.tolist()], call)
        if not row:
            asked = np.flatnonzero(present[0])


def _scores(pools: Sequence[ServedPool], present: BoolArray) -> npt.NDArray[np.int64]:
    """Return the score of each page: [n].

    The score of a whole page is 1 plus the number of its trailing states. Other pages have score 0.
    """
    trailing = np.array([pool.trailing for pool in pools], dtype=np.bool_)
    whole = present[~trailing].all(axis=0)
    scores: npt.NDArray[np.int64] = np.where(whole, 1 + present[trailing].sum(axis=0), 0)
    return scores


def _best_score(pools: Sequence[ServedPool]) -> int:
    return 1 + sum(pool.trailing for pool in pools)


def _remember(choices: dict[str, int], found: Iterable[tuple[str, int]]) -> None:
    """Set choices, the newest last. Forget the oldest choices if there are too many."""
    for page, place in found:
        choices.pop(page, None)
        choices[page] = place
    while len(choices) > _MOST_CHOICES:
        del choices[next(iter(choices))]


def open_stores(settings: Settings, draft_weights: str = "") -> StoreList:
    """Return the stores of a server. They are not open yet.

    draft_weights: name of the draft's weights, also on ranks without the draft; "" if the
        deployment has no draft.
    """
    writes = not settings.reads_only
    tally = tally_of(settings.names)
    counters = [Counters(name, tally) for name in settings.names]
    stores = [
        _store(settings, url, own, draft_weights, written=writes and own is counters[0])
        for url, own in zip(settings.stores, counters, strict=True)
    ]
    return StoreList(stores, counters[0], writes=writes)


def _store(
    settings: Settings, url: StoreUrl, counters: Counters, draft_weights: str, *, written: bool
) -> PageStore:
    if url.kind.directory:
        return FilePages(url, counters, settings, writes=written)
    # This import is late, because servers on a file store do without pyarrow.
    from hicachectl.backends.sglang.stores import StorePages

    return StorePages(url, counters, settings, writes=written, draft_weights=draft_weights)
