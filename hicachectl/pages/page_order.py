"""Number the pages of many objects, without copying their hashes as text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from hicachectl.formats.arrays import IntArray

_WORDS = 4  # a page hash has four words of 64 bits

# Returns one word of the page hash of each chosen object, as `Inventory.page_words` does.
PageWords = Callable[[npt.NDArray[np.bool_], int], npt.NDArray[np.uint64]]


@dataclass(frozen=True, slots=True)
class Objects:
    """Objects, as `contested` and `seen_sizes` look at them.

    affix_ids: [objects] int32.
    nbytes: [objects], negative if the store lists no size.
    page_words: returns words of page hashes.
    mtime_ns: [objects] time of the last write, 0 if not known.
    """

    affix_ids: npt.NDArray[np.int32]
    nbytes: IntArray
    page_words: PageWords
    mtime_ns: IntArray


def page_ranks(page_words: PageWords, chosen: npt.NDArray[np.bool_]) -> tuple[IntArray, int]:
    """Return the rank of each chosen object's page by hash, [chosen] int64, and the page count.

    chosen: [objects] bool, without foreign objects.
    """
    words = page_words(chosen, 0)
    order = np.argsort(words)
    words = words[order]
    same = begins_alike = words[1:] == words[:-1]
    for word in range(1, _WORDS):
        words = page_words(chosen, word)[order]
        same = same & (words[1:] == words[:-1])
    if (same != begins_alike).any():  # hashes share only their first word; never with SHA-256
        every = np.stack([page_words(chosen, word) for word in range(_WORDS)])
        order = np.lexsort(every[::-1])
        same = (every[:, order[1:]] == every[:, order[:-1]]).all(axis=0)
    numbers = np.zeros(len(order), dtype=np.int64)
    np.cumsum(~same, out=numbers[1:])
    ranks = np.empty(len(order), dtype=np.int64)
    ranks[order] = numbers
    return ranks, int(numbers[-1]) + 1 if len(numbers) else 0
