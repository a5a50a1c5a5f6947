"""Fields of stored numbers, and what `hicachectl.kernels.values_triton` counts in them.

The numbers are those that are stored: quantised codes are not multiplied with their scales, and a
code counts whatever its scale says.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hicachectl.formats.layouts import TENSOR_DTYPE_BYTES

# zero_heads: rows whose first `Field.head_bytes` bytes are zero; 0 unless the field leads.
COUNTS = ("nan", "inf", "bad_scale", "zero_heads")
NAN, INF, BAD_SCALE, ZERO_HEADS = range(len(COUNTS))
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
