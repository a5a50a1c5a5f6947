"""Keys of a 3FS store, RANK:NAMESPACE:KEY, sorted by the table of the metadata server they are in.

The grammar of what KEY says is in formats.keys.hf3fs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hicachectl.backends.base import keys_of

if TYPE_CHECKING:
    from hicachectl.backends.base import IntArray, Rows

TableName = tuple[int, str]  # rank and namespace
Affix = tuple[bytes, bytes]  # of a key before and after its page hash

_KEY = re.compile(rb"(?:0|[1-9][0-9]{0,8}):[A-Za-z0-9_.-]{1,100}:")
_PAGE_KEY = re.compile(rb"([^:]*:[^:]*:)[0-9a-f]{64}(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True, eq=False)
class TableRows:
    """The rows of one table, by their places among all rows [n] int64.

    keys: of these rows, as they are; the server knows them without their first `skipped` bytes.
    """

    table: TableName
    at: IntArray
    keys: list[bytes]
    skipped: int

    def only(self, chosen: npt.NDArray[Any]) -> TableRows:
        """Keep some of them, chosen by number or by flag."""
        places = np.arange(len(self.at))[chosen]
        if len(places) == len(self.at):
            return self
        keys = [self.keys[n] for n in places.tolist()]
        return TableRows(self.table, self.at[places], keys, self.skipped)

    @property
    def names(self) -> list[str]:
        """What the server calls them."""
        return [key[self.skipped :].decode() for key in self.keys]


def rows_by_table(rows: Rows) -> list[TableRows]:
    """Sort rows by the table of their keys; keys that no table can have are in none."""
    keys = keys_of(rows)
    match = _KEY.match(keys[0]) if keys else None
    # Most calls are about one table, and this is much of what reading small objects costs.
    if match is not None and b"".join(keys).isascii():
        prefix = match[0]
        # What the first and the last in order begin with, all between them do.
        if min(keys).startswith(prefix) and max(keys).startswith(prefix):
            return [TableRows(table_of(prefix), np.arange(len(keys)), keys, len(prefix))]
    return _rows_of_many_tables(keys)


def _rows_of_many_tables(keys: list[bytes]) -> list[TableRows]:
    """Sort keys of several tables, or of none."""
    places: dict[bytes, list[int]] = {}
    for at, key in enumerate(keys):
        match = _KEY.match(key)
        if match is not None and _is_text(key):  # as the server's are
            places.setdefault(match[0], []).append(at)
    return [
        TableRows(table_of(prefix), np.array(at), [keys[n] for n in at], len(prefix))
        for prefix, at in places.items()
    ]


def table_of_key(key: bytes) -> TableName | None:
    """Name the table of a key; None where no table can have it."""
    match = _KEY.match(key)
    return table_of(match[0]) if match else None


def _is_text(key: bytes) -> bool:
    try:
        key.decode()
    except UnicodeDecodeError:
        return False
    return True


def prefix_of(table: TableName) -> bytes:
    """Spell what the keys of a table begin with."""
    return f"{table[0]}:{table[1]}:".encode()


def affix_of(key: bytes) -> Affix | None:
    """Split a key around its page hash; None where it has none."""
    match = _PAGE_KEY.fullmatch(key)
    return (match[1], match[2]) if match else None


def table_of(prefix: bytes) -> TableName:
    """Read what the keys of a table begin with; inverse of `prefix_of`."""
    rank, namespace, _ = prefix.decode().split(":")
    return int(rank), namespace


def names_of(keys: Any, table: TableName) -> list[str]:
    """Give what the server calls the keys of a table, a binary array."""
    skipped = len(prefix_of(table))
    return [key[skipped:] for key in keys.cast(pa.string()).to_pylist()]


def shown(key: bytes) -> str:
    """Write a key for a message."""
    return key.decode(errors="backslashreplace")
