"""Stores with names that claim thousands of deployments."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pyarrow as pa

from hicachectl.backends.base import open_store
from hicachectl.checks.findings import findings
from hicachectl.move.planning import plan_repair
from hicachectl.pages.groups import PageGroups
from hicachectl.pages.inventory import take_inventory

if TYPE_CHECKING:
    from pathlib import Path

MODELS = 3000


def test_a_repair_is_planned_in_less_time_than_the_listing_took(tmp_path: Path) -> None:
    keys = [f"{number:064x}_model{number}_0_1.bin" for number in range(MODELS)]
    for key in keys:
        (tmp_path / key).touch()
    begun = time.process_time()
    with open_store(str(tmp_path)) as store:
        groups = PageGroups(take_inventory(store))
    listed = time.process_time()
    assert len(groups.deployments) == MODELS
    few = keys[:3]
    found = findings("truncated", keys=pa.array(few), detail="cut")
    plan = plan_repair(groups, found)
    planned = time.process_time()
    assert groups.pages_at(plan.groups).to_pylist() == [key[:64] for key in few]
    assert planned - listed < listed - begun
