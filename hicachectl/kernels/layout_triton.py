"""Checks of row order on the device. `kernels.layout.OrderTest` is the reference.

One launch reads a few thousand numbers of each page, whatever the size of a page is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from hicachectl.formats.layouts import QUANT_BLOCK
from hicachectl.kernels.layout import FLOOR_SIGMA, NOTHING_LEFT

if TYPE_CHECKING:
    from hicachectl.kernels.layout import OrderLook

_ITEMS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
MARGIN = 1e-3  # largest rounding error of a correlation against the reference


def correlations(
    pool: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    look: OrderLook,
    *,
    weights: tuple[float, float],
    slot_bytes: int,
    tensor_bytes: int,
    tensors: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Correlate the base row of each set with the other two rows, for each page slot.
    pool:    1D uint8, aligned, with `tensors` pools that begin `tensor_bytes` apart.
    rows:    [3, sets] int64, byte offsets in a pool, in page slot 0.
    slots:   [n] int64, numbers of page slots, which are `slot_bytes` apart.
    weights: weights of the two correlations in the result.
    Returns the weighted sums, [n, tensors * sets] float32, and whether each set is usable, as bool
    of the same shape. Does not synchronise.
    """
    item = look.itemsize
    n, sets = len(slots), rows.shape[1]
    own = torch.empty((n, tensors * sets), dtype=torch.float32, device=pool.device)
    filled = torch.empty((n, tensors * sets), dtype=torch.int8, device=pool.device)
    channels = -(-look.width // look.step)
    if n:
        _correlate[(n * tensors,)](
            pool.view(_ITEMS[item]),
            pool.view(torch.int32),
            rows // item,
            slots,
            own,
            filled,
            slot_bytes // item,
            tensor_bytes // item,
            TENSORS=tensors,
            SETS=sets,
            LANES=triton.next_power_of_2(sets),
            WIDTH=look.width,
            STEP=look.step,
            CHANNELS=channels,
            PADDED=triton.next_power_of_2(channels),
            MAGNITUDES=(1 << (8 * item - 1)) - 1,
            SCALED=look.scaled,
            TILE=QUANT_BLOCK,
            FIRST=weights[0],
            SECOND=weights[1],
            FLOOR=FLOOR_SIGMA,
            NOTHING=NOTHING_LEFT,
            num_warps=4,
        )
    return own, filled.bool()


@triton.jit
def _read(
    items, words, row, live, channel, inside,
    WIDTH: tl.constexpr, MAGNITUDES: tl.constexpr, SCALED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Read log magnitudes [sets, channels]."""
    at = row[:, None] + channel[None, :]
    mask = inside[None, :] & live[:, None]
    numbers = (tl.load(items + at, mask=mask, other=0) & MAGNITUDES).to(tl.float32)
    if SCALED:
        scale = (row[:, None] + WIDTH) // 4 + channel[None, :] // TILE
        numbers += (tl.load(words + scale, mask=mask, other=0) >> 20).to(tl.float32)
    return numbers


@triton.jit
def _centred(numbers, inside, CHANNELS: tl.constexpr):
    mean = tl.sum(numbers, 1) / CHANNELS
    return tl.where(inside[None, :], numbers - mean[:, None], 0.0)


@triton.jit
def _floored(numbers, inside, CHANNELS: tl.constexpr, FLOOR: tl.constexpr):
    """Centre rows, and raise items that are far below the mean."""
    numbers = _centred(tl.where(inside[None, :], numbers, 0.0), inside, CHANNELS)
    spread = tl.sqrt(tl.sum(numbers * numbers, 1) / CHANNELS)
    numbers = tl.maximum(numbers, -FLOOR * spread[:, None])
    return _centred(tl.where(inside[None, :], numbers, 0.0), inside, CHANNELS)


@triton.jit
def _unit(numbers, live, common, NOTHING: tl.constexpr):
    """Standardise rows as `kernels.layout` does.

    common: mean of all rows.
    """
    before = tl.sqrt(tl.sum(numbers * numbers, 1))
    rest = numbers - common[None, :]
    length = tl.sqrt(tl.sum(rest * rest, 1))
    left = live & (length > NOTHING * before)
    return tl.where(left[:, None], rest / tl.where(left, length, 1.0)[:, None], 0.0)


@triton.jit
def _correlate(
    items, words, rows, slots, own, filled, slot_items, tensor_items,
    TENSORS: tl.constexpr, SETS: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr,
    STEP: tl.constexpr,
    CHANNELS: tl.constexpr, PADDED: tl.constexpr, MAGNITUDES: tl.constexpr,
    SCALED: tl.constexpr, TILE: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr,
    FLOOR: tl.constexpr, NOTHING: tl.constexpr,
):  # fmt: skip
    """Correlate the rows of one tensor of one page."""
    page = tl.program_id(0) // TENSORS
    tensor = tl.program_id(0) % TENSORS
    sets = tl.arange(0, LANES)
    live = sets < SETS
    lane = tl.arange(0, PADDED)
    inside = lane < CHANNELS
    channel = lane * STEP
    start = tl.load(slots + page) * slot_items + tensor * tensor_items
    base = _read(items, words, start + tl.load(rows + sets, mask=live, other=0), live, channel,
                 inside, WIDTH, MAGNITUDES, SCALED, TILE)  # fmt: skip
    one = _read(items, words, start + tl.load(rows + SETS + sets, mask=live, other=0), live,
                channel, inside, WIDTH, MAGNITUDES, SCALED, TILE)  # fmt: skip
    other = _read(items, words, start + tl.load(rows + 2 * SETS + sets, mask=live, other=0), live,
                  channel, inside, WIDTH, MAGNITUDES, SCALED, TILE)  # fmt: skip
    base = _floored(base, inside, CHANNELS, FLOOR)
    one = _floored(one, inside, CHANNELS, FLOOR)
    other = _floored(other, inside, CHANNELS, FLOOR)
    common = (tl.sum(base, 0) + tl.sum(one, 0) + tl.sum(other, 0)) / (3 * SETS)
    base = _unit(base, live, common, NOTHING)
    one = _unit(one, live, common, NOTHING)
    other = _unit(other, live, common, NOTHING)
    both = FIRST * tl.sum(base * one, 1) + SECOND * tl.sum(base * other, 1)
    out = (page * TENSORS + tensor) * SETS + sets
    tl.store(own + out, both, mask=live)
    tl.store(filled + out, (tl.sum(base * base, 1) > 0).to(tl.int8), mask=live)
