"""The prefix forest of requests: each block with its parent, the previous block of its chain."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hicachectl.formats.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    Names = npt.NDArray[np.uint8] | npt.NDArray[np.int64]
    Blocks = npt.NDArray[np.int32]
    Offsets = npt.NDArray[np.int64]

_REFERENCES_AT_ONCE = 1 << 20


@dataclass(frozen=True, eq=False, slots=True)
class Forest:
    """Prefixes of blocks.

    parents: [blocks] int32, the previous block of the chain; -1 for the first.
    depths: [blocks] int32, number of blocks before the block in its chain.
    """

    parents: npt.NDArray[np.int32]
    depths: npt.NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.parents)

    def of(self, blocks: npt.NDArray[np.int64]) -> Forest:
        """Return the forest of some distinct blocks, in this order, with all their prefixes."""
        numbers = np.full(len(self) + 1, -1, np.int32)  # the last is the parent of first blocks
        numbers[blocks] = np.arange(len(blocks))
        return Forest(numbers[self.parents[blocks]], self.depths[blocks])


def grow_forest(names: Names, blocks: Blocks, offsets: Offsets, *, source: str) -> Forest:
    """Return the forest of the blocks of requests, whose columns are these.

    Raises FormatError naming a block that follows two different blocks: its name stands for two
    prefixes, so no plan is possible.
    """
    parents = np.full(len(names), -1, np.int32)
    depths = np.zeros(len(names), np.int32)
    for refs, before, depth in _references(blocks, offsets):
        parents[refs] = before
        depths[refs] = depth
    for refs, before, _ in _references(blocks, offsets):
        if len(wrong := np.flatnonzero(parents[refs] != before)):
            first = wrong[0]
            said = _two_parents(names, refs[first], parents[refs[first]], before[first])
            raise FormatError(f"{source}: {said}")
    return Forest(parents, depths)


def _references(blocks: Blocks, offsets: Offsets) -> Iterator[tuple[Blocks, Blocks, Blocks]]:
    """Yield blocks, the block before each and its depth, for some requests at a time."""
    for first, last in _request_ranges(offsets):
        refs = blocks[offsets[first] : offsets[last]]
        depth = _ramp(np.diff(offsets[first : last + 1]))
        before = np.full(len(refs), -1, np.int32)
        before[1:] = refs[:-1]
        before[depth == 0] = -1
        yield refs, before, depth


def _request_ranges(offsets: Offsets) -> Iterator[tuple[int, int]]:
    """Yield ranges of requests with about a million references each, to bound memory."""
    first, requests = 0, len(offsets) - 1
    while first < requests:
        last = int(np.searchsorted(offsets, offsets[first] + _REFERENCES_AT_ONCE, side="right")) - 1
        last = min(max(last, first + 1), requests)
        yield first, last
        first = last


def _ramp(lengths: Offsets) -> Blocks:
    """Return 0, 1, … n - 1 for each length n, concatenated."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    return (np.arange(total) - np.repeat(ends - lengths, lengths)).astype(np.int32)


def _two_parents(names: Names, block: int, parent: int, other: int) -> str:
    hashed = names.ndim == 2
    what = "page" if hashed else "block"

    def spell(number: int) -> str:
        return f"no {what}" if number < 0 else f"{what} {name_of(names, number)}"

    remedy = (
        "a chain must begin with the first page of its prefix"
        if hashed
        else "equal ids must mean equal prefixes, not only equal contents"
    )
    return (
        f"{spell(block)} follows {spell(parent)} in one request and {spell(other)} in another; "
        f"{remedy}"
    )


def name_of(names: Names, block: int) -> str:
    """Return the name of a block, as in plan files."""
    name = names[block]
    return str(name) if names.ndim == 1 else name.tobytes().hex()


def prefix_closed(forest: Forest, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return each block's value, raised to the largest value of the blocks that follow it.

    A block is of no use without the blocks before it.
    """
    closed = values.copy()
    by_depth = np.argsort(forest.depths, kind="stable")
    levels = np.searchsorted(forest.depths[by_depth], np.arange(forest.depths.max(initial=0) + 2))
    for start, end in zip(levels[-2:0:-1].tolist(), levels[:1:-1].tolist(), strict=True):
        level = by_depth[start:end]
        np.maximum.at(closed, forest.parents[level], closed[level])
    return closed
