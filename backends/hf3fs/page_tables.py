"""Stores with tables of keys and pages, which can be checked and repaired."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hicachectl.backends.capabilities import Confirm

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hicachectl.backends.base import Rows
    from hicachectl.backends.hf3fs.metadata import MetadataClient
    from hicachectl.backends.hf3fs.snapshot import PageTable
    from hicachectl.formats.arrays import BoolArray


@dataclass(frozen=True, slots=True)
class DataFile:
    """The data file of one table, as last seen."""

    path: str
    nbytes: int
    mtime_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TableState:
    """Tables saved together in one file.

    path: the snapshot. files: known data files by table name, RANK:NAMESPACE.
    page_bytes: bytes of a page by table name, if known.
    live: a server may have changed the tables since.
    """

    path: str
    tables: tuple[PageTable, ...]
    saved_at_ns: int
    files: Mapping[str, DataFile]
    page_bytes: Mapping[str, int]
    live: bool


class PageTables(Confirm):
    """Store that maps keys to pages of data files, in tables of a metadata server."""

    @abstractmethod
    def table_state(self) -> TableState | None:
        """Return the tables as last saved; None if no snapshot is named."""

    @abstractmethod
    def table_server(self) -> MetadataClient | None:
        """Return the metadata server of the URL, which changes the tables; else None."""

    @abstractmethod
    def holes(self, rows: Rows) -> BoolArray:
        """Return which objects have bytes that were never written: [n] bool.

        The file system must report holes.
        """
