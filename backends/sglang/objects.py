"""Objects that hold a pool's pages in a store: their keys, and whether they have the right size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from hicachectl.backends.base import SCAN_FIELDS, Result, Status
from hicachectl.formats.keys import grammar_of
from hicachectl.formats.objects import Names

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicachectl.backends.base import Store
    from hicachectl.backends.sglang.counters import Counters
    from hicachectl.backends.sglang.served import ServedPool
    from hicachectl.formats.arrays import BoolArray, IntArray
    from hicachectl.formats.keys.base import Affix

_KEYS = pa.schema([SCAN_FIELDS["key"]])
_REASONS = {
    Status.SHORT: "damaged",
    Status.OVERSIZED: "damaged",
    Status.DAMAGED: "damaged",
    Status.FULL: "full",
}


class FormObject(NamedTuple):
    """One object of a page: its affix, bytes, and slice of the page's pieces."""

    affix: Affix
    nbytes: int
    pieces: slice


@dataclass(frozen=True, slots=True)
class PageForm:
    """The objects of a pool's pages, none for a logical anchor outside a file store."""

    objects: tuple[FormObject, ...]

    def named(self, pages: Sequence[str]) -> tuple[list[bytes], IntArray]:
        """Return the keys and bytes of all objects, page after page."""
        keys = [
            f"{one.affix[0]}{page}{one.affix[1]}".encode() for page in pages for one in self.objects
        ]
        sizes = np.array([one.nbytes for one in self.objects], dtype=np.int64)
        return keys, np.tile(sizes, len(pages))

    def of_page(self, places: IntArray, page: int) -> list[tuple[FormObject, int]]:
        """Return the objects of the n-th page with their places, of `named`."""
        first = page * len(self.objects)
        mine = places[first : first + len(self.objects)].tolist()
        return list(zip(self.objects, mine, strict=True))

    def whole(self, found: BoolArray) -> list[bool]:
        """Return which pages have all their objects."""
        pages: BoolArray = np.all(found.reshape(-1, len(self.objects)), axis=1)
        return list(pages.tolist())


def page_form(grammar: str, pool: ServedPool, tag: str = "") -> PageForm:
    """Return the objects of a pool's pages in a store with keys of a grammar.

    tag: Mooncake's extra_backend_tag. Raises UnsupportedByBackend.
    """
    page = pool.page._replace(names=Names(pool.identity.model, tag))
    spoken = grammar_of(grammar)
    spoken.check_ranks(page.ranks, page.release)
    objects = []
    for one in spoken.objects(page):
        own = pool.parts[one.parts]
        pieces = slice(own[0].pieces.start, own[-1].pieces.stop) if own else slice(0)
        nbytes = sum(part.nbytes for part in own)
        objects.append(FormObject(spoken.affix(one.coordinate), nbytes, pieces))
    return PageForm(tuple(objects))


def rows_of(keys: Sequence[bytes]) -> Any:
    """Return keys as rows of a scan."""
    return pa.RecordBatch.from_arrays([pa.array(keys, pa.binary())], schema=_KEYS)


def right_sizes(
    store: Store, keys: Sequence[bytes], sizes: IntArray, counters: Counters
) -> BoolArray:
    """Return which objects exist, in the right size where the store tells sizes: [n] bool.

    sizes: [n] int64.
    """
    if not _tells_sizes(store):
        return store.exists(rows_of(keys))
    seen = store.look(rows_of(keys), ("nbytes",))
    pairs = zip(seen.column("key").to_pylist(), seen.column("nbytes").to_pylist(), strict=True)
    held = dict(pairs)
    wanted = list(zip(keys, sizes.tolist(), strict=True))
    wrong = [(key, size) for key, size in wanted if held.get(key, size) != size]
    if wrong:
        key, size = wrong[0]
        detail = f"{key.decode()}: {held[key]} bytes instead of {size}"
        counters.refused("damaged", detail, len(wrong))
    return np.array([held.get(key) == size for key, size in wanted], dtype=np.bool_)


def put(
    store: Store, keys: Sequence[bytes], offsets: IntArray, sizes: IntArray, counters: Counters
) -> tuple[BoolArray, Result]:
    """Write absent objects from the arena, and replace those of wrong size.

    Return which are there now, [n] bool, and the result of the first write. An object that a reader
    has a lease on stays.
    """
    result = store.write_from(rows_of(keys), offsets, sizes, if_absent=True)
    there = result.ok
    held = np.flatnonzero(result.statuses == Status.EXISTS)
    if len(held):
        there[held] = right_sizes(store, [keys[n] for n in held.tolist()], sizes[held], counters)
    wrong = held[~there[held]]
    if len(wrong) and _tells_sizes(store):
        removed = store.delete(rows_of([keys[n] for n in wrong.tolist()])).statuses
        wrong = wrong[np.isin(removed, (Status.OK, Status.GONE))]
        again = rows_of([keys[n] for n in wrong.tolist()])
        there[wrong] = store.write_from(again, offsets[wrong], sizes[wrong], if_absent=True).ok
    return there, result


def count_failures(
    counters: Counters,
    other: str,
    result: Result,
    keys: Sequence[bytes],
    form: PageForm,
    nbytes: IntArray,
) -> None:
    """Count the pages that failed, each by its first object that failed.

    other: reason of an error without one of its own. nbytes: [n] int64, of each object; -1 if
    unknown.
    """
    failed = np.flatnonzero((result.statuses != Status.OK) & (result.statuses != Status.EXISTS))
    _, first = np.unique(failed // len(form.objects), return_index=True)
    for n in failed[first].tolist():
        status = Status(result.statuses[n])
        if status == Status.GONE:
            counters.count("gone")
            continue
        wanted = form.objects[n % len(form.objects)].nbytes
        detail = result.errors.get(n, f"{nbytes[n]} bytes instead of {wanted}")
        counters.refused(_REASONS.get(status, other), f"{keys[n].decode()}: {detail}")


def _tells_sizes(store: Store) -> bool:
    return "nbytes" in store.traits.columns
