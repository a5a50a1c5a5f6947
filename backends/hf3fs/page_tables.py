"""Stores that keep tables of keys and pages, which can be checked and repaired."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hicachectl.backends.capabilities import Confirm

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hicachectl.backends.base import BoolArray, Rows
    from hicachectl.backends.hf3fs.metadata import MetadataClient
    from hicachectl.backends.hf3fs.snapshot import PageTable


@dataclass(frozen=True, slots=True)
class DataFile:
    """The file that the pages of one table lie in, as it was when somebody looked."""

    path: str
    nbytes: int
    mtime_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TableState:
    """Tables as they were saved together.

    files, page_bytes: by table name, RANK:NAMESPACE; what is not known of a table is not in them.
    live: a server goes on changing what was saved. path: of the file they are saved in.
    """

    path: str
    tables: tuple[PageTable, ...]
    saved_at_ns: int
    files: Mapping[str, DataFile]
    page_bytes: Mapping[str, int]
    live: bool


class PageTables(Confirm):
    """Maps keys to pages of data files, in tables that a metadata server changes."""

    @abstractmethod
    def table_state(self) -> TableState | None:
        """Return the tables as last saved; None where no snapshot is named."""

    @abstractmethod
    def table_server(self) -> MetadataClient | None:
        """Return the server that changes the tables; None where none is named."""

    @abstractmethod
    def holes(self, rows: Rows) -> BoolArray:
        """Return which objects have bytes that were never written: [n] bool.

        Only a file system that keeps holes, and reports them, can tell.
        """
