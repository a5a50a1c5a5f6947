"""Stores with names that claim thousands of deployments."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import pyarrow as pa

from hicachectl.backends.base import open_store
from hicachectl.checks.evidence import EVIDENCE_SCHEMA
from hicachectl.checks.findings import findings
from hicachectl.checks.registry import CheckSums
from hicachectl.checks.sizes import check_mixed_sizes
from hicachectl.formats.keys import grammar_of
from hicachectl.pages.deployments import SeenSize, SizeMix, assign_affixes
from hicachectl.pages.groups import PageGroups
from hicachectl.pages.scanning import take_inventory
from hicachectl.pages.tally import Tally
from tests.move.repairs import plan_for

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

Result = TypeVar("Result")

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
    calls, plan = counted(lambda: plan_for(groups, found))
    assert groups.pages_at(plan.groups).to_pylist() == [key[:64] for key in keys[:3]]
    return calls


def test_a_mix_of_sizes_is_explained_by_its_own_deployment() -> None:
    few, many = (calls_of_mixes(models) for models in (FEW, MANY))
    assert many < 2 * MANY / FEW * few


def calls_of_mixes(models: int) -> int:
    """Explain a mix of each of `models` deployments and return the number of Python calls."""
    affixes = [("", f"_model{number}_0_1.bin") for number in range(models)]
    table = assign_affixes(affixes, grammar_of("file"), None)
    sizes = tuple(SeenSize(nbytes, 3, 3, None, None) for nbytes in (8, 4))
    mixes = [
        SizeMix((number,), spec.coordinate, sizes, 6)
        for number, spec in enumerate(table.specs)
        if spec is not None
    ]
    tally = replace(Tally.nothing(table), objects=np.ones(models + 1, dtype=np.int64))
    seen = EVIDENCE_SCHEMA.empty_table()
    given = CheckSums(table=replace(table, mixes=tuple(mixes)), tally=tally, evidence=seen)
    calls, (found,) = counted(lambda: list(check_mixed_sizes(given)))
    assert len(found) == models
    return calls


def counted(work: Callable[[], Result]) -> tuple[int, Result]:
    """Return the number of Python calls of a function, and its result."""
    calls = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        result = work()
    finally:
        sys.setprofile(before)
    return calls, result
