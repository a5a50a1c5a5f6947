"""Listed groups of a removal plan, in batches."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.checks.findings import NO_NUMBER
from hicachectl.checks.registry import is_structural
from hicachectl.formats.objects import ANCHOR
from hicachectl.move.planning import BY_CHOICE
from hicachectl.move.removal_batch import RemovalBatch, Shape, facts_of
from hicachectl.pages.census import column_sums
from hicachectl.pages.deployments import UNRESOLVED
from hicachectl.pages.group_table import ABSENT

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from hicachectl.formats.arrays import BoolArray, IntArray
    from hicachectl.move.planning import RepairPlan
    from hicachectl.pages.groups import PageGroups
    from hicachectl.pages.inventory import Inventory

BATCH_OBJECTS = 1024  # a killed run leaves at most about one batch unfinished
_BATCH_SLOTS = 1 << 18  # slots that are looked up for a batch, filled or empty


class ListedGroups:
    """Groups of a plan, with their objects as listed.

    If an object was listed twice, the last row counts.
    """

    def __init__(self, inventory: Inventory, groups: PageGroups, plan: RepairPlan) -> None:
        self._inventory = inventory
        self._groups = groups
        self._plan = plan
        self._reasons = plan.reasons.combine_chunks()
        table = inventory.table
        self._spec_of = np.array([*table.spec_ids, UNRESOLVED], dtype=np.int64)
        rows, offsets = groups.objects_of(plan.groups)
        owners = np.repeat(np.arange(len(plan.groups)), np.diff(offsets))
        kept = _last_of_each(owners, inventory.affix_ids[rows])
        self._rows = rows[kept]
        self._starts = np.searchsorted(owners[kept], np.arange(len(plan.groups) + 1))
        self._shapes: dict[int | tuple[int, ...], Shape] = {}

    def __len__(self) -> int:
        return len(self._plan.groups)

    @property
    def counts(self) -> IntArray:
        """Objects of each group of the plan: [groups]."""
        return np.diff(self._starts)

    @property
    def nbytes(self) -> pa.Int64Array:
        """Bytes of each group: [groups], null if a size is unknown."""
        sizes = self._inventory.take(self._rows, ["nbytes"]).column("nbytes")
        return column_sums(sizes, np.repeat(np.arange(len(self)), self.counts), len(self))

    @property
    def names(self) -> tuple[pa.StringArray, pa.StringArray]:
        """Model and tag of each group: [groups], "" if the keys show none."""
        return self._names_of(self._plan.groups)

    def batches(self) -> Iterator[RemovalBatch]:
        """Yield the groups in batches of about BATCH_OBJECTS objects."""
        ids = np.unique(self._groups.deployment_ids[self._plan.groups])
        deployments = [self._groups.deployments[n] for n in ids.tolist() if n != UNRESOLVED]
        most = _BATCH_SLOTS // max((1, *(len(each.specs) for each in deployments)))
        first = 0
        while first < len(self):
            limit = self._starts[first] + BATCH_OBJECTS
            last = int(np.searchsorted(self._starts, limit, side="right")) - 1
            last = max(first + 1, min(last, first + most))
            yield self._batch(first, last)
            first = last

    def _batch(self, first: int, last: int) -> RemovalBatch:
        numbers = self._plan.groups[first:last]
        rows = self._rows[self._starts[first] : self._starts[last]]
        owners = np.repeat(np.arange(last - first), np.diff(self._starts[first : last + 1]))
        objects = self._inventory.take(rows)
        reasons, about = self._reasons_of(numbers)
        codes = filter(is_structural, pc.unique(reasons.column("code")).to_pylist())
        # Structural findings blame no object: a group that is whole again may stay.
        structural = pc.is_in(reasons.column("code"), pa.array(codes, pa.string())).to_numpy()
        blaming = np.flatnonzero(~structural)
        named = reasons.column("row").to_numpy()[blaming]
        blamed, whole = self._blamed(named, about[blaming], rows, owners)
        chosen = pc.equal(reasons.column("code"), BY_CHOICE).to_numpy()
        whole = np.union1d(whole, np.flatnonzero(self._outright(numbers)))
        shapes, shape_ids, slots = self._shaped(numbers, rows, owners)
        models, tags = self._names_of(numbers)
        groups = RemovalBatch(
            pages=self._groups.pages_at(numbers),
            models=models,
            tags=tags,
            shapes=shapes,
            shape_ids=shape_ids,
            by_choice=np.isin(np.arange(len(numbers)), about[chosen]),
            absent=np.zeros(0, dtype=np.bool_),
            lacked=np.zeros(0, dtype=np.bool_),
            owners=owners,
            slots=slots,
            unwanted=blamed | np.isin(owners, whole),
            facts=facts_of(objects),
        )
        absent = ~np.isin(groups.cell_owners, about[structural])
        absent[groups.cells] = False
        empty = np.setdiff1d(np.flatnonzero(~absent), groups.cells)
        missed = reasons.column("key").combine_chunks().filter(pa.array(structural))
        named = pc.is_in(groups.keys_of(empty), value_set=missed.cast(pa.binary()))
        lacked = np.zeros(len(absent), dtype=np.bool_)
        lacked[empty[named.to_numpy(zero_copy_only=False)]] = True
        return replace(groups, absent=absent, lacked=lacked)

    def _blamed(
        self, named: IntArray, about: IntArray, rows: IntArray, owners: IntArray
    ) -> tuple[BoolArray, IntArray]:
        """Return objects that reasons blame, [n], and groups blamed as a whole.

        named, about: [reasons] row, and index of the group. A reason without a row blames the whole
        group. rows, owners: [n] row of each object, and index of its group. An object that was
        listed twice is blamed for both rows.
        """
        affix_ids, width = self._inventory.affix_ids, len(self._inventory.table.affixes)
        of_object = named != NO_NUMBER
        bad = about[of_object] * width + affix_ids[named[of_object]]
        return np.isin(owners * width + affix_ids[rows], bad), about[~of_object]

    def _outright(self, numbers: IntArray) -> BoolArray:
        found: BoolArray = np.isin(numbers, self._plan.outright)
        return found

    def _reasons_of(self, numbers: IntArray) -> tuple[pa.Table, IntArray]:
        """Return the reasons to remove groups, and the index in `numbers` of each one's group.

        numbers: ascending if there are reasons.
        """
        if not len(self._reasons):
            return self._reasons, np.zeros(0, dtype=np.int64)
        about = self._plan.about
        first, last = np.searchsorted(about, (numbers[0], numbers[-1] + 1)).tolist()
        places = np.searchsorted(numbers, about[first:last])
        return self._reasons.slice(first, last - first), places

    def _names_of(self, numbers: IntArray) -> tuple[pa.StringArray, pa.StringArray]:
        ids = self._groups.deployment_ids[numbers]
        which = pa.array(ids, mask=ids == UNRESOLVED)
        deployments = self._groups.deployments
        texts = ([d.names.model for d in deployments], [d.names.tag for d in deployments])
        models, tags = (pc.fill_null(pa.array(t, pa.string()).take(which), "") for t in texts)
        return models, tags

    def _shaped(
        self, numbers: IntArray, rows: IntArray, owners: IntArray
    ) -> tuple[tuple[Shape, ...], IntArray, IntArray]:
        """Return some groups' shapes, each group's shape, and each object's slot."""
        ids = self._groups.deployment_ids[numbers]
        affix_ids = self._inventory.affix_ids[rows]
        slots = self._spec_of[affix_ids]
        unread = np.flatnonzero(ids == UNRESOLVED)
        used, shape_ids = np.unique(ids, return_inverse=True)
        none = Shape.of(())
        shapes = [none if number == UNRESOLVED else self._shape(number) for number in used.tolist()]
        mine = np.isin(owners, unread)
        for pattern, members in _alike(unread, owners[mine], affix_ids[mine]):
            shape_ids[members] = len(shapes)
            shapes.append(self._unread_shape(pattern))
        slots[mine] = (np.arange(len(rows)) - np.searchsorted(owners, owners))[mine]
        return tuple(shapes), shape_ids, slots

    def _shape(self, number: int) -> Shape:
        if number not in self._shapes:
            self._shapes[number] = Shape.of(self._groups.deployments[number].specs)
        return self._shapes[number]

    def _unread_shape(self, pattern: tuple[int, ...]) -> Shape:
        """Return the shape of a group of ambiguous keys: all objects belong together."""
        if pattern not in self._shapes:
            table = self._inventory.table
            affixes = [table.affixes[number] for number in pattern]
            readings = [table.resolved[number].readings for number in pattern]
            anchors = [any(r.pool == ANCHOR for r in of_one) for of_one in readings]
            self._shapes[pattern] = Shape.of_unread(affixes, anchors)
        return self._shapes[pattern]


def _last_of_each(owners: IntArray, kinds: npt.NDArray[np.int32]) -> IntArray:
    """Return the last index of each pair (owner, kind), ascending. owners: ascending."""
    order = np.lexsort((kinds, owners))
    of_owner, of_kind = owners[order], kinds[order]
    last = np.ones(len(order), dtype=np.bool_)
    last[:-1] = (of_owner[1:] != of_owner[:-1]) | (of_kind[1:] != of_kind[:-1])
    return np.sort(order[last])


def _alike(
    groups: IntArray, owners: IntArray, values: npt.NDArray[Any]
) -> Iterator[tuple[tuple[int, ...], IntArray]]:
    """Yield each distinct pattern of values with its groups.

    groups: [m], ascending. owners, values: [n] group of each value, ascending.
    """
    if not len(groups):
        return
    rows = np.searchsorted(groups, owners)
    places = np.arange(len(rows)) - np.searchsorted(rows, rows)
    matrix = np.full((len(groups), int(places.max(initial=0)) + 1), ABSENT, dtype=np.int64)
    matrix[rows, places] = values
    patterns, numbers = np.unique(matrix, axis=0, return_inverse=True)
    for number, pattern in enumerate(patterns.tolist()):
        used = tuple(value for value in pattern if value != ABSENT)
        yield used, groups[numbers.reshape(-1) == number]
