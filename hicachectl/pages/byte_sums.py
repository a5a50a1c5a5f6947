"""Sums of object sizes. A store may claim any sizes, so sums have a bound."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

if TYPE_CHECKING:
    from hicachectl.pages.inventory import IntArray

MOST_BYTES = 2**62  # of a sum; records of runs take no larger number
_BITS = 32  # of the lower half of a size: both halves of 2**31 sizes add up without overflow
_LOW = 2**_BITS - 1


def byte_sums(sizes: npt.NDArray[Any], owners: npt.NDArray[Any], count: int) -> IntArray:
    """Return the sum of the sizes of each owner, at most MOST_BYTES: [count] int64.

    sizes, owners: [objects]; sizes are not negative.
    """
    sums = np.zeros(count, dtype=np.int64)
    if not len(sizes) or int(sizes.max()) <= MOST_BYTES // len(sizes):
        np.add.at(sums, owners, sizes)
        return sums
    high = np.zeros(count, dtype=np.int64)
    np.add.at(sums, owners, sizes & _LOW)
    np.add.at(high, owners, sizes >> _BITS)
    high += sums >> _BITS
    return np.where(high < MOST_BYTES >> _BITS, (high << _BITS) + (sums & _LOW), MOST_BYTES)


def byte_sum(sizes: npt.NDArray[Any]) -> int:
    """Return the sum of sizes, at most MOST_BYTES."""
    return int(byte_sums(sizes, np.zeros(len(sizes), dtype=np.int8), 1)[0])


def column_sums(
    sizes: pa.ChunkedArray | pa.Array, owners: npt.NDArray[Any], count: int
) -> pa.Int64Array:
    """Return `byte_sums` of a column: [count], null if a size is unknown."""
    unknown = np.zeros(count, dtype=np.bool_)
    if sizes.null_count:
        unknown[owners[np.asarray(sizes.is_null())]] = True
    return pa.array(byte_sums(_numbers(sizes), owners, count), mask=unknown)


def column_sum(sizes: pa.ChunkedArray | pa.Array) -> int | None:
    """Return `byte_sum` of a column; None if a size is unknown."""
    return None if sizes.null_count else byte_sum(_numbers(sizes))


def _numbers(sizes: pa.ChunkedArray | pa.Array) -> IntArray:
    numbers = sizes.fill_null(0)
    found: IntArray = (
        numbers.to_numpy()
        if isinstance(numbers, pa.ChunkedArray)
        else numbers.to_numpy(zero_copy_only=False)
    )
    return found
