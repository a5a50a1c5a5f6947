"""Facts about some objects that were read, by which checks compare pages of different age."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

MOST_OBJECTS = 512  # most objects of an affix, spread evenly over the order of their writes
LEAST_OBJECTS = 8  # fewer objects of one kind are no evidence
# A sample with fewer objects of an affix does not count as compared. If an eighth of the pages had
# another setting, such a sample could have fewer than LEAST_OBJECTS objects with this setting.
ENOUGH_OBJECTS = 8 * LEAST_OBJECTS

# Shares of an object's numbers that do not exceed its quartiles.
QUARTILES = (0.25, 0.5, 0.75)
_WIDTHS = (0, 1, 2)

# written_ns: write time of the object; null if the store keeps no times.
# width: bytes of a number; 0 for an object without quartiles.
# quartile_1, quartile_2, quartile_3: codes of the numbers at the quartiles, without sign bits.
# disordered: whether the rows lie in the order of another layout; null if no check can tell.
EVIDENCE_SCHEMA = pa.schema(
    [
        ("affix", pa.int32()),
        ("written_ns", pa.int64()),
        ("width", pa.uint8()),
        *((f"quartile_{number}", pa.uint16()) for number in (1, 2, 3)),
        ("disordered", pa.bool_()),
    ]
)


def is_evidence(seen: pa.Table, affixes: int) -> bool:
    """Return whether a table of EVIDENCE_SCHEMA has only ids of known affixes and known widths.

    affixes: number of known affixes.
    """
    whole = seen.drop_columns(["written_ns", "disordered"])
    ids, widths = whole.column("affix").to_numpy(), whole.column("width").to_numpy()
    return (
        not any(column.null_count for column in whole.columns)
        and bool(((ids >= 0) & (ids < affixes)).all())
        and bool(np.isin(widths, _WIDTHS).all())
    )
