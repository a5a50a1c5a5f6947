"""Find values that no healthy object holds: NaN, Inf, bad scales, rows of zero bytes.

An object is cut into `RowTable`s. Each kernel takes a block: consecutive rows of several objects.
`may_hold_bad_values` reads integer views, without conversion or copy. The slower `count_bad` runs
only if `may_hold_bad_values` returns True.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hicachectl.formats.layouts import TENSOR_DTYPE_BYTES, Column

if TYPE_CHECKING:
    from hicachectl.formats.arrays import BoolArray, IntArray

Bytes = npt.NDArray[np.uint8]
Bits = npt.NDArray[np.unsignedinteger[Any]]  # unsigned integers of an item's width

BAD_ITEMS = ("nan", "inf", "bad-scale")

_INF_BITS32 = 0x7F800000
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32}
_SIGNED = {1: np.int8, 2: np.int16, 4: np.int32}
# Bits of infinity. Every larger magnitude is NaN.
INFINITY = {"bfloat16": 0x7F80, "float16": 0x7C00, "float32": _INF_BITS32, "float8_e5m2": 0x7C}
# Least bits that are not a finite number. fp8 dtypes without infinity have one NaN, and
# float8_e4m3fnuz has this NaN in place of -0.
FIRST_SPECIAL = {**INFINITY, "float8_e4m3fn": 0x7F, "float8_e4m3fnuz": 0x80, "ue8m0": 0xFF}
_FP8_FORM = {  # mantissa bits, exponent bias
    "float8_e4m3fn": (3, 7),
    "float8_e4m3fnuz": (3, 8),
    "float8_e5m2": (2, 15),
}


@dataclass(frozen=True, slots=True)
class RowTable:
    """Equal rows of `pitch` bytes, consecutive from `offset` on.

    axes, shape: axes of the row number and their lengths, outermost first.
    runs:        half-open ranges of rows to check. All other rows are padding.
    """

    name: str
    offset: int
    pitch: int
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    columns: tuple[Column, ...]
    runs: tuple[tuple[int, int], ...]

    @property
    def rows(self) -> int:
        """Number of rows, padding included."""
        return prod(self.shape)

    def block(self, objects: Bytes, start: int, stop: int) -> Bytes:
        """Return a view of rows of objects [n, nbytes]: [n, rows * pitch]."""
        return objects[:, self.offset + start * self.pitch : self.offset + stop * self.pitch]


def may_hold_bad_values(block: Bytes, table: RowTable) -> bool:
    """Return False if `count_bad` would find nothing. True does not mean that it finds something.
    block: [n, rows * pitch] with contiguous rows.
    """
    return any(
        _has_special(_items(block, table, column), column.dtype)
        if column.scale_floor is None or column.dtype != "float32"
        else _has_bad_scale(_items(block, table, column), column.scale_floor)
        for column in table.columns
    )


def count_bad(block: Bytes, table: RowTable) -> dict[str, IntArray]:
    """Count bad items of each kind in each row of a block [n, rows * pitch]: [n, rows]."""
    return {
        code: sum(
            (bad_items(block, table, column, code).sum(axis=-1) for column in table.columns),
            start=np.zeros((len(block), block.shape[1] // table.pitch), np.int64),
        )
        for code in BAD_ITEMS
    }


def bad_items(block: Bytes, table: RowTable, column: Column, code: str) -> BoolArray:
    """Mark bad items of one kind of BAD_ITEMS in a column: [n, rows, items]."""
    bits = item_bits(block, table, column)
    if (code == "bad-scale") != (column.scale_floor is not None):
        return np.zeros(bits.shape, np.bool_)
    if column.scale_floor is not None and column.dtype == "float32":
        return is_bad_scale(bits, column.scale_floor)
    found = is_inf(bits, column.dtype) if code == "inf" else is_nan(bits, column.dtype)
    if column.scales is not None and not column.scales.scale_floor:
        live = item_bits(block, table, column.scales) & 0x7FFFFFFF != 0
        tile = column.items // column.scales.items
        found &= np.repeat(live, tile, axis=-1)
    return found


def zero_rows(block: Bytes, table: RowTable) -> tuple[IntArray, IntArray]:
    """Return the objects and rows of all rows of zero bytes in a block [n, rows * pitch].

    Only rows whose first word is zero are read in full.
    """
    width = next(width for width in (8, 4, 2, 1) if table.pitch % width == 0)
    first = block.view(f"u{width}")[:, :: table.pitch // width] == 0
    if not first.any():
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    objects, rows = np.nonzero(first)
    zero = ~block.reshape(len(block), -1, table.pitch)[objects, rows].any(axis=-1)
    return objects[zero], rows[zero]


def is_nan(bits: Bits, dtype: str) -> BoolArray:
    """Mark NaN among items."""
    if dtype in ("float8_e4m3fnuz", "ue8m0"):
        nan: BoolArray = bits == FIRST_SPECIAL[dtype]
    elif dtype in INFINITY:
        nan = _magnitudes(bits) > INFINITY[dtype]
    else:
        nan = _magnitudes(bits) == FIRST_SPECIAL[dtype]
    return nan


def is_inf(bits: Bits, dtype: str) -> BoolArray:
    """Mark infinities among items."""
    if dtype not in INFINITY:
        return np.zeros(bits.shape, np.bool_)
    inf: BoolArray = _magnitudes(bits) == INFINITY[dtype]
    return inf


def is_bad_scale(bits: Bits, floor: float) -> BoolArray:
    """Mark fp32 scales that are not finite, or are more than one ulp below the floor.

    bits: bits of the scales, as uint32.
    floor: least scale that a server writes, a normal number. If it is 0, -0 and subnormal scales
        are legal.
    """
    low = floor_bits(floor)
    good = (bits >= low) & (bits < _INF_BITS32)
    if not floor:
        good |= bits == 0x80000000
    return ~good


def to_float32(bits: Bits, dtype: str) -> npt.NDArray[np.float32]:
    """Convert items to fp32. The conversion is exact for every dtype."""
    if dtype == "float32":
        values: npt.NDArray[np.float32] = bits.view(np.float32)
    elif dtype == "float16":
        values = bits.view(np.float16).astype(np.float32)
    elif dtype == "bfloat16":
        values = (bits.astype(np.uint32) << 16).view(np.float32)
    else:
        values = fp8_values(dtype)[bits]
    return values


@cache
def fp8_values(dtype: str) -> npt.NDArray[np.float32]:
    """Return the values of the 256 codes of an fp8 dtype."""
    mantissa_bits, bias = _FP8_FORM[dtype]
    codes = np.arange(256, dtype=np.uint8)
    exponent = (codes.astype(np.int64) & 0x7F) >> mantissa_bits
    fraction = (codes & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    size = np.where(exponent == 0, fraction * 2.0, 1 + fraction) * 2.0 ** (exponent - bias)
    values: npt.NDArray[np.float32] = np.where(codes & 0x80, -size, size).astype(np.float32)
    values[is_inf(codes, dtype)] *= np.float32(np.inf)
    values[is_nan(codes, dtype)] = np.nan
    values.flags.writeable = False
    return values


def item_bits(block: Bytes, table: RowTable, column: Column) -> Bits:
    """Return a column of a block [n, rows * pitch] as unsigned integers: [n, rows, items]."""
    return _items(block, table, column).reshape(len(block), -1, column.items)


def _items(block: Bytes, table: RowTable, column: Column) -> Bits:
    """View a column as unsigned integers, in the shape that numpy reduces fastest."""
    unsigned = _UNSIGNED[TENSOR_DTYPE_BYTES[column.dtype]]
    if column.nbytes == table.pitch:
        return block.view(unsigned)
    rows = block.reshape(len(block), -1, table.pitch)
    if column.pitch:
        count, (start, skipped) = column.shape[0], divmod(column.offset, column.pitch)
        rows = rows[..., start * column.pitch : (start + count) * column.pitch]
        apart = rows.reshape(len(block), -1, count, column.pitch)
        return apart[..., skipped : skipped + column.nbytes // count].view(unsigned)
    return rows[..., column.offset : column.offset + column.nbytes].view(unsigned)


def _has_special(bits: Bits, dtype: str) -> bool:
    """Return whether any number is NaN or infinite. Only the largest of each sign is compared."""
    signed = bits.view(_SIGNED[bits.itemsize])
    if dtype == "float8_e4m3fnuz":
        return int(signed.min()) == -0x80
    if dtype == "ue8m0":
        return int(bits.max()) == FIRST_SPECIAL[dtype]
    first = FIRST_SPECIAL[dtype]
    sign = 1 << (8 * bits.itemsize - 1)
    return int(signed.max()) >= first or int(bits.max()) >= first + sign


def _has_bad_scale(bits: Bits, floor: float) -> bool:
    signed = bits.view(np.int32)  # positive floats keep their order; negative floats are lower
    return int(signed.min()) < floor_bits(floor) or int(signed.max()) >= _INF_BITS32


def floor_bits(floor: float) -> int:
    """Return the bits of the least legal scale, one ulp below a floor; 0 if the floor is 0."""
    # A floor is a quotient, which SGLang's kernels may round one ulp lower than Python does.
    return int(np.float32(floor).view(np.uint32)) - 1 if floor else 0


def _magnitudes(bits: Bits) -> Bits:
    magnitudes: Bits = bits & bits.dtype.type((1 << (8 * bits.itemsize - 1)) - 1)
    return magnitudes
