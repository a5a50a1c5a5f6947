"""SGLang's 3FS store: pages in preallocated files, and a metadata server that knows their keys.

The server lists nothing, so what is listed comes from the snapshot that it saves, and is as old;
of what it is asked while looking, only `exists` leaves its eviction order alone. Nothing on disk
says which key a page belongs to, or how long pages are: the first the server's table tells, the
second the profile. Source: sglang srt/mem_cache/storage/hf3fs/storage_hf3fs.py :: HiCacheHF3FS,
mini_3fs_metadata_server.py :: RankMetadata.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import pyarrow as pa

from hicachectl.backends.base import (
    BoolArray,
    IntArray,
    Limits,
    ReadResult,
    Result,
    Rows,
    Status,
    StatusArray,
    Store,
    keys_of,
    scan_schema,
    take_rows,
)
from hicachectl.backends.hf3fs_creating import TableMaker
from hicachectl.backends.hf3fs_files import DataFiles, PageReader, Pages
from hicachectl.backends.hf3fs_keys import (
    Share,
    TableName,
    names_of,
    shares_of,
    table_of_key,
)
from hicachectl.backends.hf3fs_metadata import MetadataClient
from hicachectl.backends.hf3fs_settings import Hf3fsSettings, settings_from
from hicachectl.backends.hf3fs_sizes import PageSizes
from hicachectl.backends.hf3fs_snapshot import Snapshot, read_snapshot
from hicachectl.backends.hf3fs_usrbio import UsrbioReader, find_usrbio
from hicachectl.backends.hf3fs_writing import PageWriter
from hicachectl.backends.page_tables import DataFile, TableState
from hicachectl.formats.errors import StoreUnavailable, UnsupportedByBackend, UsageError

if TYPE_CHECKING:
    from collections.abc import Collection, Generator, Iterator, Sequence

    from hicachectl.backends.arena import Arena
    from hicachectl.backends.hf3fs_snapshot import PageTable
    from hicachectl.backends.urls import StoreUrl
    from hicachectl.formats.profile import Profile

SCAN_ROWS = 16384
_HIGHEST = np.iinfo(np.int64).max
_UNKNOWN = -1  # no page index
_VERSION_BYTES = 8


@dataclass(slots=True, eq=False)
class _Saved:
    """A snapshot as it was read, by the file that it was read from.

    shared:  [rank and namespace] the pages that several keys hold, once somebody asked.
    checked: whether its keys are known to be all of the profile's deployment.
    """

    file: tuple[int, ...]
    snapshot: Snapshot
    shared: dict[TableName, IntArray] = field(default_factory=dict)
    checked: bool = False

    def has(self, name: TableName) -> bool:
        return any((table.rank, table.namespace) == name for table in self.snapshot.tables)

    def shared_pages(self, table: PageTable) -> IntArray:
        name = table.rank, table.namespace
        if name not in self.shared:
            indices, counts = np.unique(table.indices, return_counts=True)
            self.shared[name] = indices[counts > 1]
        return self.shared[name]


class Hf3fsStore(Store):
    """Tables of a metadata server, or of its snapshot alone, and the files of their pages.

    Objects have no sizes before `use_profile`: how long a page is only a profile tells.
    """

    scheme: ClassVar[str] = "hf3fs"
    limits: Limits = Limits(
        batch_objects=256,
        batch_bytes=256 << 20,
        parallel_reads=8,
        parallel_writes=2,
        announced_bytes=1,
    )
    supports_times: ClassVar[bool] = False
    supports_sizes: ClassVar[bool] = False
    supports_empty: ClassVar[bool] = False
    supports_version: ClassVar[bool] = True
    supports_locator: ClassVar[bool] = True
    supports_touch: ClassVar[bool] = True
    supports_confirm: ClassVar[bool] = True
    supports_holes: ClassVar[bool] = True
    identifies_by_exists: ClassVar[bool] = True
    evicts_pools_apart: ClassVar[bool] = True
    evicts: ClassVar[bool] = True
    version_fields: ClassVar[tuple[str, ...]] = ("page_index",)
    versions_recur: ClassVar[bool] = True  # freed pages are handed out at once
    lists_late: ClassVar[bool] = True

    def __init__(
        self, settings: Hf3fsSettings, *, direct: bool | None = None, create: bool = False
    ) -> None:
        """Open a store. direct: whether to read past the page cache (see DataFiles).

        create: make the files and tables of a deployment that has not started, when written to.
        """
        self.settings = settings
        self.url = str(settings)
        self.touched_keys = 0  # how many were asked for in a way that makes them the most recent
        self._files = DataFiles(direct=direct)
        self._reader: PageReader = self._files
        self._sizes = PageSizes({}, frozenset())
        self._last: _Saved | None = None
        self._lock = threading.Lock()
        self._server: MetadataClient | None = None
        directory = Path(settings.prefix).parent
        if not directory.is_dir():
            raise StoreUnavailable(
                f"{directory}: no such directory; check the prefix, and whether 3FS is mounted"
            )
        self._usrbio = find_usrbio(settings.prefix)
        self.named_arena = self._usrbio is not None
        if settings.server is not None:
            self._server = MetadataClient(settings.server)
        self._known: set[TableName] = set()  # tables that the server was seen to have
        self._maker = TableMaker(self._server, settings) if self._server and create else None

    @classmethod
    def from_url(cls, url: StoreUrl) -> Self:
        """Open the store that a URL, SGLang's config or its environment names."""
        return cls(settings_from(url, os.environ))

    @classmethod
    def create(cls, url: StoreUrl) -> Self:
        """Open it to write to; tables that the server does not know are made with the first write.

        How large their files are `file_size` says, unless they are there. The directory, being on
        a mount, is not made.
        """
        return cls(settings_from(url, os.environ), create=True)

    def close(self) -> None:
        """Close the data files and the connections to the server."""
        self.detach()
        self._files.close()
        if self._server is not None:
            self._server.close()

    # what the profile tells

    def use_profile(self, profile: Profile) -> None:
        """Learn the bytes of pages, and check them against the tables' page counts.

        An inferred profile tells nothing. Raises ProfileError when no table of a namespace has as
        many pages as fit into its file, UnsupportedByBackend for what 3FS cannot hold.
        """
        if profile.inferred:
            return
        sizes = PageSizes.of(profile)
        if self.settings.snapshot is not None:
            file_size = self.settings.file_size or self._largest_file(sizes.nbytes)
            if file_size is not None:
                sizes.check_page_counts(self.url, self.page_tables(), file_size)
        self._sizes = sizes

    def _largest_file(self, tables: Collection[TableName]) -> int | None:
        sizes = [self._files.size(self.settings.data_file(*table)) for table in tables]
        return max((size for size in sizes if size is not None), default=None)

    # listing

    def page_tables(self) -> tuple[PageTable, ...]:
        """Give the tables of the ranks looked at, as the snapshot last saved has them.

        Raises UsageError where no snapshot is named.
        """
        return self._looked_at(self._saved())

    def _looked_at(self, saved: _Saved) -> tuple[PageTable, ...]:
        ranks = self.settings.ranks
        tables = saved.snapshot.tables
        return tuple(table for table in tables if ranks is None or table.rank < ranks)

    def table_state(self) -> TableState | None:
        """Give the tables of the ranks looked at with the facts of their files."""
        if self.settings.snapshot is None:
            return None
        saved = self._saved()
        tables = self._looked_at(saved)
        files = {}
        for table in tables:
            path = self.settings.data_file(table.rank, table.namespace)
            with suppress(OSError):
                facts = Path(path).stat()
                files[table.name] = DataFile(path, facts.st_size, facts.st_mtime_ns)
        return TableState(
            path=self.settings.snapshot,
            tables=tables,
            saved_at_ns=saved.snapshot.saved_at_ns,
            files=files,
            page_bytes={f"{rank}:{name}": n for (rank, name), n in self._sizes.nbytes.items()},
            live=self._server is not None,
        )

    def table_server(self) -> MetadataClient | None:
        """Give the metadata server that the URL names."""
        return self._server

    @property
    def remarks(self) -> tuple[str, ...]:
        """How old the listing is, and what looking has moved in the order of eviction."""
        texts = []
        if (last := self._last) is not None:
            age = max(0, time.time_ns() - last.snapshot.saved_at_ns) / 1e9
            texts.append(f"listed from a snapshot saved {age:.0f}s ago: {self.settings.snapshot}")
        if self.touched_keys:
            texts.append(
                f"keys that looked damaged were asked for {self.touched_keys} times, which the "
                "server counts as use: they are evicted later"
            )
        return tuple(texts)

    def scan(self, columns: Collection[str] = ("nbytes", "mtime_ns")) -> Generator[Any, None, None]:
        """List the snapshot's keys, the locator being the page index; least recent first.

        With a server, those that it no longer has are left out. What was written since the
        snapshot was saved is not listed. Raises UsageError where no snapshot is named.
        """
        schema = scan_schema(columns)
        for table in self.page_tables():
            name, start = (table.rank, table.namespace), 0
            for chunk in table.keys.chunks:
                keys, indices = chunk, table.indices[start : start + len(chunk)]
                start += len(chunk)
                if self._server is not None:
                    there = self._asked(name, names_of(keys, name))
                    if not there.all():
                        keys, indices = keys.filter(pa.array(there)), indices[there]
                yield self._batch(schema, name, keys, indices)

    def look(self, rows: Rows, columns: Collection[str] = ("nbytes", "mtime_ns", "version")) -> Any:
        """List a few keys again; one that is newer than the snapshot has no locator, no version."""
        schema = scan_schema(columns)
        found = []
        for share in shares_of(rows):
            _, first = np.unique(share.names, return_index=True)
            once = share.only(np.sort(first))
            kept = once.only(self._there(once))
            indices = self._indices_of(kept)
            keys = pa.array(kept.keys, pa.binary())
            found.append(self._batch(schema, share.table, keys, indices))
        return pa.Table.from_batches(found, schema=schema)

    def exists(self, rows: Rows) -> BoolArray:
        """Say which keys the server has, or the snapshot where there is no server."""
        found = np.zeros(len(rows), dtype=np.bool_)
        for share in shares_of(rows):
            found[share.at] = self._there(share)
        return found

    def free_bytes(self) -> int | None:
        """Count the bytes of free pages, as of the snapshot, and of tables yet to be made.

        None where no profile tells how long pages are, or where that of one table is not known.
        """
        saved = {}
        if self.settings.snapshot is not None:
            saved = {(table.rank, table.namespace): table for table in self.page_tables()}
        total = 0
        for name, nbytes in self._sizes.nbytes.items():
            if name in saved:
                total += len(saved[name].free) * nbytes
            elif self._maker is not None and not self._may_have(name):
                size = self._maker.file_size(name)
                if size is None:
                    return None
                total += size // nbytes * nbytes
            elif self.settings.snapshot is None or self._maker is not None:
                return None  # the server has it, and says nothing of it
        return total if self._sizes.nbytes else None

    def _batch(self, schema: Any, table: TableName, keys: Any, indices: IntArray) -> Any:
        """Make a batch, whose columns of one value all batches share."""
        unknown = indices == _UNKNOWN
        columns = {
            "key": lambda: keys,
            "nbytes": lambda: _all_alike(self._sizes.nbytes.get(table), len(indices)),
            "locator": lambda: pa.array(indices, mask=unknown if unknown.any() else None),
            "version": lambda: _versions(indices, unknown),
            "mtime_ns": lambda: _all_alike(None, len(indices)),
        }
        arrays = [
            columns[f.name]() if f.name in columns else pa.nulls(len(indices), f.type)
            for f in schema
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=schema)

    def _saved(self) -> _Saved:
        """Read the snapshot, unless it is the one that was read last."""
        path = self.settings.snapshot
        if path is None:
            raise UsageError(
                f"{self.url}: a 3FS metadata server lists nothing; give snapshot=FILE, where it "
                "saves its tables (--persistence-path)"
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
                self._last = _Saved(file, read_snapshot(path))
            return self._last

    def _there(self, share: Share) -> BoolArray:
        """Say which keys of a table are there: [n] bool."""
        if self._server is not None:
            return self._asked(share.table, share.names)
        there: BoolArray = self._indices_of(share) != _UNKNOWN
        return there

    def _asked(self, table: TableName, names: Sequence[str]) -> BoolArray:
        """Ask the server which keys it has; none of a table that no engine has made."""
        assert self._server is not None
        if not self._may_have(table):
            return np.zeros(len(names), dtype=np.bool_)
        return self._server.exists(*table, names)

    def _may_have(self, table: TableName) -> bool:
        """Tell whether to ask the server: it has no answer about a pool that no engine made.

        Where the snapshot has a table, its absence is an error: the server lost it.
        """
        assert self._server is not None
        if table in self._known:
            return True
        listed = self.settings.snapshot is not None and (self._last or self._saved()).has(table)
        if listed or self._server.has_table(*table):
            self._known.add(table)
        return table in self._known

    def _indices_of(self, share: Share) -> IntArray:
        """Find keys in the snapshot: [n] int64 page indices, _UNKNOWN where it has them not."""
        import pyarrow.compute as pc  # 20 ms at start-up that most commands need not pay

        indices = np.full(len(share.at), _UNKNOWN, dtype=np.int64)
        table = None if self.settings.snapshot is None else self._table(share.table)
        if table is not None:
            wanted = pa.array(share.keys, pa.binary())
            # The few are hashed and the many looked up, not the other way round.
            rows = np.flatnonzero(pc.is_in(table.keys, value_set=wanted).to_numpy(False))
            found = take_rows(pa.table({"key": table.keys}), rows).column("key")
            held = pc.index_in(wanted, value_set=found.combine_chunks())
            known = held.is_valid().to_numpy(False)
            indices[known] = table.indices[rows[held.drop_null().to_numpy()]]
        return indices

    def _table(self, name: TableName) -> PageTable | None:
        return next((t for t in self.page_tables() if (t.rank, t.namespace) == name), None)

    # reading

    def attach(self, arena: Arena) -> None:
        """Make `arena` the memory of reads; those are by USRBIO where it has a name for that."""
        self.detach()
        super().attach(arena)
        if self._usrbio is not None and arena.name is not None:
            self._reader = UsrbioReader(self._usrbio, arena)

    def detach(self) -> None:
        """Let go of the arena."""
        reader, self._reader = self._reader, self._files
        if reader is not self._files:
            reader.close()
        super().detach()

    def expect(self, rows: Rows, capacities: IntArray) -> None:
        """Let the system begin to read pages, unless the last one is in memory: then all are."""
        if "locator" not in rows.schema.names or self._reader is not self._files or not len(rows):
            return
        if self._is_in_memory(rows.column("key")[-1].as_py(), rows.column("locator")[-1].as_py()):
            return
        located = _locators(rows)
        for share in shares_of(rows):
            nbytes = self._sizes.nbytes.get(share.table)
            if nbytes is not None:
                path = self.settings.data_file(*share.table)
                known = located[share.at][located[share.at] != _UNKNOWN]
                self._files.expect(path, _positions(known, nbytes), nbytes)

    def _is_in_memory(self, key: bytes, index: int | None) -> bool:
        """Tell whether the end of one page is; True where nothing is known of it."""
        table = table_of_key(key)
        nbytes = None if table is None else self._sizes.nbytes.get(table)
        if table is None or nbytes is None or index is None:
            return True
        end = min(index, _HIGHEST // nbytes - 1) * nbytes + nbytes - 1
        return self._files.is_in_memory(self.settings.data_file(*table), end)

    def read_into(
        self, rows: Rows, offsets: IntArray, capacities: IntArray, *, identify: bool = True
    ) -> ReadResult:
        """Read pages; to identify them, a key that the server has no more afterwards is GONE.

        A page whose key was evicted and stored again meanwhile is read as OK, with other bytes:
        see `read_confirmed`. SHORT: the data file ends within the page.
        """
        return self._read(rows, offsets, capacities, self._located(rows), check=identify)

    def read_confirmed(
        self, rows: Rows, offsets: IntArray, capacities: IntArray, *, identify: bool = True
    ) -> ReadResult:
        """Read pages that no writer can have reused: asked where they are before and after.

        For few: the server counts such a question as use, and evicts others first. A key that is
        gone, or on another page than the row says, is GONE; one whose row says none is read where
        the server has it.
        """
        before = self._current(rows)
        located = self._located(rows) if "locator" in rows.schema.names else before
        located = np.where(located == _UNKNOWN, before, located)
        result = self._read(rows, offsets, capacities, located, check=False)
        moved = (before != located) | (self._current(rows) != located)
        result.statuses[moved] = Status.GONE
        result.nbytes[moved] = -1
        for at in np.flatnonzero(moved).tolist():
            result.errors.pop(at, None)
        return result

    def confirm(self, rows: Rows) -> StatusArray:
        """Ask where pages are: OK on the page listed, CHANGED on another, GONE.

        For suspects only: the server counts the question as use, and evicts others first.
        """
        current = self._current(rows)
        statuses = np.full(len(rows), Status.CHANGED, dtype=np.uint8)
        statuses[current == self._located(rows)] = Status.OK
        statuses[current == _UNKNOWN] = Status.GONE
        return statuses

    def touch(self, rows: Rows) -> BoolArray:
        """Ask the server where pages are, which makes them the last to be evicted."""
        touched: BoolArray = self._current(rows) != _UNKNOWN
        with self._lock:  # nothing to remark on: it is what was asked for
            self.touched_keys -= int(touched.sum()) if self._server else 0
        return touched

    def holes(self, rows: Rows) -> BoolArray:
        """Say which pages were never written, wholly or in part: [n] bool.

        Only a file system that keeps holes, and says so, can tell.
        """
        found = np.zeros(len(rows), dtype=np.bool_)
        located = self._located(rows)
        for share in shares_of(rows):
            nbytes = self._sizes.nbytes.get(share.table)
            known = located[share.at] != _UNKNOWN
            if nbytes is not None and known.any():
                positions = _positions(located[share.at[known]], nbytes)
                path = self.settings.data_file(*share.table)
                found[share.at[known]] = self._files.holes(path, positions, nbytes)
        return found

    def _located(self, rows: Rows) -> IntArray:
        """Find the page index of every row: [n] int64, its own or else the snapshot's."""
        located = _locators(rows)
        if (located == _UNKNOWN).any():
            for share in shares_of(rows):
                lacking = share.only(located[share.at] == _UNKNOWN)
                if len(lacking.at):
                    located[lacking.at] = self._indices_of(lacking)
        return located

    def _current(self, rows: Rows) -> IntArray:
        """Ask the server for page indices, which bumps the keys: [n] int64; else the snapshot."""
        current = np.full(len(rows), _UNKNOWN, dtype=np.int64)
        for share in shares_of(rows):
            if self._server is None:
                current[share.at] = self._indices_of(share)
                continue
            if self._may_have(share.table):
                answer = self._server.page_indices(*share.table, share.names)
                current[share.at] = [_UNKNOWN if index is None else index for index in answer]
        with self._lock:  # other threads count, too
            self.touched_keys += int((current != _UNKNOWN).sum()) if self._server else 0
        return current

    def _read(
        self,
        rows: Rows,
        offsets: IntArray,
        capacities: IntArray,
        located: IntArray,
        *,
        check: bool,
    ) -> ReadResult:
        memory = self._memory(offsets, capacities, len(rows))
        result = ReadResult(
            np.full(len(rows), Status.GONE, dtype=np.uint8),
            {},
            nbytes=np.full(len(rows), -1, dtype=np.int64),
            versions=located.astype(np.uint64).reshape(-1, 1),
        )
        for share in shares_of(rows):
            there = np.ones(len(share.at), dtype=np.bool_)
            if (located[share.at] == _UNKNOWN).any():
                there = self._there(share)
            self._read_share(share.only(there), offsets, capacities, located, memory, result)
            if check and self._server is not None:
                gone = share.at[there & ~self._asked(share.table, share.names)]
                result.statuses[gone] = Status.GONE
                result.nbytes[gone] = -1
                for at in gone.tolist():
                    result.errors.pop(at, None)
        return result

    def _read_share(
        self,
        share: Share,
        offsets: IntArray,
        capacities: IntArray,
        located: IntArray,
        memory: memoryview,
        result: ReadResult,
    ) -> None:
        """Read the pages of one table."""
        at, nbytes = share.at, self._sizes.nbytes.get(share.table)
        rank, namespace = share.table
        if nbytes is None:
            reason = f"only a profile tells how long the pages of {rank}:{namespace} are"
            return _fail(result, at, f"{reason}; give --profile")
        wanted = capacities[at]
        if (wanted != nbytes).any():
            result.nbytes[at] = nbytes
            result.statuses[at] = np.where(wanted > nbytes, Status.SHORT, Status.OVERSIZED)
            at = at[wanted == nbytes]
        if (unknown := located[at] == _UNKNOWN).any():
            _fail(result, at[unknown], "newer than the snapshot, which alone tells where it is")
            at = at[~unknown]
        if not len(at):
            return None
        path = self.settings.data_file(rank, namespace)
        pages = Pages(_positions(located[at], nbytes), offsets[at], nbytes)
        counts = self._reader.read(path, pages, memory)
        result.statuses[at] = np.where(counts == nbytes, Status.OK, Status.SHORT)
        result.nbytes[at] = counts
        for code in set(counts[counts < 0].tolist()):
            _fail(result, at[counts == code], f"{path}: {os.strerror(-code)}")
        return None

    # writing

    def write_from(
        self,
        rows: Rows,
        offsets: IntArray,
        sizes: IntArray,
        *,
        if_absent: bool,
        group: Sequence[str] | None = None,
        pin: bool = False,
    ) -> Result:
        """Write pages as SGLang does: reserve, write, confirm.

        A full table makes room by dropping its least recently used keys. An object that is replaced
        gets another page, and its old one is freed. Raises UnsupportedByBackend, before anything
        is written, for objects that the profile does not have.
        """
        self._refuse_pin(pin)
        memory = self._memory(offsets, sizes, len(rows))
        server = self._needed_server()
        if not self._sizes.nbytes:
            raise UnsupportedByBackend(f"{self.url}: to write pages a profile is needed")
        self._sizes.refuse_strangers(self.url, keys_of(rows), sizes)
        if self.settings.snapshot is not None and not (saved := self._saved()).checked:
            self._sizes.refuse_other_models(self.url, self._looked_at(saved))
            saved.checked = True
        writer = PageWriter(server, self._files)
        statuses = np.full(len(rows), Status.ERROR, dtype=np.uint8)
        errors: dict[int, str] = {}
        for share in shares_of(rows):
            path = self.settings.data_file(*share.table)
            nbytes = self._sizes.nbytes[share.table]
            self._make(share.table, nbytes)
            spans = zip(offsets[share.at].tolist(), sizes[share.at].tolist(), strict=True)
            outcome = writer.write(
                share.table,
                path,
                share.names,
                [memory[offset : offset + size] for offset, size in spans],
                num_pages=(self._files.size(path) or 0) // nbytes,
                if_absent=if_absent,
            )
            statuses[share.at] = outcome.statuses
            errors |= {int(share.at[n]): why for n, why in outcome.errors.items()}
        return Result(statuses, errors)

    def _make(self, table: TableName, nbytes: int) -> None:
        """Make a table that is to be written to, where that is wanted and there is none."""
        if self._maker is not None and not self._may_have(table):
            self._maker.ensure(table, nbytes)

    def _needed_server(self) -> MetadataClient:
        if self._server is None:
            raise UnsupportedByBackend(
                f"{self.url}: only the metadata server can store and delete; give server="
            )
        return self._server

    def delete(self, rows: Rows) -> Result:
        """Delete keys through the server, which frees their pages; readers can see them reused.

        Keys that share a page go in one call, since after the first of them the page would be free
        while the other still means it; one that is named without the others stays, an ERROR.
        """
        server = self._needed_server()
        statuses = np.full(len(rows), Status.GONE, dtype=np.uint8)
        errors: dict[int, str] = {}
        for share in shares_of(rows):
            found = share.only(self._there(share))
            for at, mate in self._left_behind(found):
                statuses[at] = Status.ERROR
                errors[at] = f"shares its page with {mate}, which would be left on a free page"
            doomed = found.only(statuses[found.at] != Status.ERROR)
            if len(doomed.at):
                server.delete(*doomed.table, doomed.names)
                statuses[doomed.at] = Status.OK
        return Result(statuses, errors)

    def _left_behind(self, share: Share) -> Iterator[tuple[int, str]]:
        """Find rows on a page that another key holds, which is there and not among them."""
        table = None if self.settings.snapshot is None else self._table(share.table)
        if table is None:
            return
        shared = self._saved().shared_pages(table)
        if not len(shared):
            return
        named = set(share.names)
        mine = self._indices_of(share)
        for n in np.flatnonzero(np.isin(mine, shared)).tolist():
            holders = table.names_at(np.flatnonzero(table.indices == mine[n])).to_pylist()
            mates = [name for holder in holders if (name := holder.decode()) not in named]
            there = self._asked(share.table, mates)
            if there.any():
                yield int(share.at[n]), mates[int(np.flatnonzero(there)[0])]


def _locators(rows: Rows) -> IntArray:
    """Give the page index of every row that has one: [n] int64, else _UNKNOWN."""
    if "locator" not in rows.schema.names:
        return np.full(len(rows), _UNKNOWN, dtype=np.int64)
    column = rows.column("locator")
    if column.null_count:
        column = column.fill_null(_UNKNOWN)
    return np.array(column.to_numpy(), dtype=np.int64)


@lru_cache(maxsize=8)
def _column_of(value: int | None, count: int) -> Any:
    return pa.repeat(pa.scalar(value, pa.int64()), count)


def _all_alike(value: int | None, count: int) -> Any:
    """Give a column of one number, or of nulls, in memory that others of it have as well."""
    return _column_of(value, -(-count // SCAN_ROWS) * SCAN_ROWS).slice(0, count)


def _versions(indices: IntArray, unknown: BoolArray) -> Any:
    """Write page indices as versions of objects; null where they are not known."""
    import pyarrow.compute as pc  # 20 ms at start-up that most commands need not pay

    versions = pa.FixedSizeBinaryArray.from_buffers(
        pa.binary(_VERSION_BYTES),
        len(indices),
        [None, pa.py_buffer(np.ascontiguousarray(indices, dtype="<i8"))],
    ).cast(pa.binary())
    return pc.if_else(pa.array(unknown), None, versions)


def _positions(indices: IntArray, nbytes: int) -> IntArray:
    """Where pages begin in their file; an index that no file can have is at the end of all."""
    return np.where(indices <= _HIGHEST // nbytes - 1, indices, _HIGHEST // nbytes - 1) * nbytes


def _fail(result: ReadResult, at: IntArray, message: str) -> None:
    result.statuses[at] = Status.ERROR
    result.nbytes[at] = -1
    result.errors.update(dict.fromkeys(at.tolist(), message))
