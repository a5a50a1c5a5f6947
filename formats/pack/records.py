"""Encode and decode the records of a pack file, without file I/O. hcpack(5) documents the form.

    header | record | record | ... | index record | trailer

All numbers are little-endian. A record is a head of fixed size, a key, and planes
(`formats.pack.planes`). The checksum of a record covers its head and key. The digest of a record
covers its content. So records can be recognised without the index.
"""

from __future__ import annotations

import json
import struct
import zlib
from dataclasses import dataclass
from enum import IntEnum

from msgspec import Struct, to_builtins

from hicachectl.formats.documents import parse_json_object
from hicachectl.formats.errors import FormatError, UsageError
from hicachectl.formats.forms import convert
from hicachectl.formats.keys import grammar_of
from hicachectl.formats.pack.planes import PLANE_COUNTS

MAGIC = b"\x89HCPACK\n"
FORM = 1
ID_BYTES = 8
DIGEST_BYTES = 32
MOST_KEY_BYTES = 0xFFFF
MOST_METADATA_BYTES = 4 << 20
MOST_OBJECT_BYTES = 1 << 62
RECORD_MAGIC = b"HCPR"
TRAILER_MAGIC = b"HCPE"

# A checksum follows each of these three structs.
_HEADER = struct.Struct("<8sI4x8s")  # magic, form, id
_RECORD = struct.Struct("<4sBBH8sQq4Q32s")  # see `build_record`
_TRAILER = struct.Struct("<QQ8s")  # offset and length of the index record, id
_SUM = struct.Struct("<I4x")
_TRAILER_END = struct.Struct("<I4s")

HEADER_BYTES = _HEADER.size + _SUM.size
RECORD_BYTES = _RECORD.size + _SUM.size
TRAILER_BYTES = _TRAILER.size + _TRAILER_END.size

_NO_TIME = -(1 << 63)


class Kind(IntEnum):
    """Kinds of records."""

    METADATA = 1
    OBJECT = 2
    INDEX = 3
    WITHDRAWN = 4  # the earlier object of this key is no longer valid


_KINDS = {int(kind): kind for kind in Kind}


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """The head of a record.

    nbytes: size of the content.
    stored: bytes of each plane. A plane of nbytes / len(stored) bytes is raw. A shorter plane is a
        zstd frame.
    digest: BLAKE3 of the content.
    mtime_ns: modification time of the object, Unix nanoseconds; None if it is unknown.
    """

    kind: Kind
    key: bytes
    nbytes: int
    stored: tuple[int, ...]
    digest: bytes
    mtime_ns: int | None = None

    @property
    def content_offset(self) -> int:
        """Bytes from the record's start to its planes."""
        return RECORD_BYTES + len(self.key)

    @property
    def length(self) -> int:
        """Bytes of the whole record."""
        return self.content_offset + sum(self.stored)


class Metadata(Struct, frozen=True, kw_only=True, rename={"version": "hicachectl"}):
    """Content of a pack's metadata record.

    grammar: grammar of the objects' keys (`formats.keys`).
    profile: TOML text; "" without a profile.
    version: release of hicachectl that wrote the pack.
    """

    grammar: str
    profile: str = ""
    version: str = ""


def build_header(pack_id: bytes) -> bytes:
    """Return the header of a file."""
    head = _HEADER.pack(MAGIC, FORM, pack_id)
    return head + _SUM.pack(zlib.crc32(head))


def parse_header(data: bytes) -> bytes:
    """Return the pack's id from a file's header. Raises FormatError."""
    if len(data) < HEADER_BYTES or not data.startswith(MAGIC):
        raise FormatError("not a pack; check the path")
    _, form, pack_id = _HEADER.unpack_from(data)
    if _SUM.unpack_from(data, _HEADER.size)[0] != zlib.crc32(data[: _HEADER.size]):
        raise FormatError("its header is damaged, so no object can be read; write a new pack")
    if form != FORM:
        raise FormatError(
            f"has pack form {form}, but this version reads form {FORM}; use the release that wrote "
            "it"
        )
    return bytes(pack_id)


def build_record(record: Record, pack_id: bytes) -> bytes:
    """Return a record's head and key. In the file, the planes follow."""
    stored = record.stored + (0,) * (max(PLANE_COUNTS) - len(record.stored))
    head = _RECORD.pack(
        RECORD_MAGIC,
        record.kind,
        len(record.stored),
        len(record.key),
        pack_id,
        record.nbytes,
        _NO_TIME if record.mtime_ns is None else record.mtime_ns,
        *stored,
        record.digest,
    )
    return b"".join([head, _SUM.pack(zlib.crc32(record.key, zlib.crc32(head))), record.key])


def key_length(head: bytes | memoryview) -> int:
    """Return the key length that a head of RECORD_BYTES states. The head is not checked."""
    return int(_RECORD.unpack_from(head)[3])


def parse_record(data: bytes | memoryview, pack_id: bytes) -> Record:
    """Parse a record's head and key, not its planes. Raises FormatError."""
    if len(data) < RECORD_BYTES:
        raise FormatError("a record is cut off")
    magic, kind, count, key_bytes, owner, nbytes, mtime_ns, *stored, digest = _RECORD.unpack_from(
        data
    )
    if magic != RECORD_MAGIC or owner != pack_id:
        raise FormatError("no record of this pack begins here")
    key = bytes(data[RECORD_BYTES : RECORD_BYTES + key_bytes])
    if len(key) != key_bytes:
        raise FormatError("a record is cut off")
    checksum = zlib.crc32(key, zlib.crc32(data[: _RECORD.size]))
    if _SUM.unpack_from(data, _RECORD.size)[0] != checksum:
        raise FormatError("the head of a record is damaged")
    if kind not in _KINDS or count not in PLANE_COUNTS or any(stored[count:]):
        raise FormatError(f"a record has an unknown form (kind {kind}, {count} planes)")
    _check_sizes(nbytes, stored[:count])
    return Record(
        kind=_KINDS[kind],
        key=key,
        nbytes=nbytes,
        stored=tuple(stored[:count]),
        digest=digest,
        mtime_ns=None if mtime_ns == _NO_TIME else mtime_ns,
    )


def _check_sizes(nbytes: int, stored: list[int]) -> None:
    if nbytes >= MOST_OBJECT_BYTES or nbytes % len(stored):
        raise FormatError(f"a record cannot have {nbytes} bytes in {len(stored)} planes")
    if max(stored) > nbytes // len(stored):
        raise FormatError(f"a record of {nbytes} bytes cannot have a plane of {max(stored)} bytes")


def build_trailer(index_offset: int, index_length: int, pack_id: bytes) -> bytes:
    """Return the trailer. A file without a trailer is incomplete."""
    head = _TRAILER.pack(index_offset, index_length, pack_id)
    return head + _TRAILER_END.pack(zlib.crc32(head), TRAILER_MAGIC)


def parse_trailer(data: bytes, pack_id: bytes) -> tuple[int, int] | None:
    """Return offset and length of the index record in bytes; None if `data` is not a trailer."""
    if len(data) != TRAILER_BYTES or not data.endswith(TRAILER_MAGIC):
        return None
    offset, length, owner = _TRAILER.unpack_from(data)
    if _TRAILER_END.unpack_from(data, _TRAILER.size)[0] != zlib.crc32(data[: _TRAILER.size]):
        return None
    return (offset, length) if owner == pack_id else None


def build_metadata(metadata: Metadata) -> bytes:
    """Return the content of a metadata record, as JSON."""
    return json.dumps(to_builtins(metadata)).encode()


def parse_metadata(data: bytes | memoryview) -> Metadata:
    """Parse the content of a metadata record. Raises FormatError."""
    source = "its metadata"
    return checked_metadata(convert(parse_json_object(bytes(data), source), Metadata, source))


def checked_metadata(metadata: Metadata) -> Metadata:
    """Return the metadata unchanged. Raises FormatError if the grammar is unknown."""
    try:
        grammar_of(metadata.grammar)
    except UsageError as error:
        raise FormatError(f"names keys that this version cannot read: {error}") from error
    return metadata
