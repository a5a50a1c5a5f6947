"""Flags of bad numbers against numpy, over dtypes, row forms, special numbers and damage."""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.device.devices import DEVICES, torch
from tests.speed import ALL

from hicachectl.formats.layouts import TENSOR_DTYPE_BYTES  # isort: skip
from hicachectl.kernels.values import FIRST_SPECIAL, is_bad_scale, is_inf, is_nan  # isort: skip
from hicachectl.kernels.values_triton import (  # isort: skip
    BAD_SCALE, FLAG_BITS, SPECIAL, ZERO_HEAD, Field, block_flags, certain_flags, supports,
    vector_bytes,
)  # fmt: skip

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


def dense(dtype: str, items: int = 24, **fields: object) -> Field:
    pitch = items * TENSOR_DTYPE_BYTES[dtype]
    return replace(Field("kv", dtype, pitch, 0, items), **fields)  # type: ignore[arg-type]


def expected_flags(blocks: Bytes, fields: Sequence[Field]) -> list[IntArray]:
    """Find with numpy what the kernel flags, in blocks [n, rows * pitch]: for each field [n]."""
    return [_expected(blocks, field, vector_bytes(fields)) for field in fields]


def _expected(blocks: Bytes, field: Field, head_bytes: int) -> IntArray:
    rows = np.ascontiguousarray(blocks).reshape(len(blocks), -1, field.pitch)
    part = np.ascontiguousarray(rows[..., field.offset : field.offset + field.nbytes])
    width = TENSOR_DTYPE_BYTES[field.dtype]
    bits = part.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[width]).reshape(len(blocks), -1)
    if field.scale_floor is None:
        bad, flag = is_nan(bits, field.dtype) | is_inf(bits, field.dtype), SPECIAL
    else:
        bad, flag = is_bad_scale(bits, field.scale_floor), BAD_SCALE
    zero = (part[..., :head_bytes] == 0).all(axis=-1)
    found: IntArray = np.where(bad.any(axis=1), flag, 0)
    if field.leads:
        found |= np.where(zero.any(axis=1), ZERO_HEAD, 0)
    return found


def measured(blocks: Bytes, field: Field, device: str, tile: int = 32) -> IntArray:
    """Run the kernel on one field of some blocks: [n]."""
    return measured_together(blocks, [field], device, tile)[0]


def measured_together(
    blocks: Bytes, fields: Sequence[Field], device: str, tile: int, together: int = 1
) -> list[IntArray]:
    """Place blocks in a pool in another order, with poison between, and run the kernel."""
    order = np.random.default_rng(3).permutation(2 * len(blocks))[: len(blocks)]
    pool = np.full((2 * len(blocks), blocks.shape[1]), 0xFF, np.uint8)
    pool[order] = blocks
    found = block_flags(
        torch.from_numpy(pool.reshape(-1)).to(device),
        torch.from_numpy(order).to(device),
        blocks.shape[1],
        fields,
        together=together,
        tile=tile,
    )
    return flags_of(found.cpu().numpy(), len(fields))


def flags_of(flags: IntArray, fields: int) -> list[IntArray]:
    """Take the flags of each field out of results."""
    return [flags >> FLAG_BITS * number & (1 << FLAG_BITS) - 1 for number in range(fields)]


def normal(dtype: str, shape: tuple[int, ...], seed: int) -> Bytes:
    """Healthy numbers of about 1, as bytes along the last axis."""
    values = torch.from_numpy(np.random.default_rng(seed).standard_normal(shape))
    bits: Bytes = values.to(getattr(torch, dtype)).view(torch.uint8).numpy()
    return bits


@pytest.mark.parametrize("dtype", DTYPES)
@DEVICES
def test_healthy_numbers_have_no_flags(device: str, dtype: str) -> None:
    field = dense(dtype, items=72)
    blocks = normal(dtype, (3, 7 * 72), secrets.randbits(31))
    assert measured(blocks, field, device).tolist() == [0, 0, 0]


def bit_patterns(dtype: str, *, whole: bool) -> IntArray:
    """Return patterns of numbers: every sign and exponent, with every bit of the mantissa alone.

    whole: every pattern of up to 16 bits.
    """
    bits = 8 * TENSOR_DTYPE_BYTES[dtype]
    if bits == 8 or (whole and bits == 16):
        return np.arange(1 << bits)
    mantissa = {"bfloat16": 7, "float16": 10, "float32": 23}[dtype]
    heads = np.arange(1 << (bits - mantissa)) << mantissa
    tails = [0, *(1 << bit for bit in range(mantissa)), (1 << mantissa) - 1]
    return np.concatenate([heads + tail for tail in tails])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@DEVICES
def test_bit_patterns_are_flagged_as_by_the_reference(device: str, dtype: str) -> None:
    """The interpreter takes a minute for all patterns."""
    width = TENSOR_DTYPE_BYTES[dtype]
    patterns = bit_patterns(dtype, whole=ALL or device != "cpu").astype(f"u{width}")
    # A block of one vector for each pattern, between numbers that are healthy.
    blocks = np.zeros((len(patterns), 16 // width), patterns.dtype)
    blocks[:, 1] = patterns
    raw = blocks.view(np.uint8)
    field = dense(dtype, items=16 // width, leads=False)
    found = measured(raw, field, device, tile=1024)
    (expected,) = expected_flags(raw, [field])
    assert found.tolist() == expected.tolist()
    assert 0 < (found == SPECIAL).sum() < len(patterns)


@pytest.mark.parametrize("dtype", DTYPES)
@DEVICES
def test_one_special_number_anywhere_changes_its_block_alone(device: str, dtype: str) -> None:
    rng = np.random.default_rng(seed := secrets.randbits(31))
    field = dense(dtype, items=40)
    blocks = normal(dtype, (4, 6 * 40), seed)
    width = TENSOR_DTYPE_BYTES[dtype]
    place = int(rng.integers(6 * 40)) * width
    nan = np.array(np.nan, np.float32).view(np.uint32)
    code = {"float8_e4m3fn": 0xFF, "float8_e4m3fnuz": 0x80, "float8_e5m2": 0x7F}.get(dtype)
    if code is None:
        code = {"bfloat16": 0xFFC0, "float16": 0x7E01, "float32": int(nan)}[dtype]
    blocks[2, place : place + width] = np.frombuffer(code.to_bytes(width, "little"), np.uint8)
    assert measured(blocks, field, device).tolist() == [0, 0, SPECIAL, 0]


@pytest.mark.slow
@pytest.mark.parametrize("tile", [32, 512])
@DEVICES
def test_fields_of_packed_rows_are_looked_at_apart(device: str, tile: int) -> None:
    rng = np.random.default_rng(secrets.randbits(31))
    rows, pitch = 6, 656
    blocks = rng.integers(0, 256, (3, rows * pitch), dtype=np.uint8)
    scales = Field("scales", "float32", pitch, 512, 4, scale_floor=0.0, leads=False)
    fields = (
        Field("codes", "float8_e4m3fn", pitch, 0, 512),
        scales,
        replace(scales, scale_floor=1e-4 / 448),
        Field("rope", "bfloat16", pitch, 528, 64, leads=False),
    )
    part = blocks.reshape(3, rows, pitch)[..., 512:528].view(np.float32)
    part[...] = rng.random(part.shape)
    part[0, 2, 1], part[1, 0, 0], part[1, 1, 3], part[2, 5, 2] = -1, np.inf, 0, -0.0
    found = measured_together(blocks, fields, device, tile)
    for seen, expected in zip(found, expected_flags(blocks, fields), strict=True):
        assert seen.tolist() == expected.tolist()
    assert found[1].tolist() == [BAD_SCALE, BAD_SCALE, 0]
    assert found[2].tolist() == [BAD_SCALE, BAD_SCALE, BAD_SCALE]


@pytest.mark.slow
@DEVICES
def test_each_damage_of_a_packed_row_is_flagged_in_its_field(device: str) -> None:
    rows, pitch = 7, 656
    scales = Field("scales", "float32", pitch, 512, 4, scale_floor=0.0, leads=False)
    fields = (
        Field("codes", "float8_e4m3fn", pitch, 0, 512, excusable=True),
        scales,
        Field("rope", "bfloat16", pitch, 528, 64, leads=False),
    )
    blocks = np.full((6, rows, pitch), 0x3C, np.uint8)
    blocks[1, 6, 511] = 0xFF  # the last code of the last row
    blocks[2, 0, 512:516] = np.array([-1], np.float32).view(np.uint8)
    blocks[3, 3, 528:530] = 0x80, 0xFF  # -infinity, the first number of a row's last field
    blocks[4, 5, :16] = 0
    found = measured_together(blocks.reshape(6, -1), fields, device, 64)
    assert [flags.tolist() for flags in found] == [
        [0, SPECIAL, 0, 0, ZERO_HEAD, 0],
        [0, 0, BAD_SCALE, 0, 0, 0],
        [0, 0, 0, SPECIAL, 0, 0],
    ]
    together = measured_together(blocks.reshape(6, -1), fields, device, 64, together=3)
    assert [flags.tolist() for flags in together] == [
        [SPECIAL, ZERO_HEAD], [BAD_SCALE, 0], [0, SPECIAL],
    ]  # fmt: skip


def test_only_flags_of_fields_without_excuse_are_certain() -> None:
    field = dense("bfloat16")
    excused = replace(field, excusable=True)
    assert certain_flags([field]) == SPECIAL | BAD_SCALE
    assert certain_flags([excused]) == 0
    assert certain_flags([excused, field]) == (SPECIAL | BAD_SCALE) << FLAG_BITS


@pytest.mark.parametrize("floor", [0.0, 1e-4 / 448])
@DEVICES
def test_scales_are_legal_as_by_the_reference(device: str, floor: float) -> None:
    """Each block has one scale that is not 1: of every exponent, both signs, and by the floor."""
    tops = np.arange(1 << 9, dtype=np.uint32) << 23
    near = np.array(floor, np.float32).view(np.uint32) + np.arange(4, dtype=np.uint32) - 2
    patterns = np.concatenate([tops, tops + 1, tops + 0x7FFFFF, near.astype(np.uint32)])
    blocks = np.ones((len(patterns), 4), np.float32).view(np.uint32)
    blocks[:, 2] = patterns
    raw = blocks.view(np.uint8)
    field = dense("float32", items=4, scale_floor=floor, leads=False)
    found = measured(raw, field, device, tile=1024)
    (expected,) = expected_flags(raw, [field])
    assert found.tolist() == expected.tolist()
    assert 0 < (found == BAD_SCALE).sum() < len(patterns)


@pytest.mark.parametrize("dtype", DTYPES)
@DEVICES
def test_the_greatest_numbers_do_not_disturb_their_neighbours(device: str, dtype: str) -> None:
    bits = 8 * TENSOR_DTYPE_BYTES[dtype]
    greatest = min(FIRST_SPECIAL[dtype], 1 << (bits - 1)) - 1
    both = np.array([greatest, greatest | 1 << (bits - 1)], f"u{bits // 8}")
    field = dense(dtype, items=32)
    blocks = np.tile(both, (2, 16)).view(np.uint8)
    assert measured(blocks, field, device).tolist() == [0, 0]


@DEVICES
def test_rows_that_begin_with_zeros_are_flagged(device: str) -> None:
    field = dense("bfloat16", items=16)
    blocks = normal("bfloat16", (2, 4 * 16), 5)
    by_row = blocks.reshape(2, 4, 32)
    by_row[1, 2] = 0
    by_row[0, 3, 1:] = 0  # all but the first byte
    by_row[0, 3, 0] = 1
    assert measured(blocks, field, device).tolist() == [0, ZERO_HEAD]
    assert measured(blocks, replace(field, leads=False), device).tolist() == [0, 0]


@pytest.mark.parametrize("items", [1, 2, 3, 4, 6, 8, 10])
@DEVICES
def test_rows_of_any_whole_number_of_words(device: str, items: int) -> None:
    field = dense("float32", items=items)
    blocks = normal("float32", (4, 3 * items), 7)
    blocks[1, -1], blocks[1, -2] = 0x7F, 0xFF  # NaN at the end
    blocks[2, : field.pitch] = 0
    assert measured(blocks, field, device).tolist() == [0, SPECIAL, ZERO_HEAD, 0]


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
@DEVICES
def test_small_blocks_that_share_a_program_are_told_apart(device: str, dtype: str) -> None:
    field = dense(dtype, items=40)
    blocks = normal(dtype, (13, 2 * 40), seed := secrets.randbits(31))
    damaged = int(np.random.default_rng(seed).integers(13))
    blocks[damaged, -1], blocks[damaged, -2] = 0x7F, 0xFF  # NaN in both
    blocks[(damaged + 1) % 13, : blocks.shape[1] // 2] = 0
    expected = [0] * 13
    expected[damaged], expected[(damaged + 1) % 13] = SPECIAL, ZERO_HEAD
    assert measured(blocks, field, device, tile=64).tolist() == expected


@pytest.mark.slow
@DEVICES
def test_a_block_longer_than_a_program_has_all_its_flags(device: str) -> None:
    field = dense("float8_e4m3fn", items=16 * 90)
    blocks = normal("float8_e4m3fn", (3, 16 * 90), 9)
    blocks[0, -1] = blocks[2, 100] = 0x7F
    assert measured(blocks, field, device, tile=32).tolist() == [SPECIAL, 0, SPECIAL]


@DEVICES
def test_no_blocks_have_no_flags(device: str) -> None:
    field = dense("bfloat16")
    found = measured(np.zeros((0, 5 * field.pitch), np.uint8), field, device)
    assert found.shape == (0,)


def test_fields_of_broken_words_are_refused() -> None:
    field = dense("float8_e5m2", items=6)
    assert not supports([field])
    assert not supports([])
    assert not supports([dense("float8_e5m2")] * 11)  # more than a result has room for
    with pytest.raises(ValueError, match="whole words"):
        block_flags(torch.zeros(12, dtype=torch.uint8), torch.tensor([0]), 12, [field])


def test_blocks_that_do_not_divide_are_refused() -> None:
    pool, blocks = torch.zeros(96, dtype=torch.uint8), torch.tensor([0, 1, 0])
    field = dense("bfloat16", items=16)
    with pytest.raises(ValueError, match="3 blocks do not make groups of 2"):
        block_flags(pool, blocks, 32, [field], together=2)
    for fields in ([field, replace(field, pitch=64)], [replace(field, pitch=64)]):
        with pytest.raises(ValueError, match="a block of 32 bytes does not have rows of one pitch"):
            block_flags(pool, blocks, 32, fields)
