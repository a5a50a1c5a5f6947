"""What a store that keeps tables of its own says of them: the tables, and where their pages lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hicachectl.backends.hf3fs_snapshot import PageTable


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
