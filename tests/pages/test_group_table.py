"""Group tables, compared with a dict of each group's objects."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicachectl.formats.objects import Coordinate, Names, Shard
from hicachectl.formats.spec import ObjectSpec
from hicachectl.pages.group_table import ABSENT, ORPHAN, PARTIAL, WHOLE, GroupTable, fill_table
from tests.speed import examples

GROUPS = 6


def spec(pool: str, rank: int, size: int, *, listed: bool = True) -> ObjectSpec:
    shard = Shard(tp_rank=rank, tp_size=size)
    return ObjectSpec(
        affix=("", f".{pool}_{rank}_{size}"),
        coordinate=Coordinate(Names("m"), pool, shard=shard),
        anchor=pool == "kv",
        trailing_pages=int(pool == "mamba"),
        listed=listed,
    )


SPECS = (
    *(spec("kv", rank, 2) for rank in range(2)),
    *(spec("indexer", rank, 2) for rank in range(2)),
    *(spec("mamba", rank, 2) for rank in range(2)),
    *(spec("mamba", rank, 3) for rank in range(3)),
    spec("extra", 0, 1, listed=False),
)

Objects = dict[tuple[int, int], int]

objects = st.dictionaries(
    st.tuples(st.integers(0, GROUPS - 1), st.integers(0, len(SPECS) - 1)),
    st.integers(0, 1000),
)


some_groups = st.lists(st.integers(0, GROUPS - 1))
some_positions = st.sets(st.integers(0, len(SPECS) - 1))


def filled(found: Objects) -> GroupTable:
    groups, positions = (np.array([key[at] for key in found], dtype=np.int64) for at in (0, 1))
    return fill_table(SPECS, GROUPS, groups, positions, np.array(list(found.values()), np.int64))


def lacking(found: Objects, group: int) -> list[int]:
    """Return the positions of the specs that a group lacks."""
    has = {position for of, position in found if of == group}
    begun = {SPECS[position].object_set for position in has}
    return [
        position
        for position, one in enumerate(SPECS)
        if position not in has and one.listed and (not one.trailing or one.object_set in begun)
    ]


@examples(50)
@given(objects)
def test_states_and_what_is_missing_follow_from_the_slots(found: Objects) -> None:
    table = filled(found)
    for group in range(GROUPS):
        state = PARTIAL if lacking(found, group) else WHOLE
        if (group, 0) not in found and (group, 1) not in found:
            state = ORPHAN
        assert table.states[group] == state
    groups, specs = table.missing()
    expected = [(group, at) for group in range(GROUPS) for at in lacking(found, group)]
    assert list(zip(groups.tolist(), specs.tolist(), strict=True)) == expected


def test_without_kv_objects_no_group_is_an_orphan() -> None:
    """DeepSeek-V4 has none on Mooncake; the first pool takes the anchor's place."""
    specs = (replace(spec("c4", 0, 1), anchor=True), spec("indexer", 0, 1))
    zero = np.zeros(1, dtype=np.int64)
    for position in range(2):
        table = fill_table(specs, 1, zero, np.array([position]), zero)
        assert table.states.tolist() == [PARTIAL]


@pytest.mark.slow
@examples(50)
@given(objects, some_groups, some_positions)
def test_slots_and_objects_of_some_specs(
    found: Objects, chosen: list[int], positions: set[int]
) -> None:
    table, groups = filled(found), np.array(chosen, dtype=np.int64)
    rising = np.array(sorted(positions), dtype=np.int64)
    expected = [[found.get((g, at), ABSENT) for at in sorted(positions)] for g in chosen]
    assert table.slots(groups, rising).tolist() == expected
    some = [any((g, at) in found for at in positions) for g in chosen]
    assert table.has_any(groups, sorted(positions)).tolist() == some
    listed = [
        (place, at, found[g, at])
        for place, g in enumerate(chosen)
        for at in range(len(SPECS))
        if (g, at) in found
    ]
    assert list(zip(*map(np.ndarray.tolist, table.objects(groups)), strict=True)) == listed
    assert table.used(groups).tolist() == sorted({at for _, at, _ in listed})


@examples(50)
@given(objects, some_positions)
def test_holders_of_some_specs(found: Objects, positions: set[int]) -> None:
    counts = [sum((group, at) in found for at in positions) for group in range(GROUPS)]
    groups, complete = filled(found).holders(sorted(positions))
    assert groups.tolist() == [g for g in range(GROUPS) if counts[g] or not positions]
    assert complete.tolist() == [counts[g] == len(positions) for g in groups.tolist()]


@pytest.mark.slow
@examples(50)
@given(objects, objects)
def test_a_table_without_the_slots_of_another(found: Objects, others: Objects) -> None:
    rest = {slot: value for slot, value in found.items() if slot not in others}
    table = filled(found).without(filled(others))
    of_group = [[value for (g, _), value in rest.items() if g == group] for group in range(GROUPS)]
    slots = table.slots(np.arange(GROUPS), np.arange(len(SPECS)))
    assert slots[slots != ABSENT].tolist() == [value for _, value in sorted(rest.items())]
    assert table.counts.tolist() == [len(values) for values in of_group]
    assert table.sums.tolist() == [sum(values) for values in of_group]
    assert table.having().tolist() == [bool(values) for values in of_group]
    assert table.states.tolist() == filled(rest).states.tolist()


@examples(50)
@given(objects)
def test_counts_and_complete_groups_of_each_set(found: Objects) -> None:
    for block in filled(found).blocks:
        own = block.columns.tolist()
        counts = [sum((group, at) in found for at in own) for group in range(GROUPS)]
        assert block.groups.tolist() == [g for g, count in enumerate(counts) if count]
        assert block.counts.tolist() == [count for count in counts if count]
        assert block.complete.tolist() == [g for g, n in enumerate(counts) if n == len(own)]


def test_of_two_objects_for_a_slot_the_first_stays() -> None:
    groups, positions = np.array([1, 1, 1]), np.array([0, 0, 1])
    table = fill_table(SPECS, GROUPS, groups, positions, np.array([7, 8, 9]))
    assert table.slots(np.array([1]), np.arange(2)).tolist() == [[7, 9]]
    assert table.blocks[0].counts.tolist() == [2]


def test_stray_objects_of_many_ranks_take_a_slot_each() -> None:
    specs = (spec("kv", 0, 1), *(spec("mamba", rank, 4096) for rank in range(4096)))
    pages = 10_000
    groups = np.tile(np.arange(pages), 2)
    positions = np.append(np.zeros(pages, dtype=np.int64), 1 + np.arange(pages) % 4096)
    table = fill_table(specs, pages, groups, positions, np.arange(2 * pages, dtype=np.int32))
    assert sum(len(block.values) for block in table.blocks) == 2 * pages
    assert (table.states == PARTIAL).all()
    assert table.slots(np.array([7]), np.array([7, 8, 9])).tolist() == [[ABSENT, pages + 7, ABSENT]]


def test_a_stray_object_of_many_ranks_takes_slots_for_its_own_page_only() -> None:
    specs = (spec("kv", 0, 1), *(spec("mamba", rank, 4096) for rank in range(4096)))
    pages = 1000
    groups = np.append(np.arange(pages), 3)
    positions = np.append(np.zeros(pages, dtype=np.int64), 1 + 17)
    table = fill_table(specs, pages, groups, positions, np.arange(pages + 1, dtype=np.int32))
    assert sum(len(block.values) for block in table.blocks) == pages + 1
    assert (table.states == PARTIAL).nonzero()[0].tolist() == [3]
    assert len(table.missing()[0]) == 4095
