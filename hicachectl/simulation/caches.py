"""Caches that are replayed one capacity at a time, each as its store evicts.

A cache holds pages by number. A server asks how many leading pages it holds, reads them, and
writes others. Pages of a call are consecutive pages of one chain.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple, Protocol

from hicachectl.formats.errors import UsageError
from hicachectl.formats.eviction import Policy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy as np
    import numpy.typing as npt

    from hicachectl.formats.arrays import BoolArray, IntArray
    from hicachectl.simulation.distances import Blocks
    from hicachectl.simulation.sizes import PageFile, PageSizes

_BATCH = 128  # pages of a call; source: SGLang managers/cache_controller.py


class Cache(Protocol):
    """A cache of pages that servers share. Times are in seconds, and never decrease."""

    def held(self, pages: Sequence[int]) -> int:
        """Return how many leading pages the cache can serve. Nothing counts as used."""

    def read(self, pages: Sequence[int], time: float) -> None:
        """Read leading pages that the cache can serve."""

    def write(self, pages: Sequence[int], time: float) -> None:
        """Write the pages of one node; pages that are held count as used."""


class Start(NamedTuple):
    """Pages that a cache begins with, each with all objects but those of trailing pools.

    pages: [pages] int64 numbers, the least recently used page first. Numbers above those of the
        requests name pages that no request uses.
    trailing: [pages] bool, which pages have objects of trailing pools, too; None for no page.
    seconds: [pages] times of the last use; None if unknown.
    """

    pages: IntArray
    trailing: BoolArray | None = None
    seconds: npt.NDArray[np.float64] | None = None

    def rows(self) -> Iterator[tuple[int, bool, float]]:
        """Yield each page, whether it has objects of trailing pools, and its time or 0."""
        count = len(self.pages)
        trailing = [False] * count if self.trailing is None else self.trailing.tolist()
        seconds = [0.0] * count if self.seconds is None else self.seconds.tolist()
        return zip(self.pages.tolist(), trailing, seconds, strict=True)


class TreeLru:
    """A cache that evicts the least recently used page that no held page continues.

    A page counts as used when a page that continues it is used, as in SGLang's trees. The objects
    of a page are evicted together.
    """

    def __init__(self, capacity: int, sizes: PageSizes, parents: Blocks) -> None:
        """capacity: bytes. parents: the page before each page, -1 for the first of a chain."""
        self._capacity = capacity
        self._parents = parents
        self._page_bytes, self._state_bytes = sizes.page_bytes, sizes.trailing_bytes
        windows = [file.window for room in sizes.rooms for file in room.files if file.window]
        self._window = max(windows, default=0)
        self._nbytes: OrderedDict[int, int] = OrderedDict()
        self._total = 0

    def held(self, pages: Sequence[int]) -> int:
        """See `Cache`."""
        run, held = 0, self._nbytes
        while run < len(pages) and pages[run] in held:
            run += 1
        if not self._window:
            return run
        whole = self._page_bytes + self._state_bytes
        for length in range(run, 0, -1):
            if all(held[p] == whole for p in pages[max(0, length - self._window) : length]):
                return length
        return 0

    def begin(self, start: Start) -> None:
        """Hold some pages, before the first request."""
        for page, trailing, _ in start.rows():
            self._nbytes[page] = self._page_bytes + (self._state_bytes if trailing else 0)
            self._total += self._nbytes[page]
        self._evict()

    def read(self, pages: Sequence[int], time: float) -> None:
        """See `Cache`."""
        for page in reversed(pages):
            self._nbytes.move_to_end(page)

    def write(self, pages: Sequence[int], time: float) -> None:
        """See `Cache`."""
        held, first = self._nbytes, len(pages) - self._window
        for place in range(len(pages) - 1, -1, -1):
            page, earlier = pages[place], held.get(pages[place], 0)
            states = self._state_bytes if place >= first else 0
            held[page] = max(earlier, self._page_bytes + states)
            held.move_to_end(page)
            self._total += held[page] - earlier
        page = int(self._parents[pages[0]]) if pages else -1
        while page in held:
            held.move_to_end(page)
            page = int(self._parents[page])
        self._evict()

    def _evict(self) -> None:
        while self._total > self._capacity:
            self._total -= self._nbytes.popitem(last=False)[1]


class RoomPages(ABC):
    """The objects in one room of a store. Subclasses say which are evicted.

    files: objects of a page here, in the order in which a server writes them.
    """

    def __init__(self, files: Sequence[PageFile]) -> None:
        self.files = files
        order = range(len(files))
        # A server reads the anchor first, and objects of trailing pools last.
        self._read_first = sorted(
            (n for n in order if not files[n].window), key=lambda n: not files[n].anchor
        )
        self._anchors = [n for n in order if files[n].anchor]
        self._beside = [n for n in order if not files[n].anchor]
        self._trailing = [n for n in order if files[n].window]

    @abstractmethod
    def begin(self, start: Start) -> None:
        """Hold some pages, before the first request."""

    @abstractmethod
    def has(self, page: int, number: int) -> bool:
        """Return whether one of the files of a page is held."""

    @abstractmethod
    def read(self, pages: Sequence[int], time: float) -> None:
        """See `Cache`."""

    @abstractmethod
    def write(self, pages: Sequence[int], time: float) -> None:
        """See `Cache`."""

    def _tail(self, pages: Sequence[int], number: int) -> Sequence[int]:
        """Return the pages of a node that have a file."""
        window = self.files[number].window
        return pages[-window:] if window else pages


class Rooms:
    """A store whose ranks or tables evict apart; a page is served if all have its objects."""

    def __init__(self, rooms: Sequence[RoomPages]) -> None:
        self._rooms = rooms
        files = [(room, n, file) for room in rooms for n, file in enumerate(room.files)]
        self._every = [(room.has, n) for room, n, file in files if not file.window]
        self._trailing = [(room.has, n, file.window) for room, n, file in files if file.window]

    def held(self, pages: Sequence[int]) -> int:
        """See `Cache`."""
        run = 0
        for page in pages:
            if not all(has(page, n) for has, n in self._every):
                break
            run += 1
        if not self._trailing:
            return run
        for length in range(run, 0, -1):
            if all(
                has(page, n)
                for has, n, window in self._trailing
                for page in pages[max(0, length - window) : length]
            ):
                return length
        return 0

    def read(self, pages: Sequence[int], time: float) -> None:
        """See `Cache`."""
        for room in self._rooms:
            room.read(pages, time)

    def write(self, pages: Sequence[int], time: float) -> None:
        """See `Cache`."""
        for room in self._rooms:
            room.write(pages, time)


class EvictedFiles(RoomPages):
    """The files of one rank of HiCacheFile.

    Source: SGLang mem_cache/storage/file/lru_file_evictor.py :: LRUFileEvictor.
    """

    def __init__(self, files: Sequence[PageFile], limit: int, ratio: float) -> None:
        """limit: bytes, its max_size. ratio: its eviction_ratio."""
        super().__init__(files)
        self._limit, self._kept = limit, int(limit * ratio)
        self._held: OrderedDict[int, int] = OrderedDict()
        self._total = 0

    def begin(self, start: Start) -> None:
        """See `RoomPages`. HiCacheFile lists files by their mtime, and evicts once."""
        for page, trailing, _ in start.rows():
            for number, file in enumerate(self.files):
                if trailing or not file.window:
                    self._held[page * len(self.files) + number] = file.nbytes
                    self._total += file.nbytes
        if self._total > self._limit:
            self._evict(self._kept)

    def has(self, page: int, number: int) -> bool:
        """See `RoomPages`."""
        return page * len(self.files) + number in self._held

    def read(self, pages: Sequence[int], time: float) -> None:
        """Touch files batch by batch."""
        for start in range(0, len(pages), _BATCH):
            for number in self._read_first:
                for page in pages[start : start + _BATCH]:
                    self._held.move_to_end(page * len(self.files) + number)
        for number in self._trailing:
            for page in self._tail(pages, number):
                self._held.move_to_end(page * len(self.files) + number)

    def write(self, pages: Sequence[int], time: float) -> None:
        """Write the files of a node, one pool after another."""
        for number in range(len(self.files)):
            for page in self._tail(pages, number):
                self._set(page * len(self.files) + number, self.files[number].nbytes)

    def _set(self, file: int, nbytes: int) -> None:
        held = self._held
        if file in held:
            held.move_to_end(file)
            return
        if nbytes > self._limit:
            return
        if self._total + nbytes > self._limit:
            self._evict(max(0, self._kept - nbytes))
        held[file] = nbytes
        self._total += nbytes

    def _evict(self, most: int) -> None:
        while self._total > most:
            self._total -= self._held.popitem(last=False)[1]


def cache_of(
    policy: Policy,
    capacity: int,
    sizes: PageSizes,
    *,
    parents: Blocks | None = None,
    ratio: float = 0.9,
    start: Start | None = None,
) -> Cache:
    """Return a cache.

    capacity: bytes of the whole store; blocks if the sizes are unknown.
    parents: the page before each page; only `lru` needs them.
    ratio: eviction_ratio of HiCacheFile.
    start: pages that it begins with.
    Raises UsageError for a policy that must know later requests.
    """
    limit = capacity // max(sizes.limits, 1)
    rooms: dict[Policy, Callable[[Sequence[PageFile]], RoomPages]] = {
        Policy.HICACHEFILE: lambda files: EvictedFiles(files, limit, ratio),
    }
    if policy in rooms:
        every = [rooms[policy](room.files) for room in sizes.rooms]
        for room in every:
            if start is not None:
                room.begin(start)
        return Rooms(every)
    if policy is Policy.LRU and parents is not None:
        tree = TreeLru(capacity, sizes, parents)
        if start is not None:
            tree.begin(start)
        return tree
    raise UsageError(f"Policy {policy}: cannot be replayed request by request; choose another")
