"""Tasks: of a device's slab, as the arena places them, and of a limited rate."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest

from hicachectl.backends.arena import place
from hicachectl.verification.reading_plan import ReadingPlan, tasks_of

if TYPE_CHECKING:
    from hicachectl.io.pipeline import Task

COUNT = 25
SLAB_BYTES = 10 * 4096


@pytest.mark.parametrize(("nbytes", "together"), [(0, 10), (100, 7), (4096, 10), (9000, 3)])
def test_tasks_of_a_device_fit_its_slab(nbytes: int, together: int) -> None:
    most_objects = 7 if nbytes == 100 else 1000
    device: Any = SimpleNamespace(slab_bytes=SLAB_BYTES, most_objects=most_objects)
    tasks = planned_tasks(nbytes, device=device)
    assert max(len(task.rows) for task in tasks) == together
    assert max(place(task.capacities)[1] for task in tasks) <= SLAB_BYTES


@pytest.mark.parametrize(("limit", "together"), [(None, COUNT), (4000, 10), (100, 1)])
def test_a_task_takes_little_of_a_limited_rate(limit: int | None, together: int) -> None:
    """A task has at most the bytes of a quarter of a second, or one object."""
    tasks = planned_tasks(100, bytes_per_second=limit)
    assert max(len(task.rows) for task in tasks) == together


def planned_tasks(nbytes: int, **options: Any) -> list[Task]:
    """Return the tasks that read COUNT objects of one size, each object once."""
    inventory: Any = SimpleNamespace(
        affix_ids=np.zeros(COUNT, np.int64),
        table=SimpleNamespace(affixes=[("", ".bin")]),
        objects=pa.table({"key": [b"x"] * COUNT}),
    )
    plan = ReadingPlan(
        rows=np.arange(COUNT),
        capacities=np.full(COUNT, nbytes),
        digest=np.ones(COUNT, np.bool_),
        noted=np.zeros(COUNT, np.bool_),
        expected={},
        checkers={},
        sizes=np.full(1, nbytes),
        **options,
    )
    tasks = list(tasks_of(plan, inventory, [(0, COUNT)]))
    assert np.concatenate([task.rows for task in tasks]).tolist() == list(range(COUNT))
    return tasks
