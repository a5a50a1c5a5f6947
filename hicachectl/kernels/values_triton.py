"""Statistics of blocks of stored numbers in one pass; reference: `kernels.statistics`.

Four bytes are looked at together: a number's bits above its sign are counted and compared for all
numbers of a word at once, by carries into the places of their signs. NaN and infinity only set a
flag in that pass; a program that sees the flag looks at its numbers again, one by one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from hicachectl.kernels.statistics import COUNTS, Field, Statistics

_WORD = 4
BLOCK_VECTORS = 256  # vectors of 16 bytes that a program looks at together
_MOST_ROUNDS = 63  # of a program: each adds up to 4 to counters of 8 bits
_PROGRAM_BYTES = 128 << 10  # of one program; fewer programs mean fewer reductions
_WARPS = 4
_SUMS = 3  # absolute maximum, sum, sum of squares


@dataclass(frozen=True, slots=True)
class _Form:
    """How a dtype becomes fp32: shifted down from a word's top, masked, multiplied.

    first_special: least magnitude bits that are no finite number. infinity: its bits, or -1.
    """

    bits: int
    down: int
    mask: int
    scale: float
    first_special: int
    infinity: int


_FORMS = {
    "float32": _Form(32, 0, 0xFFFFFFFF, 1.0, 0x7F800000, 0x7F800000),
    "bfloat16": _Form(16, 0, 0xFFFF0000, 1.0, 0x7F80, 0x7F80),
    "float16": _Form(16, 3, 0x8FFFE000, 2.0**112, 0x7C00, 0x7C00),
    "float8_e4m3fn": _Form(8, 4, 0x87F00000, 2.0**120, 0x7F, -1),
    "float8_e4m3fnuz": _Form(8, 4, 0x87F00000, 2.0**119, 0x80, -1),
    "float8_e5m2": _Form(8, 3, 0x8FE00000, 2.0**112, 0x7C, 0x7C),
}


def supports(field: Field) -> bool:
    """Whether the kernel can look at a field: all its places are multiples of a word."""
    return field.head_bytes % _WORD == 0


def block_statistics(
    pool: torch.Tensor,
    blocks: torch.Tensor,
    block_bytes: int,
    field: Field,
    *,
    block_vectors: int = BLOCK_VECTORS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Look at blocks of a pool, in one launch.

    pool:   1D uint8, contiguous, 16-byte aligned.
    blocks: [n] int64 on its device, numbers of blocks of `block_bytes` from the pool's start.
    Returns counts [n, 5] int64 in the order of COUNTS, and [n, 3] float64: absolute maximum, sum
    and sum of squares, accumulated in fp32 by program: both sums are within 1e-5 of the sum of
    magnitudes, or of squares. Squares beyond fp32 are infinite, below it lost. Does not
    synchronise.
    """
    vector = field.head_bytes
    if vector % _WORD or block_bytes % vector:
        raise ValueError(f"field {field.name!r}: not whole words of {_WORD} bytes")
    form, words = _FORMS[field.dtype], vector // _WORD
    vectors = field.rows * (field.nbytes // vector)
    rounds = triton.cdiv(vectors, block_vectors)
    rounds = max(1, min(rounds, _MOST_ROUNDS, triton.cdiv(_PROGRAM_BYTES, block_vectors * vector)))
    splits = triton.cdiv(vectors, rounds * block_vectors)
    counts = torch.empty((len(blocks), splits, len(COUNTS)), dtype=torch.int32, device=pool.device)
    sums = torch.empty((len(blocks), splits, _SUMS), dtype=torch.float32, device=pool.device)
    if len(blocks):
        _statistics[(len(blocks) * splits,)](
            pool.view(torch.int32),
            blocks,
            counts,
            sums,
            block_bytes // vector,
            0 if field.scale_floor is None else _floor_bits(field.scale_floor),
            SPLITS=splits,
            ROUNDS=rounds,
            VECTORS=vectors,
            ROWS=field.rows,
            ROW_VECTORS=field.nbytes // vector,
            PITCH=field.pitch // vector,
            OFFSET=field.offset // vector,
            WORDS=words,
            BITS=form.bits,
            DOWN=form.down,
            MASK=_signed(form.mask),
            SCALE=form.scale,
            MAGNITUDES=_signed(_repeat((1 << (form.bits - 1)) - 1, form.bits)),
            SIGNS=_signed(_repeat(1 << (form.bits - 1), form.bits)),
            ONES=_signed(_repeat(1, form.bits)),
            TO_SIGN=_signed(
                _repeat(max(0, (1 << (form.bits - 1)) - form.first_special), form.bits)
            ),
            FIRST_SPECIAL=form.first_special,
            INFINITY=form.infinity,
            FNUZ=field.dtype == "float8_e4m3fnuz",
            E4M3=field.dtype == "float8_e4m3fn" and _converts_e4m3(pool.device),
            SCALES=field.scale_floor is not None,
            ZERO_SCALES=field.scale_floor == 0,
            LEADS=field.leads,
            HEAD_ROUNDS=triton.cdiv(field.rows, splits * block_vectors),
            BLOCK=block_vectors,
            num_warps=_WARPS,
        )
    if splits == 1:
        return counts[:, 0].long(), sums[:, 0].double()
    maxima, totals = sums[..., 0].amax(1), sums[..., 1:].sum(1, dtype=torch.float64)
    return counts.sum(1), torch.cat([maxima.double()[:, None], totals], 1)


def to_statistics(counts: torch.Tensor, sums: torch.Tensor) -> Statistics:
    """Bring the results of `block_statistics` to the host."""
    maxima, total, squares = (column.numpy() for column in sums.cpu().unbind(1))
    return Statistics(counts.cpu().numpy(), maxima, total, squares)


def _converts_e4m3(device: torch.device) -> bool:
    """Tell whether a device has an instruction for it: from compute capability 8.9 on."""
    return device.type == "cpu" or torch.cuda.get_device_capability(device) >= (8, 9)


def _repeat(pattern: int, bits: int) -> int:
    return sum(pattern << shift for shift in range(0, 32, bits))


def _signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word


def _floor_bits(floor: float) -> int:
    # The quotient of SGLang's kernels may be rounded the other way, as in kernels.values.
    return int(np.float32(floor).view(np.uint32)) - 1 if floor else 0


@triton.jit
def _number(words, PLACE: tl.constexpr, BITS: tl.constexpr, DOWN: tl.constexpr,
            MASK: tl.constexpr, SCALE: tl.constexpr):  # fmt: skip
    """Turn the numbers at one place of their words into fp32; exact, special ones apart."""
    top = words << (32 - BITS * (PLACE + 1))
    # The sign is copied into the bits below it, of which the mask leaves one.
    bits = (top >> DOWN) & MASK if BITS < 32 else top
    number = bits.to(tl.float32, bitcast=True)
    return number * SCALE if SCALE != 1.0 else number


@triton.jit
def _place(vector, ROW_VECTORS: tl.constexpr, PITCH: tl.constexpr, OFFSET: tl.constexpr):
    """Find a vector of a field in its block."""
    if PITCH == ROW_VECTORS:
        return vector
    else:  # noqa: RET505 - the branch is the compiler's
        return (vector // ROW_VECTORS) * PITCH + OFFSET + vector % ROW_VECTORS


@triton.jit
def _added(largest, total, squares, numbers, bad, heads,
           largest_2, total_2, squares_2, numbers_2, bad_2, heads_2):  # fmt: skip
    """Combine what two lanes found."""
    return (
        tl.maximum(largest, largest_2), total + total_2, squares + squares_2,
        numbers + numbers_2, bad + bad_2, heads + heads_2,
    )  # fmt: skip


@triton.jit
def _statistics(
    pool, blocks, counts, sums, block_vectors, floor,
    SPLITS: tl.constexpr, ROUNDS: tl.constexpr, VECTORS: tl.constexpr, ROWS: tl.constexpr,
    ROW_VECTORS: tl.constexpr, PITCH: tl.constexpr, OFFSET: tl.constexpr, WORDS: tl.constexpr,
    BITS: tl.constexpr, DOWN: tl.constexpr, MASK: tl.constexpr, SCALE: tl.constexpr,
    MAGNITUDES: tl.constexpr, SIGNS: tl.constexpr, ONES: tl.constexpr, TO_SIGN: tl.constexpr,
    FIRST_SPECIAL: tl.constexpr, INFINITY: tl.constexpr, FNUZ: tl.constexpr,
    E4M3: tl.constexpr, SCALES: tl.constexpr, ZERO_SCALES: tl.constexpr, LEADS: tl.constexpr,
    HEAD_ROUNDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Look at one part of one block."""
    program = tl.program_id(0)
    split = program % SPLITS
    base = tl.load(blocks + program // SPLITS) * block_vectors
    start = split * (ROUNDS * BLOCK)
    lane = tl.arange(0, BLOCK)
    word = tl.arange(0, WORDS)[None, :]
    code = tl.arange(0, 4 * WORDS)[None, :]
    codes = pool.to(tl.pointer_type(tl.uint8), bitcast=True)
    largest = tl.zeros([BLOCK], tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    squares = tl.zeros([BLOCK], tl.float32)
    not_zero = tl.zeros([BLOCK], tl.int32)
    bad = tl.zeros([BLOCK], tl.int32)
    special = tl.zeros([BLOCK, WORDS], tl.int32)
    for step in range(ROUNDS):
        vector = start + step * BLOCK + lane
        at = base + _place(vector, ROW_VECTORS, PITCH, OFFSET)
        inside = (vector < VECTORS)[:, None]
        words = tl.load(pool + (at[:, None] * WORDS + word), mask=inside, other=0)
        magnitudes = words & MAGNITUDES
        # Adding to a magnitude carries into the place of its sign, and never further.
        filled = (magnitudes + MAGNITUDES) & SIGNS
        if FNUZ:
            special |= words & ~filled
            filled |= words & SIGNS
        else:
            special |= magnitudes + TO_SIGN
        not_zero += tl.sum((filled >> (BITS - 1)) & ONES, 1)
        if E4M3:  # the device converts these itself; the bytes come from its cache
            bytes_ = tl.load(codes + (at[:, None] * (4 * WORDS) + code), mask=inside, other=0)
            number = bytes_.to(tl.float8e4nv, bitcast=True).to(tl.float32)
            largest = tl.maximum(largest, tl.max(tl.abs(number), 1))
            total += tl.sum(number, 1)
            squares += tl.sum(number * number, 1)
        else:
            for place in tl.static_range(32 // BITS):
                number = _number(words, place, BITS, DOWN, MASK, SCALE)
                largest = tl.maximum(largest, tl.max(tl.abs(number), 1))
                total += tl.sum(number, 1)
                squares += tl.sum(number * number, 1)
        if SCALES:
            legal = (words >= floor) & (words < FIRST_SPECIAL)
            if ZERO_SCALES:
                legal = legal | (words == -0x80000000)
            bad += tl.sum((~legal & inside).to(tl.int32), 1)
    count = counts + program * 5
    if tl.max(tl.max(((special & SIGNS) != 0).to(tl.int32), 1), 0) != 0:
        nans = tl.zeros([BLOCK], tl.int32)
        infs = tl.zeros([BLOCK], tl.int32)
        largest = tl.zeros([BLOCK], tl.float32)
        total = tl.zeros([BLOCK], tl.float32)
        squares = tl.zeros([BLOCK], tl.float32)
        for step in range(ROUNDS):
            vector = start + step * BLOCK + lane
            at = base + _place(vector, ROW_VECTORS, PITCH, OFFSET)
            inside = (vector < VECTORS)[:, None]
            words = tl.load(pool + (at[:, None] * WORDS + word), mask=inside, other=0)
            for place in tl.static_range(32 // BITS):
                bits = words >> (BITS * place)
                if FNUZ:
                    finite = (bits & 0xFF) != 0x80
                    infinite = finite & False
                else:
                    magnitude = bits & (MAGNITUDES if BITS == 32 else (1 << (BITS - 1)) - 1)
                    finite = magnitude < FIRST_SPECIAL
                    infinite = magnitude == INFINITY
                number = _number(words, place, BITS, DOWN, MASK, SCALE)
                number = tl.where(finite, number, 0.0)
                largest = tl.maximum(largest, tl.max(tl.abs(number), 1))
                total += tl.sum(number, 1)
                squares += tl.sum(number * number, 1)
                infs += tl.sum(infinite.to(tl.int32), 1)
                nans += tl.sum((~(finite | infinite)).to(tl.int32), 1)
        tl.store(count + 0, tl.sum(nans, 0))
        tl.store(count + 1, tl.sum(infs, 0))
    else:
        tl.store(count + 0, 0)
        tl.store(count + 1, 0)
    heads = tl.zeros([BLOCK], tl.int32)
    if LEADS:  # rows are shared out among the programs of a block
        for step in range(HEAD_ROUNDS):
            row = (step * SPLITS + split) * BLOCK + lane
            first = tl.load(
                pool + ((base + row * PITCH)[:, None] * WORDS + word),
                mask=(row < ROWS)[:, None], other=1,
            )  # fmt: skip
            heads += (tl.max(first.to(tl.uint32, bitcast=True), 1) == 0).to(tl.int32)
    numbers = tl.zeros([BLOCK], tl.int32)
    for place in tl.static_range(32 // BITS):
        numbers += (not_zero >> (BITS * place)) & (0xFF if BITS == 8 else 0xFFFF)
    largest, total, squares, numbers, bad, heads = tl.reduce(
        (largest, total, squares, numbers, bad, heads), 0, _added
    )
    here = tl.minimum(VECTORS - start, ROUNDS * BLOCK) * (WORDS * 32 // BITS)
    tl.store(count + 2, here - numbers)
    tl.store(count + 3, bad)
    tl.store(count + 4, heads)
    out = sums + program * 3
    tl.store(out + 0, largest)
    tl.store(out + 1, total)
    tl.store(out + 2, squares)
