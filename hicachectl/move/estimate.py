"""Estimate how long a migration takes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from hicachectl.backends.base import Status
from hicachectl.backends.capabilities import Confirm, Leases
from hicachectl.io.pacing import Pace
from hicachectl.io.pipeline import Pipeline, batches

if TYPE_CHECKING:
    from hicachectl.backends.base import Store
    from hicachectl.move.batches import CopyOptions
    from hicachectl.move.migration_plan import MigrationPlan
    from hicachectl.pages.inventory import IntArray

_SAMPLE_BYTES = 64 << 20
_SAMPLE_OBJECTS = 1024


def estimated_seconds(
    source: Store, plan: MigrationPlan, options: CopyOptions, nbytes: int
) -> float | None:
    """Return the seconds to read `nbytes`, from a sample; None if reading has side effects.

    Writing overlaps with reading and is not measured; a slower destination takes longer.
    """
    if options.bytes_per_second is not None:
        return Pace(options.bytes_per_second).seconds(nbytes)
    if isinstance(source, (Leases, Confirm)):
        return None
    rows, sizes = _sample(plan)
    if not len(rows):
        return 0.0
    began = time.monotonic()
    pipeline = Pipeline(
        source,
        plan.inventory.objects,
        batches(rows, sizes, most_objects=_SAMPLE_OBJECTS, most_bytes=8 << 20),
        lambda loaded: int(loaded.read.nbytes[loaded.read.statuses == Status.OK].sum()),
        buffer_bytes=options.buffer_bytes,
        jobs=options.jobs,
        identify=False,
    )
    read = sum(pipeline)
    spent = time.monotonic() - began
    return nbytes / read * spent if read else None


def _sample(plan: MigrationPlan) -> tuple[IntArray, IntArray]:
    """Return rows and sizes of the first objects to read."""
    rows = sizes = np.zeros(0, dtype=np.int64)
    if (work := next(plan.works(), None)) is not None:
        _, _, rows = work.survey.rows.objects(work.items[:_SAMPLE_OBJECTS])
        sizes = work.survey.sizes[rows]
    fits = np.cumsum(sizes) <= _SAMPLE_BYTES
    fits[:1] = True
    fits[_SAMPLE_OBJECTS:] = False
    return rows[fits], sizes[fits]
