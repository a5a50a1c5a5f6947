"""Check a store's replicas: different sizes, and objects without a fast replica."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.checks.findings import object_findings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicachectl.checks.registry import CheckInput

# NVMe over Fabrics ("nof") counts as memory.
_IN_MEMORY = pa.array(["memory", "nof"])


def check_placement(given: CheckInput) -> Iterator[pa.Table]:
    """Yield replica-mismatch and disk-only findings; the scan must have `replicas`."""
    inventory = given.inventory
    if "replicas" not in inventory.objects.column_names:  # an empty scan has no batch
        return
    column = inventory.objects.column("replicas").combine_chunks()
    counts = pc.list_value_length(column).fill_null(0).to_numpy().astype(np.int64)
    rows = np.flatnonzero(counts)
    replicas = column.flatten()
    starts = np.cumsum(counts[rows]) - counts[rows]
    sizes = replicas.field("nbytes").fill_null(-1).to_numpy()
    in_memory = pc.is_in(replicas.field("kind"), _IN_MEMORY).to_numpy(zero_copy_only=False)
    if not len(rows):
        return
    smallest, largest = (f.reduceat(sizes, starts) for f in (np.minimum, np.maximum))
    fast = np.logical_or.reduceat(in_memory, starts)
    uneven, detail = rows[smallest != largest], "replicas of the object differ in size"
    yield object_findings(inventory, uneven, "replica-mismatch", detail)
    yield object_findings(inventory, rows[~fast], "disk-only")
