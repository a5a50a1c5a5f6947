"""The order in which objects of page groups are written and removed.

A server treats a page as present once the page's anchor exists. SGLang's file backend writes
sidecars before the anchor and never overwrites an object. This module alone sets the order:

- `publish` writes sidecars, then anchors. A reader finds each group whole or without its anchor.
- `withdraw` removes anchors, then sidecars, and repeats until each group is whole or gone.
- `roll_back` removes objects of this run only, never those of another writer.

If an anchor cannot be removed, its group keeps its sidecars.
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
# Groups that keep their written objects; a later attempt writes the rest of a RACED group.
_STAYS = (GroupStatus.DONE, GroupStatus.RACED)


@dataclass(frozen=True, slots=True, eq=False)
class GroupObjects:
    """Objects of page groups that are moved together.

    keys:    [n] binary.
    owners:  [n] group of each object, an index into the `MoveResult`; smaller numbers come first.
    anchors: [n] whether the object is an anchor of its group.
    """

    keys: pa.BinaryArray
    owners: IntArray
    anchors: BoolArray

    def __len__(self) -> int:
        return len(self.owners)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failures:
    """Effect of an object that could not be read or written on its group.

    statuses: of the group for each status of the object; FAILED if not listed. DONE: leave the
        object out and go on. NO_ROOM also stops the following groups.
    details: messages that replace the store's own.
    differs: message for an object that reads back with other bytes.
    """

    statuses: Mapping[Status, GroupStatus]
    details: Mapping[Status, str] = field(default_factory=dict)
    differs: str = "the bytes read back differ from the bytes written"

    def settle(
        self, result: MoveResult, group: int, key: bytes | None, status: Status, message: str
    ) -> None:
        """Set the status of a group if the group is open."""
        became = self.statuses.get(status, GroupStatus.FAILED)
        result.fail(group, became, key, self.details.get(status, message))


# Another writer's object under the same key belongs to the same page.
OF_MIGRATION = Failures(
    statuses={
        Status.FULL: GroupStatus.NO_ROOM,
        Status.EXISTS: GroupStatus.RACED,
        Status.GONE: GroupStatus.GONE,
        Status.UNREACHABLE: GroupStatus.GONE,
    },
    details={
        Status.SHORT: "shorter than in the listing",
        Status.OVERSIZED: "longer than in the listing",
        Status.CHANGED: "changed during the copy",
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

    chosen: indices of the objects to write. write, undo: called with indices.
    flush: makes writes durable; called after the sidecars and after the anchors.
    failures: effect of a failed write on its group.
    Return which objects were written and not rolled back: [n].
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
    """Remove the objects that this run wrote of unsuccessful groups, anchors first.

    written: [n] objects of this run; removed objects are cleared in place.
    """
    places = np.flatnonzero(written)
    left = places[~np.isin(result.statuses[objects.owners[places]], _STAYS)]

    def stuck(place: int, why: str) -> None:
        detail = f"written, but cannot be removed again: {why}"
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
    """Remove objects, anchors first; if an anchor cannot be removed, keep its group's sidecars.

    chosen: indices. remove: called with indices. on_error: called with the index of each object
    that could not be removed, and the reason.
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
    """Remove objects one by one, group by group; skip the rest if an anchor stays (CHANGED)."""
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
    """Objects of the groups to remove, as one look at the store found them.

    objects:  all objects present; the sidecars of a group in removal order.
    rows:     [n] the same objects as rows of a listing.
    recorded: [n] number of the unchanged recorded object, or -1.
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
    """Remove groups until each is gone, or is whole again without its fault.

    A server that reads a half-removed group can write a new anchor beside an old sidecar. Each
    round therefore looks again, and removes groups that are neither whole nor gone.

    pending: groups, as indices into `result`.
    look: asks the store about groups; returns the objects to remove, none of settled groups.
    remove: called with indices into the objects of a sighting.
    take: for stores that remove one object a call: returns a function that removes an object by
        index and may raise OSError. Groups then leave one after the other, each within
        microseconds.
    note: called with the objects tried and the result.
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
        why = f"still incomplete after {_ROUNDS} attempts: a server keeps writing it; run again"
        result.fail(group, GroupStatus.FAILED, seen.objects.keys[place].as_py(), why)


def _stop_behind(objects: GroupObjects, chosen: IntArray, result: MoveResult) -> None:
    """Stop the groups after one without room: they would lack their prefix."""
    full = np.flatnonzero(result.statuses == GroupStatus.NO_ROOM)
    if len(full):
        behind = np.unique(objects.owners[chosen])
        behind = behind[(behind > full[0]) & result.open[behind]]
        result.statuses[behind] = GroupStatus.NO_ROOM
