"""Scan a store: collect its objects, parse their keys, and assign them to deployments.

Some decisions need counts of all objects, such as which of two models wrote a key. If there are
more objects than memory should hold, they go to temporary files. There is one file for each first
byte of a page hash.
"""

from __future__ import annotations

import os
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hicachectl.backends.base import scan_schema, take_rows
from hicachectl.backends.capabilities import Trailed
from hicachectl.formats.errors import ContradictionError
from hicachectl.formats.keys import grammar_of
from hicachectl.formats.keys.table import FOREIGN, KeySplitter, page_starts
from hicachectl.io.interrupts import persistent
from hicachectl.pages.census import Census
from hicachectl.pages.contested import with_ambiguous_pages
from hicachectl.pages.deployments import assign_affixes
from hicachectl.pages.inventory import Inventory, first_words, refuse_empty
from hicachectl.pages.seen_sizes import refuse_contradiction, with_seen_sizes

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

    from hicachectl.backends.base import Store
    from hicachectl.backends.disk.directory import Directory
    from hicachectl.formats.keys.base import Affix
    from hicachectl.formats.profile import Profile
    from hicachectl.pages.deployments import AffixTable

Ids = npt.NDArray[np.int32]

AFFIX_ID = pa.field("affix_id", pa.int32(), nullable=False)
MEMORY_ROWS = 2_000_000  # about 300 MB
_BUCKETS = 256
_BUCKET_SHIFT = np.uint64(56)  # leaves the first byte of a word
_BATCH_ROWS = 65_536
_ASKED_AT_ONCE = 8192


def take_inventory(
    store: Store,
    profile: Profile | None = None,
    *,
    columns: Collection[str] = (),
    only_others: bool = False,
    needs_pages: bool = False,
    on_contradiction: Callable[[ContradictionError], None] | None = None,
    on_batch: Callable[[int], None] = lambda objects: None,
) -> Inventory:
    """Scan a store and parse its keys.

    columns: columns to list besides key, nbytes and mtime_ns.
    only_others: whether to accept a store whose pages are all of deployments that the profile does
        not describe.
    needs_pages: whether to raise EmptyStore if the store has no page.
    on_contradiction: takes the error if the profile contradicts the store. If None, the error is
        raised.
    on_batch: takes the number of objects of each batch.
    The call needs about 120 bytes of memory per object. Raises StoreUnavailable.
    """
    wanted = scan_columns(store, columns)
    resolve = partial(
        resolve_scan,
        store=store,
        profile=profile,
        only_others=only_others,
        needs_pages=needs_pages,
        on_contradiction=on_contradiction,
    )
    return _inventory(store.scan(wanted), scan_schema(wanted), resolve, on_batch)


def scan_columns(store: Store, columns: Collection[str]) -> list[str]:
    """Return the columns to scan for an inventory that has the given columns."""
    locator = {"locator"} & set(store.traits.columns)  # reads of objects are faster with it
    return ["key", *sorted({*_columns(store), *locator, *columns} - {"key"})]


def look_up(
    store: Store,
    keys: pa.BinaryArray,
    profile: Profile | None = None,
    *,
    only_others: bool = False,
) -> Inventory:
    """Return the inventory of some keys, without a scan of the store.

    Use this function for few keys, or if an earlier listing of the store is out of date.
    profile, only_others: see `take_inventory`.
    """
    some = (keys.slice(start, _ASKED_AT_ONCE) for start in range(0, len(keys), _ASKED_AT_ONCE))
    columns = _columns(store)
    tables = (store.look(pa.table({"key": part}), columns) for part in some)
    batches = (batch for table in tables for batch in table.combine_chunks().to_batches())
    resolve = partial(resolve_scan, store=store, profile=profile, only_others=only_others)
    found = _inventory(batches, scan_schema(columns), resolve)
    return replace(found, partial=True)


def _inventory(
    scanned: Iterable[pa.RecordBatch],
    schema: pa.Schema,
    resolve: Callable[[Spool], tuple[AffixTable, Iterator[Inventory]]],
    on_batch: Callable[[int], None] = lambda objects: None,
) -> Inventory:
    spool = Spool(schema)
    spool.fill(scanned, on_batch)
    (inventory,) = resolve(spool)[1]
    pa.default_memory_pool().release_unused()
    return inventory.without_unused_columns()


def resolve_scan(
    spool: Spool,
    store: Store,
    profile: Profile | None,
    *,
    only_others: bool = False,
    needs_pages: bool = False,
    on_contradiction: Callable[[ContradictionError], None] | None = None,
) -> tuple[AffixTable, Iterator[Inventory]]:
    """Return the table of a scan's affixes, and the objects piece by piece.

    The table marks keys that two models may have written, and has the sizes that no profile states.
    The counts of objects usually suffice for this. If they do not, the pieces are read, too.
    only_others, needs_pages, on_contradiction: see `take_inventory`.
    Raises OSError.
    """
    census = spool.census()
    scanned = assign_affixes(spool.affixes, grammar_of(store.grammar), profile)

    def pieces(table: AffixTable, affix_ids: Ids | None = None) -> Iterator[Inventory]:
        return (Inventory(*piece, table) for piece in spool.pieces(affix_ids))

    if needs_pages and not any(one.readings for one in scanned.resolved):
        refuse_empty(store, next(pieces(scanned)))  # all objects are foreign, so they are one piece
    table, affix_ids = with_ambiguous_pages(scanned, census, lambda: pieces(scanned))
    if affix_ids is not None:
        found = pieces(table, affix_ids)
        census = Census.total(Census.of(piece.objects, piece.affix_ids) for piece in found)
    table = with_seen_sizes(table, census, lambda: pieces(table, affix_ids))
    try:
        refuse_contradiction(table, census, store.url, only_others=only_others)
    except ContradictionError as error:
        if on_contradiction is None:
            raise
        on_contradiction(error)
    return table, pieces(table, affix_ids)


def _columns(store: Store) -> tuple[str, ...]:
    """Return the columns that every inventory needs, besides the key."""
    return ("nbytes", "mtime_ns", *(("cleared_ns",) if isinstance(store, Trailed) else ()))


class Spool:
    """Collector of the objects of a scan, in memory or in files, which also counts them.

    It gives the objects piece by piece, and all objects of a page are in one piece. As a context
    manager, it removes its files at the end.
    """

    def __init__(
        self, schema: pa.Schema, folder: Directory | None = None, memory_rows: int = MEMORY_ROWS
    ) -> None:
        """Prepare for batches of a schema.

        folder: directory for files, used from `memory_rows` objects on; None keeps all objects in
            memory.
        """
        self.rows = 0
        self._schema = schema
        self._folder = folder
        self._memory_rows = memory_rows
        self._splitter = KeySplitter()
        self._batches: list[pa.RecordBatch] = []
        self._ids: list[Ids] = [np.empty(0, dtype=np.int32)]
        self._buckets: _Buckets | None = None
        self._counted: list[Census] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._buckets is not None:
            self._buckets.close()

    @property
    def affixes(self) -> list[Affix]:
        """The affix of each affix id."""
        return self._splitter.affixes

    def fill(self, batches: Iterable[pa.RecordBatch], on_batch: Callable[[int], None]) -> None:
        """Collect the batches of a scan.

        on_batch: takes the number of objects of each batch.
        Raises OSError.
        """
        held = 0
        with persistent() as check:
            for batch in batches:
                self._batches.append(batch)
                self._ids.append(self._identified(batch))
                self.rows += len(batch)
                held += len(batch)
                on_batch(len(batch))
                check()
                if self._folder is not None and held >= self._memory_rows:
                    self._spill(self._folder)
                    held = 0
        if self._buckets is not None and self._folder is not None:
            self._spill(self._folder)
            self._buckets.finish()

    def census(self) -> Census:
        """Count all objects."""
        if not self._counted:
            return Census.of(*self._held())
        return Census.total(self._counted)

    def pieces(self, affix_ids: Ids | None = None) -> Iterator[tuple[pa.Table, Ids]]:
        """Yield all objects and their affix ids, in the same order each time.

        affix_ids: [objects] ids to yield instead of those of the scan; None for those of the scan.
        """
        start = 0
        for objects, ids in [self._held()] if self._buckets is None else self._buckets.read():
            end = start + len(ids)
            yield objects, ids if affix_ids is None else affix_ids[start:end]
            start = end

    def _identified(self, batch: pa.RecordBatch) -> Ids:
        """Return each object's affix id; FOREIGN for objects that a `clear` made misses."""
        keys, cleared = batch.column("key"), "cleared_ns" in batch.schema.names
        if not cleared or batch.column("cleared_ns").null_count == len(batch):
            return self._splitter.identify(keys)
        kept = batch.column("cleared_ns").is_null()
        ids = np.full(len(batch), FOREIGN, dtype=np.int32)
        ids[kept.to_numpy(zero_copy_only=False)] = self._splitter.identify(keys.filter(kept))
        return ids

    def _held(self) -> tuple[pa.Table, Ids]:
        if len(self._ids) > 2:
            self._ids = [self._ids[0], np.concatenate(self._ids)]
        return pa.Table.from_batches(self._batches, schema=self._schema), self._ids[-1]

    def _spill(self, folder: Directory) -> None:
        """Move the objects in memory to the files of their buckets."""
        if self._buckets is None:
            self._buckets = _Buckets(folder, self._schema.append(AFFIX_ID))
        if not self._batches:
            return
        objects, ids = self._held()
        self._counted.append(Census.of(objects, ids))
        words = first_words(objects, page_starts(self.affixes)[ids])
        buckets = (words >> _BUCKET_SHIFT).astype(np.uint8)
        self._buckets.write(objects.append_column(AFFIX_ID, pa.array(ids)), buckets)
        self._batches, self._ids = [], self._ids[:1]


class _Buckets:
    """Temporary files of objects, one file for each first byte of a page hash."""

    def __init__(self, folder: Directory, schema: pa.Schema) -> None:
        self._folder = folder
        self._schema = schema
        self._closing = ExitStack()
        self._files: dict[int, tuple[Any, Any]] = {}  # file and writer of each bucket

    def write(self, objects: pa.Table, buckets: npt.NDArray[np.uint8]) -> None:
        """Append objects to their buckets."""
        order = np.argsort(buckets, kind="stable")
        edges = np.searchsorted(buckets[order], np.arange(_BUCKETS + 1)).tolist()
        ordered = take_rows(objects, order).combine_chunks()
        for number, (start, end) in enumerate(pairwise(edges)):
            if start < end:
                rows = ordered.slice(start, end - start)
                self._writer(number).write_table(rows, max_chunksize=_BATCH_ROWS)

    def finish(self) -> None:
        """End the files; only `read` and `close` may follow."""
        for file, writer in self._files.values():
            writer.close()
            file.flush()

    def read(self) -> Iterator[tuple[pa.Table, Ids]]:
        """Yield the objects of each bucket, and their affix ids."""
        for _, (file, _) in sorted(self._files.items()):
            file.seek(0)
            table = pa.ipc.open_stream(file).read_all()
            ids = table.column(AFFIX_ID.name).to_numpy()
            yield table.drop_columns([AFFIX_ID.name]), ids

    def _writer(self, number: int) -> Any:
        """Return the writer of a bucket. If the bucket has no file yet, create the file."""
        if number not in self._files:
            name = f"spool-{number:02x}"
            file = os.fdopen(self._folder.create(name), "r+b")
            self._closing.callback(self._remove, name)
            self._closing.enter_context(file)
            options = pa.ipc.IpcWriteOptions(compression="zstd")
            self._files[number] = file, pa.ipc.new_stream(file, self._schema, options=options)
        return self._files[number][1]

    def close(self) -> None:
        """Remove the files."""
        self._closing.close()

    def _remove(self, name: str) -> None:
        with suppress(OSError):
            self._folder.remove(name)
