"""Look up keys of a 3FS store and their pages, on the server and in its last snapshot.

The server cannot list keys. A query for a key's existence has no side effect. A query for the
key's page makes the key the most recently used one.
Source: sglang srt/mem_cache/storage/hf3fs/mini_3fs_metadata_server.py :: RankMetadata.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from hicachectl.backends.base import Rows, scan_batch, take_rows
from hicachectl.backends.disk.io import errors_as
from hicachectl.backends.hf3fs.keys import TableRows, rows_by_table
from hicachectl.backends.hf3fs.snapshot import read_snapshot
from hicachectl.formats.errors import StoreUnavailable, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hicachectl.backends.hf3fs.metadata import MetadataClient
    from hicachectl.backends.hf3fs.settings import Hf3fsSettings
    from hicachectl.backends.page_tables import PageTable, Snapshot, TableName
    from hicachectl.formats.arrays import BoolArray, IntArray

UNKNOWN = -1  # stands for a page index that is not known

_SHARED_ROWS = 16384
_VERSION_BYTES = 8


@dataclass(eq=False)
class LoadedSnapshot:
    """The tables of the ranks in use, read from a snapshot.

    file: device, inode, mtime and size of the snapshot's file when it was read.
    shared: pages with several keys, by table; filled on demand.
    checked: whether all keys are known to belong to the profile's deployment.
    """

    file: tuple[int, ...]
    snapshot: Snapshot
    shared: dict[TableName, IntArray] = field(default_factory=dict)
    checked: bool = False

    @cached_property
    def tables(self) -> dict[TableName, PageTable]:
        """Return the tables by rank and namespace."""
        return {table.place: table for table in self.snapshot.tables}

    def shared_pages(self, table: PageTable) -> IntArray:
        """Return the pages that several keys of a table share: [n] int64."""
        if table.place not in self.shared:
            indices, counts = np.unique(table.indices, return_counts=True)
            self.shared[table.place] = indices[counts > 1]
        return self.shared[table.place]


class KeyTables:
    """Tables of a store, from its snapshot, its server or both. Several threads may use them.

    touched_keys: number of queries that made a key the most recently used.
    """

    def __init__(self, settings: Hf3fsSettings, server: MetadataClient | None) -> None:
        self.touched_keys = 0
        self._settings = settings
        self._server = server
        self._last: LoadedSnapshot | None = None
        self._known: set[TableName] = set()  # tables that the server has
        self._lock = threading.Lock()

    # the snapshot

    def saved(self) -> LoadedSnapshot:
        """Return the snapshot. Read the file again only if it has changed.

        Raises UsageError if no snapshot is named, StoreUnavailable, FormatError.
        """
        path = self._settings.snapshot
        if path is None:
            raise UsageError(
                f"{self._settings}: a 3FS metadata server cannot list keys; give snapshot=FILE, "
                "the file that the server saves its tables to (--persistence-path)"
            )
        with self._lock:
            next_step = "give the file of the metadata server's --persistence-path"
            with errors_as(StoreUnavailable, path, "read the snapshot", next_step):
                st = Path(path).stat()
            file = st.st_dev, st.st_ino, st.st_mtime_ns, st.st_size
            if self._last is None or self._last.file != file:
                self._last = None  # free the old snapshot's memory before the new one takes memory
                read, ranks = read_snapshot(path), self._settings.ranks
                used = tuple(one for one in read.tables if ranks is None or one.rank < ranks)
                self._last = LoadedSnapshot(file, replace(read, tables=used))
            return self._last

    def remark(self) -> str | None:
        """Return the age of the snapshot as text; None if no snapshot was read."""
        if (last := self._last) is None:
            return None
        age = max(0, time.time_ns() - last.snapshot.saved_at_ns) / 1e9
        return f"Listed from a snapshot saved {age:.0f} s ago: {self._settings.snapshot}"

    def indices_of(self, share: TableRows) -> IntArray:
        """Return the snapshot's page indices of keys: [n] int64, UNKNOWN if missing."""
        import pyarrow.compute as pc  # imported late, because the import takes 20 ms

        indices = np.full(len(share.at), UNKNOWN, dtype=np.int64)
        table = self._table(share.table)
        if table is not None:
            wanted = pa.array(share.keys, pa.binary())
            # `value_set` is hashed, so it has the few wanted keys, and not the table's many keys.
            rows = np.flatnonzero(pc.is_in(table.keys, value_set=wanted).to_numpy(False))
            found = take_rows(pa.table({"key": table.keys}), rows).column("key")
            held = pc.index_in(wanted, value_set=found.combine_chunks())
            known = held.is_valid().to_numpy(False)
            indices[known] = table.indices[rows[held.drop_null().to_numpy()]]
        return indices

    def located(self, rows: Rows) -> IntArray:
        """Return each row's locator or, without a locator, its page in the snapshot: [n] int64."""
        located = locators(rows)
        if (located == UNKNOWN).any():
            for share in rows_by_table(rows):
                lacking = share.only(located[share.at] == UNKNOWN)
                if len(lacking.at):
                    located[lacking.at] = self.indices_of(lacking)
        return located

    def sharers(self, share: TableRows) -> Iterator[tuple[int, str]]:
        """Yield (row, other key) for rows whose page also belongs to a key outside `share`.

        Only keys that exist count.
        """
        table = self._table(share.table)
        if table is None:
            return
        shared = self.saved().shared_pages(table)
        if not len(shared):
            return
        named = set(share.names)
        mine = self.indices_of(share)
        for n in np.flatnonzero(np.isin(mine, shared)).tolist():
            holders = table.names_at(np.flatnonzero(table.indices == mine[n])).to_pylist()
            mates = [name for holder in holders if (name := holder.decode()) not in named]
            there = self.has_keys(share.table, mates)
            if there.any():
                yield int(share.at[n]), mates[int(np.flatnonzero(there)[0])]

    def num_pages(self, name: TableName) -> int:
        """Return a table's number of pages; 0 if the snapshot lacks it."""
        table = self._table(name)
        return 0 if table is None else table.num_pages

    def _table(self, name: TableName) -> PageTable | None:
        if self._settings.snapshot is None:
            return None
        return self.saved().tables.get(name)

    # the server

    def exist(self, share: TableRows) -> BoolArray:
        """Return which keys of a table exist: on the server if there is one, else in the snapshot.

        Returns [n] bool.
        """
        if self._server is not None:
            return self.has_keys(share.table, share.names)
        there: BoolArray = self.indices_of(share) != UNKNOWN
        return there

    def has_keys(self, table: TableName, names: Sequence[str]) -> BoolArray:
        """Return which keys the server has: [n] bool, all False if the server lacks the table."""
        assert self._server is not None
        if not self.may_have(table):
            return np.zeros(len(names), dtype=np.bool_)
        return self._server.exists(*table, names)

    def may_have(self, table: TableName) -> bool:
        """Return whether the server can have a table. Without the table, a query would fail.

        True for each table of the snapshot. If the server has lost such a table, the query's error
        says so.
        """
        assert self._server is not None
        if table in self._known:
            return True
        saved = self._settings.snapshot is not None and (self._last or self.saved()).tables
        listed = saved and table in saved
        if listed or self._server.has_table(*table):
            self._known.add(table)
        return table in self._known

    def current(self, rows: Rows, *, counts: bool = True) -> IntArray:
        """Return the page indices of keys, from the server if there is one, else the snapshot.

        The server counts a query as a use of the keys.

        counts: whether to add the queries to `touched_keys`.
        Returns [n] int64, UNKNOWN if missing.
        """
        current = np.full(len(rows), UNKNOWN, dtype=np.int64)
        for share in rows_by_table(rows):
            if self._server is None:
                current[share.at] = self.indices_of(share)
                continue
            if self.may_have(share.table):
                answer = self._server.page_indices(*share.table, share.names)
                current[share.at] = [UNKNOWN if index is None else index for index in answer]
        if counts and self._server is not None:
            with self._lock:  # other threads change the count too
                self.touched_keys += int((current != UNKNOWN).sum())
        return current


def locators(rows: Rows) -> IntArray:
    """Return the page index of every row: [n] int64, UNKNOWN if null."""
    if "locator" not in rows.schema.names:
        return np.full(len(rows), UNKNOWN, dtype=np.int64)
    column = rows.column("locator")
    if column.null_count:
        column = column.fill_null(UNKNOWN)
    return np.array(column.to_numpy(), dtype=np.int64)


def batch_of_table(schema: Any, keys: Any, indices: IntArray, nbytes: int | None) -> Any:
    """Return a record batch of one table's keys. Constant columns of all batches share memory.

    indices: [n] int64 page indices, UNKNOWN for null locator and version.
    nbytes: bytes of each page, None if unknown.
    """
    unknown = indices == UNKNOWN
    columns = {
        "key": keys,
        "nbytes": _all_alike(nbytes, len(indices)),
        "locator": pa.array(indices, mask=unknown if unknown.any() else None),
        "mtime_ns": _all_alike(None, len(indices)),
    }
    if "version" in schema.names:
        columns["version"] = _versions(indices, unknown)
    return scan_batch(schema, columns, len(indices))


@lru_cache(maxsize=8)
def _column_of(value: int | None, count: int) -> Any:
    return pa.repeat(pa.scalar(value, pa.int64()), count)


def _all_alike(value: int | None, count: int) -> Any:
    return _column_of(value, -(-count // _SHARED_ROWS) * _SHARED_ROWS).slice(0, count)


def _versions(indices: IntArray, unknown: BoolArray) -> Any:
    import pyarrow.compute as pc  # imported late, because the import takes 20 ms

    versions = pa.FixedSizeBinaryArray.from_buffers(
        pa.binary(_VERSION_BYTES),
        len(indices),
        [None, pa.py_buffer(np.ascontiguousarray(indices, dtype="<i8"))],
    ).cast(pa.binary())
    return pc.if_else(pa.array(unknown), None, versions)
