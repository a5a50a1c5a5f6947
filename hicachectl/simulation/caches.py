"""Caches of a fixed capacity, on which requests are replayed. Each class evicts by one `Policy`.

Pages are numbers. One number can stand for a block of several pages of the deployment (see
`simulate.in_pages`). For each request, a server asks how many leading pages the cache can serve. It
reads these pages, and writes the other pages of the request. The pages of one call are consecutive
pages of one chain. The module `sizes` explains rooms and trailing pools.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple, Protocol

from hicachectl.formats.errors import UsageError
from hicachectl.formats.eviction import Policy
from hicachectl.formats.trailer import TRAILER_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import numpy as np
    import numpy.typing as npt

    from hicachectl.formats.arrays import BoolArray, IntArray
    from hicachectl.simulation.distances import Blocks
    from hicachectl.simulation.sizes import PageFile, PageSizes

_BATCH = 128  # STORAGE_BATCH_SIZE of SGLang mem_cache/hicache_storage.py, in pages
# Defaults of Mooncake's master: watermark, seconds of a lease, and the share of all objects that it
# evicts at once. Older releases have a watermark of 0.95.
WATERMARK, LEASE_S, _EVICTED = 0.9, 10.0, 0.05


class Cache(Protocol):
    """A cache of pages that servers share. Times are in seconds, and never decrease."""

    def held(self, pages: Sequence[int]) -> int:
        """Return how many leading pages the cache can serve. This does not count as a use."""

    def read(self, pages: Sequence[int], time: float) -> None:
        """Read leading pages that the cache can serve."""

    def write(self, pages: Sequence[int], time: float) -> None:
        """Write consecutive pages of one chain. Pages already held count as used."""


class Start(NamedTuple):
    """Pages that a cache holds at the start. Pages may lack the objects of trailing pools.

    pages: [pages] int64, numbers of the pages, the least recently used page first. A page that no
        request uses has a number above all numbers in the requests.
    trailing: [pages] bool, whether the page has its objects of trailing pools; None if no page
        has them.
    seconds: [pages] time of each page's last use, in seconds; None if unknown.
    """

    pages: IntArray
    trailing: BoolArray | None = None
    seconds: npt.NDArray[np.float64] | None = None

    def rows(self) -> Iterator[tuple[int, bool, float]]:
        """Yield for each page: its number, `trailing`, and the time of its last use.

        The time is 0 if it is unknown.
        """
        count = len(self.pages)
        trailing = [False] * count if self.trailing is None else self.trailing.tolist()
        seconds = [0.0] * count if self.seconds is None else self.seconds.tolist()
        return zip(self.pages.tolist(), trailing, seconds, strict=True)


class TreeLru:
    """A cache that evicts the least recently used leaf: a held page that no held page continues.

    A use of a page also counts as a use of its prefix, as in SGLang's trees. All objects of a page
    are evicted together.
    """

    def __init__(self, capacity: int, sizes: PageSizes, parents: Blocks) -> None:
        """Make an empty cache.

        capacity: size of the whole cache in bytes; in pages if the bytes are unknown.
        parents: number of the page before each page in its chain; -1 for the first page of a chain.
        """
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
        """Fill the cache before the first request. Evict pages if they exceed the capacity."""
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
        # Every use of a page moves its prefix behind it in `_nbytes`, so the first page there is a
        # leaf.
        while self._total > self._capacity:
            self._total -= self._nbytes.popitem(last=False)[1]


class RoomPages(ABC):
    """The objects in one room of a store. Subclasses decide which objects the room evicts.

    files: objects of a page in this room, in the order in which a server writes them.
    """

    def __init__(self, files: Sequence[PageFile]) -> None:
        self.files = files
        order = range(len(files))
        # A server reads the anchor first, and objects of trailing pools last.
        self._anchors = [n for n in order if files[n].anchor]
        self._beside = [n for n in order if not files[n].anchor and not files[n].window]
        self._trailing = [n for n in order if files[n].window]

    @abstractmethod
    def begin(self, start: Start) -> None:
        """Fill the room before the first request. Evict objects if they exceed the limit."""

    @abstractmethod
    def has(self, page: int, number: int) -> bool:
        """Return whether the room holds one object of a page. number: its index in `files`."""

    @abstractmethod
    def read(self, pages: Sequence[int], time: float) -> None:
        """See `Cache`."""

    @abstractmethod
    def write(self, pages: Sequence[int], time: float) -> None:
        """See `Cache`."""

    def _begun(self, trailing: bool) -> list[int]:
        """Return the indexes in `files` of the objects that a page has at the start.

        trailing: whether the page has its objects of trailing pools.
        """
        return [n for n, file in enumerate(self.files) if trailing or not file.window]

    def _tail(self, pages: Sequence[int], number: int) -> Sequence[int]:
        """Return the pages of a call that have the object with this index in `files`.

        Only the last pages of a call have objects of trailing pools.
        """
        window = self.files[number].window
        return pages[-window:] if window else pages


class Rooms:
    """A store whose rooms evict independently. It serves a page if all rooms hold its objects."""

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
    """The files that one rank writes with HiCacheFile.

    Source: SGLang mem_cache/storage/file/lru_file_evictor.py :: LRUFileEvictor.
    """

    def __init__(self, files: Sequence[PageFile], limit: int, ratio: float) -> None:
        """Make an empty room.

        limit: max_size of HiCacheFile, in bytes.
        ratio: eviction_ratio of HiCacheFile.
        """
        super().__init__(files)
        self._limit, self._kept = limit, int(limit * ratio)
        self._held: OrderedDict[int, int] = OrderedDict()
        self._total = 0

    def begin(self, start: Start) -> None:
        """See `RoomPages`. HiCacheFile lists its files by mtime at the start, and evicts once."""
        for page, trailing, _ in start.rows():
            for number in self._begun(trailing):
                self._held[page * len(self.files) + number] = self.files[number].nbytes
                self._total += self.files[number].nbytes
        if self._total > self._limit:
            self._evict(self._kept)

    def has(self, page: int, number: int) -> bool:
        """See `RoomPages`."""
        return page * len(self.files) + number in self._held

    def read(self, pages: Sequence[int], time: float) -> None:
        """Touch the files of pages, batch by batch."""
        for start in range(0, len(pages), _BATCH):
            for number in (*self._anchors, *self._beside):
                for page in pages[start : start + _BATCH]:
                    self._held.move_to_end(page * len(self.files) + number)
        for number in self._trailing:
            for page in self._tail(pages, number):
                self._held.move_to_end(page * len(self.files) + number)

    def write(self, pages: Sequence[int], time: float) -> None:
        """Write the files of pages, one pool after another."""
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


class TablePages(RoomPages):
    """The keys of one table of SGLang's 3FS metadata server.

    For a batch of keys to write, the server first marks the known keys as used, one after another.
    Then it takes a free place for each new key, or evicts the least recently used key if no place
    is free. If no key is left to evict, the batch fails, and the places that were taken for it stay
    unusable.

    Source: SGLang mem_cache/storage/hf3fs/mini_3fs_metadata_server.py :: RankMetadata.
    """

    def __init__(self, files: Sequence[PageFile], limit: int) -> None:
        """Make an empty table. limit: bytes of the table's file (file_size of the store)."""
        super().__init__(files)
        self._free = limit // max(files[0].nbytes, 1)
        self._held: OrderedDict[int, None] = OrderedDict()

    def begin(self, start: Start) -> None:
        """See `RoomPages`."""
        for page, trailing, _ in start.rows():
            self._put([key for n in self._begun(trailing) for key in self._keys([page], [n])])

    def has(self, page: int, number: int) -> bool:
        """See `RoomPages`."""
        return page * len(self.files) + number in self._held

    def read(self, pages: Sequence[int], time: float) -> None:
        """See `Cache`."""
        for start in range(0, len(pages), _BATCH):
            batch = pages[start : start + _BATCH]
            self._touch(self._keys(batch, self._anchors))
            for number in self._beside:
                self._touch(self._keys(batch, [number]))
        for number in self._trailing:
            self._touch(self._keys(self._tail(pages, number), [number]))

    def write(self, pages: Sequence[int], time: float) -> None:
        """See `Cache`. The batches of anchors have at most `_BATCH` pages.

        A server sends the keys of any other object in one batch for all pages.
        """
        for number in (*self._beside, *self._trailing):
            self._put(self._keys(self._tail(pages, number), [number]))
        for start in range(0, len(pages), _BATCH):
            if not self._put(self._keys(pages[start : start + _BATCH], self._anchors)):
                return

    def _keys(self, pages: Sequence[int], numbers: Sequence[int]) -> list[int]:
        return [page * len(self.files) + number for page in pages for number in numbers]

    def _touch(self, keys: Iterable[int]) -> None:
        for key in keys:
            self._held.move_to_end(key)

    def _put(self, keys: Sequence[int]) -> bool:
        held = self._held
        fresh = [key for key in keys if key not in held]
        self._touch(key for key in keys if key in held)
        for _ in fresh:
            if self._free:
                self._free -= 1
            elif held:
                held.popitem(last=False)
            else:
                return False
        held.update(dict.fromkeys(fresh))
        return True


class PluginPages(RoomPages):
    """The files that one rank writes with the plug-in, which evicts all objects of a page together.

    Above 98 % of the limit, the plug-in evicts pages until 96 % of the limit is taken. If a written
    page already exists, the write marks it as used. A read marks a page as used if the page was not
    used for an hour. In addition, the mount records the first read after each write or mark
    as a use (relatime). The simulation assumes that removals are as fast as writes.

    Source: hicachectl.backends.sglang, capacity.py, ledger.py, file_pages.py :: PageFiles.
    """

    _HIGH, _LOW, _SHARES, _MOST_SHARES, _TOUCHED_EVERY_S = 0.98, 0.96, 1024, 4, 3600.0

    def __init__(self, files: Sequence[PageFile], limit: int, trailer: int) -> None:
        """Make an empty room. limit: max_size in bytes. trailer: bytes of a trailer."""
        super().__init__(files)
        self._limit = limit
        self._share = limit // self._SHARES
        self._nbytes = [file.nbytes + trailer for file in files]
        # Each value has a page's files (bit n stands for `files[n]`), the time of the page's last
        # use, and whether the mount records the next read as a use.
        self._held: OrderedDict[int, tuple[int, float, bool]] = OrderedDict()
        # `_taken` counts the bytes that the rank has taken from the limit, and `_unused` those of
        # them that no object uses.
        self._taken = self._unused = 0

    def begin(self, start: Start) -> None:
        """See `RoomPages`."""
        for page, trailing, seconds in start.rows():
            numbers = self._begun(trailing)
            self._held[page] = (sum(1 << n for n in numbers), seconds, False)
            self._taken += sum(self._nbytes[n] for n in numbers)
        self._evict()

    def has(self, page: int, number: int) -> bool:
        """See `RoomPages`."""
        return page in self._held and bool(self._held[page][0] >> number & 1)

    def read(self, pages: Sequence[int], time: float) -> None:
        """See `Cache`."""
        for page in pages:
            files, used, noted = self._held[page]
            if noted or used < time - self._TOUCHED_EVERY_S:
                self._held[page] = (files, time, not noted)
                self._held.move_to_end(page)

    def write(self, pages: Sequence[int], time: float) -> None:
        """See `Cache`."""
        for number in range(len(self.files)):
            for page in self._tail(pages, number):
                files = self._held[page][0] if page in self._held else 0
                if files >> number & 1 or self._take(self._nbytes[number]):
                    # `_take` may have evicted this page, so its files are read again.
                    files = self._held[page][0] if page in self._held else 0
                    self._held[page] = (files | 1 << number, time, True)
                    self._held.move_to_end(page)

    def _take(self, nbytes: int) -> bool:
        if nbytes > self._unused:
            least = nbytes - self._unused
            taken = min(least + self._share, self._limit - self._taken)
            if taken >= least:
                self._taken += taken
                self._unused += taken
        is_room = nbytes <= self._unused
        if is_room:
            self._unused -= nbytes
        self._evict()
        return is_room

    def _evict(self) -> None:
        wanted = self._taken - self._LOW * self._limit
        if self._taken <= self._HIGH * self._limit:
            return
        freed = 0
        while self._held and freed < int(wanted):
            files = self._held.popitem(last=False)[1][0]
            freed += sum(size for n, size in enumerate(self._nbytes) if files >> n & 1)
        self._unused += freed
        if self._unused > self._MOST_SHARES * self._share:
            self._taken -= self._unused - self._share
            self._unused = self._share


class LeasedObjects(RoomPages):
    """The objects in the memory of a Mooncake cluster, evicted as its master evicts them.

    A read of an object leases the object, and so does a write of an object that the cluster already
    has. The master never evicts an object during its lease. Above the watermark, the master evicts
    a share of all objects, first the objects whose leases ended earliest.

    The simulation differs from a cluster in three ways:
    - The master compares its memory with the watermark every 10 ms. This class compares them at
      each new object.
    - Gaps between objects count as free memory.
    - `held` leases no page. A lookup of SGLang leases pages, even those after the first missing
      page.

    Source: Mooncake mooncake-store/src/master_service.cpp :: MasterService::BatchEvict.
    """

    def __init__(
        self, files: Sequence[PageFile], limit: int, watermark: float, ratio: float, lease: float
    ) -> None:
        """Make an empty cluster.

        limit: bytes of all segments together.
        watermark: share of the limit above which the master evicts.
        ratio: least share of all objects that the master evicts at once.
        lease: seconds of a lease.
        """
        super().__init__(files)
        self._limit, self._watermark, self._ratio, self._lease = limit, watermark, ratio, lease
        self._ends: dict[int, tuple[float, int]] = {}
        self._uses = itertools.count()
        self._total = 0

    def begin(self, start: Start) -> None:
        """See `RoomPages`."""
        for page, trailing, seconds in start.rows():
            for number in self._begun(trailing):
                self._put(page, number, seconds)
        self._evict(math.inf)

    def has(self, page: int, number: int) -> bool:
        """See `RoomPages`."""
        return page * len(self.files) + number in self._ends

    def read(self, pages: Sequence[int], time: float) -> None:
        """See `Cache`."""
        for number, window in enumerate(file.window for file in self.files):
            for page in pages[-window:] if window else pages:
                self._ends[page * len(self.files) + number] = (time + self._lease, next(self._uses))

    def write(self, pages: Sequence[int], time: float) -> None:
        """See `Cache`."""
        for number in range(len(self.files)):
            for page in self._tail(pages, number):
                key = page * len(self.files) + number
                if key in self._ends:
                    self._ends[key] = (time + self._lease, next(self._uses))
                    continue
                if self._total + self.files[number].nbytes <= self._limit:
                    self._put(page, number, time)
                self._evict(time)

    def _put(self, page: int, number: int, time: float) -> None:
        self._ends[page * len(self.files) + number] = (time, next(self._uses))
        self._total += self.files[number].nbytes

    def _evict(self, now: float) -> None:
        above = self._total / max(self._limit, 1) - self._watermark
        if above <= 0:
            return
        share = max(self._ratio, above + self._ratio)
        ended = sorted((end, key) for key, end in self._ends.items() if end[0] <= now)
        for _, key in ended[: math.ceil(share * len(self._ends))]:
            del self._ends[key]
            self._total -= self.files[key % len(self.files)].nbytes


def cache_of(
    policy: Policy,
    capacity: int,
    sizes: PageSizes,
    *,
    parents: Blocks | None = None,
    ratio: float = 0.9,
    watermark: float = WATERMARK,
    lease: float = LEASE_S,
    start: Start | None = None,
) -> Cache:
    """Return a cache that evicts by a policy.

    capacity: bytes of the whole store; pages if the sizes are unknown.
    parents: number of the page before each page in its chain; only the policy `lru` needs it.
    ratio: eviction_ratio of HiCacheFile.
    watermark: eviction_high_watermark_ratio of Mooncake's master.
    lease: seconds for which Mooncake's master leases an object; 0 if requests have no times.
    start: pages that the cache holds at the start.
    Raises UsageError for `optimal`, which must know later requests, and for `lru` without parents.
    """
    limit = capacity // max(sizes.limits, 1)
    rooms: dict[Policy, Callable[[Sequence[PageFile]], RoomPages]] = {
        Policy.HICACHEFILE: lambda files: EvictedFiles(files, limit, ratio),
        Policy.HF3FS: lambda files: TablePages(files, limit),
        Policy.PLUGIN: lambda files: PluginPages(files, limit, TRAILER_BYTES * sizes.known),
        Policy.MOONCAKE: lambda files: LeasedObjects(files, limit, watermark, _EVICTED, lease),
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
