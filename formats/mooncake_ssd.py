"""Parse files of Mooncake's SSD tier. They are metadata of buckets and offset files, and records.

Metadata is struct_pb, the wire format of Protocol Buffers. Fields are numbered in the order of the
struct. A field with the value 0 is left out. All integers of records and allocators are little
endian.
Source: Mooncake 0.3.13, mooncake-store: include/storage_backend.h :: BucketMetadata,
OffsetAllocatorPersistedMetadata, RecordHeader; include/offset_allocator/offset_allocator.h ::
OffsetAllocator::serialize_to; include/tenant_id.h :: TenantId::MakeScopedKey.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from hicachectl.formats.errors import FormatError, UnsupportedByBackend

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from hicachectl.formats.arrays import IntArray


DEFAULT_TENANT = "default"
# Separates the tenant from the key in a stored key. Older releases store no tenant.
TENANT_END = b"\0"
OFFSET_VERSION = 3
VALUE_ALIGNMENT = 4096  # a value begins at a multiple of these bytes within its record
MAX_RECORD_KEY_BYTES = 1 << 20
RECORD = np.dtype(
    [
        ("key_bytes", "<u4"),
        ("value_bytes", "<u4"),
        ("sequence", "<u8"),
        ("flags", "<u4"),
        ("crc", "<u4"),
    ]
)

_MAX_BYTES = 1 << 60  # no file is larger, and sums of a few sizes fit int64
_MAX_NODES = 1 << 24  # Mooncake has the same bound
_MAX_BUCKET_KEYS = 1 << 18  # Mooncake's default is 500
_BUCKET_FIELDS = {0x08: "data_size", 0x12: "keys", 0x1A: "metadatas"}
_OFFSET_FIELDS = {
    0x08: "version",
    0x12: "allocator_state",
    0x18: "insert_seq",
    0x22: "fifo_entries",
    0x2A: "evicted_keys_this_batch",
}
# Fields: base, multiplier_bits, capacity, allocated_size, allocated_num; size, current_capacity,
# max_capacity, free_storage, used_bins_top; used bins, bin indices; free_offset.
_ALLOCATOR = struct.Struct("<5Q5I32x1024xI")
_NODE = np.dtype(
    {
        "names": ["offset", "size", "used"],
        "formats": ["<u4", "<u4", "u1"],
        "offsets": [0, 4, 24],
        "itemsize": 28,
    }
)
_FREE_NODE_BYTES = 4
_HAS_CRC = 1
_CRC_AT = RECORD.itemsize - 4


@dataclass(frozen=True, slots=True)
class BucketMeta:
    """Objects of a bucket. An object is the bytes of its stored key, followed by its value.

    keys: [n] stored keys, with the tenant.
    starts: [n] int64, positions of the keys, in bytes from the start of the bucket.
    sizes: [n] int64, bytes of the value.
    """

    keys: list[bytes]
    starts: IntArray
    sizes: IntArray


@dataclass(frozen=True, slots=True)
class OffsetMeta:
    """A checkpoint of an offset file, with the extents that had records.

    starts, sizes: [n] int64, bytes in the data file.
    sequence: number of the first record after the checkpoint.
    evicted: stored keys whose records are no longer valid.
    """

    starts: IntArray
    sizes: IntArray
    sequence: int
    evicted: frozenset[bytes]


def parse_bucket_meta(data: bytes, source: str) -> BucketMeta:
    """Parse the `.meta` file of a bucket. Raises FormatError, which starts with `source`."""
    total, keys, messages = 0, [], []
    for name, number, content in _fields(data, _BUCKET_FIELDS, source):
        if name == "data_size":
            total = number
        elif name == "keys":
            keys.append(bytes(content))
        else:
            messages.append(content)
        if max(len(keys), len(messages)) > _MAX_BUCKET_KEYS:
            raise FormatError(f"{source}: more than {_MAX_BUCKET_KEYS} objects in one bucket")
    if not keys or len(keys) != len(messages):
        raise FormatError(f"{source}: {len(keys)} keys, but places of {len(messages)} objects")
    places = _rows_of_numbers(messages, 3, source)
    starts, key_sizes, sizes = places.T
    if (key_sizes != [len(key) for key in keys]).any():
        raise FormatError(f"{source}: a key does not have the stated number of bytes")
    if total > _MAX_BYTES or (places > total).any() or (places.sum(axis=1) > total).any():
        raise FormatError(f"{source}: an object ends beyond the {total} bytes of the bucket")
    return BucketMeta(keys, starts, sizes)


def parse_offset_meta(data: bytes, source: str) -> OffsetMeta:
    """Parse a `kv_cache.meta` file.

    Raises FormatError for damage, UnsupportedByBackend for another version. Both messages start
    with `source`.
    """
    version, sequence, state, evicted = 0, 0, memoryview(b""), set()
    for name, number, content in _fields(data, _OFFSET_FIELDS, source):
        if name == "version":
            version = number
        elif name == "insert_seq":
            sequence = number
        elif name == "allocator_state":
            state = content
        elif name == "evicted_keys_this_batch":
            evicted.add(bytes(content))
    if not version:
        raise FormatError(f"{source}: states no version, so the file is cut off or damaged")
    if version != OFFSET_VERSION:
        raise UnsupportedByBackend(
            f"{source}: version {version} of Mooncake's offset files, but only version "
            f"{OFFSET_VERSION} is read; name the mooncake:// store of its master"
        )
    return OffsetMeta(*_used_extents(state, source), sequence, frozenset(evicted))


def parse_records(heads: bytes) -> npt.NDArray[np.void]:
    """Return the fields of consecutive record headers: [n] RECORD."""
    return np.frombuffer(heads, dtype=RECORD)


def are_records(records: npt.NDArray[np.void], extents: IntArray) -> npt.NDArray[np.bool_]:
    """Return which headers are possible in their extents: [n] bool.

    extents: [n] int64, bytes from the start of each record to the end of its extent.
    """
    key_bytes = records["key_bytes"].astype(np.int64)
    ends = value_starts(key_bytes) + records["value_bytes"]
    known = (records["flags"] & ~np.uint32(_HAS_CRC)) == 0
    sound: npt.NDArray[np.bool_] = (
        known & (key_bytes > 0) & (key_bytes <= MAX_RECORD_KEY_BYTES) & (ends <= extents)
    )
    return sound


def value_starts(key_bytes: IntArray) -> IntArray:
    """Return where values start, in bytes from the start of their records: [n] int64."""
    return -(-(RECORD.itemsize + key_bytes) // VALUE_ALIGNMENT) * VALUE_ALIGNMENT


def has_crc(head: bytes | bytearray) -> bool:
    """Return whether a record states a CRC. head: first bytes of the record, with its header."""
    return bool(parse_records(bytes(head[: RECORD.itemsize]))[0]["flags"] & _HAS_CRC)


def record_problem(
    head: bytes, value: memoryview, stored: Collection[bytes], sequence: int
) -> tuple[str, bool]:
    """Compare a record with its listing.

    head: bytes of the record before its value.
    stored: the possible stored keys.
    Returns the problem, or "" without a problem, and whether the problem is the CRC.
    """
    record = parse_records(head[: RECORD.itemsize])[0]
    key = head[RECORD.itemsize : RECORD.itemsize + int(record["key_bytes"])]
    if key not in stored or int(record["value_bytes"]) != len(value):
        return "has another key or size than listed", False
    if int(record["sequence"]) != sequence:
        return "has another sequence number than listed", False
    if int(record["flags"]) & _HAS_CRC:
        import google_crc32c  # late, because most stores have no offset files

        crc = google_crc32c.value(head[:_CRC_AT] + key)
        crc = google_crc32c.extend(crc, np.frombuffer(value, dtype=np.uint8))
        if crc != int(record["crc"]):
            return "has another CRC-32C than its bytes", True
    return "", False


def _fields(
    data: bytes, names: Mapping[int, str], source: str
) -> Iterator[tuple[str, int, memoryview]]:
    """Yield name, number and content of each field.

    For a field with a number, the content is empty. For a field with bytes, the number is 0.
    names: names of fields by their tags. A tag is a byte with the number of the field and its wire
        type, which is 0 for a number and 2 for bytes.
    """
    view, at, nothing = memoryview(data), 0, memoryview(b"")
    while at < len(view):
        tag = view[at]
        if tag not in names:
            raise FormatError(
                f"{source}: unknown field {tag >> 3} at byte {at}; the file is damaged or of a "
                "newer Mooncake"
            )
        number, at = _number(view, at + 1, source)
        if tag & 7 == 0:
            yield names[tag], number, nothing
        else:
            if number > len(view) - at:
                raise FormatError(f"{source}: cut off at byte {len(view)}, in {names[tag]}")
            yield names[tag], 0, view[at : at + number]
            at += number


def _number(view: memoryview, at: int, source: str) -> tuple[int, int]:
    """Return the varint at a place, and the place after the varint."""
    number = 0
    for place, byte in enumerate(view[at : at + 10]):
        number |= (byte & 0x7F) << 7 * place
        if byte < 0x80 and number < 1 << 64:
            return number, at + place + 1
    raise FormatError(f"{source}: no end of the number at byte {at} within 64 bits")


def _rows_of_numbers(messages: Sequence[memoryview], columns: int, source: str) -> IntArray:
    """Return the numbers of messages as rows: [n, columns] int64.

    Raises FormatError if a message has anything but numbers below 2**63.
    """
    rows = np.zeros((len(messages), columns), dtype=np.int64)
    data = np.frombuffer(b"".join(messages), dtype=np.uint8)
    message_ends = np.cumsum([len(message) for message in messages])
    ends = np.flatnonzero(data < 0x80) + 1
    starts = np.concatenate([[0], ends[:-1]]) if len(ends) else ends
    widths = ends - starts
    if not np.isin(message_ends[message_ends > 0], ends).all() or (widths > 9).any():
        raise FormatError(f"{source}: the place of an object is not a number below 2**63")
    if not len(data):
        return rows
    shifts = 7 * (np.arange(len(data)) - np.repeat(starts, widths))
    numbers = np.add.reduceat((data & 0x7F).astype(np.int64) << shifts, starts)
    message = np.searchsorted(message_ends, starts, side="right")
    paired = len(numbers) % 2 == 0 and (message[::2] == message[1::2]).all()
    fields = (numbers[::2] >> 3) - 1
    if not paired or (numbers[::2] & 7).any() or ((fields < 0) | (fields >= columns)).any():
        raise FormatError(f"{source}: unknown fields in the place of an object")
    rows[message[::2], fields] = numbers[1::2]
    return rows


def _used_extents(state: memoryview, source: str) -> tuple[IntArray, IntArray]:
    """Return starts and sizes of the extents that a serialized allocator has given away."""
    if len(state) < _ALLOCATOR.size:
        raise FormatError(f"{source}: {len(state)} bytes of allocator state are too few")
    base, shift, capacity, _, _, _, count, *_ = _ALLOCATOR.unpack_from(state)
    length = _ALLOCATOR.size + count * (_NODE.itemsize + _FREE_NODE_BYTES)
    if shift >= 32 or not 0 < capacity <= _MAX_BYTES or count > _MAX_NODES or len(state) != length:
        raise FormatError(
            f"{source}: an allocator of {capacity} bytes, {count} nodes and {len(state)} bytes of "
            "state is not possible"
        )
    nodes = np.frombuffer(state, dtype=_NODE, count=count, offset=_ALLOCATOR.size)
    used = nodes[nodes["used"] != 0]
    starts, sizes = (
        used[name].astype(np.uint64) << np.uint64(shift) for name in ("offset", "size")
    )
    room = capacity - min(base, capacity)
    if (starts + sizes > room).any():  # each start and size is below 2**63, so the sums do not wrap
        raise FormatError(f"{source}: an extent ends beyond the capacity of {capacity} bytes")
    order = np.argsort(starts)
    if ((starts + sizes)[order][:-1] > starts[order][1:]).any():
        # Otherwise many extents could contain one record, and copies of its key could fill the
        # memory.
        raise FormatError(f"{source}: two extents overlap")
    return starts.astype(np.int64) + base, sizes.astype(np.int64)
