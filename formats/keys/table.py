"""Split whole columns of keys at their page hash, and name each distinct rest once.

Keys repeat: one page hash, then a suffix out of a few dozen. Nothing here runs Python per key.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.formats.keys.rows import ByteRows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicachectl.formats.keys.base import Affix

    IntArray = npt.NDArray[np.int64]

FOREIGN = -1  # affix id of a key without a page hash
PAGE_LENGTH = 64
_WORD_DIGITS = 16

# A run of exactly 64 hex digits; the first one where the key starts with it, else the last.
_AROUND_HASH = r"(?s:(?P<prefix>|.*[^0-9a-f])(?P<page>[0-9a-f]{64})(?P<suffix>|[^0-9a-f].*))"
_ONE_KEY = re.compile(_AROUND_HASH.encode())
# So many distinct affixes are looked for among the keys of a column before those that are left
# are split one by one.
_LIKENESSES = 32
_UNKNOWN = -2


def join_keys(affixes: Sequence[Affix], which: pa.Array, pages: pa.StringArray) -> pa.BinaryArray:
    """Spell keys. which: [n] the affix of each. pages: [n] its page hash; null where one is."""
    before, after = (pa.array([affix[end] for affix in affixes], pa.string()) for end in (0, 1))
    keys = pc.binary_join_element_wise(before.take(which), pages, after.take(which), "")
    return pc.cast(keys, pa.binary())


@dataclass(slots=True)
class KeySplitter:
    """Splits batches of keys; the distinct affixes gather in `affixes`, in order of appearance."""

    affixes: list[Affix] = field(default_factory=list)
    _ids: dict[Affix, int] = field(default_factory=dict)

    def split(self, keys: pa.BinaryArray) -> tuple[pa.StringArray, npt.NDArray[np.int32]]:
        """Return each key's page hash, null when foreign, and the id of its affix or FOREIGN."""
        ids = self.identify(keys)
        return pages_of(keys, page_starts(self.affixes)[ids]), ids

    def identify(self, keys: pa.BinaryArray) -> npt.NDArray[np.int32]:
        """Return the id of each key's affix, or FOREIGN."""
        column = ByteRows(keys)
        ids = np.full(len(keys), _UNKNOWN, dtype=np.int32)
        left = np.arange(len(keys))
        # All keys that have the bytes of one outside their hash are split as that one is.
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
        """Identify keys by a regular expression for each, which takes twenty times as long."""
        # latin-1 in all but name: RE2 works on bytes, and a key need not be UTF-8.
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
            return FOREIGN  # SGLang builds keys from str; other bytes are not its own
        if affix not in self._ids:
            self._ids[affix] = len(self.affixes)
            self.affixes.append(affix)
        return self._ids[affix]


def page_starts(affixes: Sequence[Affix]) -> IntArray:
    """Say behind how many bytes of a key its page hash begins: by affix id, -1 for FOREIGN."""
    return np.array([*(len(prefix.encode()) for prefix, _ in affixes), -1], dtype=np.int64)


def pages_of(keys: pa.BinaryArray, starts: IntArray) -> pa.StringArray:
    """Cut page hashes out of keys, where they begin; null where that is negative."""
    known = starts >= 0
    cut = ByteRows(keys).cut(np.flatnonzero(known), starts[known], PAGE_LENGTH)
    offsets = np.zeros(len(keys) + 1, dtype=np.int32)
    np.cumsum(known * np.int32(PAGE_LENGTH), dtype=np.int32, out=offsets[1:])
    return pa.StringArray.from_buffers(
        len(keys),
        pa.py_buffer(offsets),
        pa.py_buffer(cut),
        None if known.all() else pa.array(known).buffers()[1],
    )


def page_words(
    keys: pa.BinaryArray, rows: IntArray, starts: IntArray, word: int
) -> npt.NDArray[np.uint64]:
    """Give a quarter of the page hash of some keys, 0 the first, as numbers: [rows].

    starts: [rows], where the hash begins in each.
    """
    digits = ByteRows(keys).cut_bytes(rows, starts + word * _WORD_DIGITS, _WORD_DIGITS)
    text: npt.NDArray[np.uint64] = digits.view(">u8").astype(np.uint64)
    # The low half of a digit's byte is its value, but for letters, which have bit 6 set, by 9.
    halves = (text & _each_byte(0x0F)) + np.uint64(9) * ((text >> np.uint64(6)) & _each_byte(1))
    for bits, kept in ((4, 0x00FF00FF00FF00FF), (8, 0x0000FFFF0000FFFF), (16, 0xFFFFFFFF)):
        halves = (halves | (halves >> np.uint64(bits))) & np.uint64(kept)
    words: npt.NDArray[np.uint64] = (halves[:, 0] << np.uint64(32)) | halves[:, 1]
    return words


def _each_byte(value: int) -> np.uint64:
    return np.uint64(int.from_bytes(bytes([value]) * 8))


def _alike(keys: ByteRows, rows: IntArray, prefix: bytes, suffix: bytes) -> npt.NDArray[np.bool_]:
    """Say which of some keys are a prefix, 64 hex digits and a suffix: [rows]."""
    behind = len(prefix) + PAGE_LENGTH
    alike: npt.NDArray[np.bool_] = keys.lengths[rows] == behind + len(suffix)
    for text, at in ((suffix, behind), (prefix, 0)):
        if text:
            candidates = np.flatnonzero(alike)
            found = keys.cut(rows[candidates], at, len(text))
            alike[candidates] = found == np.frombuffer(text, dtype=found.dtype)
    candidates = np.flatnonzero(alike)
    digits = keys.cut_bytes(rows[candidates], len(prefix), PAGE_LENGTH)
    is_digit = ((digits - np.uint8(ord("0"))) < 10) | ((digits - np.uint8(ord("a"))) < 6)
    if not is_digit.all():
        alike[candidates] = is_digit.all(axis=1)
    return alike


def _codes(encoded: pa.DictionaryArray) -> IntArray:
    codes: IntArray = encoded.indices.fill_null(0).to_numpy().astype(np.int64)
    return codes
