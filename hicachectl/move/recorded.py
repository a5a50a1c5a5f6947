"""Page groups that leave a store or come back, in columns; and their record on disk, as JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import Meta, Struct

from hicachectl.checks.findings import SCHEMA
from hicachectl.formats.documents import parse_json_object
from hicachectl.formats.errors import FormatError
from hicachectl.formats.forms import convert
from hicachectl.formats.keys.base import codec_for
from hicachectl.formats.keys.labels import group_label
from hicachectl.formats.keys.table import join_keys
from hicachectl.move.reports import sums_by_group
from hicachectl.move.results import GroupStatus

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from hicachectl.backends.base import BoolArray, IntArray, Store
    from hicachectl.formats.keys.base import Affix
    from hicachectl.formats.spec import ObjectSpec

_MAX_VALUES = 16_000_000  # JSON values of one record; a thousand objects have some 10,000
FORM = 1
# Bounds of the numbers in a record, so that an Arrow column or the system refuses none of them.
_INT64_MAX = 2**63 - 1
_MOST_BYTES = 2**44  # of an object; the sum of a page is an int64
_MOST_FILES = 999_999_999
_MOST_SLOTS = 1 << 16
_MOST_KEYS = 1 << 23  # of all groups; some shapes have thousands of slots that no page fills
_MOST_VERSION = 1 << 16
_LAST_MOMENT = 1e11

_LOOKED_AT_ONCE = 1 << 20  # pairs of slots

ABSENT = -1

Mode = Literal["quarantine", "delete"]
_Count = Annotated[int, Meta(ge=0, le=_INT64_MAX)]

# What a store lists of an object, and the digest that a record can state.
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
    """An object that a page of a deployment can have; its key is prefix, page hash, suffix.

    required: a page without the object is not whole.
    trailing: number of a set that a page has all or nothing of; None outside of such sets.
    sidecars: of an anchor, the slots that the anchor's writer has written before it.
    """

    prefix: str
    suffix: str
    anchor: bool
    required: bool
    trailing: _Count | None
    sidecars: tuple[_Count, ...]


@dataclass(frozen=True, eq=False)
class Shape:
    """The slots of a deployment's pages, also as arrays: [slots] each."""

    slots: tuple[Slot, ...]

    @classmethod
    def of(cls, specs: Sequence[ObjectSpec]) -> Shape:
        """Make the shape of a deployment's pages: a slot for each spec."""
        sets: dict[object, int] = {}
        sidecars = [n for n, spec in enumerate(specs) if spec.awaited and not spec.anchor]
        return cls(
            tuple(
                Slot(
                    prefix=spec.affix[0],
                    suffix=spec.affix[1],
                    anchor=spec.anchor,
                    required=spec.awaited,
                    # Which unlisted objects a page has together, nothing tells.
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
        """Make the shape of objects that belong together, although their keys are ambiguous."""
        pairs = zip(affixes, anchors, strict=True)
        return cls(tuple(Slot(*affix, anchor, True, None, ()) for affix, anchor in pairs))

    def __len__(self) -> int:
        return len(self.slots)

    def without(self, lost: Sequence[int]) -> tuple[Shape, IntArray]:
        """Leave out some slots; also return the new number of each slot, or ABSENT: [slots]."""
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
        """Text of each slot's key before and after the page hash."""
        return [(slot.prefix, slot.suffix) for slot in self.slots]

    @cached_property
    def anchors(self) -> BoolArray:
        """Which slots are anchors."""
        return np.array([slot.anchor for slot in self.slots], dtype=np.bool_)

    @cached_property
    def required(self) -> BoolArray:
        """Which slots a whole page fills."""
        return np.array([slot.required for slot in self.slots], dtype=np.bool_)

    @cached_property
    def trailing(self) -> IntArray:
        """Number of each slot's trailing set, from 0 without gaps; ABSENT outside of such sets."""
        numbers: dict[int, int] = {}
        found = (slot.trailing for slot in self.slots)
        return np.array(
            [ABSENT if n is None else numbers.setdefault(n, len(numbers)) for n in found],
            dtype=np.int64,
        )

    @cached_property
    def sidecars(self) -> tuple[IntArray, IntArray]:
        """Pairs of an anchor and a sidecar that is written before it: [pairs] slots each."""
        pairs = [(n, other) for n, slot in enumerate(self.slots) for other in slot.sidecars]
        both = np.array(pairs, dtype=np.int64).reshape(-1, 2)
        return both[:, 0], both[:, 1]


@dataclass(frozen=True, eq=False, kw_only=True)
class RecordedGroups:
    """Page groups and their objects, as a listing or a record has them.

    A cell is a slot of a group; the cells of a group follow one another in the order of its shape.

    pages, models, tags: [k] strings.
    shapes: distinct ones. shape_ids: [k] the shape of each group.
    findings: [k] of FINDINGS: why a group is removed.
    absent: [cells] whether the empty slot is no reason for the removal.
    owners: [n] the group of each object, rising. slots: [n] within the group's shape.
    files: [n] number of the object in the folder of its batch.
    unwanted: [n] whether the group is removed because of the object.
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
        """Where the cells of each group begin, and where the last one's end: [k + 1]."""
        widths = np.array([len(shape) for shape in self.shapes], dtype=np.int64)
        return np.append(0, np.cumsum(widths[self.shape_ids]))

    @cached_property
    def cell_owners(self) -> IntArray:
        """The group of each cell: [cells]."""
        return np.repeat(np.arange(len(self)), np.diff(self.starts))

    @property
    def cells(self) -> IntArray:
        """The cell of each object: [n]."""
        cells: IntArray = self.starts[self.owners] + self.slots
        return cells

    @cached_property
    def _slots_of_cells(self) -> IntArray:
        """The slot of each cell, in a list of all shapes' slots one after the other: [cells]."""
        ends = np.cumsum([len(shape) for shape in self.shapes], dtype=np.int64)
        first = np.append(0, ends)[self.shape_ids] - self.starts[:-1]
        return np.arange(self.starts[-1]) + np.repeat(first, np.diff(self.starts))

    def keys_of(self, cells: IntArray) -> pa.BinaryArray:
        """Spell the keys of some cells."""
        affixes = [affix for shape in self.shapes for affix in shape.affixes]
        pages = self.pages.take(pa.array(self.cell_owners[cells]))
        return join_keys(affixes, pa.array(self._slots_of_cells[cells]), pages)

    @cached_property
    def anchors(self) -> BoolArray:
        """Which cells are of anchors: [cells]."""
        of_slots = np.concatenate([np.zeros(0, np.bool_), *(s.anchors for s in self.shapes)])
        anchors: BoolArray = of_slots[self._slots_of_cells]
        return anchors

    @property
    def counts(self) -> IntArray:
        """How many objects each group has: [k]."""
        return np.bincount(self.owners, minlength=len(self))

    @property
    def nbytes(self) -> pa.Int64Array:
        """Bytes of each group's objects, null where that of one is not known: [k]."""
        return sums_by_group(self.facts.column("nbytes"), self.owners, len(self))

    def labels(self, scheme: str) -> list[str]:
        """Name each group as `ls` does under "group": [k]. scheme: of the store's keys."""
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
        """Return only some of the groups. groups: rising."""
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
        """Return the groups with only some objects. kept: [n]."""
        return replace(
            self,
            owners=self.owners[kept],
            slots=self.slots[kept],
            files=self.files[kept],
            unwanted=self.unwanted[kept],
            facts=self.facts.filter(pa.array(kept)),
        )

    def as_seen(self, sight: Sight, unwanted: BoolArray) -> RecordedGroups:
        """Return the groups with the objects of a look. unwanted: [cells]."""
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
        """Return the status of each group if nothing more is removed: [k] GroupStatus.

        GONE: without objects. KEPT: whole, with nothing unwanted. IN_FLIGHT: all of the group is
        new, and came in order: a server is writing it. DONE: the group must leave.

        present: [cells] what is there. known: [n] which objects are still what is there.
        """
        any_there, any_unwanted, any_known = (
            self._groups_with(owners)
            for owners in (
                self.cell_owners[present],
                self.owners[known & self.unwanted],
                self.owners[known],
            )
        )
        # A writer skips no sidecar but one that was there, and is not any more.
        overtaken = self._overtaken(present)
        statuses = np.full(len(self), GroupStatus.IN_FLIGHT, dtype=np.uint8)
        statuses[any_known | overtaken] = GroupStatus.DONE
        statuses[self._whole(present)] = GroupStatus.KEPT
        statuses[any_unwanted] = GroupStatus.DONE
        statuses[~any_there] = GroupStatus.GONE
        return statuses

    def _groups_with(self, owners: IntArray) -> BoolArray:
        found = np.zeros(len(self), dtype=np.bool_)
        found[owners] = True
        return found

    def _whole(self, present: BoolArray) -> BoolArray:
        """Return which groups have all that a page needs, their absent slots aside: [k]."""
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

    def _overtaken(self, present: BoolArray) -> BoolArray:
        """Return which groups have an anchor without a sidecar that is written before it: [k]."""
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


@dataclass(frozen=True, eq=False)
class Sight:
    """What a store holds of some groups, as of one look.

    rows: a table as a scan gives it. at: [cells] the row of each cell, or ABSENT.
    """

    rows: pa.Table
    at: IntArray

    @property
    def present(self) -> BoolArray:
        """Which cells are there."""
        present: BoolArray = self.at != ABSENT
        return present

    def known(self, groups: RecordedGroups, *, versions: bool = True) -> BoolArray:
        """Return which objects of the groups are still what is there: [n]. As `same_objects`."""
        rows = self.at[groups.cells]
        there = np.flatnonzero(rows != ABSENT)
        known = np.zeros(len(rows), dtype=np.bool_)
        found = self.rows.take(pa.array(rows[there]))
        facts = groups.facts.take(pa.array(there))
        known[there] = same_objects(facts, found, versions=versions)
        return known


def look(store: Store, groups: RecordedGroups, pending: IntArray | None = None) -> Sight:
    """Ask a store for every object that groups can have. pending: only some of the groups."""
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
    """Return the columns of FACTS of rows that a store lists; null where they have none."""
    names = rows.column_names
    columns = [
        rows.column(field.name) if field.name in names else pa.nulls(len(rows), field.type)
        for field in FACTS
    ]
    return pa.table(columns, schema=FACTS)


def same_objects(one: pa.Table, other: pa.Table, *, versions: bool = True) -> BoolArray:
    """Return which rows of two tables of facts are of the same objects: [n].

    Versions decide; where a row has none, or versions do not count, size and time do.
    """
    alike = pc.and_(*(_equal(one.column(n), other.column(n)) for n in ("nbytes", "mtime_ns")))
    if versions:
        alike = pc.coalesce(pc.equal(one.column("version"), other.column("version")), alike)
    same: BoolArray = alike.to_numpy()
    return same


def _equal(one: pa.ChunkedArray, other: pa.ChunkedArray) -> pa.ChunkedArray:
    """Compare values, of which null equals null."""
    nulls = pc.and_(one.is_null(), other.is_null())
    return pc.or_(pc.fill_null(pc.equal(one, other), False), nulls)


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """What one batch took from where."""

    store: str
    scheme: str
    mode: Mode
    began: float
    groups: RecordedGroups


class _ObjectForm(Struct):
    """An object as JSON has it; key: must be that of its slot. version: hexadecimal."""

    key: str
    slot: _Count
    file: Annotated[int, Meta(ge=0, le=_MOST_FILES)]
    unwanted: bool
    nbytes: Annotated[int, Meta(ge=0, le=_MOST_BYTES)] | None
    mtime_ns: Annotated[int, Meta(ge=-_INT64_MAX, le=_INT64_MAX)] | None
    version: Annotated[str, Meta(max_length=_MOST_VERSION)] | None
    blake3: str | None


class _GroupForm(Struct):
    """A group as JSON has it; shape: index into the record's."""

    page: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
    model: str
    tag: str
    findings: tuple[dict[str, str | None], ...]
    shape: _Count
    absent: tuple[_Count, ...]
    objects: tuple[_ObjectForm, ...]


class _RecordForm(Struct):
    """A `Record` as JSON has it."""

    quarantine: int
    store: str
    scheme: str
    mode: Mode
    began: Annotated[float, Meta(ge=0, le=_LAST_MOMENT)]
    shapes: tuple[tuple[Slot, ...], ...]
    groups: tuple[_GroupForm, ...]


def dump_record(record: Record) -> bytes:
    """Write a record as JSON, a group a line."""
    groups = record.groups
    used, first = np.unique(groups.shape_ids, return_index=True)
    used = used[np.argsort(first)]  # in the order of the groups
    numbers = {number: place for place, number in enumerate(used.tolist())}
    shapes = tuple(groups.shapes[number].slots for number in used)
    absent = np.flatnonzero(groups.absent)
    absent_slots = (absent - groups.starts[groups.cell_owners[absent]]).tolist()
    absent_ends = np.searchsorted(absent, groups.starts).tolist()
    objects = _object_forms(groups)
    ends = np.searchsorted(groups.owners, np.arange(len(groups) + 1)).tolist()
    columns = (groups.pages, groups.models, groups.tags, groups.findings)
    described = zip(
        *(column.to_pylist() for column in columns), groups.shape_ids.tolist(), strict=True
    )
    lines = [
        json.dumps(
            {
                "page": page,
                "model": model,
                "tag": tag,
                "findings": findings,
                "shape": numbers[shape],
                "absent": absent_slots[absent_ends[n] : absent_ends[n + 1]],
                "objects": objects[ends[n] : ends[n + 1]],
            }
        )
        for n, (page, model, tag, findings, shape) in enumerate(described)
    ]
    head = _RecordForm(FORM, record.store, record.scheme, record.mode, record.began, shapes, ())
    body = ",\n".join(lines)
    text = json.dumps(msgspec.to_builtins(head)).removesuffix("]}")
    return f"{text}\n{body}\n]}}\n".encode()


def _object_forms(groups: RecordedGroups) -> list[dict[str, object]]:
    keys = groups.keys_of(groups.cells).cast(pa.string()).to_pylist()
    numbers = (column.tolist() for column in (groups.slots, groups.files, groups.unwanted))
    facts = (groups.facts.column(name).to_pylist() for name in FACTS.names)
    return [
        {
            "key": key,
            "slot": slot,
            "file": file,
            "unwanted": unwanted,
            "nbytes": nbytes,
            "mtime_ns": mtime_ns,
            "version": None if version is None else version.hex(),
            "blake3": blake3,
        }
        for key, slot, file, unwanted, nbytes, mtime_ns, version, blake3 in zip(
            keys, *numbers, *facts, strict=True
        )
    ]


class _DamagedError(FormatError):
    """Text of a record that is not JSON, beyond the bounds of one, or of another form."""


def parse_record(text: bytes, *, source: str) -> Record:
    """Read a record. Raises FormatError."""
    try:
        document = parse_json_object(text, "JSON", refusal=_DamagedError, max_values=_MAX_VALUES)
        form = document.get("quarantine")
        if form != FORM:
            raise ValueError(f"form {form!r:.60}; this release reads {FORM}")
        return _record(convert(document, _RecordForm, "JSON", refusal=_DamagedError))
    except (_DamagedError, ValueError) as error:
        raise FormatError(
            f"{source}: not a quarantine record of form {FORM} ({str(error)[:200]}); its pages are "
            "neither restored nor removed. To go on without them, move the file out of the "
            "quarantine"
        ) from error  # fmt: skip


def _record(form: _RecordForm) -> Record:
    """Make what a record says. Raises ValueError where parts of it contradict one another."""
    msgspec.json.encode(form)  # UnicodeEncodeError for half a character, which nothing could print
    for shape in form.shapes:
        if len(shape) > _MOST_SLOTS:
            raise ValueError(f"a page with {len(shape)} objects")
        if any(sidecar >= len(shape) for slot in shape for sidecar in slot.sidecars):
            raise ValueError("a sidecar that is no slot")
    if any(group.shape >= len(form.shapes) for group in form.groups):
        raise ValueError("a group of no shape")
    if sum(len(form.shapes[group.shape]) for group in form.groups) > _MOST_KEYS:
        raise ValueError(f"more than {_MOST_KEYS} keys")
    taken = [one for group in form.groups for one in group.objects]
    if len({one.file for one in taken}) != len(taken):
        raise ValueError("a file number twice")
    if len({one.key for one in taken}) != len(taken):
        raise ValueError("a key twice")
    for group in form.groups:
        _check_slots(group, len(form.shapes[group.shape]))
    groups = _recorded(form, taken)
    _check_keys(groups, taken)
    return Record(form.store, form.scheme, form.mode, form.began, groups)


def _check_keys(groups: RecordedGroups, taken: list[_ObjectForm]) -> None:
    for one, key in zip(taken, groups.keys_of(groups.cells).to_pylist(), strict=True):
        if key != one.key.encode():
            raise ValueError(f"key {one.key!r:.200} is not that of its slot")


def _check_slots(group: _GroupForm, slots: int) -> None:
    filled = [one.slot for one in group.objects]
    if len(set(filled)) != len(filled) or any(n >= slots for n in (*filled, *group.absent)):
        raise ValueError(f"page {group.page}: its objects do not fit its shape")


def _recorded(form: _RecordForm, taken: list[_ObjectForm]) -> RecordedGroups:
    """Put the groups of a record into columns. taken: the objects of all groups."""
    groups = form.groups
    shape_ids = np.array([group.shape for group in groups], dtype=np.int64)
    widths = np.array([len(shape) for shape in form.shapes], dtype=np.int64)
    starts = np.append(0, np.cumsum(widths[shape_ids]))
    absent = np.zeros(starts[-1], dtype=np.bool_)
    absent[[start + n for start, g in zip(starts.tolist(), groups) for n in g.absent]] = True  # noqa: B905 - one more start
    versions = [None if one.version is None else bytes.fromhex(one.version) for one in taken]
    facts = {
        **{name: [getattr(one, name) for one in taken] for name in FACTS.names},
        "version": versions,
    }
    texts = ([getattr(group, name) for group in groups] for name in ("page", "model", "tag"))
    pages, models, tags = (pa.array(values, pa.string()) for values in texts)
    return RecordedGroups(
        pages=pages,
        models=models,
        tags=tags,
        shapes=tuple(map(Shape, form.shapes)),
        shape_ids=shape_ids,
        findings=pa.array([group.findings for group in groups], FINDINGS),
        absent=absent,
        owners=np.repeat(np.arange(len(groups)), [len(group.objects) for group in groups]),
        slots=np.array([one.slot for one in taken], dtype=np.int64),
        files=np.array([one.file for one in taken], dtype=np.int64),
        unwanted=np.array([one.unwanted for one in taken], dtype=np.bool_),
        facts=pa.table(facts, schema=FACTS),
    )


def no_groups() -> RecordedGroups:
    """Return no groups, as of a batch without a record."""
    return _recorded(_RecordForm(FORM, "", "", "delete", 0.0, (), ()), [])
