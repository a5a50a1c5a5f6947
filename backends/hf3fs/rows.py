"""What a 3FS store lists of its keys, as record batches whose columns cost little."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from hicachectl.backends.hf3fs.tables import UNKNOWN

if TYPE_CHECKING:
    from hicachectl.backends.base import BoolArray, IntArray

_SHARED_ROWS = 16384
_VERSION_BYTES = 8


def batch_of(schema: Any, keys: Any, indices: IntArray, nbytes: int | None) -> Any:
    """Make a batch of keys of one table, whose columns of one value all batches share.

    indices: [n] int64 page indices, UNKNOWN where no locator and no version is known. nbytes: of
    each page, None where that is not known.
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
    """Give a column of one number, or of nulls, in memory that others of it have as well."""
    return _column_of(value, -(-count // _SHARED_ROWS) * _SHARED_ROWS).slice(0, count)


def _versions(indices: IntArray, unknown: BoolArray) -> Any:
    """Write page indices as versions of objects; null where they are not known."""
    import pyarrow.compute as pc  # 20 ms at start-up that most commands need not pay

    versions = pa.FixedSizeBinaryArray.from_buffers(
        pa.binary(_VERSION_BYTES),
        len(indices),
        [None, pa.py_buffer(np.ascontiguousarray(indices, dtype="<i8"))],
    ).cast(pa.binary())
    return pc.if_else(pa.array(unknown), None, versions)
