"""Tasks for a device: objects that fit in a slab, as the arena places them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from hicachectl.backends.arena import place
from hicachectl.verify.reading_plan import ReadingPlan, tasks_of

SLAB_BYTES = 10 * 4096


@pytest.mark.parametrize(("nbytes", "together"), [(0, 10), (100, 7), (4096, 10), (9000, 3)])
def test_tasks_of_a_device_fit_its_slab(nbytes: int, together: int) -> None:
    count = 25
    most_objects = 7 if nbytes == 100 else 1000
    device: Any = SimpleNamespace(slab_bytes=SLAB_BYTES, most_objects=most_objects)
    inventory: Any = SimpleNamespace(
        affix_ids=np.zeros(count, np.int64),
        table=SimpleNamespace(affixes=[("", ".bin")]),
        objects=pa.table({"key": [b"x"] * count}),
    )
    plan = ReadingPlan(
        rows=np.arange(count),
        capacities=np.full(count, nbytes),
        digest=np.ones(count, np.bool_),
        expected={},
        checkers={},
        sizes=np.full(1, nbytes),
        device=device,
    )
    tasks = list(tasks_of(plan, inventory, [(0, count)]))
    assert max(len(task.rows) for task in tasks) == together
    assert max(place(task.capacities)[1] for task in tasks) <= SLAB_BYTES
    assert np.concatenate([task.rows for task in tasks]).tolist() == list(range(count))
