"""What the plug-in moves: pages of registered pools, between host memory and a store."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicachectl.backends.sglang.calls import Call
    from hicachectl.formats.identity import Identity
    from hicachectl.formats.objects import Coordinate

Piece = tuple[int, int]  # address and bytes of one stretch of host memory
Pieces = tuple[Piece, ...]  # of one page, in the order of its object's bytes


class HostPages(Protocol):
    """Where the pages of a host pool lie."""

    def pieces(self, host_indices: Sequence[int]) -> list[Pieces]:
        """Return the pieces of each page, by the first host index of each page.

        Every piece lies within the pool's memory. Raises ValueError for an index outside it.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of a page that Mooncake and 3FS store as an object of its own.

    nbytes: bytes of the part. pieces: the part's slice of a page's pieces.
    """

    name: str | None
    nbytes: int
    pieces: slice


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedPool:
    """A pool of this rank.

    coordinate: of the object that holds the pool's whole page, on a file store.
    identity: of that object.
    page_indices: host indices per page: the page size, or 1 for states.
    nbytes: bytes of a page, all parts; 0 for a logical anchor.
    parts: of a page; empty for a logical anchor.
    trailing: only the last pages of a stored node have the pool.
    writes: this rank writes the pool; another rank writes shared objects.
    """

    name: str
    coordinate: Coordinate
    identity: Identity
    page_indices: int
    nbytes: int
    parts: tuple[Part, ...]
    trailing: bool
    writes: bool
    host: HostPages


class PageStore(ABC):
    """One store that a rank serves from: whole pages of a pool, by page hash.

    Only `add` raises. What cannot be served is a miss, counted with its reason. Each method ends at
    the call's deadline. After that, nothing of it touches host memory.
    """

    @abstractmethod
    def add(self, pool: ServedPool) -> None:
        """Serve a pool from now on. Raises ValueError if the store can never hold it."""

    @abstractmethod
    def open(self, call: Call) -> None:
        """Open the store. If it cannot be opened now, later calls try again."""

    @abstractmethod
    def exists(self, pool: ServedPool, pages: Sequence[str], call: Call) -> list[bool]:
        """Return which pages can be read, by their length and identity, not their digest."""

    @abstractmethod
    def read(
        self, pool: ServedPool, pages: Sequence[str], pieces: Sequence[Pieces], call: Call
    ) -> list[bool]:
        """Read pages into host memory. Return which were read whole; others are undefined."""

    @abstractmethod
    def write(
        self, pool: ServedPool, pages: Sequence[str], pieces: Sequence[Pieces], call: Call
    ) -> list[bool]:
        """Write pages that are not there yet. Return which are there now."""

    @abstractmethod
    def clear(self, call: Call) -> None:
        """Make all objects of this rank misses at once."""

    @abstractmethod
    def close(self) -> None:
        """Release everything; later calls are misses."""
