"""The records of packs: golden bytes, round trips, and detection of every kind of damage."""

from __future__ import annotations

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from hicachectl.formats.errors import FormatError
from hicachectl.formats.pack import records as pack
from hicachectl.formats.pack.records import Kind, Metadata, Record
from tests.backends.pack import pack_files
from tests.backends.pack.pack_files import PACK_ID

DIGEST = blake3(b"content").digest()


def test_the_header_is_the_documented_one() -> None:
    golden = bytes.fromhex(
        "894843 5041434b 0a 01000000 00000000 0102030405060708 e40627cb 00000000"
    )
    assert len(golden) == pack.HEADER_BYTES == 32
    assert pack.build_header(PACK_ID) == golden
    assert pack.parse_header(golden) == PACK_ID


@pytest.mark.parametrize("planes", [[b"content."], [b"cn", b"tet."], [b"", b"1", b"", b"22"]])
def test_a_record_is_the_documented_one(planes: list[bytes]) -> None:
    golden = pack_files.record(
        pack_files.OBJECT, b"key", b"content.", mtime_ns=-5, planes=planes, digest=DIGEST
    )
    record = Record(
        kind=Kind.OBJECT,
        key=b"key",
        nbytes=8,
        stored=tuple(map(len, planes)),
        digest=DIGEST,
        mtime_ns=-5,
    )
    assert pack.build_record(record, PACK_ID) == golden[: record.content_offset]
    assert record.content_offset == 107
    assert record.length == len(golden)
    assert pack.parse_record(golden, PACK_ID) == record


def test_the_trailer_is_the_documented_one() -> None:
    assert pack.build_trailer(500, 300, PACK_ID) == pack_files.trailer(500, 300)
    assert pack.parse_trailer(pack_files.trailer(500, 300), PACK_ID) == (500, 300)
    assert pack.parse_trailer(pack_files.trailer(500, 300), b"another.") is None
    assert pack.parse_trailer(pack_files.trailer(500, 300)[1:], PACK_ID) is None


@given(
    key=st.binary(min_size=1, max_size=200),
    nbytes=st.integers(0, 1 << 40).map(lambda n: n * 4),
    shares=st.sampled_from((1, 2, 4)).flatmap(lambda n: st.tuples(*[st.floats(0, 1)] * n)),
    mtime_ns=st.none() | st.integers(-(2**63) + 1, 2**63 - 1),
)
def test_a_record_is_read_as_it_was_written(
    key: bytes, nbytes: int, shares: tuple[float, ...], mtime_ns: int | None
) -> None:
    stored = tuple(int(share * (nbytes // len(shares))) for share in shares)
    record = Record(
        kind=Kind.OBJECT, key=key, nbytes=nbytes, stored=stored, digest=DIGEST, mtime_ns=mtime_ns
    )
    data = pack.build_record(record, PACK_ID)
    assert pack.parse_record(data + b"what follows", PACK_ID) == record
    assert pack.RECORD_BYTES + pack.key_length(data) == len(data)


@given(data=st.binary(max_size=200))
def test_arbitrary_bytes_are_no_part_of_a_pack(data: bytes) -> None:
    with pytest.raises(FormatError):
        pack.parse_header(data)
    with pytest.raises(FormatError):
        pack.parse_record(data, PACK_ID)
    assert pack.parse_trailer(data, PACK_ID) is None


def test_every_flipped_bit_of_a_head_is_noticed() -> None:
    for golden, parse in (
        (pack_files.header()[:28], pack.parse_header),
        (
            pack_files.record(pack_files.OBJECT, b"key", b"")[: pack.RECORD_BYTES - 4],
            lambda data: pack.parse_record(data + b"\0\0\0\0key", PACK_ID),
        ),
    ):
        for bit in range(8 * len(golden)):
            damaged = bytearray(golden + bytes(4 if len(golden) == 28 else 0))
            damaged[bit // 8] ^= 1 << bit % 8
            with pytest.raises(FormatError):
                parse(bytes(damaged))


def test_a_form_of_the_future_is_refused_by_number() -> None:
    with pytest.raises(
        FormatError, match="pack form 2, but this version reads form 1; use the release"
    ):
        pack.parse_header(pack_files.header(form=2))


@pytest.mark.parametrize(
    ("lie", "text"),
    [
        ({"kind": 9}, "unknown form"),
        ({"nbytes": 1 << 62}, "bytes in"),
        ({"nbytes": 4, "planes": [b"12345"]}, "plane of 5"),
        ({"nbytes": 5, "planes": [b"1", b"2"]}, "5 bytes in 2 planes"),
        ({"planes": [b"", b"", b""]}, "3 planes"),
        ({"pack_id": b"another."}, "no record of this pack"),
    ],
)
def test_a_record_that_cannot_be_is_refused(lie: dict[str, object], text: str) -> None:
    data = pack_files.record(**{"kind": 2, "key": b"k", "content": b"1234", **lie})  # type: ignore[arg-type]
    with pytest.raises(FormatError, match=text):
        pack.parse_record(data, PACK_ID)


def test_metadata_is_read_as_it_was_written() -> None:
    metadata = Metadata(grammar="mooncake", profile='model = "ü"\n', version="1.2")
    assert pack.parse_metadata(pack.build_metadata(metadata)) == metadata


@pytest.mark.parametrize(
    "data",
    [b"", b"[]", b"\xff", b'{"grammar": 1}', b'{"grammar": "s3"}', b"{}", b"[" * 100_000],
)
def test_metadata_that_is_none_is_refused(data: bytes) -> None:
    with pytest.raises(FormatError):
        pack.parse_metadata(data)
