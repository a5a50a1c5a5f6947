"""Write and remove the objects of page groups in a safe order.

A server treats a page as present once the page's anchor exists. SGLang's file backend writes
sidecars before the anchor and never overwrites an object. Only this module sets the order of writes
and removals:

- `publish` writes sidecars, then anchors. A reader finds each group whole or without its anchor.
- `withdraw` removes anchors, then sidecars. If a server writes to a group meanwhile, so that the
  group must still leave, `withdraw` tries again. After five attempts, such a group is FAILED.
- `roll_back` removes the objects that this run wrote, and never those of another writer.

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

    from hicachectl.formats.arrays import BoolArray, IntArray
    from hicachectl.move.results import MoveResult

_ROUNDS = 5  # most attempts of one withdrawal
# Groups with these statuses keep the objects written so far. A later attempt writes the rest of a
# RACED group.
_STAYS = (GroupStatus.DONE, GroupStatus.RACED)


@dataclass(frozen=True, slots=True, eq=False)
class GroupObjects:
    """Objects of page groups that are copied, removed or restored together.

    keys:    [n] binary keys.
    owners:  [n] group of each object, an index into the `MoveResult`.
    anchors: [n] whether the object is an anchor of its group.
    """

    keys: pa.BinaryArray
    owners: IntArray
    anchors: BoolArray

    def __len__(self) -> int:
        return len(self.owners)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failures:
    """Rules for groups with an object that cannot be read or written.

    statuses: status that the group gets, keyed by the status of the object. An object status that
        is no key gives FAILED. After a group with NO_ROOM, no later group is written.
    details: messages that replace the store's message, keyed by the status of the object.
    """

    statuses: Mapping[Status, GroupStatus]
    details: Mapping[Status, str] = field(default_factory=dict)

    def settle(
        self, result: MoveResult, group: int, key: bytes | None, status: Status, message: str
    ) -> None:
        """Set an open group's status from the status of one object."""
        became = self.statuses.get(status, GroupStatus.FAILED)
        result.fail(group, became, key, self.details.get(status, message))


# EXISTS is not a failure, because another writer's object of this key belongs to the same page.
OF_MIGRATION = Failures(
    statuses={
        Status.FULL: GroupStatus.NO_ROOM,
        Status.EXISTS: GroupStatus.RACED,
        Status.GONE: GroupStatus.GONE,
        Status.UNREACHABLE: GroupStatus.GONE,
    },
    details={
        Status.SHORT: "shorter than when it was listed; run again",
        Status.OVERSIZED: "longer than when it was listed; run again",
        Status.CHANGED: "rewritten during the copy; run again",
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
    """Write objects of open groups (`MoveResult`), sidecars first. Roll back unsuccessful groups.

    chosen: indices of the objects to write.
    write: function that writes objects by index.
    undo: function that removes objects by index.
    flush: function that makes writes durable. It is called after the sidecars and again after the
        anchors.
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
            why = found.errors.get(index, "cannot be written: the store gives no reason")
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
    """Remove this run's objects of unsuccessful groups, anchors first.

    written: [n] whether this run wrote the object. The entries of unsuccessful groups become False.
    undo: function that removes objects by index.
    """
    places = np.flatnonzero(written)
    left = places[~np.isin(result.statuses[objects.owners[places]], _STAYS)]

    def stuck(place: int, why: str) -> None:
        detail = f"written, but cannot be removed again: {why}; run hicachectl verify"
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
    """Remove objects, anchors first. Sidecars stay if the anchor of their group is not removed.

    chosen: indices of the objects to remove.
    remove: function that removes objects by index.
    on_error: takes the index of each object that could not be removed, and the reason. An object
        that stays because a writer has changed it is no error.
    """
    # Servers find a group whose anchor stays, and read its sidecars.
    anchored = np.zeros(int(objects.owners.max(initial=-1)) + 1, dtype=np.bool_)
    for stage in (objects.anchors, ~objects.anchors):
        some = chosen[stage[chosen]]
        some = some[~anchored[objects.owners[some]]]
        if not len(some):
            continue
        found = remove(some)
        stays = (found.statuses != Status.OK) & (found.statuses != Status.GONE)
        anchored[objects.owners[some[stays]]] = True
        for index in np.flatnonzero(stays & (found.statuses != Status.CHANGED)).tolist():
            on_error(int(some[index]), found.errors.get(index, "the store gives no reason"))


def withdraw(
    pending: IntArray,
    result: MoveResult,
    *,
    look_up: Callable[[IntArray], GroupObjects],
    remove: Callable[[IntArray], Result],
) -> None:
    """Remove groups, in at most five attempts, until `look_up` finds none that must still leave.

    A server that finds a half-removed group can write a new anchor beside an old sidecar. Each
    attempt therefore looks at the store again. A group that is left after the last attempt is
    FAILED.

    pending: indices in `result` of the groups to remove.
    look_up: function that takes indices of groups. It returns the present objects of the groups
        that must still leave.
    remove: function that removes objects of the last lookup by index.
    """
    for _ in range(_ROUNDS):
        objects = look_up(pending)
        if not len(objects):
            return

        def failed(place: int, why: str, objects: GroupObjects = objects) -> None:
            group, key = int(objects.owners[place]), objects.keys[place].as_py()
            result.fail(group, GroupStatus.FAILED, key, f"cannot be removed: {why}")

        remove_once(objects, np.arange(len(objects)), remove=remove, on_error=failed)
        pending = np.unique(objects.owners)
        pending = pending[result.open[pending]]
    objects = look_up(pending)
    groups, first = np.unique(objects.owners, return_index=True)
    for group, place in zip(groups.tolist(), first.tolist(), strict=True):
        why = (
            f"its page is still incomplete after {_ROUNDS} attempts, because a server keeps "
            "writing the page; run again"
        )
        result.fail(group, GroupStatus.FAILED, objects.keys[place].as_py(), why)


def _stop_behind(objects: GroupObjects, chosen: IntArray, result: MoveResult) -> None:
    """Set NO_ROOM for all open groups after the first group without room.

    Without the pages of their prefix, servers could not use these groups.
    """
    full = np.flatnonzero(result.statuses == GroupStatus.NO_ROOM)
    if len(full):
        behind = np.unique(objects.owners[chosen])
        behind = behind[(behind > full[0]) & result.open[behind]]
        result.statuses[behind] = GroupStatus.NO_ROOM
