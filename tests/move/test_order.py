"""The order of writes and removals: no reader ever sees an anchor without its sidecars.

A store in memory refuses some calls. After every write or removal, each group is checked as a
server would see it.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from hicachectl.backends.base import Result, Status
from hicachectl.move.order import GroupObjects, publish, withdraw
from hicachectl.move.results import GroupStatus, MoveResult

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicachectl.formats.arrays import IntArray


GROUPS, SIZE = 4, 3
WHOLE = SIZE


def objects_of_groups() -> GroupObjects:
    """Return four groups, each an anchor and two sidecars; the anchor comes first."""
    owners = np.repeat(np.arange(GROUPS), SIZE)
    keys = pa.array([f"{n}".encode() for n in range(len(owners))], pa.binary())
    return GroupObjects(keys, owners, np.arange(len(owners)) % SIZE == 0)


class Room:
    """A store of object numbers that refuses some calls, and checks each visible state."""

    def __init__(self, answers: dict[int, Status], held: set[int] | None = None) -> None:
        self.objects = objects_of_groups()
        self.answers = answers
        self.held = held if held is not None else set()

    def check(self) -> None:
        """Check that no group has its anchor without both sidecars."""
        groups: dict[int, list[bool]] = defaultdict(list)
        for number in self.held:
            groups[number // SIZE].append(bool(self.objects.anchors[number]))
        for anchors in groups.values():
            assert not any(anchors) or len(anchors) == WHOLE

    def call(self, change: Callable[[int], None]) -> Callable[[IntArray], Result]:
        """Return a call that changes one object after the other."""

        def run(places: IntArray) -> Result:
            statuses = np.zeros(len(places), dtype=np.uint8)
            errors = {}
            for index, place in enumerate(places.tolist()):
                statuses[index] = status = self.answers.get(place, Status.OK)
                if status is Status.ERROR:
                    errors[index] = "refused"
                elif status is Status.OK:
                    change(place)
                    self.check()
            return Result(statuses, errors)

        return run


REFUSALS = st.sampled_from([Status.ERROR, Status.FULL, Status.EXISTS, Status.GONE])
NUMBERS = st.integers(0, GROUPS * SIZE - 1)


@given(st.dictionaries(NUMBERS, REFUSALS, max_size=4))
def test_a_published_group_is_whole_or_rolled_back(answers: dict[int, Status]) -> None:
    store = Room(answers)
    pages = pa.array([f"{n:064x}" for n in range(GROUPS)])
    result = MoveResult.of(pages)
    undo = Room({}, store.held)
    written = publish(
        store.objects,
        np.arange(len(store.objects)),
        result,
        write=store.call(store.held.add),
        undo=undo.call(store.held.discard),
    )
    assert set(np.flatnonzero(written).tolist()) == store.held
    for group, status in enumerate(result.statuses.tolist()):
        mine = {n for n in store.held if n // SIZE == group}
        if status == GroupStatus.DONE:
            assert len(mine) == SIZE
        elif status != GroupStatus.RACED:
            assert not mine
    full = np.flatnonzero(result.statuses == GroupStatus.NO_ROOM)
    if len(full):  # no group after the first without room was written
        assert GroupStatus.DONE not in result.statuses[full[0] :]


@given(st.sets(NUMBERS), st.sets(NUMBERS))
def test_a_withdrawn_group_keeps_its_sidecars_while_an_anchor_stays(
    stuck: set[int], rewritten: set[int]
) -> None:
    store = Room(dict.fromkeys(stuck, Status.ERROR), set(range(GROUPS * SIZE)))
    result = MoveResult.of(pa.array([f"{n:064x}" for n in range(GROUPS)]))
    came = set(rewritten)

    numbers = np.array([], dtype=np.int64)

    def look(pending: IntArray) -> GroupObjects:
        nonlocal numbers
        there = [n for n in sorted(store.held) if n // SIZE in pending]
        keys = store.objects.keys.take(pa.array(there, pa.int64()))
        numbers = np.array(there, dtype=np.int64)
        return GroupObjects(keys, store.objects.owners[numbers], store.objects.anchors[numbers])

    def remove(places: IntArray) -> Result:
        found = store.call(store.held.discard)(numbers[places])
        # A server that looked before writes some sidecars again.
        again = [n for n in numbers[places].tolist() if n in came and not store.objects.anchors[n]]
        store.held.update(again)
        came.difference_update(again)
        return found

    # Each step checks that no anchor lacks a sidecar.
    withdraw(np.arange(GROUPS), result, look_up=look, remove=remove)
    for group, status in enumerate(result.statuses.tolist()):
        mine = {n for n in store.held if n // SIZE == group}
        anchor = group * SIZE
        if anchor in stuck:
            assert status == GroupStatus.FAILED
            assert len(mine) == SIZE
        elif mine & stuck:
            assert status == GroupStatus.FAILED
        else:
            assert status == GroupStatus.DONE
            assert not mine
