"""Vectorised access to the bytes of a column of keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import pyarrow as pa

    from hicachectl.formats.arrays import IntArray


class ByteRows:
    """The bytes of a binary array; a null is a row of 0 bytes.

    lengths: [n] int32, bytes of each row.
    """

    def __init__(self, array: pa.BinaryArray) -> None:
        _, offsets, data = array.buffers()
        bounds = np.zeros(1, dtype=np.int32)
        if len(array):
            bounds = np.frombuffer(offsets, dtype=np.int32)[array.offset :][: len(array) + 1]
        self._data = np.frombuffer(data or b"", dtype=np.uint8)
        self._starts = bounds[:-1].astype(np.int64)
        self.lengths: npt.NDArray[np.int32] = np.diff(bounds)

    def row(self, row: int) -> bytes:
        """Return the bytes of one row."""
        start = int(self._starts[row])
        return self._data[start : start + int(self.lengths[row])].tobytes()

    def cut(self, rows: IntArray, at: IntArray | int, nbytes: int) -> npt.NDArray[np.bytes_]:
        """Copy `nbytes` bytes from offset `at` of each row: [rows], dtype S`nbytes`.

        The bytes must lie within the row. numpy copies and compares strings fastest. It
        ignores trailing zeros, harmless for equal lengths.
        """
        places = self._starts[rows] + at
        if not len(places):
            return np.empty(0, dtype=f"S{nbytes}")
        windows: npt.NDArray[np.bytes_] = np.ndarray(
            (len(self._data) - nbytes + 1,), f"S{nbytes}", self._data.data, strides=(1,)
        )
        cut: npt.NDArray[np.bytes_] = windows[places]
        return cut

    def cut_bytes(self, rows: IntArray, at: IntArray | int, nbytes: int) -> npt.NDArray[np.uint8]:
        """Copy the bytes like `cut`: [rows, nbytes] uint8."""
        return self.cut(rows, at, nbytes).view(np.uint8).reshape(len(rows), nbytes)
