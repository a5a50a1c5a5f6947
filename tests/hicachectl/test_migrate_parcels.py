"""Tests of migrating.parcels: what has to be made of what was read, and what is there as it is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hicachectl.demo import PROFILE
from hicachectl.deployments import Deployment
from hicachectl.formats.transfer import transfer_plan
from hicachectl.kernels.relayout import relayout
from hicachectl.migrating.parcels import _runs
from hicachectl.migrating.routes import Route, Target


def route_of(tp: int, layout: str, grammar: str) -> tuple[Route, list[int]]:
    """The way of the demo's pages from files to another deployment; bytes of its sources."""
    source = replace(PROFILE, layout=layout)
    plan = transfer_plan(source, "file", replace(source, tp=tp, linear_tp=tp), grammar)
    targets = tuple(
        Target(("", ""), each.coordinate, each.nbytes, each.anchor) for each in plan.destinations
    )
    sizes = [each.nbytes or 0 for each in plan.sources]
    route = Route(
        deployment_id=0,
        deployment=Deployment("", "", None, ()),
        members=np.arange(len(sizes)),
        sizes=np.array(sizes),
        targets=targets,
        units=plan.units,
        verbatim=False,
    )
    return route, sizes


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct"])
@pytest.mark.parametrize("grammar", ["mooncake", "hf3fs"])
def test_a_run_has_the_bytes_that_would_be_made(layout: str, grammar: str) -> None:
    route, sizes = route_of(PROFILE.tp, layout, grammar)
    found = 0
    for unit in route.units:
        runs = _runs(route, unit)
        if unit.identity or runs is None:
            continue
        random = np.random.default_rng(0)
        sources = [random.integers(0, 256, (1, sizes[n]), dtype=np.uint8) for n in unit.sources]
        made = [
            np.zeros((1, route.targets[n].nbytes or 0), dtype=np.uint8) for n in unit.destinations
        ]
        relayout(unit, sources, made)
        for run, expected in zip(runs, made, strict=True):
            start = run.source_offset
            there = sources[run.source][0, start : start + run.nbytes]
            assert np.array_equal(there, expected[0])
            found += 1
    assert found


def test_what_is_spread_over_a_source_is_no_run() -> None:
    route, _ = route_of(1, "page_first", "file")
    kv = [unit for unit in route.units if route.targets[unit.destinations[0]].anchor]
    assert kv
    assert all(_runs(route, unit) is None for unit in kv)
