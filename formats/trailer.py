"""Trailers, the 128 bytes after an object's bytes in a file, which describe the object.

SGLang's HiCacheFile reads only the object's bytes, so it reads a file with a trailer like its own
files (hicache_storage.py :: HiCacheFile.get).

    offset  bytes
         0      8  magic
         8      1  version of this form: 1
         9      1  digest kind: 0 none, 1 xxh3_128, 2 blake3
        10      2  rank that has these bytes (`trailer_rank`); 0 if not stated (older trailers)
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
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from hicachectl.formats.errors import FormatError, UsageError
from hicachectl.formats.wording import not_one_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from hicachectl.formats.objects import Shard

    Buffer = bytes | bytearray | memoryview

TRAILER_BYTES = 128
IDENTITY_BYTES = 16
DIGEST_KINDS = ("off", "xxh3", "blake3")  # a trailer has the index of its kind
DEFAULT_DIGEST = "xxh3"
NO_RANK = 0  # the rank in trailers that name no rank

_MAGIC = b"\x93HICACHE"
_VERSION = 1
_FORM = struct.Struct("<8sBBHIQ32s32s16s24s")
_CHECKSUM = struct.Struct("<I")
_NAME_BYTES = 24
_DIGEST_BYTES = {"off": 0, "xxh3": 16, "blake3": 32}
_KIND_AT, _CHECKSUM_AT, _NBYTES_AT, _DIGEST_AT, _PAGE_AT = 9, 12, 16, 24, 56  # places in a trailer
_RANK_BITS, _TP_BITS = 10, 6
_LONG_NAME = b"\xff"  # first byte of a hashed name; no UTF-8 text starts with it


class Trailer(NamedTuple):
    """The description of an object in its trailer.

    digest_kind: one of DIGEST_KINDS.
    digest: 32 bytes, zero-padded.
    nbytes: size of the object, without the trailer.
    page: the 32 bytes of the page hash.
    identity: the 16 bytes of the identity's hash.
    name: the 24 bytes of `trailer_name`.
    rank: result of `trailer_rank`.
    """

    digest_kind: str
    digest: bytes
    nbytes: int
    page: bytes
    identity: bytes
    name: bytes
    rank: int = NO_RANK


class Expected(NamedTuple):
    """The values that trailers of a pool's objects must state.

    names: possible names, from `trailer_name`; if empty, every name and rank is possible.
    ranks: possible ranks, from `trailer_rank`. Trailers that name no rank are accepted, too.
    identity: the 16 bytes of the identity's hash; None allows any identity.
    """

    names: frozenset[bytes]
    ranks: frozenset[int]
    identity: bytes | None = None

    def difference(self, trailer: Trailer, nbytes: int, page: bytes) -> str:
        """Return the first field of a trailer with an unexpected value; "" if there is none.

        "nbytes", "page" and "name" show damage; "identity" and "rank" show another writer.

        nbytes: size of the object.
        page: the 32 bytes of its page hash.
        """
        if trailer.nbytes != nbytes:
            return "nbytes"
        if trailer.page != page:
            return "page"
        if self.names and trailer.name not in self.names:
            return "name"
        if self.identity not in (None, trailer.identity):
            return "identity"
        return "" if self.has_rank(trailer) else "rank"

    def has_rank(self, trailer: Trailer) -> bool:
        """Return whether a trailer names a possible rank, or no rank."""
        return trailer.rank == NO_RANK or not self.names or trailer.rank in self.ranks


def trailer_name(pool: str, part: str | None = None) -> bytes:
    """Return the 24 bytes that name a pool, or a part of it, in a trailer."""
    text = (pool if part is None else f"{pool}.{part}").encode()
    if len(text) <= _NAME_BYTES:
        return text.ljust(_NAME_BYTES, b"\0")
    return _LONG_NAME + hashlib.blake2b(text, digest_size=_NAME_BYTES - 1).digest()


def trailer_rank(shard: Shard) -> int:
    """Return the number that names a rank and its TP size in trailers: 16 bits.

    The number encodes the ranks that the object's key states. It is NO_RANK in these cases:
    - The deployment has more than 1,022 ranks.
    - The key states a rank without the number of ranks.
    - The key names layers in place of ranks (unified keys).
    """
    if shard.layers is not None:
        return NO_RANK
    number, ranks = 0, 1
    # An axis that the key does not state counts as rank 0 of 1.
    for rank, size in (
        (shard.dcp_rank, shard.dcp_size),
        (shard.cp_rank, shard.cp_size),
        (shard.pp_rank, shard.pp_size),
        (shard.tp_rank, shard.tp_size),
    ):
        if rank is not None:
            if size is None:
                return NO_RANK
            number, ranks = number * size + rank, ranks * size
    # The number plus 1 must fit into _RANK_BITS bits. 1 is added, because 0 is NO_RANK.
    if ranks >= (1 << _RANK_BITS) - 1:
        return NO_RANK
    tp_size = (1 if shard.tp_rank is None else shard.tp_size) or 1
    return 1 + number | (tp_size if tp_size < 1 << _TP_BITS else 0) << _RANK_BITS


def rank_text(rank: int) -> str:
    """Return the rank in a trailer as text, such as `rank 1 (tp 2)`.

    rank: number other than NO_RANK.
    """
    number, tp_size = (rank & (1 << _RANK_BITS) - 1) - 1, rank >> _RANK_BITS
    return f"rank {number} (tp {tp_size or f'{1 << _TP_BITS} or more'})"


def digest_text(kind: str, digest: bytes) -> str | None:
    """Return a trailer's digest as text, such as `xxh3:<hex>`; None without a digest.

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
            trailer.rank,
            0,
            trailer.nbytes,
            trailer.digest,
            trailer.page,
            trailer.identity,
            trailer.name,
        )
    )
    _CHECKSUM.pack_into(data, _CHECKSUM_AT, zlib.crc32(data))
    return bytes(data)


def parse_trailer(data: Buffer) -> Trailer | None:
    """Return the trailer in 128 bytes; None if the bytes are not a trailer.

    Raises FormatError for a trailer that is damaged or of an unknown form.
    """
    if len(data) != TRAILER_BYTES or bytes(data[: len(_MAGIC)]) != _MAGIC:
        return None
    _, version, kind, rank, checksum, nbytes, digest, page, identity, name = _FORM.unpack(data)
    zeroed = bytearray(data)
    _CHECKSUM.pack_into(zeroed, _CHECKSUM_AT, 0)
    if zlib.crc32(zeroed) != checksum:
        raise FormatError("The trailer is damaged: its checksum differs")
    if version != _VERSION or kind >= len(DIGEST_KINDS):
        raise FormatError(
            f"The trailer has form {version} with digest kind {kind}, which this release does not "
            "know; use a newer hicachectl"
        )
    return Trailer(DIGEST_KINDS[kind], digest, nbytes, page, identity, name, rank)


class PoolTrailers:
    """The trailers of one pool, which differ in page and digest only.

    This class is faster than `dump_trailer` and `parse_trailer`, for a server that handles many
    small pages.
    """

    def __init__(
        self, digest_kind: str, nbytes: int, identity: bytes, name: bytes, rank: int = NO_RANK
    ) -> None:
        """Describe the trailers, with values of `Trailer`."""
        one = dump_trailer(Trailer(digest_kind, bytes(32), nbytes, bytes(32), identity, name, rank))
        self._head, self._nbytes = one[:_CHECKSUM_AT], one[_NBYTES_AT:_DIGEST_AT]
        self._tail = identity + name
        self._checksum = zlib.crc32(self._head + bytes(_CHECKSUM.size))

    def dump(self, page: bytes, digest: bytes) -> bytes:
        """Return the 128 bytes of a page's trailer.

        page: the 32 bytes of its page hash.
        digest: 32 bytes, zero-padded.
        """
        rest = b"".join((self._nbytes, digest, page, self._tail))
        checksum = zlib.crc32(rest, self._checksum).to_bytes(_CHECKSUM.size, "little")
        return b"".join((self._head, checksum, rest))

    def digest(self, data: bytes, page: bytes) -> bytes | None:
        """Return the digest in `data`; None if `data` is not a trailer of this pool and page."""
        digest = data[_DIGEST_AT:_PAGE_AT]
        return digest if data == self.dump(page, digest) else None


@cache
def digest_function(kind: str) -> Callable[[Iterable[Buffer]], bytes]:
    """Return the function that digests an object, given as buffers in order, to 32 bytes.

    kind: one of DIGEST_KINDS; "off" gives zeros.
    Raises UsageError for another kind.
    """
    if kind == "off":
        return lambda _: bytes(32)
    begin: Callable[[], Any]
    if kind == "xxh3":
        from xxhash import xxh3_128

        begin = xxh3_128
    elif kind == "blake3":
        from blake3 import blake3

        begin = blake3
    else:
        raise UsageError(not_one_of("digest", kind, DIGEST_KINDS))

    def digest(buffers: Iterable[Buffer]) -> bytes:
        state = begin()
        for buffer in buffers:
            state.update(buffer)
        found: bytes = state.digest()
        return found.ljust(32, b"\0")

    return digest
