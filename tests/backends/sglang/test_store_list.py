"""A list of stores serves each page from one of them, and writes only the first."""

from __future__ import annotations

import ctypes
import time
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pytest

from hicachectl.backends.sglang import store_list
from hicachectl.backends.sglang.calls import Call
from hicachectl.backends.sglang.counters import Counters
from hicachectl.backends.sglang.page_store import PageStore, Pieces, ServedPool
from hicachectl.backends.sglang.store_list import StoreList
from tests.backends.sglang.pages import HostPool, hashes

if TYPE_CHECKING:
    from collections.abc import Sequence

PAGES = hashes(4)
HOSTS = {
    "kv": HostPool(8192),
    "indexer": HostPool(512, name="indexer"),
    "mamba": HostPool(256, name="mamba", trailing=True),
}
KV, INDEXER, MAMBA = (host.pool for host in HOSTS.values())


class MemoryPages(PageStore):
    """Pages in a dict, by pool and page hash.

    hangs: calls return at their deadline only.
    """

    def __init__(self, *, hangs: bool = False) -> None:
        super().__init__(Counters("memory"), threads=1)
        self.held: dict[tuple[str, str], bytes] = {}
        self.hangs = hangs
        self.cleared = False
        self.asked = 0

    def add(self, pool: ServedPool) -> None: ...

    def _open_now(self) -> None: ...

    def _forget(self) -> None: ...

    def hold(self, pool: ServedPool, *pages: int, seed: int = 0) -> None:
        for page in pages:
            self.held[pool.name, PAGES[page]] = page_bytes(pool, page, seed)

    def exists(self, pool: ServedPool, pages: Sequence[str], call: Call) -> list[bool]:
        self.asked += len(pages)
        if self.hangs:
            time.sleep(call.seconds_left)
        return [(pool.name, page) in self.held for page in pages]

    def read(
        self, pool: ServedPool, pages: Sequence[str], pieces: Sequence[Pieces], call: Call
    ) -> list[bool]:
        for page, targets in zip(pages, pieces, strict=True):
            if (pool.name, page) in self.held:
                data = ctypes.create_string_buffer(self.held[pool.name, page], pool.nbytes)
                call.copy(ctypes.addressof(data), targets)
        return [(pool.name, page) in self.held for page in pages]

    def write(
        self, pool: ServedPool, pages: Sequence[str], pieces: Sequence[Pieces], call: Call
    ) -> list[bool]:
        for page in pages:
            self.held[pool.name, page] = b""
        return [True] * len(pages)

    def clear(self, call: Call) -> None:
        self.cleared = True


def listed(*stores: PageStore, writes: bool = True) -> StoreList:
    them = StoreList(stores, Counters("test"), writes=writes)
    for pool in (KV, INDEXER, MAMBA):
        them.add(pool)
    return them


def read(them: StoreList, pool: ServedPool, pages: Sequence[str] = PAGES) -> list[bool]:
    """Read pages into the slots of their numbers."""
    pieces = pool.host.pieces([PAGES.index(page) for page in pages])
    return them.read(pool, pages, pieces, Call(5))


def seed_read(pool: ServedPool, page: int) -> int:
    """Return which store's bytes a page of the host pool has."""
    held = HOSTS[pool.name].page(page)
    return next(n for n in range(3) if held == page_bytes(pool, page, n))


def page_bytes(pool: ServedPool, page: int, seed: int) -> bytes:
    return np.random.default_rng([seed, page, *pool.name.encode()]).bytes(pool.nbytes)


def test_one_store_is_asked_directly() -> None:
    store = MemoryPages()
    store.hold(KV, 0, 1, 3)
    store.hold(INDEXER, 0, 3)
    them = listed(store)
    found = them.exists([KV, INDEXER], PAGES, Call(5))
    assert found.tolist() == [[True, True, False, True], [True, False, False, True]]
    assert store.asked == 4 + 3  # sidecars only where the anchor is
    assert read(them, KV) == [True, True, False, True]


def test_a_page_comes_from_the_first_store_that_has_it_whole() -> None:
    """Page 0 is whole in the first, 1 lacks its sidecar there, 2 is in the second only."""
    first, second = MemoryPages(), MemoryPages()
    first.hold(KV, 0, 1)
    first.hold(INDEXER, 0)
    second.hold(KV, 0, 1, 2, seed=1)
    second.hold(INDEXER, 0, 1, 2, seed=1)
    them = listed(first, second)
    found = them.exists([KV, INDEXER], PAGES, Call(5))
    assert found.tolist() == [[True, True, True, False]] * 2
    for pool in (KV, INDEXER):
        assert read(them, pool) == [True, True, True, False]
        assert [seed_read(pool, page) for page in (0, 1, 2)] == [0, 1, 1]


def test_a_store_with_the_trailing_state_comes_first() -> None:
    first, second = MemoryPages(), MemoryPages()
    first.hold(KV, 0, 1)
    second.hold(KV, 0, 1, seed=1)
    second.hold(MAMBA, 1, seed=1)
    them = listed(first, second)
    found = them.exists([KV, MAMBA], PAGES, Call(5))
    assert found.tolist() == [[True, True, False, False], [False, True, False, False]]
    assert read(them, KV, PAGES[:2]) == [True, True]
    assert [seed_read(KV, page) for page in (0, 1)] == [0, 1]
    assert read(them, MAMBA, PAGES[1:2]) == [True]


def test_sidecars_follow_the_anchor_although_another_request_asked_since() -> None:
    """Between the reads, the first store gets the page whole, and a second request asks for it."""
    first, second = MemoryPages(), MemoryPages()
    for pool in (KV, INDEXER):
        second.hold(pool, 0, seed=1)
    them = listed(first, second)
    them.exists([KV, INDEXER], PAGES, Call(5))
    assert read(them, KV, PAGES[:1]) == [True]
    for pool in (KV, INDEXER):
        first.hold(pool, 0)
    them.exists([KV, INDEXER], PAGES, Call(5))
    assert read(them, INDEXER, PAGES[:1]) == [True]
    assert seed_read(INDEXER, 0) == seed_read(KV, 0) == 1
    assert read(them, KV, PAGES[:1]) == read(them, INDEXER, PAGES[:1]) == [True]
    assert seed_read(INDEXER, 0) == seed_read(KV, 0) == 0


def test_a_page_that_cannot_be_read_is_looked_for_again() -> None:
    first, second = MemoryPages(), MemoryPages()
    first.hold(KV, 0)
    second.hold(KV, 0, seed=1)
    them = listed(first, second)
    them.exists([KV], PAGES, Call(5))
    first.held.clear()
    assert read(them, KV, PAGES[:1]) == [False]
    second.hold(INDEXER, 0, seed=1)
    second.hold(MAMBA, 0, seed=1)
    assert read(them, KV, PAGES[:1]) == [True]
    assert seed_read(KV, 0) == 1


def test_pages_are_read_without_being_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang may skip exists, and choices beyond the bound are forgotten."""
    monkeypatch.setattr(store_list, "_MOST_CHOICES", 2)
    first, second = MemoryPages(), MemoryPages()
    for pool in (KV, INDEXER, MAMBA):
        second.hold(pool, 0, 1, 2, seed=1)
    them = listed(first, second)
    for pool in (KV, INDEXER):
        assert read(them, pool, PAGES[:2]) == [True, True]
    them.exists([KV], PAGES, Call(5))
    assert len(them._chosen) == len(them._anchored) == 2
    assert read(them, KV, PAGES[:1]) == [True]


def test_a_store_that_hangs_leaves_time_for_the_next() -> None:
    first, second = MemoryPages(hangs=True), MemoryPages()
    second.hold(KV, 0)
    them = listed(first, second)
    found = them.exists([KV], PAGES, Call(4))
    assert found.tolist() == [[True, False, False, False]]


def test_only_the_first_store_is_written_and_cleared() -> None:
    first, second = MemoryPages(), MemoryPages()
    second.hold(KV, 0)
    them = listed(first, second)
    assert them.write(KV, PAGES[1:2], KV.host.pieces([0]), Call(5)) == [True]
    assert ("kv", PAGES[1]) in first.held
    assert ("kv", PAGES[1]) not in second.held
    them.clear(Call(5))
    assert first.cleared
    assert not second.cleared
    assert not np.any(them.exists([KV], PAGES[:1], Call(5)))
    assert read(them, KV, PAGES[:1]) == [False]


def test_stores_that_are_only_read_serve_until_a_clear() -> None:
    """As a list of packs: writes fail and are counted, and a clear makes all pages misses."""
    for count in (1, 2):
        stores = [MemoryPages() for _ in range(count)]
        stores[-1].hold(KV, 0, seed=1)
        them = listed(*stores, writes=False)
        assert them.exists([KV], PAGES, Call(5)).tolist() == [[True, False, False, False]]
        assert read(them, KV) == [True, False, False, False]
        assert them.write(KV, PAGES[1:3], KV.host.pieces([0, 1]), Call(5)) == [False, False]
        assert them.counters.tally.of("refused") == {"unwritable": 2}
        them.clear(Call(5))
        assert not np.any(them.exists([KV], PAGES, Call(5)))
        assert read(them, KV) == [False] * 4
        assert not any(store.cleared or ("kv", PAGES[1]) in store.held for store in stores)


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_all_stores_are_closed_although_one_of_them_raises(
    monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    stores, closed = [MemoryPages() for _ in range(3)], []

    def close(number: int) -> None:
        closed.append(number)
        if number == failing:
            raise OSError(5, "Input/output error")

    for number, store in enumerate(stores):
        monkeypatch.setattr(store, "close", partial(close, number))
    with pytest.raises(OSError, match="Input/output error"):
        listed(*stores).close()
    assert sorted(closed) == [0, 1, 2]


def test_a_clear_during_a_call_lets_it_end() -> None:
    """SGLang clears in another thread than it asks."""
    first, second = MemoryPages(), MemoryPages()
    second.hold(KV, 0)
    them = listed(first, second)
    ask = first.exists

    def clear_meanwhile(pool: ServedPool, pages: Sequence[str], call: Call) -> list[bool]:
        them.clear(Call(5))
        return ask(pool, pages, call)

    first.exists = clear_meanwhile  # type: ignore[method-assign]
    assert them.exists([KV], PAGES, Call(5)).shape == (1, 4)
    first.exists = ask  # type: ignore[method-assign]
    assert not np.any(them.exists([KV], PAGES, Call(5)))
