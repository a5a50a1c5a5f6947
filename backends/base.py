"""The interface of every store, with listings as Arrow batches, and vectorised reads and writes.

A failure of one object is returned as its status. A store that cannot be used raises
StoreUnavailable. Listing, `exists` and `free_bytes` leave the recency, leases and sizes of objects
unchanged. Only `Leases.allow_leases` permits a scan to grant leases.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hicachectl.backends.disk.io import Closing
from hicachectl.backends.urls import meant_store, parse_url, target_of
from hicachectl.formats.errors import StoreUnavailable, UnsupportedByBackend, UsageError
from hicachectl.formats.eviction import Policy

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator, Hashable, Iterable, Iterator

    from hicachectl.backends.arena import Arena
    from hicachectl.backends.urls import Config, StoreUrl
    from hicachectl.formats.arrays import BoolArray, IntArray

StatusArray = npt.NDArray[np.uint8]
Rows = Any  # pa.RecordBatch | pa.Table, a slice of the scan table; pyarrow ships no types

_MANY_CHUNKS = 8  # with fewer chunks, `take_rows` joins them before it takes rows

SCAN_FIELDS = {
    "key": pa.field("key", pa.binary(), nullable=False),
    "nbytes": pa.field("nbytes", pa.int64()),
    "mtime_ns": pa.field("mtime_ns", pa.int64()),
    # Time of the last read that the store recorded. The true last read may be later.
    "atime_ns": pa.field("atime_ns", pa.int64()),
    # Number by which the store finds the object, such as a 3FS page index or a pack entry.
    "locator": pa.field("locator", pa.int64()),
    # Opaque bytes that change whenever the data of the object may have changed. A new object can
    # have the version of an earlier object if `Traits.versions_recur` is True.
    "version": pa.field("version", pa.binary()),
    # Time of the server's `clear` that made the object a miss, Unix nanoseconds; null without one.
    "cleared_ns": pa.field("cleared_ns", pa.int64()),
    # The store's copies of the object. kind: "memory", "disk", "local_disk" or "nof".
    "replicas": pa.field(
        "replicas",
        pa.list_(
            pa.struct([("kind", pa.string()), ("location", pa.string()), ("nbytes", pa.int64())])
        ),
    ),
}


def scan_schema(columns: Collection[str]) -> Any:
    """Return the Arrow schema: the key, then the requested columns in fixed order.

    Raises ValueError for an unknown column.
    """
    unknown = sorted(set(columns) - set(SCAN_FIELDS))
    if unknown:
        raise ValueError(f"unknown scan columns: {', '.join(unknown)}")
    return pa.schema([f for name, f in SCAN_FIELDS.items() if name == "key" or name in columns])


def scan_batch(schema: Any, columns: dict[str, Any], rows: int) -> Any:
    """Return a record batch with a scan's schema. Columns without a value are null."""
    arrays = [columns[f.name] if f.name in columns else pa.nulls(rows, f.type) for f in schema]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


class Status(IntEnum):
    """Outcome for one object."""

    OK = 0
    GONE = 1  # the store has no object of this key
    SHORT = 2  # the object has fewer bytes than the caller of `read_into` expects
    OVERSIZED = 3  # the object has more bytes than the caller of `read_into` expects
    EXISTS = 4  # the object was not written, because the key exists or another writer is first
    ERROR = 5  # any other failure
    CHANGED = 6  # the call left the object alone, because a writer changed it after the listing
    UNREACHABLE = 7  # the object is listed, but the host with its bytes does not answer
    FULL = 8  # the object was not written, because the store has no space
    DAMAGED = 9  # the bytes that were read do not match the store's digest
    FOREIGN = 10  # the bytes that were read have another identity or rank than expected


@dataclass(frozen=True, slots=True)
class Result:
    """Statuses of the rows of one call.

    statuses: [n] uint8, values of Status.
    errors:   message by row index, for each ERROR, UNREACHABLE, FULL, DAMAGED or FOREIGN row.
    """

    statuses: StatusArray
    errors: dict[int, str] = field(default_factory=dict)

    @property
    def ok(self) -> BoolArray:
        """Return which rows are OK: [n] bool."""
        return np.equal(self.statuses, Status.OK)

    @property
    def all_ok(self) -> bool:
        """Return whether every row is OK."""
        return not self.statuses.any()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadResult(Result):
    """Statuses, sizes and versions of the rows of one read.

    nbytes:   [n] int64, bytes of the stored object; -1 if unknown.
    versions: [n, len(version_fields)] uint64, the numbers in the scan's `version`, for the bytes
        that were read. Undefined for rows that are not OK, and without `identify`.
    compared: [n] bool, which OK rows were compared with a digest that the store keeps. None means
        all OK rows if `traits.keeps_digests`, else no row.
    unranked: [n] bool, which OK rows have a trailer that names no rank. None means no row.
    """

    nbytes: IntArray
    versions: npt.NDArray[np.uint64]
    compared: BoolArray | None = None
    unranked: BoolArray | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Call sizes and thread counts at which a store is fastest."""

    batch_objects: int  # maximum rows of a call
    batch_bytes: int  # maximum bytes of a call
    parallel_reads: int  # number of threads that read at once
    # Number of threads that write at once. One thread can copy while another waits for the disk.
    parallel_writes: int = 2
    forkable: bool = False  # forked processes may read, each with its own arena
    # Reads are fastest into an arena that other processes can open by name (`Arena(named=True)`).
    named_arena: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """Facts about a store class. The defaults describe a read-only store.

    columns: the scan columns with a value for every object. Without `nbytes`, sizes are unknown
        until a profile states them.
    version_fields: names of the numbers in `version`, 8 bytes each, little endian.
    """

    columns: frozenset[str] = frozenset({"nbytes", "mtime_ns"})
    version_fields: tuple[str, ...] = ()
    writes: bool = False  # `write_from` is supported
    deletes: bool = False  # `delete` is supported
    live: bool = True  # servers write to the store, so page groups can be in flight
    append_only: bool = False  # objects removed by `undo_writes` still take space
    keeps_digests: bool = False  # reads are checked against the store's own digests (DAMAGED)
    lists_temporaries: bool = False  # a scan includes temporary files of unfinished writes
    lists_late: bool = False  # a scan may lack the newest objects
    evicts: bool = False  # objects are evicted to make room for new ones
    # Pools are evicted separately, so that sidecars can outlive anchors.
    evicts_pools_apart: bool = False
    versions_recur: bool = False  # a new object can have the version of an earlier object
    # After reads, one call of `exists` tells which of many objects are still in the store. That
    # costs less than a read of each object with `identify`.
    identifies_by_exists: bool = False
    logs_natively: bool = False  # the store's library logs to file descriptor 2 itself


@dataclass(frozen=True, slots=True)
class Capacity:
    """How much a store can hold.

    nbytes: bytes stored and free, including files of other programs on the same file system.
    unit: bytes in a unit of space; an object takes whole units.
    """

    nbytes: int
    unit: int = 1


class Store(Closing, ABC):
    """One place with objects. Optional abilities are classes in `backends.capabilities`.

    A read-only store implements `from_url`, `grammar`, `scan`, `look` and `read_into`.
    `urls.register_scheme` gives the class a URL scheme. `testing.StoreSuite` tests the class.

    Calls are synchronous. Several threads may call at once; `limits` states how many are best.

    `rows` arguments are record batches or tables with columns of this store's scan: at least
    `key`, and `locator` if the store has one. `write_from` also takes rows of another store, and
    keeps their `mtime_ns` if this store has times. Array arguments have one entry per row.
    """

    traits: ClassVar[Traits]
    limits: Limits

    url: str  # names the store in messages and reports
    arena: Arena | None = None
    created: tuple[str, ...] = ()  # directories of the store that `create` made

    @classmethod
    @abstractmethod
    def from_url(cls, url: StoreUrl) -> Self:
        """Open the store that a URL names. Raises StoreUnavailable."""

    @classmethod
    def create(cls, url: StoreUrl) -> Self:
        """Open a store for writing; create it if it is missing. Raises StoreUnavailable."""
        return cls.from_url(url)

    @property
    @abstractmethod
    def grammar(self) -> str:
        """Return the name of the key grammar, as in formats.keys."""

    @property
    def places(self) -> tuple[Hashable, ...]:
        """Return an identifier for each place with objects, equal for every URL of the place.

        Two stores of one class with equal places are the same store. Two stores with one place in
        common can have objects in common.
        """
        return (self.url,)

    @abstractmethod
    def scan(self, columns: Collection[str] = ("nbytes", "mtime_ns")) -> Generator[Any, None, None]:
        """Yield record batches of bounded size with every object, in the store's own order.

        Batches have `scan_schema(columns)`; columns that the store lacks are null. Objects deleted
        during the scan may be missing. Closing the generator frees its resources.

        `scan` and `look` return an object that a server's `clear` made a miss only if `cleared_ns`
        is among the columns. For every other operation, such an object does not exist.
        """

    @abstractmethod
    def look(self, rows: Rows, columns: Collection[str] = ("nbytes", "mtime_ns", "version")) -> Any:
        """Look up keys. Return a row for each existing key, in any order, as a table like a scan's.

        columns: names of columns, as for `scan`.
        """

    def attach(self, arena: Arena) -> None:
        """Use `arena` for reads and writes until `detach`."""
        self.arena = arena

    def detach(self) -> None:
        """Stop using the arena, which may then be closed."""
        self.arena = None

    @abstractmethod
    def read_into(
        self, rows: Rows, offsets: IntArray, capacities: IntArray, *, identify: bool = True
    ) -> ReadResult:
        """Read whole objects into the arena.

        offsets:    [n] int64, in bytes from the start of the arena.
        capacities: [n] int64, expected bytes of each object. The arena beyond them stays unchanged.
        identify:   also return versions, for which some stores make another request.
        Statuses: OK (exactly `capacity` bytes), GONE, SHORT, OVERSIZED, UNREACHABLE, ERROR,
        DAMAGED, FOREIGN. The arena bytes of rows that are not OK are undefined.
        """

    @property
    def remarks(self) -> tuple[str, ...]:
        """Return notes for the user about the listing, such as its age."""
        return ()

    def write_from(
        self, rows: Rows, offsets: IntArray, sizes: IntArray, *, if_absent: bool
    ) -> Result:
        """Write objects from the arena, each atomically. On return, the objects are durable.

        offsets, sizes: [n] int64, in bytes.
        if_absent: keep an existing object and return EXISTS. Otherwise replace the object.
        Statuses: OK, EXISTS, FULL, ERROR. Raises UnsupportedByBackend if `traits.writes` is False.
        """
        raise UnsupportedByBackend(
            f"{self.url}: objects cannot be written to this store; name another store"
        )

    def delete(self, rows: Rows) -> Result:
        """Delete objects by key. Statuses: OK, GONE, ERROR.

        Raises UnsupportedByBackend if `traits.deletes` is False.
        """
        raise UnsupportedByBackend(
            f"{self.url}: objects cannot be deleted from this store; to drop some objects, "
            "migrate the others to a new store"
        )

    def undo_writes(self, rows: Rows) -> Result:
        """Remove objects that this instance has just written. Returns the statuses of `delete`."""
        return self.delete(rows)

    def exists(self, rows: Rows) -> BoolArray:
        """Return which keys exist: [n] bool."""
        import pyarrow.compute as pc  # late, because the import takes 20 ms at start-up

        there = self.look(rows, ("key",)).column("key").combine_chunks()
        found: BoolArray = pc.is_in(as_table(rows).column("key"), value_set=there).to_numpy()
        return found

    def find(self, keys: Any, columns: Collection[str]) -> tuple[Any, IntArray]:
        """Look up keys. Return the table of `look`, and the number of each key's row in it.

        keys: Arrow array of binary, [n]. The result has [n] numbers, -1 for missing keys.
        """
        import pyarrow.compute as pc

        found = self.look(pa.table({"key": keys}), columns)
        places = pc.index_in(keys, value_set=found.column("key").combine_chunks())
        return found, places.fill_null(-1).to_numpy(zero_copy_only=False)

    def flush(self) -> None:
        """Make all objects durable, also objects of other writers.

        Objects written by `write_from` and `copy_from` are durable already.
        Raises StoreUnavailable.
        """

    def free_bytes(self) -> int | None:
        """Return the free space in bytes; None if the store does not report it."""
        return None

    def capacity(self) -> Capacity | None:
        """Return how much the store can hold, in the same measure as `free_bytes`.

        Returns None if the store does not report its capacity, or if a removal does not add to
        `free_bytes`.
        """
        return None

    def eviction(self) -> Policy:
        """Return the policy by which the servers that write the store evict its objects."""
        return Policy.LRU

    def close(self) -> None:
        """Release all resources. The store cannot be used again."""

    def memory(self, offsets: IntArray, sizes: IntArray, rows: int) -> memoryview:
        """Check the ranges of a call, and return the arena's memory.

        offsets, sizes: [rows] int64, in bytes. Raises ValueError without an arena, for
        ranges outside the arena, and if the arguments' lengths differ.
        """
        if self.arena is None:
            raise ValueError("No arena is attached; call attach first")
        if not len(offsets) == len(sizes) == rows:
            raise ValueError(f"{rows} rows, but {len(offsets)} offsets and {len(sizes)} sizes")
        if rows and (
            min(offsets.min(), sizes.min()) < 0 or (offsets + sizes).max() > self.arena.nbytes
        ):
            raise ValueError("An object lies outside the arena")
        return self.arena.memory


def open_store(text: str, *, config: Config | None = None, create: bool = False) -> Store:
    """Open the store that a STORE argument names. Raises UsageError, StoreUnavailable.

    create: open with `Store.create`.
    """
    url = parse_url(text, config)
    if meant := meant_store(text, config):
        if create:  # a new directory of this name would hardly be meant
            raise UsageError(
                f"{text}: does not exist, and a store has this name; write {meant} for the store, "
                f"or ./{text} for a new directory"
            )
        raise StoreUnavailable(f"{url.path}: No such file or directory; did you mean {meant}?")
    module, _, name = target_of(url).partition(":")
    backend: type[Store] = getattr(import_module(module), name)
    return backend.create(url) if create else backend.from_url(url)


@contextmanager
def attached(arena: Arena, *stores: Store) -> Iterator[None]:
    """Attach an arena to stores while the context is open."""
    with ExitStack() as exits:
        for store in stores:
            store.attach(arena)
            exits.callback(store.detach)
        yield


def batch_spans(sizes: IntArray, most: int, most_rows: int | None = None) -> Iterator[slice]:
    """Divide rows, in order, into slices with sizes that add up to at most `most`.

    sizes: [n] int64, such as bytes. A row above `most` gets a slice of its own.
    most_rows: maximum rows of a slice.
    """
    ends = np.cumsum(sizes)
    start = 0
    while start < len(sizes):
        before = ends[start - 1] if start else 0
        end = max(int(np.searchsorted(ends, before + most, side="right")), start + 1)
        end = min(end, start + (most_rows or len(sizes)))
        yield slice(start, end)
        start = end


def joined(count: int, parts: Iterable[tuple[IntArray | slice, Result]]) -> Result:
    """Join the results of several calls into one. parts: the rows of each call, and its result."""
    statuses = np.zeros(count, dtype=np.uint8)
    errors: dict[int, str] = {}
    for rows, found in parts:
        statuses[rows] = found.statuses
        if found.errors:
            places = np.arange(count)[rows]
            errors |= {int(places[index]): why for index, why in found.errors.items()}
    return Result(statuses, errors)


def in_batches(sizes: IntArray, limits: Limits, call: Callable[[slice], Result]) -> Result:
    """Divide rows into batches within a store's limits. Return the joined results of the batches.

    sizes: [n] int64, bytes of each row.
    call: takes a slice of the rows, and returns the result of this batch.
    """
    spans = batch_spans(sizes, limits.batch_bytes, limits.batch_objects)
    return joined(len(sizes), ((span, call(span)) for span in spans))


def as_table(rows: Rows) -> Any:
    """Return rows as a table."""
    return pa.Table.from_batches([rows]) if isinstance(rows, pa.RecordBatch) else rows


def take_rows(objects: Any, rows: IntArray) -> Any:
    """Return rows of a table, in the order given.

    If the table has many chunks, rows are taken from each chunk, because Table.take would first
    join all chunks and double the memory.
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
    """Return the keys of rows."""
    keys: list[bytes] = rows.column("key").to_pylist()
    return keys


def values_of(rows: Rows, name: str) -> list[Any]:
    """Return a scan column as Python values; None for unknown values and for a missing column."""
    if name not in rows.schema.names:
        return [None] * len(rows)
    values: list[Any] = rows.column(name).to_pylist()
    return values
