"""Trailers: 128 bytes after an object's bytes in a file store, which say what the bytes are.

SGLang's HiCacheFile reads an object's bytes only, so it reads such a file like its own
(hicache_storage.py :: HiCacheFile.get).

    offset  bytes
         0      8  magic
         8      1  version of this form: 1
         9      1  digest kind: 0 none, 1 xxh3_128, 2 blake3
        10      2  zero
        12      4  CRC-32 of the trailer, with these four bytes zero
        16      8  bytes of the object, without the trailer
        24     32  digest of the object's bytes, zeros after it
        56     32  page hash
        88     16  identity (`formats.identity`)
       104     24  pool, or pool.part: text, or a hash of longer text

Numbers are little endian.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from typing import TYPE_CHECKING, NamedTuple

from hicachectl.formats.errors import FormatError, UsageError
from hicachectl.formats.wording import not_one_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    Buffer = bytes | bytearray | memoryview

TRAILER_BYTES = 128
IDENTITY_BYTES = 16
KIND_AT, CHECKSUM_AT, DIGEST_AT, PAGE_AT = 9, 12, 24, 56  # offsets in a trailer
DIGEST_KINDS = ("off", "xxh3", "blake3")  # by number in the trailer
DEFAULT_DIGEST = "xxh3"

_MAGIC = b"\x93HICACHE"
_VERSION = 1
_FORM = struct.Struct("<8sBBHIQ32s32s16s24s")
_CHECKSUM = struct.Struct("<I")
_NAME_BYTES = 24
_DIGEST_BYTES = {"off": 0, "xxh3": 16, "blake3": 32}
_LONG_NAME = b"\xff"  # first byte of a hashed name; no UTF-8 text starts with it


class Trailer(NamedTuple):
    """What a trailer says of an object.

    digest_kind: one of DIGEST_KINDS. digest: 32 bytes, zero-padded. nbytes: of the object, without
    the trailer. page: the 32 bytes of the page hash. identity: 16 bytes. name: 24 bytes, from
    `trailer_name`.
    """

    digest_kind: str
    digest: bytes
    nbytes: int
    page: bytes
    identity: bytes
    name: bytes


def trailer_name(pool: str, part: str | None = None) -> bytes:
    """Return the 24 bytes that name a pool, or a part of it, in a trailer."""
    text = (pool if part is None else f"{pool}.{part}").encode()
    if len(text) <= _NAME_BYTES:
        return text.ljust(_NAME_BYTES, b"\0")
    return _LONG_NAME + hashlib.blake2b(text, digest_size=_NAME_BYTES - 1).digest()


def digest_text(kind: str, digest: bytes) -> str | None:
    """Return a trailer's digest in words, as `xxh3:<hex>`; None without a digest.

    digest: 32 bytes, zero-padded.
    """
    used = _DIGEST_BYTES[kind]
    return f"{kind}:{digest[:used].hex()}" if used else None


def dump_trailer(trailer: Trailer) -> bytes:
    """Return the 128 bytes of a trailer; inverse of `parse_trailer`."""
    data = bytearray(
        _FORM.pack(
            _MAGIC,
            _VERSION,
            DIGEST_KINDS.index(trailer.digest_kind),
            0,
            0,
            trailer.nbytes,
            trailer.digest,
            trailer.page,
            trailer.identity,
            trailer.name,
        )
    )
    _CHECKSUM.pack_into(data, CHECKSUM_AT, zlib.crc32(data))
    return bytes(data)


def parse_trailer(data: Buffer) -> Trailer | None:
    """Return the trailer in 128 bytes; None if they are none.

    Raises FormatError for a trailer that is damaged or of an unknown form.
    """
    if len(data) != TRAILER_BYTES or bytes(data[: len(_MAGIC)]) != _MAGIC:
        return None
    _, version, kind, _, checksum, nbytes, digest, page, identity, name = _FORM.unpack(data)
    zeroed = bytearray(data)
    _CHECKSUM.pack_into(zeroed, CHECKSUM_AT, 0)
    if zlib.crc32(zeroed) != checksum:
        raise FormatError("The trailer is damaged: its checksum differs")
    if version != _VERSION or kind >= len(DIGEST_KINDS):
        raise FormatError(
            f"The trailer has form {version} with digest kind {kind}, which this release does not "
            "know; use a newer hicachectl"
        )
    return Trailer(DIGEST_KINDS[kind], digest, nbytes, page, identity, name)


def digest_function(kind: str) -> Callable[[Iterable[Buffer]], bytes]:
    """Return the function from an object's buffers, in order, to its 32 bytes of digest.

    kind: one of DIGEST_KINDS; "off" gives zeros. Raises UsageError for another kind.
    """
    if kind not in DIGEST_KINDS:
        raise UsageError(not_one_of("digest", kind, DIGEST_KINDS))
    return _DIGESTS[kind]


def _no_digest(buffers: Iterable[Buffer]) -> bytes:
    return bytes(32)


def _xxh3(buffers: Iterable[Buffer]) -> bytes:
    from xxhash import xxh3_128

    state = xxh3_128()
    for buffer in buffers:
        state.update(buffer)
    digest: bytes = state.digest()
    return digest.ljust(32, b"\0")


def _blake3(buffers: Iterable[Buffer]) -> bytes:
    from blake3 import blake3

    state = blake3()
    for buffer in buffers:
        state.update(buffer)
    digest: bytes = state.digest()
    return digest


_DIGESTS = {"off": _no_digest, "xxh3": _xxh3, "blake3": _blake3}
