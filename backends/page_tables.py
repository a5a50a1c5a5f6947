"""Stores with tables of keys and pages (3FS), which can be checked and repaired."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.backends.base import take_rows
from hicachectl.backends.capabilities import Confirm

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from hicachectl.backends.base import Rows
    from hicachectl.formats.arrays import BoolArray, IntArray

TableName = tuple[int, str]  # rank and namespace
# Most bytes of all keys of one table. Arrow's binary arrays hold no more.
MAX_KEY_BYTES = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class PageTable:
    """One table, with the keys and pages of a rank and namespace.

    free:    int64 [n], free pages in the server's order. The server hands out the last page first.
    keys:    chunked binary array [m] of distinct keys, RANK:NAMESPACE:KEY, least recently used
             first.
    indices: int64 [m], the page of each key.

    Page numbers are not checked, so they can be num_pages or more.
    """

    rank: int
    namespace: str
    num_pages: int
    free: IntArray
    keys: Any  # pa.ChunkedArray, shared with listings
    indices: IntArray

    @property
    def place(self) -> TableName:
        """Return the table's rank and namespace."""
        return self.rank, self.namespace

    @property
    def name(self) -> str:
        """Return the table's name on the server, RANK:NAMESPACE."""
        return f"{self.rank}:{self.namespace}"

    def names_at(self, rows: IntArray) -> Any:
        """Return the server's names (KEY alone) of the keys in `rows`: chunked binary array."""
        keys = take_rows(pa.table({"key": self.keys}), rows).column("key")
        return pc.binary_slice(keys, len(self.name) + 1, MAX_KEY_BYTES)


@dataclass(frozen=True, slots=True)
class DataFile:
    """The data file of one table, as last seen."""

    path: str
    nbytes: int
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Tables saved together in one file.

    saved_at_ns: the file's modification time. A save takes seconds, or minutes with millions of
        keys. The server reads the keys before the free pages. On a live store, the keys and the
        free pages can disagree about keys deleted, or pages reserved, between the two reads.
    """

    saved_at_ns: int
    tables: tuple[PageTable, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TableState(Snapshot):
    """A snapshot, and the data files of its tables.

    path: the file of the snapshot.
    files: known data files by table name, RANK:NAMESPACE.
    page_bytes: bytes of a page by table name, if known.
    live: whether a server may have changed the tables since the snapshot.
    """

    path: str
    files: Mapping[str, DataFile]
    page_bytes: Mapping[str, int]
    live: bool


class TableServer(Protocol):
    """The server that keeps the tables, and changes them. Failures raise StoreUnavailable."""

    def page_indices(self, rank: int, namespace: str, keys: Sequence[str]) -> list[int | None]:
        """Return the page of each key, None for a missing key.

        The found keys become the most recently used.
        """

    def reserve(self, rank: int, namespace: str, keys: Sequence[str]) -> list[tuple[bool, int]]:
        """Reserve a page for each key. Return whether each key exists, and its page."""

    def confirm(
        self,
        rank: int,
        namespace: str,
        written: Iterable[tuple[str, int]],
        released: Iterable[int] = (),
    ) -> None:
        """Map keys to their written pages, and free the released pages, in one step."""

    def delete(self, rank: int, namespace: str, keys: Sequence[str]) -> None:
        """Delete keys in one step, and free their pages. Missing keys are skipped."""


class PageTables(Confirm):
    """Store that maps keys to pages of data files, in tables of a metadata server."""

    @abstractmethod
    def table_state(self) -> TableState | None:
        """Return the tables as last saved; None if no snapshot is named."""

    @abstractmethod
    def table_server(self) -> TableServer | None:
        """Return the metadata server, which changes the tables; None if the URL names no server."""

    @abstractmethod
    def write_tables(self, tables: tuple[PageTable, ...], path: Path) -> None:
        """Write tables to a new file, from which a metadata server can start.

        Only users who can read the snapshot can read the file.
        Raises FormatError if the file exists, StoreUnavailable.
        """

    @abstractmethod
    def holes(self, rows: Rows) -> BoolArray:
        """Return which objects have bytes that were never written: [n] bool.

        On a file system that reports no holes, the result is False for every object.
        """
