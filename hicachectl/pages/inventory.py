"""The inventory: a store's listing as one Arrow table, with all keys parsed."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hicachectl.backends.base import scan_schema, take_rows
from hicachectl.backends.capabilities import OtherFiles, Trailed
from hicachectl.formats.errors import EmptyStore, ProfileError
from hicachectl.formats.keys import grammar_of
from hicachectl.formats.keys.table import page_words, pages_of
from hicachectl.formats.quarantine import is_quarantine
from hicachectl.formats.spec import UNKNOWN_SIZE
from hicachectl.formats.wording import with_next
from hicachectl.pages.census import Census, Objects
from hicachectl.pages.contested import with_ambiguous_pages
from hicachectl.pages.deployments import AffixTable, assign_affixes
from hicachectl.pages.seen_sizes import refuse_contradiction, with_seen_sizes
from hicachectl.pages.spool import Spool

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from hicachectl.backends.base import Store
    from hicachectl.formats.arrays import IntArray
    from hicachectl.formats.profile import Profile


Ids = npt.NDArray[np.int32]

_ASKED_AT_ONCE = 8192


@dataclass(frozen=True, slots=True)
class Inventory:
    """All objects of a store.

    objects: columns key binary, nbytes and mtime_ns int64, and the requested columns, all in many
        chunks: use `take`. The column cleared_ns is missing if no object was cleared.
    affix_ids: [objects] int32, index into `table.affixes`, negative for a foreign object.
    partial: whether only some keys were looked up.
    """

    objects: pa.Table
    affix_ids: npt.NDArray[np.int32]
    table: AffixTable
    partial: bool = False

    def without_unused_columns(self) -> Inventory:
        """Return the inventory without the column cleared_ns if no object was cleared."""
        if "cleared_ns" not in self.objects.column_names or len(self.cleared_rows):
            return self
        return replace(self, objects=self.objects.drop_columns(["cleared_ns"]))

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

        rows: [objects] bool, without foreign objects.
        word: number of the word, 0 to 3.
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
        """[objects] bool: keys that are not SGLang's, and objects that a `clear` made misses."""
        return ~self.by_affix([bool(one.readings) for one in self.table.resolved], False)

    @property
    def cleared_rows(self) -> IntArray:
        """Rows of objects that are misses since a server's `clear`."""
        if "cleared_ns" not in self.objects.column_names:
            return np.zeros(0, dtype=np.int64)
        return np.flatnonzero(self.objects.column("cleared_ns").is_valid().to_numpy())

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
    only_others: bool = False,
    needs_pages: bool = False,
    on_contradiction: Callable[[str], None] | None = None,
    on_batch: Callable[[int], None] = lambda objects: None,
) -> Inventory:
    """Scan a store and parse its keys.

    columns: columns to list besides key, nbytes and mtime_ns.
    only_others: accept a store with pages of other deployments only.
    needs_pages: raise EmptyStore for a store without any page.
    on_contradiction: takes how the profile contradicts the store; None: raise ProfileError.
    on_batch: takes the number of objects of each batch.
    Memory: about 120 bytes per object. Raises StoreUnavailable.
    """
    wanted = scan_columns(store, columns)
    understand = partial(
        understood,
        store=store,
        profile=profile,
        only_others=only_others,
        needs_pages=needs_pages,
        on_contradiction=on_contradiction,
    )
    return _inventory(store.scan(wanted), scan_schema(wanted), understand, on_batch)


def scan_columns(store: Store, columns: Collection[str]) -> list[str]:
    """Return the columns of a scan for an inventory with some columns."""
    locator = {"locator"} & set(store.traits.columns)  # makes reads faster
    return ["key", *sorted({*_columns(store), *locator, *columns} - {"key"})]


def look_up(
    store: Store,
    keys: pa.BinaryArray,
    profile: Profile | None = None,
    *,
    only_others: bool = False,
) -> Inventory:
    """Return the inventory of some keys, without a scan; see `take_inventory`.

    For few keys, or a store whose listing is out of date.
    """
    some = (keys.slice(start, _ASKED_AT_ONCE) for start in range(0, len(keys), _ASKED_AT_ONCE))
    columns = _columns(store)
    tables = (store.look(pa.table({"key": part}), columns) for part in some)
    batches = (batch for table in tables for batch in table.combine_chunks().to_batches())
    understand = partial(understood, store=store, profile=profile, only_others=only_others)
    found = _inventory(batches, scan_schema(columns), understand)
    return replace(found, partial=True)


def _chunks(column: pa.ChunkedArray) -> Iterator[tuple[pa.Array, slice]]:
    start = 0
    for chunk in column.chunks:
        yield chunk, slice(start, start + len(chunk))
        start += len(chunk)


def _inventory(
    scanned: Iterable[pa.RecordBatch],
    schema: pa.Schema,
    understand: Callable[[Spool], tuple[AffixTable, Iterator[Inventory]]],
    on_batch: Callable[[int], None] = lambda objects: None,
) -> Inventory:
    spool = Spool(schema)
    spool.fill(scanned, on_batch)
    (inventory,) = understand(spool)[1]
    pa.default_memory_pool().release_unused()
    return inventory.without_unused_columns()


def understood(
    spool: Spool,
    store: Store,
    profile: Profile | None,
    *,
    only_others: bool = False,
    needs_pages: bool = False,
    on_contradiction: Callable[[str], None] | None = None,
) -> tuple[AffixTable, Iterator[Inventory]]:
    """Return the table of a scan's affixes, and the objects piece by piece.

    Decides what only all objects show: keys of two models, and sizes that no profile states. Counts
    decide most of it; pieces are read only where they do not.
    only_others, needs_pages, on_contradiction: see `take_inventory`. Raises OSError.
    """
    census = spool.census()
    scanned = assign_affixes(spool.affixes, grammar_of(store.grammar), profile)

    def pieces(table: AffixTable, affix_ids: Ids | None = None) -> Iterator[Inventory]:
        return (Inventory(*piece, table) for piece in spool.pieces(affix_ids))

    if needs_pages and not any(one.readings for one in scanned.resolved):
        refuse_empty(store, next(pieces(scanned)).objects)  # all that is foreign is one piece
    table, affix_ids = with_ambiguous_pages(scanned, census, lambda: map(_objects, pieces(scanned)))
    if affix_ids is not None:
        found = pieces(table, affix_ids)
        census = Census.total(Census.of(piece.objects, piece.affix_ids) for piece in found)
    table = with_seen_sizes(table, census, lambda: map(_objects, pieces(table, affix_ids)))
    try:
        refuse_contradiction(table, census, only_others=only_others)
    except ProfileError as error:
        if on_contradiction is None:
            raise
        on_contradiction(str(error))
    return table, pieces(table, affix_ids)


def _objects(piece: Inventory) -> Objects:
    nbytes = piece.objects.column("nbytes").fill_null(UNKNOWN_SIZE).to_numpy()
    mtime_ns = piece.objects.column("mtime_ns").fill_null(0).to_numpy()
    return Objects(piece.affix_ids, nbytes, piece.page_words, mtime_ns)


def _columns(store: Store) -> tuple[str, ...]:
    """Return the columns of a scan that an inventory needs."""
    return ("nbytes", "mtime_ns", *(("cleared_ns",) if isinstance(store, Trailed) else ()))


def describe_empty(store: Store, objects: pa.Table) -> str:
    """Return what a store without pages has instead, in one line. objects: its listing."""
    return _contents(store, objects) or f"{store.url} is empty; check the URL"


def refuse_empty(store: Store, objects: pa.Table) -> None:
    """Raise EmptyStore, which says what the store has instead of pages. objects: its listing."""
    why = f"{store.url} has no page: not mounted? --allow-empty if that is right"
    raise EmptyStore(with_next(why, _contents(store, objects)))


def _contents(store: Store, objects: pa.Table) -> str:
    """Return what a store without pages has, and the next step; "" if it has nothing."""
    if not isinstance(store, OtherFiles):
        keys = objects.column("key")
        if not len(keys):
            return ""
        first = keys[0].as_py().decode("utf-8", "backslashreplace")
        return (
            f"{store.url} has no pages, only other objects ({len(keys)}), such as {first}; "
            "hicachectl verify --allow-empty describes them"
        )
    directories, others = store.other_files(objects)
    if is_quarantine(store.path, directories):
        return (
            f"{store.path} is a quarantine, not a store; each run in it is one; put its pages back "
            f"with hicachectl restore {store.path} STORE"
        )
    cleared = _cleared(objects)
    others = sorted(set(others) - set(map(os.fsdecode, cleared)))
    first = sorted(directories)[:1] or others[:1] or list(map(os.fsdecode, cleared[:1]))
    if not first:
        return ""
    before = "from before a server cleared the store"
    kinds = (
        (len(directories), "sub-directory", "sub-directories"),
        (len(others), "other file", "other files"),
        (len(cleared), f"object {before}", f"objects {before}"),
    )
    said = " and ".join(f"{n} {one if n == 1 else many}" for n, one, many in kinds if n)
    name = os.fsencode(first[0]).decode("utf-8", "backslashreplace")
    return (
        f"{store.path} has no HiCacheFile objects, only {said}, the first named {name}; check the "
        "path"
    )


def _cleared(objects: pa.Table) -> list[bytes]:
    """Return the keys of objects that are misses since a server's `clear`."""
    if "cleared_ns" not in objects.column_names:
        return []
    keys: list[bytes] = (
        objects.filter(objects.column("cleared_ns").is_valid()).column("key").to_pylist()
    )
    return keys
