"""The pools that the plug-in serves, and the interface of the stores that have their pages."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from hicachectl.backends.sglang.calls import Workers
from hicachectl.formats.keys.base import RankPool
from hicachectl.formats.keys.file import FileGrammar
from hicachectl.formats.kinds.pool import pool_name
from hicachectl.formats.objects import ANCHOR, HALVES, Names
from hicachectl.formats.releases import RELEASES
from hicachectl.formats.wording import reason_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicachectl.backends.sglang.calls import Call
    from hicachectl.backends.sglang.counters import Counters
    from hicachectl.formats.identity import Identity
    from hicachectl.formats.keys.base import Ranks
    from hicachectl.formats.objects import Coordinate

_SECONDS_BETWEEN_OPENS = 5.0
_SECONDS_BETWEEN_LOOKS = 0.5  # pause before looking again whether workers hang
_LONGEST_CLOSE_S = 3.0  # most time that the server waits for a store to close

Piece = tuple[int, int]  # address and bytes of one stretch of host memory
Pieces = tuple[Piece, ...]  # pieces of one page, in the order of its object's bytes


class HostPages(Protocol):
    """The places of a host pool's pages in host memory."""

    def pieces(self, host_indices: Sequence[int]) -> list[Pieces]:
        """Return the pieces of each page. Every piece lies within the pool's memory.

        host_indices: the first host index of each page.
        Raises ValueError for an index outside the pool.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of a page. Mooncake, and 3FS for some layouts, store each part as an object.

    name: name of the part; None if the page has only this part.
    nbytes: bytes of the part.
    pieces: the part's slice of a page's pieces.
    """

    name: str | None
    nbytes: int
    pieces: slice


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedPool:
    """A pool of this rank.

    ranks: this rank's position on each axis, and the sizes of the axes.
    shared_anchor: whether the TP ranks share the anchor's objects.
    identity: identity of the object that holds the pool's whole page, on a file store.
    page_indices: number of host indices of a page, which is the page size, or 1 for states.
    nbytes: bytes of all parts of a page; 0 for a logical anchor, a kv pool without bytes.
    parts: parts of a page; empty for a logical anchor.
    writes: whether this rank writes the pool. Of ranks that share objects, only one writes them.
    host: places of the pages in host memory.
    trailing: whether only the last pages of a node of SGLang's prefix tree have the pool, and the
        other pages are whole without it. SGLang states this in transfers, not in registrations, so
        `trailing` is False before the first transfer.
    """

    name: str
    ranks: Ranks
    shared_anchor: bool
    identity: Identity
    page_indices: int
    nbytes: int
    parts: tuple[Part, ...]
    writes: bool
    host: HostPages
    trailing: bool = False

    @property
    def page(self) -> RankPool:
        """A page of the pool, which key grammars divide into objects."""
        parts = tuple(part.name for part in self.parts)
        layout = self.identity.layout.partition("+")[0]  # without `Context.row_form`
        return RankPool(
            names=Names(self.identity.model),
            pool=self.name,
            ranks=self.ranks,
            parts=parts,
            sizes=tuple(part.nbytes for part in self.parts),
            layout=layout,
            release=RELEASES[-1],
            shared_anchor=self.shared_anchor,
            sharded=parts == HALVES or pool_name(self.name).states,
            scattered=layout == "layer_first",
        )

    @property
    def coordinate(self) -> Coordinate:
        """Coordinate of the object that holds the pool's whole page, on a file store."""
        (file,) = FileGrammar().objects(self.page)
        return file.coordinate


class PageStore(ABC):
    """A store from which a rank serves the pages of its pools, by page hash.

    Only `add` raises. A page that cannot be served is a miss, and is counted with its reason. A
    method with a `Call` ends at its deadline. From then on, no thread of the method touches host
    memory.
    """

    def __init__(self, counters: Counters, threads: int) -> None:
        """Prepare `threads` threads each for `exists`, `read` and `write`."""
        self.counters = counters
        self._threads = threads
        self._askers = Workers(threads, "hicachectl-exists")
        self._readers = Workers(threads, "hicachectl-read")
        self._writers = Workers(threads, "hicachectl-write")
        self._workers = (self._askers, self._readers, self._writers)
        self._pools: dict[str, ServedPool] = {}
        self._closed = False
        self._opening = threading.Lock()
        self._closing = threading.Lock()
        self._open_again_at = 0.0

    @abstractmethod
    def add(self, pool: ServedPool) -> None:
        """Serve a pool from now on. Raises ValueError if the store can never hold it."""

    @abstractmethod
    def exists(self, pool: ServedPool, pages: Sequence[str], call: Call) -> list[bool]:
        """Return which pages the store has, as far as a look-up without a read can tell.

        Digests are not checked. Lengths and identities are checked if the store knows them.
        """

    @abstractmethod
    def read(
        self, pool: ServedPool, pages: Sequence[str], pieces: Sequence[Pieces], call: Call
    ) -> list[bool]:
        """Read pages into host memory. Return which pages were read whole.

        The host memory of the other pages may hold anything.
        """

    @abstractmethod
    def write(
        self, pool: ServedPool, pages: Sequence[str], pieces: Sequence[Pieces], call: Call
    ) -> list[bool]:
        """Write the pages that the store lacks. Return which pages the store has now."""

    @abstractmethod
    def clear(self, call: Call) -> None:
        """Make all objects of this rank misses at once, or log that the store cannot do so."""

    def open(self, call: Call) -> None:
        """Open the store. If it cannot be opened now, later calls try again."""
        self._askers.map(call, self._open, [()])

    def close(self) -> None:
        """End the threads, and close the store; later calls are misses."""
        for workers in self._workers:
            workers.close()
        self._closed = True
        self._leave()

    @abstractmethod
    def _open_now(self) -> None:
        """Do the steps of `open` that are not done yet. `_open` counts an exception."""

    @abstractmethod
    def _forget(self) -> Callable[[], None] | None:
        """Drop the open store. Return the function that closes it; None if nothing is open."""

    def _leave(self) -> None:
        """Close the open store, in a thread, once no worker hangs in the store.

        If no worker hangs now, wait for the close, at most `_LONGEST_CLOSE_S`.
        """
        with self._closing:
            close = self._forget()
        if close is None:
            return
        closer = threading.Thread(
            target=self._close, args=(close,), name="hicachectl-close", daemon=True
        )
        hangs = self._hangs
        try:
            closer.start()
        except RuntimeError:  # the system allows no more threads
            if not hangs:
                self._close(close)
            return
        if not hangs:
            closer.join(_LONGEST_CLOSE_S)

    def _close(self, close: Callable[[], None]) -> None:
        """Close the open store once no worker hangs in it.

        A worker that hung still uses its memory, client and descriptors when it returns. After a
        close, the numbers of these descriptors can belong to other files.
        """
        while self._hangs:
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        try:
            close()
        except Exception as error:  # no caller waits for this thread, so any error is only counted
            self.counters.failed("unclosed", reason_of(error))

    def _open(self) -> None:
        """Do the rest of `open`, unless another thread does so or an attempt has just failed."""
        if time.monotonic() < self._open_again_at or not self._opening.acquire(blocking=False):
            return
        try:
            if not self._closed:
                self._open_now()
        # Any error is caught, because the other ranks would wait for a rank that raised alone.
        except Exception as error:
            self._open_again_at = time.monotonic() + _SECONDS_BETWEEN_OPENS
            self.counters.failed("unopened", reason_of(error))
        finally:
            self._opening.release()
            if self._closed:  # `close` was called while this thread opened the store
                self._leave()

    def _count_written(self, pool: ServedPool, pages: int) -> None:
        """Count the tokens of pages that were written, once for all pools of a page."""
        if pool.name == ANCHOR:
            self.counters.moved("written", pages * pool.identity.page_size)

    @property
    def _hangs(self) -> bool:
        """Whether a thread hangs in the store."""
        return any(workers.hanging for workers in self._workers)

    def _count_late(self, pages: int, *, paused: bool) -> None:
        """Count pages that were not done in time or, if `paused`, were not begun."""
        why = "a pause after a call that timed out" if paused else "no answer in time"
        self.counters.refused("timeout", why, pages)
