"""Number the pages of many objects, without copying their hashes as text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]

_WORDS = 4  # of 64 bits, in a page hash


# One word of the page hash of each chosen object: `Inventory.page_words`.
PageWords = Callable[[npt.NDArray[np.bool_], int], npt.NDArray[np.uint64]]


@dataclass(frozen=True, slots=True)
class Objects:
    """What decisions about a store take of some of its objects.

    affix_ids: [objects]. nbytes: [objects], negative if not listed. page_words: of their pages.
    mtime_ns: [objects], 0 if not known.
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
    begins_alike = words[1:] == words[:-1]
    same = begins_alike.copy()
    for word in range(1, _WORDS):
        words = page_words(chosen, word)[order]
        same &= words[1:] == words[:-1]
    if (same != begins_alike).any():  # hashes share only their first word; never with SHA-256
        order, same = _by_all_words(page_words, chosen)
    numbers = np.zeros(len(order), dtype=np.int64)
    np.cumsum(~same, out=numbers[1:])
    ranks = np.empty(len(order), dtype=np.int64)
    ranks[order] = numbers
    return ranks, int(numbers[-1]) + 1 if len(numbers) else 0


def _by_all_words(
    page_words: PageWords, chosen: npt.NDArray[np.bool_]
) -> tuple[IntArray, npt.NDArray[np.bool_]]:
    """Return the order by whole hashes, and which equal the one before."""
    words = [page_words(chosen, word) for word in range(_WORDS)]
    order = np.lexsort(words[::-1])
    same = np.ones(max(len(order) - 1, 0), dtype=np.bool_)
    for word in words:
        same &= word[order[1:]] == word[order[:-1]]
    return order, same
