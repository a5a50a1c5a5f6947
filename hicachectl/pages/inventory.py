"""The inventory: a store's listing as one Arrow table, with all keys parsed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hicachectl.backends.base import take_rows
from hicachectl.formats.keys.base import codec_for
from hicachectl.formats.keys.table import KeySplitter, page_words, pages_of
from hicachectl.io.interrupts import persistent
from hicachectl.pages.contested import decide_objects
from hicachectl.pages.contradiction import refuse_contradiction
from hicachectl.pages.deployments import AffixTable, assign_affixes
from hicachectl.pages.seen_sizes import with_seen_sizes

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from hicachectl.backends.base import Store
    from hicachectl.formats.profile import Profile

IntArray = npt.NDArray[np.int64]

_ASKED_AT_ONCE = 8192


@dataclass(frozen=True, slots=True)
class Inventory:
    """All objects of a store.

    objects: columns key binary, nbytes and mtime_ns int64, and the requested columns, all in
             many chunks: use `take`.
    affix_ids: [objects] int32, index into `table.affixes`, negative for a foreign key.
    """

    objects: pa.Table
    affix_ids: npt.NDArray[np.int32]
    table: AffixTable

    def take(self, rows: IntArray, columns: Collection[str] | None = None) -> pa.Table:
        """Return some objects, in the order of rows, with all columns or the named ones."""
        objects = self.objects if columns is None else self.objects.select(list(columns))
        return take_rows(objects, rows)

    def only(self, rows: IntArray) -> Inventory:
        """Return an inventory of some rows."""
        return replace(self, objects=self.take(rows), affix_ids=self.affix_ids[rows])

    def pages(self, rows: IntArray | None = None) -> pa.ChunkedArray:
        """Return the page hash of each object, or of some, as a string; null if foreign."""
        keys, ids = self.objects.column("key"), self.affix_ids
        if rows is not None:
            keys, ids = self.take(rows, ["key"]).column("key"), ids[rows]
        starts = self.table.page_starts
        cut = (pages_of(chunk, starts[ids[part]]) for chunk, part in _chunks(keys))
        return pa.chunked_array(cut, pa.string())

    def page_words(self, rows: npt.NDArray[np.bool_], word: int) -> npt.NDArray[np.uint64]:
        """Return a 64-bit word of the page hash of each object in rows.

        rows: [objects] bool, without foreign objects. word: 0 to 3.
        """
        starts = self.table.page_starts
        words = np.empty(np.count_nonzero(rows), dtype=np.uint64)
        filled = 0
        for chunk, part in _chunks(self.objects.column("key")):
            chosen = np.flatnonzero(rows[part])
            of_affix = starts[self.affix_ids[part][chosen]]
            words[filled : filled + len(chosen)] = page_words(chunk, chosen, of_affix, word)
            filled += len(chosen)
        return words

    @property
    def is_foreign(self) -> npt.NDArray[np.bool_]:
        """[objects] bool: keys that are not SGLang's, with or without a hash."""
        return ~self.by_affix([bool(one.readings) for one in self.table.resolved], False)

    @property
    def split_rows(self) -> IntArray:
        """Rows of objects decided one by one (`contested`)."""
        return np.flatnonzero(self.by_affix(self.table.split, False))

    def of_pool(self, pool: str) -> npt.NDArray[np.bool_]:
        """Return which objects are of a pool under any reading: [objects]."""
        resolved = self.table.resolved
        return self.by_affix([any(r.pool == pool for r in one.readings) for one in resolved], False)

    def by_affix(self, values: Sequence[int], missing: int) -> npt.NDArray[Any]:
        """Return each row's value, from values by affix id; `missing` for foreign keys."""
        return np.array([*values, missing])[self.affix_ids]


def take_inventory(
    store: Store,
    profile: Profile | None = None,
    *,
    columns: Collection[str] = (),
    on_batch: Callable[[int], None] = lambda objects: None,
) -> Inventory:
    """Scan a store and parse its keys.

    columns: of the scan, besides key, nbytes and mtime_ns. on_batch: takes the number of objects of
    each batch. Memory: about 120 bytes per object. Raises StoreUnavailable, and ProfileError if the
    profile contradicts the store.
    """
    wanted = {"key", "nbytes", "mtime_ns", *columns}
    if "locator" in store.traits.columns:  # makes reads faster
        wanted.add("locator")
    return _understood(store.scan(wanted), store.grammar, profile, on_batch)


def look_up(store: Store, keys: pa.BinaryArray, profile: Profile | None = None) -> Inventory:
    """Return the inventory of some keys, without a scan. Raises like `take_inventory`.

    For few keys, or a store whose listing is out of date.
    """
    some = (keys.slice(start, _ASKED_AT_ONCE) for start in range(0, len(keys), _ASKED_AT_ONCE))
    found = (store.look(pa.table({"key": part}), ("nbytes", "mtime_ns")) for part in some)
    batches = (batch for table in found for batch in table.combine_chunks().to_batches())
    return _understood(batches, store.grammar, profile, lambda objects: None)


def _chunks(column: pa.ChunkedArray) -> Iterator[tuple[pa.Array, slice]]:
    start = 0
    for chunk in column.chunks:
        yield chunk, slice(start, start + len(chunk))
        start += len(chunk)


def _understood(
    scanned: Iterable[pa.RecordBatch],
    grammar: str,
    profile: Profile | None,
    on_batch: Callable[[int], None],
) -> Inventory:
    splitter = KeySplitter()
    batches: list[pa.RecordBatch] = []
    ids: list[npt.NDArray[np.int32]] = [np.empty(0, dtype=np.int32)]
    with persistent() as check:
        for batch in scanned:
            batches.append(batch)
            ids.append(splitter.identify(batch.column("key")))
            on_batch(len(batch))
            check()
    table = assign_affixes(splitter.affixes, codec_for(grammar), profile)
    objects = pa.Table.from_batches(batches, schema=batches[0].schema if batches else _SCHEMA)
    affix_ids = np.concatenate(ids)
    nbytes = objects.column("nbytes").fill_null(-1).to_numpy()
    page_words = Inventory(objects, affix_ids, table).page_words
    table, affix_ids = decide_objects(table, affix_ids, nbytes, page_words)
    table = with_seen_sizes(table, objects, affix_ids, page_words)
    refuse_contradiction(table, affix_ids, nbytes)
    pa.default_memory_pool().release_unused()
    return Inventory(objects, affix_ids, table)


_SCHEMA = pa.schema({"key": pa.binary(), "nbytes": pa.int64(), "mtime_ns": pa.int64()})
