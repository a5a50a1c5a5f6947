"""Stores with names that claim thousands of deployments."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pyarrow as pa

from hicachectl.backends.base import open_store
from hicachectl.checks.findings import findings
from hicachectl.move.planning import plan_repair
from hicachectl.pages.groups import PageGroups
from hicachectl.pages.inventory import take_inventory

if TYPE_CHECKING:
    from pathlib import Path

FEW, MANY = 300, 3000


def test_a_repair_looks_only_at_the_deployments_that_findings_name(tmp_path: Path) -> None:
    """Of a deployment that no finding names, a plan reads the name and does nothing more."""
    few, many = (calls_of_a_plan(tmp_path / str(models), models) for models in (FEW, MANY))
    assert many - few < 2 * (MANY - FEW)


def calls_of_a_plan(directory: Path, models: int) -> int:
    """Plan the repair of three of `models` deployments and return its number of Python calls."""
    keys = [f"{number:064x}_model{number}_0_1.bin" for number in range(models)]
    directory.mkdir()
    for key in keys:
        (directory / key).touch()
    with open_store(str(directory)) as store:
        groups = PageGroups(take_inventory(store))
    assert len(groups.deployments) == models
    found = findings("truncated", keys=pa.array(keys[:3]), detail="cut")
    calls = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        plan = plan_repair(groups, found)
    finally:
        sys.setprofile(before)
    assert groups.pages_at(plan.groups).to_pylist() == [key[:64] for key in keys[:3]]
    return calls
