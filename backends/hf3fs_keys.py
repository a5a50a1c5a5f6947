"""Keys of a 3FS store, RANK:NAMESPACE:KEY, sorted by the table of the metadata server they are in.

The grammar of what KEY says is in formats.keys.hf3fs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hicachectl.backends.base import IntArray, Rows, keys_of

TableName = tuple[int, str]  # rank and namespace
Affix = tuple[bytes, bytes]  # of a key before and after its page hash

_KEY = re.compile(rb"(?:0|[1-9][0-9]{0,8}):[A-Za-z0-9_.-]{1,100}:")
_PAGE_KEY = re.compile(rb"([^:]*:[^:]*:)[0-9a-f]{64}(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """The rows of one table: their places among all rows [n] int64, and what the server calls them.

    keys: UTF-8 all of them, since the server's are text.
    """

    table: TableName
    at: IntArray
    keys: list[bytes]

    def only(self, chosen: npt.NDArray[Any]) -> Share:
        """Keep some of them, chosen by number or by flag."""
        places = np.arange(len(self.at))[chosen]
        return Share(self.table, self.at[places], [self.keys[n] for n in places.tolist()])

    @property
    def names(self) -> list[str]:
        """The keys as texts."""
        return [key.decode() for key in self.keys]

    @property
    def array(self) -> Any:
        """The keys as a binary array."""
        return pa.array(self.keys, pa.binary())


def shares_of(rows: Rows) -> list[Share]:
    """Sort rows by the table of their keys; keys that no table can have are in none."""
    found: dict[TableName, tuple[list[int], list[bytes]]] = {}
    prefix, places, keys = b"\0", [], []  # of the table before, as neighbours mostly share it
    for at, key in enumerate(keys_of(rows)):
        if not key.startswith(prefix):
            match = _KEY.match(key)
            if match is None:
                continue
            prefix = match[0]
            places, keys = found.setdefault(table_of(prefix), ([], []))
        if key.isascii() or _is_text(key):
            places.append(at)
            keys.append(key[len(prefix) :])
    return [
        Share(table, np.array(places, dtype=np.int64), keys)
        for table, (places, keys) in found.items()
        if keys
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
