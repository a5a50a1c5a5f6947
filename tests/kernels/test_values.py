"""Value kernels against references that read one item at a time."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicachectl.formats.layouts import DTYPE_BYTES, Column
from hicachectl.kernels.values import (
    RowTable,
    bad_items,
    count_bad,
    fp8_values,
    is_bad_scale,
    is_inf,
    is_nan,
    may_hold_bad_values,
    to_float32,
    zero_rows,
)
from tests.speed import examples

INDEX_FLOOR = 1e-4 / 448
LEAST_SCALE = struct.unpack("<I", struct.pack("<f", INDEX_FLOOR))[0] - 1

SPECIAL = {
    "bfloat16": [0x7F80, 0xFF80, 0x7F81, 0xFFFF, 0x7F7F, 0xFF7F, 0, 0x8000],
    "float16": [0x7C00, 0xFC00, 0x7C01, 0xFFFF, 0x7BFF, 0xFBFF, 0, 0x8000],
    "float32": [0x7F800000, 0xFF800000, 0x7F800001, 0xFFFFFFFF, 0x7F7FFFFF, 0xFF7FFFFF, 0],
    "float8_e4m3fn": [0x7F, 0xFF, 0x7E, 0xFE, 0x80, 0],
    "float8_e4m3fnuz": [0x80, 0x7F, 0xFF, 0],
    "float8_e5m2": [0x7C, 0xFC, 0x7D, 0x7F, 0xFF, 0x7B, 0xFB, 0],
}


IEEE = {  # struct format for a dtype's bits, and how far to shift them up
    "float32": ("<f", "<I", 0),
    "bfloat16": ("<f", "<I", 16),
    "float16": ("<e", "<H", 0),
    "float8_e5m2": ("<e", "<H", 8),
}


def slow_value(bits: int, dtype: str) -> float:
    """Decode one item as the specification says."""
    if dtype in IEEE:
        number, unsigned, shift = IEEE[dtype]
        return float(struct.unpack(number, struct.pack(unsigned, bits << shift))[0])
    fnuz = dtype == "float8_e4m3fnuz"
    if bits == 0x80 if fnuz else bits & 0x7F == 0x7F:
        return math.nan
    sign = -1.0 if bits & 0x80 else 1.0
    bias = 8 if fnuz else 7
    exponent, mantissa = bits >> 3 & 15, bits & 7
    if exponent == 0:
        return sign * mantissa / 8 * 2.0 ** (1 - bias)
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - bias)


def unsigned(dtype: str) -> str:
    return f"<u{DTYPE_BYTES[dtype]}"


def one_column(dtype: str, items: int, rows: int, floor: float | None = None) -> RowTable:
    column = Column("", 0, dtype, ("channel",), (items,), floor)
    return RowTable("t", 0, column.nbytes, ("row",), (rows,), (column,), ((0, rows),))


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_every_code_of_a_small_dtype_is_told_apart(dtype: str) -> None:
    width = 8 * DTYPE_BYTES[dtype]
    if width == 32:
        bits = np.array(SPECIAL[dtype], unsigned(dtype))
    else:
        bits = np.arange(1 << width, dtype=unsigned(dtype))
    values = np.array([slow_value(int(code), dtype) for code in bits])
    assert np.array_equal(is_nan(bits, dtype), np.isnan(values))
    assert np.array_equal(is_inf(bits, dtype), np.isinf(values))
    with np.errstate(invalid="ignore"):
        assert np.array_equal(to_float32(bits, dtype), values.astype(np.float32), equal_nan=True)


def test_golden_fp8_codes() -> None:
    assert fp8_values("float8_e4m3fn")[[0x00, 0x01, 0x38, 0x7E, 0xB8]].tolist() == [
        0.0,
        2**-9,
        1.0,
        448.0,
        -1.0,
    ]
    assert fp8_values("float8_e4m3fnuz")[[0x40, 0x7F]].tolist() == [1.0, 240.0]
    assert fp8_values("float8_e5m2")[[0x3C, 0x7B, 0x7C]].tolist() == [1.0, 57344.0, math.inf]


@given(data=st.data(), dtype=st.sampled_from(sorted(DTYPE_BYTES)))
@examples(150)
def test_counts_equal_those_of_a_loop_over_items(data: st.DataObject, dtype: str) -> None:
    n, rows, items = (data.draw(st.integers(1, top)) for top in (3, 5, 9))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    top = 1 << 8 * DTYPE_BYTES[dtype]
    bits = rng.integers(0, top // 4, (n, rows, items)).astype(unsigned(dtype))
    for _ in range(data.draw(st.integers(0, 4))):
        place = tuple(data.draw(st.integers(0, length - 1)) for length in bits.shape)
        bits[place] = data.draw(st.sampled_from(SPECIAL[dtype]))
    table = one_column(dtype, items, rows)
    block = bits.reshape(n, -1).view(np.uint8)
    values = np.array([slow_value(code, dtype) for code in bits.reshape(-1).tolist()]).reshape(
        bits.shape
    )
    counts = count_bad(block, table)
    assert np.array_equal(counts["nan"], np.isnan(values).sum(-1))
    assert np.array_equal(counts["inf"], np.isinf(values).sum(-1))
    assert not counts["bad-scale"].any()
    assert may_hold_bad_values(block, table) == bool((~np.isfinite(values)).any())
    nan = bad_items(block, table, table.columns[0], "nan")
    assert np.array_equal(nan, np.isnan(values))


@given(
    bits=st.lists(
        st.one_of(
            st.integers(0, 2**32 - 1),
            st.integers(LEAST_SCALE - 2, LEAST_SCALE + 2),
            st.sampled_from([0, 0x80000000, 1, 0x7F7FFFFF, 0x7F800000, 0x7FC00000, 0xBF800000]),
        ),
        min_size=1,
        max_size=8,
    ),
    floor=st.sampled_from([0.0, INDEX_FLOOR]),
)
def test_scales_are_judged_as_numbers(bits: list[int], floor: float) -> None:
    def good(code: int) -> bool:
        value = slow_value(code, "float32")
        least = slow_value(LEAST_SCALE, "float32") if floor else 0.0
        return math.isfinite(value) and value >= least

    expected = [not good(code) for code in bits]
    array = np.array(bits, "<u4")
    assert is_bad_scale(array, floor).tolist() == expected
    table = one_column("float32", len(bits), 1, floor)
    block = array[None].view(np.uint8)
    assert count_bad(block, table)["bad-scale"].tolist() == [[sum(expected)]]
    # A scale of -0 is legal, but the quick test may return True for it.
    assert may_hold_bad_values(block, table) or not any(expected)


def test_codes_under_a_zero_scale_mean_nothing() -> None:
    scales = Column("scales", 8, "float32", ("tile",), (2,), scale_floor=0.0)
    codes = Column("codes", 0, "float8_e4m3fn", ("channel",), (8,), scales=scales)
    table = RowTable("t", 0, 16, ("row",), (2,), (codes, scales), ((0, 2),))
    block = np.full((1, 32), 0x7F, np.uint8)
    block[0, 8:16].view(np.float32)[:] = [0.0, 1.0]
    block[0, 24:32].view(np.float32)[:] = [-0.0, 0.0]
    counts = count_bad(block, table)
    assert counts["nan"].tolist() == [[4, 0]]
    assert counts["bad-scale"].tolist() == [[0, 0]]


@given(data=st.data(), pitch=st.sampled_from([1, 3, 4, 6, 8, 24, 656]))
@examples(80)
def test_zero_rows_equal_those_of_a_loop_over_rows(data: st.DataObject, pitch: int) -> None:
    n, rows = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 6))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    content = rng.integers(0, 2, (n, rows, pitch), dtype=np.uint8)
    for _ in range(data.draw(st.integers(0, 4))):
        i, row = data.draw(st.integers(0, n - 1)), data.draw(st.integers(0, rows - 1))
        content[i, row] = 0
        if data.draw(st.booleans()):
            content[i, row, -1] = 1
    table = RowTable("t", 0, pitch, ("row",), (rows,), (), ((0, rows),))
    expected = [(i, r) for i in range(n) for r in range(rows) if not content[i, r].any()]
    objects, found = zero_rows(content.reshape(n, -1), table)
    assert list(zip(objects.tolist(), found.tolist(), strict=True)) == expected


def test_blocks_may_be_strided_and_unaligned() -> None:
    memory = np.zeros(3 * 100 + 1, np.uint8)
    objects = memory[1:].reshape(3, 100)[:, :64]
    objects[:] = 1
    objects[1, 32:34] = [0x80, 0x7F]  # +Inf at an odd address
    table = one_column("bfloat16", 8, 4)
    block = table.block(objects, 1, 3)
    assert may_hold_bad_values(block, table)
    assert count_bad(block, table)["inf"].tolist() == [[0, 0], [0, 1], [0, 0]]
