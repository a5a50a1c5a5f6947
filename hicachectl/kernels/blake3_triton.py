"""BLAKE3 of many byte ranges of one device tensor. The `blake3` package is the reference.
Each lane compresses one chunk of 1024 bytes of any range, so one launch handles ranges of different
lengths. Then neighbouring nodes are merged, level by level, and an odd last node moves up. The
result is the tree of the specification, in which the number of chunks in each left subtree is the
largest possible power of two. A program merges up to 64 neighbours with only one warp, because half
of its lanes become idle at each level.

Source: the BLAKE3 paper, section 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

DIGEST_BYTES = 32
CHUNK_BYTES = 1024
WORD_BYTES = 8  # bytes of one read of a lane; offsets and buffer sizes are multiples of this
LANES = 128
WARP_LANES = 32


@dataclass(frozen=True, slots=True, eq=False)
class Ranges:
    """Byte ranges, prepared for repeated digests without an upload.

    table: [3, n] int64 on the device: first chunk, offset in words, bytes.
    chunks: number of chunks in all ranges.
    most: number of chunks in the longest range.
    lanes: chunks per program.
    """

    table: torch.Tensor
    chunks: int
    most: int
    lanes: int


def ranges_of(
    buffer: torch.Tensor,
    offsets: Sequence[int] | npt.NDArray[np.int64],
    lengths: Sequence[int] | npt.NDArray[np.int64],
    *,
    upload: Callable[[torch.Tensor], torch.Tensor],
    lanes: int = LANES,
) -> Ranges:
    """Prepare byte ranges of a buffer for `digest_ranges`.

    buffer:           1D uint8, contiguous, a multiple of 8 bytes, 8-byte aligned.
    offsets, lengths: [n], on the host; offsets are multiples of 8, ranges may overlap.
    upload:           copies the table to the device.
    lanes:            chunks per program, a power of two.
    Raises ValueError for other arguments. Does not synchronise.
    """
    starts = np.asarray(offsets, np.int64)
    sizes = np.asarray(lengths, np.int64)
    _check(buffer, starts, sizes, lanes)
    counts = np.maximum(1, -(-sizes // CHUNK_BYTES))  # an empty range is one empty chunk
    firsts = np.cumsum(counts) - counts
    table = upload(torch.from_numpy(np.stack([firsts, starts // WORD_BYTES, sizes])))
    return Ranges(table, int(counts.sum()), int(counts.max(initial=0)), lanes)


def digest_ranges(buffer: torch.Tensor, ranges: Ranges) -> torch.Tensor:
    """Return digests of prepared ranges: [n, 32] uint8. Can be captured in a CUDA graph."""
    count = ranges.table.shape[1]
    if not count:
        return torch.empty((0, DIGEST_BYTES), dtype=torch.uint8, device=buffer.device)
    nodes = torch.empty((ranges.chunks, 8), dtype=torch.int32, device=buffer.device)
    _compress_chunks[(triton.cdiv(ranges.chunks, ranges.lanes),)](
        buffer.view(torch.int64),
        ranges.table,
        nodes,
        count,
        ranges.chunks,
        count.bit_length(),
        LANES=ranges.lanes,
        num_warps=max(1, ranges.lanes // WARP_LANES),
    )
    _merge(nodes, ranges.table, ranges.most, min(ranges.lanes, WARP_LANES))
    return nodes[ranges.table[0]].view(torch.uint8)


def _merge(nodes: torch.Tensor, ranges: torch.Tensor, most: int, lanes: int) -> None:
    """Merge the nodes of each range into the first row of the range.

    most: number of nodes of the longest range.
    """
    distance = 1  # rows between nodes of a range
    while most > 1:
        programs = triton.cdiv(most, 2 * lanes)
        count = ranges.shape[1]
        _merge_nodes[(count * programs,)](
            nodes, ranges, count, programs, distance, LANES=lanes, num_warps=1
        )
        distance *= 2 * lanes
        most = programs


def _check(
    buffer: torch.Tensor,
    offsets: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
    lanes: int,
) -> None:
    if buffer.dtype != torch.uint8 or buffer.ndim != 1 or not buffer.is_contiguous():
        raise ValueError("buffer is not a contiguous 1D uint8 tensor")
    if len(buffer) % WORD_BYTES or buffer.data_ptr() % WORD_BYTES:
        raise ValueError(f"buffer of {len(buffer)} bytes: size or address is not 8-byte aligned")
    if offsets.ndim != 1 or offsets.shape != lengths.shape:
        raise ValueError(
            f"offsets {offsets.shape}, lengths {lengths.shape}: shapes differ or are not [n]"
        )
    if lanes < 1 or lanes & (lanes - 1):
        raise ValueError(f"lanes: {lanes} is not a power of two")
    inside = (offsets >= 0) & (lengths >= 0) & (offsets <= len(buffer) - lengths)
    if not (inside & (offsets % WORD_BYTES == 0)).all():
        raise ValueError(
            f"A range is not 8-byte aligned or not inside the buffer of {len(buffer)} bytes"
        )


@triton.jit(do_not_specialize=["count", "total", "search_steps"])
def _compress_chunks(
    source,
    ranges,
    nodes,
    count,
    total,
    search_steps,
    LANES: tl.constexpr,
):
    """Compress LANES consecutive chunks, counted over all ranges, into one node each.

    source: [words] int64. ranges: [3, count] int64: first chunk, offset in words, bytes.
    nodes:  [total, 8] int32.
    """
    chunk = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    live = chunk < total
    low = tl.zeros([LANES], tl.int32)
    high = low + (count - 1)
    for _ in range(search_steps):
        middle = (low + high + 1) // 2
        right = tl.load(ranges + middle) <= chunk
        low = tl.where(right, middle, low)
        high = tl.where(right, high, middle - 1)
    number = chunk - tl.load(ranges + low)
    word = tl.load(ranges + count + low) + number * 128
    rest = tl.load(ranges + 2 * count + low) - number * 1024
    only = (number == 0) & (rest <= 1024)
    nbytes = tl.where(live, tl.minimum(rest, 1024), 0).to(tl.int32)
    whole = tl.min(nbytes) == 1024
    blocks = tl.maximum((nbytes + 63) // 64, 1)
    counter = number.to(tl.uint32)  # 32 bits suffice, because ranges have less than 4 TiB
    zero = tl.zeros([LANES], tl.uint32)
    h0 = zero + 0x6A09E667
    h1 = zero + 0xBB67AE85
    h2 = zero + 0x3C6EF372
    h3 = zero + 0xA54FF53A
    h4 = zero + 0x510E527F
    h5 = zero + 0x9B05688C
    h6 = zero + 0x1F83D9AB
    h7 = zero + 0x5BE0CD19
    for block in range(tl.max(blocks)):
        at = source + word + block * 8
        left = nbytes - block * 64
        if whole:
            w0 = tl.load(at)
            w1 = tl.load(at + 1)
            w2 = tl.load(at + 2)
            w3 = tl.load(at + 3)
            w4 = tl.load(at + 4)
            w5 = tl.load(at + 5)
            w6 = tl.load(at + 6)
            w7 = tl.load(at + 7)
        else:
            w0 = _load_word(at, left)
            w1 = _load_word(at + 1, left - 8)
            w2 = _load_word(at + 2, left - 16)
            w3 = _load_word(at + 3, left - 24)
            w4 = _load_word(at + 4, left - 32)
            w5 = _load_word(at + 5, left - 40)
            w6 = _load_word(at + 6, left - 48)
            w7 = _load_word(at + 7, left - 56)
        last = block == blocks - 1
        # CHUNK_START 1, CHUNK_END 2, ROOT 8
        flags = tl.where(last, tl.where(only, 10, 2), 0) + tl.where(block == 0, 1, 0)
        n0, n1, n2, n3, n4, n5, n6, n7 = _compress(
            (h0, h1, h2, h3, h4, h5, h6, h7),
            _halves(w0, w1, w2, w3, w4, w5, w6, w7),
            counter,
            tl.minimum(left, 64).to(tl.uint32),
            flags.to(tl.uint32),
        )
        running = block < blocks
        h0 = tl.where(running, n0, h0)
        h1 = tl.where(running, n1, h1)
        h2 = tl.where(running, n2, h2)
        h3 = tl.where(running, n3, h3)
        h4 = tl.where(running, n4, h4)
        h5 = tl.where(running, n5, h5)
        h6 = tl.where(running, n6, h6)
        h7 = tl.where(running, n7, h7)
    _store_node(nodes + chunk * 8, (h0, h1, h2, h3, h4, h5, h6, h7), live)


@triton.jit(do_not_specialize=["count", "groups", "distance"])
def _merge_nodes(nodes, ranges, count, groups, distance, LANES: tl.constexpr):
    """Merge 2 * LANES neighbours of a range, `distance` rows apart, into the row of the first.

    Each range and group of neighbours has a program of its own, and programs share no rows.
    """
    at = tl.program_id(0) // groups
    group = (tl.program_id(0) % groups).to(tl.int64)
    first = tl.load(ranges + at)
    size = tl.load(ranges + 2 * count + at)
    chunks = tl.maximum((size + 1023) // 1024, 1)
    begin = group * (2 * LANES) * distance
    end = tl.minimum(begin + 2 * LANES * distance, chunks)
    lane = tl.arange(0, LANES)
    zero = tl.zeros([LANES], tl.uint32)
    step = tl.cast(distance, tl.int64)
    while begin + step < end:
        left = begin + lane * (2 * step)
        right = left + step
        both = right < end
        # PARENT 4, ROOT 8
        flags = zero + tl.where(2 * step >= chunks, 12, 4).to(tl.uint32)
        node = nodes + (first + left) * 8
        a0, a1, a2, a3, a4, a5, a6, a7 = _load_node(node, both)
        b0, b1, b2, b3, b4, b5, b6, b7 = _load_node(nodes + (first + right) * 8, both)
        key = (
            zero + 0x6A09E667,
            zero + 0xBB67AE85,
            zero + 0x3C6EF372,
            zero + 0xA54FF53A,
            zero + 0x510E527F,
            zero + 0x9B05688C,
            zero + 0x1F83D9AB,
            zero + 0x5BE0CD19,
        )
        message = (a0, a1, a2, a3, a4, a5, a6, a7, b0, b1, b2, b3, b4, b5, b6, b7)
        _store_node(node, _compress(key, message, zero, zero + 64, flags), both)
        step *= 2
        tl.debug_barrier()  # the next level reads what other lanes wrote


@triton.jit
def _compress(h, m, counter, length, flags):
    """Compress block m (16 words) with chaining value h (8 words) into 8 words."""
    v0, v1, v2, v3, v4, v5, v6, v7 = h
    v8 = tl.zeros_like(counter) + 0x6A09E667
    v9 = tl.zeros_like(counter) + 0xBB67AE85
    v10 = tl.zeros_like(counter) + 0x3C6EF372
    v11 = tl.zeros_like(counter) + 0xA54FF53A
    v12 = counter
    v13 = tl.zeros_like(counter)
    v14 = length
    v15 = flags
    m0, m1, m2, m3, m4, m5, m6, m7, m8, m9, m10, m11, m12, m13, m14, m15 = m
    for _ in range(7):
        v0, v4, v8, v12 = _mix(v0, v4, v8, v12, m0, m1)
        v1, v5, v9, v13 = _mix(v1, v5, v9, v13, m2, m3)
        v2, v6, v10, v14 = _mix(v2, v6, v10, v14, m4, m5)
        v3, v7, v11, v15 = _mix(v3, v7, v11, v15, m6, m7)
        v0, v5, v10, v15 = _mix(v0, v5, v10, v15, m8, m9)
        v1, v6, v11, v12 = _mix(v1, v6, v11, v12, m10, m11)
        v2, v7, v8, v13 = _mix(v2, v7, v8, v13, m12, m13)
        v3, v4, v9, v14 = _mix(v3, v4, v9, v14, m14, m15)
        m0, m1, m2, m3, m4, m5, m6, m7, m8, m9, m10, m11, m12, m13, m14, m15 = (
            m2, m6, m3, m10, m7, m0, m4, m13, m1, m11, m12, m5, m9, m14, m15, m8
        )  # fmt: skip
    return v0 ^ v8, v1 ^ v9, v2 ^ v10, v3 ^ v11, v4 ^ v12, v5 ^ v13, v6 ^ v14, v7 ^ v15


@triton.jit
def _mix(a, b, c, d, x, y):
    a = a + b + x
    d = _rotate(d ^ a, 16)
    c = c + d
    b = _rotate(b ^ c, 12)
    a = a + b + y
    d = _rotate(d ^ a, 8)
    c = c + d
    b = _rotate(b ^ c, 7)
    return a, b, c, d


@triton.jit
def _rotate(x, BITS: tl.constexpr):
    return (x >> BITS) | (x << (32 - BITS))


@triton.jit
def _halves(w0, w1, w2, w3, w4, w5, w6, w7):
    """Split 8 int64 words into a block's 16 words."""
    return (
        w0.to(tl.uint32),
        (w0 >> 32).to(tl.uint32),
        w1.to(tl.uint32),
        (w1 >> 32).to(tl.uint32),
        w2.to(tl.uint32),
        (w2 >> 32).to(tl.uint32),
        w3.to(tl.uint32),
        (w3 >> 32).to(tl.uint32),
        w4.to(tl.uint32),
        (w4 >> 32).to(tl.uint32),
        w5.to(tl.uint32),
        (w5 >> 32).to(tl.uint32),
        w6.to(tl.uint32),
        (w6 >> 32).to(tl.uint32),
        w7.to(tl.uint32),
        (w7 >> 32).to(tl.uint32),
    )


@triton.jit
def _load_word(at, left):
    """Load 8 bytes; bytes after the first `left` become zero."""
    word = tl.load(at, mask=left > 0, other=0)
    few = tl.minimum(tl.maximum(left, 0), 7).to(tl.int64)
    kept = (tl.full([], 1, tl.int64) << (few * 8)) - 1
    return tl.where(left < 8, word & kept, word)


@triton.jit
def _load_node(at, live):
    n0 = tl.load(at, mask=live, other=0).to(tl.uint32)
    n1 = tl.load(at + 1, mask=live, other=0).to(tl.uint32)
    n2 = tl.load(at + 2, mask=live, other=0).to(tl.uint32)
    n3 = tl.load(at + 3, mask=live, other=0).to(tl.uint32)
    n4 = tl.load(at + 4, mask=live, other=0).to(tl.uint32)
    n5 = tl.load(at + 5, mask=live, other=0).to(tl.uint32)
    n6 = tl.load(at + 6, mask=live, other=0).to(tl.uint32)
    n7 = tl.load(at + 7, mask=live, other=0).to(tl.uint32)
    return n0, n1, n2, n3, n4, n5, n6, n7


@triton.jit
def _store_node(at, node, live):
    n0, n1, n2, n3, n4, n5, n6, n7 = node
    tl.store(at, n0.to(tl.int32), mask=live)
    tl.store(at + 1, n1.to(tl.int32), mask=live)
    tl.store(at + 2, n2.to(tl.int32), mask=live)
    tl.store(at + 3, n3.to(tl.int32), mask=live)
    tl.store(at + 4, n4.to(tl.int32), mask=live)
    tl.store(at + 5, n5.to(tl.int32), mask=live)
    tl.store(at + 6, n6.to(tl.int32), mask=live)
    tl.store(at + 7, n7.to(tl.int32), mask=live)
