"""Split columns of keys into page hashes and affix ids, without Python code per key.

A store usually has at most a few dozen distinct affixes, so keys are compared affix by affix.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.formats.objects import PAGE_DIGITS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicachectl.formats.arrays import IntArray
    from hicachectl.formats.keys.base import Affix


FOREIGN = -1  # affix id of a key that has no page hash or is not UTF-8
_WORD_DIGITS = 16

# The hash is a run of exactly 64 hex digits. A run at the key's start is the hash; otherwise, the
# last run is.
_AROUND_HASH = r"(?s:(?P<prefix>|.*[^0-9a-f])(?P<page>[0-9a-f]{64})(?P<suffix>|[^0-9a-f].*))"
_ONE_KEY = re.compile(_AROUND_HASH.encode())
_LIKENESSES = 32  # number of affixes that are compared bytewise; `_each` handles all other keys
_UNKNOWN = -2


class ByteRows:
    """The bytes of a binary array. A null is a row of 0 bytes.

    lengths: [n] int32, bytes of each row.
    """

    def __init__(self, array: pa.BinaryArray) -> None:
        _, offsets, data = array.buffers()
        bounds = np.zeros(1, dtype=np.int32)
        if len(array):
            bounds = np.frombuffer(offsets, dtype=np.int32)[array.offset :][: len(array) + 1]
        self._data = np.frombuffer(data or b"", dtype=np.uint8)
        self._starts = bounds[:-1].astype(np.int64)
        self.lengths: npt.NDArray[np.int32] = np.diff(bounds)

    def row(self, row: int) -> bytes:
        """Return the bytes of one row."""
        start = int(self._starts[row])
        return self._data[start : start + int(self.lengths[row])].tobytes()

    def cut(self, rows: IntArray, at: IntArray | int, nbytes: int) -> npt.NDArray[np.bytes_]:
        """Copy `nbytes` bytes from offset `at` of each row: [rows], dtype S`nbytes`.

        The bytes must lie within the row. The dtype is S, because numpy copies and compares strings
        fastest. Strings of S ignore trailing zeros, which is harmless if all strings have the same
        length.
        """
        places = self._starts[rows] + at
        if not len(places):
            return np.empty(0, dtype=f"S{nbytes}")
        windows: npt.NDArray[np.bytes_] = np.ndarray(
            (len(self._data) - nbytes + 1,), f"S{nbytes}", self._data.data, strides=(1,)
        )
        cut: npt.NDArray[np.bytes_] = windows[places]
        return cut

    def cut_bytes(self, rows: IntArray, at: IntArray | int, nbytes: int) -> npt.NDArray[np.uint8]:
        """Copy the bytes like `cut`: [rows, nbytes] uint8."""
        return self.cut(rows, at, nbytes).view(np.uint8).reshape(len(rows), nbytes)


def join_keys(affixes: Sequence[Affix], which: pa.Array, pages: pa.StringArray) -> pa.BinaryArray:
    """Return [n] keys. A key is null if its affix id or its page hash is null.

    which: [n] affix ids.
    pages: [n] page hashes.
    """
    before, after = (pa.array([affix[end] for affix in affixes], pa.string()) for end in (0, 1))
    keys = pc.binary_join_element_wise(before.take(which), pages, after.take(which), "")
    return pc.cast(keys, pa.binary())


@dataclass(slots=True)
class KeySplitter:
    """Splits batches of keys, and collects the distinct affixes in order of appearance."""

    affixes: list[Affix] = field(default_factory=list)
    _ids: dict[Affix, int] = field(default_factory=dict)

    def split(self, keys: pa.BinaryArray) -> tuple[pa.StringArray, npt.NDArray[np.int32]]:
        """Return each key's page hash and affix id; null and FOREIGN for a foreign key."""
        ids = self.identify(keys)
        return pages_of(keys, page_starts(self.affixes)[ids]), ids

    def identify(self, keys: pa.BinaryArray) -> npt.NDArray[np.int32]:
        """Return each key's affix id, or FOREIGN: [n] int32."""
        column = ByteRows(keys)
        ids = np.full(len(keys), _UNKNOWN, dtype=np.int32)
        left = np.arange(len(keys))
        # Keys with the same bytes outside the hash have the same affix.
        for _ in range(_LIKENESSES):
            if not len(left):
                return ids
            first = int(left[0])
            match = _ONE_KEY.fullmatch(column.row(first))
            if match is None:
                ids[first] = FOREIGN
            else:
                alike = _alike(column, left, match["prefix"], match["suffix"])
                ids[left[alike]] = self._id(match["prefix"], match["suffix"])
            left = left[ids[left] == _UNKNOWN]
        if len(left):
            ids[left] = self._each(keys.take(pa.array(left)))
        return ids

    def _each(self, keys: pa.BinaryArray) -> npt.NDArray[np.int32]:
        """Identify keys by a regular expression, twenty times as slow as by comparing bytes."""
        # RE2 matches bytes here, because a key need not be UTF-8.
        found = pc.extract_regex(keys, f"^{_AROUND_HASH}$")
        prefixes, _, suffixes = found.flatten()
        prefix_codes = pc.dictionary_encode(prefixes)
        suffix_codes = pc.dictionary_encode(suffixes)
        valid = found.is_valid().to_numpy(zero_copy_only=False)
        combined = _codes(prefix_codes)[valid] * len(suffix_codes.dictionary)
        combined += _codes(suffix_codes)[valid]
        distinct, inverse = np.unique(combined, return_inverse=True)
        ids = np.full(len(keys), FOREIGN, dtype=np.int32)
        ids[valid] = self._name(distinct, prefix_codes.dictionary, suffix_codes.dictionary)[inverse]
        return ids

    def _name(self, distinct: IntArray, prefixes: pa.Array, suffixes: pa.Array) -> IntArray:
        named = [divmod(code, len(suffixes)) for code in distinct.tolist()]
        ids = [self._id(prefixes[p].as_py(), suffixes[s].as_py()) for p, s in named]
        return np.array(ids, dtype=np.int64)

    def _id(self, prefix: bytes, suffix: bytes) -> int:
        try:
            affix = (prefix.decode(), suffix.decode())
        except UnicodeDecodeError:
            return FOREIGN  # SGLang builds keys from str, so this key is not SGLang's
        if affix not in self._ids:
            self._ids[affix] = len(self.affixes)
            self.affixes.append(affix)
        return self._ids[affix]


def page_starts(affixes: Sequence[Affix]) -> IntArray:
    """Return the byte offset of the page hash by affix id: [affixes + 1], -1 for FOREIGN."""
    return np.array([*(len(prefix.encode()) for prefix, _ in affixes), -1], dtype=np.int64)


def pages_of(keys: pa.BinaryArray, starts: IntArray) -> pa.StringArray:
    """Return the page hashes of keys.

    starts: [n] byte offsets of the hashes. A negative offset gives null.
    """
    known = starts >= 0
    cut = ByteRows(keys).cut(np.flatnonzero(known), starts[known], PAGE_DIGITS)
    offsets = np.zeros(len(keys) + 1, dtype=np.int32)
    np.cumsum(known * np.int32(PAGE_DIGITS), dtype=np.int32, out=offsets[1:])
    return pa.StringArray.from_buffers(
        len(keys),
        pa.py_buffer(offsets),
        pa.py_buffer(cut),
        None if known.all() else pa.array(known).buffers()[1],
    )


def page_words(
    keys: pa.BinaryArray, rows: IntArray, starts: IntArray, word: int
) -> npt.NDArray[np.uint64]:
    """Return one quarter (`word` 0 to 3) of the page hashes of some keys: [rows] uint64.

    starts: [rows] byte offsets of the hashes.
    """
    digits = ByteRows(keys).cut_bytes(rows, starts + word * _WORD_DIGITS, _WORD_DIGITS)
    text: npt.NDArray[np.uint64] = digits.view(">u8").astype(np.uint64)
    # The low 4 bits of a decimal digit are its value. A letter has bit 6 set, and its value is its
    # low 4 bits plus 9.
    halves = (text & _each_byte(0x0F)) + np.uint64(9) * ((text >> np.uint64(6)) & _each_byte(1))
    for bits, kept in ((4, 0x00FF00FF00FF00FF), (8, 0x0000FFFF0000FFFF), (16, 0xFFFFFFFF)):
        halves = (halves | (halves >> np.uint64(bits))) & np.uint64(kept)
    words: npt.NDArray[np.uint64] = (halves[:, 0] << np.uint64(32)) | halves[:, 1]
    return words


def _each_byte(value: int) -> np.uint64:
    return np.uint64(int.from_bytes(bytes([value]) * 8))


def _alike(keys: ByteRows, rows: IntArray, prefix: bytes, suffix: bytes) -> npt.NDArray[np.bool_]:
    """Return which keys consist of prefix, 64 hex digits and suffix: [rows] bool."""
    behind = len(prefix) + PAGE_DIGITS
    alike: npt.NDArray[np.bool_] = keys.lengths[rows] == behind + len(suffix)
    for text, at in ((suffix, behind), (prefix, 0)):
        if text:
            candidates = np.flatnonzero(alike)
            found = keys.cut(rows[candidates], at, len(text))
            alike[candidates] = found == np.frombuffer(text, dtype=found.dtype)
    candidates = np.flatnonzero(alike)
    digits = keys.cut_bytes(rows[candidates], len(prefix), PAGE_DIGITS)
    is_digit = ((digits - np.uint8(ord("0"))) < 10) | ((digits - np.uint8(ord("a"))) < 6)
    if not is_digit.all():
        alike[candidates] = is_digit.all(axis=1)
    return alike


def _codes(encoded: pa.DictionaryArray) -> IntArray:
    codes: IntArray = encoded.indices.fill_null(0).to_numpy().astype(np.int64)
    return codes
