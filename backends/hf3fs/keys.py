"""Keys of a 3FS store, RANK:NAMESPACE:KEY, grouped by table of the metadata server.

The grammar of KEY is in formats.keys.hf3fs.
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
    from hicachectl.backends.base import Rows
    from hicachectl.formats.arrays import IntArray

TableName = tuple[int, str]  # rank and namespace
Affix = tuple[bytes, bytes]  # the key before and after its page hash

_KEY = re.compile(rb"(?:0|[1-9][0-9]{0,8}):[A-Za-z0-9_.-]{1,100}:")
_PAGE_KEY = re.compile(rb"([^:]*:[^:]*:)[0-9a-f]{64}(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True, eq=False)
class TableRows:
    """The rows of one table.

    at:      [n] int64, row indices in the call.
    keys:    [n] whole keys; the server's names lack the first `skipped` bytes.
    """

    table: TableName
    at: IntArray
    keys: list[bytes]
    skipped: int

    def only(self, chosen: npt.NDArray[Any]) -> TableRows:
        """Return rows chosen by index or mask."""
        places = np.arange(len(self.at))[chosen]
        if len(places) == len(self.at):
            return self
        keys = [self.keys[n] for n in places.tolist()]
        return TableRows(self.table, self.at[places], keys, self.skipped)

    @property
    def names(self) -> list[str]:
        """Return the keys' names on the server."""
        return [key[self.skipped :].decode() for key in self.keys]


def rows_by_table(rows: Rows) -> list[TableRows]:
    """Group rows by table; rows with invalid keys are left out."""
    keys = keys_of(rows)
    match = _KEY.match(keys[0]) if keys else None
    # Fast path for one table: parsing each key would dominate reads of small objects.
    if match is not None and b"".join(keys).isascii():
        prefix = match[0]
        # If the smallest and the largest key have the prefix, all keys do.
        if min(keys).startswith(prefix) and max(keys).startswith(prefix):
            return [TableRows(table_of(prefix), np.arange(len(keys)), keys, len(prefix))]
    return _rows_of_many_tables(keys)


def _rows_of_many_tables(keys: list[bytes]) -> list[TableRows]:
    places: dict[bytes, list[int]] = {}
    for at, key in enumerate(keys):
        match = _KEY.match(key)
        if match is not None and _is_text(key):  # the server's names are text
            places.setdefault(match[0], []).append(at)
    return [
        TableRows(table_of(prefix), np.array(at), [keys[n] for n in at], len(prefix))
        for prefix, at in places.items()
    ]


def table_of_key(key: bytes) -> TableName | None:
    """Return the table of a key; None if the key is invalid."""
    match = _KEY.match(key)
    return table_of(match[0]) if match else None


def _is_text(key: bytes) -> bool:
    try:
        key.decode()
    except UnicodeDecodeError:
        return False
    return True


def prefix_of(table: TableName) -> bytes:
    """Return the prefix of a table's keys."""
    return f"{table[0]}:{table[1]}:".encode()


def affix_of(key: bytes) -> Affix | None:
    """Split a key around its page hash; None without one."""
    match = _PAGE_KEY.fullmatch(key)
    return (match[1], match[2]) if match else None


def table_of(prefix: bytes) -> TableName:
    """Parse the prefix of a table's keys."""
    rank, namespace, _ = prefix.decode().split(":")
    return int(rank), namespace


def names_of(keys: Any, table: TableName) -> list[str]:
    """Return the server's names of a table's keys, a binary array."""
    skipped = len(prefix_of(table))
    return [key[skipped:] for key in keys.cast(pa.string()).to_pylist()]


def shown(key: bytes) -> str:
    """Return a key as text for messages."""
    return key.decode(errors="backslashreplace")
