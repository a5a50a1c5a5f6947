"""The pages of many objects as small numbers, without a copy of their hashes as texts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]

_WORDS = 4  # of 64 bits, in a page hash


# A quarter of the page hash of each object chosen, as numbers: `Inventory.page_words`.
PageWords = Callable[[npt.NDArray[np.bool_], int], npt.NDArray[np.uint64]]


def page_ranks(page_words: PageWords, chosen: npt.NDArray[np.bool_]) -> tuple[IntArray, int]:
    """Give the pages of some objects numbers, in the order of their hashes.

    chosen: [objects] bool, none of them foreign. Gives the number of each one's page, [chosen]
    int64, and how many pages there are.
    """
    words = page_words(chosen, 0)
    order = np.argsort(words)
    words = words[order]
    begins_alike = words[1:] == words[:-1]
    same = begins_alike.copy()
    for word in range(1, _WORDS):
        words = page_words(chosen, word)[order]
        same &= words[1:] == words[:-1]
    if (same != begins_alike).any():  # SHA-256 does not do that
        order, same = _by_all_words(page_words, chosen)
    numbers = np.zeros(len(order), dtype=np.int64)
    np.cumsum(~same, out=numbers[1:])
    ranks = np.empty(len(order), dtype=np.int64)
    ranks[order] = numbers
    return ranks, int(numbers[-1]) + 1 if len(numbers) else 0


def _by_all_words(
    page_words: PageWords, chosen: npt.NDArray[np.bool_]
) -> tuple[IntArray, npt.NDArray[np.bool_]]:
    """Sort by whole hashes: the order, and which of it are equal to the one before."""
    words = [page_words(chosen, word) for word in range(_WORDS)]
    order = np.lexsort(words[::-1])
    same = np.ones(max(len(order) - 1, 0), dtype=np.bool_)
    for word in words:
        same &= word[order[1:]] == word[order[:-1]]
    return order, same
