"""Sizes and ages as text for people."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

if TYPE_CHECKING:
    from collections.abc import Callable


def human_size(nbytes: int | None) -> str:
    """Write bytes for people: 1536 is `1.5 KiB`, an unknown size `? B`."""
    if nbytes is None:
        return "? B"
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def human_sizes(nbytes: pa.Array) -> pa.Array:
    """Write a column of bytes for people, as `human_size` does."""
    return pc.fill_null(human_column(nbytes, human_size), human_size(None))


def human_age(seconds: float) -> str:
    """Write an age for people, in its largest whole unit: 7260 is `2h`."""
    for length, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= length:
            return f"{int(seconds // length)}{unit}"
    return f"{max(0, int(seconds))}s"


def human_column(values: pa.Array, text: Callable[[Any], str]) -> pa.StringArray:
    """Apply a text function to each distinct value of a column; null stays null."""
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    distinct = pc.dictionary_encode(values)
    return pa.array([text(v) for v in distinct.dictionary.to_pylist()], pa.string()).take(
        distinct.indices
    )
