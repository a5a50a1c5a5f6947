"""Page groups to remove, a batch at a time, as columns, and their objects in a store."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.checks.findings import NO_NUMBER
from hicachectl.checks.registry import is_structural
from hicachectl.formats.keys.table import join_keys
from hicachectl.formats.objects import ANCHOR
from hicachectl.move.planning import BY_CHOICE
from hicachectl.move.results import GroupStatus
from hicachectl.pages.census import column_sums
from hicachectl.pages.deployments import UNRESOLVED
from hicachectl.pages.group_table import ABSENT

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from hicachectl.backends.base import Store
    from hicachectl.formats.arrays import BoolArray, IntArray
    from hicachectl.formats.keys.base import Affix
    from hicachectl.formats.spec import ObjectSpec
    from hicachectl.move.planning import RepairPlan
    from hicachectl.pages.groups import PageGroups
    from hicachectl.pages.inventory import Inventory


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
