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
SlotArray = npt.NDArray[Any]  # of any integer type

ABSENT = -1  # value of an empty slot
UNSIZED = -2  # value of a slot whose object is there, of a size that nothing tells
WHOLE, PARTIAL, ORPHAN, UNKNOWN = range(4)

_MANY_SETS = np.iinfo(np.int16).max
_SPARSE = 8  # times as many slots as objects: sorting the objects is cheaper than marking slots
_LOOKED_AT_ONCE = 1 << 24  # slots that are searched for empty ones


@dataclass(frozen=True, eq=False)
class SlotBlock:
    """The filled slots of one object set, in the order of groups, and of specs within a group.

    columns: [k] positions of the set's specs. spec: the first of these. groups: [n] the groups
    that have any object of the set, rising. starts: [n + 1] where each group's slots begin.
    places: [slots] the place of each slot's spec in `columns`. values: [slots].
    """

    columns: IntArray
    spec: ObjectSpec
    groups: IntArray
    starts: IntArray
    places: npt.NDArray[np.int32]
    values: SlotArray

    @property
    def counts(self) -> IntArray:
        """How many objects of the set each of its groups has: [n], at least 1."""
        return np.diff(self.starts)

    @cached_property
    def rows(self) -> IntArray:
        """The place of each slot's group in `groups`: [slots]."""
        return np.repeat(np.arange(len(self.groups)), self.counts)

    @property
    def owners(self) -> IntArray:
        """The group of each slot: [slots]."""
        return self.groups[self.rows]

    @property
    def positions(self) -> IntArray:
        """The position of each slot's spec: [slots]."""
        return self.columns[self.places]

    @property
    def complete(self) -> IntArray:
        """The groups that have every object of the set, rising."""
        complete: IntArray = self.groups[self.counts == len(self.columns)]
        return complete

    def find(self, groups: IntArray) -> tuple[IntArray, IntArray]:
        """Return the slots of some groups: [m] places in `groups`, [m] numbers of slots.

        In the order of `groups`, and of specs within a group.
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
        """Return the slots of some groups: [groups, k], ABSENT where a group lacks the object."""
        dense = np.full((len(groups), len(self.columns)), ABSENT, dtype=self.values.dtype)
        at, slots = self.find(groups)
        dense[at, self.places[slots]] = self.values[slots]
        return dense

    def where(self, keep: BoolArray) -> SlotBlock:
        """Return the block with only some of its slots. keep: [slots]."""
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
        """Return what another block of the same set has in each slot: [slots], or ABSENT."""
        mine, theirs = self._codes, other._codes
        if not len(theirs):
            return np.full(len(mine), ABSENT, dtype=other.values.dtype)
        at = np.minimum(np.searchsorted(theirs, mine), len(theirs) - 1)
        matched: SlotArray = np.where(theirs[at] == mine, other.values[at], ABSENT)
        return matched

    @property
    def _codes(self) -> IntArray:
        """Number each slot by its group and spec: [slots], rising."""
        codes: IntArray = self.owners * len(self.columns) + self.places
        return codes


@dataclass(frozen=True, eq=False)
class GroupTable:
    """Slots of the groups of one deployment, one for each group and spec.

    A slot is ABSENT or holds a value that its user chooses: the row of an object in a listing, or
    its size. Filled slots are kept by object set, empty ones not at all: an object that claims to
    be one of 4,096 takes one slot, and not 4,096.

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
            np.add.at(sums, block.owners, np.maximum(block.values, 0))
        return sums

    def having(self, blocks: Iterable[SlotBlock] | None = None) -> BoolArray:
        """Return which groups have an object, or one of some sets: [groups]."""
        found = np.zeros(self.count, dtype=np.bool_)
        for block in self.blocks if blocks is None else blocks:
            found[block.groups] = True
        return found

    def used(self, groups: IntArray) -> IntArray:
        """Return the positions of the specs that any of some groups has an object of, rising."""
        found = np.zeros(len(self.specs), dtype=np.bool_)
        for block in self.blocks:
            _, slots = block.find(groups)
            found[block.columns[block.places[slots]]] = True
        return np.flatnonzero(found)

    def slots(self, groups: IntArray, positions: IntArray) -> SlotArray:
        """Return the slots of some groups for some specs: [groups, positions]."""
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
        """Return the objects of some groups: [n] places in `groups`, [n] positions, [n] values.

        In the order of `groups`, and of specs within a group.
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
        """Return the groups that have an object of any of the specs, rising; and which have all."""
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
        """Return which of some groups have an object of any of the specs: [groups]."""
        found, asked = np.zeros(len(groups), dtype=np.bool_), self._mark(positions)
        for block in self._blocks_of(positions):
            at, slots = block.find(groups)
            found[at[asked[block.columns[block.places[slots]]]]] = True
        return found

    def where(self, kept: Iterable[BoolArray]) -> GroupTable:
        """Return the table with only some slots. kept: for each block [slots], which of them."""
        pairs = zip(self.blocks, kept, strict=True)
        return replace(self, blocks=tuple(block.where(keep) for block, keep in pairs))

    def without(self, other: GroupTable) -> GroupTable:
        """Return the table without the slots that another table of the same specs has."""
        pairs = zip(self.blocks, other.blocks, strict=True)
        return self.where(own.match(theirs) == ABSENT for own, theirs in pairs)

    def missing(self) -> tuple[IntArray, IntArray]:
        """Return the empty slots that keep groups from being whole: [n] groups, [n] specs.

        In the order of groups, and of specs within a group.
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
        """The number of each spec's block: [specs]."""
        numbers = np.zeros(len(self.specs), dtype=np.int64)
        for number, block in enumerate(self.blocks):
            numbers[block.columns] = number
        return numbers

    def _blocks_of(self, positions: Sequence[int] | IntArray) -> Iterator[SlotBlock]:
        """Give the blocks of some specs."""
        numbers = self._block_of[np.array(positions, dtype=np.int64)]
        return (self.blocks[number] for number in np.unique(numbers).tolist())

    def _lacking(self, block: SlotBlock) -> IntArray:
        """Return the groups that lack an object of a set and ought to have it, rising."""
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
    """Put objects into the slots of `count` groups.

    groups, positions, values: [objects] the group and the spec of each, and what its slot is to
    hold: not ABSENT. Of several objects for one slot the first stays.
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
    """Return the distinct codes, rising, and the first value of each. slots: above all codes."""
    if slots <= _SPARSE * len(codes):  # this many slots need no sort
        dense = np.full(slots, ABSENT, dtype=values.dtype)
        dense[codes] = values
        if (dense[codes] == values).all():  # also where two objects of a slot are the same
            filled = np.flatnonzero(dense != ABSENT)
            return filled, dense[filled]
    distinct, first = np.unique(codes, return_index=True)
    return distinct, values[first]
