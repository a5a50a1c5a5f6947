"""Read the index and records of an open pack file, and append to it."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from io import RawIOBase
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from blake3 import blake3

from hicachectl.backends.base import as_table, keys_of
from hicachectl.backends.disk.durable import is_named, lock
from hicachectl.backends.disk.io import errors_as, fill, write_all
from hicachectl.backends.urls import is_pack_path
from hicachectl.formats.errors import FormatError, StoreUnavailable, UnfinishedPackError
from hicachectl.formats.pack.index import ENTRIES, column_of, read_index, write_index
from hicachectl.formats.pack.planes import Decoder
from hicachectl.formats.pack.records import (
    HEADER_BYTES,
    MOST_METADATA_BYTES,
    RECORD_BYTES,
    TRAILER_BYTES,
    Kind,
    Metadata,
    Record,
    build_record,
    build_trailer,
    key_length,
    parse_header,
    parse_metadata,
    parse_record,
    parse_trailer,
)
from hicachectl.formats.wording import failed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hicachectl.backends.base import Rows
    from hicachectl.formats.arrays import IntArray


_CHUNK = 1 << 20
_GIVE_PACK = "give a pack file"
_HEAD_BYTES = RECORD_BYTES + 256  # enough for a record's head with a key of usual length


class OtherContentError(FormatError):
    """The content of a record does not match its digest."""


class RecordPlace(NamedTuple):
    """Place, content and time of an object's record, as the index states them."""

    offset: int
    length: int
    nbytes: int
    planes: int
    digest: bytes
    mtime_ns: int | None

    @classmethod
    def of(cls, record: Record, offset: int) -> Self:
        """Return the place of a record."""
        planes = len(record.stored)
        return cls(offset, record.length, record.nbytes, planes, record.digest, record.mtime_ns)


@dataclass(frozen=True)
class PackContents:
    """A valid pack, whose objects are found by offset or by key.

    entries: objects as a table of ENTRIES.
    end: size of the file in bytes.
    """

    pack_id: bytes
    metadata: Metadata
    entries: pa.Table
    end: int

    def table(self) -> pa.Table:
        """Return the objects as a table of ENTRIES."""
        return self.entries

    def places(self, rows: Rows) -> list[RecordPlace | None]:
        """Return the place of each key; None if the pack lacks it."""
        found = self._find(rows)
        columns = self.entries.select(list(RecordPlace._fields))
        places = places_in(columns.take(pa.array(found[found >= 0])))
        return [next(places) if row >= 0 else None for row in found.tolist()]

    def look(self, rows: Rows) -> pa.Table:
        """Return the objects of some keys, each once, as a table of ENTRIES."""
        found = self._find(rows)
        return self.entries.take(pa.array(np.unique(found[found >= 0])))

    def _find(self, rows: Rows) -> IntArray:
        """Return the index row of each key, -1 if missing: [n] int64."""
        found = np.full(len(rows), -1, dtype=np.int64)
        if "locator" in rows.schema.names and len(self.entries) and len(rows):
            found = self._located(as_table(rows).select(["key", "locator"]).combine_chunks())
        rest = np.flatnonzero(found < 0)
        if len(rest):
            keys = rows.column("key").take(pa.array(rest)).to_pylist()
            found[rest] = [self._by_key.get(key, -1) for key in keys]
        return found

    def _located(self, rows: pa.Table) -> IntArray:
        """Return the index row of each locator; -1 if its record is missing or has another key."""
        locators = rows.column("locator").fill_null(-1).to_numpy()
        near = np.searchsorted(self._offsets, locators)
        near = np.minimum(near, len(self._offsets) - 1)
        same = self._offsets[near] == locators
        keys = self.entries.column("key").take(pa.array(near))
        same &= pc.equal(keys, rows.column("key")).to_numpy()
        return np.where(same, near, -1).astype(np.int64)

    @cached_property
    def _offsets(self) -> IntArray:
        return column_of(self.entries, "offset")

    @cached_property
    def _by_key(self) -> dict[bytes, int]:
        keys = self.entries.column("key").to_pylist()
        return dict(zip(keys, range(len(keys)), strict=True))


class PackEntries(dict[bytes, RecordPlace]):
    """Objects of a pack that is being written, by key. Several threads may change it."""

    def places(self, rows: Rows) -> list[RecordPlace | None]:
        """See `PackContents`."""
        return [self.get(key) for key in keys_of(rows)]

    def look(self, rows: Rows) -> pa.Table:
        """See `PackContents`."""
        found = {key: self.get(key) for key in keys_of(rows)}
        return _table({key: place for key, place in found.items() if place is not None})

    def table(self) -> pa.Table:
        """Return the current objects as a table of ENTRIES, in file order."""
        # Sort a copy, because another thread may add an object meanwhile.
        return _table(dict(sorted(self.copy().items(), key=lambda entry: entry[1].offset)))


def _table(objects: dict[bytes, RecordPlace]) -> pa.Table:
    """Return objects as a table of ENTRIES."""
    columns = {
        name: [getattr(place, name) for place in objects.values()] for name in RecordPlace._fields
    }
    return pa.Table.from_pydict({"key": list(objects), **columns}, schema=ENTRIES)


def places_in(entries: pa.Table) -> Iterator[RecordPlace]:
    """Return the place of each object in a table with columns of ENTRIES."""
    columns = [entries.column(name).to_pylist() for name in RecordPlace._fields]
    return map(RecordPlace._make, zip(*columns, strict=True))


def open_pack(path: str, flags: int) -> int:
    """Open a pack file. Only the owner may read a new pack. Raises StoreUnavailable."""
    try:
        # O_NONBLOCK keeps the opening of a FIFO from waiting.
        descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    except OSError as error:
        next_steps = {errno.ENOENT: "check the path", errno.EISDIR: _instead_of_a_directory(path)}
        next_step = next_steps.get(error.errno or 0, "check its permissions")
        raise StoreUnavailable(failed(path, "open the pack", error, next_step)) from error
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        next_step = _instead_of_a_directory(path) if stat.S_ISDIR(mode) else _GIVE_PACK
        raise StoreUnavailable(f"{path}: not a regular file; {next_step}")
    return descriptor


def _instead_of_a_directory(path: str) -> str:
    """Return the next step for a user who named a directory as a pack."""
    if not is_pack_path(path):
        return _GIVE_PACK
    return "a path that ends in .hcpack names a pack; end it with a slash to name the directory"


def lock_pack(descriptor: int, path: str) -> None:
    """Lock the pack until the descriptor is closed.

    Raises StoreUnavailable if another process has the lock. Raises StoreUnavailable if the opened
    file was removed or replaced, because writes to it would be lost.
    """
    with errors_as(StoreUnavailable, path, "lock the pack", "use a file system with locks"):
        is_ours = lock(descriptor)
    if not is_ours:
        raise StoreUnavailable(
            f"{path}: another process is writing to this pack; wait until it ends"
        )
    if not is_named(descriptor, path, follow=True):
        raise StoreUnavailable(f"{path}: was removed or replaced while it was opened; run again")


def read_exactly(descriptor: int, buffers: Sequence[memoryview], offset: int) -> None:
    """Fill buffers from an offset of the file.

    Raises OSError, and FormatError if the file ends before the buffers are full.
    """
    if fill(descriptor, buffers, offset) < sum(map(len, buffers)):
        raise FormatError("the file ends within a record")


def load_pack(descriptor: int, path: str) -> PackContents:
    """Return the checked index of a valid pack.

    Raises UnfinishedPackError if the file does not end with an index. Raises FormatError if the
    file is damaged or is not a pack. An object takes about 170 bytes of memory.
    """
    size = os.fstat(descriptor).st_size
    pack_id = read_header(descriptor, path)
    trailer = parse_trailer(
        os.pread(descriptor, TRAILER_BYTES, max(0, size - TRAILER_BYTES)), pack_id
    )
    remedy = f"run hicachectl pack repair {path}"
    if trailer is None:
        raise UnfinishedPackError(
            f"{path}: the pack is not finished, because it is being written or was cut off; "
            f"if no process writes to it, {remedy}"
        )
    offset, length = trailer
    if offset < HEADER_BYTES or offset + length + TRAILER_BYTES != size:
        raise FormatError(f"{path}: the trailer names a wrong index offset ({offset}); {remedy}")
    damaged = f"{path}: the index (offset {offset}) is damaged"
    with _named(damaged, remedy):
        record = read_record(descriptor, offset, pack_id)
        content = RecordContent(descriptor, record, offset)
        if record.kind is not Kind.INDEX or record.length != length:
            raise FormatError("the record's kind or length differs from the trailer")
    try:
        entries, metadata = read_index(content, end=offset, source=path)
    except FormatError:
        with _named(damaged, remedy):
            content.check()  # a wrong digest explains more than the first error
        raise
    with _named(damaged, remedy):
        content.check()
    return PackContents(pack_id, metadata, entries, size)


def read_header(descriptor: int, path: str) -> bytes:
    """Read the id of a pack. Raises FormatError."""
    try:
        return parse_header(os.pread(descriptor, HEADER_BYTES, 0))
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from error


def read_record(descriptor: int, offset: int, pack_id: bytes) -> Record:
    """Read the head of a record. Raises FormatError."""
    data = os.pread(descriptor, _HEAD_BYTES, offset)
    if len(data) == _HEAD_BYTES and (more := RECORD_BYTES + key_length(data) - len(data)) > 0:
        data += os.pread(descriptor, more, offset + len(data))
    return parse_record(data, pack_id)


class RecordContent(RawIOBase):
    """The content of an index or metadata record, as a file that is read once.

    `read` never returns more bytes than the record has.
    """

    def __init__(self, descriptor: int, record: Record, offset: int) -> None:
        """Raise FormatError if the record is compressed or cut off."""
        if record.stored != (record.nbytes,):
            raise FormatError("the record is compressed, which is not allowed here")
        if record.length > os.fstat(descriptor).st_size - offset:
            raise FormatError("the file ends within the record")
        self._descriptor = descriptor
        self._expected = record.digest
        self._at = offset + record.content_offset
        self._left = record.nbytes
        self._digest = blake3()

    def readable(self) -> bool:
        """Return True, as RawIOBase requires for reading."""
        return True

    def read(self, nbytes: int = -1) -> bytes:
        """Read the next bytes. Raises OSError, and FormatError if the file ends early."""
        count = self._left if nbytes < 0 else min(nbytes, self._left)
        content = bytearray(count)
        read_exactly(self._descriptor, [memoryview(content)], self._at)
        self._at += count
        self._left -= count
        self._digest.update(content)
        return bytes(content)

    def check(self) -> None:
        """Read the rest of the content, and compare the whole content with its digest.

        Raises OSError, and FormatError if they differ or the file ends early.
        """
        while self._left:
            self.read(_CHUNK)
        if self._digest.digest() != self._expected:
            raise FormatError("the content does not match its digest")


@contextmanager
def _named(what: str, remedy: str) -> Iterator[None]:
    """Complete the message of a FormatError. what: damaged thing. remedy: next step."""
    try:
        yield
    except FormatError as error:
        raise FormatError(f"{what}: {error}; {remedy}") from error


def read_metadata(descriptor: int, record: Record, offset: int) -> Metadata:
    """Read a metadata record's content. Raises FormatError."""
    if record.nbytes > MOST_METADATA_BYTES:
        raise FormatError(
            f"the metadata has {record.nbytes} bytes, more than {MOST_METADATA_BYTES}"
        )
    content = RecordContent(descriptor, record, offset)
    whole = content.read()
    content.check()
    return parse_metadata(whole)


class ObjectReader:
    """Reads objects in one thread, and keeps memory for the largest object so far."""

    def __init__(self, descriptor: int, pack_id: bytes) -> None:
        self._descriptor = descriptor
        self._pack_id = pack_id
        self._decoder = Decoder()
        self._scratch = bytearray()

    def read(self, key: bytes, place: RecordPlace, out: memoryview) -> None:
        """Read an object into `out`, which has `place.nbytes` bytes.

        Raises OSError, FormatError if the record is damaged, OtherContentError if only the content
        differs from the digest.
        """
        head_bytes = RECORD_BYTES + len(key)
        stored = place.length - head_bytes
        direct = place.planes == 1 and stored == place.nbytes
        needed = head_bytes + (0 if direct else stored)
        if len(self._scratch) < needed:
            self._scratch = bytearray(needed)
        scratch = memoryview(self._scratch)
        head, content = scratch[:head_bytes], out if direct else scratch[head_bytes:needed]
        read_exactly(self._descriptor, [head, content], place.offset)
        record = parse_record(head, self._pack_id)
        found = RecordPlace.of(record, place.offset)
        if record.kind is not Kind.OBJECT or record.key != key or found != place:
            raise FormatError("the record differs from its index entry")
        if not direct:
            self._decoder.decode(list(_cut(content, record.stored)), out)
        if blake3(out).digest() != place.digest:
            raise OtherContentError("the content does not match its digest")


def _cut(content: memoryview, lengths: Sequence[int]) -> Iterator[memoryview]:
    start = 0
    for length in lengths:
        yield content[start : start + length]
        start += length


def plain_record(kind: Kind, content: bytes) -> Record:
    """Return the record of an index or of metadata."""
    return Record(
        kind=kind,
        key=b"",
        nbytes=len(content),
        stored=(len(content),),
        digest=blake3(content).digest(),
    )


def append_index(
    descriptor: int, pack_id: bytes, entries: pa.Table, metadata: Metadata, at: int
) -> int:
    """Finish a pack durably. Return its size in bytes.

    Index and trailer are written at the offset `at`. The rest of the file is cut off. The records
    are durable before the trailer is written.
    Raises OSError.
    """
    content = write_index(entries, metadata)
    record = plain_record(Kind.INDEX, content)
    end = at + write_all(descriptor, [build_record(record, pack_id), content], at)
    os.ftruncate(descriptor, end)
    os.fdatasync(descriptor)
    end += write_all(descriptor, [build_trailer(at, record.length, pack_id)], end)
    os.fdatasync(descriptor)
    return end
