"""Keys of a 3FS store, RANK:NAMESPACE:KEY: their table on the metadata server, and repeated keys.

The grammar of KEY is in formats.keys.hf3fs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.backends.base import keys_of
from hicachectl.formats.keys.table import ByteRows
from hicachectl.formats.objects import PAGE_DIGITS

if TYPE_CHECKING:
    from hicachectl.backends.base import Rows
    from hicachectl.backends.page_tables import TableName
    from hicachectl.formats.arrays import IntArray

Affix = tuple[bytes, bytes]  # the key before and after its page hash

# Regular expressions.
RANK = "0|[1-9][0-9]{0,8}"
NAMESPACE = "[A-Za-z0-9_.-]{1,100}"

_KEY = re.compile(rf"(?:{RANK}):{NAMESPACE}:".encode())
_PAGE_KEY = re.compile(rb"([^:]*:[^:]*:)[0-9a-f]{%d}(.*)" % PAGE_DIGITS, re.DOTALL)
# A repeated key is found by hashes of this many bytes at each end of a longer key.
_LOOKED_AT = 128
_WORD_BYTES = 8
_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # 2**64 divided by the golden ratio: odd, with spread bits


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


# repeated keys


def repeated_key(keys: Any) -> bytes | None:
    """Return a key that occurs twice in a chunked binary array, None if all are distinct.

    It takes 16 bytes of memory per key: only keys with equal hashes are compared.
    """
    hashes = np.concatenate([np.zeros(0, dtype=np.uint64), *map(_hashes, keys.chunks)])
    ordered = np.sort(hashes)
    recurring = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
    if not len(recurring):
        return None
    counts = pc.value_counts(keys.filter(pa.array(np.isin(hashes, recurring))))
    found = counts.filter(pc.greater(counts.field("counts"), 1))
    twice: bytes | None = found[0]["values"].as_py() if len(found) else None
    return twice


def _hashes(keys: Any) -> npt.NDArray[np.uint64]:
    """Return hashes of keys: [n] uint64, equal for equal keys."""
    rows = ByteRows(keys)
    hashes = rows.lengths.astype(np.uint64)
    for length in np.unique(rows.lengths).tolist():
        chosen = np.flatnonzero(rows.lengths == length)
        looked_at = min(length, _LOOKED_AT)
        for at in {0, length - looked_at} if looked_at else ():
            words = _words(rows.cut_bytes(chosen, at, looked_at))
            for word in range(words.shape[1]):
                mixed = (hashes[chosen] ^ words[:, word]) * _FACTOR
                hashes[chosen] = mixed ^ (mixed >> np.uint64(32))
    return hashes


def _words(values: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64]:
    """Return byte strings [n, nbytes] as 8-byte words [n, words], padded with zeros."""
    count, nbytes = values.shape
    padded = np.zeros((count, -(-nbytes // _WORD_BYTES) * _WORD_BYTES), dtype=np.uint8)
    padded[:, :nbytes] = values
    return padded.view(np.uint64)
