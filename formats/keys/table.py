"""Split whole columns of keys at their page hash, and name each distinct rest once.

Keys repeat: one page hash, then a suffix out of a few dozen. Nothing here runs Python per key.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

if TYPE_CHECKING:
    from hicachectl.formats.keys.base import Affix

FOREIGN = -1  # affix id of a key without a page hash

# A run of exactly 64 hex digits; the first one where the key starts with it, else the last.
_AROUND_HASH = r"^(?s:(?P<prefix>|.*[^0-9a-f])(?P<page>[0-9a-f]{64})(?P<suffix>|[^0-9a-f].*))$"


@dataclass(slots=True)
class KeySplitter:
    """Splits batches of keys; the distinct affixes gather in `affixes`, in order of appearance."""

    affixes: list[Affix] = field(default_factory=list)
    _ids: dict[Affix, int] = field(default_factory=dict)

    def split(self, keys: pa.BinaryArray) -> tuple[pa.StringArray, npt.NDArray[np.int32]]:
        """Return each key's page hash, null when foreign, and the id of its affix or FOREIGN."""
        # latin-1 in all but name: RE2 works on bytes, and a key need not be UTF-8.
        found = pc.extract_regex(keys, _AROUND_HASH)
        prefixes, pages, suffixes = found.flatten()
        prefix_codes = pc.dictionary_encode(prefixes)
        suffix_codes = pc.dictionary_encode(suffixes)
        valid = found.is_valid().to_numpy(zero_copy_only=False)
        combined = _codes(prefix_codes)[valid] * len(suffix_codes.dictionary)
        combined += _codes(suffix_codes)[valid]
        distinct, inverse = np.unique(combined, return_inverse=True)
        ids = np.full(len(keys), FOREIGN, dtype=np.int32)
        ids[valid] = self._name(distinct, prefix_codes.dictionary, suffix_codes.dictionary)[inverse]
        foreign = pa.array(ids == FOREIGN)
        return pc.cast(pc.if_else(foreign, None, pages), pa.string()), ids

    def _name(
        self, distinct: npt.NDArray[np.int64], prefixes: pa.Array, suffixes: pa.Array
    ) -> npt.NDArray[np.int32]:
        named = [divmod(code, len(suffixes)) for code in distinct.tolist()]
        return np.array(
            [self._id(prefixes[p].as_py(), suffixes[s].as_py()) for p, s in named], dtype=np.int32
        )

    def _id(self, prefix: bytes, suffix: bytes) -> int:
        try:
            affix = (prefix.decode(), suffix.decode())
        except UnicodeDecodeError:
            return FOREIGN  # SGLang builds keys from str; other bytes are not its own
        if affix not in self._ids:
            self._ids[affix] = len(self.affixes)
            self.affixes.append(affix)
        return self._ids[affix]


def _codes(encoded: pa.DictionaryArray) -> npt.NDArray[np.int64]:
    codes: npt.NDArray[np.int64] = encoded.indices.fill_null(0).to_numpy().astype(np.int64)
    return codes
