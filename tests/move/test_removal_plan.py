"""Groups to remove: their statuses, and subsets.

The statuses of all groups at once are compared with their definition, slot by slot.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicachectl.move.removal_plan import FACTS, RemovalBatch, Shape, same_objects
from hicachectl.move.results import GroupStatus
from hicachectl.pages.group_table import ABSENT

SLOTS = 4
COUNTS = st.integers(0, 4)
FLAGS = st.lists(st.booleans(), min_size=SLOTS, max_size=SLOTS)


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    """Draw a shape of up to four slots."""
    count = draw(st.integers(1, SLOTS))
    flags = st.lists(st.booleans(), min_size=count, max_size=count).map(np.array)
    slots = st.integers(0, count - 1)
    pairs = np.array(sorted(draw(st.sets(st.tuples(slots, slots), max_size=4))), dtype=np.int64)
    sets = st.lists(st.sampled_from([ABSENT, 0, 7]), min_size=count, max_size=count)
    return Shape(
        affixes=tuple((f"{number}-", ".bin") for number in range(count)),
        anchors=draw(flags),
        required=draw(flags),
        trailing=np.array(draw(sets), dtype=np.int64),
        sidecars=(pairs.reshape(-1, 2)[:, 0], pairs.reshape(-1, 2)[:, 1]),
    )


@st.composite
def recorded(draw: st.DrawFn) -> RemovalBatch:
    """Draw groups of one shape; each has some of its objects."""
    shape = draw(shapes())
    held = [[n for n in range(len(shape)) if draw(st.booleans())] for _ in range(draw(COUNTS))]
    owners = [group for group, slots in enumerate(held) for _ in slots]
    count = len(owners)
    facts = {
        "nbytes": draw(st.lists(st.none() | st.integers(0, 9), min_size=count, max_size=count)),
        "mtime_ns": pa.nulls(count, pa.int64()),
        "version": pa.array([b"v"] * count, pa.binary()),
    }
    cells = len(held) * len(shape)
    return RemovalBatch(
        numbers=np.arange(len(held)),
        pages=pa.array([f"{n:064x}" for n in range(len(held))], pa.string()),
        shape=shape,
        by_choice=False,
        absent=np.array([draw(st.booleans()) for _ in range(cells)], dtype=np.bool_),
        lacked=np.array([draw(st.booleans()) for _ in range(cells)], dtype=np.bool_),
        owners=np.array(owners, dtype=np.int64),
        slots=np.array([slot for slots in held for slot in slots], dtype=np.int64),
        unwanted=np.array([draw(st.booleans()) for _ in range(count)], dtype=np.bool_),
        facts=pa.table(facts, schema=FACTS),
    )


def is_whole(shape: Shape, absent: set[int], lacked: set[int], there: set[int]) -> bool:
    """Return whether a group is whole: absent slots may be empty, lacked ones may not."""
    if not lacked <= there:
        return False
    asked = [n for n in range(len(shape)) if n in there or n not in absent]
    if any(shape.required[n] and n not in there for n in asked):
        return False
    sets: dict[int, set[bool]] = {}
    for number in asked:
        sets.setdefault(int(shape.trailing[number]), set()).add(number in there)
    return all(len(found) == 1 for number, found in sets.items() if number != ABSENT)


def judged(groups: RemovalBatch, group: int, there: set[int], known: set[int]) -> GroupStatus:
    """Return the status of one group. there: filled slots. known: indices of unchanged objects."""
    shape = groups.shape
    start = group * len(shape)
    absent, lacked = (
        {n for n in range(len(shape)) if of_cells[start + n]}
        for of_cells in (groups.absent, groups.lacked)
    )
    if not there:
        return GroupStatus.GONE
    if any(groups.unwanted[place] for place in known):
        return GroupStatus.DONE
    if is_whole(shape, absent, lacked, there):
        return GroupStatus.KEPT
    pairs = zip(*(slots.tolist() for slots in shape.sidecars), strict=True)
    overtaken = any(anchor in there and sidecar not in there for anchor, sidecar in pairs)
    return GroupStatus.DONE if known or overtaken else GroupStatus.IN_FLIGHT


@pytest.mark.slow
@given(recorded(), st.data())
def test_groups_are_judged_as_each_one_is_by_itself(
    groups: RemovalBatch, data: st.DataObject
) -> None:
    cells = len(groups.cell_owners)
    present = np.array([data.draw(st.booleans()) for _ in range(cells)], dtype=np.bool_)
    known = present[groups.cells]
    known &= np.array([data.draw(st.booleans()) for _ in known], dtype=np.bool_)
    statuses = groups.judge(present, known).tolist()
    for group, status in enumerate(statuses):
        start, end = (number * len(groups.shape) for number in (group, group + 1))
        there = set(np.flatnonzero(present[start:end]).tolist())
        mine = set(np.flatnonzero(known & (groups.owners == group)).tolist())
        assert status == judged(groups, group, there, mine)


@pytest.mark.slow
@given(recorded(), st.data())
def test_some_groups_keep_their_keys_without_objects(
    groups: RemovalBatch, data: st.DataObject
) -> None:
    chosen = [n for n in range(len(groups)) if data.draw(st.booleans())]
    some = groups.emptied(np.array(chosen, dtype=np.int64))
    assert some.pages.to_pylist() == [f"{n:064x}" for n in chosen]
    cells = np.flatnonzero(np.isin(groups.cell_owners, chosen))
    assert some.keys_of(np.arange(len(cells))).equals(groups.keys_of(cells))
    for ours, theirs in ((some.absent, groups.absent), (some.lacked, groups.lacked)):
        assert ours.tolist() == theirs[cells].tolist()
    assert not len(some.cells)
    assert some.nbytes.to_pylist() == [0] * len(chosen)


def test_versions_tell_objects_apart_and_else_size_and_time() -> None:
    rows = [(1, 2, b"a"), (1, 2, None), (1, None, None)]

    def table(row: tuple[int | None, int | None, bytes | None]) -> pa.Table:
        nbytes, mtime_ns, version = row
        facts = {"nbytes": nbytes, "mtime_ns": mtime_ns, "version": version}
        return pa.Table.from_pylist([facts], schema=FACTS)

    same = [[bool(same_objects(table(one), table(other))[0]) for other in rows] for one in rows]
    assert same == [[True, True, False], [True, True, False], [False, False, True]]
    assert not same_objects(table((1, 2, b"a")), table((1, 2, b"b")))[0]
    assert same_objects(table((1, 2, b"a")), table((9, 9, b"a")))[0]
