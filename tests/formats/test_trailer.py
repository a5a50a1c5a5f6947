"""Trailers survive a round trip, and damage to any byte shows."""

from __future__ import annotations

import struct
import zlib
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicachectl.formats.errors import FormatError, UsageError
from hicachectl.formats.objects import Shard
from hicachectl.formats.trailer import (
    DIGEST_KINDS,
    NO_RANK,
    TRAILER_BYTES,
    PoolTrailers,
    Trailer,
    digest_function,
    dump_trailer,
    parse_trailer,
    rank_text,
    trailer_name,
    trailer_rank,
)

TRAILERS = st.builds(
    Trailer,
    digest_kind=st.sampled_from(DIGEST_KINDS),
    digest=st.binary(min_size=32, max_size=32),
    nbytes=st.integers(0, 2**64 - 1),
    page=st.binary(min_size=32, max_size=32),
    identity=st.binary(min_size=16, max_size=16),
    name=st.text(max_size=40).map(trailer_name),
    rank=st.integers(0, 2**16 - 1),
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
    kind, digest, nbytes, page, identity, name, rank = trailer
    trailers = PoolTrailers(kind, nbytes, identity, name, rank)
    data = trailers.dump(page, digest)
    assert data == dump_trailer(trailer)
    assert trailers.digest(data, page) == digest
    flipped = bytearray(data)
    flipped[bit // 8] ^= 1 << bit % 8
    for other in (bytes(flipped), data[:-1], data + b"\0", b""):
        assert trailers.digest(other, page) is None
    assert trailers.digest(data, bytes(byte ^ 1 for byte in page)) is None


@given(TRAILERS, st.integers(1, 2**16 - 1))
def test_a_pool_knows_no_trailers_of_another_rank(trailer: Trailer, rank: int) -> None:
    kind, _, nbytes, page, identity, name, _ = trailer
    trailers = PoolTrailers(kind, nbytes, identity, name, rank)
    for other in (NO_RANK, rank ^ 1 or 2):
        assert trailers.digest(dump_trailer(trailer._replace(rank=other)), page) is None


def read_before_ranks(data: bytes) -> tuple[object, ...]:
    """Return what releases without ranks read: digest kind, digest, bytes, page, identity, name.

    The lines of their parse_trailer.
    """
    form, checksum_form = struct.Struct("<8sBBHIQ32s32s16s24s"), struct.Struct("<I")
    assert bytes(data[:8]) == b"\x93HICACHE"
    _, version, kind, _, checksum, nbytes, digest, page, identity, name = form.unpack(data)
    zeroed = bytearray(data)
    checksum_form.pack_into(zeroed, 12, 0)
    assert zlib.crc32(zeroed) == checksum
    assert version == 1
    return DIGEST_KINDS[kind], digest, nbytes, page, identity, name


@given(TRAILERS)
def test_older_releases_read_past_the_rank(trailer: Trailer) -> None:
    assert read_before_ranks(dump_trailer(trailer)) == trailer[:-1]


TP2 = Shard(tp_rank=1, tp_size=2)


@pytest.mark.parametrize(
    ("shard", "number"),
    [
        (Shard(), 1 | 1 << 10),
        (Shard(tp_rank=0, tp_size=1), 1 | 1 << 10),
        (TP2, 2 | 2 << 10),
        (replace(TP2, pp_rank=1, pp_size=3), 4 | 2 << 10),
        (
            replace(TP2, pp_rank=1, pp_size=3, cp_rank=1, cp_size=2),
            1 + (1 * 3 + 1) * 2 + 1 | 2 << 10,
        ),
        (Shard(pp_rank=1, pp_size=3), 2 | 1 << 10),
        (Shard(cp_rank=1, cp_size=2), 2 | 1 << 10),
        (Shard(tp_size=8, dcp_rank=3, dcp_size=4, dcp_page_size=64), 4 | 1 << 10),
        (Shard(tp_rank=62, tp_size=63), 63 | 63 << 10),
        (Shard(tp_rank=63, tp_size=64), 64),
        (Shard(tp_rank=1021, tp_size=1022), 1022),
        (Shard(tp_rank=0, tp_size=1023), NO_RANK),
        (Shard(tp_rank=0, tp_size=512, pp_rank=0, pp_size=2), NO_RANK),
        (Shard(layers=(0, 8), heads=(0, 1)), NO_RANK),
    ],
)
def test_numbers_of_ranks(shard: Shard, number: int) -> None:
    assert trailer_rank(shard) == number


def test_ranks_of_a_deployment_have_numbers_of_their_own() -> None:
    sizes = product((1, 2, 4), (1, 3), (1, 2))
    for tp, pp, cp in sizes:
        ranks = [
            Shard(tp_rank=t, tp_size=tp, pp_rank=p, pp_size=pp, cp_rank=c, cp_size=cp)
            for t, p, c in product(range(tp), range(pp), range(cp))
        ]
        assert len({NO_RANK, *map(trailer_rank, ranks)}) == 1 + tp * pp * cp


def test_a_rank_in_words() -> None:
    assert rank_text(trailer_rank(TP2)) == "rank 1 (tp 2)"
    assert rank_text(trailer_rank(Shard(tp_rank=70, tp_size=80))) == "rank 70 (tp 64 or more)"


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
