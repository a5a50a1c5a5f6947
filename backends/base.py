"""The interface every store implements: listing as Arrow batches, vectorised reads and writes.

A store is synchronous and is called from threads; its `limits` say how many calls at once and
how large a call pay off. What happens to one object is a status, never an exception: only a
lost store raises (StoreUnavailable). To look must not disturb: listing, `exists` and
`free_bytes` leave recency, leases and sizes as they are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import IntEnum
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hicachectl.backends.urls import SCHEMES, parse_url
from hicachectl.formats.errors import UnsupportedByBackend

if TYPE_CHECKING:
    from collections.abc import Collection, Generator, Iterator

    from hicachectl.backends.arena import Arena
    from hicachectl.backends.urls import Config, StoreUrl

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
StatusArray = npt.NDArray[np.uint8]
Rows = Any  # pa.RecordBatch | pa.Table, a slice of the scan table; pyarrow ships no types

_MANY_CHUNKS = 8  # of a table, from which on `take_rows` leaves them apart

SCAN_FIELDS = {
    "key": pa.field("key", pa.binary(), nullable=False),
    "nbytes": pa.field("nbytes", pa.int64()),
    "mtime_ns": pa.field("mtime_ns", pa.int64()),
    # A number only the store itself understands: a 3FS page index, an entry of a pack.
    "locator": pa.field("locator", pa.int64()),
    # Opaque bytes that change whenever the object may hold other data under the same key.
    "version": pa.field("version", pa.binary()),
    # Copies of the object that the store itself keeps: "memory", "disk", "local_disk" or "nof".
    "replicas": pa.field(
        "replicas",
        pa.list_(
            pa.struct([("kind", pa.string()), ("location", pa.string()), ("nbytes", pa.int64())])
        ),
    ),
}


def scan_schema(columns: Collection[str]) -> Any:
    """Give the Arrow schema of a scan: the key, then the columns asked for in one fixed order."""
    unknown = sorted(set(columns) - set(SCAN_FIELDS))
    if unknown:
        raise ValueError(f"no scan column is named {', '.join(unknown)}")
    return pa.schema([f for name, f in SCAN_FIELDS.items() if name == "key" or name in columns])


def scan_batch(schema: Any, columns: dict[str, Any], rows: int) -> Any:
    """Build a batch of a scan's schema; columns that the store knows nothing about are null."""
    arrays = [columns[f.name] if f.name in columns else pa.nulls(rows, f.type) for f in schema]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


class Status(IntEnum):
    """What became of one object."""

    OK = 0
    GONE = 1  # no such key
    SHORT = 2  # smaller than the capacity
    OVERSIZED = 3  # larger than the capacity
    EXISTS = 4  # left as it was, since if_absent was asked for
    ERROR = 5  # anything else; the result's `errors` says what
    CHANGED = 6  # another object has taken the key since the row was listed; left as it is
    UNREACHABLE = 7  # the store knows the object, but where its bytes lie nobody answers
    FULL = 8  # not written: the store has no room for it
    DAMAGED = 9  # read, but its bytes are not those of the digest that the store keeps itself


@dataclass(frozen=True, slots=True)
class Result:
    """What became of each row.

    statuses: [n] uint8. errors: the message of each ERROR, UNREACHABLE, FULL and DAMAGED.
    """

    statuses: StatusArray
    errors: dict[int, str] = field(default_factory=dict)

    @property
    def ok(self) -> BoolArray:
        """Which rows are OK, [n] bool."""
        return np.equal(self.statuses, Status.OK)

    @property
    def all_ok(self) -> bool:
        """Whether every row is OK."""
        return not self.statuses.any()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadResult(Result):
    """The same for a read.

    nbytes:   [n] int64, the object's actual size, -1 where unknown.
    versions: [n, len(version_fields)] uint64, the identity of what was read: the numbers of the
        scan's `version`; undefined for rows that are not OK, and where it was not asked for.
    """

    nbytes: IntArray
    versions: npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How a store is best called."""

    batch_objects: int  # most rows a call
    batch_bytes: int  # most bytes a call
    parallel_reads: int  # threads that read at once
    parallel_writes: int
    forkable: bool = False  # forked processes may read, each with an arena of its own
    named_arena: bool = False  # reads are fastest into memory that another process can open


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """Facts about all stores of a class. The defaults describe a store that is only read.

    columns: the scan columns that every object has a value in. Without `nbytes`, the sizes of
        objects are unknown until a profile states them.
    version_fields: names of the numbers in `version`, 8 bytes of little endian each.
    """

    columns: frozenset[str] = frozenset({"nbytes", "mtime_ns"})
    version_fields: tuple[str, ...] = ()
    writes: bool = False  # `write_from` is supported
    deletes: bool = False  # `delete` is supported
    live: bool = True  # servers write to the store, so page groups can be in flight
    append_only: bool = False  # objects that `undo_writes` removes still take room
    keeps_digests: bool = False  # the store checks each read against its own digest (DAMAGED)
    lists_temporaries: bool = False  # a scan has the temporary files of unfinished writes, too
    lists_late: bool = False  # a scan may lack the objects written last
    evicts: bool = False  # the store evicts objects to make room for new ones
    evicts_pools_apart: bool = False  # each pool is evicted by itself: sidecars outlive anchors
    versions_recur: bool = False  # a new object can get the version of an earlier one
    # `exists` after a read identifies what was read, and one call can serve many reads.
    identifies_by_exists: bool = False
    logs_natively: bool = False  # the store's library writes to descriptor 2 by itself


class Store(ABC):
    """One place with objects. What only some stores can do is in `backends.capabilities`.

    A store that is only read implements `from_url`, `grammar`, `scan`, `look` and `read_into`;
    `urls.register_scheme` gives it a URL, and `testing.StoreSuite` checks it.

    `rows` arguments are record batches or tables with the columns a scan of this store gave,
    at least `key` (and `locator` where the store has one); rows made for another store may be
    written, with `mtime_ns` kept where the store has times. One array entry belongs to each row.
    """

    traits: ClassVar[Traits]
    limits: Limits

    url: str  # what messages and reports call this store
    arena: Arena | None = None

    @classmethod
    @abstractmethod
    def from_url(cls, url: StoreUrl) -> Self:
        """Open the store a URL names. Raises StoreUnavailable."""

    @classmethod
    def create(cls, url: StoreUrl) -> Self:
        """Open the store a URL names to write to it; one that is not there yet is made, empty.

        Raises StoreUnavailable.
        """
        return cls.from_url(url)

    @property
    @abstractmethod
    def grammar(self) -> str:
        """Name of the grammar of the keys, as in formats.keys."""

    @abstractmethod
    def scan(self, columns: Collection[str] = ("nbytes", "mtime_ns")) -> Generator[Any, None, None]:
        """List every object, in the store's own order, as record batches of bounded size.

        Batches have `scan_schema(columns)`; a column the store knows nothing about is null.
        Objects that vanish meanwhile may be left out. Closing the iterator early frees
        whatever the listing holds.
        """

    @abstractmethod
    def look(self, rows: Rows, columns: Collection[str] = ("nbytes", "mtime_ns", "version")) -> Any:
        """List a few keys again: a table as of `scan`, of those that exist, in any order."""

    def attach(self, arena: Arena) -> None:
        """Make `arena` the memory of reads and writes, until `detach`."""
        self.arena = arena

    def detach(self) -> None:
        """Let go of the arena, which may then be closed."""
        self.arena = None

    @abstractmethod
    def read_into(
        self, rows: Rows, offsets: IntArray, capacities: IntArray, *, identify: bool = True
    ) -> ReadResult:
        """Read whole objects into the arena.

        offsets:    [n] int64, bytes into the arena
        capacities: [n] int64, the size expected of each object; never is more written
        identify:   whether versions are wanted; some stores have to be asked for them
        OK means that the object has exactly its capacity; the arena bytes of any other row are
        undefined. Statuses: OK, GONE, SHORT, OVERSIZED, UNREACHABLE, ERROR, DAMAGED.
        """

    @property
    def remarks(self) -> tuple[str, ...]:
        """What a reader of a listing or report should know about how it came about."""
        return ()

    def write_from(
        self,
        rows: Rows,
        offsets: IntArray,
        sizes: IntArray,
        *,
        if_absent: bool,
    ) -> Result:
        """Write objects from the arena, each atomically, durable when the call returns.

        if_absent: leave an existing object as it is and answer EXISTS; else replace it.
        Statuses: OK, EXISTS, FULL, ERROR. Raises UnsupportedByBackend unless `traits.writes`.
        """
        raise UnsupportedByBackend(f"{self.url}: the store cannot be written to")

    def delete(self, rows: Rows) -> Result:
        """Delete objects by key. Statuses: OK, GONE, ERROR.

        Raises UnsupportedByBackend unless `traits.deletes`.
        """
        raise UnsupportedByBackend(f"{self.url}: objects of this store cannot be deleted")

    def undo_writes(self, rows: Rows) -> Result:
        """Remove objects that this very `Store` has just written. Statuses as `delete`."""
        return self.delete(rows)

    def exists(self, rows: Rows) -> BoolArray:
        """Return which keys exist: [n] bool."""
        import pyarrow.compute as pc  # 20 ms at start-up that most commands need not pay

        there = self.look(rows, ("key",)).column("key").combine_chunks()
        found: BoolArray = pc.is_in(as_table(rows).column("key"), value_set=there).to_numpy()
        return found

    def flush(self) -> None:  # noqa: B027 - most stores have nothing left to do
        """Make what is in the store durable, whoever wrote it. Raises StoreUnavailable.

        `write_from` and `copy_from` need no flush for what they have written themselves.
        """

    def free_bytes(self) -> int | None:
        """Count the bytes the store has room for, None where it does not say."""
        return None

    def close(self) -> None:  # noqa: B027 - most stores hold nothing
        """Let go of the store; it is not used again."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def memory(self, offsets: IntArray, sizes: IntArray, rows: int) -> memoryview:
        """Return the bytes of the attached arena, for the reads and writes of a store.

        offsets, sizes: [rows] int64. Raises ValueError where no arena is attached, or a range
        lies outside it.
        """
        if self.arena is None:
            raise ValueError("attach an arena first")
        if not len(offsets) == len(sizes) == rows:
            raise ValueError(f"{rows} rows, {len(offsets)} offsets, {len(sizes)} sizes")
        if rows and (
            min(offsets.min(), sizes.min()) < 0 or (offsets + sizes).max() > self.arena.nbytes
        ):
            raise ValueError("an object lies outside the arena")
        return self.arena.memory


def open_store(text: str, *, config: Config | None = None, create: bool = False) -> Store:
    """Open the store that a STORE argument names. Raises UsageError, StoreUnavailable.

    create: open the store for writing, and make one that is missing (`Store.create`).
    """
    url = parse_url(text, config)
    module, _, name = SCHEMES[url.scheme].target.partition(":")
    backend: type[Store] = getattr(import_module(module), name)
    return backend.create(url) if create else backend.from_url(url)


def batch_spans(sizes: IntArray, limits: Limits) -> Iterator[slice]:
    """Cut rows into calls that suit a store: [n] bytes of each to slices of them."""
    ends = np.cumsum(sizes)
    start = 0
    while start < len(sizes):
        before = ends[start - 1] if start else 0
        end = int(np.searchsorted(ends, before + limits.batch_bytes, side="right"))
        end = min(max(end, start + 1), start + limits.batch_objects)
        yield slice(start, end)
        start = end


def as_table(rows: Rows) -> Any:
    """Give rows as one table, whether they came as a table or as a record batch."""
    return pa.Table.from_batches([rows]) if isinstance(rows, pa.RecordBatch) else rows


def take_rows(objects: Any, rows: IntArray) -> Any:
    """Give some rows of a table, in their order.

    As Table.take does, which first makes one chunk of all, twice the memory of the table.
    """
    batches = objects.to_batches()
    if len(batches) < _MANY_CHUNKS:
        return objects.take(pa.array(rows))
    order = None if len(rows) < 2 or (np.diff(rows) >= 0).all() else np.argsort(rows, kind="stable")
    ordered = rows if order is None else rows[order]
    ends = np.cumsum([len(batch) for batch in batches])
    edges = np.searchsorted(ordered, [0, *ends.tolist()])
    taken = [
        batches[n].take(pa.array(ordered[edges[n] : edges[n + 1]] - (ends[n - 1] if n else 0)))
        for n in np.flatnonzero(np.diff(edges)).tolist()
    ]
    table = pa.Table.from_batches(taken, schema=objects.schema)
    return table if order is None else table.take(pa.array(np.argsort(order)))


def keys_of(rows: Rows) -> list[bytes]:
    """List the keys of rows."""
    keys: list[bytes] = rows.column("key").to_pylist()
    return keys


def mtimes_of(rows: Rows) -> list[int | None]:
    """List the modification times of rows in ns, None where unknown."""
    if "mtime_ns" not in rows.schema.names:
        return [None] * len(rows)
    times: list[int | None] = rows.column("mtime_ns").to_pylist()
    return times
