"""The statistics kernel against numpy, over dtypes, row forms, special numbers and damage."""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.device.devices import DEVICES, torch

from hicachectl.formats.layouts import TENSOR_DTYPE_BYTES  # isort: skip
from hicachectl.kernels.values_triton import BAD_SCALE, NAN, ZERO_HEADS, Field  # isort: skip
from hicachectl.kernels.values import is_bad_scale, is_inf, is_nan  # isort: skip
from hicachectl.kernels.values_triton import block_statistics, supports  # isort: skip

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]
    IntArray = NDArray[np.int64]

DTYPES = (
    "bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2",
)  # fmt: skip

# The interpreter computes with numpy, which warns about special numbers; here they are intended.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def dense(dtype: str, rows: int = 5, items: int = 24, **fields: object) -> Field:
    pitch = items * TENSOR_DTYPE_BYTES[dtype]
    return replace(Field("kv", dtype, rows, pitch, 0, items), **fields)  # type: ignore[arg-type]


def expected_counts(blocks: Bytes, field: Field) -> IntArray:
    """Count with numpy what the kernel counts, in blocks [n, rows * pitch]: [n, 4]."""
    rows = np.ascontiguousarray(blocks).reshape(len(blocks), field.rows, field.pitch)
    part = np.ascontiguousarray(rows[..., field.offset : field.offset + field.nbytes])
    width = TENSOR_DTYPE_BYTES[field.dtype]
    bits = part.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[width]).reshape(len(blocks), -1)
    floor = field.scale_floor
    bad = np.zeros(bits.shape, np.bool_) if floor is None else is_bad_scale(bits, floor)
    heads = part[..., : field.head_bytes].any(axis=-1) | (not field.leads)
    marks = is_nan(bits, field.dtype), is_inf(bits, field.dtype), bad, ~heads
    return np.stack([of.reshape(len(blocks), -1).sum(axis=1) for of in marks], axis=1)


def measured(blocks: Bytes, field: Field, device: str, lanes: int = 32) -> IntArray:
    """Run the kernel on one field of some blocks."""
    return measured_together(blocks, [field], device, lanes)[0]


def measured_together(
    blocks: Bytes, fields: Sequence[Field], device: str, lanes: int
) -> list[IntArray]:
    """Place blocks in a pool in another order, with poison between, and run the kernel."""
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
    return [counts.cpu().numpy() for counts in found]


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
    assert found.tolist() == expected_counts(blocks, field).tolist()
    assert found[:, :2].sum() == 0


@pytest.mark.slow
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
    blocks = patterns.view(np.uint8).reshape(8 if width > 1 else 4, -1)
    field = dense(dtype, rows=4, items=blocks.shape[1] // width // 4)
    found = measured(blocks, field, device, lanes=64)
    assert found.tolist() == expected_counts(blocks, field).tolist()


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
    assert found[:, NAN].tolist() == [0, 0, 1, 0]
    assert found.tolist() == expected_counts(blocks, field).tolist()


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
        expected = expected_counts(blocks, field)
        assert statistics.tolist() == expected.tolist()
        assert measured(blocks, field, device, lanes).tolist() == expected.tolist()
    assert found[1][:, BAD_SCALE].tolist() == [1, 1, 0]
    assert found[2][:, BAD_SCALE].tolist() == [1, 2, 1]


@DEVICES
def test_rows_that_begin_with_zeros_are_counted(device: str) -> None:
    field = dense("bfloat16", rows=4, items=16)
    blocks = normal("bfloat16", (2, 4 * 16), 5)
    by_row = blocks.reshape(2, 4, 32)
    by_row[1, 2] = 0
    by_row[0, 3, 1:] = 0  # all but the first byte
    by_row[0, 3, 0] = 1
    found = measured(blocks, field, device)
    assert found[:, ZERO_HEADS].tolist() == [0, 1]
    assert measured(blocks, replace(field, leads=False), device)[:, ZERO_HEADS].sum() == 0


@pytest.mark.parametrize("items", [1, 2, 3, 4, 6, 8, 10])
@DEVICES
def test_rows_of_any_whole_number_of_words(device: str, items: int) -> None:
    field = dense("float32", rows=3, items=items)
    blocks = normal("float32", (2, 3 * items), 7)
    assert measured(blocks, field, device).tolist() == expected_counts(blocks, field).tolist()


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
@DEVICES
def test_small_blocks_that_share_a_program_are_told_apart(device: str, dtype: str) -> None:
    field = dense(dtype, rows=2, items=40)
    blocks = normal(dtype, (13, 2 * 40), seed := secrets.randbits(31))
    damaged = int(np.random.default_rng(seed).integers(13))
    blocks[damaged, -1], blocks[damaged, -2] = 0x7F, 0xFF  # NaN in both
    blocks[(damaged + 1) % 13, : blocks.shape[1] // 2] = 0
    found = measured(blocks, field, device, lanes=64)
    assert found.tolist() == expected_counts(blocks, field).tolist()
    assert np.flatnonzero(found[:, NAN]).tolist() == [damaged]
    assert np.flatnonzero(found[:, ZERO_HEADS]).tolist() == [(damaged + 1) % 13]


@pytest.mark.slow
@DEVICES
def test_long_blocks_of_packed_rows_are_shared_out_by_rows(device: str) -> None:
    rows, pitch = 66, 656  # 43 KB, split among programs
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
        assert statistics.tolist() == expected_counts(blocks, field).tolist()
    assert found[1][:, BAD_SCALE].tolist() == [0, 1]
    assert found[0][:, ZERO_HEADS].tolist() == [1, 0]


@DEVICES
def test_parts_of_a_long_block_add_up(device: str) -> None:
    field = dense("float8_e4m3fn", rows=1, items=16 * 9000)
    blocks = normal("float8_e4m3fn", (1, 16 * 9000), 9)
    blocks[0, 100] = blocks[0, -1] = 0x7F
    found = measured(blocks, field, device, lanes=256)
    assert found.tolist() == expected_counts(blocks, field).tolist()


@DEVICES
def test_no_blocks_give_no_statistics(device: str) -> None:
    field = dense("bfloat16")
    found = measured(np.zeros((0, field.rows * field.pitch), np.uint8), field, device)
    assert found.shape == (0, 4)


def test_fields_of_broken_words_are_refused() -> None:
    field = dense("float8_e5m2", rows=2, items=6)
    assert not supports(field)
    with pytest.raises(ValueError, match="whole words"):
        block_statistics(torch.zeros(12, dtype=torch.uint8), torch.tensor([0]), 12, [field])
