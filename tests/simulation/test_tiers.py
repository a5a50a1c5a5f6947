"""SGLang's trees in front of a store: hand-made traces, and a plain model of single pages.

tests/conformance/test_simulate_server.py compares them with a real server.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicachectl.formats.errors import UsageError
from hicachectl.requests.chains import Labels, Requests
from hicachectl.simulation.tiers import Tiers, Tree, filtered, replay_behind
from hicachectl.text.vocabulary import WRITE_POLICIES

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

PAGE = 16
SELECTIVE = "write_through_selective"


def requests_of(*texts: str) -> Requests:
    """Return requests whose pages are the letters of texts, after a bar those of generated tokens.

    Each prompt has one token more than its pages, so that all of them are within reach.
    """
    numbers: dict[str, int] = {}
    chains, prompts = [], []
    for text in texts:
        chain = text.replace("|", "")
        chains.append([numbers.setdefault(chain[: n + 1], len(numbers)) for n in range(len(chain))])
        prompts.append(text.index("|") if "|" in text else len(text))
    lengths = np.array([len(chain) for chain in chains], np.int64)
    pages = np.array(prompts, np.int64)
    return Requests(
        names=np.arange(len(numbers)),
        blocks=np.array([page for chain in chains for page in chain], np.int32),
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        tokens=pages * PAGE + 1,
        reach=pages,
        output_tokens=np.maximum((lengths - pages) * PAGE, 1),
        prompt_blocks=pages,
        block_tokens=PAGE,
    )


class Store:
    """A cache that holds the pages written last, and notes what is read and written."""

    def __init__(self, capacity: int = 99, most: int = 99) -> None:
        """most: most leading pages that it serves."""
        self._capacity, self._most = capacity, most
        self._pages: dict[int, None] = {}
        self.calls: list[str] = []

    def held(self, pages: Sequence[int]) -> int:
        run = next((n for n, page in enumerate(pages) if page not in self._pages), len(pages))
        return min(run, self._most)

    def read(self, pages: Sequence[int], time: float) -> None:
        self.calls.append(f"read {len(pages)}")
        self._touch(pages)

    def write(self, pages: Sequence[int], time: float) -> None:
        self.calls.append(f"write {len(pages)}")
        self._touch(pages)

    def _touch(self, pages: Sequence[int]) -> None:
        for page in pages:
            self._pages.pop(page, None)
            self._pages[page] = None
        for page in list(self._pages)[: max(0, len(self._pages) - self._capacity)]:
            del self._pages[page]


def pools(l1: int, l2: int, policy: str = "write_through", **options: Any) -> Tiers:
    return Tiers(l1 * PAGE, l2 * PAGE, policy, **{"threshold": PAGE, **options})


def served(found: Tiers, *texts: str, store: Store | None = None) -> list[tuple[int, int, int]]:
    """Return pages of each request that device, host and storage served."""
    outcome = replay_behind(requests_of(*texts), found, Store() if store is None else store)
    rows = zip(outcome.device, outcome.host, outcome.storage, strict=True)
    return [(int(d) // PAGE, int(h) // PAGE, int(s) // PAGE) for d, h, s in rows]


def test_a_node_is_evicted_whole_and_comes_back_from_the_host_or_the_store() -> None:
    texts = ("abcd", "efgh", "abcd", "ijkl", "mnop", "qrst", "efgh")
    store = Store()
    rows = served(pools(9, 16), *texts, store=store)
    assert rows[2] == (0, 4, 0)
    assert rows[6] == (0, 0, 4)
    assert store.calls == ["write 4"] * 5 + ["read 4"]


def test_the_rest_of_a_divided_node_counts_as_used() -> None:
    """SGLang refreshes it, though no request asked for it."""
    rows = served(pools(13, 40), "abcd", "efgh", "abx", "ijkl", "abcd")
    assert rows[2] == (2, 0, 0)
    assert rows[4] == (4, 0, 0)


def test_the_store_is_asked_for_a_threshold_at_least_and_gives_as_much() -> None:
    texts = ("abcd", "efgh", "ijkl", "abcd", "abcdx")
    assert served(pools(7, 8, threshold=4 * PAGE), *texts)[3:] == [(0, 0, 4), (4, 0, 0)]
    assert served(pools(7, 8, threshold=5 * PAGE), *texts)[3] == (0, 0, 0)
    assert served(pools(7, 8, threshold=3 * PAGE), *texts, store=Store(most=2))[3] == (0, 0, 0)
    assert served(pools(7, 8, threshold=2 * PAGE), *texts, store=Store(most=2))[3] == (0, 0, 2)


def test_write_through_selective_writes_what_is_used_twice() -> None:
    store = Store()
    rows = served(pools(17, 40, SELECTIVE), "abcd", "abcdefgh", "abxy", store=store)
    assert rows == [(0, 0, 0), (4, 0, 0), (2, 0, 0)]
    assert store.calls == ["write 4"]  # "abcd" with the second request; it is not written again


def test_the_store_is_not_asked_behind_pages_that_the_host_lacks() -> None:
    """SGLang continues a prefix from a node of the host; one that only the device has is none."""
    twice = [text for text in ("abcdef", "ghijkl", "mnopqr") for _ in range(2)]
    for policy, row in (("write_through", (2, 0, 4)), (SELECTIVE, (2, 0, 0))):
        rows = served(pools(8, 12, policy, threshold=3 * PAGE), *twice, "ab", "abcdef")
        assert rows[6:] == [(0, 0, 0), row]


def test_write_back_writes_what_leaves_the_device() -> None:
    store = Store()
    rows = served(pools(9, 40, "write_back"), "abcd", "abcd", "efgh", "ijkl", "abcd", store=store)
    assert rows == [(0, 0, 0), (4, 0, 0), (0, 0, 0), (0, 0, 0), (0, 4, 0)]
    assert store.calls == ["write 4", "write 4", "write 4"]


def test_write_back_frees_host_copies_of_pages_on_the_device_first() -> None:
    """The copy of "abcd" makes room for "ijkl", so the host keeps "efgh"."""
    rows = served(pools(9, 8, "write_back"), "abcd", "efgh", "ijkl", "abcd", "efgh")
    assert rows[3:] == [(0, 4, 0), (0, 4, 0)]


def test_write_back_drops_what_the_host_has_no_room_for() -> None:
    store = Store()
    rows = served(pools(9, 3, "write_back"), "abcd", "efgh", "ijkl", "abcd", store=store)
    assert rows == [(0, 0, 0)] * 4
    assert not store.calls


def test_generated_pages_are_written_and_leave_the_device_before_the_prompt() -> None:
    store = Store()
    rows = served(pools(8, 20), "ab|cd", "efg", "abcd", store=store)
    assert store.calls[:2] == ["write 2", "write 2"]
    assert rows[2] == (2, 2, 0)


def test_a_hit_is_shortened_to_the_room_of_the_host() -> None:
    """Copies of what the device holds stay, here 8 of 12 pages."""
    texts = ("abcdef", "ghijklmn", "abcdef")
    assert served(pools(10, 12), *texts)[2] == (0, 0, 4)
    assert served(pools(10, 12, threshold=5 * PAGE), *texts)[2] == (0, 0, 0)


def test_chunks_are_nodes_of_their_own() -> None:
    whole = served(pools(9, 30), "abcdef", "ghi", "abcdef")
    halves = served(pools(9, 30, chunk=3 * PAGE), "abcdef", "ghi", "abcdef")
    assert (whole[2], halves[2]) == ((0, 6, 0), (3, 3, 0))


def test_requests_go_to_servers_by_their_label_else_in_turn() -> None:
    requests = requests_of("abcd", "abcd", "abcd", "abcd")
    found = pools(20, 40, servers=2)
    device = replay_behind(requests, found, Store()).device // PAGE
    assert device.tolist() == [0, 0, 4, 4]
    labels = {"server": Labels(("one", "two"), np.array([0, 0, 1, 0], np.int32))}
    outcome = replay_behind(replace(requests, labels=labels), found, Store())
    assert (outcome.device // PAGE).tolist() == [0, 4, 0, 4]
    assert (outcome.storage // PAGE).tolist() == [0, 0, 4, 0]  # the servers share the store


def test_a_request_larger_than_the_device_is_refused() -> None:
    requests = requests_of("abcdefgh", "ab", "ab")
    outcome = filtered(requests, pools(8, 9))
    assert outcome.refused == 1
    assert (outcome.device // PAGE).tolist() == [0, 0, 2]
    assert np.diff(outcome.requests.offsets).tolist() == [0, 2, 0]


def test_tokens_of_a_last_block_that_is_not_full_count_once() -> None:
    """Traces of block ids name such a block, too."""
    requests = replace(requests_of("abcd", "abcd"), tokens=np.array([60, 60]))
    assert filtered(requests, pools(8, 9)).device.tolist() == [0, 60]


def test_sizes_need_the_tokens_of_a_block() -> None:
    with pytest.raises(UsageError, match="give --block-size"):
        filtered(replace(requests_of("ab"), block_tokens=0), pools(8, 9))


def test_the_filtered_stream_has_what_the_store_is_asked_and_written() -> None:
    outcome = filtered(requests_of("abcd", "abcdef", "abxyz"), pools(30, 60, threshold=3 * PAGE))
    chains = np.split(outcome.requests.blocks, outcome.requests.offsets[1:-1])
    assert [chain.tolist() for chain in chains] == [[0, 1, 2, 3], [4, 5], [6, 7, 8]]
    assert outcome.requests.reach.tolist() == [4, 0, 3]


class SinglePages:
    """Pools that evict single pages, the one used least recently of those that none continues."""

    def __init__(self, requests: Requests, l1: int, l2: int) -> None:
        self.requests, self.l1, self.l2 = requests, l1, l2
        self.parents = requests.forest.parents.tolist()
        self.device: dict[int, int] = {}  # times of the last use
        self.host: dict[int, int] = {}
        self.now = 0

    def serve(self, chain: list[int]) -> tuple[int, int]:
        """Return the pages that device and host serve."""
        host = next((n for n, page in enumerate(chain) if page not in self.host), len(chain))
        device = next((n for n in range(host) if chain[n] not in self.device), host)
        self.now += 1
        self.host.update(dict.fromkeys(chain[:host], self.now))
        self.make_room(host - device, chain[:host])
        self.device.update(dict.fromkeys(chain[:host], self.now))
        for place in range(host, len(chain) + 1):
            self.make_room(2, chain[:place])
            self.insert(chain[: place + 1])
        return device, host - device

    def make_room(self, pages: int, locked: list[int]) -> None:
        while self.l1 - len(self.device) < pages:
            self.evict(self.device, locked)

    def insert(self, chain: list[int]) -> None:
        for page in chain:
            self.now += 1
            if page not in self.host and len(self.host) >= self.l2:
                self.evict(self.host, self.device)
            self.host[page] = self.device[page] = self.now

    def evict(self, pool: dict[int, int], locked: Iterable[int]) -> None:
        leaves = set(pool) - {self.parents[page] for page in pool} - set(locked)
        del pool[min(leaves, key=pool.__getitem__)]


TEXTS = st.lists(st.text("abc", max_size=6), min_size=1, max_size=25)


@given(TEXTS, st.integers(9, 14), st.integers(1, 8))
def test_nodes_of_single_pages_are_evicted_as_pages(texts: list[str], l1: int, more: int) -> None:
    """Chunks of one page make nodes of one page."""
    requests = requests_of(*texts)
    outcome = filtered(requests, pools(l1, l1 + more, chunk=PAGE))
    plain = SinglePages(requests, l1, l1 + more)
    chains = np.split(requests.blocks, requests.offsets[1:-1])
    rows = zip(outcome.device // PAGE, outcome.host // PAGE, strict=True)
    assert [*rows] == [plain.serve(chain.tolist()) for chain in chains]


@given(
    st.lists(st.tuples(st.text("abc", max_size=6), st.text("abc", max_size=2)), min_size=1),
    st.sampled_from(WRITE_POLICIES),
    st.integers(9, 16),
    st.integers(1, 24),
    st.integers(1, 3),
)
def test_pools_of_every_policy_count_their_pages(
    texts: list[tuple[str, str]], policy: str, l1: int, l2: int, least: int
) -> None:
    requests = requests_of(*map("|".join, texts))
    tree = Tree(requests, pools(l1, l2, policy, threshold=least * PAGE), Store(10))
    for number, reach in enumerate(requests.reach.tolist()):
        _, _, device, host, storage = tree.serve(number, 0) or (0,) * 5
        assert device + host + storage <= reach
        assert not 0 < storage < least
        nodes = list(tree.nodes.values())
        assert tree.free == l1 - sum(node.length for node in nodes if node.on_device) >= 0
        assert tree.free_host == l2 - sum(node.length for node in nodes if node.on_host) >= 0
        for node in nodes:
            continuing = [other for other in nodes if other.parent is node]
            assert node.children == len(continuing)
            assert node.device_children == sum(other.on_device for other in continuing)
            assert node.on_device or (node.on_host and not node.device_children)
