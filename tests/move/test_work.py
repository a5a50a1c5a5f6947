"""Work on page groups: its batches, and the objects that need no transform."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from hicachectl.cli.demo_store import PROFILE
from hicachectl.formats.objects import Names
from hicachectl.formats.transfer import transfer_plan
from hicachectl.kernels.relayout import relayout
from hicachectl.move.copy_plan import _FIRST_BYTES, PageWork, _runs
from hicachectl.move.survey import Action, Route, Survey
from hicachectl.pages.deployments import Deployment
from hicachectl.pages.group_table import fill_table


def route_of(tp: int, layout: str, grammar: str) -> tuple[Route, list[int]]:
    """Return the demo's route to another deployment, and the bytes of its sources."""
    source = structs.replace(PROFILE, layout=layout)
    plan = transfer_plan(source, "file", structs.replace(source, tp=tp, linear_tp=tp), grammar)
    route = Route(
        deployment_id=0,
        deployment=Deployment(Names(), None, plan.sources),
        sources=plan.sources,
        targets=plan.destinations,
        units=plan.units,
        verbatim=False,
    )
    return route, [each.nbytes for each in plan.sources]


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
        made = [np.zeros((1, route.targets[n].nbytes), dtype=np.uint8) for n in unit.destinations]
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


MIB = 1 << 20
LIMIT = 64 * MIB


def survey_of(sizes: list[int]) -> Survey:
    """Return a survey of groups of one object each, to be copied unchanged."""
    route, _ = route_of(PROFILE.tp, "page_first", "file")
    unit = next(unit for unit in route.units if unit.identity)
    unit = replace(unit, sources=(0,), destinations=(0,))
    route = replace(route, units=(unit,), sources=route.sources[:1], targets=route.targets[:1])
    groups, only = np.arange(len(sizes)), np.zeros(len(sizes), dtype=np.int64)
    nbytes = np.array(sizes, dtype=np.int64)
    nothing = np.zeros(0, dtype=np.int64)
    return Survey(
        route=route,
        groups=groups,
        pages=pa.array([f"{number:064x}" for number in range(len(sizes))], pa.string()),
        rows=fill_table(route.sources, len(sizes), groups, only, groups),
        sizes=nbytes,
        wanted=fill_table(route.targets, len(sizes), groups, only, nbytes),
        existing=fill_table(route.targets, len(sizes), nothing, nothing, nothing),
        strays=np.zeros(len(sizes), dtype=np.bool_),
        times=pa.nulls(len(sizes), pa.int64()),
        foreign=np.zeros(len(sizes), dtype=np.bool_),
        unproven=np.zeros(len(sizes), dtype=np.bool_),
    )


def work_of(sizes: list[int]) -> PageWork:
    return PageWork(survey_of(sizes), np.arange(len(sizes)), Action.COPY)


@pytest.mark.slow
@given(st.lists(st.integers(1, 70 * MIB), max_size=200), st.integers(1, 50))
def test_batches_hold_each_group_once_in_order_and_no_more_than_the_limit(
    sizes: list[int], most_objects: int
) -> None:
    cut = list(
        work_of(sizes).batches(
            verify=False, copies=False, most_bytes=LIMIT, most_objects=most_objects
        )
    )
    assert [item for batch in cut for item in batch.items] == list(range(len(sizes)))
    for batch in cut:
        assert len(batch.items) == 1 or batch.nbytes <= LIMIT
        assert len(batch.items) <= most_objects


def test_the_first_batches_are_small_and_those_that_follow_grow_to_the_limit() -> None:
    cut = work_of([MIB] * 400).batches(
        verify=False, copies=False, most_bytes=LIMIT, most_objects=1000
    )
    assert _FIRST_BYTES == 8 * MIB
    assert [batch.nbytes // MIB for batch in cut] == [8, 16, 32, 64, 64, 64, 64, 64, 24]
