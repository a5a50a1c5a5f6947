"""Groups that are moved together: which objects are read and written, and where they lie.

A parcel's sources lie behind one another in the order of `reads`, each 4 KiB-aligned, as the
pipeline places them. Behind them lies what is made of them, but for what is a run of their bytes
as it is; behind that, where the destination is read back, copies of what it has. A parcel that the
destination copies by itself needs no memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from hicachectl.backends.arena import ALIGNMENT, place
from hicachectl.formats.spec import fits
from hicachectl.io.pipeline import Task
from hicachectl.kernels.relayout import relayout
from hicachectl.move.decisions import READS_BACK, Action, Problem
from hicachectl.move.survey import compare, keys_of, made_of
from hicachectl.pages.group_table import ABSENT

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from hicachectl.formats.copyplan import CopyPlan
    from hicachectl.formats.transfer import TransferUnit
    from hicachectl.move.routes import Route
    from hicachectl.move.survey import Survey
    from hicachectl.pages.group_table import GroupTable
    from hicachectl.pages.groups import BoolArray
    from hicachectl.pages.inventory import IntArray

_FIRST_BYTES = 8 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Writes:
    """Objects to be written.

    targets, owners, offsets, sizes, there: [n] which of the route's targets, of which group of the
    parcel, where in the parcel's memory, how many bytes, and what the destination has (ABSENT).
    sources: [n] one of the origins each is made of, for its time; ABSENT where of none.
    """

    targets: IntArray
    owners: IntArray
    offsets: IntArray
    sizes: IntArray
    there: IntArray
    sources: IntArray

    def __len__(self) -> int:
        return len(self.targets)


@dataclass(frozen=True, slots=True, eq=False)
class _Making:
    """Objects that one unit makes of others: (offset, step, bytes) of each block of `count`."""

    unit: TransferUnit
    count: int
    sources: tuple[tuple[int, int, int], ...]
    destinations: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Parcel(Task):
    """Groups of one survey that are moved together, all in the same way.

    items: [k] rows of the survey. origins: [m] rows of the source's objects; owners: [m] the group
    of each, 0..k-1. copied: the destination takes them from the source, so that none is read; else
    all are. back: offset of the memory for what is read back, behind all else. Offsets count from
    the parcel's own memory.
    """

    survey: Survey = field(kw_only=True)
    action: Action = field(kw_only=True)
    items: IntArray = field(kw_only=True)
    origins: IntArray = field(kw_only=True)
    owners: IntArray = field(kw_only=True)
    copied: bool = field(kw_only=True)
    writes: Writes = field(kw_only=True)
    makings: tuple[_Making, ...] = field(kw_only=True)
    back: int = field(kw_only=True)

    @property
    def nbytes(self) -> int:
        """Bytes that it takes from the source, read or copied."""
        return int((self.writes.sizes if self.copied else self.capacities).sum())

    @property
    def pages(self) -> pa.StringArray:
        """The page hash of each group: [k]."""
        return self.survey.pages.take(pa.array(self.items))

    def keys(self) -> pa.BinaryArray:
        """Spell the keys of the writes."""
        writes = self.writes
        pages = self.pages.take(pa.array(writes.owners))
        return keys_of(self.survey.route, writes.targets, pages)

    def anchors(self) -> BoolArray:
        """Say which of the writes are anchors."""
        route = self.survey.route
        anchors: BoolArray = np.array([t.anchor for t in route.targets])[self.writes.targets]
        return anchors

    def make(self, memory: npt.NDArray[np.uint8]) -> None:
        """Make the destination's objects of those that were read, in the parcel's memory."""
        for making in self.makings:
            sources, destinations = (
                [_block(memory, making.count, *block) for block in blocks]
                for blocks in (making.sources, making.destinations)
            )
            relayout(making.unit, sources, destinations)


def parcels(
    survey: Survey,
    items: IntArray,
    action: Action,
    *,
    reads_back: bool,
    copies: bool,
    most_bytes: int,
    most_objects: int,
) -> Iterator[Parcel]:
    """Cut groups, in their order, into parcels of limited size, or of one group.

    The first are smaller, so that writing soon begins, and ever larger until they reach the limit.
    reads_back: whether what is written is read back as well. copies: whether the destination can
    copy objects of the source by itself.
    """
    if not len(items):
        return
    back = reads_back or action in READS_BACK
    copied = copies and survey.route.verbatim and not back
    nbytes, objects = _demand(survey, items, back=back)
    by_bytes, by_objects = np.cumsum(nbytes), np.cumsum(objects)
    start, limit = 0, min(_FIRST_BYTES, most_bytes)
    while start < len(items):
        spent = (by_bytes[start - 1], by_objects[start - 1]) if start else (0, 0)
        end = min(
            int(np.searchsorted(by_bytes, spent[0] + limit, side="right")),
            int(np.searchsorted(by_objects, spent[1] + most_objects, side="right")),
        )
        end = max(end, start + 1)
        yield _parcel(survey, items[start:end], action, back=back, copied=copied)
        start, limit = end, min(2 * limit, most_bytes)


def bytes_in_memory(
    survey: Survey, items: IntArray, action: Action, *, reads_back: bool
) -> IntArray:
    """Return the bytes that each group needs in memory at once: [items]."""
    return _demand(survey, items, back=reads_back or action in READS_BACK)[0]


def too_large(page: str, need: int, buffer_bytes: int) -> Problem:
    """Say that a group is not copied because it does not fit into the buffer."""
    return Problem(
        page,
        None,
        f"needs {need} bytes in memory at once, --buffer-bytes has {buffer_bytes}; not copied",
    )


def leave_too_large(
    survey: Survey, *, reads_back: bool, buffer_bytes: int
) -> tuple[Survey, list[Problem]]:
    """Drop the groups that do not fit into the buffer from what is wanted, and return them.

    Groups that the destination has already are left as they are.
    """
    some, lacks, _ = compare(survey.wanted, survey.there)
    action = Action.COMPLETE if (some & lacks).any() else Action.COPY
    everything = np.arange(len(survey.groups))
    nbytes = bytes_in_memory(survey, everything, action, reads_back=reads_back)
    large = (nbytes > buffer_bytes) & lacks
    kept = (~large[block.owners] for block in survey.wanted.blocks)
    pages = survey.pages.filter(pa.array(large)).to_pylist()
    return replace(survey, wanted=survey.wanted.where(kept)), [
        too_large(page, need, buffer_bytes)
        for page, need in zip(pages, nbytes[large].tolist(), strict=True)
    ]


def leave_misfits(survey: Survey, *, whole_groups: bool) -> tuple[Survey, list[Problem]]:
    """Drop what objects of a wrong size would fill from what is wanted; one problem a group.

    whole_groups: drop everything of such a group. Groups that the destination has already stay
    wanted; their objects there are compared with the expected sizes, not with the source's.
    """
    route, rows, sizes = survey.route, survey.rows, survey.sizes
    misfits = rows.where(
        ~fits(sizes[block.values], route.sizes[block.positions]) for block in rows.blocks
    )
    if not misfits.counts.any():
        return survey, []
    lacks = survey.lacking.having()
    left = misfits.where(lacks[block.owners] for block in misfits.blocks)
    _, sources, wrong = misfits.objects(np.arange(misfits.count))
    right = sizes.copy()
    right[wrong] = route.sizes[sources]
    wanted = made_of(route, rows, right)
    if whole_groups:
        fine = ~left.having()
        wanted = wanted.where(fine[block.owners] for block in wanted.blocks)
    else:
        wanted = wanted.without(made_of(route, left, right, partly=True))
    return replace(survey, sizes=right, wanted=wanted), _misfit_problems(survey, left)


def _misfit_problems(survey: Survey, misfits: GroupTable) -> list[Problem]:
    """Describe the first object of a wrong size of each group that has any."""
    route, items = survey.route, np.flatnonzero(misfits.having())
    places, sources, rows = misfits.objects(items)
    _, first = np.unique(places, return_index=True)
    columns = (
        survey.pages.take(pa.array(items)).to_pylist(),
        sources[first].tolist(),
        survey.sizes[rows[first]].tolist(),
    )
    problems = []
    for page, source, nbytes in zip(*columns, strict=True):
        before, after = route.sources[source].affix
        why = f"{nbytes} bytes, expected {route.sizes[source]}; the page is not copied"
        problems.append(Problem(page, f"{before}{page}{after}", why))
    return problems


def _demand(survey: Survey, items: IntArray, *, back: bool) -> tuple[IntArray, IntArray]:
    """Bytes of memory, and objects read or written, that each group needs: [items] each."""
    route = survey.route
    times, beside, counts = np.zeros((3, len(route.targets)), dtype=np.int64)
    for unit in route.units:
        targets = list(unit.destinations)
        made = not unit.identity and _runs(route, unit) is None
        times[targets] = made + back
        counts[targets[0]] = max(len(unit.sources), len(targets))
        if unit.identity:
            times[targets] += 1  # the source, of as many bytes
        else:
            beside[targets[0]] = _aligned(route.sizes[list(unit.sources)]).sum()
    nbytes = np.zeros(len(items), dtype=np.int64)
    objects = np.zeros(len(items), dtype=np.int64)
    for block in survey.wanted.blocks:
        at, slots = block.find(items)
        column = block.columns[block.places[slots]]
        demand = _aligned(block.values[slots]) * times[column] + beside[column]
        np.add.at(nbytes, at, demand)
        np.add.at(objects, at, counts[column])
    return nbytes, objects


def _parcel(survey: Survey, items: IntArray, action: Action, *, back: bool, copied: bool) -> Parcel:
    builder = _Builder(survey, items)
    builder.read()
    read_bytes = builder.end
    builder.write()
    writes = builder.writes()
    back_at = builder.end
    room = back_at - read_bytes + (place(writes.sizes)[1] if back else 0)
    page = survey.pages[int(items[0])].as_py()
    origins = _joined(builder.origins)
    return Parcel(
        rows=_joined([]) if copied else origins,
        capacities=_joined([] if copied else builder.capacities),
        room=room,
        name=f"page {page} of {survey.route.name}" if len(items) == 1 else f"{len(items)} pages",
        survey=survey,
        action=action,
        items=items,
        origins=origins,
        owners=_joined(builder.owners),
        copied=copied,
        writes=writes,
        makings=tuple(builder.makings),
        back=back_at,
    )


_Blocks = list[tuple[int, "IntArray"]]  # number of the first read, and the offsets, of a source


class _Builder:
    """Lays out a parcel, unit by unit: first what is read, then what is made of it."""

    def __init__(self, survey: Survey, items: IntArray) -> None:
        self._route = survey.route
        targets = survey.wanted.used(items)
        units = np.unique(self._route.unit_of_target[targets])
        self._units = [self._route.units[at] for at in units.tolist()]
        sources = np.array(sorted({s for u in self._units for s in u.sources}), dtype=np.int64)
        self._rows = _columns(survey.rows, items, sources)
        self._wanted = _columns(survey.wanted, items, targets)
        self._there = _columns(survey.there, items, targets)
        self.end = 0
        self.origins: list[IntArray] = []
        self.capacities: list[IntArray] = []
        self.owners: list[IntArray] = []
        self._placed: list[tuple[TransferUnit, IntArray, _Blocks]] = []
        self.makings: list[_Making] = []
        self._reads = 0
        self._writes: list[tuple[IntArray, ...]] = []

    def read(self) -> None:
        """Place the sources of all units, for the groups that are to have what they make."""
        for unit in self._units:
            owners = np.flatnonzero(self._wanted[unit.destinations[0]] != ABSENT)
            self._read(unit, owners)

    def write(self) -> None:
        """Place what becomes of the sources."""
        for unit, owners, blocks in self._placed:
            self._write(unit, owners, blocks)

    def writes(self) -> Writes:
        """Give all writes, by target."""
        columns = zip(*self._writes, strict=True) if self._writes else ((),) * 6
        return Writes(*(_joined(list(column)) for column in columns))

    def _read(self, unit: TransferUnit, owners: IntArray) -> None:
        blocks: _Blocks = []
        for source in unit.sources:
            sizes = np.full(len(owners), self._route.sizes[source])
            if unit.identity:
                sizes = self._wanted[unit.destinations[0]][owners]
            offsets, nbytes = place(sizes)
            self.origins.append(self._rows[source][owners])
            self.capacities.append(sizes)
            self.owners.append(owners)
            blocks.append((self._reads, offsets + self.end))
            self._reads += len(owners)
            self.end += nbytes
        self._placed.append((unit, owners, blocks))

    def _write(self, unit: TransferUnit, owners: IntArray, blocks: _Blocks) -> None:
        """Place what becomes of the sources of a unit: where they are, or behind."""
        count = len(owners)
        first = blocks[0][0] + np.arange(count) if blocks else np.full(count, ABSENT)
        if unit.identity:
            (target,) = unit.destinations
            self._note(target, owners, blocks[0][1], self._wanted[target][owners], first)
            return
        if (runs := _runs(self._route, unit)) is not None:
            for target, run in zip(unit.destinations, runs, strict=True):
                offsets = blocks[run.source][1] + run.source_offset
                self._note(target, owners, offsets, np.full(count, run.nbytes), first)
            return
        made = []
        for target in unit.destinations:
            nbytes = int(self._route.target_bytes[target])
            step = int(_aligned(np.array([nbytes]))[0])
            offsets = self.end + step * np.arange(count, dtype=np.int64)
            self._note(target, owners, offsets, np.full(count, nbytes, dtype=np.int64), first)
            made.append((self.end, step, nbytes))
            self.end += step * count
        read = tuple(
            _steps(offsets, int(self._route.sizes[source]))
            for source, (_, offsets) in zip(unit.sources, blocks, strict=True)
        )
        self.makings.append(_Making(unit, count, read, tuple(made)))

    def _note(
        self, target: int, owners: IntArray, offsets: IntArray, sizes: IntArray, first: IntArray
    ) -> None:
        targets = np.full(len(owners), target, dtype=np.int64)
        there = self._there[target][owners]
        self._writes.append((targets, owners, offsets, sizes, there, first))


def _runs(route: Route, unit: TransferUnit) -> list[CopyPlan] | None:
    """Find each destination of a unit as one run of bytes in a source; None where one is made.

    Runs begin where objects of their own would: aligned.
    """
    runs = sorted(unit.copies, key=lambda copy: copy.destination)
    whole = [copy.destination for copy in runs] == list(range(len(unit.destinations))) and all(
        (copy.axes, copy.nbytes) == ((), route.targets[target].nbytes)
        and copy.source_offset % ALIGNMENT == 0
        for target, copy in zip(unit.destinations, runs, strict=True)
    )
    return runs if whole and runs else None


def _columns(table: GroupTable, items: IntArray, positions: IntArray) -> dict[int, IntArray]:
    """Return the slots of some groups, by the positions of specs."""
    slots = table.slots(items, positions).T
    return dict(zip(positions.tolist(), slots, strict=True))


def _steps(offsets: IntArray, nbytes: int) -> tuple[int, int, int]:
    step = int(offsets[1] - offsets[0]) if len(offsets) > 1 else max(nbytes, 1)
    return int(offsets[0]), step, nbytes


def _block(
    memory: npt.NDArray[np.uint8], count: int, offset: int, step: int, nbytes: int
) -> npt.NDArray[np.uint8]:
    """View objects of one size that lie at equal steps: [count, nbytes] uint8."""
    whole = memory[offset : offset + step * (count - 1) + nbytes]
    return np.lib.stride_tricks.as_strided(whole, shape=(count, nbytes), strides=(step, 1))


def _aligned(sizes: IntArray) -> IntArray:
    aligned: IntArray = -(-np.maximum(sizes, 0) // ALIGNMENT) * ALIGNMENT
    return aligned


def _joined(parts: list[IntArray]) -> IntArray:
    return np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, dtype=np.int64)
