"""Replays of one pass equal plain replays, request by request, on random traces."""

from __future__ import annotations

import sys
from collections import OrderedDict
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicachectl.formats.eviction import Policy
from hicachectl.simulation import compiled, replay
from hicachectl.simulation.caches import Start, cache_of
from hicachectl.simulation.sizes import PageFile, PageSizes, Room
from tests.simulation.traces import Trace, conversations

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    prefixes = draw(st.lists(st.lists(st.integers(0, 2), max_size=6), min_size=1, max_size=25))
    return Trace(prefixes, [draw(st.integers(0, len(prefix))) for prefix in prefixes])


@pytest.fixture(
    params=["numpy", pytest.param("numba", marks=pytest.mark.slow)], scope="module", autouse=True
)
def loops(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run each test with all loops compiled, and as without numba."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "LEAST", 0 if request.param == "numba" else 1 << 40)
        yield


def test_short_loops_are_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = []
    loop = compiled.compiled(lambda numbers: lengths.append(len(numbers)))
    monkeypatch.setitem(sys.modules, "numba", SimpleNamespace(njit=lambda **_: lambda _: len))
    monkeypatch.setattr(compiled, "is_installed", lambda: True)
    monkeypatch.setattr(compiled, "LEAST", 3)
    assert [loop([1] * count) for count in (2, 3)] == [None, 3]
    assert lengths == [2]


def plain_lru(trace: Trace, capacity: int, start: Sequence[int], *, leaves: bool) -> list[int]:
    held: OrderedDict[int, None] = OrderedDict.fromkeys(start[max(0, len(start) - capacity) :])
    runs = []
    for row, chain in enumerate(trace.chains):
        runs.append(trace.hits(row, held))
        for page in reversed(chain) if leaves else chain:
            held[page] = None
            held.move_to_end(page)
        while len(held) > capacity:
            held.popitem(last=False)
    return runs


def plain_files(
    trace: Trace, limit: int, ratio: float, nbytes: int, start: Sequence[int]
) -> list[int]:
    held = OrderedDict.fromkeys(start)
    runs = []

    def evict(most: int) -> None:
        while held and len(held) * nbytes > most:
            held.popitem(last=False)

    if len(held) * nbytes > limit:
        evict(int(limit * ratio))
    for row, chain in enumerate(trace.chains):
        runs.append(trace.hits(row, held))
        for page in chain:
            if page in held:
                held.move_to_end(page)
            elif nbytes <= limit:
                if (len(held) + 1) * nbytes > limit:
                    evict(max(0, int(limit * ratio) - nbytes))
                held[page] = None
    return runs


def plain_optimal(trace: Trace, capacity: int, start: Sequence[int]) -> list[int]:
    def next_use(page: int, row: int) -> int:
        later = range(row + 1, len(trace.chains))
        return next((other for other in later if page in trace.chains[other]), len(trace.chains))

    held = set(start)
    runs = []
    for row in range(-1, len(trace.chains)):
        if row >= 0:
            runs.append(trace.hits(row, held))
            held.update(trace.chains[row])
        while len(held) > capacity:
            inner = {trace.parents[page] for page in held if page < len(trace.parents)}
            held.remove(max(held - inner, key=lambda page: next_use(page, row)))
    return runs


@st.composite
def starts(draw: st.DrawFn, trace: Trace, *, closed: bool) -> list[int]:
    """Pages of a store, the least recently used first.

    closed: a page stands after the pages that continue it, and none lacks the page before it.
    """
    known = len(trace.parents)
    chosen = draw(st.lists(st.integers(0, known + 2), unique=True))
    if not closed:
        return chosen
    paths: OrderedDict[int, None] = OrderedDict()
    for leaf in chosen:
        page = leaf
        while page >= 0:
            paths[page] = None
            paths.move_to_end(page)
            page = trace.parents[page] if page < known else -1
    return [*paths]


@given(st.data(), traces(), st.integers(1, 40), st.booleans())
def test_lru_is_a_plain_replay(
    data: st.DataObject, trace: Trace, capacity: int, leaves: bool
) -> None:
    pages = data.draw(starts(trace, closed=leaves))
    start = Start(np.array(pages, np.int64))
    for begun, held in ((None, []), (start, pages)):
        runs = replay.replay_lru(trace.requests, [capacity], leaves_first=leaves, start=begun)
        assert runs.tolist() == [plain_lru(trace, capacity, held, leaves=leaves)]


@given(
    st.data(),
    traces(),
    st.integers(1, 120),
    st.sampled_from([0.9, 0.5, 0.75, 1.0, 0.03]),
    st.integers(1, 4),
)
def test_hicachefile_is_a_plain_replay(
    data: st.DataObject, trace: Trace, limit: int, ratio: float, nbytes: int
) -> None:
    pages = data.draw(starts(trace, closed=False))
    for begun, held in ((None, []), (Start(np.array(pages, np.int64)), pages)):
        runs = replay.replay_files(trace.requests, [limit], ratio, [nbytes], begun)
        assert runs.tolist() == [plain_files(trace, limit, ratio, nbytes, held)]


@given(st.data(), traces(), st.integers(1, 40))
def test_optimal_is_a_plain_replay(data: st.DataObject, trace: Trace, capacity: int) -> None:
    pages = data.draw(starts(trace, closed=True))
    for begun, held in ((None, []), (Start(np.array(pages, np.int64)), pages)):
        runs = replay.replay_optimal(trace.requests, [capacity], begun)
        assert runs.tolist() == [plain_optimal(trace, capacity, held)]


def test_ranks_are_taken_before_a_request_touches_a_page() -> None:
    """At a capacity of two, `a` is evicted before the last request, though `ab` was not used.

    The requests are [a], [x] and [a, ab]: with ranks taken while pages are touched, the last page
    first, `a` would have a rank of three.
    """
    trace = Trace([[0], [1], [0, 0]])
    runs = replay.replay_lru(trace.requests, [2, 1, 3], leaves_first=True)
    assert runs.tolist() == [[0, 0, 1], [0, 0, 0], [0, 0, 1]]
    assert plain_lru(trace, 2, [], leaves=True) == [0, 0, 1]


def test_ranks_with_several_sizes_of_pages_serve_what_all_hold() -> None:
    trace = Trace([[0, 0, 0], [1, 0], [0, 0, 0], [1, 0, 0], [0, 0, 0]])
    both = replay.replay_files(trace.requests, [12], 0.9, [2, 3])
    each = [plain_files(trace, 12, 0.9, nbytes, []) for nbytes in (2, 3)]
    assert both.tolist() == [[*map(min, *each)]]


def test_a_trace_of_conversations_at_twenty_capacities() -> None:
    trace = conversations(7, 300)
    distinct = len(trace.parents)
    capacities = np.unique(np.geomspace(2, distinct, 20).astype(int)).tolist()
    lru = replay.replay_lru(trace.requests, capacities, leaves_first=True)
    files = replay.replay_files(trace.requests, capacities, 0.9)
    for row, capacity in enumerate(capacities):
        assert lru[row].tolist() == plain_lru(trace, capacity, [], leaves=True)
        assert files[row].tolist() == plain_files(trace, capacity, 0.9, 1, [])
    assert lru[3].sum() < lru[-1].sum()


@given(
    st.data(),
    traces(),
    st.sampled_from([Policy.LRU, Policy.HICACHEFILE]),
    st.lists(st.integers(0, 100), min_size=1, max_size=4),
    st.lists(st.integers(1, 3), min_size=1, max_size=3),
    st.integers(0, 3),
)
def test_one_pass_is_the_replay_of_each_capacity(
    data: st.DataObject,
    trace: Trace,
    policy: Policy,
    capacities: list[int],
    ranks: list[int],
    least: int,
) -> None:
    """Caches that are replayed page by page, and one pass over ranks, hit the same pages."""
    pages = data.draw(starts(trace, closed=True))
    start = Start(np.array(pages, np.int64))
    sizes = PageSizes(tuple(Room((PageFile("kv", nbytes),)) for nbytes in ranks), known=True)
    runs = replay.replay(policy, trace.requests, capacities, sizes, least=least, start=start)
    parents = trace.requests.forest.parents
    for row, capacity in enumerate(capacities):
        cache = cache_of(policy, capacity, sizes, parents=parents, start=start)
        assert (
            runs[row].tolist() == replay.replay_cache(trace.requests, cache, least=least).tolist()
        )
