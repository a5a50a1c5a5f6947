"""Keys of a 3FS store, RANK:NAMESPACE:KEY, sorted by the table of the metadata server they are in.

The grammar of what KEY says is in formats.keys.hf3fs.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

if TYPE_CHECKING:
    from hicachectl.backends.base import IntArray, Rows

TableName = tuple[int, str]  # rank and namespace
Affix = tuple[bytes, bytes]  # of a key before and after its page hash

_KEY = re.compile(rb"(?:0|[1-9][0-9]{0,8}):[A-Za-z0-9_.-]{1,100}:")
_LONGEST = 1 << 30  # of a key; binary_slice wants an end
_PAGE_KEY = re.compile(rb"([^:]*:[^:]*:)[0-9a-f]{64}(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """The rows of one table: their places among all rows [n] int64, and what the server calls them.

    keys: string array [n], since the server's are text.
    """

    table: TableName
    at: IntArray
    keys: Any

    def only(self, chosen: npt.NDArray[Any]) -> Share:
        """Keep some of them, chosen by number or by flag."""
        places = np.arange(len(self.at))[chosen]
        if len(places) == len(self.at):
            return self
        return Share(self.table, self.at[places], self.keys.take(pa.array(places)))

    @property
    def names(self) -> list[str]:
        """The keys as a list."""
        names: list[str] = self.keys.to_pylist()
        return names

    @property
    def array(self) -> Any:
        """The keys as a binary array."""
        return self.keys.cast(pa.binary())


def shares_of(rows: Rows) -> list[Share]:
    """Sort rows by the table of their keys; keys that no table can have are in none."""
    import pyarrow.compute as pc  # 20 ms at start-up that most commands need not pay

    column = rows.column("key")
    keys = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    match = _KEY.match(keys[0].as_py()) if len(keys) else None
    if match is not None and pc.all(pc.starts_with(keys, match[0])).as_py():
        with suppress(pa.ArrowInvalid):  # not all are text
            names = pc.binary_slice(keys, len(match[0]), _LONGEST).cast(pa.string())
            return [Share(table_of(match[0]), np.arange(len(keys)), names)]
    return _mixed_shares(keys.to_pylist())


def table_of_key(key: bytes) -> TableName | None:
    """Name the table of a key; None where no table can have it."""
    match = _KEY.match(key)
    return table_of(match[0]) if match else None


def _mixed_shares(keys: list[bytes]) -> list[Share]:
    """Sort keys of several tables, or of none."""
    found: dict[TableName, tuple[list[int], list[bytes]]] = {}
    for at, key in enumerate(keys):
        match = _KEY.match(key)
        if match is not None and (key.isascii() or _is_text(key)):
            places, names = found.setdefault(table_of(match[0]), ([], []))
            places.append(at)
            names.append(key[match.end() :])
    return [
        Share(table, np.array(places), pa.array(names, pa.binary()).cast(pa.string()))
        for table, (places, names) in found.items()
    ]


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


def texts_of(keys: Any) -> list[str]:
    """Give a binary array of the server's names as texts."""
    texts: list[str] = keys.cast(pa.string()).to_pylist()
    return texts


def shown(key: bytes) -> str:
    """Write a key for a message."""
    return key.decode(errors="backslashreplace")
