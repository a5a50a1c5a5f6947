"""Page groups to remove or restore, as columns, and their objects in a store."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Annotated

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import Meta, Struct

from hicachectl.checks.findings import SCHEMA
from hicachectl.formats.keys.base import codec_for
from hicachectl.formats.keys.labels import group_label
from hicachectl.formats.keys.table import join_keys
from hicachectl.move.planning import BY_CHOICE
from hicachectl.move.results import GroupStatus
from hicachectl.pages.byte_sums import column_sums
from hicachectl.pages.group_table import ABSENT

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from hicachectl.backends.base import BoolArray, IntArray, Store
    from hicachectl.formats.keys.base import Affix
    from hicachectl.formats.spec import ObjectSpec

_LOOKED_AT_ONCE = 1 << 20  # pairs of slots

Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]  # fits into an Arrow column

# Columns of a listing, and the digest that a record can have.
FACTS = pa.schema(
    [
        ("nbytes", pa.int64()),
        ("mtime_ns", pa.int64()),
        ("version", pa.binary()),
        ("blake3", pa.string()),
    ]
)
FINDINGS = pa.list_(pa.struct(list(SCHEMA)))


class Slot(Struct, frozen=True):
    """An object that a page of a deployment can have. Its key: prefix, page hash, suffix.

    required: whether a whole page has the object.
    trailing: number of the object's set, which a page has completely or not at all; None if in
        no set.
    sidecars: for an anchor: slots that a server writes before the anchor.
    """

    prefix: str
    suffix: str
    anchor: bool
    required: bool
    trailing: Count | None
    sidecars: tuple[Count, ...]


@dataclass(frozen=True, eq=False)
class Shape:
    """Slots of a deployment's pages, with their fields as arrays: [slots]."""

    slots: tuple[Slot, ...]

    @classmethod
    def of(cls, specs: Sequence[ObjectSpec]) -> Shape:
        """Return the shape with a slot for each spec."""
        sets: dict[object, int] = {}
        sidecars = [n for n, spec in enumerate(specs) if spec.awaited and not spec.anchor]
        return cls(
            tuple(
                Slot(
                    prefix=spec.affix[0],
                    suffix=spec.affix[1],
                    anchor=spec.anchor,
                    required=spec.awaited,
                    # Only a profile shows which objects form a set.
                    trailing=(
                        sets.setdefault(spec.object_set, len(sets))
                        if spec.trailing and spec.listed
                        else None
                    ),
                    sidecars=tuple(
                        n for n in sidecars if spec.anchor and spec.shares_rank(specs[n])
                    ),
                )
                for spec in specs
            )
        )

    @classmethod
    def of_unread(cls, affixes: Sequence[Affix], anchors: Sequence[bool]) -> Shape:
        """Return the shape of a group of ambiguous keys: all objects are required."""
        pairs = zip(affixes, anchors, strict=True)
        return cls(tuple(Slot(*affix, anchor, True, None, ()) for affix, anchor in pairs))

    def __len__(self) -> int:
        return len(self.slots)

    def without(self, lost: Sequence[int]) -> tuple[Shape, IntArray]:
        """Return the shape without some slots, and each slot's new number or ABSENT: [slots]."""
        stays = np.ones(len(self), dtype=np.bool_)
        stays[list(lost)] = False
        places: IntArray = np.where(stays, np.cumsum(stays) - 1, ABSENT)
        numbers = places.tolist()
        cut = []
        for slot in np.flatnonzero(stays).tolist():
            left = tuple(numbers[n] for n in self.slots[slot].sidecars if numbers[n] != ABSENT)
            cut.append(msgspec.structs.replace(self.slots[slot], sidecars=left))
        return Shape(tuple(cut)), places

    @cached_property
    def affixes(self) -> list[Affix]:
        """Prefix and suffix of each slot's key."""
        return [(slot.prefix, slot.suffix) for slot in self.slots]

    @cached_property
    def anchors(self) -> BoolArray:
        """Whether each slot is an anchor."""
        return np.array([slot.anchor for slot in self.slots], dtype=np.bool_)

    @cached_property
    def required(self) -> BoolArray:
        """Whether a whole page must have each slot's object."""
        return np.array([slot.required for slot in self.slots], dtype=np.bool_)

    @cached_property
    def trailing(self) -> IntArray:
        """Number of each slot's trailing set, from 0 without gaps, or ABSENT."""
        numbers: dict[int, int] = {}
        found = (slot.trailing for slot in self.slots)
        return np.array(
            [ABSENT if n is None else numbers.setdefault(n, len(numbers)) for n in found],
            dtype=np.int64,
        )

    @cached_property
    def sidecars(self) -> tuple[IntArray, IntArray]:
        """Slots of anchors, and of sidecars written before them: [pairs] each."""
        pairs = [(n, other) for n, slot in enumerate(self.slots) for other in slot.sidecars]
        both = np.array(pairs, dtype=np.int64).reshape(-1, 2)
        return both[:, 0], both[:, 1]


@dataclass(frozen=True, eq=False, kw_only=True)
class RecordedGroups:
    """Page groups and their objects, from a listing or a record.

    A cell is one slot of one group. Cells are ordered by group, then as in the shape.

    pages, models, tags: [k] strings.
    shapes: distinct shapes. shape_ids: [k] shape of each group.
    findings: [k] FINDINGS, the reasons for removal.
    absent: [cells] whether the slot was empty without being a reason for removal.
    owners: [n] group of each object, ascending. slots: [n] slot in the group's shape.
    files: [n] number of the object in the batch's folder.
    unwanted: [n] whether the object is a reason for removal.
    facts: [n] rows of FACTS.
    """

    pages: pa.StringArray
    models: pa.StringArray
    tags: pa.StringArray
    shapes: tuple[Shape, ...]
    shape_ids: IntArray
    findings: pa.ListArray
    absent: BoolArray
    owners: IntArray
    slots: IntArray
    files: IntArray
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

    @cached_property
    def by_choice(self) -> BoolArray:
        """Whether each group leaves although it has no fault: [k]."""
        codes = self.findings.flatten().field("code")
        owners = pc.list_parent_indices(self.findings).to_numpy()
        chosen = pc.equal(codes, BY_CHOICE).to_numpy(zero_copy_only=False)
        return self._groups_with(owners[chosen])

    @property
    def counts(self) -> IntArray:
        """Number of objects of each group: [k]."""
        return np.bincount(self.owners, minlength=len(self))

    @property
    def nbytes(self) -> pa.Int64Array:
        """Bytes of each group, null if a size is unknown: [k]."""
        return column_sums(self.facts.column("nbytes"), self.owners, len(self))

    def labels(self, scheme: str) -> list[str]:
        """Return each group's field "group" in `ls`: [k]. scheme: grammar of the keys."""
        codec, found = codec_for(scheme), []
        affixes = [shape.affixes for shape in self.shapes]
        ends = np.searchsorted(self.owners, np.arange(len(self) + 1)).tolist()
        names = zip(self.models.to_pylist(), self.tags.to_pylist(), strict=True)
        for group, (model, tag) in enumerate(names):
            own = affixes[self.shape_ids[group]]
            slots = np.sort(self.slots[ends[group] : ends[group + 1]]).tolist()
            found.append(group_label(codec, model, tag, (own[slot] for slot in slots)))
        return found

    def take(self, groups: IntArray) -> RecordedGroups:
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
            findings=self.findings.take(some),
            absent=self.absent[places[self.cell_owners] != ABSENT],
            owners=places[self.owners[kept]],
        )

    def with_objects(self, kept: BoolArray) -> RecordedGroups:
        """Return the groups with only the kept objects. kept: [n]."""
        return replace(
            self,
            owners=self.owners[kept],
            slots=self.slots[kept],
            files=self.files[kept],
            unwanted=self.unwanted[kept],
            facts=self.facts.filter(pa.array(kept)),
        )

    def as_seen(self, sight: Sight, unwanted: BoolArray) -> RecordedGroups:
        """Return the groups with the objects that a look found. unwanted: [cells]."""
        cells = np.flatnonzero(sight.present)
        owners = self.cell_owners[cells]
        return replace(
            self,
            owners=owners,
            slots=cells - self.starts[owners],
            files=np.arange(len(cells)),
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
        lacks = self._groups_with(
            self.cell_owners[asked & ~present & required[self._slots_of_cells]]
        )
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

    rows: with a scan's columns. at: [cells] row of each cell, or ABSENT.
    """

    rows: pa.Table
    at: IntArray

    @property
    def present(self) -> BoolArray:
        """Whether each cell has an object: [cells]."""
        present: BoolArray = self.at != ABSENT
        return present

    def known(self, groups: RecordedGroups, *, versions: bool = True) -> BoolArray:
        """Return which objects still exist unchanged: [n]. versions: as in `same_objects`."""
        rows = self.at[groups.cells]
        there = np.flatnonzero(rows != ABSENT)
        known = np.zeros(len(rows), dtype=np.bool_)
        found = self.rows.take(pa.array(rows[there]))
        facts = groups.facts.take(pa.array(there))
        known[there] = same_objects(facts, found, versions=versions)
        return known


def look(store: Store, groups: RecordedGroups, pending: IntArray | None = None) -> Sight:
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
