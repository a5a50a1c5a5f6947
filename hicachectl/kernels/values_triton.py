"""Flag bad numbers in blocks of stored numbers, in one pass over their bytes.

A program takes vectors of up to 16 bytes that follow one another, whatever blocks, rows and fields
they belong to. All numbers of a 4-byte word are tested at once: a constant is added to each
magnitude, and the carry into the sign bit shows whether the number is NaN or infinity. Only lanes
that find a bad number write a result.

Numbers are checked as they are stored. Codes are not multiplied by scales, so a NaN code counts
even if its scale is 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import triton
import triton.language as tl

from hicachectl.formats.layouts import TENSOR_DTYPE_BYTES
from hicachectl.kernels.values import FIRST_SPECIAL, floor_bits

if TYPE_CHECKING:
    from collections.abc import Sequence

# Flags of a field. SPECIAL: a number is NaN or infinite. BAD_SCALE: a scale is not legal.
# ZERO_HEAD: some row begins with zeros, for a field at the start of rows.
SPECIAL, BAD_SCALE, ZERO_HEAD = 1, 2, 4
FLAG_BITS = 3  # the flags of field n begin at bit n * FLAG_BITS
_MOST_FIELDS = 31 // FLAG_BITS  # most fields with flags in one result

_WORD = 4
_VECTOR_BYTES = 16
_TILE = 1024  # vectors of a program, a few for each thread
_WARPS = 8


@dataclass(frozen=True, slots=True)
class Field:
    """Numbers of one dtype in every row of a block: `items` of them from byte `offset` on.

    pitch:       bytes of a row.
    scale_floor: least legal value of fp32 scales; None for ordinary numbers.
    leads:       whether rows begin with this field. Only such a field can get ZERO_HEAD.
    excusable:   whether NaN and infinity can be harmless, as in codes whose scale is 0.
    """

    name: str
    dtype: str
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


@dataclass(frozen=True, slots=True)
class _Look:
    """Constants of one field, for which the kernel is compiled.

    first, last: half-open range of the field's vectors in a row.
    magnitudes, signs: masks of the magnitude and of the sign, repeated for each number of a word.
    to_sign: addend that carries a bad magnitude into the sign, repeated for each number of a word.
    floor: bits of the least legal scale.
    first_special: bits of the least number that is not finite.
    """

    first: int
    last: int
    magnitudes: int
    signs: int
    to_sign: int
    fnuz: bool
    leads: bool
    scales: bool
    zero_scales: bool
    floor: int
    first_special: int


def supports(fields: Sequence[Field]) -> bool:
    """Return whether the kernel supports rows of these fields.

    It supports a few fields whose numbers fill words of 4 bytes.
    """
    return 0 < len(fields) <= _MOST_FIELDS and vector_bytes(fields) % _WORD == 0


def vector_bytes(fields: Sequence[Field]) -> int:
    """Return the greatest power of two up to 16 that divides rows, fields and their offsets.

    ZERO_HEAD means that this many bytes at the start of a row are zero.
    """
    places = [place for field in fields for place in (field.nbytes, field.pitch, field.offset)]
    return int(np.gcd.reduce([_VECTOR_BYTES, *places]))


def certain_flags(fields: Sequence[Field]) -> int:
    """Return the flags that only bad numbers set. Healthy numbers may set the other flags."""
    return sum(
        (SPECIAL | BAD_SCALE) << (FLAG_BITS * number)
        for number, field in enumerate(fields)
        if not field.excusable
    )


def block_flags(
    pool: torch.Tensor,
    blocks: torch.Tensor,
    block_bytes: int,
    fields: Sequence[Field],
    *,
    together: int = 1,
    tile: int = _TILE,
) -> torch.Tensor:
    """Check the fields of blocks of a pool, in one launch.

    pool:     1D uint8, contiguous, 16-byte aligned.
    blocks:   [n] int64 on the pool's device, numbers of blocks of `block_bytes` each.
    fields:   fields of the rows, all with one pitch.
    together: number of consecutive blocks that share a result, as the layers of an object do. It
              divides n.
    tile:     number of vectors that a program checks, a power of two.
    Returns [n / together] int32, the flags of all fields, see FLAG_BITS. Does not synchronise.
    Raises ValueError if `supports` is false, or blocks do not divide as stated above.
    """
    vector = vector_bytes(fields)
    if not supports(fields) or block_bytes % vector:
        names = ", ".join(field.name for field in fields)
        raise ValueError(f"fields {names}: do not lie in whole words of {_WORD} bytes")
    if block_bytes % fields[0].pitch or any(field.pitch != fields[0].pitch for field in fields):
        raise ValueError(f"a block of {block_bytes} bytes does not have rows of one pitch")
    if len(blocks) % together:
        raise ValueError(f"{len(blocks)} blocks do not make groups of {together}")
    flags = torch.zeros(len(blocks) // together, dtype=torch.int32, device=pool.device)
    vectors = block_bytes // vector
    if len(blocks):
        _flag[(triton.cdiv(len(blocks) * vectors, tile),)](
            pool.view(torch.int32),
            blocks,
            flags,
            len(blocks),
            LOOKS=tuple(_look(field, vector) for field in fields),
            FIELDS=len(fields),
            VECTORS=vectors,
            ROW=fields[0].pitch // vector,
            WORDS=vector // _WORD,
            TOGETHER=together,
            TILE=tile,
            num_warps=_WARPS,
        )
    return flags


def _look(field: Field, vector: int) -> _Look:
    bits = 8 * TENSOR_DTYPE_BYTES[field.dtype]
    sign, first_special = 1 << (bits - 1), FIRST_SPECIAL[field.dtype]
    return _Look(
        first=field.offset // vector,
        last=(field.offset + field.nbytes) // vector,
        magnitudes=_repeated(sign - 1, bits),
        signs=_repeated(sign, bits),
        to_sign=_repeated(sign - first_special, bits),
        fnuz=field.dtype == "float8_e4m3fnuz",
        leads=field.leads,
        scales=field.scale_floor is not None,
        zero_scales=field.scale_floor == 0,
        floor=0 if field.scale_floor is None else floor_bits(field.scale_floor),
        first_special=first_special,
    )


def _repeated(pattern: int, bits: int) -> int:
    """Return a signed word that holds a pattern as often as it fits."""
    word = sum(pattern << shift for shift in range(0, 32, bits))
    return word - (1 << 32) if word >= 1 << 31 else word


@triton.jit
def _either(one, other):
    return one | other


@triton.jit
def _special(words, LOOK: tl.constexpr):
    """Return which vectors hold NaN or infinity: [lanes]."""
    MAGNITUDES: tl.constexpr = LOOK.magnitudes
    TO_SIGN: tl.constexpr = LOOK.to_sign
    SIGNS: tl.constexpr = LOOK.signs
    magnitudes = words & MAGNITUDES
    # The sum can carry into the sign bit of its own number, but not into the next number.
    special = words & ~(magnitudes + MAGNITUDES) if LOOK.fnuz else magnitudes + TO_SIGN
    return (tl.reduce(special, 1, _either) & SIGNS) != 0


@triton.jit
def _bad_scale(words, LOOK: tl.constexpr):
    """Return which vectors hold a scale that is not legal: [lanes]."""
    FLOOR: tl.constexpr = LOOK.floor
    FIRST_SPECIAL: tl.constexpr = LOOK.first_special
    legal = (words >= FLOOR) & (words < FIRST_SPECIAL)
    if LOOK.zero_scales:
        legal = legal | (words == -0x80000000)
    return tl.max((~legal).to(tl.int32), 1) != 0


@triton.jit
def _found(words, place, LOOKS: tl.constexpr, NUMBER: tl.constexpr):
    """Return one field's flags of each vector, by its place in the row: [lanes]."""
    # The literals 1, 2, 4 and 3 below are SPECIAL, BAD_SCALE, ZERO_HEAD and FLAG_BITS, because
    # kernels cannot read plain globals.
    LOOK: tl.constexpr = LOOKS[NUMBER]
    FIRST: tl.constexpr = LOOK.first
    LAST: tl.constexpr = LOOK.last
    if LOOK.scales:
        flags = tl.where(_bad_scale(words, LOOK), 2, 0)
    else:
        flags = tl.where(_special(words, LOOK), 1, 0)
    flags = tl.where((place >= FIRST) & (place < LAST), flags, 0)
    if LOOK.leads:
        zero = (place == 0) & (tl.reduce(words, 1, _either) == 0)
        flags = flags | tl.where(zero, 4, 0)
    return flags << (3 * NUMBER)


@triton.jit
def _flag(
    pool, blocks, flags, count, LOOKS: tl.constexpr, FIELDS: tl.constexpr, VECTORS: tl.constexpr,
    ROW: tl.constexpr, WORDS: tl.constexpr, TOGETHER: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Check the TILE vectors of this program. Vectors are numbered through all blocks."""
    start = tl.program_id(0).to(tl.int64) * TILE
    # Lanes count vectors from the start of the program's first block, so that 32 bits suffice for
    # any pool.
    ahead = (start % VECTORS).to(tl.int32) + tl.arange(0, TILE)
    block = (start // VECTORS).to(tl.int32) + ahead // VECTORS
    vector = ahead % VECTORS
    inside = block < count
    at = (tl.load(blocks + block, mask=inside, other=0) * VECTORS + vector) * WORDS
    words = tl.load(
        pool + at[:, None] + tl.arange(0, WORDS)[None, :], mask=inside[:, None], other=1
    )
    place = vector % ROW
    found = tl.zeros([TILE], tl.int32)
    for number in tl.static_range(FIELDS):
        found |= _found(words, place, LOOKS, number)
    tl.atomic_or(flags + block // TOGETHER, found, mask=inside & (found != 0), sem="relaxed")
