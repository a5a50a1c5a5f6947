"""How long a migration would take, from reading a little of it."""

from __future__ import annotations

import time
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from hicachectl.backends.base import Status
from hicachectl.backends.capabilities import Confirm, Leases
from hicachectl.io.pipeline import Pipeline, batches

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hicachectl.backends.base import Store
    from hicachectl.move.carrying import Manner, Order
    from hicachectl.pages.inventory import IntArray, Inventory

_SAMPLE_BYTES = 64 << 20
_SAMPLE_OBJECTS = 1024


def estimated_seconds(
    source: Store, inventory: Inventory, orders: Iterable[Order], manner: Manner, nbytes: int
) -> float | None:
    """Say how long reading so many bytes takes; None where to try would disturb the source.

    Writing overlaps with reading, and is not tried: a slower destination takes longer.
    """
    if manner.bytes_per_second is not None:
        return nbytes / manner.bytes_per_second
    if isinstance(source, (Leases, Confirm)):
        return None
    rows, sizes = _sample(orders)
    if not len(rows):
        return 0.0
    began = time.monotonic()
    tasks = batches(rows, sizes, most_objects=_SAMPLE_OBJECTS, most_bytes=8 << 20)
    pipeline = Pipeline(
        source,
        inventory.objects,
        tasks,
        lambda loaded: int(loaded.read.nbytes[loaded.read.statuses == Status.OK].sum()),
        buffer_bytes=manner.buffer_bytes,
        jobs=manner.jobs,
        identify=False,
    )
    read = sum(pipeline)
    spent = time.monotonic() - began
    return nbytes / read * spent if read else None


def _sample(orders: Iterable[Order]) -> tuple[IntArray, IntArray]:
    """Take the first objects that would be read: their rows and sizes."""
    chosen = nbytes = np.zeros(0, dtype=np.int64)
    for order in islice(orders, 1):
        _, _, chosen = order.survey.rows.objects(order.items[:_SAMPLE_OBJECTS])
        nbytes = order.survey.sizes[chosen]
    fits = np.cumsum(nbytes) <= _SAMPLE_BYTES
    fits[:1] = True
    fits[_SAMPLE_OBJECTS:] = False
    return chosen[fits], nbytes[fits]
