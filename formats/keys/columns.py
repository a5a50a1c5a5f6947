"""Coordinates of keys as Arrow columns."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.formats.objects import AXES, NAME_COLUMNS

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt

    from hicachectl.formats.keys.resolve import Resolved
    from hicachectl.formats.objects import Shard

TEXT_COLUMNS = (*NAME_COLUMNS, "pool", "part")
RANK_COLUMNS = tuple(f"{axis}_{end}" for axis in AXES for end in ("rank", "size"))
SPAN_COLUMNS = ("layers", "heads")  # half-open ranges, as in "0-16"


def coordinate_columns(
    resolved: Sequence[Resolved], affix_ids: npt.NDArray[np.int32]
) -> dict[str, pa.Array]:
    """Return each row's coordinate, as columns by name.

    Texts are dictionary arrays, and ranks are int32. A value that the key does not state is null.
    resolved: meaning of each affix, by affix id.
    affix_ids: [n] int32, negative for a foreign key.
    """
    # Values depend only on the affix, so a dictionary has at most one value per affix.
    indices = pa.array(affix_ids, mask=affix_ids < 0)
    known = [_known_fields(one) for one in resolved]

    def text(name: str) -> pa.Array:
        codes = pc.dictionary_encode(pa.array([f.get(name) for f in known], pa.string()))
        return pa.DictionaryArray.from_arrays(codes.indices.take(indices), codes.dictionary)

    def rank(name: str) -> pa.Array:
        return pa.array([fields.get(name) for fields in known], pa.int32()).take(indices)

    return {
        **{name: text(name) for name in TEXT_COLUMNS},
        **{name: rank(name) for name in RANK_COLUMNS},
        **{name: text(name) for name in SPAN_COLUMNS},
    }


def shard_fields(shard: Shard) -> dict[str, str | int | None]:
    """Return the columns of a shard; None for a value that the key does not state."""
    return {
        **{name: getattr(shard, name) for name in RANK_COLUMNS},
        **{name: _span(getattr(shard, name)) for name in SPAN_COLUMNS},
    }


def _known_fields(resolved: Resolved) -> dict[str, str | int | None]:
    """Return the fields that all readings of an affix share."""
    readings = resolved.readings if resolved.coordinate is None else (resolved.coordinate,)
    values = [
        {
            **reading.names.columns,
            "pool": reading.pool,
            "part": reading.part,
            **shard_fields(reading.shard),
        }
        for reading in readings
    ]
    if not values:
        return {}
    return {
        name: value if all(v[name] == value for v in values) else None
        for name, value in values[0].items()
    }


def _span(half_open: tuple[int, int] | None) -> str | None:
    return None if half_open is None else f"{half_open[0]}-{half_open[1]}"
