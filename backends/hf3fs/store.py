"""SGLang's 3FS store: pages in preallocated files, and a metadata server with their keys.

Listings are as old as the snapshot that the server saves. The server's tables have the keys, and
the profile has the lengths of pages. Data files contain neither keys nor lengths.
Source: sglang srt/mem_cache/storage/hf3fs/storage_hf3fs.py :: HiCacheHF3FS,
mini_3fs_metadata_server.py :: RankMetadata.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import pyarrow as pa

from hicachectl.backends.base import (
    Limits,
    ReadResult,
    Result,
    Rows,
    Status,
    StatusArray,
    Traits,
    keys_of,
    scan_schema,
)
from hicachectl.backends.capabilities import (
    Condition,
    FilePermissions,
    Profiled,
    ReadsAhead,
    Serviced,
    SingleDeployment,
    Touch,
)
from hicachectl.backends.disk.io import raise_denied
from hicachectl.backends.disk.permissions import Permissions
from hicachectl.backends.hf3fs.creating import TableMaker, claimed_by
from hicachectl.backends.hf3fs.data_files import DataFiles, FilePages
from hicachectl.backends.hf3fs.keys import (
    PageSizes,
    TableRows,
    names_of,
    rows_by_table,
    table_of_key,
)
from hicachectl.backends.hf3fs.metadata import MetadataClient
from hicachectl.backends.hf3fs.settings import Hf3fsSettings, settings_from
from hicachectl.backends.hf3fs.snapshot import write_repaired
from hicachectl.backends.hf3fs.tables import UNKNOWN, KeyTables, batch_of_table, locators
from hicachectl.backends.hf3fs.usrbio import UsrbioReader, find_usrbio
from hicachectl.backends.hf3fs.writing import PageWrites, write_pages
from hicachectl.backends.page_tables import DataFile, PageTables, TableState
from hicachectl.formats.errors import ProfileError, StoreUnavailable, UnsupportedByBackend
from hicachectl.formats.eviction import Policy
from hicachectl.formats.wording import needs_profile

if TYPE_CHECKING:
    from collections.abc import Collection, Generator, Hashable, Iterator, Mapping

    from hicachectl.backends.arena import Arena
    from hicachectl.backends.page_tables import PageTable, TableName
    from hicachectl.backends.urls import StoreUrl
    from hicachectl.formats.arrays import BoolArray, IntArray
    from hicachectl.formats.profile import Profile

_HIGHEST = np.iinfo(np.int64).max
_SERVER = "metadata-server"


class Hf3fsStore(
    ReadsAhead, SingleDeployment, FilePermissions, PageTables, Profiled, Serviced, Touch
):
    """Data files, with the tables of a metadata server or of the server's snapshot.

    Object sizes are unknown before `use_profile` or `use_sizes`.
    """

    limits: Limits = Limits(
        batch_objects=256,
        batch_bytes=256 << 20,
        parallel_reads=8,
    )
    grammar = "hf3fs"
    announced_bytes: ClassVar[int] = 1
    traits: ClassVar[Traits] = Traits(
        columns=frozenset({"locator", "version"}),
        version_fields=("page_index",),
        writes=True,
        deletes=True,
        lists_late=True,
        evicts=True,
        evicts_pools_apart=True,
        versions_recur=True,  # freed pages are reused at once
        identifies_by_exists=True,
    )

    def __init__(
        self, settings: Hf3fsSettings, *, direct: bool | None = None, create: bool = False
    ) -> None:
        """Open a store.

        direct: see `DataFiles`.
        create: whether to make missing tables, as the method `create` says.
        """
        self.settings = settings
        self.url = str(settings)
        self._files = DataFiles(direct=direct)
        self._reader: DataFiles | UsrbioReader = self._files
        self._readable: dict[str, Permissions] = {}  # permissions of each path that was read
        self._sizes = PageSizes({}, frozenset())
        self._doubt: str | None = None  # why the page size may be wrong
        self._server: MetadataClient | None = None
        directory = Path(settings.prefix).parent
        if not os.path.isdir(directory):  # noqa: PTH112 - Path.is_dir raises without permission
            raise StoreUnavailable(
                f"{directory}: no such directory; check the prefix, and whether 3FS is mounted"
            )
        self._usrbio = find_usrbio(settings.prefix)
        self.limits = replace(self.limits, named_arena=self._usrbio is not None)
        if settings.server is not None:
            self._server = MetadataClient(settings.server)
        self._tables = KeyTables(settings, self._server)
        self._maker = TableMaker(self._server, settings) if self._server and create else None

    @classmethod
    def from_url(cls, url: StoreUrl) -> Self:
        """Open the store that a URL, SGLang's config or the environment names."""
        return cls(settings_from(url, os.environ))

    @classmethod
    def create(cls, url: StoreUrl) -> Self:
        """Open the store for writing; the first write creates missing tables and their files.

        New files have `file_size` bytes. The directory must exist, since it is on a mount.
        """
        return cls(settings_from(url, os.environ), create=True)

    @property
    def places(self) -> tuple[Hashable, ...]:
        """Return directory, prefix and, if the URL names no server, the snapshot's path."""
        prefix, saved = Path(self.settings.prefix), self.settings.snapshot
        st = prefix.parent.stat()
        where = saved if self.settings.server is None else None
        return ((st.st_dev, st.st_ino, prefix.name, where),)

    def readable_by(self, *, listing: bool = False) -> Permissions:
        """Return which users may read all data files that were read so far."""
        directory = Permissions.within(Path(self.settings.prefix).parent.stat())
        return (
            directory
            if listing
            else reduce(Permissions.intersection, self._readable.values(), directory)
        )

    def keep_private(self, permissions: Permissions, *, listing: bool = False) -> None:
        """Narrow the modes of new data files; existing files keep their modes."""
        if self._maker is not None:
            self._maker.permissions = self._maker.permissions.intersection(permissions)

    def close(self) -> None:
        """Close the data files and the connections to the server."""
        self.detach()
        self._files.close()
        if self._server is not None:
            self._server.close()

    # the profile

    def use_profile(self, profile: Profile, *, looks_only: bool = False) -> None:
        """Set the bytes of pages. With a snapshot, check them against the tables' page counts.

        Inferred profiles are ignored. Raises UnsupportedByBackend for objects that 3FS cannot hold.
        Raises ProfileError if the page counts of a namespace contradict the sizes of its files
        (`PageSizes.check_page_counts`). With `looks_only`, a file that may be truncated is
        accepted.
        """
        if profile.inferred:
            return
        sizes = PageSizes.of(profile)
        if self.settings.snapshot is not None:
            stated, lengths = self.settings.file_size, {}
            if stated is None:
                lengths = self._lengths(sizes.nbytes)
            if (file_size := stated or max(lengths.values(), default=None)) is not None:
                tables = self.page_tables()
                self._doubt = sizes.check_page_counts(self.url, tables, file_size, lengths)
                if self._doubt is not None and not looks_only:
                    raise ProfileError(f"{self.url}: {self._doubt}")
        self._sizes = sizes

    def use_sizes(self, sizes: Mapping[tuple[str, str], int]) -> None:
        """Set the bytes of objects by affix; objects of one table must be equally large."""
        self._sizes = PageSizes.of_objects(sizes.items())

    def claimed_by(self, tag: str, *, writes: bool) -> str | None:
        """Return the tag of the deployment that the file beside the data files names."""
        return claimed_by(self.settings.prefix, tag, writes=writes)

    def _lengths(self, tables: Collection[TableName]) -> dict[str, int]:
        sizes = {
            f"{rank}:{name}": self._files.size(self.settings.data_file(rank, name))
            for rank, name in tables
        }
        return {name: size for name, size in sizes.items() if size is not None}

    # listing

    def page_tables(self) -> tuple[PageTable, ...]:
        """Return the tables of the ranks in use, as last saved.

        Raises UsageError if no snapshot is named.
        """
        return self._tables.saved().snapshot.tables

    def table_state(self) -> TableState | None:
        """Return `page_tables`, with sizes and times of their files; None without a snapshot."""
        if self.settings.snapshot is None:
            return None
        saved = self._tables.saved()
        files = {}
        for table in saved.snapshot.tables:
            path = self.settings.data_file(*table.place)
            with suppress(OSError):
                st = Path(path).stat()
                files[table.name] = DataFile(path, st.st_size, st.st_mtime_ns)
        return TableState(
            path=self.settings.snapshot,
            tables=saved.snapshot.tables,
            saved_at_ns=saved.snapshot.saved_at_ns,
            files=files,
            page_bytes={f"{rank}:{name}": n for (rank, name), n in self._sizes.nbytes.items()},
            live=self._server is not None,
        )

    @property
    def confirms(self) -> bool:
        """Return whether the URL names a metadata server."""
        return self._server is not None

    def table_server(self) -> MetadataClient | None:
        """Return the metadata server that the URL names."""
        return self._server

    def write_tables(self, tables: tuple[PageTable, ...], path: Path) -> None:
        """Write a snapshot beside the snapshot that the URL names."""
        write_repaired(tables, path, like=self.settings.snapshot)

    @property
    def touched_keys(self) -> int:
        """Return how many queries made a key the most recently used."""
        return self._tables.touched_keys

    @property
    def remarks(self) -> tuple[str, ...]:
        """Return the age of the listing, doubts about page sizes, and effects on eviction."""
        texts = []
        if (listed := self._tables.remark()) is not None:
            texts.append(listed)
        if self._doubt is not None:
            texts.append(self._doubt)
        if self.touched_keys:
            texts.append(
                f"{self.touched_keys} queries for keys that looked damaged counted as use; the "
                "server evicts these keys later than it otherwise would"
            )
        return tuple(texts)

    def scan(self, columns: Collection[str] = ("nbytes", "mtime_ns")) -> Generator[Any, None, None]:
        """Yield the snapshot's keys, least recently used first; the locator is the page index.

        Keys that the server has lost, and keys newer than the snapshot, are left out.
        Raises UsageError if no snapshot is named.
        """
        schema = scan_schema(columns)
        for table in self.page_tables():
            name, start = table.place, 0
            for chunk in table.keys.chunks:
                keys, indices = chunk, table.indices[start : start + len(chunk)]
                start += len(chunk)
                if self._server is not None:
                    there = self._tables.has_keys(name, names_of(keys, name))
                    if not there.all():
                        keys, indices = keys.filter(pa.array(there)), indices[there]
                yield batch_of_table(schema, keys, indices, self._sizes.nbytes.get(name))

    def look(self, rows: Rows, columns: Collection[str] = ("nbytes", "mtime_ns", "version")) -> Any:
        """List a few keys again; keys newer than the snapshot have neither locator nor version."""
        schema = scan_schema(columns)
        found = []
        for share in rows_by_table(rows):
            _, first = np.unique(share.names, return_index=True)
            once = share.only(np.sort(first))
            kept = once.only(self._tables.exist(once))
            indices = self._tables.indices_of(kept)
            keys = pa.array(kept.keys, pa.binary())
            nbytes = self._sizes.nbytes.get(share.table)
            found.append(batch_of_table(schema, keys, indices, nbytes))
        return pa.Table.from_batches(found, schema=schema)

    def exists(self, rows: Rows) -> BoolArray:
        """Return which keys exist: on the server if there is one, else in the snapshot."""
        found = np.zeros(len(rows), dtype=np.bool_)
        for share in rows_by_table(rows):
            found[share.at] = self._tables.exist(share)
        return found

    def eviction(self) -> Policy:
        """See `Store`."""
        return Policy.HF3FS

    def conditions(self) -> Iterator[Condition]:
        """Yield the condition of the metadata server, if one is named."""
        if self._server is None:
            return
        try:
            self._server.has_table(0, "kv")
        except StoreUnavailable as error:
            yield Condition(_SERVER, "", str(error), is_lost=True)
        else:
            yield Condition(_SERVER, f"The metadata server answers: {self._server.url}")

    def free_bytes(self) -> int | None:
        """Return the bytes of free pages in the snapshot, and of tables not yet created.

        None without a profile, or if a table's free pages are unknown.
        """
        saved = {}
        if self.settings.snapshot is not None:
            saved = {table.place: table for table in self.page_tables()}
        total = 0
        for name, nbytes in self._sizes.nbytes.items():
            if name in saved:
                total += len(saved[name].free) * nbytes
            elif self._maker is not None and not self._tables.may_have(name):
                size = self._maker.file_size(name)
                if size is None:
                    return None
                total += size // nbytes * nbytes
            elif self.settings.snapshot is None or self._maker is not None:
                return None  # the server has the table, but reports no free pages
        return total if self._sizes.nbytes else None

    # reading

    def attach(self, arena: Arena) -> None:
        """Use `arena`; read by USRBIO if it is available and the arena has a name."""
        self.detach()
        super().attach(arena)
        if self._usrbio is not None and arena.name is not None:
            self._reader = UsrbioReader(self._usrbio, arena)

    def detach(self) -> None:
        """Stop using the arena."""
        if isinstance(self._reader, UsrbioReader):
            self._reader.close()
        self._reader = self._files
        super().detach()

    def expect(self, rows: Rows, capacities: IntArray) -> None:
        """Start reading pages into the page cache, unless the last row's page is in it already."""
        if "locator" not in rows.schema.names or self._reader is not self._files or not len(rows):
            return
        if self._is_in_memory(rows.column("key")[-1].as_py(), rows.column("locator")[-1].as_py()):
            return
        located = locators(rows)
        for share in rows_by_table(rows):
            nbytes = self._sizes.nbytes.get(share.table)
            if nbytes is not None:
                path = self.settings.data_file(*share.table)
                known = located[share.at][located[share.at] != UNKNOWN]
                self._files.expect(path, _positions(known, nbytes), nbytes)

    def _is_in_memory(self, key: bytes, index: int | None) -> bool:
        """Return whether the end of a page is in the page cache; True if this is unknown."""
        table = table_of_key(key)
        nbytes = None if table is None else self._sizes.nbytes.get(table)
        if table is None or nbytes is None or index is None:
            return True
        end = min(index, _HIGHEST // nbytes - 1) * nbytes + nbytes - 1
        return self._files.is_in_memory(self.settings.data_file(*table), end)

    def read_into(
        self, rows: Rows, offsets: IntArray, capacities: IntArray, *, identify: bool = True
    ) -> ReadResult:
        """Read pages. With `identify`, a row is GONE if the server lacks its key after the read.

        If a key is evicted and stored again during the read, its row is OK although the bytes may
        be wrong. `read_confirmed` detects this. SHORT: the data file ends within the page.
        """
        return self._read(rows, offsets, capacities, self._tables.located(rows), check=identify)

    def read_confirmed(
        self, rows: Rows, offsets: IntArray, capacities: IntArray, *, identify: bool = True
    ) -> ReadResult:
        """Read pages whose keys have the same page before and after the read.

        GONE: the key is missing, or has another page. A row without a locator is read from the page
        that the server returns.
        """
        before = self._tables.current(rows)
        located = self._tables.located(rows) if "locator" in rows.schema.names else before
        located = np.where(located == UNKNOWN, before, located)
        result = self._read(rows, offsets, capacities, located, check=False)
        moved = (before != located) | (self._tables.current(rows) != located)
        _set_gone(result, np.flatnonzero(moved))
        return result

    def confirm(self, rows: Rows) -> StatusArray:
        """Return the status of each key: [n].

        OK: the key has the listed page. CHANGED: the key has another page. GONE: the key is
        missing.
        """
        current = self._tables.current(rows)
        statuses = np.full(len(rows), Status.CHANGED, dtype=np.uint8)
        statuses[current == self._tables.located(rows)] = Status.OK
        statuses[current == UNKNOWN] = Status.GONE
        return statuses

    def touch(self, rows: Rows) -> BoolArray:
        """Query the pages of keys, so that the keys are evicted last. Return which keys exist."""
        # `remarks` reports the queries that counted as use. Here the use is intended, so it is not
        # counted.
        touched: BoolArray = self._tables.current(rows, counts=False) != UNKNOWN
        return touched

    def holes(self, rows: Rows) -> BoolArray:
        """Return which pages have parts that were never written: [n] bool."""
        found = np.zeros(len(rows), dtype=np.bool_)
        located = self._tables.located(rows)
        for share in rows_by_table(rows):
            nbytes = self._sizes.nbytes.get(share.table)
            known = located[share.at] != UNKNOWN
            if nbytes is not None and known.any():
                positions = _positions(located[share.at[known]], nbytes)
                path = self.settings.data_file(*share.table)
                found[share.at[known]] = self._files.holes(path, positions, nbytes)
        return found

    def _read(
        self,
        rows: Rows,
        offsets: IntArray,
        capacities: IntArray,
        located: IntArray,
        *,
        check: bool,
    ) -> ReadResult:
        memory = self.memory(offsets, capacities, len(rows))
        result = ReadResult(
            np.full(len(rows), Status.GONE, dtype=np.uint8),
            {},
            nbytes=np.full(len(rows), -1, dtype=np.int64),
            versions=located.astype(np.uint64).reshape(-1, 1),
        )
        for share in rows_by_table(rows):
            there = np.ones(len(share.at), dtype=np.bool_)
            if (located[share.at] == UNKNOWN).any():
                there = self._tables.exist(share)
            self._read_share(share.only(there), offsets, capacities, located, memory, result)
            if check and self._server is not None:
                kept = self._tables.has_keys(share.table, share.names)
                _set_gone(result, share.at[there & ~kept])
        return result

    def _read_share(
        self,
        share: TableRows,
        offsets: IntArray,
        capacities: IntArray,
        located: IntArray,
        memory: memoryview,
        result: ReadResult,
    ) -> None:
        at, nbytes = share.at, self._sizes.nbytes.get(share.table)
        rank, namespace = share.table
        if nbytes is None:
            return _fail(result, at, needs_profile(f"reading pages of {rank}:{namespace}"))
        wanted = capacities[at]
        if (wanted != nbytes).any():
            result.nbytes[at] = nbytes
            result.statuses[at] = np.where(wanted > nbytes, Status.SHORT, Status.OVERSIZED)
            at = at[wanted == nbytes]
        if (unknown := located[at] == UNKNOWN).any():
            _fail(
                result,
                at[unknown],
                "newer than the snapshot, so its page is unknown; run again after the server's "
                "next save",
            )
            at = at[~unknown]
        if not len(at):
            return None
        path = self.settings.data_file(rank, namespace)
        pages = FilePages(_positions(located[at], nbytes), offsets[at], nbytes)
        if path not in self._readable:
            with suppress(OSError):  # the read reports the error
                self._readable[path] = Permissions.of_file(Path(path).stat())
        counts = self._reader.read(path, pages, memory)
        result.statuses[at] = np.where(counts == nbytes, Status.OK, Status.SHORT)
        result.nbytes[at] = counts
        for code in set(counts[counts < 0].tolist()):
            # USRBIO, too, reports errors as negative counts.
            raise_denied(OSError(-code, os.strerror(-code)), path)
            _fail(result, at[counts == code], f"{path}: cannot read the page: {os.strerror(-code)}")
        return None

    # writing

    def write_from(
        self, rows: Rows, offsets: IntArray, sizes: IntArray, *, if_absent: bool
    ) -> Result:
        """Write pages as SGLang does: reserve, write, confirm.

        A full table drops its least recently used keys. A replaced key gets another page; its old
        page is freed. Raises UnsupportedByBackend, before any write, for objects that are not in
        the profile.
        """
        memory = self.memory(offsets, sizes, len(rows))
        server = self._needed_server()
        if not self._sizes.nbytes:
            raise UnsupportedByBackend(needs_profile(f"{self.url}: writing"))
        self._sizes.refuse_strangers(self.url, keys_of(rows), sizes)
        if self.settings.snapshot is not None and not (saved := self._tables.saved()).checked:
            self._sizes.refuse_other_models(self.url, saved.snapshot.tables)
            saved.checked = True
        statuses = np.full(len(rows), Status.ERROR, dtype=np.uint8)
        errors: dict[int, str] = {}
        for share in rows_by_table(rows):
            path = self.settings.data_file(*share.table)
            nbytes = self._sizes.nbytes[share.table]
            self._make(share.table, nbytes)
            num_pages = (self._files.size(path) or 0) // nbytes
            spans = zip(offsets[share.at].tolist(), sizes[share.at].tolist(), strict=True)
            wanted = PageWrites(
                table=share.table,
                path=path,
                names=share.names,
                pages=[memory[offset : offset + size] for offset, size in spans],
                num_pages=num_pages,
                table_pages=max(num_pages, self._tables.num_pages(share.table)),
                if_absent=if_absent,
            )
            outcome = write_pages(server, self._files, wanted)
            statuses[share.at] = outcome.statuses
            errors |= {int(share.at[n]): why for n, why in outcome.errors.items()}
        return Result(statuses, errors)

    def _make(self, table: TableName, nbytes: int) -> None:
        """Create a missing table if the store was opened by `create`."""
        if self._maker is not None and not self._tables.may_have(table):
            self._maker.ensure(table, nbytes)

    def _needed_server(self) -> MetadataClient:
        if self._server is None:
            raise UnsupportedByBackend(
                f"{self.url}: writing and deleting need the metadata server; give "
                "server=http://HOST:18000 in the URL"
            )
        return self._server

    def delete(self, rows: Rows) -> Result:
        """Delete keys through the server, which frees their pages even if a reader still uses them.

        If a call has only some keys of a shared page, these keys stay and get ERROR. Their deletion
        would free the page while another key still maps to it.
        """
        server = self._needed_server()
        statuses = np.full(len(rows), Status.GONE, dtype=np.uint8)
        errors: dict[int, str] = {}
        for share in rows_by_table(rows):
            found = share.only(self._tables.exist(share))
            for at, mate in self._tables.sharers(found):
                statuses[at] = Status.ERROR
                errors[at] = f"shares its page with {mate}; delete both together"
            doomed = found.only(statuses[found.at] != Status.ERROR)
            if len(doomed.at):
                server.delete(*doomed.table, doomed.names)
                statuses[doomed.at] = Status.OK
        return Result(statuses, errors)


def _positions(indices: IntArray, nbytes: int) -> IntArray:
    """Return the positions of pages in their file, in bytes, clipped to int64."""
    return np.where(indices <= _HIGHEST // nbytes - 1, indices, _HIGHEST // nbytes - 1) * nbytes


def _set_gone(result: ReadResult, at: IntArray) -> None:
    result.statuses[at] = Status.GONE
    result.nbytes[at] = -1
    for row in at.tolist():
        result.errors.pop(row, None)


def _fail(result: ReadResult, at: IntArray, message: str) -> None:
    result.statuses[at] = Status.ERROR
    result.nbytes[at] = -1
    result.errors.update(dict.fromkeys(at.tolist(), message))
