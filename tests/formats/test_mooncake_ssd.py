"""Metadata and records of Mooncake's SSD tier: read as written; damage is refused in one line."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicachectl.formats.errors import FormatError, UnsupportedByBackend
from hicachectl.formats.mooncake_ssd import (
    RECORD,
    are_records,
    parse_bucket_meta,
    parse_offset_meta,
    parse_records,
    record_problem,
    value_starts,
)
from tests.mooncake_ssd_files import (
    Record,
    allocator_state,
    bucket_meta,
    number,
    numbers,
    offset_meta,
    text,
)

if TYPE_CHECKING:
    from collections.abc import Callable

KEYS = st.binary(min_size=1, max_size=300)
# As two objects of 5000 and 5002 bytes of a real client: the first offset is 0 and left out.
REAL = bytes.fromhex(
    "08ac4e120d64656661756c74006b65792d30120d64656661756c74006b65792d32"
    "1a05100d1888271a08089527100d188a27"
)
WHOLE = bucket_meta([b"a" * 200, b"b"], [300, 0])
EXTENTS = [(0, 8192), (65536, 4608)]
OFFSETS = offset_meta(EXTENTS, 77, evicted=[b"gone"])


def test_the_meta_file_of_a_real_bucket_is_read() -> None:
    meta = parse_bucket_meta(REAL, "x")
    assert meta.keys == [b"default\0key-0", b"default\0key-2"]
    assert (meta.starts.tolist(), meta.sizes.tolist()) == ([0, 5013], [5000, 5002])


@given(st.lists(st.tuples(KEYS, st.integers(0, 1 << 56)), min_size=1, max_size=8))
def test_a_bucket_is_read_as_written(objects: list[tuple[bytes, int]]) -> None:
    """Numbers of every length; each object starts where the one before it ends."""
    keys, sizes = [key for key, _ in objects], [size for _, size in objects]
    meta = parse_bucket_meta(bucket_meta(keys, sizes), "x")
    lengths = [len(key) + size for key, size in objects]
    assert meta.keys == keys
    assert meta.sizes.tolist() == sizes
    assert meta.starts.tolist() == [sum(lengths[:place]) for place in range(len(objects))]


def test_an_offset_checkpoint_is_read_as_written() -> None:
    meta = parse_offset_meta(OFFSETS, "x")
    assert list(zip(meta.starts.tolist(), meta.sizes.tolist(), strict=True)) == EXTENTS
    assert (meta.sequence, meta.evicted) == (77, frozenset({b"gone"}))


def test_extents_of_a_large_file_are_multiplied() -> None:
    """Allocators count in units of 2**shift bytes, and their offsets need more than 32 bits."""
    state = allocator_state([(3 << 40, 1 << 30)], 4 << 40, shift=12)
    meta = parse_offset_meta(numbers(3) + text(2, state), "x")
    assert (meta.starts.tolist(), meta.sizes.tolist()) == ([3 << 40], [1 << 30])


BAD_BUCKETS = {
    "empty": b"",
    "no keys": numbers(5),
    "a key without a place": numbers(5) + text(2, b"k"),
    "a place without a key": numbers(5) + text(3, numbers(0, 1, 4)),
    "another key size": numbers(5) + text(2, b"k") + text(3, numbers(0, 2, 3)),
    "beyond the bucket": numbers(5) + text(2, b"k") + text(3, numbers(0, 1, 5)),
    "a start beyond the bucket": numbers(5) + text(2, b"k") + text(3, numbers(5, 1, 0)),
    "a negative size": numbers(5) + text(2, b"k") + text(3, numbers(0, 1, (1 << 64) - 1)),
    "sums that overflow": numbers(1 << 62)
    + text(2, b"k")
    + text(3, numbers((1 << 62) - 1, 1, (1 << 62) - 1)),
    "an unknown field": WHOLE + number(9 << 3) + number(1),
    "an unknown field in a place": numbers(5) + text(2, b"k") + text(3, numbers(0, 1, 4, 1)),
    "another wire type": WHOLE + number(1 << 3 | 5) + bytes(4),
    "an endless number": b"\x08" + b"\xff" * 20,
    "a key of 2**60 bytes": numbers(5) + number(2 << 3 | 2) + number(1 << 60),
    "half a pair": numbers(5) + text(2, b"k") + text(3, b"\x10"),
    "too many keys": numbers(5) + text(2, b"") * ((1 << 18) + 1),
    "half a number": numbers(5) + text(2, b"k") + text(3, b"\x10\x81"),
}
HEAD = struct.Struct("<5Q5I")


def allocator(*values: int) -> bytes:
    """Return metadata with an allocator's header and no nodes."""
    return numbers(3) + text(2, HEAD.pack(*values) + bytes(1060))


BAD_CHECKPOINTS = {
    "empty": b"",
    "version 2": offset_meta([], 1, version=2),
    "a sequence number of 66 bits": offset_meta([], 1 << 65),
    "no allocator": numbers(3),
    "half an allocator": numbers(3) + text(2, bytes(100)),
    "an extent beyond a later base": numbers(3)
    + text(
        2,
        HEAD.pack(4096, 0, 8192, 0, 0, 1, 1, 1, 0, 0)
        + bytes(1060)
        + struct.pack("<II16xB3x", 0, 8192, 1)
        + bytes(4),
    ),
    "no capacity": allocator(0, 0, 0, 0, 0, 1, 0, 0, 0, 0),
    "a shift of 32": allocator(0, 32, 1 << 20, 0, 0, 1, 0, 0, 0, 0),
    "4 billion nodes": allocator(0, 0, 1 << 20, 0, 0, 1, (1 << 32) - 1, 0, 0, 0),
    "more nodes than bytes": allocator(0, 0, 1 << 20, 0, 0, 1, 1, 1, 0, 0),
    "an extent beyond the file": offset_meta([(0, 1 << 20), (1 << 20, 1)], 1),
    "two extents of one record": offset_meta([(0, 4096), (8192, 4096), (4096, 4097)], 1),
    "an extent that starts beyond the file": offset_meta([(1 << 30, 0)], 1),
}


@pytest.mark.parametrize("data", BAD_BUCKETS.values(), ids=BAD_BUCKETS)
def test_an_impossible_bucket_is_refused(data: bytes) -> None:
    with pytest.raises(FormatError, match=r"^name\.meta: "):
        parse_bucket_meta(data, "name.meta")


@pytest.mark.parametrize("data", BAD_CHECKPOINTS.values(), ids=BAD_CHECKPOINTS)
def test_an_impossible_checkpoint_is_refused(data: bytes) -> None:
    with pytest.raises((FormatError, UnsupportedByBackend), match=r"^name\.meta: "):
        parse_offset_meta(data, "name.meta")


@pytest.mark.parametrize(
    ("parse", "whole"),
    [(parse_bucket_meta, WHOLE), (parse_offset_meta, OFFSETS)],
    ids=["bucket", "offset"],
)
@given(data=st.data())
def test_damaged_metadata_is_refused_or_stays_within_bounds(
    parse: Callable[[bytes, str], object], whole: bytes, data: st.DataObject
) -> None:
    """A flipped, cut or inserted byte never gives another exception, nor a negative place."""
    place = data.draw(st.integers(0, len(whole) - 1))
    byte = data.draw(st.binary(max_size=3))
    damaged = whole[:place] + byte + whole[place + data.draw(st.integers(0, 3)) :]
    for content in (damaged, byte):
        try:
            meta = parse(content, "x")
        except (FormatError, UnsupportedByBackend) as error:
            assert str(error).startswith("x: ")  # noqa: PT017 - either outcome is right
        else:
            assert (meta.starts >= 0).all()  # type: ignore[attr-defined]
            assert (meta.sizes >= 0).all()  # type: ignore[attr-defined]


@given(st.binary(min_size=1, max_size=5000), st.binary(max_size=300), st.booleans())
def test_a_record_is_read_as_written_and_each_change_noticed(
    key: bytes, value: bytes, crc: bool
) -> None:
    record = Record(key, value, 0, 9, crc)
    content = record.content
    fields = parse_records(content[: RECORD.itemsize])
    start = int(value_starts(np.array([len(key)]))[0])
    assert (start % 4096, content[start:]) == (0, value)
    lengths = np.array([len(content)])
    assert are_records(fields, lengths).all()
    assert not are_records(fields, lengths - 1).any()

    def problem(
        head: bytes = content[:start], value: bytes = value, key: bytes = key, sequence: int = 9
    ) -> tuple[str, bool]:
        return record_problem(head, memoryview(value), (key, b"other"), sequence)

    assert problem() == ("", False)
    assert problem(key=key + b"x")[0]
    assert problem(value=value + b"x")[0]
    assert problem(sequence=8)[0]
    if value:
        changed = bytes([value[0] ^ 1]) + value[1:]
        assert problem(value=changed)[1] == crc


def test_headers_of_newer_forms_are_no_records() -> None:
    """An unknown flag, no key, and a key above 1 MiB, as Mooncake refuses them."""
    fields = np.array(
        [(1, 5, 0, 2, 0), (0, 5, 0, 0, 0), ((1 << 20) + 1, 5, 0, 0, 0), (1, 5, 0, 1, 0)], RECORD
    )
    extents = np.full(4, 1 << 40)
    assert are_records(fields, extents).tolist() == [False, False, False, True]
