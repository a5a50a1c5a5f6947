"""What is known of a 3FS store's keys: by the snapshot that was saved last, and by the server.

The server lists nothing; whether it has a key it says without consequences, but where the page of
one is only in a way that makes the key the most recently used. Source: sglang
srt/mem_cache/storage/hf3fs/mini_3fs_metadata_server.py :: RankMetadata.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from hicachectl.backends.base import BoolArray, IntArray, Rows, take_rows
from hicachectl.backends.hf3fs.keys import TableName, TableRows, rows_by_table
from hicachectl.backends.hf3fs.snapshot import PageTable, Snapshot, read_snapshot
from hicachectl.formats.errors import StoreUnavailable, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hicachectl.backends.hf3fs.metadata import MetadataClient
    from hicachectl.backends.hf3fs.settings import Hf3fsSettings

UNKNOWN = -1  # no page index


@dataclass(slots=True, eq=False)
class LoadedSnapshot:
    """A snapshot as it was read, by the file that it was read from.

    shared:  [rank and namespace] the pages that several keys hold, once somebody asked.
    checked: whether its keys are known to be all of the profile's deployment.
    """

    file: tuple[int, ...]
    snapshot: Snapshot
    shared: dict[TableName, IntArray] = field(default_factory=dict)
    checked: bool = False

    def has(self, name: TableName) -> bool:
        """Say whether it has a table."""
        return any((table.rank, table.namespace) == name for table in self.snapshot.tables)

    def shared_pages(self, table: PageTable) -> IntArray:
        """Give the pages that several keys of a table hold: [n] int64."""
        name = table.rank, table.namespace
        if name not in self.shared:
            indices, counts = np.unique(table.indices, return_counts=True)
            self.shared[name] = indices[counts > 1]
        return self.shared[name]


class KeyTables:
    """The tables of a store, as far as a snapshot or a metadata server is named.

    Threads may share it. touched_keys: how many keys were asked for in a way that makes them the
    most recent.
    """

    def __init__(self, settings: Hf3fsSettings, server: MetadataClient | None) -> None:
        self.touched_keys = 0
        self._settings = settings
        self._server = server
        self._last: LoadedSnapshot | None = None
        self._known: set[TableName] = set()  # tables that the server was seen to have
        self._lock = threading.Lock()

    # the snapshot

    def saved(self) -> LoadedSnapshot:
        """Read the snapshot, unless it is the one that was read last.

        Raises UsageError where none is named, StoreUnavailable, FormatError.
        """
        path = self._settings.snapshot
        if path is None:
            raise UsageError(
                f"{self._settings}: a 3FS metadata server lists nothing; give snapshot=FILE, where "
                "it saves its tables (--persistence-path)"
            )
        with self._lock:
            try:
                facts = Path(path).stat()
            except OSError as error:
                raise StoreUnavailable(
                    f"{path}: {error.strerror}; is it the metadata server's --persistence-path?"
                ) from error
            file = facts.st_dev, facts.st_ino, facts.st_mtime_ns, facts.st_size
            if self._last is None or self._last.file != file:
                self._last = None  # two would need twice the memory
                self._last = LoadedSnapshot(file, read_snapshot(path))
            return self._last

    def looked_at(self, saved: LoadedSnapshot) -> tuple[PageTable, ...]:
        """Give a snapshot's tables of the ranks that are looked at."""
        ranks = self._settings.ranks
        tables = saved.snapshot.tables
        return tuple(table for table in tables if ranks is None or table.rank < ranks)

    def remark(self) -> str | None:
        """Say how old the snapshot is, where one was read."""
        if (last := self._last) is None:
            return None
        age = max(0, time.time_ns() - last.snapshot.saved_at_ns) / 1e9
        return f"listed from a snapshot saved {age:.0f}s ago: {self._settings.snapshot}"

    def indices_of(self, share: TableRows) -> IntArray:
        """Find keys in the snapshot: [n] int64 page indices, UNKNOWN where it has them not."""
        import pyarrow.compute as pc  # 20 ms at start-up that most commands need not pay

        indices = np.full(len(share.at), UNKNOWN, dtype=np.int64)
        table = self._table(share.table)
        if table is not None:
            wanted = pa.array(share.keys, pa.binary())
            # The few are hashed and the many looked up, not the other way round.
            rows = np.flatnonzero(pc.is_in(table.keys, value_set=wanted).to_numpy(False))
            found = take_rows(pa.table({"key": table.keys}), rows).column("key")
            held = pc.index_in(wanted, value_set=found.combine_chunks())
            known = held.is_valid().to_numpy(False)
            indices[known] = table.indices[rows[held.drop_null().to_numpy()]]
        return indices

    def located(self, rows: Rows) -> IntArray:
        """Find the page index of every row: [n] int64, its own or else the snapshot's."""
        located = locators(rows)
        if (located == UNKNOWN).any():
            for share in rows_by_table(rows):
                lacking = share.only(located[share.at] == UNKNOWN)
                if len(lacking.at):
                    located[lacking.at] = self.indices_of(lacking)
        return located

    def sharers(self, share: TableRows) -> Iterator[tuple[int, str]]:
        """Find rows on a page that another key holds, which is there and not among them."""
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
        """Count the pages of a table; 0 where the snapshot does not have it."""
        table = self._table(name)
        return 0 if table is None else table.num_pages

    def _table(self, name: TableName) -> PageTable | None:
        if self._settings.snapshot is None:
            return None
        tables = self.looked_at(self.saved())
        return next((t for t in tables if (t.rank, t.namespace) == name), None)

    # the server, where there is one

    def there(self, share: TableRows) -> BoolArray:
        """Say which keys of a table the server has, or else the snapshot: [n] bool."""
        if self._server is not None:
            return self.has_keys(share.table, share.names)
        there: BoolArray = self.indices_of(share) != UNKNOWN
        return there

    def has_keys(self, table: TableName, names: Sequence[str]) -> BoolArray:
        """Ask the server which keys it has; none of a table that no engine has made."""
        assert self._server is not None
        if not self.may_have(table):
            return np.zeros(len(names), dtype=np.bool_)
        return self._server.exists(*table, names)

    def may_have(self, table: TableName) -> bool:
        """Tell whether to ask the server: it has no answer about a pool that no engine made.

        Where the snapshot has a table, its absence is an error: the server lost it.
        """
        assert self._server is not None
        if table in self._known:
            return True
        listed = self._settings.snapshot is not None and (self._last or self.saved()).has(table)
        if listed or self._server.has_table(*table):
            self._known.add(table)
        return table in self._known

    def current(self, rows: Rows) -> IntArray:
        """Ask the server for page indices, which bumps the keys: [n] int64; else the snapshot."""
        current = np.full(len(rows), UNKNOWN, dtype=np.int64)
        for share in rows_by_table(rows):
            if self._server is None:
                current[share.at] = self.indices_of(share)
                continue
            if self.may_have(share.table):
                answer = self._server.page_indices(*share.table, share.names)
                current[share.at] = [UNKNOWN if index is None else index for index in answer]
        with self._lock:  # other threads count, too
            self.touched_keys += int((current != UNKNOWN).sum()) if self._server else 0
        return current

    def touch(self, rows: Rows) -> BoolArray:
        """Bump keys, since that is what is wanted: which are there."""
        touched: BoolArray = self.current(rows) != UNKNOWN
        with self._lock:  # nothing to remark on
            self.touched_keys -= int(touched.sum()) if self._server else 0
        return touched


def locators(rows: Rows) -> IntArray:
    """Give the page index of every row that has one: [n] int64, else UNKNOWN."""
    if "locator" not in rows.schema.names:
        return np.full(len(rows), UNKNOWN, dtype=np.int64)
    column = rows.column("locator")
    if column.null_count:
        column = column.fill_null(UNKNOWN)
    return np.array(column.to_numpy(), dtype=np.int64)
