"""Copies of boxes between two byte orders, as rectangles with strides.

A box holds some indices along named axes; in each of two objects it lies with strides of its own.
What both sides hold, one strided copy moves, whatever the orders of their axes are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


_Step = tuple[int, int, int]  # length, source stride, destination stride


@dataclass(frozen=True, slots=True)
class StridedCopy:
    """One rectangle of bytes, moved from a source object to a destination object.

    source, destination: which of a unit's objects.
    shape:    items along each axis, outermost first; () is one run of bytes.
    itemsize: bytes of an item, contiguous on both sides.
    Offsets and strides are bytes, counted from the start of the objects.
    """

    source: int
    destination: int
    shape: tuple[int, ...]
    itemsize: int
    source_offset: int
    source_strides: tuple[int, ...]
    destination_offset: int
    destination_strides: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that it moves."""
        return prod(self.shape) * self.itemsize


@dataclass(frozen=True, slots=True)
class Axis:
    """Indices [first, first + length) along one axis, `stride` bytes apart in their object."""

    name: str
    first: int
    length: int
    stride: int


@dataclass(frozen=True, slots=True)
class Region:
    """One box of a page's content, and where it lies in an object.

    space:  what the indices count; boxes of different spaces have nothing in common.
    axes:   sorted by name, the same in all regions of a space.
    offset: of the item with the first index along every axis.
    """

    space: tuple[object, ...]
    axes: tuple[Axis, ...]
    itemsize: int
    offset: int

    @property
    def box(self) -> tuple[object, ...]:
        """What it holds, wherever it lies."""
        return self.space, tuple((axis.first, axis.length) for axis in self.axes)

    @property
    def nbytes(self) -> int:
        """Bytes that it holds."""
        return prod(axis.length for axis in self.axes) * self.itemsize


def overlap(
    source: Region, destination: Region, *, copy_from: int, copy_to: int
) -> StridedCopy | None:
    """Plan the copy of what two regions of one space share; None where that is nothing."""
    axes: list[_Step] = []
    source_offset, destination_offset = source.offset, destination.offset
    for one, two in zip(source.axes, destination.axes, strict=True):
        first = max(one.first, two.first)
        length = min(one.first + one.length, two.first + two.length) - first
        if length <= 0:
            return None
        source_offset += (first - one.first) * one.stride
        destination_offset += (first - two.first) * two.stride
        if length > 1:
            axes.append((length, one.stride, two.stride))
    lengths, source_strides, destination_strides = _columns(axes)
    return _compact(
        StridedCopy(
            source=copy_from,
            destination=copy_to,
            shape=lengths,
            itemsize=source.itemsize,
            source_offset=source_offset,
            source_strides=source_strides,
            destination_offset=destination_offset,
            destination_strides=destination_strides,
        )
    )


def _merged(axes: list[_Step], itemsize: int) -> tuple[list[_Step], int]:
    """Order axes as the destination lies, and join those that follow one another on both sides."""
    merged: list[_Step] = []
    for length, source, destination in sorted(axes, key=lambda axis: axis[2]):
        if not merged and source == destination == itemsize:
            itemsize *= length
            continue
        if merged:
            inner, *steps = merged[-1]
            if [source, destination] == [inner * step for step in steps]:
                merged[-1] = (inner * length, steps[0], steps[1])
                continue
        merged.append((length, source, destination))
    return merged[::-1], itemsize


def joined(copies: Iterable[StridedCopy]) -> tuple[StridedCopy, ...]:
    """Join copies between the same objects whose items continue one another on both sides."""
    left = sorted(copies, key=lambda copy: (copy.destination, copy.source, copy.destination_offset))
    found: list[StridedCopy] = []
    for copy in left:
        grown = copy
        while found and _continues(found[-1], grown):
            last = found.pop()
            grown = _compact(replace(last, itemsize=last.itemsize + grown.itemsize))
        found.append(grown)
    return tuple(found)


def _continues(last: StridedCopy, copy: StridedCopy) -> bool:
    before = replace(
        copy,
        itemsize=last.itemsize,
        source_offset=copy.source_offset - last.itemsize,
        destination_offset=copy.destination_offset - last.itemsize,
    )
    return before == last


def _compact(copy: StridedCopy) -> StridedCopy:
    """Join axes that follow one another, once items have grown."""
    axes = zip(copy.shape, copy.source_strides, copy.destination_strides, strict=True)
    merged, itemsize = _merged(list(axes), copy.itemsize)
    shape, source_strides, destination_strides = _columns(merged)
    return replace(
        copy,
        shape=shape,
        itemsize=itemsize,
        source_strides=source_strides,
        destination_strides=destination_strides,
    )


def _columns(axes: Iterable[_Step]) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    lengths, sources, destinations = zip(*axes, strict=True) if axes else ((), (), ())
    return lengths, sources, destinations
