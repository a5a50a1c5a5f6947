"""The plug-in's files are evicted as simulated: the same requests, with small pages."""

from __future__ import annotations

import hashlib
import time
from typing import TYPE_CHECKING

import pytest

from hicachectl.backends.sglang.calls import Call
from hicachectl.backends.sglang.capacity import Capacity
from hicachectl.backends.sglang.counters import Counters
from hicachectl.backends.sglang.file_pages import FilePages
from hicachectl.backends.sglang.settings import Settings
from hicachectl.backends.urls import parse_url
from hicachectl.formats.trailer import TRAILER_BYTES
from hicachectl.simulation.caches import PluginPages, Rooms
from hicachectl.simulation.sizes import PageFile
from tests.backends.sglang.pages import HostPool
from tests.simulation.traces import conversations
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

NBYTES = 400
TICK_S = 0.005  # of a file system's times: the order of equal times is no order


class Plugin:
    """One rank of the plug-in, whose evictor has its turn after each page."""

    def __init__(self, directory: Path, limit: int, pools: Sequence[str]) -> None:
        url = parse_url(str(directory))
        settings = Settings(stores=(url,), max_size=limit, threads=1)
        self._store = FilePages(url, Counters(str(directory)), settings)
        self._hosts = [HostPool(NBYTES, name=name) for name in pools]
        for host in self._hosts:
            self._store.add(host.pool)
        self.held([0])  # opens the directory
        capacity = self._store._capacity
        assert capacity is not None
        self._capacity = capacity
        # Pages that were used since a listing are passed over, and missed until the next listing.
        capacity._listing_is_due = lambda: True  # type: ignore[method-assign]
        self._evict()

    def held(self, pages: Sequence[int]) -> int:
        """Count leading pages. The mount notes a look-up, too, as the first read after a write."""
        whole = []
        for page in names(pages):
            with Call(60) as call:
                whole.append(all(self._store.exists(h.pool, [page], call)[0] for h in self._hosts))
            time.sleep(TICK_S)
        return [*whole, False].index(False)

    def read(self, pages: Sequence[int]) -> None:
        # A page whose anchor is used before its sidecars is in flight for a minute.
        for host in self._hosts:
            for page in names(pages):
                with Call(60) as call:
                    assert self._store.read(host.pool, [page], host.pieces([0]), call) == [True]
                time.sleep(TICK_S)

    def write(self, pages: Sequence[int]) -> None:
        for host in self._hosts:
            for page in names(pages):
                with Call(60) as call:
                    self._store.write(host.pool, [page], host.pieces([0]), call)
                self._evict()
                time.sleep(TICK_S)

    def _evict(self) -> None:
        wait_until(self._capacity.evict_now, "no eviction")

    def close(self) -> None:
        self._store.close()
        self._capacity._close_files()


def names(pages: Sequence[int]) -> list[str]:
    return [hashlib.sha256(b"%d" % page).hexdigest() for page in pages]


@pytest.mark.slow
@pytest.mark.parametrize("pools", [("kv",), ("indexer", "kv")])
def test_the_plugin_evicts_as_simulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pools: tuple[str, ...]
) -> None:
    monkeypatch.setattr(Capacity, "_run", lambda _: None)  # the thread; each turn is the test's
    trace = conversations(11, 40, turn=3)
    whole = len(trace.parents) * len(pools) * (NBYTES + TRAILER_BYTES)
    limit = whole // 4
    files = [PageFile(pool, NBYTES, anchor=pool == "kv") for pool in pools]
    cache = Rooms([PluginPages(files, limit, TRAILER_BYTES)])
    plugin = Plugin(tmp_path / "store", limit, pools)
    hits = 0
    try:
        for chain in trace.chains:
            hit = cache.held(chain)
            assert plugin.held(chain) == hit
            hits += hit
            plugin.read(chain[:hit])
            cache.read(chain[:hit], 0.0)
            plugin.write(chain[hit:])
            cache.write(chain[hit:], 0.0)
    finally:
        plugin.close()
    assert 0 < hits < trace.requests.reach.sum()
