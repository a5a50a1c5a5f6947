"""The order in which objects of page groups are written and removed.

This module alone knows that order. A server believes in a page once it sees the page's anchor, and
SGLang's file backend writes a page's sidecars before its anchor and keeps objects that exist. So:

- `publish` writes sidecars, then anchors. A reader finds each group whole or without its anchor.
- `withdraw` removes anchors, then sidecars, and looks again until each group is whole or gone.
- `roll_back` removes what this run wrote, and never an object of another writer.

The sidecars of a group stay while one of its anchors does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from hicachectl.backends.base import Result, Status
from hicachectl.move.results import GroupStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import pyarrow as pa

    from hicachectl.backends.base import BoolArray, IntArray
    from hicachectl.move.results import MoveResult

_ROUNDS = 5  # of a withdrawal
# What a group keeps although it is not done: the rest of it is written in a later attempt.
_STAYS = (GroupStatus.DONE, GroupStatus.RACED)


@dataclass(frozen=True, slots=True, eq=False)
class GroupObjects:
    """Objects of page groups that are moved together.

    keys:    [n] binary.
    owners:  [n] the group of each object: its place in the `MoveResult`. Groups that are wanted
        first have the smaller numbers.
    anchors: [n] whether the object is an anchor of its group.
    """

    keys: pa.BinaryArray
    owners: IntArray
    anchors: BoolArray

    def __len__(self) -> int:
        return len(self.owners)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failures:
    """What it means for a group that an object of it was not read or not written.

    statuses: of the group; FAILED where none is named. DONE: the object is left out, and the rest
        of the group goes on. NO_ROOM stops the groups behind it as well.
    details: what to say in place of the store's own message.
    differs: what to say of an object that reads back otherwise than it was written.
    """

    statuses: Mapping[Status, GroupStatus]
    details: Mapping[Status, str] = field(default_factory=dict)
    differs: str = "reads back with other bytes than were written"

    def settle(
        self, result: MoveResult, group: int, key: bytes | None, status: Status, message: str
    ) -> None:
        """Set the status of the group, if it is open."""
        became = self.statuses.get(status, GroupStatus.FAILED)
        result.fail(group, became, key, self.details.get(status, message))


# Another writer's object under the same key is the same page.
OF_MIGRATION = Failures(
    statuses={
        Status.FULL: GroupStatus.NO_ROOM,
        Status.EXISTS: GroupStatus.RACED,
        Status.GONE: GroupStatus.GONE,
        Status.UNREACHABLE: GroupStatus.GONE,
    },
    details={
        Status.SHORT: "is shorter than it was listed",
        Status.OVERSIZED: "is longer than it was listed",
        Status.CHANGED: "was written to while it was copied",
    },
)


def publish(
    objects: GroupObjects,
    chosen: IntArray,
    result: MoveResult,
    *,
    write: Callable[[IntArray], Result],
    undo: Callable[[IntArray], Result],
    flush: Callable[[], None] = lambda: None,
    failures: Failures = OF_MIGRATION,
) -> BoolArray:
    """Write objects of open groups, sidecars first; roll back the groups that did not succeed.

    chosen: places of the objects to write. write, undo: called with places.
    flush: called after the sidecars and after the anchors, where writing is not durable by itself.
    failures: of groups of which an object is not written.
    Return which objects were written and stayed: [n].
    """
    written = np.zeros(len(objects), dtype=np.bool_)
    for stage in (~objects.anchors, objects.anchors):
        some = chosen[stage[chosen] & result.open[objects.owners[chosen]]]
        found = write(some)
        written[some[found.ok]] = True
        for index in np.flatnonzero(~found.ok).tolist():
            group, key = int(objects.owners[some[index]]), objects.keys[int(some[index])].as_py()
            status = Status(int(found.statuses[index]))
            why = found.errors.get(index, "cannot be written")
            failures.settle(result, group, key, status, why)
        flush()
        _stop_behind(objects, chosen, result)
    roll_back(objects, written, result, undo=undo)
    return written


def roll_back(
    objects: GroupObjects,
    written: BoolArray,
    result: MoveResult,
    *,
    undo: Callable[[IntArray], Result],
) -> None:
    """Remove what this run wrote of groups that did not succeed, anchors first.

    written: [n] which objects this run wrote; those that are removed are cleared in place.
    """
    places = np.flatnonzero(written)
    left = places[~np.isin(result.statuses[objects.owners[places]], _STAYS)]

    def stuck(place: int, why: str) -> None:
        detail = f"was written, and cannot be taken back: {why}"
        result.note(int(objects.owners[place]), objects.keys[place].as_py(), detail)

    remove_once(objects, left, remove=undo, on_error=stuck)
    written[left] = False


def remove_once(
    objects: GroupObjects,
    chosen: IntArray,
    *,
    remove: Callable[[IntArray], Result],
    on_error: Callable[[int, str], None],
) -> None:
    """Remove objects, anchors first; the sidecars of a group stay where an anchor does.

    chosen: places. remove: called with places. on_error: told the place of an object that could
    not be removed, and why.
    """
    believed = np.zeros(int(objects.owners.max(initial=-1)) + 1, dtype=np.bool_)
    for stage in (objects.anchors, ~objects.anchors):
        some = chosen[stage[chosen]]
        some = some[~believed[objects.owners[some]]]
        if not len(some):
            continue
        found = remove(some)
        stays = (found.statuses != Status.OK) & (found.statuses != Status.GONE)
        believed[objects.owners[some[stays]]] = True
        for index in np.flatnonzero(stays & (found.statuses != Status.CHANGED)).tolist():
            on_error(int(some[index]), found.errors.get(index, "cannot be deleted"))


def _take_each(objects: GroupObjects, take: Callable[[int], Status]) -> Result:
    """Remove one object after the other, group by group; where an anchor stays, the rest stays.

    What is not tried is CHANGED.
    """
    statuses = np.full(len(objects), Status.CHANGED, dtype=np.uint8)
    errors: dict[int, str] = {}
    order = np.lexsort((~objects.anchors, objects.owners))
    owners, anchors = objects.owners[order].tolist(), objects.anchors[order].tolist()
    believed = -1
    for place, owner, is_anchor in zip(order.tolist(), owners, anchors, strict=True):
        if owner == believed:
            continue
        status = Status.ERROR
        try:
            status = take(place)
        except OSError as error:
            errors[place] = error.strerror or str(error)
        statuses[place] = status
        if is_anchor and status is not Status.OK and status is not Status.GONE:
            believed = owner
    return Result(statuses, errors)


@dataclass(frozen=True, slots=True, eq=False)
class Sighting:
    """What a store holds, as of one look, of the groups that must leave it.

    objects:  all that is there of these groups; those of one group in the order in which they
        leave, anchors aside.
    rows:     [n] the same objects as a listing has them.
    recorded: [n] number of the recorded object that each still is, or -1.
    """

    objects: GroupObjects
    rows: pa.Table
    recorded: IntArray


def withdraw(
    pending: IntArray,
    result: MoveResult,
    *,
    look: Callable[[IntArray], Sighting],
    remove: Callable[[Sighting, IntArray], Result],
    take: Callable[[Sighting], Callable[[int], Status]] | None = None,
    note: Callable[[Sighting, IntArray, Result], None] = lambda seen, places, found: None,
) -> None:
    """Remove groups until each is gone, or whole without what was wrong with it.

    A server that looks while a group is half gone can put an anchor beside an old sidecar. So each
    round looks at every group again and removes what is neither whole nor gone.

    pending: groups, places in `result`.
    look: asks the store about groups; returns what must leave, nothing of groups that are settled.
    remove: called with places among the objects of a sighting.
    take: where every object is a call of its own: returns what removes an object by its place, and
        may raise OSError. The anchors and sidecars of one group then leave before those of the
        next, so that a group is half gone for microseconds only.
    note: told what was removed, or tried.
    """
    for _ in range(_ROUNDS):
        seen = look(pending)
        if not len(seen.objects):
            return
        objects, everything = seen.objects, np.arange(len(seen.objects))

        def removed(places: IntArray, seen: Sighting = seen) -> Result:
            found = remove(seen, places)
            note(seen, places, found)
            return found

        def failed(place: int, why: str, objects: GroupObjects = objects) -> None:
            group, key = int(objects.owners[place]), objects.keys[place].as_py()
            result.fail(group, GroupStatus.FAILED, key, why)

        if take is None:
            remove_once(objects, everything, remove=removed, on_error=failed)
        else:
            found = _take_each(objects, take(seen))
            note(seen, everything, found)
            for place, why in found.errors.items():
                failed(place, why)
        pending = np.unique(objects.owners)
        pending = pending[result.open[pending]]
    seen = look(pending)
    groups, first = np.unique(seen.objects.owners, return_index=True)
    for group, place in zip(groups.tolist(), first.tolist(), strict=True):
        why = f"written anew {_ROUNDS} times, still not whole"
        result.fail(group, GroupStatus.FAILED, seen.objects.keys[place].as_py(), why)


def _stop_behind(objects: GroupObjects, chosen: IntArray, result: MoveResult) -> None:
    """Where a group found no room, write none behind it: they would lack their prefix."""
    full = np.flatnonzero(result.statuses == GroupStatus.NO_ROOM)
    if len(full):
        behind = np.unique(objects.owners[chosen])
        behind = behind[(behind > full[0]) & result.open[behind]]
        result.statuses[behind] = GroupStatus.NO_ROOM
