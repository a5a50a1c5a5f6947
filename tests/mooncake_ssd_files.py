"""Write Mooncake's SSD files, after its source, in any form and with any damage.

`tests/conformance/test_mooncake_ssd.py` reads what a real client wrote.
Source: Mooncake 0.3.13, mooncake-store/src/storage_backend.cpp ::
BucketStorageBackend::BuildBucket, OffsetAllocatorStorageBackend::BatchOffload and
SaveMetadata; struct_pb.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import google_crc32c

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

TENANT = b"default\0"
VALUE_ALIGNMENT = 4096
_NODES = 64


def number(value: int) -> bytes:
    """Return a varint."""
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*parts, value])


def numbers(*values: int) -> bytes:
    """Return a message of numbers, without the zeros."""
    return b"".join(
        number(place << 3) + number(value) for place, value in enumerate(values, 1) if value
    )


def text(place: int, content: bytes) -> bytes:
    """Return a field of bytes."""
    return number(place << 3 | 2) + number(len(content)) + content


def bucket_meta(keys: Sequence[bytes], sizes: Sequence[int]) -> bytes:
    """Return the `.meta` file of objects that follow one another, with their keys as stored."""
    starts, end = [], 0
    for key, size in zip(keys, sizes, strict=True):
        starts.append(end)
        end += len(key) + size
    places = zip(starts, map(len, keys), sizes, strict=True)
    return b"".join(
        [
            numbers(end),
            *(text(2, key) for key in keys),
            *(text(3, numbers(*place)) for place in places),
        ]
    )


def put_bucket(
    directory: Path, id_: int, objects: Mapping[bytes, bytes], *, tenant: bytes = TENANT
) -> Path:
    """Write a bucket and its `.meta`. Return the bucket's path."""
    stored = {tenant + key: value for key, value in objects.items()}
    path = directory / f"{id_}.bucket"
    path.write_bytes(b"".join(key + value for key, value in stored.items()))
    meta = bucket_meta(list(stored), [len(value) for value in stored.values()])
    path.with_suffix(".meta").write_bytes(meta)
    return path


@dataclass(frozen=True, slots=True)
class Record:
    """A record of an offset file.

    key: key as stored.
    crc: whether the record states a CRC.
    """

    key: bytes
    value: bytes
    start: int
    sequence: int
    crc: bool = True

    @property
    def content(self) -> bytes:
        """Bytes of the record."""
        prefix = struct.pack("<IIQI", len(self.key), len(self.value), self.sequence, self.crc)
        crc = google_crc32c.value(prefix + self.key + self.value) if self.crc else 0
        head = prefix + struct.pack("<I", crc) + self.key
        return head + bytes(-len(head) % VALUE_ALIGNMENT) + self.value


def allocator_state(
    extents: Sequence[tuple[int, int]], capacity: int, nodes: int = _NODES, shift: int = 0
) -> bytes:
    """Return a serialized OffsetAllocator whose used nodes are the extents."""
    head = struct.pack("<5Q5I", 0, shift, capacity, 0, len(extents), capacity >> shift, nodes,
                       nodes, 0, 0)  # fmt: skip
    table = [(start >> shift, size >> shift, 1) for start, size in extents]
    table += [(0, 0, 0)] * (nodes - len(table))
    packed = b"".join(struct.pack("<II16xB3x", *node) for node in table)
    return head + bytes(32 + 1024 + 4) + packed + bytes(4 * nodes)


def offset_meta(
    extents: Sequence[tuple[int, int]],
    sequence: int,
    *,
    capacity: int = 1 << 20,
    version: int = 3,
    evicted: Sequence[bytes] = (),
) -> bytes:
    """Return a `kv_cache.meta` file."""
    state = allocator_state(extents, capacity)
    fifo = text(4, numbers(7) + text(2, b"any key"))
    return b"".join(
        [
            numbers(version),
            text(2, state),
            number(3 << 3) + number(sequence),
            fifo,
            *(text(5, key) for key in evicted),
        ]
    )


def put_offset_files(
    directory: Path, records: Sequence[Record], *, sequence: int = 1 << 20, capacity: int = 1 << 20
) -> Path:
    """Write `kv_cache.data` and `kv_cache.meta`. Return the data file's path."""
    data = bytearray(capacity)
    for record in records:
        data[record.start : record.start + len(record.content)] = record.content
    path = directory / "kv_cache.data"
    for file, content in (
        (path, bytes(data)),
        (
            directory / "kv_cache.meta",
            offset_meta(
                [(record.start, len(record.content)) for record in records],
                sequence,
                capacity=capacity,
            ),
        ),
    ):
        (directory / "new").write_bytes(content)
        (directory / "new").rename(file)  # a new inode, as each write of a client is a new time
    return path
