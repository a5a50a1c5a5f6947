"""Plans of removals.

A plan has the page groups to remove, and the reasons. `ListedGroups` gives their objects in
batches.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.backends.base import batch_spans
from hicachectl.checks.codes import SEVERITIES
from hicachectl.checks.findings import LOCATED_SCHEMA, NO_NUMBER, severity_ranks
from hicachectl.checks.registry import is_structural
from hicachectl.formats.keys.table import join_keys
from hicachectl.move.results import GroupStatus
from hicachectl.pages.census import column_sums
from hicachectl.pages.deployments import UNRESOLVED
from hicachectl.pages.group_table import ABSENT

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    import numpy.typing as npt

    from hicachectl.backends.base import Store
    from hicachectl.formats.arrays import BoolArray, IntArray
    from hicachectl.formats.keys.base import Affix
    from hicachectl.formats.spec import ObjectSpec
    from hicachectl.pages.groups import PageGroups
    from hicachectl.verification.part_result import Refusal


@dataclass(frozen=True, slots=True)
class RepairPlan:
    """Groups to remove.

    groups: numbers of the groups, ascending.
    reasons: findings in the columns of findings.LOCATED_SCHEMA, sorted by group.
    by_choice: whether the user chose the groups, which then need no finding. A chosen group stays
        if it changes before its removal.
    unplaced: number of findings without a group, by code. They concern foreign keys or the whole
        store, and removals do not repair them.
    others: number of groups that were left out although they have findings, because the profile
        does not describe them.
    mixed: number of groups that were left out because they have an object of a kind
        with several common sizes (`SizeMix`).
    warned: number of groups with warnings on which a repair could act; 0 if the plan has groups.
    warnings: codes of these warnings.
    refused: reason why the plan has no groups although there are findings to repair; else None.
    """

    groups: IntArray
    reasons: pa.Table
    by_choice: bool = False
    unplaced: Mapping[str, int] = field(default_factory=dict)
    others: int = 0
    mixed: int = 0
    warned: int = 0
    warnings: tuple[str, ...] = ()
    refused: Refusal | None = None

    @property
    def about(self) -> IntArray:
        """Group of each reason: [reasons], ascending."""
        about: IntArray = self.reasons.column("group").to_numpy()
        return about

    def where(self, kept: BoolArray) -> RepairPlan:
        """Return the plan with only some groups.

        kept: [groups of the store] whether the group stays in the plan.
        """
        return replace(
            self,
            groups=self.groups[kept[self.groups]],
            reasons=self.reasons.filter(pa.array(kept[self.about])),
        )


def plan_repair(found: pa.Table, *, codes: Collection[str] = ()) -> RepairPlan:
    """Plan to remove every group with an error or with a finding of one of `codes`.

    found: findings in the columns of findings.LOCATED_SCHEMA, from `checks.findings.located`.
    """
    wanted = severity_ranks(found) == SEVERITIES.index("error")
    named = pc.is_in(found.column("code"), value_set=pa.array(list(codes), pa.string()))
    chosen = found.filter(pa.array(wanted | named.to_numpy()))
    grouped = pc.not_equal(chosen.column("group"), NO_NUMBER)
    reasons = chosen.filter(grouped).sort_by("group")
    unplaced = chosen.filter(pc.invert(grouped)).column("code")
    return RepairPlan(
        groups=np.unique(reasons.column("group").to_numpy()).astype(np.int64),
        reasons=reasons,
        unplaced=Counter(unplaced.to_pylist()),
    )


def described_groups(groups: PageGroups) -> BoolArray:
    """Return which groups the profile describes: [groups]."""
    described = np.zeros(len(groups), dtype=np.bool_)
    if groups.deployments and groups.deployments[0].profile is not None:
        described[groups.span(0)] = True
    return described


def plan_removal(chosen: IntArray) -> RepairPlan:
    """Plan to remove the chosen groups, even whole ones."""
    return RepairPlan(np.unique(chosen), LOCATED_SCHEMA.empty_table(), by_choice=True)


def newest_taken(groups: PageGroups, plan: RepairPlan) -> int:
    """Return how many pages of the plan are newer than every page that the plan does not remove.

    Only pages of the profile's deployment count. Many newer pages suggest that the profile does not
    describe the servers that wrote last. Return 0 if the plan removes all pages of the deployment,
    or if the store keeps no times.
    """
    span = groups.span(0)
    times = groups.newest_ns[span]
    taken = np.isin(np.arange(span.start, span.stop), plan.groups)
    if not groups.has_times or taken.all():
        return 0
    return int((times[taken] > times[~taken].max()).sum())


# Columns of a listing that show whether an object has changed.
FACTS = pa.schema([("nbytes", pa.int64()), ("mtime_ns", pa.int64()), ("version", pa.binary())])


@dataclass(frozen=True, eq=False)
class Shape:
    """Objects that a page of one deployment can have, each in a slot.

    affixes: [slots] prefix and suffix of each key.
    anchors: [slots] whether the object is an anchor.
    required: [slots] whether a whole page has the object.
    trailing: [slots] number of the object's set, or ABSENT for an object in no set. A page has all
        objects of a set or none.
    sidecars: two arrays, [pairs] slots of anchors and [pairs] slots of their sidecars. A server
        writes the sidecar of a pair before its anchor.
    """

    affixes: tuple[Affix, ...]
    anchors: BoolArray
    required: BoolArray
    trailing: IntArray
    sidecars: tuple[IntArray, IntArray]

    @classmethod
    def of(cls, specs: Sequence[ObjectSpec]) -> Shape:
        """Return a shape with one slot for each spec."""
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

    def __len__(self) -> int:
        return len(self.affixes)


@dataclass(frozen=True, eq=False, kw_only=True)
class RemovalBatch:
    """Page groups to remove, all of one deployment or all of ambiguous keys, and their objects.

    A cell is one slot of one group. Cells are ordered by group, then as in the shape.
    numbers: [k] group numbers.
    pages: [k] page hashes.
    by_choice: whether the user chose the groups, which then need no fault.
    absent: [cells] True for a slot that was empty in the listing, in a group that is not removed
        because of missing objects.
    lacked: [cells] whether a finding names the missing object of the slot. Such a group counts as
        whole only if it has this object, even if no server waits for the object, such as one of a
        draft.
    owners: [n] group of each object, ascending.
    slots: [n] slot of each object in the shape.
    unwanted: [n] whether the object is a reason for removal.
    facts: [n] size, time and version of each object, in the columns of FACTS.
    """

    numbers: IntArray
    pages: pa.StringArray
    shape: Shape
    by_choice: bool
    absent: BoolArray
    lacked: BoolArray
    owners: IntArray
    slots: IntArray
    unwanted: BoolArray
    facts: pa.Table

    def __len__(self) -> int:
        return len(self.pages)

    @property
    def cell_owners(self) -> IntArray:
        """Group of each cell: [cells]."""
        return np.repeat(np.arange(len(self)), len(self.shape))

    @property
    def cells(self) -> IntArray:
        """Cell of each object: [n]."""
        cells: IntArray = self.owners * len(self.shape) + self.slots
        return cells

    def keys_of(self, cells: IntArray) -> pa.BinaryArray:
        """Return the keys of some cells."""
        owners, slots = np.divmod(cells, len(self.shape))
        return join_keys(self.shape.affixes, pa.array(slots), self.pages.take(pa.array(owners)))

    @property
    def anchors(self) -> BoolArray:
        """Whether each cell is for an anchor: [cells]."""
        return np.tile(self.shape.anchors, len(self))

    @property
    def counts(self) -> IntArray:
        """Number of objects of each group: [k]."""
        return np.bincount(self.owners, minlength=len(self))

    @property
    def nbytes(self) -> pa.Int64Array:
        """Bytes of each group, null if a size is unknown: [k]."""
        return column_sums(self.facts.column("nbytes"), self.owners, len(self))

    def emptied(self, groups: IntArray) -> RemovalBatch:
        """Return some groups without their objects."""
        cells = np.flatnonzero(np.isin(self.cell_owners, groups))
        nothing = np.zeros(0, dtype=np.int64)
        return replace(
            self,
            numbers=self.numbers[groups],
            pages=self.pages.take(pa.array(groups)),
            absent=self.absent[cells],
            lacked=self.lacked[cells],
            owners=nothing,
            slots=nothing,
            unwanted=nothing.astype(np.bool_),
            facts=FACTS.empty_table(),
        )

    def as_seen(self, lookup: StoreLookup, unwanted: BoolArray) -> RemovalBatch:
        """Return the groups with the objects that a lookup found.

        unwanted: [cells] whether the object in the cell is a reason for removal.
        """
        cells = np.flatnonzero(lookup.present)
        owners, slots = np.divmod(cells, len(self.shape))
        return replace(
            self,
            owners=owners,
            slots=slots,
            unwanted=unwanted[cells],
            facts=facts_of(lookup.rows).take(pa.array(lookup.at[cells])),
        )

    def judge(self, present: BoolArray, known: BoolArray) -> npt.NDArray[np.uint8]:
        """Return each group's status if no more objects are removed: [k] GroupStatus.

        - GONE: no object exists.
        - KEPT: the group is whole and has no unwanted object.
        - IN_FLIGHT: all objects are new and no anchor lacks a sidecar, so a server is writing the
        group.
        - DONE: none of the above, so the group must be removed.

        present: [cells] whether an object exists.
        known: [n] whether the object exists unchanged.
        """
        by_slot = present.reshape(len(self), len(self.shape))
        any_unwanted, any_known = (
            self._groups_with(self.owners[some]) for some in (known & self.unwanted, known)
        )
        # A server writes sidecars first, so a sidecar that is missing beside its anchor was
        # removed.
        anchors, sidecars = self.shape.sidecars
        overtaken = (by_slot[:, anchors] & ~by_slot[:, sidecars]).any(axis=1)
        statuses = np.full(len(self), GroupStatus.IN_FLIGHT, dtype=np.uint8)
        statuses[any_known | overtaken] = GroupStatus.DONE
        statuses[self._whole(by_slot)] = GroupStatus.KEPT
        statuses[any_unwanted] = GroupStatus.DONE
        statuses[~by_slot.any(axis=1)] = GroupStatus.GONE
        return statuses

    def written_since(self, lookup: StoreLookup) -> BoolArray:
        """Return which groups have an object that is new or was rewritten: [k].

        A rewritten object has another time than in the batch. Versions decide only for objects
        without a time, because a read may change a version, too.
        """
        timed = self.facts.column("mtime_ns").is_valid().to_numpy()
        same = lookup.known(self, versions=False) & (timed | lookup.known(self))
        fresh = lookup.present
        fresh[self.cells[same]] = False
        return self._groups_with(self.cell_owners[fresh])

    def begun_by_others(self, lookup: StoreLookup) -> BoolArray:
        """Return which groups another removal has begun to remove: [k].

        Removals take the anchor first. So such a group has lost an anchor or, if it had no anchor,
        any object.
        """
        lost = ~lookup.present[self.cells]
        anchors = self.anchors[self.cells]
        leads = anchors | ~self._groups_with(self.owners[anchors])[self.owners]
        return self._groups_with(self.owners[lost & leads])

    def _groups_with(self, owners: IntArray) -> BoolArray:
        found = np.zeros(len(self), dtype=np.bool_)
        found[owners] = True
        return found

    def _whole(self, by_slot: BoolArray) -> BoolArray:
        """Return which groups are whole, ignoring absent slots: [k].

        by_slot: [k, slots] whether the object exists.
        """
        absent, lacked = (cells.reshape(by_slot.shape) for cells in (self.absent, self.lacked))
        asked = by_slot | ~absent
        needed = (lacked | (asked & self.shape.required)) & ~by_slot
        lacking = self._groups_with(np.nonzero(needed)[0])
        trailing = self.shape.trailing
        for number in np.unique(trailing[trailing != ABSENT]).tolist():
            own = trailing == number
            present, wanted = by_slot[:, own], asked[:, own]
            lacking[present.any(axis=1) & (wanted & ~present).any(axis=1)] = True
        whole: BoolArray = ~lacking
        return whole


@dataclass(frozen=True, eq=False)
class StoreLookup:
    """Objects of groups, as one lookup in the store found them.

    rows: table with the columns of a scan.
    at: [cells] row of the object in each cell; ABSENT if the store has no such object.
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
        existing = np.flatnonzero(rows != ABSENT)
        known = np.zeros(len(rows), dtype=np.bool_)
        found = self.rows.take(pa.array(rows[existing]))
        facts = groups.facts.take(pa.array(existing))
        known[existing] = same_objects(facts, found, versions=versions)
        return known


def look_up(store: Store, groups: RemovalBatch, pending: IntArray | None = None) -> StoreLookup:
    """Look up all objects that groups can have.

    pending: indices of the groups to look up; None for all groups.
    """
    columns = ["nbytes", "mtime_ns", "version"]
    columns += ["locator"] if "locator" in store.traits.columns else []
    asked = np.zeros(len(groups), dtype=np.bool_)
    asked[slice(None) if pending is None else pending] = True
    cells = np.flatnonzero(asked[groups.cell_owners])
    keys = groups.keys_of(cells)
    rows, found = store.find(keys, columns)
    at = np.full(len(asked) * len(groups.shape), ABSENT, dtype=np.int64)
    at[cells] = found
    return StoreLookup(rows, at)


def facts_of(rows: pa.Table) -> pa.Table:
    """Return the FACTS of listed rows. Columns that the rows lack are null."""
    names = rows.column_names
    columns = [
        rows.column(field.name) if field.name in names else pa.nulls(len(rows), field.type)
        for field in FACTS
    ]
    return pa.table(columns, schema=FACTS)


def same_objects(one: pa.Table, other: pa.Table, *, versions: bool = True) -> BoolArray:
    """Return which objects are unchanged between two tables: [n].

    one, other: facts of the same n objects, in the columns of FACTS.
    versions: whether versions decide for an object that has a version in both tables. For any other
        object, size and time decide.
    """
    alike = pc.and_(*(_equal(one.column(n), other.column(n)) for n in ("nbytes", "mtime_ns")))
    if versions:
        alike = pc.coalesce(pc.equal(one.column("version"), other.column("version")), alike)
    same: BoolArray = alike.to_numpy()
    return same


def _equal(one: pa.ChunkedArray, other: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return which values are equal. Two nulls are equal."""
    nulls = pc.and_(one.is_null(), other.is_null())
    return pc.or_(pc.fill_null(pc.equal(one, other), False), nulls)


BATCH_OBJECTS = 1024  # a killed run leaves at most about one batch unfinished
_AMBIGUOUS_OBJECTS = 64  # few, because each object may add a slot to all groups of its batch
_BATCH_SLOTS = 1 << 18  # most slots of a batch, because a lookup also asks for empty slots


class ListedGroups:
    """Groups of a plan, with their objects as listed.

    If the listing has an object twice, the last row counts.
    """

    def __init__(self, groups: PageGroups, plan: RepairPlan) -> None:
        self._inventory = inventory = groups.inventory
        self._groups = groups
        self._plan = plan
        self._reasons = plan.reasons.combine_chunks()
        self._spec_of = np.array([*inventory.table.spec_ids, UNRESOLVED], dtype=np.int64)
        rows, offsets = groups.objects_of(plan.groups)
        owners = np.repeat(np.arange(len(plan.groups)), np.diff(offsets))
        kept = _last_of_each(owners, inventory.affix_ids[rows])
        self._rows = rows[kept]
        self._starts = np.searchsorted(owners[kept], np.arange(len(plan.groups) + 1))

    def __len__(self) -> int:
        return len(self._plan.groups)

    @property
    def counts(self) -> IntArray:
        """Number of objects of each group of the plan: [groups]."""
        return np.diff(self._starts)

    @property
    def nbytes(self) -> pa.Int64Array:
        """Bytes of each group: [groups], null if a size is unknown."""
        sizes = self._inventory.take(self._rows, ["nbytes"]).column("nbytes")
        return column_sums(sizes, np.repeat(np.arange(len(self)), self.counts), len(self))

    def batches(self, times: int = 1) -> Iterator[RemovalBatch]:
        """Yield the groups in batches. All groups of a batch have the same deployment.

        The groups of a batch are spread over the listing, and so over all folders of a store. In
        one folder they would wait for each other, because a file system makes only one change at a
        time in a folder.
        times: size of a batch as a multiple of BATCH_OBJECTS.
        """
        ids = self._groups.deployment_ids[self._plan.groups]
        for number in np.unique(ids).tolist():
            first, end = np.searchsorted(ids, (number, number + 1)).tolist()
            shape, most, most_objects = None, len(self), _AMBIGUOUS_OBJECTS
            if number != UNRESOLVED:
                shape = Shape.of(self._groups.deployments[number].specs)
                most, most_objects = max(1, _BATCH_SLOTS // len(shape)), times * BATCH_OBJECTS
            counts, groups = self.counts[first:end], np.arange(first, end)
            apart = max(1, -(-int(counts.sum()) // most_objects), -(-len(groups) // most))
            spread = np.argsort(groups % apart, kind="stable")
            for span in batch_spans(counts[spread], most_objects, most):
                yield self._batch(np.sort(groups[spread[span]]), shape)

    def _batch(self, chosen: IntArray, shape: Shape | None) -> RemovalBatch:
        """Return some groups of the plan as a batch. shape: None for groups of ambiguous keys."""
        numbers, counts = self._plan.groups[chosen], self.counts[chosen]
        owners = np.repeat(np.arange(len(chosen)), counts)
        within = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
        rows = self._rows[self._starts[chosen][owners] + within]
        affix_ids = self._inventory.affix_ids[rows]
        slots = self._spec_of[affix_ids]
        if shape is None:
            used, slots = np.unique(affix_ids, return_inverse=True)
            shape = self._ambiguous(used.tolist())
        reasons, about = self._reasons_of(numbers)
        codes = filter(is_structural, pc.unique(reasons.column("code")).to_pylist())
        # Structural findings blame no object, so a group that is whole again may stay.
        structural = pc.is_in(reasons.column("code"), pa.array(codes, pa.string())).to_numpy()
        cells = owners * len(shape) + slots
        absent = ~np.repeat(np.isin(np.arange(len(chosen)), about[structural]), len(shape))
        absent[cells] = False
        batch = RemovalBatch(
            numbers=numbers,
            pages=self._groups.pages_at(numbers),
            shape=shape,
            by_choice=self._plan.by_choice,
            absent=absent,
            lacked=np.zeros(len(absent), dtype=np.bool_),
            owners=owners,
            slots=slots,
            unwanted=self._unwanted(reasons, about, ~structural, owners, affix_ids),
            facts=facts_of(self._inventory.take(rows)),
        )
        empty = np.setdiff1d(np.flatnonzero(~absent), cells)
        missed = reasons.column("key").combine_chunks().filter(pa.array(structural))
        named = pc.is_in(batch.keys_of(empty), value_set=missed.cast(pa.binary()))
        batch.lacked[empty[named.to_numpy(zero_copy_only=False)]] = True
        return batch

    def _unwanted(
        self,
        reasons: pa.Table,
        about: IntArray,
        blames: BoolArray,
        owners: IntArray,
        affix_ids: npt.NDArray[np.int32],
    ) -> BoolArray:
        """Return which objects are a reason for removal: [n].

        A reason without a row blames its whole group. An object that was listed twice is blamed if
        one of its two rows is.
        about: [reasons] group of each reason.
        blames: [reasons] whether the reason blames objects.
        owners, affix_ids: [n] group and affix of each object.
        """
        if self._plan.by_choice:
            return np.ones(len(owners), dtype=np.bool_)
        named, about = reasons.column("row").to_numpy()[blames], about[blames]
        listed, width = named != NO_NUMBER, len(self._inventory.table.affixes)
        bad = about[listed] * width + self._inventory.affix_ids[named[listed]]
        unwanted: BoolArray = np.isin(owners * width + affix_ids, bad)
        return unwanted | np.isin(owners, about[~listed])

    def _reasons_of(self, numbers: IntArray) -> tuple[pa.Table, IntArray]:
        """Return the reasons to remove groups, and each reason's group as an index in `numbers`."""
        places = np.searchsorted(numbers, self._plan.about)
        own = np.append(numbers, ABSENT)[places] == self._plan.about
        return self._reasons.filter(pa.array(own)), places[own]

    def _ambiguous(self, affix_ids: list[int]) -> Shape:
        """Return a shape with one slot for each affix, for groups of ambiguous keys.

        A whole group has an object in every slot, because nothing shows which objects it needs.
        """
        table, count = self._inventory.table, len(affix_ids)
        none = np.zeros(0, dtype=np.int64)
        return Shape(
            affixes=tuple(table.affixes[number] for number in affix_ids),
            anchors=table.anchors[affix_ids],
            required=np.ones(count, dtype=np.bool_),
            trailing=np.full(count, ABSENT, dtype=np.int64),
            sidecars=(none, none),
        )


def _last_of_each(owners: IntArray, kinds: npt.NDArray[np.int32]) -> IntArray:
    """Return the last index of each pair (owner, kind), ascending. owners must be ascending."""
    order = np.lexsort((kinds, owners))
    of_owner, of_kind = owners[order], kinds[order]
    last = np.ones(len(order), dtype=np.bool_)
    last[:-1] = (of_owner[1:] != of_owner[:-1]) | (of_kind[1:] != of_kind[:-1])
    return np.sort(order[last])
