"""The slots of a deployment's page groups: which object each page has for each spec."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hicachectl.formats.spec import object_sets

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from hicachectl.formats.spec import ObjectSpec

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
SlotArray = npt.NDArray[Any]  # int32 or int64

ABSENT = -1  # value of an empty slot
UNSIZED = -2  # value of a slot whose object is there, of a size that nothing tells
WHOLE, PARTIAL, ORPHAN, UNKNOWN = range(4)

_MANY_SETS = np.iinfo(np.int16).max
_FEW = 8  # times as many groups as objects: sorting the objects is cheaper than marking groups


@dataclass(frozen=True, eq=False)
class SlotBlock:
    """The slots of one object set.

    columns: [k] positions of the set's specs. spec: the first of these. groups: [n] the groups
    that have any object of the set, rising. values: [n, k], ABSENT where a group lacks the object.
    """

    columns: IntArray
    spec: ObjectSpec
    groups: IntArray
    values: SlotArray

    @cached_property
    def counts(self) -> npt.NDArray[np.int32]:
        """How many objects of the set each of its groups has: [n], at least 1."""
        counts: npt.NDArray[np.int32] = (self.values != ABSENT).sum(axis=1, dtype=np.int32)
        return counts

    @property
    def complete(self) -> IntArray:
        """The groups that have every object of the set, rising."""
        complete: IntArray = self.groups[self.counts == len(self.columns)]
        return complete

    def find(self, groups: IntArray) -> tuple[IntArray, IntArray]:
        """Return which of some groups have any object of the set, and their rows in `values`."""
        if not len(self.groups):
            return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
        if self.groups[-1] == len(self.groups) - 1:  # groups 0, 1, 2, ... without a gap
            places = np.flatnonzero(groups < len(self.groups))
            return places, groups[places]
        rows = np.minimum(np.searchsorted(self.groups, groups), len(self.groups) - 1)
        places = np.flatnonzero(self.groups[rows] == groups)
        return places, rows[places]

    def of(self, groups: IntArray) -> SlotArray:
        """Return the slots of some groups: [groups, k]."""
        slots = np.full((len(groups), len(self.columns)), ABSENT, dtype=self.values.dtype)
        places, rows = self.find(groups)
        slots[places] = self.values[rows]
        return slots


@dataclass(frozen=True, eq=False)
class GroupTable:
    """Slots of the groups of one deployment, one for each group and spec.

    A slot is ABSENT or holds a value that its user chooses: the row of an object in a listing, or
    its size. Slots are kept by object set, and only for groups that have an object of the set: a
    stray object that claims 4,096 ranks takes 4,096 slots, and not a column for each.

    count: of groups, which are numbered from 0.
    """

    specs: Sequence[ObjectSpec]
    count: int
    blocks: tuple[SlotBlock, ...]

    @cached_property
    def states(self) -> npt.NDArray[np.int8]:
        """WHOLE, PARTIAL or ORPHAN for each group.

        A page is whole with all objects that are listed; of a trailing set it can have none.
        """
        states = np.full(self.count, WHOLE, dtype=np.int8)
        for block in self.blocks:
            if block.spec.listed:
                states[self._lacking(block)] = PARTIAL
        # Sidecars that stand in for kv cannot lose it (DeepSeek-V4 on Mooncake).
        if all(spec.pool == "kv" for spec in self.specs if spec.anchor):
            states[~self.having(block for block in self.blocks if block.spec.anchor)] = ORPHAN
        return states

    @cached_property
    def counts(self) -> IntArray:
        """How many objects each group has: [groups]."""
        counts = np.zeros(self.count, dtype=np.int64)
        for block in self.blocks:
            counts[block.groups] += block.counts
        return counts

    @cached_property
    def sums(self) -> IntArray:
        """The sum of each group's slots, of those that are not negative: [groups]."""
        sums = np.zeros(self.count, dtype=np.int64)
        for block in self.blocks:
            sums[block.groups] += np.maximum(block.values, 0).sum(axis=1)
        return sums

    def having(self, blocks: Iterable[SlotBlock] | None = None) -> BoolArray:
        """Return which groups have an object, or one of some sets: [groups]."""
        found = np.zeros(self.count, dtype=np.bool_)
        for block in self.blocks if blocks is None else blocks:
            found[block.groups] = True
        return found

    def used(self, groups: IntArray) -> IntArray:
        """Return the positions of the specs that any of some groups has an object of, rising."""
        found = [np.zeros(0, dtype=np.int64)]
        for block in self.blocks:
            _, rows = block.find(groups)
            found.append(block.columns[(block.values[rows] != ABSENT).any(axis=0)])
        return np.sort(np.concatenate(found))

    def slots(self, groups: IntArray, positions: IntArray) -> SlotArray:
        """Return the slots of some groups for some specs: [groups, positions]."""
        slots = np.full((len(groups), len(positions)), ABSENT, dtype=np.int64)
        for block, chosen, columns in self._places_of(positions):
            places, rows = block.find(groups)
            slots[np.ix_(places, chosen)] = block.values[np.ix_(rows, columns)]
        return slots

    def objects(self, groups: IntArray) -> tuple[IntArray, IntArray, SlotArray]:
        """Return the objects of some groups: [n] places in `groups`, [n] positions, [n] values.

        In the order of `groups`, and of specs within a group.
        """
        nothing = np.zeros(0, dtype=np.int64)
        found: list[tuple[IntArray, IntArray, SlotArray]] = [(nothing, nothing, nothing)]
        for block in self.blocks:
            places, rows = block.find(groups)
            values = block.values[rows]
            at, columns = np.nonzero(values != ABSENT)
            found.append((places[at], block.columns[columns], values[at, columns]))
        at, positions, values = (np.concatenate(parts) for parts in zip(*found, strict=True))
        order = np.lexsort((positions, at))
        return at[order], positions[order], values[order]

    def holders(self, positions: Sequence[int]) -> tuple[IntArray, BoolArray]:
        """Return the groups that have an object of any of the specs, rising; and which have all."""
        if not len(positions):
            return np.arange(self.count), np.ones(self.count, dtype=np.bool_)
        groups, counts = [], []
        for block, _, columns in self._places_of(np.array(positions)):
            counted = (block.values[:, columns] != ABSENT).sum(axis=1)
            groups.append(block.groups[counted > 0])
            counts.append(counted[counted > 0])
        own, total = groups[0], counts[0]
        if len(groups) > 1:
            own, at = np.unique(np.concatenate(groups), return_inverse=True)
            total = np.bincount(at, np.concatenate(counts), minlength=len(own))
        return own, total == len(positions)

    def has_any(self, groups: IntArray, positions: Sequence[int]) -> BoolArray:
        """Return which of some groups have an object of any of the specs: [groups]."""
        found = np.zeros(len(groups), dtype=np.bool_)
        for block, _, columns in self._places_of(np.array(positions, dtype=np.int64)):
            places, rows = block.find(groups)
            found[places] |= (block.values[np.ix_(rows, columns)] != ABSENT).any(axis=1)
        return found

    def where(self, kept: Iterable[BoolArray]) -> GroupTable:
        """Return the table with only some slots: for each block [n, k], which of them."""
        blocks = []
        for block, keep in zip(self.blocks, kept, strict=True):
            values = np.where(keep, block.values, ABSENT)
            left = (values != ABSENT).any(axis=1)
            blocks.append(replace(block, groups=block.groups[left], values=values[left]))
        return replace(self, blocks=tuple(blocks))

    def without(self, other: GroupTable) -> GroupTable:
        """Return the table without the slots that another table of the same specs has."""
        pairs = zip(self.blocks, other.blocks, strict=True)
        return self.where(theirs.of(own.groups) == ABSENT for own, theirs in pairs)

    def missing(self) -> tuple[IntArray, IntArray]:
        """Return the empty slots that keep groups from being whole: [n] groups, [n] specs.

        In the order of groups, and of specs within a group.
        """
        of_groups, of_specs = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
        for block in self.blocks:
            if block.spec.listed:
                lacking = self._lacking(block)
                rows, columns = np.nonzero(block.of(lacking) == ABSENT)
                of_groups.append(lacking[rows])
                of_specs.append(block.columns[columns])
        groups, specs = np.concatenate(of_groups), np.concatenate(of_specs)
        order = np.lexsort((specs, groups))
        return groups[order], specs[order]

    @cached_property
    def _block_of(self) -> tuple[IntArray, IntArray]:
        """The block of each spec, and its column there: [specs] each."""
        blocks, columns = np.zeros((2, len(self.specs)), dtype=np.int64)
        for number, block in enumerate(self.blocks):
            blocks[block.columns] = number
            columns[block.columns] = np.arange(len(block.columns))
        return blocks, columns

    def _places_of(self, positions: IntArray) -> Iterator[tuple[SlotBlock, IntArray, IntArray]]:
        """Give the blocks of some specs, which of `positions` are of each, and their columns."""
        blocks, columns = (places[positions] for places in self._block_of)
        for number in np.unique(blocks).tolist():
            chosen = np.flatnonzero(blocks == number)
            yield self.blocks[number], chosen, columns[chosen]

    def _lacking(self, block: SlotBlock) -> IntArray:
        """Return the groups that lack an object of a set and ought to have it, rising."""
        if block.spec.trailing:
            return block.groups[block.counts < len(block.columns)]
        lacks = np.ones(self.count, dtype=np.bool_)
        lacks[block.complete] = False
        return np.flatnonzero(lacks)


def fill_table(
    specs: Sequence[ObjectSpec],
    count: int,
    groups: npt.NDArray[Any],
    positions: npt.NDArray[Any],
    values: SlotArray,
) -> GroupTable:
    """Put objects into the slots of `count` groups.

    groups, positions, values: [objects] the group and the spec of each, and what its slot is to
    hold. Of several objects for one slot the first stays.
    """
    sets = object_sets(specs)
    set_of = np.zeros(len(specs), dtype=np.int16 if len(sets) < _MANY_SETS else np.int32)
    column_of = np.zeros(len(specs), dtype=np.int32)
    for number, columns in enumerate(sets):
        set_of[columns] = number
        column_of[columns] = np.arange(len(columns))
    of_set = set_of[positions]
    if len(sets) > 1:
        order = np.argsort(of_set, kind="stable")
        groups, positions, values = groups[order], positions[order], values[order]
    ends = np.cumsum(np.bincount(of_set, minlength=len(sets))).tolist()
    blocks = []
    for columns, start, end in zip(sets, [0, *ends], ends, strict=False):
        own, place = _distinct(groups[start:end], count)
        slots = np.full((len(own), len(columns)), ABSENT, dtype=values.dtype)
        _assign(slots, place, column_of[positions[start:end]], values[start:end])
        blocks.append(SlotBlock(columns, specs[columns[0]], own, slots))
    return GroupTable(specs, count, tuple(blocks))


def _assign(slots: SlotArray, rows: IntArray, columns: SlotArray, values: SlotArray) -> None:
    """Write values to slots; of several values for a slot the first stays."""
    slots[rows, columns] = values
    if (slots[rows, columns] != values).any():
        _, first = np.unique(rows * slots.shape[1] + columns, return_index=True)
        slots[rows[first], columns[first]] = values[first]


def _distinct(groups: npt.NDArray[Any], count: int) -> tuple[IntArray, IntArray]:
    """Return the distinct groups, rising, and the place of each object's group among them."""
    if _FEW * len(groups) < count:
        distinct, places = np.unique(groups, return_inverse=True)
        return distinct.astype(np.int64), places
    used = np.zeros(count, dtype=np.bool_)
    used[groups] = True
    return np.flatnonzero(used), (np.cumsum(used) - 1)[groups]
