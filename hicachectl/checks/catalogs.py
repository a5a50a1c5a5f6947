"""Read, compare and update catalogs."""

from __future__ import annotations

import stat
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.backends.base import take_rows
from hicachectl.backends.disk.durable import whole_file
from hicachectl.formats.catalog import (
    SCHEMA,
    Catalog,
    count_entries,
    read_catalog,
    stream_catalog,
    write_catalog,
)
from hicachectl.formats.errors import UsageError
from hicachectl.formats.wording import failed

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from hicachectl.backends.disk.permissions import Permissions
    from hicachectl.formats.arrays import IntArray
    from hicachectl.pages.inventory import Inventory


# Outcomes of the comparison of an object with its catalog entry. UNKNOWN: the object has no entry.
# REWRITTEN: other bytes, and another identity. MISMATCH: other bytes, and nothing shows that a
# server rewrote the object.
UNKNOWN, SAME, REWRITTEN, MISMATCH = range(4)


# Columns of an entry without its times.
_OBJECTS = pa.schema(list(SCHEMA)[:-2])


@dataclass(frozen=True, slots=True)
class Digested:
    """Objects with their digests, compared with a catalog if there is one. Arrays are [n].
    rows: rows of the objects in the inventory.
    entries: a catalog entry for each object, without the times.
    identity_fields: fields of the identities in the entries.
    outcome: UNKNOWN, SAME, REWRITTEN or MISMATCH.
    verified_ns: time when the recorded bytes were last read, Unix nanoseconds; 0 if the object has
        no entry.
    """

    rows: IntArray
    entries: pa.Table
    identity_fields: tuple[str, ...]
    outcome: npt.NDArray[np.int8]
    verified_ns: IntArray

    @property
    def mismatched(self) -> IntArray:
        """Rows of the objects whose bytes differ from the catalog without a rewrite by a server."""
        mismatched: IntArray = self.rows[self.outcome == MISMATCH]
        return mismatched


def digested_objects(
    inventory: Inventory,
    rows: IntArray,
    identities: npt.NDArray[np.uint64],
    identity_fields: tuple[str, ...],
    digests: npt.NDArray[np.uint8],
) -> Digested:
    """Return some objects of an inventory with their digests, not yet compared with a catalog.

    identities: [rows, identity_fields], values of the fields.
    digests: [rows, 32].
    """
    some = rows if len(rows) < len(inventory.objects) else None
    objects = inventory.objects.select(["key", "nbytes"])
    if some is not None:
        objects = take_rows(objects, some)
    pools = [r.coordinate.pool if r.coordinate else None for r in inventory.table.resolved]
    ids = pa.array(inventory.affix_ids[rows], mask=inventory.affix_ids[rows] < 0)
    identity = pa.nulls(len(rows), pa.binary())
    if identity_fields:
        words = np.ascontiguousarray(identities).view(np.uint8)
        identity = pc.cast(_fixed(words.reshape(len(rows), 8 * len(identity_fields))), pa.binary())
    columns = {
        "key": objects.column("key").combine_chunks(),
        "page": inventory.pages(some).combine_chunks(),
        "pool": pa.array(pools, pa.string()).take(ids),
        "nbytes": objects.column("nbytes").fill_null(0).combine_chunks(),
        "identity": identity,
        "digest": _fixed(digests),
    }
    return Digested(
        rows=rows,
        entries=pa.table(columns, schema=_OBJECTS),
        identity_fields=identity_fields,
        outcome=np.full(len(rows), UNKNOWN, dtype=np.int8),
        verified_ns=np.zeros(len(rows), dtype=np.int64),
    )


def load_catalog(path: Path) -> Catalog:
    """Read a catalog file.

    Raises UsageError if the file cannot be read, FormatError if the content is not a catalog.
    """
    with _mapped(path) as data:
        return read_catalog(data, source=str(path))


@contextmanager
def streamed_catalog(path: Path) -> Iterator[tuple[Catalog, Iterator[pa.RecordBatch]]]:
    """Open a catalog file, and yield what `stream_catalog` returns. Raises as `load_catalog`."""
    with _mapped(path) as data:
        yield stream_catalog(data, source=str(path))


@contextmanager
def _mapped(path: Path) -> Iterator[memoryview]:
    try:
        # To map a FIFO would wait for a writer, and signals would not end the wait.
        if not stat.S_ISREG(path.stat().st_mode):
            raise OSError(0, "not a regular file")
        mapped = pa.memory_map(str(path))
    except OSError as error:
        next_step = "check --catalog, or create the file with --update-catalog"
        raise UsageError(failed(path, "read the catalog", error, next_step)) from error
    with mapped:
        yield mapped.read_buffer()


def save_catalog(
    tables: Iterable[pa.Table],
    path: Path,
    *,
    store: str,
    identity_fields: Iterable[str],
    readable_by: Permissions | None = None,
    allow_shrink: bool = False,
) -> str:
    """Replace a catalog file atomically. Return "", or the reason why the file was not replaced.

    The file stays if it has more than twice as many entries as `tables`, because the store may be
    the wrong one, or mounted in part.
    tables: new entries.
    readable_by: permissions to list the store. A new catalog gets no wider permissions.
    allow_shrink: whether to replace the file however many entries it has.
    Raises UsageError if the file cannot be written, and raises as `load_catalog` if the old file
    cannot be read.
    """
    before = 0 if allow_shrink else _count_entries(path)
    try:
        with whole_file(path, durable=True, readable_by=readable_by) as stream:
            after = write_catalog(stream, tables, store=store, identity_fields=identity_fields)
            if 2 * after < before:
                raise _ShrinksError
    except _ShrinksError:
        return (
            f"{path}: not written, because its entries would fall from {before} to {after}; check "
            "the store, or give --allow-shrink"
        )
    return ""


class _ShrinksError(Exception):
    """A catalog that would lose more than half of its entries."""


def _count_entries(path: Path) -> int:
    """Return the number of entries of a catalog file; 0 if it does not exist."""
    if not path.exists():
        return 0
    with _mapped(path) as data:
        return count_entries(data, source=str(path))


def of_another_store(path: Path, recorded: str, store: str) -> str | None:
    """Return a remark if a catalog records another store than `store`."""
    if recorded == store:
        return None
    return f"{path}: the catalog records {recorded}, not {store}; objects are compared by key"


def compare(catalog: Catalog, digested: Digested, fields: tuple[str, ...]) -> Digested:
    """Return digested objects, compared with a catalog.

    fields: identity fields to compare. If all of them are equal, the object was not rewritten, so
        other bytes are a MISMATCH. If the catalog and `digested` have none of the fields in common,
        other bytes are always a MISMATCH.
    """
    if not len(catalog.entries):  # `take` needs an entry
        return digested
    places = _places(catalog, digested)
    known = places >= 0
    recorded = catalog.entries.take(pa.array(np.maximum(places, 0)))
    outcome, verified_ns = digested.outcome.copy(), digested.verified_ns.copy()
    equal = pc.equal(recorded.column("digest"), digested.entries.column("digest"))
    same_bytes = equal.to_numpy()
    same_object = _same_object(catalog, recorded, digested, fields)
    outcome[known & same_bytes] = SAME
    outcome[known & ~same_bytes] = REWRITTEN
    outcome[known & ~same_bytes & same_object] = MISMATCH
    verified_ns[known] = recorded.column("last_verified_ns").to_numpy()[known]
    return replace(digested, outcome=outcome, verified_ns=verified_ns)


def carry_forward(
    catalog: Catalog | None,
    digested: Digested,
    *,
    store: str,
    listed: Inventory,
    now_ns: int,
) -> Catalog:
    """Return the catalog after a run: digested objects, and old entries of objects still listed.

    An object with a mismatch keeps its old entry, so that the next run reports the object again,
    with the time when it was last right.
    listed: all objects of the store, or of the part that the run checks. Old entries of objects
        that a `clear` made misses are left out.
    """
    fresh, outcome = digested.entries, digested.outcome
    kept = SCHEMA.empty_table() if catalog is None else catalog.entries
    verified = np.full(len(fresh), now_ns, dtype=np.int64)
    first_seen = verified.copy()
    if catalog is not None:
        places = _places(catalog, digested)
        known = (places >= 0) & (outcome != REWRITTEN)
        first_seen[known] = kept.column("first_seen_ns").to_numpy()[places[known]]
    for name, times in (("first_seen_ns", first_seen), ("last_verified_ns", verified)):
        fresh = fresh.append_column(SCHEMA.field(name), pa.array(times))
    if (outcome == MISMATCH).any():
        fresh = fresh.filter(pa.array(outcome != MISMATCH))
    if not len(kept):
        return Catalog(fresh, store, digested.identity_fields)
    usable = np.ones(len(listed.objects), dtype=np.bool_)
    usable[listed.cleared_rows] = False
    present = listed.objects.column("key").filter(pa.array(usable)).combine_chunks()
    still_there = pc.is_in(kept.column("key"), value_set=present)
    replaced = pc.is_in(kept.column("key"), value_set=fresh.column("key").combine_chunks())
    kept = kept.filter(pc.and_(still_there, pc.invert(replaced)))
    return Catalog(pa.concat_tables([kept, fresh]), store, digested.identity_fields)


def _places(catalog: Catalog, digested: Digested) -> IntArray:
    """Return the index of each digested object's entry, [n]; -1 if the object has no entry."""
    recorded = catalog.entries.column("key").combine_chunks()
    found = pc.index_in(digested.entries.column("key"), value_set=recorded)
    places: IntArray = found.fill_null(-1).to_numpy().astype(np.int64)
    return places


def _same_object(
    catalog: Catalog, recorded: pa.Table, digested: Digested, fields: tuple[str, ...]
) -> npt.NDArray[np.bool_]:
    """Return which objects have the recorded identity fields, [n]."""
    used = [f for f in fields if f in catalog.identity_fields and f in digested.identity_fields]
    if not used:
        return np.ones(len(digested.rows), dtype=np.bool_)
    before, whole = _values(recorded, catalog.identity_fields, used)
    now, _ = _values(digested.entries, digested.identity_fields, used)
    same: npt.NDArray[np.bool_] = whole & (before == now).all(axis=1)
    return same


def _values(
    entries: pa.Table, fields: tuple[str, ...], used: list[str]
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.bool_]]:
    """Return the values of some identity fields, [n, used], and which identities have all fields.

    fields: all fields of the identities.
    """
    column = entries.column("identity").combine_chunks()
    width = 8 * len(fields)
    whole = pc.equal(pc.binary_length(column), width).fill_null(False)
    fixed = pc.cast(pc.if_else(whole, column, b"\0" * width), pa.binary(width))
    start, end = (width * number for number in (fixed.offset, fixed.offset + len(fixed)))
    words = np.frombuffer(fixed.buffers()[1] or b"", np.uint8)[start:end].view("<u8")
    positions = [fields.index(field) for field in used]
    return words.reshape(-1, len(fields))[:, positions], whole.to_numpy(zero_copy_only=False)


def _fixed(values: npt.NDArray[np.uint8]) -> pa.Array:
    """Return [n, width] uint8 as fixed-size binary, without a copy."""
    width = values.shape[1]
    flat = pa.py_buffer(np.ascontiguousarray(values).reshape(-1))
    return pa.Array.from_buffers(pa.binary(width), len(values), [None, flat])
