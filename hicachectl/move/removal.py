"""Take page groups out of a store so that each ends whole or gone, also under a live writer.

SGLang's file backend skips objects that exist and writes a page's sidecars before its anchor. So
a server that looks while a group is half gone can put an anchor beside an old sidecar: after each
round every group is looked at again, and what is neither whole nor gone is taken once more.
"""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Protocol

import pyarrow as pa

from hicachectl.backends.base import Status
from hicachectl.move.records import Facts, TakenGroup, TakenObject

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from hicachectl.backends.base import Result, Store
    from hicachectl.backends.capabilities import Mover

ROUNDS = 5


class Standing(Enum):
    """How a group is."""

    NOTHING = 0
    SOUND = 1  # whole, with nothing unwanted in it
    COMING = 2  # all of it new, and what is there came in order: a server is writing the page
    BAD = 3


@dataclass(slots=True)
class Work:
    """A group while it is taken away.

    taken: slots whose recorded object has left. removed: how many of these we took, new: how
    many others had to go as well. gone: objects that had vanished. touched: by us, or by the run
    that began with it.
    """

    group: TakenGroup
    taken: set[int] = field(default_factory=set)
    removed: int = 0
    new: int = 0
    gone: int = 0
    touched: bool = False
    standing: Standing = Standing.BAD
    error: tuple[bytes, str] | None = None

    def judge(self, there: Mapping[int, Facts]) -> Standing:
        """Judge by what is there, by slot."""
        if not there:
            return Standing.NOTHING
        known = self.recorded(there)
        if any(recorded.unwanted for recorded in known.values()):
            return Standing.BAD
        if is_whole(self.group, there):
            return Standing.SOUND
        # No writer skips a sidecar but for one that was there, and is not any more.
        overtaken = any(set(self.group.shape[slot].sidecars) - there.keys() for slot in there)
        return Standing.BAD if known or overtaken else Standing.COMING

    def recorded(self, there: Mapping[int, Facts]) -> dict[int, TakenObject]:
        """Return the recorded objects, by slot, that are still what is there."""
        return {
            taken.slot: taken
            for taken in self.group.objects
            if taken.slot in there
            and taken.slot not in self.taken
            and taken.facts.same(there[taken.slot])
        }


@dataclass(frozen=True, slots=True)
class Target:
    """An object that is to leave: what it was when last seen, and in which row of that look."""

    slot: int
    key: bytes
    facts: Facts
    row: int
    recorded: TakenObject | None
    anchor: bool


@dataclass(frozen=True, slots=True)
class Look:
    """What is there of some keys, as of one moment. rows: a table as a scan gives it."""

    rows: pa.Table
    places: dict[bytes, int]
    facts: list[Facts]

    def of(self, group: TakenGroup) -> dict[int, Facts]:
        """Return what is there of a group, by slot."""
        places = ((slot, self.places.get(key)) for slot, key in enumerate(group.keys))
        return {slot: self.facts[place] for slot, place in places if place is not None}


def look(store: Store, groups: Iterable[TakenGroup]) -> Look:
    """Ask a store for every object that some groups can have."""
    keys = [key for group in groups for key in group.keys]
    columns = [
        "nbytes",
        "mtime_ns",
        "version",
        *(["locator"] if "locator" in store.traits.columns else []),
    ]
    rows = store.look(pa.table({"key": pa.array(keys, pa.binary())}), columns)
    facts = map(Facts, *(rows.column(name).to_pylist() for name in columns[:3]))
    places = {key: place for place, key in enumerate(rows.column("key").to_pylist())}
    return Look(rows, places, list(facts))


def is_whole(group: TakenGroup, there: Mapping[int, Facts]) -> bool:
    """Whether a group has all that a page needs, its absent slots aside."""
    sets: dict[int, set[bool]] = defaultdict(set)
    for number, slot in enumerate(group.shape):
        present = number in there
        if number in group.absent and not present:
            continue
        if slot.required and not present:
            return False
        if slot.trailing is not None:
            sets[slot.trailing].add(present)
    return all(len(found) == 1 for found in sets.values())


class Exit(Protocol):
    """How objects leave a store."""

    def remove(self, works: Sequence[tuple[Work, list[Target]]], seen: Look) -> None:
        """Remove the targets of each group, anchors first, and note it in the works.

        Sidecars stay while an anchor does.
        """

    def flush(self) -> None:
        """Make removals durable. Raises OSError."""


def take_away(store: Store, works: Sequence[Work], exit_: Exit) -> None:
    """Remove groups until each is gone, or whole without what was unwanted in it.

    Each work says how its group stands in the end; `error` what kept it from going.
    """
    pending = list(works)
    for _ in range(ROUNDS):
        seen = look(store, (work.group for work in pending))
        bad: list[tuple[Work, list[Target]]] = []
        for work in pending:
            there = seen.of(work.group)
            work.standing = work.judge(there)
            if work.standing is Standing.BAD:
                bad.append((work, _targets(work, there, seen)))
        if not bad:
            break
        exit_.remove(bad, seen)
        pending = [work for work, _ in bad if work.error is None]
    else:
        _give_up(store, pending)
    try:
        exit_.flush()
    except OSError as error:
        for work in works:
            if work.touched and work.error is None:
                work.error = b"", f"not certain to be on disk: {error.strerror}"


def _give_up(store: Store, pending: Sequence[Work]) -> None:
    seen = look(store, (work.group for work in pending))
    for work in pending:
        there = seen.of(work.group)
        work.standing = work.judge(there)
        if work.standing is Standing.BAD:
            work.error = work.group.key(min(there)), f"written anew {ROUNDS} times, still not whole"


def _targets(work: Work, there: Mapping[int, Facts], seen: Look) -> list[Target]:
    """All that is there, in the order in which it must go: anchors, what is unwanted, the rest."""
    known = work.recorded(there)
    targets = []
    for slot, facts in there.items():
        key = work.group.key(slot)
        anchor = work.group.shape[slot].anchor
        targets.append(Target(slot, key, facts, seen.places[key], known.get(slot), anchor))
    wanted = {slot for slot in there if slot not in known or not known[slot].unwanted}
    return sorted(targets, key=lambda target: (not target.anchor, target.slot in wanted))


@dataclass(frozen=True, slots=True)
class MovingOut:
    """Objects leave by rename: recorded ones to the file that their record names.

    A group's anchors and sidecars go within microseconds, and are synced with the whole batch:
    a sync between them would give a server milliseconds in which to write an anchor beside a
    damaged sidecar. A power failure can therefore keep a sidecar's rename and lose its anchor's;
    the record, which is durable before the first rename, names the page for the next run.
    """

    mover: Mover

    def remove(self, works: Sequence[tuple[Work, list[Target]]], seen: Look) -> None:
        """Rename the targets, one after the other."""
        for work, targets in works:
            for target in targets:
                if not self._take(work, target) and target.anchor:
                    break

    def _take(self, work: Work, target: Target) -> bool:
        """Move one object out; whether its key is free then."""
        recorded = target.recorded
        name = f"new-{os.urandom(8).hex()}" if recorded is None else str(recorded.file)
        try:
            status = self.mover.take(target.key, name, target.facts.version)
        except OSError as error:
            work.error = work.error or (target.key, error.strerror or str(error))
            return False
        _note(work, target, status)
        return status != Status.CHANGED

    def flush(self) -> None:
        """Sync both directories."""
        self.mover.flush(into_store=False)


@dataclass(frozen=True, slots=True)
class Deleting:
    """Objects are deleted by key, those of all groups together: first anchors, then sidecars.

    By key, so that what a server rewrites right after the look goes as well.
    """

    store: Store

    def remove(self, works: Sequence[tuple[Work, list[Target]]], seen: Look) -> None:
        """Delete the anchors of all groups, then the sidecars of those that have none left."""
        self._delete([(w, t) for w, targets in works for t in targets if t.anchor], seen)
        self._delete(
            [
                (work, target)
                for work, targets in works
                if work.error is None
                for target in targets
                if not target.anchor
            ],
            seen,
        )

    def _delete(self, targets: list[tuple[Work, Target]], seen: Look) -> None:
        size = self.store.limits.batch_objects
        for start in range(0, len(targets), size):
            some = targets[start : start + size]
            rows = seen.rows.take(pa.array([target.row for _, target in some], pa.int64()))
            result: Result = self.store.delete(rows)
            for number, (work, target) in enumerate(some):
                status = Status(int(result.statuses[number]))
                if status is Status.ERROR:
                    message = result.errors.get(number, "cannot be deleted")
                    work.error = work.error or (target.key, message)
                else:
                    _note(work, target, status)

    def flush(self) -> None:
        """Do nothing more: a delete is durable."""


def _note(work: Work, target: Target, status: Status) -> None:
    if status == Status.CHANGED:
        return
    if status == Status.GONE:
        work.gone += 1
    else:
        work.touched = True
        work.removed += target.recorded is not None
        work.new += target.recorded is None
    if target.recorded is not None:
        work.taken.add(target.slot)
