"""Count bad numbers in blocks of stored numbers, usually in one pass.

One launch checks all fields of all blocks: fields of one row are read while the row is in the
cache, and small blocks share a program. All magnitudes of a 4-byte word are compared at once, by
carries into their sign bits. NaN and infinity set a flag; if set, the program counts them in a
second pass.

Numbers are checked as stored: codes are not multiplied by scales, so a NaN code counts even if its
scale is 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import triton
import triton.language as tl

from hicachectl.formats.layouts import TENSOR_DTYPE_BYTES
from hicachectl.kernels.values import FIRST_SPECIAL, INFINITY, floor_bits

if TYPE_CHECKING:
    from collections.abc import Sequence

# zero_heads: rows whose first `Field.head_bytes` bytes are zero; 0 unless the field leads.
COUNTS = ("nan", "inf", "bad_scale", "zero_heads")
NAN, INF, BAD_SCALE, ZERO_HEADS = range(len(COUNTS))
HEAD_BYTES = 16  # of a row, read first to find rows of zero bytes

_WORD = 4
# Bytes per program. Large blocks of one field need many bytes, for few reductions; several fields
# need few, so that a row is still in the cache for its next field.
_PROGRAM_BYTES = 128 << 10
_SMALL_PROGRAM_BYTES = 16 << 10
# Vectors that a program checks together, and its warps. One warp reduces without waits, which
# would dominate in a small program.
_LARGE = (256, 4)
_SMALL = (128, 1)


@dataclass(frozen=True, slots=True)
class Field:
    """Numbers of one dtype in every row of a block: `items` of them from byte `offset` on.

    rows, pitch: rows of a block, and bytes of each.
    scale_floor: for fp32 scales, the least legal one; None for ordinary numbers.
    leads:       whether rows begin with this field: its head then shows rows of zero bytes.
    excusable:   whether NaN and infinity may be legal: codes under a scale of 0 mean nothing.
    """

    name: str
    dtype: str
    rows: int
    pitch: int
    offset: int
    items: int
    scale_floor: float | None = None
    leads: bool = True
    excusable: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the field in one row."""
        return self.items * TENSOR_DTYPE_BYTES[self.dtype]

    @property
    def head_bytes(self) -> int:
        """Bytes of a row's head, and of a vector of the field.

        The greatest power of two up to HEAD_BYTES that divides rows, field and offset.
        """
        return int(np.gcd.reduce([HEAD_BYTES, self.nbytes, self.pitch, self.offset]))


@dataclass(frozen=True, slots=True)
class _Look:
    """A program's share of one field, for which the kernel is compiled.

    vectors, rows, row_vectors, pitch, offset: of the field in its block; all but rows in vectors.
    words: per vector. share: vectors per program, in `rounds` of `lanes`.
    head_share: rows per program with heads to check, in `head_rounds` of `head_lanes`; 0 for none.
    magnitude: mask of one number. magnitudes, signs, to_sign: masks and an addend, repeated for each number of a word.
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
    magnitude: int
    magnitudes: int
    signs: int
    to_sign: int
    first_special: int
    infinity: int
    fnuz: bool
    scales: bool
    zero_scales: bool
    floor: int


def supports(field: Field) -> bool:
    """Return whether the kernel supports a field: only fields in whole words."""
    return field.head_bytes % _WORD == 0


def block_statistics(
    pool: torch.Tensor,
    blocks: torch.Tensor,
    block_bytes: int,
    fields: Sequence[Field],
    *,
    lanes: int | None = None,
) -> list[torch.Tensor]:
    """Check fields of blocks of a pool, in one launch.

    pool:   1D uint8, contiguous, 16-byte aligned.
    blocks: [n] int64 on the pool's device, block numbers; blocks have `block_bytes` each.
    lanes:  vectors that a program checks together; default: by the amount of work.
    Returns for each field counts [n, 4] int32 in the order of COUNTS. Does not synchronise.
    """
    for field in fields:
        if not supports(field) or block_bytes % field.head_bytes:
            raise ValueError(f"field {field.name!r}: does not lie in whole words of {_WORD} bytes")
    nbytes = sum(field.rows * field.nbytes for field in fields)
    small = len(fields) > 1 or nbytes < _PROGRAM_BYTES // 4
    most, warps = _SMALL if small else _LARGE
    most = most if lanes is None else lanes
    program_bytes = _SMALL_PROGRAM_BYTES if small else _PROGRAM_BYTES
    # Most blocks have a power of two of rows, which divides evenly.
    splits = triton.next_power_of_2(triton.cdiv(nbytes, program_bytes))
    looks = tuple(_look(field, splits, most) for field in fields)
    together = max(1, program_bytes // nbytes) if small else 1
    shape = (len(blocks), splits, len(looks), len(COUNTS))
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
    added = results[:, 0] if splits == 1 else results.sum(1, dtype=torch.int32)
    return [added[:, number] for number in range(len(looks))]


def _look(field: Field, splits: int, most_lanes: int) -> _Look:
    vector, bits = field.head_bytes, 8 * TENSOR_DTYPE_BYTES[field.dtype]
    first_special = FIRST_SPECIAL[field.dtype]
    vectors = field.rows * (field.nbytes // vector)
    share, lanes, rounds = _shared_out(vectors, splits, most_lanes)
    heads = field.rows if field.leads else 0
    head_share, head_lanes, head_rounds = _shared_out(heads, splits, most_lanes)
    return _Look(
        vectors=vectors,
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
        magnitude=(1 << (bits - 1)) - 1,
        magnitudes=_signed(_repeat((1 << (bits - 1)) - 1, bits)),
        signs=_signed(_repeat(1 << (bits - 1), bits)),
        to_sign=_signed(_repeat(max(0, (1 << (bits - 1)) - first_special), bits)),
        first_special=first_special,
        infinity=INFINITY.get(field.dtype, -1),
        fnuz=field.dtype == "float8_e4m3fnuz",
        scales=field.scale_floor is not None,
        zero_scales=field.scale_floor == 0,
        floor=0 if field.scale_floor is None else floor_bits(field.scale_floor),
    )


def _shared_out(total: int, splits: int, most: int) -> tuple[int, int, int]:
    """Return a program's share of `total` items, and its lanes and rounds."""
    share: int = triton.cdiv(total, splits)
    lanes: int = min(most, triton.next_power_of_2(max(1, share)))
    return share, lanes, triton.cdiv(share, lanes)


def _repeat(pattern: int, bits: int) -> int:
    return sum(pattern << shift for shift in range(0, 32, bits))


def _signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word


@triton.jit
def _place(vector, LOOK: tl.constexpr):
    """Return the index of a field's vector within its block."""
    PITCH: tl.constexpr = LOOK.pitch
    ROW: tl.constexpr = LOOK.row_vectors
    OFFSET: tl.constexpr = LOOK.offset
    if PITCH == ROW:
        return vector
    else:  # noqa: RET505 - Triton chooses the branch when it compiles
        return vector // ROW * PITCH + OFFSET + vector % ROW


@triton.jit
def _added(bad, special, bad_2, special_2):
    return bad + bad_2, special | special_2


@triton.jit
def _read(start, split, step, LOOK: tl.constexpr):
    """Read a round of vectors: [lanes, words], and which of them exist."""
    LANES: tl.constexpr = LOOK.lanes
    WORDS: tl.constexpr = LOOK.words
    SHARE: tl.constexpr = LOOK.share
    VECTORS: tl.constexpr = LOOK.vectors
    lane = step * LANES + tl.arange(0, LANES)
    vector = split * SHARE + lane
    inside = ((lane < SHARE) & (vector < VECTORS))[:, None]
    at = start + _place(vector, LOOK) * WORDS
    words = tl.load(at[:, None] + tl.arange(0, WORDS)[None, :], mask=inside, other=0)
    return words, inside


@triton.jit
def _first_pass(start, split, LOOK: tl.constexpr):
    """Count bad scales and flag special numbers: two scalars."""
    LANES: tl.constexpr = LOOK.lanes
    WORDS: tl.constexpr = LOOK.words
    ROUNDS: tl.constexpr = LOOK.rounds
    MAGNITUDES: tl.constexpr = LOOK.magnitudes
    TO_SIGN: tl.constexpr = LOOK.to_sign
    SIGNS: tl.constexpr = LOOK.signs
    FLOOR: tl.constexpr = LOOK.floor
    FIRST_SPECIAL: tl.constexpr = LOOK.first_special
    bad = tl.zeros([LANES], tl.int32)
    special = tl.zeros([LANES, WORDS], tl.int32)
    for step in range(ROUNDS):
        words, inside = _read(start, split, step, LOOK)
        magnitudes = words & MAGNITUDES
        # Adding to a magnitude carries into its sign bit, never further.
        if LOOK.fnuz:
            special |= words & ~(magnitudes + MAGNITUDES)
        else:
            special |= magnitudes + TO_SIGN
        if LOOK.scales:
            legal = (words >= FLOOR) & (words < FIRST_SPECIAL)
            if LOOK.zero_scales:
                legal = legal | (words == -0x80000000)
            bad += tl.sum((~legal & inside).to(tl.int32), 1)
    flags = tl.max(((special & SIGNS) != 0).to(tl.int32), 1)
    return tl.reduce((bad, flags), 0, _added)


@triton.jit
def _second_pass(start, split, LOOK: tl.constexpr):
    LANES: tl.constexpr = LOOK.lanes
    ROUNDS: tl.constexpr = LOOK.rounds
    BITS: tl.constexpr = LOOK.bits
    MAGNITUDE: tl.constexpr = LOOK.magnitude
    FIRST_SPECIAL: tl.constexpr = LOOK.first_special
    INFINITY: tl.constexpr = LOOK.infinity
    nans = tl.zeros([LANES], tl.int32)
    infs = tl.zeros([LANES], tl.int32)
    for step in range(ROUNDS):
        words, _ = _read(start, split, step, LOOK)
        for place in tl.static_range(32 // BITS):
            bits = words >> (BITS * place)
            if LOOK.fnuz:
                finite = (bits & 0xFF) != 0x80
                infinite = finite & False
            else:
                magnitude = bits & MAGNITUDE
                finite = magnitude < FIRST_SPECIAL
                infinite = magnitude == INFINITY
            infs += tl.sum(infinite.to(tl.int32), 1)
            nans += tl.sum((~(finite | infinite)).to(tl.int32), 1)
    return tl.sum(nans, 0), tl.sum(infs, 0)


@triton.jit
def _zero_heads(start, split, LOOK: tl.constexpr):
    """Count the rows of a program's share that begin with zeros."""
    LANES: tl.constexpr = LOOK.head_lanes
    ROUNDS: tl.constexpr = LOOK.head_rounds
    SHARE: tl.constexpr = LOOK.head_share
    ROWS: tl.constexpr = LOOK.rows
    WORDS: tl.constexpr = LOOK.words
    PITCH: tl.constexpr = LOOK.pitch * LOOK.words
    heads = tl.zeros([LANES], tl.int32)
    for step in range(ROUNDS):
        lane = step * LANES + tl.arange(0, LANES)
        row = split * SHARE + lane
        inside = (lane < SHARE) & (row < ROWS)
        at = start + row * PITCH
        words = tl.arange(0, WORDS)[None, :]
        head = tl.load(at[:, None] + words, mask=inside[:, None], other=1)
        heads += (tl.max(head.to(tl.uint32, bitcast=True), 1) == 0).to(tl.int32)
    return tl.sum(heads, 0)


@triton.jit
def _look_at(start, split, out, LOOKS: tl.constexpr, NUMBER: tl.constexpr):
    """Check a program's share of one field of a block; store the counts at `out`."""
    LOOK: tl.constexpr = LOOKS[NUMBER]
    bad, special = _first_pass(start, split, LOOK)
    nans = 0
    infs = 0
    if special != 0:
        nans, infs = _second_pass(start, split, LOOK)
    heads = 0
    if LOOK.head_share:
        heads = _zero_heads(start, split, LOOK)
    tl.store(out + 0, nans)
    tl.store(out + 1, infs)
    tl.store(out + 2, bad)
    tl.store(out + 3, heads)


@triton.jit
def _statistics(
    pool, blocks, results, count, block_words, LOOKS: tl.constexpr, FIELDS: tl.constexpr,
    SPLITS: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """Check one part of a block, or several small blocks one after another."""
    split = tl.program_id(0) % SPLITS
    first = (tl.program_id(0) // SPLITS) * TOGETHER
    for number in range(TOGETHER):
        block = first + number
        if block < count:
            start = pool + tl.load(blocks + block) * block_words
            result = block.to(tl.int64) * SPLITS + split
            for field in tl.static_range(FIELDS):
                out = results + (result * FIELDS + field) * 4
                _look_at(start, split, out, LOOKS, field)
