"""Statistics of blocks of stored numbers in one pass; reference: `kernels.statistics`.

One launch looks at all fields of all blocks: what shares a row is read while it is in the cache,
and small blocks share a program. Four bytes are looked at together: a number's bits above its sign
are counted and compared for all numbers of a word at once, by carries into the places of their
signs. NaN and infinity only set a flag in that pass; a program that sees the flag looks at its
numbers again, one by one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import triton
import triton.language as tl

from hicachectl.kernels.statistics import COUNTS, Statistics

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicachectl.kernels.statistics import Field

_WORD = 4
_MOST_ROUNDS = 63  # of a program: each adds up to 4 to counters of 8 bits
# What a program looks at. Large blocks of one field: much, so that there are few reductions.
# Several fields: little enough that a row is still in the cache when its next field is looked at.
_PROGRAM_BYTES = 128 << 10
_SMALL_PROGRAM_BYTES = 16 << 10
# Vectors that it looks at together, and its warps. What one warp has seen alone is added up without
# the others waiting; many of a small program's instructions would do nothing else.
_LARGE = (256, 4)
_SMALL = (128, 1)
_RESULTS = 8  # words of a field and program: COUNTS, absolute maximum, sum, sum of squares


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


@dataclass(frozen=True, slots=True)
class _Look:
    """How a program looks at its share of one field; what the kernel is compiled for.

    vectors, rows, row_vectors, pitch, offset: of the field in its block; but for rows in vectors.
    words: of a vector. share: vectors of a program, in `rounds` of `lanes`. head_share: rows of a
    program whose heads are looked at, in `head_rounds` of `head_lanes`; 0 where none are.
    magnitudes to infinity: as in _Form, repeated for each number of a word, or 0 and 1 flags.
    """

    vectors: int
    rows: int
    row_vectors: int
    pitch: int
    offset: int
    words: int
    share: int
    rounds: int
    lanes: int
    head_share: int
    head_rounds: int
    head_lanes: int
    bits: int
    down: int
    mask: int
    scale: float
    magnitudes: int
    signs: int
    ones: int
    to_sign: int
    first_special: int
    infinity: int
    fnuz: bool
    e4m3: bool
    scales: bool
    zero_scales: bool
    floor: int


def supports(field: Field) -> bool:
    """Whether the kernel can look at a field: all its places are multiples of a word."""
    return field.head_bytes % _WORD == 0


def block_statistics(
    pool: torch.Tensor,
    blocks: torch.Tensor,
    block_bytes: int,
    fields: Sequence[Field],
    *,
    lanes: int | None = None,
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Look at some fields of blocks of a pool, in one launch.

    pool:   1D uint8, contiguous, 16-byte aligned.
    blocks: [n] int64 on its device, numbers of blocks of `block_bytes` from the pool's start.
    lanes:  vectors that a program looks at together; default: by what it has to look at.
    Returns of each field counts [n, 5] int32 in the order of COUNTS, and [n, 3] of floats: absolute
    maximum, sum and sum of squares, accumulated in fp32 by program: both sums are within 1e-5 of
    the sum of magnitudes, or of squares. Squares beyond fp32 are infinite, below it lost. Does not
    synchronise.
    """
    for field in fields:
        if not supports(field) or block_bytes % field.head_bytes:
            raise ValueError(f"field {field.name!r}: not whole words of {_WORD} bytes")
    nbytes = sum(field.rows * field.nbytes for field in fields)
    small = len(fields) > 1 or nbytes < _PROGRAM_BYTES // 4
    most, warps = _SMALL if small else _LARGE
    most = most if lanes is None else lanes
    program_bytes = _SMALL_PROGRAM_BYTES if small else _PROGRAM_BYTES
    splits = _splits(fields, nbytes, program_bytes, most)
    looks = tuple(_look(field, splits, most, pool.device) for field in fields)
    together = max(1, program_bytes // nbytes) if small else 1
    shape = (len(blocks), splits, len(looks), _RESULTS)
    results = torch.empty(shape, dtype=torch.int32, device=pool.device)
    if len(blocks):
        _statistics[(triton.cdiv(len(blocks), together) * splits,)](
            pool.view(torch.int32),
            blocks,
            results,
            len(blocks),
            block_bytes // _WORD,
            LOOKS=looks,
            FIELDS=len(looks),
            SPLITS=splits,
            TOGETHER=together,
            num_warps=warps,
        )
    return [_added_up(results[:, :, number]) for number in range(len(looks))]


def to_statistics(counts: torch.Tensor, sums: torch.Tensor) -> Statistics:
    """Bring the results for one field to the host."""
    maxima, total, squares = (column.double().numpy() for column in sums.cpu().unbind(1))
    return Statistics(counts.cpu().long().numpy(), maxima, total, squares)


def _vectors(field: Field) -> int:
    return field.rows * (field.nbytes // field.head_bytes)


def _splits(fields: Sequence[Field], nbytes: int, program_bytes: int, lanes: int) -> int:
    """Choose among how many programs a block is shared out."""
    splits: int = max(
        triton.cdiv(nbytes, program_bytes),
        *(triton.cdiv(_vectors(field), lanes * _MOST_ROUNDS) for field in fields),
    )
    # Most blocks have a power of two of rows, and share them out evenly.
    return 1 << (splits - 1).bit_length()


def _look(field: Field, splits: int, most_lanes: int, device: torch.device) -> _Look:
    form, vector, bits = _FORMS[field.dtype], field.head_bytes, _FORMS[field.dtype].bits
    share, lanes, rounds = _shared_out(_vectors(field), splits, most_lanes)
    heads = field.rows if field.leads else 0
    head_share, head_lanes, head_rounds = _shared_out(heads, splits, most_lanes)
    return _Look(
        vectors=_vectors(field),
        rows=field.rows,
        row_vectors=field.nbytes // vector,
        pitch=field.pitch // vector,
        offset=field.offset // vector,
        words=vector // _WORD,
        share=share,
        rounds=rounds,
        lanes=lanes,
        head_share=head_share,
        head_rounds=head_rounds,
        head_lanes=head_lanes,
        bits=bits,
        down=form.down,
        mask=_signed(form.mask),
        scale=form.scale,
        magnitudes=_signed(_repeat((1 << (bits - 1)) - 1, bits)),
        signs=_signed(_repeat(1 << (bits - 1), bits)),
        ones=_signed(_repeat(1, bits)),
        to_sign=_signed(_repeat(max(0, (1 << (bits - 1)) - form.first_special), bits)),
        first_special=form.first_special,
        infinity=form.infinity,
        fnuz=field.dtype == "float8_e4m3fnuz",
        e4m3=field.dtype == "float8_e4m3fn" and _converts_e4m3(device),
        scales=field.scale_floor is not None,
        zero_scales=field.scale_floor == 0,
        floor=0 if field.scale_floor is None else _floor_bits(field.scale_floor),
    )


def _shared_out(total: int, splits: int, most: int) -> tuple[int, int, int]:
    """Give a program's share of so many things, and the lanes and rounds that it takes."""
    share: int = triton.cdiv(total, splits)
    lanes: int = min(most, triton.next_power_of_2(max(1, share)))
    return share, lanes, triton.cdiv(share, lanes)


def _added_up(results: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Add up what the programs of each block found: results [n, splits, 8]."""
    counts, sums = results[..., : len(COUNTS)], results[..., len(COUNTS) :].view(torch.float32)
    if results.shape[1] == 1:
        return counts[:, 0], sums[:, 0]
    maxima, totals = sums[..., 0].amax(1), sums[..., 1:].sum(1, dtype=torch.float64)
    total = torch.cat([maxima.double()[:, None], totals], 1)
    return counts.sum(1, dtype=torch.int32), total


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
def _number(words, PLACE: tl.constexpr, LOOK: tl.constexpr):
    """Turn the numbers at one place of their words into fp32; exact, special ones apart."""
    top = words << (32 - LOOK.bits * (PLACE + 1))
    # The sign is copied into the bits below it, of which the mask leaves one.
    bits = (top >> LOOK.down) & LOOK.mask if LOOK.bits < 32 else top
    number = bits.to(tl.float32, bitcast=True)
    return number * LOOK.scale if LOOK.scale != 1.0 else number


@triton.jit
def _place(vector, LOOK: tl.constexpr):
    """Find a vector of a field in its block."""
    if LOOK.pitch == LOOK.row_vectors:
        return vector
    else:  # noqa: RET505 - the branch is the compiler's
        row = vector // LOOK.row_vectors
        return row * LOOK.pitch + LOOK.offset + vector % LOOK.row_vectors


@triton.jit
def _added(largest, total, squares, numbers, bad, special,
           largest_2, total_2, squares_2, numbers_2, bad_2, special_2):  # fmt: skip
    """Combine what two lanes found."""
    return (
        tl.maximum(largest, largest_2), total + total_2, squares + squares_2,
        numbers + numbers_2, bad + bad_2, special | special_2,
    )  # fmt: skip


@triton.jit
def _with(number, largest, total, squares):
    """Add the numbers of each lane's vector to what the lane has: [lanes, numbers], [lanes]."""
    return (
        tl.maximum(largest, tl.max(tl.abs(number), 1)),
        total + tl.sum(number, 1),
        squares + tl.sum(number * number, 1),
    )


@triton.jit
def _read(start, split, step, LOOK: tl.constexpr):
    """Read a round of vectors: [lanes, words], where they begin, and which there are."""
    lane = step * LOOK.lanes + tl.arange(0, LOOK.lanes)
    vector = split * LOOK.share + lane
    inside = ((lane < LOOK.share) & (vector < LOOK.vectors))[:, None]
    at = start + _place(vector, LOOK) * LOOK.words
    words = tl.load(at[:, None] + tl.arange(0, LOOK.words)[None, :], mask=inside, other=0)
    return words, at, inside


@triton.jit
def _first_pass(start, split, LOOK: tl.constexpr):
    """Look at all numbers as if they were finite, and see whether they are: six scalars."""
    LANES: tl.constexpr = LOOK.lanes
    WORDS: tl.constexpr = LOOK.words
    PLACES: tl.constexpr = 32 // LOOK.bits
    largest = tl.zeros([LANES], tl.float32)
    total = tl.zeros([LANES], tl.float32)
    squares = tl.zeros([LANES], tl.float32)
    not_zero = tl.zeros([LANES], tl.int32)
    bad = tl.zeros([LANES], tl.int32)
    special = tl.zeros([LANES, WORDS], tl.int32)
    for step in range(LOOK.rounds):
        words, at, inside = _read(start, split, step, LOOK)
        magnitudes = words & LOOK.magnitudes
        # Adding to a magnitude carries into the place of its sign, and never further.
        filled = (magnitudes + LOOK.magnitudes) & LOOK.signs
        if LOOK.fnuz:
            special |= words & ~filled
            filled |= words & LOOK.signs
        else:
            special |= magnitudes + LOOK.to_sign
        not_zero += tl.sum((filled >> (LOOK.bits - 1)) & LOOK.ones, 1)
        if LOOK.e4m3:  # the device converts these itself; the bytes come from its cache
            codes = at.to(tl.pointer_type(tl.uint8), bitcast=True)[:, None]
            number = tl.load(codes + tl.arange(0, 4 * WORDS)[None, :], mask=inside, other=0)
            number = number.to(tl.float8e4nv, bitcast=True).to(tl.float32)
            largest, total, squares = _with(number, largest, total, squares)
        else:
            for place in tl.static_range(PLACES):
                number = _number(words, place, LOOK)
                largest, total, squares = _with(number, largest, total, squares)
        if LOOK.scales:
            legal = (words >= LOOK.floor) & (words < LOOK.first_special)
            if LOOK.zero_scales:
                legal = legal | (words == -0x80000000)
            bad += tl.sum((~legal & inside).to(tl.int32), 1)
    numbers = tl.zeros([LANES], tl.int32)
    for place in tl.static_range(PLACES):
        numbers += (not_zero >> (LOOK.bits * place)) & (0xFF if LOOK.bits == 8 else 0xFFFF)
    flags = tl.max(((special & LOOK.signs) != 0).to(tl.int32), 1)
    return tl.reduce((largest, total, squares, numbers, bad, flags), 0, _added)


@triton.jit
def _second_pass(start, split, LOOK: tl.constexpr):
    """Look at numbers of which some are special: sums of the others, and counts of these."""
    LANES: tl.constexpr = LOOK.lanes
    PLACES: tl.constexpr = 32 // LOOK.bits
    nans = tl.zeros([LANES], tl.int32)
    infs = tl.zeros([LANES], tl.int32)
    largest = tl.zeros([LANES], tl.float32)
    total = tl.zeros([LANES], tl.float32)
    squares = tl.zeros([LANES], tl.float32)
    for step in range(LOOK.rounds):
        words, _, _ = _read(start, split, step, LOOK)
        for place in tl.static_range(PLACES):
            bits = words >> (LOOK.bits * place)
            if LOOK.fnuz:
                finite = (bits & 0xFF) != 0x80
                infinite = finite & False
            else:
                magnitude = bits & (
                    LOOK.magnitudes if LOOK.bits == 32 else (1 << (LOOK.bits - 1)) - 1
                )
                finite = magnitude < LOOK.first_special
                infinite = magnitude == LOOK.infinity
            number = tl.where(finite, _number(words, place, LOOK), 0.0)
            largest, total, squares = _with(number, largest, total, squares)
            infs += tl.sum(infinite.to(tl.int32), 1)
            nans += tl.sum((~(finite | infinite)).to(tl.int32), 1)
    return (
        tl.max(largest, 0), tl.sum(total, 0), tl.sum(squares, 0), tl.sum(nans, 0), tl.sum(infs, 0)
    )  # fmt: skip


@triton.jit
def _zero_heads(start, split, LOOK: tl.constexpr):
    """Count the rows, of a program's share, that begin with zeros."""
    LANES: tl.constexpr = LOOK.head_lanes
    heads = tl.zeros([LANES], tl.int32)
    for step in range(LOOK.head_rounds):
        lane = step * LANES + tl.arange(0, LANES)
        row = split * LOOK.head_share + lane
        inside = (lane < LOOK.head_share) & (row < LOOK.rows)
        at = start + row * (LOOK.pitch * LOOK.words)
        words = tl.arange(0, LOOK.words)[None, :]
        head = tl.load(at[:, None] + words, mask=inside[:, None], other=1)
        heads += (tl.max(head.to(tl.uint32, bitcast=True), 1) == 0).to(tl.int32)
    return tl.sum(heads, 0)


@triton.jit
def _look_at(start, split, out, LOOKS: tl.constexpr, NUMBER: tl.constexpr):
    """Look at a program's share of one field of a block; `out` is where the results go."""
    LOOK: tl.constexpr = LOOKS[NUMBER]
    PLACES: tl.constexpr = 32 // LOOK.bits
    largest, total, squares, numbers, bad, special = _first_pass(start, split, LOOK)
    nans = 0
    infs = 0
    if special != 0:
        largest, total, squares, nans, infs = _second_pass(start, split, LOOK)
    heads = 0
    if LOOK.head_share:
        heads = _zero_heads(start, split, LOOK)
    here = tl.maximum(tl.minimum(LOOK.vectors - split * LOOK.share, LOOK.share), 0)
    tl.store(out + 0, nans)
    tl.store(out + 1, infs)
    tl.store(out + 2, here * (LOOK.words * PLACES) - numbers)
    tl.store(out + 3, bad)
    tl.store(out + 4, heads)
    sums = out.to(tl.pointer_type(tl.float32), bitcast=True)
    tl.store(sums + 5, largest)
    tl.store(sums + 6, total)
    tl.store(sums + 7, squares)


@triton.jit
def _statistics(
    pool, blocks, results, count, block_words, LOOKS: tl.constexpr, FIELDS: tl.constexpr,
    SPLITS: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """Look at one part of one block, or at some small blocks one after another."""
    split = tl.program_id(0) % SPLITS
    first = (tl.program_id(0) // SPLITS) * TOGETHER
    for number in range(TOGETHER):
        block = first + number
        if block < count:
            start = pool + tl.load(blocks + block) * block_words
            result = block.to(tl.int64) * SPLITS + split
            for field in tl.static_range(FIELDS):
                out = results + (result * FIELDS + field) * 8
                _look_at(start, split, out, LOOKS, field)
