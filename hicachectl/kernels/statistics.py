"""What one pass over a run of stored numbers tells: the form of it, and the reference in numpy.

The numbers are those that are stored: quantised codes are not multiplied with their scales, and a
code counts whatever its scale says. Beside it: `hicachectl.kernels.values_triton`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from hicachectl.formats.layouts import TENSOR_DTYPE_BYTES
from hicachectl.kernels.values import is_bad_scale, is_inf, is_nan, to_float32

if TYPE_CHECKING:
    from hicachectl.kernels.values import Bytes, IntArray

COUNTS = ("nan", "inf", "zero", "bad_scale", "zero_heads")
NAN, INF, ZERO, BAD_SCALE, ZERO_HEADS = range(len(COUNTS))
HEAD_BYTES = 16  # of a row, by which rows of zero bytes are told from others at a first look


@dataclass(frozen=True, slots=True)
class Field:
    """Equal numbers in every row of a block: `items` of them from `offset` on.

    rows, pitch: how many rows a block has, and the bytes of one.
    scale_floor: for fp32 scales, the least that is legal; None for ordinary numbers.
    leads:       whether rows begin with this field: its head then tells rows of zero bytes.
    excusable:   whether NaN may be legal: codes under a scale of 0 mean nothing.
    """

    name: str
    dtype: str
    rows: int
    pitch: int
    offset: int
    items: int
    scale_floor: float | None = None
    leads: bool = True
    excusable: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the field in one row."""
        return self.items * TENSOR_DTYPE_BYTES[self.dtype]

    @property
    def head_bytes(self) -> int:
        """Bytes of a row's head: HEAD_BYTES, or what a vector of the field has where that is less.

        The greatest power of two up to HEAD_BYTES that divides rows, field and offset.
        """
        return int(np.gcd.reduce([HEAD_BYTES, self.nbytes, self.pitch, self.offset]))


@dataclass(frozen=True, slots=True)
class Statistics:
    """Of each block: counts [n, 5] int64 in the order of COUNTS, and [n] float64 each.

    Extremes and sums are of the finite numbers. zero: numbers equal to 0, so -0 too.
    zero_heads: rows whose first `Field.head_bytes` bytes are zero; 0 unless the field leads.
    """

    counts: IntArray
    absolute_maximum: npt.NDArray[np.float64]
    sum: npt.NDArray[np.float64]
    sum_of_squares: npt.NDArray[np.float64]


def statistics_reference(blocks: Bytes, field: Field) -> Statistics:
    """Look at blocks [n, rows * pitch] of stored bytes, in double precision."""
    rows = np.ascontiguousarray(blocks).reshape(len(blocks), field.rows, field.pitch)
    part = np.ascontiguousarray(rows[..., field.offset : field.offset + field.nbytes])
    width = TENSOR_DTYPE_BYTES[field.dtype]
    bits = part.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[width]).reshape(len(blocks), -1)
    nan, inf = is_nan(bits, field.dtype), is_inf(bits, field.dtype)
    values = np.where(nan | inf, np.float32(0), to_float32(bits, field.dtype)).astype(np.float64)
    floor = field.scale_floor
    bad = np.zeros(bits.shape, np.bool_) if floor is None else is_bad_scale(bits, floor)
    heads = part[..., : field.head_bytes].any(axis=-1) | (not field.leads)
    counted = (nan, inf, (values == 0) & ~nan & ~inf, bad, ~heads)
    return Statistics(
        counts=np.stack([marks.reshape(len(blocks), -1).sum(axis=1) for marks in counted], axis=1),
        absolute_maximum=np.abs(values).max(axis=1, initial=0),
        sum=values.sum(axis=1),
        sum_of_squares=(values**2).sum(axis=1),
    )
