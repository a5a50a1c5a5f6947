"""Trailers survive a round trip, and damage to any byte shows."""

from __future__ import annotations

import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicachectl.formats.errors import FormatError, UsageError
from hicachectl.formats.trailer import (
    DIGEST_KINDS,
    TRAILER_BYTES,
    PoolTrailers,
    Trailer,
    digest_function,
    dump_trailer,
    parse_trailer,
    trailer_name,
)

TRAILERS = st.builds(
    Trailer,
    digest_kind=st.sampled_from(DIGEST_KINDS),
    digest=st.binary(min_size=32, max_size=32),
    nbytes=st.integers(0, 2**64 - 1),
    page=st.binary(min_size=32, max_size=32),
    identity=st.binary(min_size=16, max_size=16),
    name=st.text(max_size=40).map(trailer_name),
)


@given(TRAILERS)
def test_round_trip(trailer: Trailer) -> None:
    data = dump_trailer(trailer)
    assert len(data) == TRAILER_BYTES
    assert parse_trailer(data) == trailer


@given(TRAILERS, st.integers(0, TRAILER_BYTES * 8 - 1))
def test_one_flipped_bit_is_no_trailer_or_damage(trailer: Trailer, bit: int) -> None:
    data = bytearray(dump_trailer(trailer))
    data[bit // 8] ^= 1 << bit % 8
    if bit < 64:  # the magic
        assert parse_trailer(data) is None
    else:
        with pytest.raises(FormatError, match="trailer"):
            parse_trailer(data)


@pytest.mark.parametrize(("version", "kind"), [(2, 0), (1, 3)])
def test_a_trailer_of_a_later_release_says_what_to_use(version: int, kind: int) -> None:
    name = trailer_name("kv")
    data = bytearray(dump_trailer(Trailer("off", bytes(32), 8, bytes(32), bytes(16), name)))
    data[8:10], data[12:16] = bytes((version, kind)), bytes(4)
    data[12:16] = zlib.crc32(data).to_bytes(4, "little")
    with pytest.raises(FormatError) as refused:
        parse_trailer(data)
    assert str(refused.value) == (
        f"The trailer has form {version} with digest kind {kind}, which this release does not "
        "know; use a newer hicachectl"
    )


@given(TRAILERS, st.integers(0, TRAILER_BYTES * 8 - 1))
def test_a_pool_knows_its_own_trailers_only(trailer: Trailer, bit: int) -> None:
    kind, digest, nbytes, page, identity, name = trailer
    trailers = PoolTrailers(kind, nbytes, identity, name)
    data = trailers.dump(page, digest)
    assert data == dump_trailer(trailer)
    assert trailers.digest(data, page) == digest
    flipped = bytearray(data)
    flipped[bit // 8] ^= 1 << bit % 8
    for other in (bytes(flipped), data[:-1], data + b"\0", b""):
        assert trailers.digest(other, page) is None
    assert trailers.digest(data, bytes(byte ^ 1 for byte in page)) is None


@given(st.binary(max_size=300))
def test_other_bytes_are_no_trailer(data: bytes) -> None:
    assert parse_trailer(data) is None


def test_long_names_differ() -> None:
    names = [trailer_name("deepseek_v4_c4_indexer_state"), trailer_name("deepseek_v4_c4_indexer_x")]
    assert len({*names, trailer_name("kv"), trailer_name("mamba", "temporal")}) == 4
    assert {len(name) for name in names} == {24}


@pytest.mark.parametrize("kind", ["xxh3", "blake3"])
def test_digest_of_pieces_is_that_of_the_whole(kind: str) -> None:
    digest = digest_function(kind)
    data = bytes(range(256)) * 40
    assert digest([data]) == digest([data[:100], memoryview(data)[100:]])
    assert digest([data]) != digest([data[:-1]])
    assert len(digest([data])) == 32


def test_digests_are_those_of_the_libraries() -> None:
    """Other programs can check a file: xxh3_128 big endian as printed, BLAKE3 as printed."""
    from blake3 import blake3
    from xxhash import xxh3_128

    assert digest_function("xxh3")([b"page"]).hex() == xxh3_128(b"page").hexdigest() + "0" * 32
    assert digest_function("blake3")([b"page"]).hex() == blake3(b"page").hexdigest()
    assert digest_function("off")([b"page"]) == bytes(32)


def test_unknown_digest_kind_is_refused() -> None:
    with pytest.raises(UsageError, match="'md5' is not one of off, xxh3, blake3"):
        digest_function("md5")
