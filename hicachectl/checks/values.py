"""Check `values`: run the checks of bytes, and find numbers that no healthy object has.

The checks need no model weights. NaN, Inf and scales out of range are counted exactly. An object, a
layer of a tensor, or a token's row in a layer is reported if all its bytes are zero, because holes
of files and unwritten pages read as zeros. Healthy rows have other bytes. A model computes no row
of exact zeros in bf16, and codes of float8_e4m3fn and float8_e5m2 keep their signs when they
underflow. float8_e4m3fnuz has no -0, so zeros are reported only if they fill the whole object.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from hicachectl.checks.changes import quartiles_of
from hicachectl.checks.registry import TensorStats, ValueCheck, ValueIssue, checks, resolved
from hicachectl.checks.tables import Section, sections_of
from hicachectl.kernels.values import (
    RowTable,
    bad_items,
    count_bad,
    is_inf,
    is_nan,
    item_bits,
    may_hold_bad_values,
    to_float32,
    zero_rows,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from hicachectl.checks.registry import FindIssues
    from hicachectl.formats.arrays import BoolArray, IntArray
    from hicachectl.formats.layouts import Column
    from hicachectl.formats.profile import Profile
    from hicachectl.formats.spec import ObjectSpec
    from hicachectl.kernels.values import Bits, Bytes

    Floats = npt.NDArray[np.float32]


# A block of this size stays in a core's L2 cache from one pass to the next.
_BLOCK_BYTES = 512 << 10
_COUNTED = {"nan": ("NaN", "NaN"), "inf": ("Inf", "Inf"), "bad-scale": ("bad scale", "bad scales")}
_NAMED_NUMBERS = 4


@dataclass(slots=True)
class _Damage:
    """Problems in the rows of one object.

    counts: bad items of each row, by code and number of the section: [rows].
    zero: whether all bytes of the row are zero, by number of the section: [rows].
    """

    counts: dict[tuple[str, int], IntArray] = field(default_factory=dict)
    zero: dict[int, BoolArray] = field(default_factory=dict)


class ValueChecker:
    """Value checks for objects of one spec. Threads may share a checker.

    prepared: the function of each check that applies to the spec.
    quartiles: reader of the quartiles that `checks.changes` compares; None if that check compares
        no quartiles of the spec.
    """

    def __init__(
        self, expected: ObjectSpec, profile: Profile, groups: Collection[str] | None = None
    ) -> None:
        """Prepare the registered value checks of some groups.

        groups: names of the groups; None for all groups.
        """
        self.expected = expected
        self.profile = profile
        self.prepared: dict[ValueCheck, FindIssues] = {}
        for check in checks(groups):
            if isinstance(check, ValueCheck):
                find: FindIssues | None = resolved(check.prepare)(expected, profile)
                if find is not None:
                    self.prepared[check] = find
        self.quartiles = quartiles_of(expected, profile)

    @property
    def groups(self) -> frozenset[str]:
        """Groups of the prepared checks."""
        return frozenset(check.group.name for check in self.prepared)

    @property
    def judges_layout(self) -> bool:
        """Whether a check can distinguish the layouts of the spec."""
        return any("layout-mismatch" in check.code_names for check in self.prepared)

    def check(
        self,
        objects: Bytes,
        rows: IntArray | None = None,
        checks: Collection[ValueCheck] | None = None,
    ) -> list[ValueIssue]:
        """Return the issues of objects [n, nbytes], one for each object and code.

        The bytes of an object must be contiguous, but the objects may lie apart. The call needs a
        few MB of memory.
        rows: indices of the objects to check, ascending; None for all objects.
        checks: checks to run; None for all prepared checks.
        Raises ValueError if nbytes is not the expected size, or if a check reports a code that it
        does not declare.
        """
        _refuse(objects, self.expected.nbytes)
        if rows is None:
            rows = np.arange(len(objects))
        if not len(rows):
            return []
        first, last = int(rows[0]), int(rows[-1])
        together = last - first + 1 == len(rows)  # a slice of neighbours needs no copy
        some = objects[first : last + 1] if together else objects[rows]
        issues: list[ValueIssue] = []
        for check, find in self.prepared.items():
            if checks is None or check in checks:
                issues += _declared(check, find(some))
        issues.sort(key=lambda issue: issue.index)
        return [replace(issue, index=int(rows[issue.index])) for issue in issues]

    def stats(self, content: Bytes) -> list[TensorStats]:
        """Return statistics of each tensor and layer of one object [nbytes], without padding.

        Raises ValueError if nbytes is not the expected size.
        """
        objects = content[np.newaxis]
        _refuse(objects, self.expected.nbytes)
        sections = sections_of(self.expected, self.profile)
        return [stats for section in sections for stats in _statistics(section, objects)]


def _declared(check: ValueCheck, issues: Iterable[ValueIssue]) -> list[ValueIssue]:
    found = list(issues)
    for name in {issue.code for issue in found}.difference(check.code_names):
        raise ValueError(f"{check.name}: the check does not declare code {name}")
    return found


def _refuse(objects: Bytes, nbytes: int) -> None:
    if objects.ndim != 2 or objects.shape[1] != nbytes:
        raise ValueError(f"objects: shape {objects.shape}, expected [n, {nbytes}]")


def number_check(expected: ObjectSpec, profile: Profile) -> FindIssues | None:
    """Return the check of numbers for one spec; None if the whole object is padding."""
    sections = sections_of(expected, profile)
    if not any(section.table.runs for section in sections):
        return None
    return partial(_number_issues, sections)


def _number_issues(sections: tuple[Section, ...], objects: Bytes) -> list[ValueIssue]:
    damages: dict[int, _Damage] = {}
    for number, section in enumerate(sections):
        _scan(objects, number, section.table, damages)
    return [
        ValueIssue(index, code, detail)
        for index in sorted(damages)
        for code, detail in _describe(sections, objects[index : index + 1], damages[index])
    ]


# --- scanning ---


def _blocks(objects: Bytes, table: RowTable) -> Iterator[tuple[int, int, Bytes]]:
    """Yield the rows of a table of all objects, in blocks that fit into the processor's cache.

    Each item has the number of the block's first object, the number of its first row, and its
    bytes.
    """
    for start, stop in table.runs:
        rows = max(1, _BLOCK_BYTES // table.pitch)
        together = max(1, _BLOCK_BYTES // ((stop - start) * table.pitch))
        for first in range(0, len(objects), together):
            group = objects[first : first + together]
            for row in range(start, stop, rows):
                yield first, row, table.block(group, row, min(row + rows, stop))


def _scan(objects: Bytes, number: int, table: RowTable, damages: dict[int, _Damage]) -> None:
    """Add the problems of one section of all objects to `damages`."""

    def damage_of(index: int) -> _Damage:
        return damages.setdefault(index, _Damage())

    for first, row, block in _blocks(objects, table):
        if may_hold_bad_values(block, table):
            for code, found in count_bad(block, table).items():
                for i in np.flatnonzero(found.any(axis=1)).tolist():
                    counts = damage_of(first + i).counts
                    counts.setdefault((code, number), np.zeros(table.rows, np.int64))
                    counts[code, number][row : row + found.shape[1]] = found[i]
        zero_objects, zero = zero_rows(block, table)
        for i in np.unique(zero_objects).tolist():
            marks = damage_of(first + i).zero
            marks.setdefault(number, np.zeros(table.rows, np.bool_))
            marks[number][row + zero[zero_objects == i]] = True


# --- details ---


def _describe(
    sections: tuple[Section, ...], content: Bytes, damage: _Damage
) -> Iterator[tuple[str, str]]:
    for code in _COUNTED:
        found = [
            _describe_items(sections[number], content, code, counts)
            for (its_code, number), counts in damage.counts.items()
            if its_code == code
        ]
        if found:
            yield code, "; ".join(found)
    everywhere = all(
        number in damage.zero and damage.zero[number][start:stop].all()
        for number, section in enumerate(sections)
        for start, stop in section.table.runs
    )
    zero = [
        text
        for number, marks in damage.zero.items()
        for text in _describe_zero_rows(sections[number], marks)
    ]
    if everywhere:
        yield "all-zero", "every byte of the object is zero"
    elif zero:
        yield "all-zero", "; ".join(zero)


def _describe_items(section: Section, content: Bytes, code: str, counts: IntArray) -> str:
    rows = np.flatnonzero(counts)
    where = section.coordinates(rows)
    first = {axis: int(numbers[0]) for axis, numbers in where.items()}
    column, items, bits = _first_item(section, content, int(rows[0]), code)
    place = _place({**first, **items}) + (f" of {column.name}" if column.name else "")
    is_scale = code == "bad-scale" and column.dtype == "float32"
    worth = f", value {to_float32(bits, column.dtype)[0]:g}" if is_scale else ""
    count = _counted(int(counts[rows].sum()), *_COUNTED[code])
    return f"{section.table.name}: {count} in {_extent(where)}, the first at {place}{worth}"


def _first_item(
    section: Section, content: Bytes, row: int, code: str
) -> tuple[Column, dict[str, int], Bits]:
    """Return the column, indices and bits of a row's first bad item."""
    table = section.table
    block = table.block(content, row, row + 1)
    for column in table.columns:
        bad = np.flatnonzero(bad_items(block, table, column, code)[0, 0])
        if len(bad):
            place = np.unravel_index(int(bad[0]), column.shape)
            bits = item_bits(block, table, column)[0, 0, bad[:1]]
            return column, dict(zip(column.axes, map(int, place), strict=True)), bits
    raise AssertionError(f"row {row} has no {code}")


def _describe_zero_rows(section: Section, zero: BoolArray) -> Iterator[str]:
    if section.dtype == "float8_e4m3fnuz":
        return
    name = section.table.name
    layers, tokens = _zero_units(section, zero)
    if layers:
        yield f"{name}: every byte of {_numbers('layer', layers)} is zero"
    if tokens:
        layer, token = tokens[0]
        where = {"layer": np.array([n for n, _ in tokens])}
        where["token"] = np.array([n for _, n in tokens])
        yield (
            f"{name}: {_counted(len(tokens), 'token row', 'token rows')} of zero bytes in "
            f"{_extent(where)}, "
            f"the first at layer {layer}, token {token}"
        )


def _zero_units(section: Section, zero: BoolArray) -> tuple[list[int], list[tuple[int, int]]]:
    """Return the layers of zeros, and the layer and token of each row of zeros in other layers."""
    axes, shape = section.table.axes, section.table.shape
    units = [axis for axis in ("layer", "token") if axis in axes]
    pieces = zero.reshape(shape).transpose(
        [axes.index(a) for a in units] + [i for i, a in enumerate(axes) if a not in units]
    )
    lengths = [shape[axes.index(axis)] for axis in units]
    by_unit: BoolArray = np.asarray(pieces.reshape(*lengths, -1).all(axis=-1))
    rows = by_unit.reshape(len(section.layers), -1)
    real = [(i, layer) for i, layer in enumerate(section.layers) if layer is not None]
    whole = [layer for i, layer in real if rows[i].all()]
    tokens = [
        (layer, token)
        for i, layer in real
        if not rows[i].all()
        for token in np.flatnonzero(rows[i]).tolist()
    ]
    return whole, tokens


def _extent(where: dict[str, IntArray]) -> str:
    parts = [
        _numbers(axis, np.unique(where[axis]).tolist())
        for axis in ("layer", "token")
        if axis in where
    ]
    return ", ".join(parts)


def _counted(count: int, one: str, more: str) -> str:
    return f"{count} {one if count == 1 else more}"


def _numbers(word: str, numbers: list[int]) -> str:
    if len(numbers) == 1:
        return f"{word} {numbers[0]}"
    if len(numbers) <= _NAMED_NUMBERS:
        return f"{word}s {', '.join(map(str, numbers))}"
    return f"{word}s {numbers[0]} to {numbers[-1]} ({len(numbers)} in all)"


def _place(numbers: dict[str, int]) -> str:
    """Return a position as text, layer and token first."""
    order = ("layer", "token", "head")
    rest = [axis for axis in numbers if axis not in order]
    named = [axis for axis in order if axis in numbers] + rest
    return ", ".join(f"{axis.replace('_', ' ')} {numbers[axis]}" for axis in named)


# --- statistics ---


def _statistics(section: Section, objects: Bytes) -> Iterator[TensorStats]:
    table = section.table
    content = table.block(objects, 0, table.rows).reshape(table.rows, table.pitch)
    stored = section.stored_layer(np.arange(table.rows))
    for number, layer in enumerate(section.layers):
        if layer is None:
            continue
        block = content[stored == number].reshape(1, -1)
        for column in table.columns:
            if column.pitch:  # codes say little if their scales are stored elsewhere
                continue
            part = f".{column.name}" if column.name and column.scales is None else ""
            yield _summary(table.name + part, layer, *_values(block, table, column))


def _values(block: Bytes, table: RowTable, column: Column) -> tuple[Floats, BoolArray, BoolArray]:
    """Return the values of a column, and which of them are NaN and Inf."""
    bits = item_bits(block, table, column)
    values = to_float32(bits, column.dtype)
    nan, inf = is_nan(bits, column.dtype), is_inf(bits, column.dtype)
    if column.scales is not None:
        scales = to_float32(item_bits(block, table, column.scales), "float32")
        wide = np.repeat(scales, column.items // column.scales.items, axis=-1)
        nan &= wide != 0
        with np.errstate(all="ignore"):
            values = np.where(wide == 0, np.float32(0), values * wide)
    return values, nan, inf


def _summary(name: str, layer: int, values: Floats, nan: BoolArray, inf: BoolArray) -> TensorStats:
    finite = values[np.isfinite(values)]
    some = len(finite) > 0
    return TensorStats(
        tensor=name,
        layer=layer,
        values=values.size,
        minimum=float(finite.min()) if some else None,
        maximum=float(finite.max()) if some else None,
        mean_magnitude=float(np.abs(finite).mean(dtype=np.float64)) if some else None,
        nan=int(nan.sum()),
        inf=int(inf.sum()),
        zero=int((finite == 0).sum()),
    )
