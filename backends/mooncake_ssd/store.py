"""Read Mooncake's SSD tier offline: the directory that a client with SSD offload leaves behind.

The store is read-only, because a running client keeps the places of its objects in memory, and
would read garbage from a changed file. Objects have the same keys as in the Mooncake store.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any, NoReturn, Self

import numpy as np
import pyarrow as pa

from hicachectl.backends.base import (
    Limits,
    ReadResult,
    Rows,
    Status,
    Traits,
    keys_of,
    scan_batch,
    scan_schema,
)
from hicachectl.backends.capabilities import ReportsLosses
from hicachectl.backends.disk.directory import Directory
from hicachectl.backends.disk.io import (
    CHECK_MOUNT,
    closing_descriptor,
    errors_as,
    fill,
    raise_denied,
    raise_lost,
    undo_on_error,
)
from hicachectl.backends.disk.names import storable_ns
from hicachectl.backends.mooncake_ssd.index import close_places, open_places, read_index
from hicachectl.backends.urls import MooncakeSsdParams, params_of
from hicachectl.formats.errors import (
    StoreUnavailable,
    UnsupportedByBackend,
    UntrustedError,
    UsageError,
)
from hicachectl.formats.mooncake_ssd import DEFAULT_TENANT, has_crc, record_problem
from hicachectl.formats.wording import failed

if TYPE_CHECKING:
    from collections.abc import Collection, Generator

    from hicachectl.backends.base import Rows
    from hicachectl.backends.capabilities import Loss
    from hicachectl.backends.mooncake_ssd.index import DataFile, Index, Place
    from hicachectl.backends.urls import StoreUrl
    from hicachectl.formats.arrays import IntArray

SCAN_ROWS = 16384
VERSION_FIELDS = ("inode", "mtime", "offset", "sequence")
_UINT64 = (1 << 64) - 1
# Traits of stores without and with digests.
_TRAITS = tuple(
    Traits(
        columns=frozenset({"nbytes", "mtime_ns", "locator", "version"}),
        version_fields=VERSION_FIELDS,
        live=False,
        keeps_digests=digests,
    )
    for digests in (False, True)
)


class MooncakeSsdStore(ReportsLosses):
    """One tenant's objects in the files of one or more clients; never written to."""

    limits: Limits = Limits(
        batch_objects=256,
        batch_bytes=64 << 20,
        parallel_reads=4,
        forkable=True,  # reading needs only the directories' descriptors
    )
    grammar = "mooncake"

    def __init__(self, url: StoreUrl) -> None:
        """Open the directory. Raises StoreUnavailable, UnsupportedByBackend, FormatError."""
        if not url.path:
            raise UsageError(f"{url}: name the directory, as in {url.scheme}:///mnt/ssd/mooncake")
        self.url = str(url)
        self._tenant = params_of(url, MooncakeSsdParams).tenant or DEFAULT_TENANT
        self._reading = threading.Lock()
        self._places: list[Place] = []
        self._replaced: list[list[Place]] = []  # a reader may still use their directories
        self._index: Index | None = None
        with errors_as(StoreUnavailable, self.url, "open the directory", "check the path"):
            self._root = Directory.named(url.path, writes=False)
        with undo_on_error(self.close):
            self._current()

    @classmethod
    def from_url(cls, url: StoreUrl) -> Self:
        """Open the directory that a URL names."""
        return cls(url)

    @classmethod
    def create(cls, url: StoreUrl) -> NoReturn:
        """Refuse to create a store. Raises UnsupportedByBackend."""
        raise UnsupportedByBackend(
            f"{url}: objects cannot be written to the SSD tier, because its client keeps the "
            "places of all objects in memory; name the mooncake:// store of its master"
        )

    def close(self) -> None:
        """Close the directories."""
        for places in (*self._replaced, self._places):
            close_places(places)
        self._replaced, self._places = [], []
        self._root.close()

    @property
    def remarks(self) -> tuple[str, ...]:
        """Report what the listing leaves out."""
        return () if self._index is None else self._index.remarks

    @property
    def losses(self) -> tuple[Loss, ...]:
        """Report objects that no client can read any more."""
        return () if self._index is None else self._index.losses

    @property
    def traits(self) -> Traits:  # type: ignore[override]
        """Facts about the store. Records of offset files can have CRCs; buckets have none."""
        index = self._index
        return _TRAITS[index is not None and not all(file.is_bucket for file in index.files)]

    def scan(self, columns: Collection[str] = ("nbytes", "mtime_ns")) -> Generator[Any, None, None]:
        """List the objects in the order of their files.

        An object that goes beyond the end of its file has only the bytes that the file holds.
        """
        schema = scan_schema(columns)
        index = self._current()
        for start in range(0, len(index.keys), SCAN_ROWS):
            rows = np.arange(start, min(start + SCAN_ROWS, len(index.keys)))
            yield _batch(index, rows, schema)

    def look(self, rows: Rows, columns: Collection[str] = ("nbytes", "mtime_ns", "version")) -> Any:
        """List a few objects again."""
        schema = scan_schema(columns)
        index = self._current()
        found = index.find(rows)
        chosen = np.unique(found[found >= 0])
        return pa.Table.from_batches([_batch(index, chosen, schema)], schema=schema)

    def read_into(
        self, rows: Rows, offsets: IntArray, capacities: IntArray, *, identify: bool = True
    ) -> ReadResult:
        """Read whole objects; compare keys, and CRCs where records have them.

        ERROR: the file ends inside the object, or has other bytes in place of the key.
        DAMAGED: the CRC differs.
        """
        memory = self.memory(offsets, capacities, len(rows))
        index = self._index or self._current()
        return Reading(index, rows, memory, offsets, capacities).read()

    def _current(self) -> Index:
        """Return the index of the present files. Read the files again only after a change."""
        with self._reading:
            with errors_as(StoreUnavailable, self.url, "list the directory", CHECK_MOUNT):
                places = open_places(self._root)
            states = [place.state for place in places]
            if self._index is not None and states == [place.state for place in self._places]:
                close_places(places)
                return self._index
            self._replaced.append(self._places)
            # There is no index until the new one is read, so that after a failure the next call
            # reads the metadata again.
            self._places, self._index = places, None
            with errors_as(StoreUnavailable, self.url, "read the metadata", CHECK_MOUNT):
                self._index = read_index(places, self._tenant)
            return self._index


def _batch(index: Index, rows: IntArray, schema: Any) -> Any:
    """Return a record batch of index rows."""
    objects = index.objects[rows]
    st = [file.st for file in index.files]
    times = [storable_ns(each.st_mtime_ns) for each in st]
    mtimes = np.array(times, dtype=np.int64)[objects["file"]]
    numbers = np.zeros((len(rows), len(VERSION_FIELDS)), dtype="<u8")
    numbers[:, 0] = np.array([each.st_ino for each in st], dtype=np.uint64)[objects["file"]]
    numbers[:, 1] = mtimes
    numbers[:, 2], numbers[:, 3] = objects["start"], objects["sequence"]
    versions = pa.FixedSizeBinaryArray.from_buffers(
        pa.binary(numbers.itemsize * numbers.shape[1]), len(rows), [None, pa.py_buffer(numbers)]
    )
    columns = {
        "key": index.keys.take(pa.array(rows)),
        "nbytes": pa.array(objects["nbytes"]),
        "mtime_ns": pa.array(mtimes),
        "locator": pa.array(rows.astype(np.int64)),
        "version": versions.cast(pa.binary()),
    }
    return scan_batch(schema, columns, len(rows))


class Reading:
    """One call of `Store.read_into`."""

    def __init__(
        self, index: Index, rows: Rows, memory: memoryview, offsets: IntArray, capacities: IntArray
    ) -> None:
        self._index = index
        self._found = index.find(rows)
        self._keys = keys_of(rows)
        self._memory = memory
        self._offsets, self._capacities = offsets.tolist(), capacities.tolist()
        self._statuses = np.full(len(rows), Status.GONE, dtype=np.uint8)
        self._nbytes = np.full(len(rows), -1, dtype=np.int64)
        self._versions = np.zeros((len(rows), len(VERSION_FIELDS)), dtype=np.uint64)
        self._compared = np.zeros(len(rows), dtype=np.bool_)  # rows compared with their CRC
        self._errors: dict[int, str] = {}

    def read(self) -> ReadResult:
        """Read each object from its file. Raises StoreUnavailable if the file system is lost."""
        present = np.flatnonzero(self._found >= 0)
        files = self._index.objects["file"][self._found[present]]
        for number in np.unique(files).tolist():
            self._read_file(self._index.files[number], present[files == number].tolist())
        return ReadResult(
            self._statuses,
            self._errors,
            nbytes=self._nbytes,
            versions=self._versions,
            compared=self._compared,
        )

    def _read_file(self, file: DataFile, places: list[int]) -> None:
        try:
            descriptor = file.directory.open_file(file.name)
        except FileNotFoundError:
            return
        except (OSError, UntrustedError) as error:
            for at in places:
                self._fail(at, file, error)
            return
        with closing_descriptor(descriptor):
            st = os.fstat(descriptor)
            for at in places:
                try:
                    self._read_object(file, descriptor, st, at)
                except OSError as error:
                    self._fail(at, file, error)

    def _read_object(self, file: DataFile, descriptor: int, st: os.stat_result, at: int) -> None:
        _, start, value, size, _, sequence = self._index.objects[self._found[at]].item()
        mtime_ns = storable_ns(st.st_mtime_ns) & _UINT64  # times before 1970 are negative
        self._versions[at] = (st.st_ino, mtime_ns, start, sequence)
        self._nbytes[at] = there = min(size, max(0, st.st_size - value))
        if there < size:
            self._report(at, Status.ERROR, f"{file.path} ends before byte {value + size}")
            return
        if size != self._capacities[at]:
            self._statuses[at] = Status.SHORT if size < self._capacities[at] else Status.OVERSIZED
            return
        head = bytearray(value - start)
        target = self._memory[self._offsets[at] : self._offsets[at] + size]
        if fill(descriptor, (memoryview(head), target), start) < value + size - start:
            self._report(at, Status.ERROR, f"{file.path} ends before byte {value + size}")
            return
        self._statuses[at] = Status.OK
        stored = self._index.stored_forms(self._keys[at])
        if file.is_bucket:
            problem = "" if head in stored else "has another key than its .meta file"
            damaged = False
        else:
            problem, damaged = record_problem(bytes(head), target, stored, sequence)
            self._compared[at] = has_crc(head)
        if problem and not damaged and _differ(st, file.st):
            self._statuses[at], self._nbytes[at] = Status.GONE, -1  # a live client reused the place
        elif problem:
            status = Status.DAMAGED if damaged else Status.ERROR
            self._report(at, status, f"{file.path}: the object at byte {start} {problem}")

    def _fail(self, at: int, file: DataFile, error: OSError | UntrustedError) -> None:
        if isinstance(error, UntrustedError):
            self._report(at, Status.ERROR, str(error))
            return
        raise_lost(error, file.path, "read")
        raise_denied(error, file.path)
        self._report(at, Status.ERROR, failed(file.path, "read", error))

    def _report(self, at: int, status: Status, problem: str) -> None:
        self._statuses[at] = status
        self._errors[at] = problem


def _differ(now: os.stat_result, listed: os.stat_result) -> bool:
    """Return whether a file was replaced or written to after the listing."""
    return (now.st_ino, now.st_mtime_ns) != (listed.st_ino, listed.st_mtime_ns)
