"""Simulate SGLang's device and host pools in front of a store.

In this module, a pool is memory for pages. Each server has one tree for both pools. A node of the
tree is a sequence of pages that no request has divided. Each node is copied and evicted as a whole.
A pool evicts only leaves, the least recently used leaf first. Requests are served one after
another, and every copy ends before the next request starts.

Source: SGLang 0.5.23, mem_cache/unified_cache/unified_tree_core.py and components/full.py,
mem_cache/unified_radix_cache.py, managers/schedule_policy.py.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np

from hicachectl.formats.errors import UsageError
from hicachectl.formats.restorable import least_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hicachectl.formats.arrays import IntArray
    from hicachectl.requests.chains import Requests
    from hicachectl.simulation.caches import Cache
    from hicachectl.simulation.replay import Seconds


@dataclass(frozen=True, slots=True)
class Tiers:
    """The pools of the servers.

    l1_tokens: size of the device pool of one server, in tokens.
    l2_tokens: size of the host pool of one server, in tokens.
    write_policy: --hicache-write-policy.
    servers: number of servers that share the store. The label "server" of a request chooses its
        server. If the requests have no such label, they go to the servers in turn.
    threshold: least number of tokens that a server asks the store for, and that it takes from the
        store.
    trailing: whether the model has a trailing pool of data (see `sizes`).
    chunk: --chunked-prefill-size.
    """

    l1_tokens: int
    l2_tokens: int
    write_policy: str = "write_through"
    servers: int = 1
    threshold: int = 256
    trailing: bool = False
    chunk: int = 8192

    @property
    def filters(self) -> bool:
        """Whether the pools keep the same pages after a hit in the store as after a miss.

        If so, stores of all sizes get the same requests.
        """
        return self.write_policy == "write_through" and self.l2_tokens > self.l1_tokens


class Filtered(NamedTuple):
    """Requests that the pools leave to the store.

    requests: chains without the pages that the pools served. Servers ask the store for the pages
        within `requests.reach`, and write all pages of the chains to the store.
    device: [requests] number of tokens that the device pools served.
    host: [requests] number of tokens that the host pools served.
    refused: number of requests that exceed the device pool, so that no server takes them.
    """

    requests: Requests
    device: IntArray
    host: IntArray
    refused: int


class Served(NamedTuple):
    """Number of prompt tokens that each tier served. All arrays are [requests].

    refused: number of requests that exceed the device pool.
    """

    device: IntArray
    host: IntArray
    storage: IntArray
    refused: int


def filtered(requests: Requests, tiers: Tiers) -> Filtered:
    """Return the tokens that the pools serve, and the requests that they leave to a store."""
    assert tiers.filters
    (matched, asked, *pages), refused = _serve(requests, tiers, None, None)
    device, host, _ = _tokens(requests, pages)
    return Filtered(requests.after(matched, asked), device, host, refused)


def replay_behind(
    requests: Requests, tiers: Tiers, cache: Cache, *, seconds: Seconds | None = None
) -> Served:
    """Return the tokens that the pools serve, and the tokens that a cache behind the pools serves.

    seconds: [requests] times of the requests, ascending; None if unknown.
    """
    (_, _, *pages), refused = _serve(requests, tiers, cache, seconds)
    device, host, storage = _tokens(requests, pages)
    return Served(device, host, storage, refused)


def _tokens(requests: Requests, tiers: Sequence[IntArray]) -> Iterator[IntArray]:
    """Yield the number of prompt tokens that each tier serves: [requests].

    The last block of a prompt may have fewer tokens than other blocks.
    tiers: for each tier, [requests] number of pages that it served.
    """
    rest = np.where(requests.tokens < 0, np.iinfo(np.int64).max, requests.tokens)
    for pages in tiers:
        tokens = np.minimum(pages * requests.block_tokens, rest)
        rest = rest - tokens
        yield tokens


def _serve(
    requests: Requests, tiers: Tiers, cache: Cache | None, seconds: Seconds | None
) -> tuple[IntArray, int]:
    """Return five numbers of pages for each request, [5, requests], and how many were refused.

    The five numbers count these pages:
    - pages that the pools held
    - pages after the held pages, for which the server asked the store
    - pages that the device served
    - pages that the host served
    - pages that the store served

    The pools count as holding all pages of a refused request.
    """
    unit = requests.block_tokens
    if not unit:
        raise UsageError(
            f"{requests.source}: does not tell the tokens of a block, which a simulation of L1 and "
            "L2 needs; give --block-size"
        )
    labels = requests.labels.get("server")
    turns = np.arange(len(requests)) if labels is None else labels.ids
    servers = (turns % tiers.servers).tolist()
    trees = [Tree(requests, tiers, cache) for _ in range(tiers.servers)]
    times = np.zeros(len(requests)) if seconds is None else seconds
    pages = np.zeros((5, len(requests)), np.int64)
    refused = 0
    for number, (server, time) in enumerate(zip(servers, times.tolist(), strict=True)):
        served = trees[server].serve(number, time)
        if served is None:
            refused += 1
            pages[0, number] = requests.offsets[number + 1] - requests.offsets[number]
        else:
            pages[:, number] = served
    return pages, refused


@dataclass(slots=True, eq=False)
class Node:
    """Node of a tree: consecutive pages that no request has divided.

    at: index of the first page among the blocks of all requests.
    length: number of pages.
    parent: node that this node continues; the root has none.
    children: number of nodes that continue this node.
    device_children: number of these nodes that are on the device.
    hits: number of insertions that passed the node.
    used: time of the last access.
    holder: number of the last request that used the node; -1 if there is none. No pool evicts the
        node while this request is being served.
    """

    at: int
    length: int
    parent: Node
    children: int = 0
    device_children: int = 0
    hits: int = 0
    used: int = 0
    holder: int = -1
    on_device: bool = False
    on_host: bool = False

    @property
    def is_device_leaf(self) -> bool:
        """Whether the device pool can evict the node."""
        return self.on_device and not self.device_children

    @property
    def is_host_leaf(self) -> bool:
        """Whether the host pool can evict the node."""
        return self.on_host and not self.on_device and not self.children


class _Leaves:
    """Leaves of one pool, in the order of their last access.

    An entry is outdated if its node was used after the entry was added, or if its node is no longer
    a leaf. `take_oldest` removes such entries.
    """

    def __init__(self, is_leaf: Callable[[Node], bool]) -> None:
        self._is_leaf = is_leaf
        self._entries: list[tuple[int, int, Node]] = []
        self._entered: set[Node] = set()

    def add(self, node: Node) -> None:
        """Add a node if it is a leaf."""
        if node not in self._entered and self._is_leaf(node):
            self._entered.add(node)
            heappush(self._entries, (node.used, node.at, node))

    def take_oldest(self, holder: int) -> Node | None:
        """Remove and return the least recently used leaf, or None if no leaf can be evicted.

        holder: number of the request that is being served. The leaves that it uses stay.
        """
        while self._entries:
            used, _, node = heappop(self._entries)
            self._entered.discard(node)
            if node.used != used:
                self.add(node)
            elif node.holder == holder:  # the request also uses all leaves that were used later
                self.add(node)
                return None
            elif self._is_leaf(node):
                return node
        return None


class Tree:
    """The tree of one server. Sizes are in pages."""

    def __init__(self, requests: Requests, tiers: Tiers, cache: Cache | None) -> None:
        unit = requests.block_tokens
        self._requests = requests
        self._blocks = requests.blocks
        self._unit = unit
        self._cache = cache
        self._pages = self.free = tiers.l1_tokens // unit
        self.free_host = tiers.l2_tokens // unit
        self._least = -(-tiers.threshold // unit)
        self._least_loaded = least_tokens(0, trailing=tiers.trailing)
        self._chunk = max(tiers.chunk // unit, 1)
        self._writes_back = tiers.write_policy == "write_back"
        self._hits = 2 if tiers.write_policy == "write_through_selective" else 1
        self._root = Node(0, 0, cast("Node", None))
        self.nodes: dict[int, Node] = {}  # keys are the first blocks of the nodes
        self._leaves = _Leaves(lambda node: node.is_device_leaf)
        self._host_leaves = _Leaves(lambda node: node.is_host_leaf)
        # Nodes on both device and host. With write_back, their host copies are freed first.
        self._on_both: dict[Node, None] = {}
        self._now = 0
        self._number = -1
        self._time = 0.0

    def serve(self, number: int, time: float) -> tuple[int, int, int, int, int] | None:
        """Serve a request. Return its five numbers of pages, in the order of `_serve`.

        Return None if the request exceeds the device pool, so that no server takes it.
        """
        requests = self._requests
        start, end = requests.offsets[number : number + 2].tolist()
        reach = int(requests.reach[number])
        prompt = min(int(requests.prompt_blocks[number]), end - start)
        tokens = int(requests.tokens[number])
        tokens = prompt * self._unit if tokens < 0 else tokens
        if self._pages_of(tokens) >= self._pages:
            return None
        self._number, self._time = number, time
        path = self._match(start, start + reach)
        device = sum(node.length for node in path if node.on_device)
        matched = sum(node.length for node in path)
        asked = reach - matched
        if asked < self._least or (path and not path[-1].on_host):
            asked = 0
        storage = self._prefetch(start + matched, asked, path) if asked else 0
        self._use(path)
        host = matched - device
        if host + storage and not self._load_back(path, host + storage):
            host = storage = 0
        self._compute(start, device + host + storage, prompt, tokens)
        self._generate(start, prompt, end, tokens, int(requests.output_tokens[number]))
        self._number = -1
        return matched, asked, device, host, storage

    def _pages_of(self, tokens: int) -> int:
        return -(-tokens // self._unit)

    def _match(self, start: int, stop: int) -> list[Node]:
        """Return the nodes of the longest prefix in the pools.

        If the prefix ends inside a node, divide the node there.
        """
        path: list[Node] = []
        while start < stop and (node := self.nodes.get(int(self._blocks[start]))) is not None:
            length = self._common(node, start, stop)
            path.append(node if length == node.length else self._divide(node, length))
            if length < node.length:
                break
            start += length
        self._use(path)
        return path

    def _common(self, node: Node, start: int, stop: int) -> int:
        """Return how many leading pages of a node a chain shares: at least one.

        The number of a block stands for its whole prefix, so equal blocks have equal prefixes.
        """
        blocks, at = self._blocks, node.at
        most = min(node.length, stop - start)
        if blocks[at + most - 1] == blocks[start + most - 1]:
            return most
        places = range(most)
        return bisect_left(places, True, key=lambda n: blocks[at + n] != blocks[start + n])

    def _use(self, path: list[Node]) -> None:
        self._now += 1
        for node in path:
            node.used = self._now
            node.holder = self._number

    def _divide(self, node: Node, length: int) -> Node:
        """Divide a node after `length` pages. Return the front, which is a new node.

        Both parts count as used now.
        """
        front = Node(node.at, length, node.parent)
        front.children = 1
        front.device_children = int(node.on_device)
        front.on_device, front.on_host = node.on_device, node.on_host
        front.hits, front.holder = node.hits, node.holder
        self._now += 1
        front.used = node.used = self._now
        node.at += length
        node.length -= length
        node.parent = front
        self.nodes[int(self._blocks[front.at])] = front
        self.nodes[int(self._blocks[node.at])] = node
        self._note_both(front)
        return front

    def _prefetch(self, start: int, asked: int, path: list[Node]) -> int:
        """Copy the leading pages that the store has to the host pool. Return how many it copied."""
        if self._cache is None:
            return 0
        pages = self._blocks[start : start + asked].tolist()
        found = self._cache.held(pages)
        if found < self._least:
            return 0
        if found > self.free_host:
            self._evict_host(found)
        found = min(found, self.free_host)
        if found < self._least:
            return 0
        self._cache.read(pages[:found], self._time)
        node = self._add(start, found, path[-1] if path else self._root)
        node.on_host = True
        self.free_host -= found
        path.append(node)
        return found

    def _add(self, at: int, length: int, parent: Node) -> Node:
        node = Node(at, length, parent)
        parent.children += 1
        self._now += 1
        node.used = self._now
        node.holder = self._number
        self.nodes[int(self._blocks[at])] = node
        return node

    def _load_back(self, path: list[Node], pages: int) -> bool:
        """Copy to the device the nodes of a path that only the host has. Return whether it worked.

        These nodes have `pages` pages. Nothing is copied if they have fewer tokens than servers
        load, or if the device lacks room.
        """
        if pages * self._unit < self._least_loaded or not self._make_room(pages):
            return False
        for node in path:
            if not node.on_device:
                self._put_on_device(node)
                self._note_both(node)
        return True

    def _compute(self, start: int, done: int, prompt: int, tokens: int) -> None:
        """Compute a prompt after its first `done` pages. Insert its pages after each chunk."""
        counted, last = 0, max(self._pages_of(tokens), done + 1)
        for first in range(done, last, self._chunk):
            stop = min(first + self._chunk, last)
            self._make_room(stop - first + 1)
            stop = min(stop, prompt)
            self._insert(start, start + stop, counted)
            counted = stop

    def _generate(self, start: int, prompt: int, end: int, tokens: int, outputs: int) -> None:
        """Generate the tokens after a prompt, and insert their pages."""
        if outputs > 1:
            self._make_room(self._pages_of(tokens + outputs - 2) - prompt + 1)
        if start + prompt < end:
            self._insert(start, end, prompt)
            self._insert(start, start + prompt, prompt)

    def _insert(self, start: int, stop: int, counted: int) -> None:
        """Insert a chain whose pages are on the device.

        counted: number of leading pages that this request has already inserted.
        """
        at, parent = start, self._root
        while at < stop and (node := self.nodes.get(int(self._blocks[at]))) is not None:
            self._now += 1
            node.used = self._now
            length = self._common(node, at, stop)
            if length < node.length:
                node = self._divide(node, length)
            node.holder = self._number
            if not node.on_device:
                self._put_on_device(node)
                self._note_both(node)
            at += length
            if at - start > counted:
                self._count_hit(node)
            parent = node
        if at < stop:
            node = self._add(at, stop - at, parent)
            self._put_on_device(node)
            self._count_hit(node)

    def _put_on_device(self, node: Node) -> None:
        node.on_device = True
        node.parent.device_children += 1
        self.free -= node.length
        self._leaves.add(node)

    def _count_hit(self, node: Node) -> None:
        """Count an insertion that passed a node, and write the node if the write policy says so.

        A written node is copied to the host and then to the store. Earlier nodes of the chain that
        are not on the host are written first.
        """
        if self._writes_back:
            return
        node.hits += 1
        if node.on_host or node.hits < self._hits:
            return
        chain = [node]
        while (parent := chain[-1].parent) is not self._root and not parent.on_host:
            chain.append(parent)
        for unwritten in reversed(chain):
            if not self._back_up(unwritten):
                return

    def _back_up(self, node: Node) -> bool:
        """Copy a node to the host and then to the store. Return whether the host had room."""
        lacking = node.length - self.free_host
        if lacking > 0 and self._evict_host(lacking) < lacking:
            return False
        node.on_host = True
        self.free_host -= node.length
        if self._cache is not None:
            pages = self._blocks[node.at : node.at + node.length].tolist()
            self._cache.write(pages, self._time)
        return True

    def _make_room(self, pages: int) -> bool:
        """Evict nodes from the device until `pages` pages are free. Return whether they are."""
        while self.free < pages:
            node = self._leaves.take_oldest(self._number)
            if node is None:
                return False
            if self._writes_back and not node.on_host and not self._back_up(node):
                self._drop(node)
            elif node.on_host:
                self._leave_device(node)
                self._host_leaves.add(node)
            else:
                self._remove(node)
        return True

    def _leave_device(self, node: Node) -> None:
        node.on_device = False
        node.parent.device_children -= 1
        self.free += node.length
        self._on_both.pop(node, None)
        self._leaves.add(node.parent)

    def _evict_host(self, pages: int) -> int:
        """Evict nodes from the host until `pages` pages are freed, or no node can be evicted.

        Return how many pages were freed.
        """
        before = self.free_host
        if self._writes_back:
            self._free_both(pages)
        while self.free_host - before < pages:
            node = self._host_leaves.take_oldest(self._number)
            if node is None:
                break
            self._remove(node)
        return self.free_host - before

    def _note_both(self, node: Node) -> None:
        if self._writes_back and node.on_device and node.on_host:
            self._on_both.setdefault(node)

    def _free_both(self, pages: int) -> None:
        """Drop host copies of nodes that are also on the device, until `pages` pages are freed.

        Copies of leaves that the device could evict are dropped last.
        """
        for node in sorted(
            self._on_both, key=lambda node: node.is_device_leaf and node.holder != self._number
        ):
            if pages <= 0:
                break
            del self._on_both[node]
            node.on_host = False
            self.free_host += node.length
            pages -= node.length

    def _drop(self, node: Node) -> None:
        """Remove a node and all nodes that continue it, from the device and the host."""
        while node.children:
            for other in list(self.nodes.values()):
                ancestor = other.parent
                while ancestor is not node and ancestor is not self._root:
                    ancestor = ancestor.parent
                if ancestor is node and not other.children:
                    self._remove(other)
        self._remove(node)

    def _remove(self, node: Node) -> None:
        """Remove a node without children, then its ancestors.

        The first ancestor that is in a pool, or has other children, stays with all nodes above it.
        """
        while True:
            parent = node.parent
            if node.on_device:
                self._leave_device(node)
            if node.on_host:
                node.on_host = False
                self.free_host += node.length
            del self.nodes[int(self._blocks[node.at])]
            parent.children -= 1
            if parent is self._root or parent.children or parent.on_device or parent.on_host:
                break
            node = parent
        self._leaves.add(parent)
        self._host_leaves.add(parent)
