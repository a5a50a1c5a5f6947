"""Strided copies as a value: what providers and the Triton kernel carry out.

Made by `hicachectl.device.plans` from the layouts of page objects.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd, prod

VECTOR_BYTES = 16  # the widest access of a GPU thread
MOST_AXES = 4


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of a copy, with its steps in bytes."""

    name: str
    length: int
    source: int
    destination: int


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """Strided copies of one shape, one for each (source place, destination place).

    axes: outermost first, at most MOST_AXES; under each index `run` bytes are contiguous on both
        sides. The copy for places (s, d) begins at source_offset + s * source_step and at
        destination_offset + d * destination_step.
    """

    axes: tuple[Axis, ...]
    run: int
    source_offset: int
    destination_offset: int
    source_step: int
    destination_step: int

    @property
    def nbytes(self) -> int:
        """Bytes of one copy."""
        return prod(axis.length for axis in self.axes) * self.run

    @property
    def unit(self) -> int:
        """The widest access, of 16, 8, 4, 2 or 1 bytes, that all its addresses are multiples of."""
        steps = [step for axis in self.axes for step in (axis.source, axis.destination)]
        offsets = (self.source_offset, self.destination_offset)
        return gcd(
            VECTOR_BYTES, self.run, *steps, *offsets, self.source_step, self.destination_step
        )

    def of_layer(self, layer: int) -> CopyPlan:
        """Restrict to one layer, as load-back moves it."""
        place = [axis.name for axis in self.axes].index("layer")
        axis = self.axes[place]
        if not 0 <= layer < axis.length:
            raise ValueError(f"layer {layer} of {axis.length}")
        return replace(
            self,
            axes=self.axes[:place] + self.axes[place + 1 :],
            source_offset=self.source_offset + layer * axis.source,
            destination_offset=self.destination_offset + layer * axis.destination,
        )

    def reversed(self) -> CopyPlan:
        """Give the way back: source and destination exchanged, dense along the destination."""
        axes = [Axis(a.name, a.length, a.destination, a.source) for a in self.axes]
        axes.sort(key=lambda axis: -axis.destination)
        return CopyPlan(
            tuple(axes),
            self.run,
            self.destination_offset,
            self.source_offset,
            self.destination_step,
            self.source_step,
        )
