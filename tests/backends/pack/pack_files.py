"""Packs read and written by hand, as hcpack(5) defines them, without the backend's code."""

from __future__ import annotations

import json
import struct
import zlib
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
import zstandard
from blake3 import blake3

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

PACK_ID = b"\x01\x02\x03\x04\x05\x06\x07\x08"
METADATA, OBJECT, INDEX = 1, 2, 3
TRAILER_BYTES = 32
SCHEMA = pa.schema(
    [
        pa.field("key", pa.binary(), nullable=False),
        pa.field("nbytes", pa.int64(), nullable=False),
        pa.field("mtime_ns", pa.int64()),
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("length", pa.int64(), nullable=False),
        pa.field("planes", pa.uint8(), nullable=False),
        pa.field("digest", pa.binary(32), nullable=False),
        pa.field("page", pa.string()),
        *(pa.field(name, pa.string()) for name in ("model", "tag", "pool", "part")),
        *(
            pa.field(f"{axis}_{what}", pa.int32())
            for axis in ("tp", "pp", "cp", "dcp")
            for what in ("rank", "size")
        ),
        *(pa.field(name, pa.string()) for name in ("layers", "heads")),
    ]
)


class Found(NamedTuple):
    """A record found in a file."""

    kind: int
    key: bytes
    content: bytes
    mtime_ns: int
    offset: int
    length: int
    planes: int
    digest: bytes


def header(pack_id: bytes = PACK_ID, form: int = 1) -> bytes:
    head = b"\x89HCPACK\n" + struct.pack("<I", form) + b"\0" * 4 + pack_id
    return head + struct.pack("<I", zlib.crc32(head)) + b"\0" * 4


def record(
    kind: int,
    key: bytes,
    content: bytes,
    *,
    mtime_ns: int = 0,
    planes: list[bytes] | None = None,
    nbytes: int | None = None,
    digest: bytes | None = None,
    pack_id: bytes = PACK_ID,
) -> bytes:
    """Return a record, true or false; fields that are not given follow from the content."""
    planes = [content] if planes is None else planes
    sizes = [len(plane) for plane in planes] + [0] * (4 - len(planes))
    head = b"HCPR" + struct.pack("<BBH", kind, len(planes), len(key)) + pack_id
    head += struct.pack("<Qq4Q", len(content) if nbytes is None else nbytes, mtime_ns, *sizes)
    head += blake3(content).digest() if digest is None else digest
    head += struct.pack("<II", zlib.crc32(head + key), 0)
    return head + key + b"".join(planes)


def metadata(grammar: str = "file", profile: str = "") -> bytes:
    document = {"grammar": grammar, "profile": profile, "hicachectl": "0"}
    return record(METADATA, b"", json.dumps(document).encode())


def trailer(offset: int, length: int, pack_id: bytes = PACK_ID) -> bytes:
    head = struct.pack("<QQ", offset, length) + pack_id
    return head + struct.pack("<I", zlib.crc32(head)) + b"HCPE"


def index(rows: Iterable[dict[str, Any]], grammar: str = "file", profile: str = "") -> bytes:
    """Return an Arrow stream with the columns of an index; fields missing in a row are null."""
    schema = SCHEMA.with_metadata(
        {
            "hicachectl.pack": "1",
            "hicachectl.grammar": grammar,
            "hicachectl.profile": profile,
            "hicachectl.version": "0",
        }
    )
    table = pa.Table.from_pylist(list(rows), schema=schema)
    stream = pa.BufferOutputStream()
    with pa.ipc.new_stream(stream, schema) as writer:
        writer.write_table(table)
    written: bytes = stream.getvalue().to_pybytes()
    return written


def row_of(found: Found) -> dict[str, Any]:
    return {
        "key": found.key,
        "nbytes": len(found.content),
        "mtime_ns": found.mtime_ns,
        "offset": found.offset,
        "length": found.length,
        "planes": found.planes,
        "digest": found.digest,
    }


def finish(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Append an index of these rows, and the trailer."""
    data = path.read_bytes()
    entry = record(INDEX, b"", index(rows))
    path.write_bytes(data + entry + trailer(len(data), len(entry)))


def build(path: Path, objects: dict[bytes, bytes]) -> None:
    """Write a whole pack of raw objects."""
    path.write_bytes(
        header() + metadata() + b"".join(record(OBJECT, k, v) for k, v in objects.items())
    )
    finish(path, [row_of(found) for found in records(path) if found.kind == OBJECT])


def records(path: Path) -> list[Found]:
    """Return every record of an undamaged file, in order."""
    data = path.read_bytes()
    found, at = [], 32
    while at < len(data):
        if data[at : at + 4] != b"HCPR":
            at += TRAILER_BYTES
            continue
        kind, count, key_bytes = struct.unpack_from("<BBH", data, at + 4)
        nbytes, mtime_ns, *sizes = struct.unpack_from("<Qq4Q", data, at + 16)
        start = at + 104 + key_bytes
        planes = []
        for size in sizes[:count]:
            planes.append(_plane(data[start : start + size], nbytes // count))
            start += size
        content = bytearray(nbytes)
        for number, plane in enumerate(planes):
            content[number::count] = plane
        key = data[at + 104 : at + 104 + key_bytes]
        digest = data[at + 64 : at + 96]
        assert blake3(bytes(content)).digest() == digest
        found.append(Found(kind, key, bytes(content), mtime_ns, at, start - at, count, digest))
        at = start
    return found


def _plane(stored: bytes, size: int) -> bytes:
    if len(stored) == size:
        return stored
    return zstandard.ZstdDecompressor().decompress(stored, max_output_size=size)


def indexed(path: Path) -> dict[bytes, dict[str, Any]]:
    """Return the rows of the file's last index by key, none without an index."""
    data = path.read_bytes()
    if data[-4:] != b"HCPE":
        return {}
    offset, length = struct.unpack_from("<QQ", data, len(data) - TRAILER_BYTES)
    content = data[offset + 104 : offset + length]
    return {row["key"]: row for row in pa.ipc.open_stream(content).read_all().to_pylist()}
