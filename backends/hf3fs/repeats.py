"""Search for a repeated key among millions, with 16 bytes of memory per key."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.formats.keys.rows import ByteRows

if TYPE_CHECKING:
    import numpy.typing as npt

# Bytes hashed at each end of a longer key.
_LOOKED_AT = 128
_WORD_BYTES = 8
_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # 2**64 divided by the golden ratio: odd, with spread bits


def repeated_key(keys: Any) -> bytes | None:
    """Return a key that occurs twice in a chunked binary array, None if all are distinct.

    Only keys with equal hashes are compared.
    """
    hashes = np.concatenate([np.zeros(0, dtype=np.uint64), *map(_hashes, keys.chunks)])
    ordered = np.sort(hashes)
    recurring = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
    if not len(recurring):
        return None
    counts = pc.value_counts(keys.filter(pa.array(np.isin(hashes, recurring))))
    found = counts.filter(pc.greater(counts.field("counts"), 1))
    twice: bytes | None = found[0]["values"].as_py() if len(found) else None
    return twice


def _hashes(keys: Any) -> npt.NDArray[np.uint64]:
    """Return hashes of keys: [n] uint64, equal for equal keys."""
    rows = ByteRows(keys)
    hashes = rows.lengths.astype(np.uint64)
    for length in np.unique(rows.lengths).tolist():
        chosen = np.flatnonzero(rows.lengths == length)
        looked_at = min(length, _LOOKED_AT)
        for at in {0, length - looked_at} if looked_at else ():
            words = _words(rows.cut_bytes(chosen, at, looked_at))
            for word in range(words.shape[1]):
                mixed = (hashes[chosen] ^ words[:, word]) * _FACTOR
                hashes[chosen] = mixed ^ (mixed >> np.uint64(32))
    return hashes


def _words(values: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64]:
    """Return byte strings [n, nbytes] as 8-byte words [n, words], padded with zeros."""
    count, nbytes = values.shape
    padded = np.zeros((count, -(-nbytes // _WORD_BYTES) * _WORD_BYTES), dtype=np.uint8)
    padded[:, :nbytes] = values
    return padded.view(np.uint64)
