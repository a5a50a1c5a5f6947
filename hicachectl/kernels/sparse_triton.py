"""Kernels of the sparse loader; tests compare a step with a model in plain Python.

One program plans the step of one request:
1. A slot is a place for one row in the request's device buffer. Each slot writes its number into
   `marks`, a table over all positions, at the position of its row.
2. Each entry of the top-k reads the slot number at its position. Marks of earlier steps remain in
   the table, so the entry is a hit only if this slot has the token of the entry. A hit flags the
   slot as used.
3. One scan of the flags, least recently used slot first, gives the new order and the slots that
   may be overwritten.
4. If positions are missing, their first entries are numbered in the order of the top-k. Entry n
   gets the n-th of the slots that may be overwritten.

Dependent accesses to L2, and accesses at scattered addresses, take most of the time. So the kernel
makes few of both: it reads tables in order where possible, and looks values up in shared memory by
`gather`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

UNIT_BYTES = 16  # one access of a thread
LINE_UNITS = 8  # one bus request
_GATHER_BLOCK = 1024  # units per iteration of a program
_GATHER_PROGRAMS = 512  # programs of all requests, which keep enough reads in flight for the bus
_PLAN_LANES = 256  # slots per warp


@dataclass(frozen=True, slots=True, eq=False)
class HostRows:
    """Location in host memory of the row of (request, position, layer). Strides are bytes.

    memory: 1D uint8 on the host; page-locked for a CUDA device, whose kernels read it in place.
    pages:  [R, pages] int64 on the device, the number of each page in memory. A number below 0, or
            too large, means that the page is absent. The caller may add pages. After any other
            change, it must call `SparseLoader.reset`.

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

    @property
    def page_limit(self) -> int:
        """Number of pages that fit into the memory."""
        last = (self.page_size - 1) * self.token_stride + (self.layers - 1) * self.layer_stride
        room = len(self.memory) - last - self.row_bytes
        return room // self.page_stride + 1 if room >= 0 else 0


class StepPlan:
    """Scratch memory of a step, and its result for the gather.

    positions, slots: [R, N] int32, rows to fetch and their slots, in the first counts[r] columns.
    counts: [R] int32, number of rows to fetch.
    marks: [R, context] int32, slot number at each position. Outdated numbers may remain between
        steps.
    used: [R, N] int8, whether the step uses the slot.
    """

    def __init__(self, requests: int, slots: int, context: int, device: torch.device) -> None:
        def table(columns: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros((requests, columns), dtype=dtype, device=device)

        self.positions = table(slots, torch.int32)
        self.slots = table(slots, torch.int32)
        self.counts = torch.zeros(requests, dtype=torch.int32, device=device)
        self.marks = table(context, torch.int32)
        self.used = table(slots, torch.int8)


def plan_step(
    top_k: torch.Tensor,
    seq_len: torch.Tensor,
    rows: HostRows,
    tokens: torch.Tensor,
    lru: torch.Tensor,
    loaded: torch.Tensor,
    plan: StepPlan,
) -> torch.Tensor:
    """Find resident rows, choose slots for the other rows, and return the locs: [R, k] int32.

    `SparseLoader` defines locs, R and N.
    top_k: [R, k] int32, positions; -1 for no position.
    seq_len: [R] int32, lengths of the sequences.
    tokens, lru: [R, N] int32, see `SparseLoader`; updated in place.
    loaded: [R] int32, the sequence's length in its last step if that was at most N, else 0; updated
        in place.
    plan: overwritten.
    Does not check or synchronise.
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
    # The window has all lines that a row can touch, because a row can begin anywhere in a line.
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
    # With these hints, threads do not hold adjacent elements. If they did, each store at scattered
    # addresses would first exchange its operands between threads.
    entry = tl.max_contiguous(tl.arange(0, BLOCK_K), 1)
    in_k = entry < K
    slot = tl.max_contiguous(tl.arange(0, BLOCK_N), 1)
    in_n = slot < N
    tokens += request * N
    lru += request * N
    positions += request * N
    slots += request * N
    used += request * N
    marks += request * page_columns * PAGE_SIZE

    # These loads do not depend on each other, so they overlap.
    length = tl.load(seq_len + request)
    begin = tl.load(loaded + request)
    position = tl.load(top_k + request * K + entry, mask=in_k, other=-1)
    token = tl.load(tokens + slot, mask=in_n, other=-1)
    order = tl.load(lru + slot, mask=in_n, other=0)
    newest = length - 1
    short = length <= N
    end = tl.where(short, length, newest)  # end of the positions that have slots
    inside = (position >= 0) & (position < end)
    column = position // PAGE_SIZE
    has_page = inside & (column < page_columns)
    page = tl.load(pages + request * page_columns + column, mask=has_page, other=-1)
    # While a sequence is short, the slot of a position has the number of the position. If a long
    # sequence was cut back, slots of positions behind the cut have outdated rows.
    kept = tl.where(short, slot, token)
    kept = tl.where(kept < end, kept, -1)
    # A short sequence needs no marks. The table covers only the positions of `pages`. While a
    # sequence was short, it can have loaded tokens at later positions; these tokens have no marks.
    columns = tl.where(short, 0, page_columns)
    tl.store(marks + kept, slot, mask=(kept >= 0) & (kept < columns * PAGE_SIZE))
    tl.store(used + slot, 0, mask=in_n)
    # All warps have read `tokens`, `lru` and `loaded`, which change below. Marks are complete.
    tl.debug_barrier()
    if length <= 0:  # tested only here, because the loads above would wait for the length
        tl.store(locs + request * K + entry, -1, mask=in_k)
        tl.store(counts + request, 0)
        return

    tl.store(tokens + slot, kept, mask=in_n & (kept != token))
    mark = tl.load(marks + position, mask=inside & (column < columns), other=0)
    found = tl.where(short, tl.where(inside, position, 0), mark)
    present = has_page & (page >= 0) & (page < page_limit)
    want = present | (inside & (position == newest))
    hit = want & (tl.gather(kept, found, 0) == position)
    miss = want & ~hit
    tl.store(used + found, 1, mask=hit)
    tl.debug_barrier()  # `used` is complete, and all warps have read their marks

    # The first entry of a missing position leaves the lowest mark there. Marks of entries are below
    # all marks of slots.
    tl.atomic_min(marks + position, entry - BLOCK_K, mask=miss, sem="relaxed")
    flag = tl.load(used + slot, mask=in_n, other=0)
    flag = tl.where(in_n, tl.gather(flag, order, 0), 0).to(tl.int32)  # flag of the slot order[i]
    hits = tl.cumsum(flag, 0)  # used slots up to i
    rank = slot - hits  # rank of order[i] among the stale slots, if that slot is stale
    stale = in_n & (flag == 0)
    overwritten = 0
    if tl.sum(miss.to(tl.int32), 0) > 0:
        tl.debug_barrier()  # marks of entries are complete
        first = tl.load(marks + position, mask=miss, other=-BLOCK_K) + BLOCK_K
        fetch = miss & (first == entry)
        overwritten = tl.sum(fetch.to(tl.int32), 0)
        turn = tl.gather(tl.cumsum(fetch.to(tl.int32), 0) - 1, first, 0)
        tl.store(positions + turn, position, mask=fetch)
        tl.store(slots + rank, order, mask=stale & (rank < overwritten))
        tl.debug_barrier()  # `slots` is complete, and all warps have read marks of entries
        found = tl.where(miss, tl.load(slots + turn, mask=miss, other=0), found)
        tl.store(tokens + found, position, mask=fetch)
        tl.store(marks + position, 0, mask=miss)

    # Unused slots come first, and used slots follow. The order within both groups stays.
    total = tl.sum(flag, 0) + overwritten
    up_to = hits + tl.minimum(slot + 1 - hits, overwritten)  # used slots up to i
    place = tl.where(stale & (rank >= overwritten), slot - up_to, N - total + up_to - 1)
    tl.store(lru + place, order, mask=in_n)

    # Of a short sequence, all rows before the newest that are not yet loaded are fetched.
    grown = tl.where(short, tl.maximum(newest - begin, 0), 0)
    tl.store(positions + slot, begin + slot, mask=slot < grown)
    tl.store(slots + slot, begin + slot, mask=slot < grown)
    tl.store(loaded + request, tl.where(short, length, 0))
    tl.store(counts + request, grown + overwritten)

    loc = tl.where(want, found, tl.where(position == newest, N, -1))
    loc = tl.where(loc >= 0, loc + (request * (N + 1)).to(tl.int32), -1)
    tl.store(locs + request * K + entry, loc, mask=in_k)


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
    """Copy planned rows of one request. Strides and offsets are in units of 16 bytes.

    Threads cover all units of a line, so neighbouring threads request each line of a row once.
    first_unit: unit of a line at which the memory begins.
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
