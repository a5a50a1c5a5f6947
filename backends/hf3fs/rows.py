"""Record batches of a 3FS store's keys, with columns that take little memory."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from hicachectl.backends.hf3fs.tables import UNKNOWN

if TYPE_CHECKING:
    from hicachectl.formats.arrays import BoolArray, IntArray

_SHARED_ROWS = 16384
_VERSION_BYTES = 8


def batch_of(schema: Any, keys: Any, indices: IntArray, nbytes: int | None) -> Any:
    """Return a record batch of one table's keys. Constant columns of all batches share memory.

    indices: [n] int64 page indices, UNKNOWN for null locator and version.
    nbytes:  bytes of each page, None if unknown.
    """
    unknown = indices == UNKNOWN
    columns = {
        "key": lambda: keys,
        "nbytes": lambda: _all_alike(nbytes, len(indices)),
        "locator": lambda: pa.array(indices, mask=unknown if unknown.any() else None),
        "version": lambda: _versions(indices, unknown),
        "mtime_ns": lambda: _all_alike(None, len(indices)),
    }
    arrays = [
        columns[f.name]() if f.name in columns else pa.nulls(len(indices), f.type) for f in schema
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


@lru_cache(maxsize=8)
def _column_of(value: int | None, count: int) -> Any:
    return pa.repeat(pa.scalar(value, pa.int64()), count)


def _all_alike(value: int | None, count: int) -> Any:
    return _column_of(value, -(-count // _SHARED_ROWS) * _SHARED_ROWS).slice(0, count)


def _versions(indices: IntArray, unknown: BoolArray) -> Any:
    import pyarrow.compute as pc  # imported late: costs 20 ms at start-up

    versions = pa.FixedSizeBinaryArray.from_buffers(
        pa.binary(_VERSION_BYTES),
        len(indices),
        [None, pa.py_buffer(np.ascontiguousarray(indices, dtype="<i8"))],
    ).cast(pa.binary())
    return pc.if_else(pa.array(unknown), None, versions)
