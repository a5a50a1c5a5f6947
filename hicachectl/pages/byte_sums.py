"""Sums of object sizes, with a bound: a store may claim any sizes.

Sums are exact up to 2**53 bytes. Larger ones are rounded, as floating point numbers are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

if TYPE_CHECKING:
    from hicachectl.formats.arrays import IntArray

MOST_BYTES = 2**61  # two such sums add up in 64 bits; records of runs take no larger number


def byte_sums(sizes: npt.NDArray[Any], owners: npt.NDArray[Any], count: int) -> IntArray:
    """Return the sum of the sizes of each owner, at most MOST_BYTES: [count] int64.

    sizes, owners: [objects]; sizes are not negative.
    """
    sums = np.bincount(owners, weights=sizes, minlength=count)
    bounded: IntArray = np.minimum(sums, MOST_BYTES).astype(np.int64)
    return bounded


def byte_sum(sizes: npt.NDArray[Any]) -> int:
    """Return the sum of sizes, at most MOST_BYTES."""
    return min(int(sizes.sum(dtype=np.float64)), MOST_BYTES)


def column_sums(
    sizes: pa.ChunkedArray | pa.Array, owners: npt.NDArray[Any], count: int
) -> pa.Int64Array:
    """Return `byte_sums` of a column: [count], null if a size is unknown."""
    unknown = np.zeros(count, dtype=np.bool_)
    unknown[owners[np.asarray(sizes.is_null())]] = True
    return pa.array(byte_sums(_numbers(sizes), owners, count), mask=unknown)


def column_sum(sizes: pa.ChunkedArray | pa.Array) -> int | None:
    """Return `byte_sum` of a column; None if a size is unknown."""
    return None if sizes.null_count else byte_sum(_numbers(sizes))


def _numbers(sizes: pa.ChunkedArray | pa.Array) -> IntArray:
    numbers: IntArray = np.asarray(sizes.fill_null(0))
    return numbers
