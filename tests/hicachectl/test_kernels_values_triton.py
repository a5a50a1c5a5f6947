"""The statistics kernel against numpy, over dtypes, forms of rows, special numbers and damage."""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.hicachectl.devices import DEVICES, torch

from hicachectl.formats.layouts import TENSOR_DTYPE_BYTES  # isort: skip
from hicachectl.kernels.statistics import (  # isort: skip
    ZERO_HEADS,
    Field,
    Statistics,
    statistics_reference,
)
from hicachectl.kernels.values_triton import (  # isort: skip
    block_statistics,
    supports,
    to_statistics,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]

DTYPES = (
    "bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2",
)  # fmt: skip
SUM_TOLERANCE = 1e-5  # of the sum of magnitudes or squares, as the kernel promises
LOST = 1e-34  # squares of magnitudes below 1e-19 underflow in fp32

# The interpreter computes with numpy, which remarks on special numbers; they are meant here.
pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning"), pytest.mark.slow]


def dense(dtype: str, rows: int = 5, items: int = 24, **fields: object) -> Field:
    pitch = items * TENSOR_DTYPE_BYTES[dtype]
    return replace(Field("kv", dtype, rows, pitch, 0, items), **fields)  # type: ignore[arg-type]


def measured(blocks: Bytes, field: Field, device: str, lanes: int = 32) -> Statistics:
    """Look at one field of some blocks."""
    return measured_together(blocks, [field], device, lanes)[0]


def measured_together(
    blocks: Bytes, fields: Sequence[Field], device: str, lanes: int
) -> list[Statistics]:
    """Lay blocks out in a pool in another order, with poison between, and look at them."""
    order = np.random.default_rng(3).permutation(2 * len(blocks))[: len(blocks)]
    pool = np.full((2 * len(blocks), blocks.shape[1]), 0xFF, np.uint8)
    pool[order] = blocks
    found = block_statistics(
        torch.from_numpy(pool.reshape(-1)).to(device),
        torch.from_numpy(order).to(device),
        blocks.shape[1],
        fields,
        lanes=lanes,
    )
    return [to_statistics(counts, sums) for counts, sums in found]


def assert_equal(found: Statistics, expected: Statistics, blocks: Bytes, field: Field) -> None:
    assert found.counts.tolist() == expected.counts.tolist()
    assert found.absolute_maximum.tolist() == expected.absolute_maximum.tolist()
    squares = expected.sum_of_squares
    rows = blocks.reshape(len(blocks), field.rows, field.pitch)
    magnitudes = rows.copy()
    top = TENSOR_DTYPE_BYTES[field.dtype]
    magnitudes[..., field.offset + top - 1 : field.offset + field.nbytes : top] &= 0x7F
    size = statistics_reference(magnitudes.reshape(blocks.shape), field).sum
    if field.dtype == "float8_e4m3fnuz":
        size = size + np.abs(expected.sum)
    in_range = squares < 3e38
    assert (np.abs(found.sum - expected.sum)[in_range] <= (SUM_TOLERANCE * size)[in_range]).all()
    error = np.abs(found.sum_of_squares - squares)[in_range]
    assert (error <= SUM_TOLERANCE * squares[in_range] + LOST).all()


def normal(dtype: str, shape: tuple[int, ...], seed: int) -> Bytes:
    """Healthy numbers of about 1, as bytes along the last axis."""
    values = torch.from_numpy(np.random.default_rng(seed).standard_normal(shape))
    bits: Bytes = values.to(getattr(torch, dtype)).view(torch.uint8).numpy()
    return bits


@pytest.mark.parametrize("dtype", DTYPES)
@DEVICES
def test_statistics_of_healthy_numbers(device: str, dtype: str) -> None:
    field = dense(dtype, rows=7, items=72)
    blocks = normal(dtype, (3, 7 * 72), secrets.randbits(31))
    found = measured(blocks, field, device)
    assert_equal(found, statistics_reference(blocks, field), blocks, field)
    assert found.counts[:, :2].sum() == 0


@pytest.mark.parametrize("dtype", DTYPES)
@DEVICES
def test_every_bit_pattern_is_counted_as_the_reference_counts_it(device: str, dtype: str) -> None:
    width = TENSOR_DTYPE_BYTES[dtype]
    if width == 1:
        patterns = np.arange(256, dtype=np.uint8)
    elif width == 2:
        patterns = np.arange(1 << 16, dtype=np.uint16)
    else:
        tops = np.arange(1 << 16, dtype=np.uint32) << 16
        patterns = np.concatenate([tops, tops + 1, tops + 0xFFFF])
    # One block each for runs of patterns: sums of subnormals and of large numbers come apart.
    blocks = patterns.view(np.uint8).reshape(8 if width > 1 else 4, -1)
    field = dense(dtype, rows=4, items=blocks.shape[1] // width // 4)
    found = measured(blocks, field, device, lanes=64)
    assert_equal(found, statistics_reference(blocks, field), blocks, field)


@pytest.mark.parametrize("dtype", DTYPES)
@DEVICES
def test_one_special_number_anywhere_changes_its_block_alone(device: str, dtype: str) -> None:
    rng = np.random.default_rng(seed := secrets.randbits(31))
    field = dense(dtype, rows=6, items=40)
    blocks = normal(dtype, (4, 6 * 40), seed)
    width = TENSOR_DTYPE_BYTES[dtype]
    place = int(rng.integers(6 * 40)) * width
    nan = np.array(np.nan, np.float32).view(np.uint32)
    code = {"float8_e4m3fn": 0xFF, "float8_e4m3fnuz": 0x80, "float8_e5m2": 0x7F}.get(dtype)
    if code is None:
        code = {"bfloat16": 0xFFC0, "float16": 0x7E01, "float32": int(nan)}[dtype]
    blocks[2, place : place + width] = np.frombuffer(code.to_bytes(width, "little"), np.uint8)
    found = measured(blocks, field, device)
    assert found.counts[:, 0].tolist() == [0, 0, 1, 0]
    assert_equal(found, statistics_reference(blocks, field), blocks, field)


@pytest.mark.parametrize("lanes", [32, 512])
@DEVICES
def test_fields_of_packed_rows_are_looked_at_apart(device: str, lanes: int) -> None:
    rng = np.random.default_rng(secrets.randbits(31))
    rows, pitch = 6, 656
    blocks = rng.integers(0, 256, (3, rows * pitch), dtype=np.uint8)
    scales = Field("scales", "float32", rows, pitch, 512, 4, scale_floor=0.0, leads=False)
    fields = (
        Field("codes", "float8_e4m3fn", rows, pitch, 0, 512),
        scales,
        replace(scales, scale_floor=1e-4 / 448),
        Field("rope", "bfloat16", rows, pitch, 528, 64, leads=False),
    )
    part = blocks.reshape(3, rows, pitch)[..., 512:528].view(np.float32)
    part[...] = rng.random(part.shape)
    part[0, 2, 1], part[1, 0, 0], part[1, 1, 3], part[2, 5, 2] = -1, np.inf, 0, -0.0
    found = measured_together(blocks, fields, device, lanes)
    for field, statistics in zip(fields, found, strict=True):
        expected = statistics_reference(blocks, field)
        with np.errstate(all="ignore"):
            assert_equal(statistics, expected, blocks, field)
            assert_equal(measured(blocks, field, device, lanes), expected, blocks, field)
    assert found[1].counts[:, 3].tolist() == [1, 1, 0]
    assert found[2].counts[:, 3].tolist() == [1, 2, 1]


@DEVICES
def test_rows_that_begin_with_zeros_are_counted(device: str) -> None:
    field = dense("bfloat16", rows=4, items=16)
    blocks = normal("bfloat16", (2, 4 * 16), 5)
    by_row = blocks.reshape(2, 4, 32)
    by_row[1, 2] = 0
    by_row[0, 3, 1:] = 0  # all but the first byte
    by_row[0, 3, 0] = 1
    found = measured(blocks, field, device)
    assert found.counts[:, ZERO_HEADS].tolist() == [0, 1]
    assert measured(blocks, replace(field, leads=False), device).counts[:, ZERO_HEADS].sum() == 0


@pytest.mark.parametrize("items", [1, 2, 3, 4, 6, 8, 10])
@DEVICES
def test_rows_of_any_whole_number_of_words(device: str, items: int) -> None:
    field = dense("float32", rows=3, items=items)
    blocks = normal("float32", (2, 3 * items), 7)
    assert_equal(
        measured(blocks, field, device), statistics_reference(blocks, field), blocks, field
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
@DEVICES
def test_small_blocks_that_share_a_program_are_told_apart(device: str, dtype: str) -> None:
    field = dense(dtype, rows=2, items=40)
    blocks = normal(dtype, (13, 2 * 40), seed := secrets.randbits(31))
    damaged = int(np.random.default_rng(seed).integers(13))
    blocks[damaged, -1], blocks[damaged, -2] = 0x7F, 0xFF  # NaN in both
    blocks[(damaged + 1) % 13, : blocks.shape[1] // 2] = 0
    found = measured(blocks, field, device, lanes=64)
    assert_equal(found, statistics_reference(blocks, field), blocks, field)
    assert np.flatnonzero(found.counts[:, 0]).tolist() == [damaged]
    assert np.flatnonzero(found.counts[:, ZERO_HEADS]).tolist() == [(damaged + 1) % 13]


@DEVICES
def test_long_blocks_of_packed_rows_are_shared_out_by_rows(device: str) -> None:
    rows, pitch = 66, 656  # 43 KB, which is shared out among programs
    rng = np.random.default_rng(secrets.randbits(31))
    blocks = rng.integers(0, 256, (2, rows * pitch), dtype=np.uint8)
    by_row = blocks.reshape(2, rows, pitch)
    by_row[..., 512:528].view(np.float32)[...] = 1
    by_row[1, 5, 512:516] = 0xFF
    by_row[0, 65, :16] = 0
    fields = (
        Field("codes", "float8_e4m3fn", rows, pitch, 0, 512),
        Field("scales", "float32", rows, pitch, 512, 4, scale_floor=0.0, leads=False),
        Field("rope", "bfloat16", rows, pitch, 528, 64, leads=False),
    )
    found = measured_together(blocks, fields, device, 256)
    for field, statistics in zip(fields, found, strict=True):
        with np.errstate(all="ignore"):
            assert_equal(statistics, statistics_reference(blocks, field), blocks, field)
    assert found[1].counts[:, 3].tolist() == [0, 1]
    assert found[0].counts[:, ZERO_HEADS].tolist() == [1, 0]


@DEVICES
def test_parts_of_a_long_block_add_up(device: str) -> None:
    field = dense("float8_e4m3fn", rows=1, items=16 * 2200)
    blocks = normal("float8_e4m3fn", (1, 16 * 2200), 9)
    blocks[0, 100] = blocks[0, -1] = 0x7F
    found = measured(blocks, field, device, lanes=16)
    assert_equal(found, statistics_reference(blocks, field), blocks, field)


@DEVICES
def test_no_blocks_give_no_statistics(device: str) -> None:
    field = dense("bfloat16")
    found = measured(np.zeros((0, field.rows * field.pitch), np.uint8), field, device)
    assert found.counts.shape == (0, 5)
    assert found.sum.shape == (0,)


def test_fields_of_broken_words_are_refused() -> None:
    field = dense("float8_e5m2", rows=2, items=6)
    assert not supports(field)
    with pytest.raises(ValueError, match="whole words"):
        block_statistics(torch.zeros(12, dtype=torch.uint8), torch.tensor([0]), 12, [field])
