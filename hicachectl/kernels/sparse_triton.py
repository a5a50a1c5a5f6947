"""Kernels of the sparse loader; tests compare a step with a model in plain Python.

One program plans the step of one request, with a table over all its positions:
1. Each top-k position is marked with its index in the top-k, its entry.
2. Slots are read, least recently used first. A slot with a marked position is a hit; its number
   replaces the mark. Other slots may be overwritten.
3. Positions still marked with an entry are missing and get slots to overwrite.
4. The table is cleared for the next layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
import triton
import triton.language as tl

UNIT_BYTES = 16  # one access of a thread
LINE_UNITS = 8  # one bus request
NO_ENTRY = 0x7FFFFFFF  # mark of an unselected position; above any entry, for atomic_min
_GATHER_BLOCK = 1024  # units per iteration of a program
_GATHER_PROGRAMS = 2048  # over all requests: enough reads in flight for the bus
_PLAN_LANES = 256  # slots per warp


@dataclass(frozen=True, slots=True, eq=False)
class HostRows:
    """Location in host memory of the row of (request, position, layer). Strides are bytes.

    memory: 1D uint8 on the host; page-locked for a CUDA device, whose kernels read it in place.
    pages:  [R, pages] int64 on the device: number of each page in memory; below 0 or too large if
            the page is absent. The caller may add pages; after other changes, call `reset`.

    The row is at pages[request, position // page_size] * page_stride
    + position % page_size * token_stride + layer * layer_stride.
    Raises ValueError if a tensor has another form or rows are not 16-byte aligned.
    """

    memory: torch.Tensor
    pages: torch.Tensor
    layers: int
    page_size: int
    row_bytes: int
    page_stride: int
    token_stride: int
    layer_stride: int

    def __post_init__(self) -> None:
        if self.memory.dtype != torch.uint8 or self.memory.ndim != 1 or self.memory.is_cuda:
            raise ValueError("memory is not a 1D uint8 tensor on the host")
        if self.pages.dtype != torch.int64 or self.pages.ndim != 2:
            raise ValueError("pages is not an int64 tensor [requests, pages]")
        if not self.memory.is_contiguous() or not self.pages.is_contiguous():
            raise ValueError("memory or pages is not contiguous")
        if min(self.layers, self.page_size, self.row_bytes, self.page_stride, len(self.pages)) < 1:
            raise ValueError("layers, page_size, row_bytes, page_stride or requests is below 1")
        if min(self.token_stride, self.layer_stride) < 0:
            raise ValueError("token_stride or layer_stride is negative")
        for name in ("row_bytes", "page_stride", "token_stride", "layer_stride"):
            if getattr(self, name) % UNIT_BYTES:
                raise ValueError(f"{name} {getattr(self, name)} is not a multiple of {UNIT_BYTES}")
        if self.memory.data_ptr() % UNIT_BYTES or len(self.memory) % UNIT_BYTES:
            raise ValueError(f"memory does not begin and end at multiples of {UNIT_BYTES}")

    @classmethod
    def of_layout(
        cls,
        memory: torch.Tensor,
        pages: torch.Tensor,
        *,
        layout: str,
        layers: int,
        page_size: int,
        row_bytes: int,
        page_stride: int | None = None,
    ) -> Self:
        """Return rows of page objects in layout page_first, page_first_direct or layer_first.

        page_stride: bytes from one object to the next; default: objects touch.
        """
        if layout not in ("page_first", "page_first_direct", "layer_first"):
            raise ValueError(f"layout {layout!r} has no token rows")
        by_token = layout == "page_first"
        return cls(
            memory=memory,
            pages=pages,
            layers=layers,
            page_size=page_size,
            row_bytes=row_bytes,
            page_stride=layers * page_size * row_bytes if page_stride is None else page_stride,
            token_stride=layers * row_bytes if by_token else row_bytes,
            layer_stride=row_bytes if by_token else page_size * row_bytes,
        )

    @property
    def page_limit(self) -> int:
        """Number of pages that fit into the memory."""
        last = (self.page_size - 1) * self.token_stride + (self.layers - 1) * self.layer_stride
        room = len(self.memory) - last - self.row_bytes
        return room // self.page_stride + 1 if room >= 0 else 0


class StepPlan:
    """Scratch memory of a step, and its result for the gather.

    positions, slots: [R, N] int32, rows to fetch and their slots, in the first counts[r] columns.
    """

    def __init__(self, requests: int, slots: int, context: int, device: torch.device) -> None:
        def table(columns: int, fill: int) -> torch.Tensor:
            return torch.full((requests, columns), fill, dtype=torch.int32, device=device)

        self.positions = table(slots, 0)
        self.slots = table(slots, 0)
        self.counts = torch.zeros(requests, dtype=torch.int32, device=device)
        self.marks = table(context, NO_ENTRY)
        self.victims = table(slots, 0)
        self.used = table(slots, 0)


def plan_step(
    top_k: torch.Tensor,
    seq_len: torch.Tensor,
    rows: HostRows,
    tokens: torch.Tensor,
    lru: torch.Tensor,
    loaded: torch.Tensor,
    plan: StepPlan,
) -> torch.Tensor:
    """Find resident rows and choose slots for the others: return locs [R, k] int32.

    top_k:       [R, k] int32. seq_len: [R] int32.
    tokens, lru: [R, N] int32, updated in place. loaded: [R] int32, likewise.
    plan:        overwritten. Does not check or synchronise.
    """
    requests, k = top_k.shape
    slots = tokens.shape[1]
    block_n = triton.next_power_of_2(slots)
    locs = torch.empty((requests, k), dtype=torch.int32, device=top_k.device)
    _plan_step[(requests,)](
        top_k,
        seq_len,
        rows.pages,
        tokens,
        lru,
        loaded,
        plan.positions,
        plan.slots,
        plan.counts,
        plan.marks,
        plan.victims,
        plan.used,
        locs,
        rows.pages.shape[1],
        rows.page_limit,
        N=slots,
        K=k,
        PAGE_SIZE=rows.page_size,
        BLOCK_N=block_n,
        BLOCK_K=triton.next_power_of_2(k),
        num_warps=min(16, max(1, block_n // _PLAN_LANES)),
    )
    return locs


def gather_rows(rows: HostRows, layer: int, plan: StepPlan, pool: torch.Tensor) -> None:
    """Copy the planned rows of one layer from host memory into a pool [R, N + 1, row_bytes].

    Does not check or synchronise.
    """
    requests, slots = plan.positions.shape
    row_units = rows.row_bytes // UNIT_BYTES
    # All lines that a row can touch; it can begin anywhere in a line.
    window = triton.cdiv(row_units + LINE_UNITS - 1, LINE_UNITS) * LINE_UNITS
    most = triton.cdiv(slots * window, _GATHER_BLOCK)
    programs = min(most, triton.cdiv(_GATHER_PROGRAMS, requests))
    _gather_rows[(requests, programs)](
        rows.memory.view(torch.int32),
        pool.view(torch.int32),
        rows.pages,
        plan.positions,
        plan.slots,
        plan.counts,
        rows.pages.shape[1],
        rows.page_limit,
        rows.page_stride // UNIT_BYTES,
        rows.token_stride // UNIT_BYTES,
        layer * rows.layer_stride // UNIT_BYTES,
        rows.memory.data_ptr() // UNIT_BYTES % LINE_UNITS,
        N=slots,
        PAGE_SIZE=rows.page_size,
        ROW_UNITS=row_units,
        WINDOW=window,
        LINE_UNITS=LINE_UNITS,
        BLOCK=_GATHER_BLOCK,
        num_warps=8,
    )


@triton.jit(do_not_specialize=["page_limit", "page_columns"])
def _plan_step(
    top_k,
    seq_len,
    pages,
    tokens,
    lru,
    loaded,
    positions,
    slots,
    counts,
    marks,
    victims,
    used,
    locs,
    page_columns,
    page_limit,
    N: tl.constexpr,
    K: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    entry = tl.arange(0, BLOCK_K)
    in_k = entry < K
    slot = tl.arange(0, BLOCK_N)
    in_n = slot < N
    tokens += request * N
    lru += request * N
    positions += request * N
    slots += request * N
    victims += request * N
    used += request * N
    marks += request * page_columns * PAGE_SIZE

    length = tl.load(seq_len + request)
    if length <= 0:
        tl.store(locs + request * K + entry, entry * 0 - 1, mask=in_k)
        tl.store(counts + request, 0)
        return
    newest = length - 1
    short = length <= N
    position = tl.load(top_k + request * K + entry, mask=in_k, other=-1)
    asked = (position >= 0) & (position < length)
    column = position // PAGE_SIZE
    page = tl.load(
        pages + request * page_columns + column, mask=asked & (column < page_columns), other=-1
    )
    there = asked & (page >= 0) & (page < page_limit)
    order = tl.load(lru + slot, mask=in_n, other=0)

    if short:
        # The slot of a position has the same number; all rows not yet loaded are loaded now.
        tl.store(tokens + slot, tl.where(slot < length, slot, -1), mask=in_n)
        begin = tl.load(loaded + request)
        count = tl.maximum(newest - begin, 0)
        tl.store(positions + slot, begin + slot, mask=slot < count)
        tl.store(slots + slot, begin + slot, mask=slot < count)
        tl.debug_barrier()  # all warps have read `loaded` before it changes
        tl.store(loaded + request, length)
        want = there | (position == newest)
        found = position
    else:
        want = there & (position != newest)
        tl.atomic_min(marks + position, entry, mask=want)
        tl.debug_barrier()
        # If the sequence was cut back, slots of positions behind the cut have outdated rows.
        token = tl.load(tokens + order, mask=in_n, other=-1)
        token = tl.where(token < newest, token, -1)
        tl.store(tokens + order, token, mask=in_n)
        # While short, the sequence may have been longer than its pages; such tokens have no mark.
        marked = (token >= 0) & (token < page_columns * PAGE_SIZE)
        mark = tl.load(marks + token, mask=marked, other=0x7FFFFFFF)
        hit = mark != 0x7FFFFFFF
        tl.store(marks + token, -1 - order, mask=hit)
        stale = in_n & (~hit)
        tl.store(victims + tl.cumsum(stale.to(tl.int32), 0) - 1, order, mask=stale)
        tl.debug_barrier()
        mark = tl.load(marks + position, mask=want, other=-1)
        miss = mark == entry  # only the first of duplicates
        rank = tl.cumsum(miss.to(tl.int32), 0) - 1
        count = tl.sum(miss.to(tl.int32), 0)
        victim = tl.load(victims + rank, mask=miss, other=0)
        tl.store(positions + rank, position, mask=miss)
        tl.store(slots + rank, victim, mask=miss)
        tl.store(tokens + victim, position, mask=miss)
        tl.debug_barrier()
        tl.store(marks + position, -1 - victim, mask=miss)
        tl.debug_barrier()
        found = -1 - tl.load(marks + position, mask=want, other=-1)
        tl.debug_barrier()
        tl.store(marks + position, entry * 0 + 0x7FFFFFFF, mask=want)
        tl.store(loaded + request, 0)

    tl.store(counts + request, count)
    loc = tl.where(want, found, tl.where(asked & (position == newest), N, -1))
    loc = tl.where(loc >= 0, loc + (request * (N + 1)).to(tl.int32), -1)
    tl.store(locs + request * K + entry, loc, mask=in_k)

    # Slots of this step become the most recently used, in the order of their numbers.
    tl.store(used + slot, slot * 0, mask=in_n)
    tl.debug_barrier()
    tl.store(used + found, entry * 0 + 1, mask=want)
    tl.debug_barrier()
    old = in_n & (tl.load(used + order, mask=in_n, other=1) == 0)
    new = in_n & (tl.load(used + slot, mask=in_n, other=0) == 1)
    olds = tl.sum(old.to(tl.int32), 0)
    tl.store(lru + tl.cumsum(old.to(tl.int32), 0) - 1, order, mask=old)
    tl.store(lru + olds + tl.cumsum(new.to(tl.int32), 0) - 1, slot, mask=new)


@triton.jit(do_not_specialize=["page_limit", "page_columns", "layer_offset", "first_unit"])
def _gather_rows(
    memory,
    pool,
    pages,
    positions,
    slots,
    counts,
    page_columns,
    page_limit,
    page_stride,
    token_stride,
    layer_offset,
    first_unit,
    N: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ROW_UNITS: tl.constexpr,
    WINDOW: tl.constexpr,
    LINE_UNITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy planned rows of one request; strides and offsets are in units of 16 bytes.

    first_unit: unit of a line at which the memory begins. Threads cover whole lines, so
        neighbouring threads request each line of a row once.
    """
    request = tl.program_id(0).to(tl.int64)
    total = tl.load(counts + request) * WINDOW
    word = tl.arange(0, 4)[None, :]
    for start in range(tl.program_id(1) * BLOCK, total, tl.num_programs(1) * BLOCK):
        unit = start + tl.arange(0, BLOCK)
        live = unit < total
        row = unit // WINDOW
        position = tl.load(positions + request * N + row, mask=live, other=0)
        slot = tl.load(slots + request * N + row, mask=live, other=0)
        column = position // PAGE_SIZE
        live &= column < page_columns
        page = tl.load(pages + request * page_columns + column, mask=live, other=-1)
        live &= (page >= 0) & (page < page_limit)
        token = (position % PAGE_SIZE).to(tl.int64)
        begin = page * page_stride + token * token_stride + layer_offset
        within = unit % WINDOW - (begin + first_unit) % LINE_UNITS
        live &= (within >= 0) & (within < ROW_UNITS)
        read = begin + within
        write = (request * (N + 1) + slot) * ROW_UNITS + within
        # With words as the inner axis, a thread reads a unit in one access.
        values = tl.load(memory + (read[:, None] * 4 + word), mask=live[:, None])
        tl.store(pool + (write[:, None] * 4 + word), values, mask=live[:, None])
