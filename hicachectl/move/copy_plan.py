"""Plans of copies. A plan has an action for each page group of a survey, and yields batches."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa

from hicachectl.backends.arena import ALIGNMENT, place
from hicachectl.formats.wording import over_buffer
from hicachectl.io.pipeline import Task
from hicachectl.kernels.relayout import relayout
from hicachectl.move.order import GroupObjects
from hicachectl.move.results import MOST_PROBLEMS, Problem
from hicachectl.move.survey import COMPARING, READS_BACK, WRITING, Action, conflicts
from hicachectl.pages.group_table import ABSENT

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from hicachectl.formats.arrays import BoolArray, IntArray
    from hicachectl.formats.copyplan import CopyPlan as ByteRun
    from hicachectl.formats.transfer import TransferUnit
    from hicachectl.move.results import CopyFacts
    from hicachectl.move.store_pair import CopyOptions
    from hicachectl.move.survey import Route, Survey
    from hicachectl.pages.groups import PageGroups


# The order of actions. The groups that an earlier run left incomplete come first.
_ORDER = (
    Action.COMPLETE,
    Action.COPY,
    Action.COMPARE,
    Action.CLEAR,
    Action.REPLACE,
    Action.ADOPT,
)


@dataclass(frozen=True, slots=True, eq=False)
class CopyPlan:
    """Page groups of one survey to copy, with an action for each.

    order: survey rows of the groups in the order of copying.
    actions: [n] Action of each row of the survey.
    together: whether the groups to write keep this order whatever their actions. Otherwise all
        groups of one action come before those of the next action.
    """

    groups: PageGroups
    survey: Survey
    order: IntArray
    actions: npt.NDArray[np.int8]
    together: bool = False

    def rows(self, *wanted: Action) -> IntArray:
        """Return the survey rows with these actions, in order."""
        rows: IntArray = self.order[np.isin(self.actions[self.order], wanted)]
        return rows

    def count(self, *wanted: Action) -> int:
        """Return the number of groups with these actions."""
        return len(self.rows(*wanted))

    @property
    def items(self) -> IntArray:
        """Survey rows of the groups to write, in order."""
        return self.rows(*WRITING)

    @property
    def cost(self) -> IntArray:
        """Bytes that each item adds to the destination."""
        return self.survey.lacking.sums[self.items]

    def demand(self) -> tuple[int, int]:
        """Return the number of objects and of bytes to write."""
        items, wanted, lacking = self.items, self.survey.wanted, self.survey.lacking
        replaces = self.actions[items] == Action.REPLACE
        objects, nbytes = (
            int(np.where(replaces, whole[items], rest[items]).sum())
            for whole, rest in ((wanted.counts, lacking.counts), (wanted.sums, lacking.sums))
        )
        return objects, nbytes

    def rehearse(self, facts: CopyFacts) -> None:
        """Add to the facts what a copy without failures would write.

        Pages to compare count as skipped.
        """
        objects, nbytes = self.demand()
        facts.pages += len(self.items)
        facts.objects += objects
        facts.bytes += nbytes
        facts.skipped += self.count(*COMPARING)

    def exclude_oversized(self, options: CopyOptions, facts: CopyFacts) -> None:
        """Leave out groups that need more memory than --buffer-bytes.

        Count these groups, and the groups in conflict, in the facts.
        """
        most = options.buffer_bytes
        for work in self.works():
            nbytes = work.bytes_in_memory(verify=options.verify)
            large = np.flatnonzero(nbytes > most)
            self.actions[work.items[large]] = Action.NOTHING
            facts.failed += len(large)
            named = large[:MOST_PROBLEMS]
            pages = self.survey.pages.take(pa.array(work.items[named])).to_pylist()
            facts.note(
                Problem(page, None, f"not copied: {over_buffer(need, most)}")
                for page, need in zip(pages, nbytes[named].tolist(), strict=True)
            )
        conflicting = self.rows(Action.CONFLICT)
        facts.conflicts += len(conflicting)
        facts.note(conflicts(self.survey, conflicting))

    def works(self) -> list[PageWork]:
        """Return the groups to process, divided by action."""
        found = [(action, self.rows(action)) for action in _ORDER]
        if self.together:
            # COMPLETE also copies groups without any object in the destination.
            first = Action.COMPLETE if self.count(Action.COMPLETE) else Action.COPY
            found = [(first, self.items), (Action.COMPARE, self.rows(Action.COMPARE))]
        return [PageWork(self.survey, items, action) for action, items in found if len(items)]


def oldest_first(survey: Survey, newest_ns: IntArray) -> IntArray:
    """Return the rows of a survey, oldest groups first, because servers write parents first.

    Neighbours of equal age come from distant rows of the listing, and so from different folders of
    a store. Otherwise they would wait for each other, because a file system makes only one change
    at a time in a folder.
    newest_ns: [n] mtime of each group's newest object.
    """
    first_rows = np.full(len(survey.groups), np.iinfo(np.int64).max)
    for block in survey.rows.blocks:
        np.minimum.at(first_rows, block.owners, block.values)
    return np.lexsort((first_rows, first_rows % _APART, newest_ns))


# Distance in the listing between two groups of equal age that are copied one after the other.
_APART = 1021
_FIRST_BYTES = 8 << 20
# Larger than any memory, but small enough that the sums of a group do not overflow.
_MOST_ALIGNED = 2**48


@dataclass(frozen=True, slots=True, eq=False)
class Transform:
    """Conversion of the objects of `count` groups by one unit.

    sources, destinations: (offset, step, nbytes) for each source or destination of the unit. The
        offset is the place of the first group's object in the memory of the batch. The step is the
        distance from one group's object to the next group's object.
    """

    unit: TransferUnit
    count: int
    sources: tuple[tuple[int, int, int], ...]
    destinations: tuple[tuple[int, int, int], ...]

    def apply(self, memory: npt.NDArray[np.uint8]) -> None:
        """Write the destination objects into memory."""
        sources, destinations = (
            [_strided(memory, self.count, *block) for block in blocks]
            for blocks in (self.sources, self.destinations)
        )
        relayout(self.unit, sources, destinations)


def cut(
    nbytes: IntArray, objects: IntArray, *, first_bytes: int, most_bytes: int, most_objects: int
) -> Iterator[slice]:
    """Yield slices of groups in order. Each slice is within the limits, or is a single group.

    nbytes: [groups] bytes that each group needs.
    objects: [groups] number of objects that each group needs.
    first_bytes: limit of the first slice, small so that writing begins soon. The limit doubles with
        each slice, up to most_bytes.
    """
    by_bytes, by_objects = np.cumsum(nbytes), np.cumsum(objects)
    start, limit = 0, min(first_bytes, most_bytes)
    while start < len(nbytes):
        spent = (by_bytes[start - 1], by_objects[start - 1]) if start else (0, 0)
        end = min(
            int(np.searchsorted(by_bytes, spent[0] + limit, side="right")),
            int(np.searchsorted(by_objects, spent[1] + most_objects, side="right")),
        )
        end = max(end, start + 1)
        yield slice(start, end)
        start, limit = end, min(2 * limit, most_bytes)


def aligned(sizes: IntArray) -> IntArray:
    """Return the bytes of memory for objects of these sizes; 0 for unknown sizes."""
    within = np.clip(sizes, 0, _MOST_ALIGNED)
    space: IntArray = -(-within // ALIGNMENT) * ALIGNMENT
    return space


def _strided(
    memory: npt.NDArray[np.uint8], count: int, offset: int, step: int, nbytes: int
) -> npt.NDArray[np.uint8]:
    """Return a view of objects at equal steps: [count, nbytes] uint8."""
    whole = memory[offset : offset + step * (count - 1) + nbytes]
    return np.lib.stride_tricks.as_strided(whole, shape=(count, nbytes), strides=(step, 1))


@dataclass(frozen=True, slots=True, eq=False)
class PageWork:
    """Page groups of one survey to process with one action, in order.

    items: [n] rows of the survey.
    """

    survey: Survey
    items: IntArray
    action: Action

    def only(self, chosen: BoolArray | slice) -> PageWork:
        """Return the work for some of the groups only. chosen: mask or slice of the items."""
        return replace(self, items=self.items[chosen])

    def bytes_in_memory(self, *, verify: bool) -> IntArray:
        """Return the bytes that each group needs in memory: [items]."""
        return self._demand(verify or self.action in READS_BACK)[0]

    def batches(
        self, *, verify: bool, copies: bool, most_bytes: int, most_objects: int
    ) -> Iterator[PageBatch]:
        """Yield batches of the groups in order. A batch is within the limits, or is a single group.

        verify: whether written objects are read back.
        copies: whether the destination can copy source objects by itself.
        """
        back = verify or self.action in READS_BACK
        by_system = copies and self.survey.route.verbatim and not back
        nbytes, objects = self._demand(back)
        for span in cut(
            nbytes,
            objects,
            first_bytes=_FIRST_BYTES,
            most_bytes=most_bytes,
            most_objects=most_objects,
        ):
            yield _Layout(self.only(span)).batch(back=back, by_system=by_system)

    def _demand(self, back: bool) -> tuple[IntArray, IntArray]:
        """Return the bytes of memory and the number of objects that each group needs: [items].

        back: whether written objects are read back.
        """
        route, wanted = self.survey.route, self.survey.wanted
        times, beside, counts = np.zeros((3, len(route.targets)), dtype=np.int64)
        for unit in route.units:
            targets = list(unit.destinations)
            made = not unit.identity and _runs(route, unit) is None
            times[targets] = made + back
            counts[targets[0]] = max(len(unit.sources), len(targets))
            if unit.identity:
                times[targets] += 1  # the source is in memory, too, and has as many bytes
            else:
                beside[targets[0]] = aligned(route.sizes[list(unit.sources)]).sum()
        nbytes, objects = np.zeros((2, len(self.items)), dtype=np.int64)
        for block in wanted.blocks:
            at, slots = block.find(self.items)
            column = block.columns[block.places[slots]]
            demand = aligned(block.values[slots]) * times[column] + beside[column]
            np.add.at(nbytes, at, demand)
            np.add.at(objects, at, counts[column])
        return nbytes, objects


@dataclass(frozen=True, slots=True, eq=False)
class PageBatch(Task):
    """Page groups of one survey copied together, with one action.

    The memory of a batch has three parts:

    1. the source objects in the order of `rows`, each aligned to 4 KiB
    2. the transformed objects
    3. the objects read back

    An object that is a run of source bytes gets no memory of its own. Offsets count from the start
    of the batch's memory.

    pages:      [k] page hash of each group.
    owners:     [rows] group of each source object.
    objects:    [n] objects of the destination.
    targets:    [n] `key` and `mtime_ns` of the same objects.
    sizes, offsets: [n] bytes and offset of each object.
    existing:   [n] bytes of the destination's object under the key, or ABSENT.
    origins:    [n] row of each object's first source, or ABSENT.
    by_system:  whether the destination copies the objects by itself.
    back:       offset at which objects are read back.
    survey:     survey to which the groups belong.
    items:      [k] rows of the survey.
    """

    action: Action = field(kw_only=True)
    pages: pa.StringArray = field(kw_only=True)
    owners: IntArray = field(kw_only=True)
    objects: GroupObjects = field(kw_only=True)
    targets: pa.Table = field(kw_only=True)
    sizes: IntArray = field(kw_only=True)
    offsets: IntArray = field(kw_only=True)
    existing: IntArray = field(kw_only=True)
    origins: IntArray = field(kw_only=True)
    by_system: bool = field(kw_only=True)
    transforms: tuple[Transform, ...] = field(kw_only=True)
    back: int = field(kw_only=True)
    survey: Survey = field(kw_only=True)
    items: IntArray = field(kw_only=True)

    def key_read(self, index: int, listed: pa.Table) -> bytes:
        """Return the key of the source object at an index. listed: the source's rows."""
        key: bytes = listed.column("key")[int(self.rows[index])].as_py()
        return key

    @property
    def nbytes(self) -> int:
        """Bytes read or copied from the source."""
        return int((self.capacities if len(self.rows) else self.sizes).sum())


# For each source of a unit: the index of its first object among all reads, and its offsets.
_Reads = list[tuple[int, "IntArray"]]


class _Read(NamedTuple):
    """Objects to read, with the listed row, the group and the bytes of each object."""

    rows: IntArray
    owners: IntArray
    sizes: IntArray


class _Write(NamedTuple):
    """Objects to write.

    targets: index of each object's target in the route.
    owners: group of each object.
    offsets, sizes: place of each object in the batch's memory.
    existing: bytes of the destination's object under the key, or ABSENT.
    firsts: index of each object's first source among the objects read, or ABSENT.
    """

    targets: IntArray
    owners: IntArray
    offsets: IntArray
    sizes: IntArray
    existing: IntArray
    firsts: IntArray


class _Layout:
    """Memory layout of a batch. All source objects come first, then the transformed objects."""

    def __init__(self, work: PageWork) -> None:
        self._work = work
        self._survey = survey = work.survey
        self._route = route = survey.route
        targets = survey.wanted.used(work.items)
        units = np.unique(route.unit_of_target[targets]).tolist()
        self._units = [route.units[number] for number in units]
        sources = np.array(sorted({s for u in self._units for s in u.sources}), dtype=np.int64)
        self._rows, self._wanted, self._existing = (
            dict(zip(columns.tolist(), table.slots(work.items, columns).T, strict=True))
            for table, columns in (
                (survey.rows, sources),
                (survey.wanted, targets),
                (survey.existing, targets),
            )
        )
        self._end = 0
        self._count = 0
        self._reads: list[_Read] = []
        self._writes: list[_Write] = []
        self._transforms: list[Transform] = []

    def batch(self, *, back: bool, by_system: bool) -> PageBatch:
        """Return the batch. back: whether the batch needs room for objects read back."""
        read = [self._read(unit) for unit in self._units]
        read_bytes = self._end
        for unit, (owners, reads) in zip(self._units, read, strict=True):
            if len(owners):
                self._write(unit, owners, reads)
        read_objects = _Read(*_joined(self._reads, len(_Read._fields)))
        targets, owners, offsets, sizes, existing, firsts = _Write(
            *_joined(self._writes, len(_Write._fields))
        )
        rows = read_objects.rows
        survey, items = self._survey, self._work.items
        pages = survey.pages.take(pa.array(items))
        keys = self._route.keys(targets, pages.take(pa.array(owners)))
        anchors = np.array([target.anchor for target in self._route.targets])[targets]
        origins = np.append(rows, ABSENT)[firsts]
        times = survey.times.take(pa.array(origins, mask=origins == ABSENT))
        nothing = np.zeros(0, dtype=np.int64)
        name = f"{len(items)} pages"
        if len(items) == 1:
            name = f"page {pages[0].as_py()} of {self._route.name}"
        return PageBatch(
            rows=nothing if by_system else rows,
            capacities=nothing if by_system else read_objects.sizes,
            room=self._end - read_bytes + (place(sizes)[1] if back else 0),
            name=name,
            action=self._work.action,
            pages=pages,
            owners=read_objects.owners,
            objects=GroupObjects(keys, owners, anchors),
            targets=pa.table({"key": keys, "mtime_ns": times}),
            sizes=sizes,
            offsets=offsets,
            existing=existing,
            origins=origins,
            by_system=by_system,
            transforms=tuple(self._transforms),
            back=self._end,
            survey=survey,
            items=items,
        )

    def _place(self, sizes: IntArray) -> IntArray:
        offsets, nbytes = place(sizes)
        offsets += self._end
        self._end += nbytes
        return offsets

    def _read(self, unit: TransferUnit) -> tuple[IntArray, _Reads]:
        """Choose the offsets of a unit's sources, for the groups that need the unit's targets.

        Return these groups, and the place of each source.
        """
        owners = np.flatnonzero(self._wanted[unit.destinations[0]] != ABSENT)
        reads: _Reads = []
        for source in unit.sources:
            sizes = np.full(len(owners), self._route.sizes[source])
            if unit.identity:
                sizes = self._wanted[unit.destinations[0]][owners]
            reads.append((self._count, self._place(sizes)))
            self._reads.append(_Read(self._rows[source][owners], owners, sizes))
            self._count += len(owners)
        return owners, reads

    def _write(self, unit: TransferUnit, owners: IntArray, reads: _Reads) -> None:
        """Choose the offsets of a unit's destinations.

        A destination that is a run of source bytes lies within its source. Any other lies after the
        sources.
        """
        count = len(owners)
        firsts = reads[0][0] + np.arange(count) if reads else np.full(count, ABSENT)
        if unit.identity:
            (target,) = unit.destinations
            placed = [(target, reads[0][1], self._wanted[target][owners])]
        elif (runs := _runs(self._route, unit)) is not None:
            placed = [
                (target, reads[run.source][1] + run.source_offset, np.full(count, run.nbytes))
                for target, run in zip(unit.destinations, runs, strict=True)
            ]
        else:
            sizes = {t: np.full(count, self._route.target_bytes[t]) for t in unit.destinations}
            placed = [(target, self._place(sizes[target]), sizes[target]) for target in sizes]
            sources = zip(unit.sources, reads, strict=True)
            self._transforms.append(
                Transform(
                    unit,
                    count,
                    tuple(_steps(offs, int(self._route.sizes[s])) for s, (_, offs) in sources),
                    tuple(_steps(offsets, int(nbytes[0])) for _, offsets, nbytes in placed),
                )
            )
        for target, offsets, nbytes in placed:
            existing = self._existing[target][owners]
            targets = np.full(count, target)
            self._writes.append(_Write(targets, owners, offsets, nbytes, existing, firsts))


def _runs(route: Route, unit: TransferUnit) -> list[ByteRun] | None:
    """Return each destination of a unit as an aligned run of source bytes.

    Return None if a destination must be transformed.
    """
    runs = sorted(unit.copies, key=lambda copy: copy.destination)
    whole = [copy.destination for copy in runs] == list(range(len(unit.destinations))) and all(
        (copy.axes, copy.nbytes) == ((), route.targets[target].nbytes)
        and copy.source_offset % ALIGNMENT == 0
        for target, copy in zip(unit.destinations, runs, strict=True)
    )
    return runs if whole and runs else None


def _steps(offsets: IntArray, nbytes: int) -> tuple[int, int, int]:
    step = int(offsets[1] - offsets[0]) if len(offsets) > 1 else max(nbytes, 1)
    return int(offsets[0]), step, nbytes


def _joined(parts: Sequence[tuple[IntArray, ...]], count: int) -> list[IntArray]:
    columns = zip(*parts, strict=True) if parts else [()] * count
    nothing = np.zeros(0, dtype=np.int64)
    return [np.concatenate([nothing, *column]).astype(np.int64) for column in columns]
