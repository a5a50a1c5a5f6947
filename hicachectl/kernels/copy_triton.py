"""Strided copies between page objects and layer-first pools, all by one Triton kernel.

`TorchProvider` of `tests/device/providers.py` is the reference.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from hicachectl.formats.copyplan import CopyPlan

MOST_AXES = 4
_WORDS = {16: (torch.int32, 4), 8: (torch.int32, 2), 4: (torch.int32, 1), 2: (torch.int16, 1)}
# Accesses of a program. They copy up to 16 KiB, and each of 256 threads has a few in flight.
_BLOCK_UNITS = 1024


def strided_copy(
    plan: CopyPlan,
    source: torch.Tensor,
    source_places: torch.Tensor,
    destination: torch.Tensor,
    destination_places: torch.Tensor,
) -> None:
    """Carry out a plan for each pair of places. A plan of up to MOST_AXES axes takes one launch.

    source, destination: 1D uint8, contiguous, 16-byte aligned, not overlapping.
    source_places:       [n] int64 on the same device.
    destination_places:  [n] int64 on the same device. They must be distinct, because copies run in
                         no fixed order.
    Does not synchronise.
    """
    count = len(source_places)
    if not count or not plan.nbytes:
        return
    if len(plan.axes) > MOST_AXES:
        for index in range(plan.axes[0].length):
            part = plan.at(0, index)
            strided_copy(part, source, source_places, destination, destination_places)
        return
    unit = plan.unit
    dtype, words = _WORDS.get(unit, (torch.int8, 1))
    axes = [(1, 0, 0)] * (MOST_AXES - len(plan.axes)) + [
        (axis.length, axis.source // unit, axis.destination // unit) for axis in plan.axes
    ]
    total = plan.nbytes // unit
    chunks = triton.cdiv(total, _BLOCK_UNITS)
    arguments: dict[str, Any] = {
        f"{side}{i}": axis[1 + which]
        for which, side in enumerate("sd")
        for i, axis in enumerate(axes)
    }
    _copy_units[(count * chunks,)](
        source.view(dtype),
        destination.view(dtype),
        source_places,
        destination_places,
        plan.source_offset // unit,
        plan.destination_offset // unit,
        plan.source_step // unit,
        plan.destination_step // unit,
        **arguments,
        N1=axes[1][0],
        N2=axes[2][0],
        N3=axes[3][0],
        RUN=plan.run // unit,
        TOTAL=total,
        CHUNKS=chunks,
        WORDS=words,
        BLOCK=_BLOCK_UNITS,
        num_warps=8,
    )


@triton.jit
def _copy_units(
    source,
    destination,
    source_places,
    destination_places,
    source_offset,
    destination_offset,
    source_step,
    destination_step,
    s0,
    s1,
    s2,
    s3,
    d0,
    d1,
    d2,
    d3,
    N1: tl.constexpr,
    N2: tl.constexpr,
    N3: tl.constexpr,
    RUN: tl.constexpr,
    TOTAL: tl.constexpr,
    CHUNKS: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy one chunk of one object. Offsets and steps are numbers of units."""
    place = tl.program_id(0) // CHUNKS
    unit = (tl.program_id(0) % CHUNKS) * BLOCK + tl.arange(0, BLOCK)
    first = tl.load(source_places + place) * source_step
    last = tl.load(destination_places + place) * destination_step
    within = unit % RUN
    rest = unit // RUN
    i3 = rest % N3
    rest = rest // N3
    i2 = rest % N2
    rest = rest // N2
    i1 = rest % N1
    i0 = (rest // N1).to(tl.int64)
    i1 = i1.to(tl.int64)
    i2 = i2.to(tl.int64)
    i3 = i3.to(tl.int64)
    read = source_offset + first + i0 * s0 + i1 * s1 + i2 * s2 + i3 * s3 + within
    write = destination_offset + last + i0 * d0 + i1 * d1 + i2 * d2 + i3 * d3 + within
    # With words as the inner axis, a thread reads the words of a unit in one access.
    word = tl.arange(0, WORDS)[None, :]
    mask = (unit < TOTAL)[:, None]
    values = tl.load(source + (read[:, None] * WORDS + word), mask=mask)
    tl.store(destination + (write[:, None] * WORDS + word), values, mask=mask)
