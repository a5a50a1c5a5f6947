"""Check whether an object's numbers are float16 under a bfloat16 profile, or the reverse.

Keys and sizes are the same for both formats. Only the exponents show the format: float16 has five
exponent bits, and bfloat16 has eight. Neighbours in a row of keys, values or states have about the
same magnitude, so their exponents differ little. If the exponents of a pair differ by k or more,
one of its values is very small, and each smaller power of two has about half as many values. So the
share of such pairs is about halved with each step of k.

If float16 is read as bfloat16, the differences are multiplied by eight, because three bits of the
mantissa become bits of the exponent. If bfloat16 is read as float16, they are divided by eight.

There is a finding only if the differences are wrong in the profile's format and right in the other
format. Random bytes, constants and other bytes that no model writes are right in neither format.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hicachectl.checks.registry import ValueIssue
from hicachectl.checks.tables import WORD_BYTES, sections_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicachectl.formats.arrays import BoolArray, IntArray
    from hicachectl.formats.profile import Profile
    from hicachectl.formats.spec import ObjectSpec
    from hicachectl.kernels.values import Bytes

# Mantissa bits and exponent bits.
_FORMS = {"bfloat16": (7, 8), "float16": (10, 5)}
_PAIRS = 2048  # most pairs of an object that are compared; a pair is a 32-bit word
# The first look reads a few pieces of consecutive pairs. It shows for most objects that they need
# no full look.
_LOOK_PIECES = 2
_LOOK_PIECE = 16  # pairs of a piece
_LOOK_PAIRS = _LOOK_PIECES * _LOOK_PIECE
# An object is judged only if it has at least this many pairs without a zero or a subnormal number.
_LEAST_PAIRS = 256

# The share at d is the share of pairs whose exponents differ by d or more. Numbers of models, read
# in their own format, have shares of 0.23 to 0.44 at 3, 0.11 to 0.29 at 4, and about 0.01 at 8.
# float16 read as bfloat16 has 0.52 to 0.75 at 8. bfloat16 read as float16 has 0.005 at 2.
_FAR, _NEAR = 8, 2
_WRONG_FAR = 0.4  # least share at 8 of float16 read as bfloat16
_WRONG_NEAR = 0.02  # largest share at 2 of bfloat16 read as float16
# Least and largest shares of a right reading, by d. Small values in float16 may have no exponents
# that are 8 apart. bfloat16 values always have a few such pairs. float16 values that are about
# equal to each other have none if they are read as bfloat16.
_RIGHT = {
    "float16": {1: (0.3, 1.0), 8: (0.0, 0.1)},
    "bfloat16": {3: (0.1, 0.5), 4: (0.0, 0.3), 8: (0.001, 0.1)},
}


@dataclass(frozen=True, slots=True)
class DtypeCheck:
    """Check whether the numbers of one spec have the other 16-bit format.

    A pair of numbers is one 32-bit word.
    dtype: format that the profile states.
    other: the other format.
    look: index of the first word of each piece that the first look reads.
    places: index of each word that the full look reads.
    """

    dtype: str
    other: str
    look: tuple[int, ...]
    places: IntArray

    def __call__(self, objects: Bytes) -> Iterator[ValueIssue]:
        """Yield an issue for each object of [n, nbytes] whose numbers are of the other format."""
        words = objects.view("<i4")
        for index in np.flatnonzero(self._is_hinted(words)).tolist():
            pairs = words[index, self.places]
            own, other = (_Differences(pairs, name) for name in (self.dtype, self.other))
            if own.pairs >= _LEAST_PAIRS and self._is_wrong(own) and self._is_right(other):
                yield ValueIssue(index, "dtype-mismatch", self._describe(own, other))

    def _is_hinted(self, words: IntArray) -> BoolArray:
        """Return which objects [n, words] may have the wrong dtype, judged by a few pairs: [n]."""
        mantissa, bits = _FORMS[self.dtype]
        exponents = np.int16(((1 << bits) - 1) << mantissa)
        pieces = [words[:, start : start + _LOOK_PIECE].view("<i2") for start in self.look]
        numbers = np.concatenate(pieces, axis=1) & exponents
        apart = np.abs(numbers[:, ::2] - numbers[:, 1::2])
        # With so few pairs, a share can by chance be half or twice the share of all pairs.
        if self.dtype == "bfloat16":
            far = np.count_nonzero(apart >= _FAR << mantissa, axis=1)
            hinted: BoolArray = far >= _LOOK_PAIRS * _WRONG_FAR / 2
        else:
            far = np.count_nonzero(apart >= _NEAR << mantissa, axis=1)
            hinted = far <= _LOOK_PAIRS * _WRONG_NEAR * 2
        return hinted

    def _is_wrong(self, own: _Differences) -> bool:
        if self.dtype == "bfloat16":
            return own.share(_FAR) >= _WRONG_FAR
        return own.share(_NEAR) <= _WRONG_NEAR

    def _is_right(self, other: _Differences) -> bool:
        limits = _RIGHT[self.other].items()
        return all(low <= other.share(least) <= high for least, (low, high) in limits)

    def _describe(self, own: _Differences, other: _Differences) -> str:
        least = _FAR if self.dtype == "bfloat16" else _NEAR
        return (
            f"numbers are {self.other}, not {self.dtype}: of {own.pairs} pairs of neighbours, "
            f"{own.share(least):.0%} differ by a factor of about {2**least} or more when read "
            f"as {self.dtype}, and {other.share(least):.0%} when read as {self.other}"
        )


class _Differences:
    """Differences of exponents in pairs of numbers of one object, read in one format.

    pairs: number of pairs without a zero or a subnormal number.
    """

    def __init__(self, words: IntArray, dtype: str) -> None:
        """Take pairs as signed 32-bit words: [pairs]."""
        mantissa, bits = _FORMS[dtype]
        mask = (1 << bits) - 1
        first, second = (words >> mantissa) & mask, (words >> (16 + mantissa)) & mask
        self._differences = np.abs(first - second)[np.minimum(first, second) > 0]
        self.pairs = len(self._differences)

    def share(self, least: int) -> float:
        """Return the share of pairs whose exponents differ by `least` or more."""
        return np.count_nonzero(self._differences >= least) / max(1, self.pairs)


def dtype_check(expected: ObjectSpec, profile: Profile) -> DtypeCheck | None:
    """Return the check for one spec.

    Return None if its objects have too few 16-bit numbers, numbers of both formats, or a size that
    is no multiple of WORD_BYTES.
    """
    if expected.nbytes % WORD_BYTES:
        return None
    sections = sections_of(expected, profile)
    plain = [section for section in sections if section.plain and section.dtype in _FORMS]
    dtypes = {section.dtype for section in plain}
    if len(dtypes) != 1:
        return None
    places = np.concatenate([section.sample_words(_PAIRS) for section in plain])
    if len(places) < _LEAST_PAIRS:
        return None
    (dtype,) = dtypes
    (other,) = _FORMS.keys() - dtypes
    draw = np.random.default_rng(0)
    chosen = draw.permutation(places)[:_PAIRS]
    # Starts are multiples of the piece, so that most pieces lie inside one row. A piece can extend
    # into the next row.
    starts = chosen[:_LOOK_PIECES] // _LOOK_PIECE * _LOOK_PIECE
    starts = np.minimum(starts, expected.nbytes // WORD_BYTES - _LOOK_PIECE)
    return DtypeCheck(dtype, other, tuple(starts.tolist()), np.sort(chosen))
