"""What a store holds: its scan as one Arrow table, every key understood."""

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

    objects: columns of the scan: key binary, nbytes and mtime_ns int64, and those asked for.
             Tables of many chunks: see `take`.
    affix_ids: int32 a row, index into `affixes`, negative for a foreign key. Objects of one affix
             have several ids where they are decided one by one, as its readings are contested.
    """

    objects: pa.Table
    affix_ids: npt.NDArray[np.int32]
    table: AffixTable

    def take(self, rows: IntArray, columns: Collection[str] | None = None) -> pa.Table:
        """Give some objects, in the order of rows; all columns, or those named."""
        objects = self.objects if columns is None else self.objects.select(list(columns))
        return take_rows(objects, rows)

    def only(self, rows: IntArray) -> Inventory:
        """Leave out all objects but some."""
        return replace(self, objects=self.take(rows), affix_ids=self.affix_ids[rows])

    def pages(self, rows: IntArray | None = None) -> pa.ChunkedArray:
        """Give the page hash of each object, or of some: strings, null for a foreign object."""
        keys, ids = self.objects.column("key"), self.affix_ids
        if rows is not None:
            keys, ids = self.take(rows, ["key"]).column("key"), ids[rows]
        starts = self.table.page_starts
        cut = (pages_of(chunk, starts[ids[part]]) for chunk, part in _chunks(keys))
        return pa.chunked_array(cut, pa.string())

    def page_words(self, rows: npt.NDArray[np.bool_], word: int) -> npt.NDArray[np.uint64]:
        """Give a quarter of the page hash of each object chosen: [objects] bool, none foreign."""
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
        """[objects] bool: which are no object of SGLang's, be there a hash in the key or not."""
        return ~self.by_affix([bool(one.readings) for one in self.table.resolved], False)

    @property
    def split_rows(self) -> IntArray:
        """Rows of the objects whose affix two models share, each decided for itself."""
        return np.flatnonzero(self.by_affix(self.table.split, False))

    def of_pool(self, pool: str) -> npt.NDArray[np.bool_]:
        """[objects] which are, by any reading, of a pool."""
        resolved = self.table.resolved
        return self.by_affix([any(r.pool == pool for r in one.readings) for one in resolved], False)

    def by_affix(self, values: Sequence[int], missing: int) -> npt.NDArray[Any]:
        """Spread numbers by affix id over the rows; `missing` for foreign keys."""
        return np.array([*values, missing])[self.affix_ids]


def take_inventory(
    store: Store,
    profile: Profile | None = None,
    *,
    columns: Collection[str] = (),
    on_batch: Callable[[int], None] = lambda objects: None,
) -> Inventory:
    """Scan a store and understand its keys.

    columns: of the scan, beside key, nbytes and mtime_ns. on_batch is told the number of objects
    of each batch as it arrives. Memory: about 120 bytes an object. Raises StoreUnavailable, and
    ProfileError where the profile cannot be the one that wrote the store.
    """
    wanted = {"key", "nbytes", "mtime_ns", *columns}
    if "locator" in store.traits.columns:  # which its reads are faster with
        wanted.add("locator")
    return _understood(store.scan(wanted), store.grammar, profile, on_batch)


def look_up(store: Store, keys: pa.BinaryArray, profile: Profile | None = None) -> Inventory:
    """Ask a store for some keys, and understand what is there of them.

    For a few keys, or a store whose listing is behind. Raises like `take_inventory`.
    """
    some = (keys.slice(start, _ASKED_AT_ONCE) for start in range(0, len(keys), _ASKED_AT_ONCE))
    found = (store.look(pa.table({"key": part}), ("nbytes", "mtime_ns")) for part in some)
    batches = (batch for table in found for batch in table.combine_chunks().to_batches())
    return _understood(batches, store.grammar, profile, lambda objects: None)


def _chunks(column: pa.ChunkedArray) -> Iterator[tuple[pa.Array, slice]]:
    """Give the chunks of a column, and which of its rows each has."""
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
