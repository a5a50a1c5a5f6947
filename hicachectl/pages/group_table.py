"""Tables of the objects of page groups."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hicachectl.formats.objects import ANCHOR
from hicachectl.formats.spec import object_sets

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from hicachectl.formats.arrays import BoolArray, IntArray
    from hicachectl.formats.spec import ObjectSpec

SlotArray = npt.NDArray[Any]  # any integer type

ABSENT = -1  # value of an empty slot
UNSIZED = -2  # value of a filled slot whose object has no known size
WHOLE, PARTIAL, ORPHAN, UNKNOWN = range(4)

_MANY_SETS = np.iinfo(np.int16).max
_SPARSE = 8  # with more slots per object, a sort of the objects is cheaper than marks for all slots
_LOOKED_AT_ONCE = 1 << 24  # most slots that are searched together


@dataclass(frozen=True, eq=False)
class SlotBlock:
    """Filled slots of one object set (`ObjectSpec.object_set`), ordered by group, then spec.

    columns: [k] positions of the set's specs in `GroupTable.specs`.
    spec: the first spec of the set.
    groups: [n] groups with any object of the set, ascending.
    starts: [n + 1] start of each group's slots, followed by the end of the last group's slots.
    places: [slots] index of each slot's spec in `columns`.
    values: [slots] value of each slot.
    """

    columns: IntArray
    spec: ObjectSpec
    groups: IntArray
    starts: IntArray
    places: npt.NDArray[np.int32]
    values: SlotArray

    @property
    def counts(self) -> IntArray:
        """Number of objects of each group: [n], at least 1."""
        return np.diff(self.starts)

    @cached_property
    def rows(self) -> IntArray:
        """Index of each slot's group in `groups`: [slots]."""
        return np.repeat(np.arange(len(self.groups)), self.counts)

    @property
    def owners(self) -> IntArray:
        """Group of each slot: [slots]."""
        return self.groups[self.rows]

    @property
    def positions(self) -> IntArray:
        """Position of each slot's spec: [slots]."""
        return self.columns[self.places]

    @property
    def complete(self) -> IntArray:
        """Groups that have every object of the set, ascending."""
        complete: IntArray = self.groups[self.counts == len(self.columns)]
        return complete

    def find(self, groups: IntArray) -> tuple[IntArray, IntArray]:
        """Return the filled slots of some groups: [m] indices into the argument, [m] slot numbers.

        The slots are ordered by index, then spec.
        groups: group numbers.
        """
        if not len(self.groups):
            return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
        if self.groups[-1] == len(self.groups) - 1:  # groups 0, 1, 2, ... without a gap
            found = np.flatnonzero(groups < len(self.groups))
            rows = groups[found]
        else:
            rows = np.minimum(np.searchsorted(self.groups, groups), len(self.groups) - 1)
            found = np.flatnonzero(self.groups[rows] == groups)
            rows = rows[found]
        counts = self.starts[rows + 1] - self.starts[rows]
        shifts = self.starts[rows] - np.cumsum(counts) + counts
        slots = np.arange(counts.sum()) + np.repeat(shifts, counts)
        return np.repeat(found, counts), slots

    def of(self, groups: IntArray) -> SlotArray:
        """Return the slots of some groups: [groups, k], ABSENT if the group lacks the object."""
        dense = np.full((len(groups), len(self.columns)), ABSENT, dtype=self.values.dtype)
        at, slots = self.find(groups)
        dense[at, self.places[slots]] = self.values[slots]
        return dense

    def where(self, keep: BoolArray) -> SlotBlock:
        """Return the block with only some slots. keep: [slots] whether the slot stays."""
        counts = np.bincount(self.rows[keep], minlength=len(self.groups))
        left = counts > 0
        return replace(
            self,
            groups=self.groups[left],
            starts=np.append(0, np.cumsum(counts[left])),
            places=self.places[keep],
            values=self.values[keep],
        )

    def match(self, other: SlotBlock) -> SlotArray:
        """Return the value of each slot in another block of the same set: [slots].

        The value is ABSENT if the other block does not fill the slot.
        """
        mine, theirs = self._codes, other._codes
        if not len(theirs):
            return np.full(len(mine), ABSENT, dtype=other.values.dtype)
        at = np.minimum(np.searchsorted(theirs, mine), len(theirs) - 1)
        matched: SlotArray = np.where(theirs[at] == mine, other.values[at], ABSENT)
        return matched

    @property
    def _codes(self) -> IntArray:
        """Unique code of each slot by group and spec: [slots], ascending."""
        codes: IntArray = self.owners * len(self.columns) + self.places
        return codes


@dataclass(frozen=True, eq=False)
class GroupTable:
    """Slots of the groups of one deployment, one for each group and spec.

    A slot is ABSENT, or has a value chosen by the caller: an object's row in a listing, or its
    size. Only filled slots take memory, so a stray object of a set of 4,096 ranks takes one slot.
    The position of a spec is its index in `specs`.

    count: number of groups.
    """

    specs: Sequence[ObjectSpec]
    count: int
    blocks: tuple[SlotBlock, ...]

    @cached_property
    def states(self) -> npt.NDArray[np.int8]:
        """WHOLE, PARTIAL or ORPHAN for each group.

        A whole group has the objects of all listed specs. Only a trailing set (Mamba states,
        sliding windows) may be missing, and only with all its objects.
        """
        states = np.full(self.count, WHOLE, dtype=np.int8)
        for block in self.blocks:
            if block.spec.listed:
                states[self._lacking(block)] = PARTIAL
        # In a deployment without kv objects (DeepSeek-V4 on Mooncake) no group is an orphan.
        if all(spec.pool == ANCHOR for spec in self.specs if spec.anchor):
            states[~self.having(block for block in self.blocks if block.spec.anchor)] = ORPHAN
        return states

    @cached_property
    def counts(self) -> IntArray:
        """Number of objects of each group: [groups]."""
        counts = np.zeros(self.count, dtype=np.int64)
        for block in self.blocks:
            counts[block.groups] += block.counts
        return counts

    @cached_property
    def sums(self) -> IntArray:
        """Sum of each group's non-negative slots: [groups]."""
        sums = np.zeros(self.count, dtype=np.int64)
        for block in self.blocks:
            np.add.at(sums, block.owners, np.maximum(block.values, 0))
        return sums

    def having(self, blocks: Iterable[SlotBlock] | None = None) -> BoolArray:
        """Return which groups have an object in any of the blocks: [groups].

        blocks: None for all blocks.
        """
        found = np.zeros(self.count, dtype=np.bool_)
        for block in self.blocks if blocks is None else blocks:
            found[block.groups] = True
        return found

    def used(self, groups: IntArray) -> IntArray:
        """Return the positions of specs with an object in some groups, ascending."""
        found = np.zeros(len(self.specs), dtype=np.bool_)
        for block in self.blocks:
            _, slots = block.find(groups)
            found[block.columns[block.places[slots]]] = True
        return np.flatnonzero(found)

    def slots(self, groups: IntArray, positions: IntArray) -> SlotArray:
        """Return the slots of some groups and specs: [groups, positions]."""
        dense = np.full((len(groups), len(positions)), ABSENT, dtype=np.int64)
        column_of = np.full(len(self.specs), ABSENT, dtype=np.int64)
        column_of[positions] = np.arange(len(positions))
        for block in self._blocks_of(positions):
            at, slots = block.find(groups)
            columns = column_of[block.columns[block.places[slots]]]
            asked = columns != ABSENT
            dense[at[asked], columns[asked]] = block.values[slots[asked]]
        return dense

    def objects(self, groups: IntArray) -> tuple[IntArray, IntArray, SlotArray]:
        """Return the objects of some groups: [n] indices into `groups`, [n] positions, [n] values.

        They are ordered by index, then spec.
        """
        nothing = np.zeros(0, dtype=np.int64)
        found: list[tuple[IntArray, IntArray, SlotArray]] = [(nothing, nothing, nothing)]
        for block in self.blocks:
            at, slots = block.find(groups)
            found.append((at, block.columns[block.places[slots]], block.values[slots]))
        at, positions, values = (np.concatenate(parts) for parts in zip(*found, strict=True))
        order = np.lexsort((positions, at))
        return at[order], positions[order], values[order]

    def holders(self, positions: Sequence[int]) -> tuple[IntArray, BoolArray]:
        """Return the groups with an object of any of the specs, ascending.

        Also return whether each of these groups has the objects of all the specs.
        """
        if not len(positions):
            return np.arange(self.count), np.ones(self.count, dtype=np.bool_)
        asked = self._mark(positions)
        counts = np.zeros(self.count, dtype=np.int64)
        for block in self._blocks_of(positions):
            rows = block.rows[asked[block.positions]]
            counts[block.groups] += np.bincount(rows, minlength=len(block.groups))
        holders = np.flatnonzero(counts)
        return holders, counts[holders] == len(positions)

    def has_any(self, groups: IntArray, positions: Sequence[int]) -> BoolArray:
        """Return which groups have an object of any of the specs: [groups]."""
        found, asked = np.zeros(len(groups), dtype=np.bool_), self._mark(positions)
        for block in self._blocks_of(positions):
            at, slots = block.find(groups)
            found[at[asked[block.columns[block.places[slots]]]]] = True
        return found

    def where(self, kept: Iterable[BoolArray]) -> GroupTable:
        """Return the table with only some slots. kept: a mask [slots] for each block."""
        pairs = zip(self.blocks, kept, strict=True)
        return replace(self, blocks=tuple(block.where(keep) for block, keep in pairs))

    def without(self, other: GroupTable) -> GroupTable:
        """Return the table without the slots that another table of the same specs fills."""
        pairs = zip(self.blocks, other.blocks, strict=True)
        return self.where(own.match(theirs) == ABSENT for own, theirs in pairs)

    def missing(self) -> tuple[IntArray, IntArray]:
        """Return the empty slots that make groups partial: [n] groups, [n] specs.

        They are ordered by group, then spec.
        """
        of_groups, of_specs = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
        for block in self.blocks:
            lacking = self._lacking(block) if block.spec.listed else block.groups[:0]
            step = max(1, _LOOKED_AT_ONCE // len(block.columns))
            for start in range(0, len(lacking), step):
                some = lacking[start : start + step]
                rows, columns = np.nonzero(block.of(some) == ABSENT)
                of_groups.append(some[rows])
                of_specs.append(block.columns[columns])
        groups, specs = np.concatenate(of_groups), np.concatenate(of_specs)
        order = np.lexsort((specs, groups))
        return groups[order], specs[order]

    def _mark(self, positions: Sequence[int]) -> BoolArray:
        marked = np.zeros(len(self.specs), dtype=np.bool_)
        marked[list(positions)] = True
        return marked

    @cached_property
    def _block_of(self) -> IntArray:
        """Index of each spec's block: [specs]."""
        numbers = np.zeros(len(self.specs), dtype=np.int64)
        for number, block in enumerate(self.blocks):
            numbers[block.columns] = number
        return numbers

    def _blocks_of(self, positions: Sequence[int] | IntArray) -> Iterator[SlotBlock]:
        numbers = self._block_of[np.array(positions, dtype=np.int64)]
        return (self.blocks[number] for number in np.unique(numbers).tolist())

    def _lacking(self, block: SlotBlock) -> IntArray:
        """Return the groups that need an object of the block but lack it, ascending."""
        if block.spec.trailing:
            lacking: IntArray = block.groups[block.counts < len(block.columns)]
            return lacking
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
    """Return a table of `count` groups with some objects.

    groups, positions, values: [objects] group, position of the spec, and value, which is never
        ABSENT. If several objects have the same slot, the first of them is kept.
    """
    sets = object_sets(specs)
    set_of = np.zeros(len(specs), dtype=np.int16 if len(sets) < _MANY_SETS else np.int32)
    place_of = np.zeros(len(specs), dtype=np.int64)
    for number, columns in enumerate(sets):
        set_of[columns] = number
        place_of[columns] = np.arange(len(columns))
    of_set = set_of[positions]
    if len(sets) > 1:
        order = np.argsort(of_set, kind="stable")
        groups, positions, values = groups[order], positions[order], values[order]
    ends = np.cumsum(np.bincount(of_set, minlength=len(sets))).tolist()
    blocks = []
    for columns, start, end in zip(sets, [0, *ends], ends, strict=False):
        width = len(columns)
        codes = groups[start:end] * np.int64(width) + place_of[positions[start:end]]
        codes, kept = _sorted(codes, values[start:end], count * width)
        of_slot, places = np.divmod(codes, width)
        first = np.flatnonzero(np.diff(of_slot, prepend=-1))
        starts = np.append(first, len(codes))
        own = of_slot[first]
        blocks.append(
            SlotBlock(columns, specs[columns[0]], own, starts, places.astype(np.int32), kept)
        )
    return GroupTable(specs, count, tuple(blocks))


def _sorted(codes: IntArray, values: SlotArray, slots: int) -> tuple[IntArray, SlotArray]:
    """Return the distinct codes, ascending, and the first value of each.

    slots: number greater than every code.
    """
    if slots <= _SPARSE * len(codes):  # mark the slots, without a sort
        dense = np.full(slots, ABSENT, dtype=values.dtype)
        dense[codes] = values
        if (dense[codes] == values).all():  # no slot has two different values
            filled = np.flatnonzero(dense != ABSENT)
            return filled, dense[filled]
    distinct, first = np.unique(codes, return_index=True)
    return distinct, values[first]
