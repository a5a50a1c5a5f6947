"""The inventory: a store's listing as one Arrow table, with all keys parsed."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hicachectl.backends.base import take_rows
from hicachectl.backends.capabilities import OtherFiles
from hicachectl.formats.errors import EmptyStore
from hicachectl.formats.keys.table import page_words, pages_of
from hicachectl.formats.quarantine import is_quarantine
from hicachectl.formats.spec import UNKNOWN_SIZE
from hicachectl.formats.wording import with_next

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from hicachectl.backends.base import Store
    from hicachectl.formats.arrays import IntArray
    from hicachectl.pages.deployments import AffixTable

_WORDS = 4  # a page hash has four words of 64 bits


@dataclass(frozen=True, slots=True)
class Inventory:
    """Objects of a store: all, or some that were chosen or looked up.

    objects: columns key (binary), nbytes and mtime_ns (int64), and the requested columns. They have
        many chunks, so use `take`. The column cleared_ns is missing if no object was cleared.
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
        """Return the objects of some rows, in the order of `rows`.

        columns: names of the columns to return; None for all columns.
        """
        objects = self.objects if columns is None else self.objects.select(list(columns))
        return take_rows(objects, rows)

    def only(self, rows: IntArray) -> Inventory:
        """Return an inventory of some rows."""
        return replace(self, objects=self.take(rows), affix_ids=self.affix_ids[rows])

    def pages(self, rows: IntArray | None = None) -> pa.ChunkedArray:
        """Return the page hashes of objects as strings, null for foreign objects.

        rows: rows of the objects; None for all objects.
        """
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

    def page_ranks(self, chosen: npt.NDArray[np.bool_]) -> tuple[IntArray, int]:
        """Return the rank of each chosen object's page by hash, and the number of pages.

        chosen: [objects] bool, without foreign objects.
        """
        words = self.page_words(chosen, 0)
        order = np.argsort(words)
        words = words[order]
        same = begins_alike = words[1:] == words[:-1]
        for word in range(1, _WORDS):
            words = self.page_words(chosen, word)[order]
            same = same & (words[1:] == words[:-1])
        # If different hashes share their first word, compare all words. With SHA-256, this does not
        # happen.
        if (same != begins_alike).any():
            every = np.stack([self.page_words(chosen, word) for word in range(_WORDS)])
            order = np.lexsort(every[::-1])
            same = (every[:, order[1:]] == every[:, order[:-1]]).all(axis=0)
        numbers = np.zeros(len(order), dtype=np.int64)
        np.cumsum(~same, out=numbers[1:])
        ranks = np.empty(len(order), dtype=np.int64)
        ranks[order] = numbers
        return ranks, int(numbers[-1]) + 1 if len(numbers) else 0

    @property
    def sizes(self) -> IntArray:
        """Listed bytes of each object: [objects]. UNKNOWN_SIZE if the store lists no size."""
        sizes: IntArray = self.objects.column("nbytes").fill_null(UNKNOWN_SIZE).to_numpy()
        return sizes

    @property
    def known_sizes(self) -> IntArray:
        """Bytes of each object: [objects].

        This is the listed size, or the spec's size if none is listed. It is 0 if both are unknown.
        """
        stated = self.table.expected_sizes[self.affix_ids]
        sizes = np.where(self.sizes == UNKNOWN_SIZE, stated, self.sizes)
        known: IntArray = np.where(sizes == UNKNOWN_SIZE, 0, sizes)
        return known

    @property
    def is_foreign(self) -> npt.NDArray[np.bool_]:
        """Whether the key is not SGLang's, or a `clear` made the object a miss: [objects]."""
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
        """Return the value of each object's affix: [objects].

        values: values by affix id.
        missing: value for foreign keys.
        """
        return np.array([*values, missing])[self.affix_ids]


def first_words(objects: pa.Table, starts: IntArray) -> npt.NDArray[np.uint64]:
    """Return the first 64 bits of each object's page hash: [objects]; 0 without a page.

    starts: [objects] byte offsets of the hashes in the keys; negative without a page.
    """
    words = np.zeros(len(objects), dtype=np.uint64)
    for keys, part in _chunks(objects.column("key")):
        paged = np.flatnonzero(starts[part] >= 0)
        words[part.start + paged] = page_words(keys, paged, starts[part][paged], 0)
    return words


def _chunks(column: pa.ChunkedArray) -> Iterator[tuple[pa.Array, slice]]:
    start = 0
    for chunk in column.chunks:
        yield chunk, slice(start, start + len(chunk))
        start += len(chunk)


def describe_empty(store: Store, listed: Inventory) -> str:
    """Describe in one line the contents of a store without pages."""
    place = "mount" if isinstance(store, OtherFiles) else "URL"
    return _contents(store, listed) or f"{store.url} is empty; check the {place}"


def refuse_empty(store: Store, listed: Inventory) -> None:
    """Raise EmptyStore, which describes the contents of the store."""
    why = f"{store.url} has no page; check the mount, or give --allow-empty if it may be empty"
    raise EmptyStore(with_next(why, _contents(store, listed)))


def _contents(store: Store, listed: Inventory) -> str:
    """Return the contents of a store without pages, and the next step; "" for an empty store."""
    if not isinstance(store, OtherFiles):
        keys = listed.objects.column("key")
        if not len(keys):
            return ""
        first = keys[0].as_py().decode("utf-8", "backslashreplace")
        return (
            f"{store.url} has no pages, only other objects ({len(keys)}), such as {first}; "
            "hicachectl verify --allow-empty describes them"
        )
    directories, others = store.other_files(listed.objects)
    if is_quarantine(store.path, directories):
        return (
            f"{store.path} is a quarantine, not a store; each run in it is a store; put its pages "
            f"back with hicachectl restore {store.path} STORE"
        )
    keys = listed.take(listed.cleared_rows, ["key"]).column("key").to_pylist()
    cleared = list(map(os.fsdecode, keys))
    others = sorted(set(others).difference(cleared))
    first = sorted(directories)[:1] or others[:1] or cleared[:1]
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
