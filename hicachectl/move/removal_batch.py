"""Page groups to remove, a batch at a time, as columns, and their objects in a store."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.formats.keys.table import join_keys
from hicachectl.move.results import GroupStatus
from hicachectl.pages.census import column_sums
from hicachectl.pages.group_table import ABSENT

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from hicachectl.backends.base import Store
    from hicachectl.formats.arrays import BoolArray, IntArray
    from hicachectl.formats.keys.base import Affix
    from hicachectl.formats.spec import ObjectSpec

_LOOKED_AT_ONCE = 1 << 20  # pairs of slots

# Columns of a listing that show whether an object is still the same.
FACTS = pa.schema([("nbytes", pa.int64()), ("mtime_ns", pa.int64()), ("version", pa.binary())])


@dataclass(frozen=True, eq=False)
class Shape:
    """Slots of a deployment's pages: the objects that a page can have.

    affixes: [slots] prefix and suffix of each key.
    anchors: [slots] whether the object is an anchor.
    required: [slots] whether a whole page has the object.
    trailing: [slots] number of the object's set, which a page has completely or not at all; ABSENT
        if in no set.
    sidecars: anchors, and sidecars that a server writes before them: [pairs] slots each.
    """

    affixes: tuple[Affix, ...]
    anchors: BoolArray
    required: BoolArray
    trailing: IntArray
    sidecars: tuple[IntArray, IntArray]

    @classmethod
    def of(cls, specs: Sequence[ObjectSpec]) -> Shape:
        """Return the shape with a slot for each spec."""
        sets: dict[object, int] = {}
        # Only a profile shows which objects form a set.
        trailing = [
            sets.setdefault(spec.object_set, len(sets)) if spec.trailing and spec.listed else ABSENT
            for spec in specs
        ]
        sidecars = [n for n, spec in enumerate(specs) if spec.awaited and not spec.anchor]
        pairs = [
            (n, other)
            for n, spec in enumerate(specs)
            for other in (sidecars if spec.anchor else ())
            if spec.shares_rank(specs[other])
        ]
        both = np.array(pairs, dtype=np.int64).reshape(-1, 2)
        return cls(
            affixes=tuple(spec.affix for spec in specs),
            anchors=np.array([spec.anchor for spec in specs], dtype=np.bool_),
            required=np.array([spec.awaited for spec in specs], dtype=np.bool_),
            trailing=np.array(trailing, dtype=np.int64),
            sidecars=(both[:, 0], both[:, 1]),
        )

    @classmethod
    def of_unread(cls, affixes: Sequence[Affix], anchors: Sequence[bool]) -> Shape:
        """Return the shape of a group of ambiguous keys: all objects are required."""
        none = np.zeros(0, dtype=np.int64)
        return cls(
            affixes=tuple(affixes),
            anchors=np.array(anchors, dtype=np.bool_),
            required=np.ones(len(affixes), dtype=np.bool_),
            trailing=np.full(len(affixes), ABSENT, dtype=np.int64),
            sidecars=(none, none),
        )

    def __len__(self) -> int:
        return len(self.affixes)


@dataclass(frozen=True, eq=False, kw_only=True)
class RemovalBatch:
    """Page groups to remove, and their objects.

    A cell is one slot of one group. Cells are ordered by group, then as in the shape.

    pages, models, tags: [k] strings.
    shapes: distinct shapes. shape_ids: [k] shape of each group.
    by_choice: [k] whether each group leaves although it has no fault.
    absent: [cells] whether the slot was empty without being a reason for removal.
    lacked: [cells] whether the slot was empty and is a reason for removal, though no server waits
        for its object, such as a draft's.
    owners: [n] group of each object, ascending. slots: [n] slot in the group's shape.
    unwanted: [n] whether the object is a reason for removal.
    facts: [n] rows of FACTS.
    """

    pages: pa.StringArray
    models: pa.StringArray
    tags: pa.StringArray
    shapes: tuple[Shape, ...]
    shape_ids: IntArray
    by_choice: BoolArray
    absent: BoolArray
    lacked: BoolArray
    owners: IntArray
    slots: IntArray
    unwanted: BoolArray
    facts: pa.Table

    def __len__(self) -> int:
        return len(self.pages)

    @cached_property
    def starts(self) -> IntArray:
        """First cell of each group, then the number of cells: [k + 1]."""
        widths = np.array([len(shape) for shape in self.shapes], dtype=np.int64)
        return np.append(0, np.cumsum(widths[self.shape_ids]))

    @cached_property
    def cell_owners(self) -> IntArray:
        """Group of each cell: [cells]."""
        return np.repeat(np.arange(len(self)), np.diff(self.starts))

    @property
    def cells(self) -> IntArray:
        """Cell of each object: [n]."""
        cells: IntArray = self.starts[self.owners] + self.slots
        return cells

    @cached_property
    def _slots_of_cells(self) -> IntArray:
        """Slot of each cell, an index into the slots of all shapes in sequence: [cells]."""
        ends = np.cumsum([len(shape) for shape in self.shapes], dtype=np.int64)
        first = np.append(0, ends)[self.shape_ids] - self.starts[:-1]
        return np.arange(self.starts[-1]) + np.repeat(first, np.diff(self.starts))

    def keys_of(self, cells: IntArray) -> pa.BinaryArray:
        """Return the keys of some cells."""
        affixes = [affix for shape in self.shapes for affix in shape.affixes]
        pages = self.pages.take(pa.array(self.cell_owners[cells]))
        return join_keys(affixes, pa.array(self._slots_of_cells[cells]), pages)

    @cached_property
    def anchors(self) -> BoolArray:
        """Whether each cell is for an anchor: [cells]."""
        of_slots = np.concatenate([np.zeros(0, np.bool_), *(s.anchors for s in self.shapes)])
        anchors: BoolArray = of_slots[self._slots_of_cells]
        return anchors

    @property
    def counts(self) -> IntArray:
        """Number of objects of each group: [k]."""
        return np.bincount(self.owners, minlength=len(self))

    @property
    def nbytes(self) -> pa.Int64Array:
        """Bytes of each group, null if a size is unknown: [k]."""
        return column_sums(self.facts.column("nbytes"), self.owners, len(self))

    def take(self, groups: IntArray) -> RemovalBatch:
        """Return some groups. groups: ascending."""
        places = np.full(len(self), ABSENT, dtype=np.int64)
        places[groups] = np.arange(len(groups))
        kept = places[self.owners] != ABSENT
        some = pa.array(groups)
        return replace(
            self.with_objects(kept),
            pages=self.pages.take(some),
            models=self.models.take(some),
            tags=self.tags.take(some),
            shape_ids=self.shape_ids[groups],
            by_choice=self.by_choice[groups],
            absent=self.absent[places[self.cell_owners] != ABSENT],
            lacked=self.lacked[places[self.cell_owners] != ABSENT],
            owners=places[self.owners[kept]],
        )

    def with_objects(self, kept: BoolArray) -> RemovalBatch:
        """Return the groups with only the kept objects. kept: [n]."""
        return replace(
            self,
            owners=self.owners[kept],
            slots=self.slots[kept],
            unwanted=self.unwanted[kept],
            facts=self.facts.filter(pa.array(kept)),
        )

    def as_seen(self, sight: Sight, unwanted: BoolArray) -> RemovalBatch:
        """Return the groups with the objects that a look found. unwanted: [cells]."""
        cells = np.flatnonzero(sight.present)
        owners = self.cell_owners[cells]
        return replace(
            self,
            owners=owners,
            slots=cells - self.starts[owners],
            unwanted=unwanted[cells],
            facts=facts_of(sight.rows).take(pa.array(sight.at[cells])),
        )

    def judge(self, present: BoolArray, known: BoolArray) -> npt.NDArray[np.uint8]:
        """Return each group's status if nothing more is removed: [k] GroupStatus.

        GONE: no object exists. KEPT: whole, without unwanted objects. IN_FLIGHT: a server is
        writing the group, because all objects are new and no anchor lacks a sidecar. DONE: the
        group must be removed.

        present: [cells] whether an object exists. known: [n] whether the object is unchanged.
        """
        any_there, any_unwanted, any_known = (
            self._groups_with(owners)
            for owners in (
                self.cell_owners[present],
                self.owners[known & self.unwanted],
                self.owners[known],
            )
        )
        statuses = np.full(len(self), GroupStatus.IN_FLIGHT, dtype=np.uint8)
        statuses[any_known | self.overtaken(present)] = GroupStatus.DONE
        statuses[self._whole(present)] = GroupStatus.KEPT
        statuses[any_unwanted] = GroupStatus.DONE
        statuses[~any_there] = GroupStatus.GONE
        return statuses

    def written_since(self, sight: Sight) -> BoolArray:
        """Return which groups have an object that is new or rewritten: [k].

        A new time shows a rewritten object. Where the store keeps no times, a new version does: a
        read may change the version, too.
        """
        timed = self.facts.column("mtime_ns").is_valid().to_numpy()
        same = sight.known(self, versions=False) & (timed | sight.known(self))
        fresh = sight.present
        fresh[self.cells[same]] = False
        return self._groups_with(self.cell_owners[fresh])

    def overtaken(self, present: BoolArray) -> BoolArray:
        """Return which groups have an anchor without one of its sidecars: [k].

        A server writes sidecars first: if one is missing beside its anchor, it was removed.
        """
        found = np.zeros(len(self), dtype=np.bool_)
        for number, shape in enumerate(self.shapes):
            anchors, sidecars = shape.sidecars
            own = np.flatnonzero(self.shape_ids == number)
            step = max(1, _LOOKED_AT_ONCE // max(1, len(anchors)))
            for start in range(0, len(own) if len(anchors) else 0, step):
                some = own[start : start + step]
                first = self.starts[some][:, None]
                found[some] = (present[first + anchors] & ~present[first + sidecars]).any(axis=1)
        return found

    def _groups_with(self, owners: IntArray) -> BoolArray:
        found = np.zeros(len(self), dtype=np.bool_)
        found[owners] = True
        return found

    def _whole(self, present: BoolArray) -> BoolArray:
        """Return which groups are whole, ignoring absent slots: [k]."""
        required = np.concatenate([np.zeros(0, np.bool_), *(s.required for s in self.shapes)])
        trailing = np.concatenate([np.zeros(0, np.int64), *(s.trailing for s in self.shapes)])
        asked = present | ~self.absent
        needed = self.lacked | (asked & required[self._slots_of_cells])
        lacks = self._groups_with(self.cell_owners[needed & ~present])
        sets = trailing[self._slots_of_cells]
        counted = np.flatnonzero(asked & (sets != ABSENT))
        owners = self.cell_owners[counted]
        codes = owners * (int(trailing.max(initial=0)) + 1) + sets[counted]
        _, first, numbers = np.unique(codes, return_index=True, return_inverse=True)
        there = np.bincount(numbers[present[counted]], minlength=len(first))
        some = (there > 0) & (there < np.bincount(numbers, minlength=len(first)))
        return ~lacks & ~self._groups_with(owners[first[some]])


@dataclass(frozen=True, eq=False)
class Sight:
    """Objects of groups, as one look at the store found them.

    rows: table with a scan's columns.
    at: [cells] row of each cell, or ABSENT.
    """

    rows: pa.Table
    at: IntArray

    @property
    def present(self) -> BoolArray:
        """Whether each cell has an object: [cells]."""
        present: BoolArray = self.at != ABSENT
        return present

    def known(self, groups: RemovalBatch, *, versions: bool = True) -> BoolArray:
        """Return which objects still exist unchanged: [n]. versions: see `same_objects`."""
        rows = self.at[groups.cells]
        there = np.flatnonzero(rows != ABSENT)
        known = np.zeros(len(rows), dtype=np.bool_)
        found = self.rows.take(pa.array(rows[there]))
        facts = groups.facts.take(pa.array(there))
        known[there] = same_objects(facts, found, versions=versions)
        return known


def look(store: Store, groups: RemovalBatch, pending: IntArray | None = None) -> Sight:
    """Look up all objects that groups can have. pending: only these groups."""
    columns = ["nbytes", "mtime_ns", "version"]
    columns += ["locator"] if "locator" in store.traits.columns else []
    asked = np.zeros(len(groups), dtype=np.bool_)
    asked[slice(None) if pending is None else pending] = True
    cells = np.flatnonzero(asked[groups.cell_owners])
    keys = groups.keys_of(cells)
    rows = store.look(pa.table({"key": keys}), columns)
    found = pc.index_in(keys, value_set=rows.column("key").combine_chunks())
    at = np.full(groups.starts[-1], ABSENT, dtype=np.int64)
    at[cells] = found.fill_null(ABSENT).to_numpy(zero_copy_only=False)
    return Sight(rows, at)


def facts_of(rows: pa.Table) -> pa.Table:
    """Return the FACTS of listed rows; missing columns are null."""
    names = rows.column_names
    columns = [
        rows.column(field.name) if field.name in names else pa.nulls(len(rows), field.type)
        for field in FACTS
    ]
    return pa.table(columns, schema=FACTS)


def same_objects(one: pa.Table, other: pa.Table, *, versions: bool = True) -> BoolArray:
    """Return which rows of two tables of facts are the same objects: [n].

    Rows with versions are the same object if the versions are equal. Without versions, or if
    `versions` is False, size and time decide.
    """
    alike = pc.and_(*(_equal(one.column(n), other.column(n)) for n in ("nbytes", "mtime_ns")))
    if versions:
        alike = pc.coalesce(pc.equal(one.column("version"), other.column("version")), alike)
    same: BoolArray = alike.to_numpy()
    return same


def _equal(one: pa.ChunkedArray, other: pa.ChunkedArray) -> pa.ChunkedArray:
    """Compare values; null equals null."""
    nulls = pc.and_(one.is_null(), other.is_null())
    return pc.or_(pc.fill_null(pc.equal(one, other), False), nulls)
