"""Plan rectangular copies between two axis orders, for relayout, reshard, scatter and gather.

A plan copies the overlap of two boxes of indices. Each box has its own axis order and strides.
numpy executes plans on the host (`kernels.relayout`). Triton executes plans on a device
(`kernels.copy_triton`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd, prod
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

VECTOR_BYTES = 16  # the widest access of a GPU thread


class Axis(NamedTuple):
    """One axis of a copy. A named axis is not joined to another axis.

    source, destination: bytes from one index to the next in the source and in the destination.
    """

    name: str
    length: int
    source: int
    destination: int


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """Strided copies of one shape.

    A plan is executed for pairs of a source index s and a destination index d. Each pair is one
    copy.

    axes: axes of a copy, outermost first. At each index, `run` bytes are contiguous on both sides.
    offsets, steps: numbers of bytes. A copy begins at source_offset + s * source_step and at
        destination_offset + d * destination_step.
    source, destination: indices of the objects that a copy reads and writes, if there are several
        objects.
    """

    axes: tuple[Axis, ...]
    run: int
    source_offset: int = 0
    destination_offset: int = 0
    source_step: int = 0
    destination_step: int = 0
    source: int = 0
    destination: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of one copy."""
        return prod(axis.length for axis in self.axes) * self.run

    @property
    def unit(self) -> int:
        """Widest access (16, 8, 4, 2 or 1 bytes) to which all addresses are aligned."""
        steps = [step for axis in self.axes for step in (axis.source, axis.destination)]
        offsets = (self.source_offset, self.destination_offset)
        return gcd(
            VECTOR_BYTES, self.run, *steps, *offsets, self.source_step, self.destination_step
        )

    def at(self, place: int, index: int) -> CopyPlan:
        """Return the copy of one index along axis number `place`."""
        axis = self.axes[place]
        return replace(
            self,
            axes=self.axes[:place] + self.axes[place + 1 :],
            source_offset=self.source_offset + index * axis.source,
            destination_offset=self.destination_offset + index * axis.destination,
        )

    def reversed(self) -> CopyPlan:
        """Return the copy from destination to source, with axes in the destination's order."""
        axes = [Axis(a.name, a.length, a.destination, a.source) for a in self.axes]
        axes.sort(key=lambda axis: -axis.destination)
        return CopyPlan(
            tuple(axes),
            self.run,
            self.destination_offset,
            self.source_offset,
            self.destination_step,
            self.source_step,
            self.destination,
            self.source,
        )


@dataclass(frozen=True, slots=True)
class Extent:
    """Indices [first, first + length) along one axis, `stride` bytes apart in their object."""

    name: str
    first: int
    length: int
    stride: int


@dataclass(frozen=True, slots=True)
class Region:
    """One box of a page's content, and its location in an object.

    space: identity of the indexed content. Boxes of different spaces never overlap.
    extents: extents of the box, sorted by name. All regions of a space have the same axes.
    offset: bytes of the object before the first item.
    """

    space: tuple[object, ...]
    extents: tuple[Extent, ...]
    itemsize: int
    offset: int

    @property
    def box(self) -> tuple[object, ...]:
        """The region's content, without its location."""
        return self.space, tuple((extent.first, extent.length) for extent in self.extents)

    @property
    def nbytes(self) -> int:
        """Bytes of the box."""
        return prod(extent.length for extent in self.extents) * self.itemsize


def overlap(
    source: Region, destination: Region, *, copy_from: int, copy_to: int
) -> CopyPlan | None:
    """Return the copy of the overlap of two regions of one space; None if they do not overlap."""
    axes: list[Axis] = []
    source_offset, destination_offset = source.offset, destination.offset
    for one, two in zip(source.extents, destination.extents, strict=True):
        first = max(one.first, two.first)
        length = min(one.first + one.length, two.first + two.length) - first
        if length <= 0:
            return None
        source_offset += (first - one.first) * one.stride
        destination_offset += (first - two.first) * two.stride
        axes.append(Axis("", length, one.stride, two.stride))
    shortest, run = compact(axes, source.itemsize)
    return CopyPlan(
        shortest, run, source_offset, destination_offset, source=copy_from, destination=copy_to
    )


def compact(axes: Iterable[Axis], run: int) -> tuple[tuple[Axis, ...], int]:
    """Sort axes in the destination's order, and join axes that are contiguous on both sides.

    run: bytes of an item.
    Returns the remaining axes, outermost first, and the bytes of the joined run.
    """
    left: list[Axis] = []
    for axis in sorted(axes, key=lambda axis: axis.destination):
        name, length, source, destination = axis
        if not name:
            if length == 1:
                continue
            if not left and source == destination == run:
                run *= length
                continue
            if left and not left[-1].name:
                _, inner, *steps = left[-1]
                if [source, destination] == [inner * step for step in steps]:
                    left[-1] = Axis("", inner * length, steps[0], steps[1])
                    continue
        left.append(axis)
    return tuple(left[::-1]), run


def joined(plans: Iterable[CopyPlan]) -> tuple[CopyPlan, ...]:
    """Join plans between the same objects whose runs are contiguous on both sides."""
    left = sorted(plans, key=lambda plan: (plan.destination, plan.source, plan.destination_offset))
    found: list[CopyPlan] = []
    for plan in left:
        grown = plan
        while found and _continues(found[-1], grown):
            last = found.pop()
            axes, run = compact(last.axes, last.run + grown.run)
            grown = replace(last, axes=axes, run=run)
        found.append(grown)
    return tuple(found)


def _continues(last: CopyPlan, plan: CopyPlan) -> bool:
    return (
        (last.axes, last.source, last.destination) == (plan.axes, plan.source, plan.destination)
        and plan.source_offset == last.source_offset + last.run
        and plan.destination_offset == last.destination_offset + last.run
    )
