"""Order the blocks of requests by the value of warming them. Read and write plan files.

A plan file has JSON lines, best page first: {"page", "parent", "depth", "value", "requests",
"last_seen"}. "parent" is the previous page of the chain, or null. "page" and "parent" are page
hashes, or block ids if the trace has no token ids. Executing a plan needs only "page".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.formats.errors import FormatError, UsageError
from hicachectl.formats.forms import decode
from hicachectl.formats.objects import PAGE_DIGITS
from hicachectl.formats.spec import page_bytes
from hicachectl.prewarming.value.reuse import reuse_values
from hicachectl.prewarming.value.traits import Uses, walk_uses
from hicachectl.requests.chains import hex_pages, requests_of_pages
from hicachectl.requests.reading import request_lines

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import numpy.typing as npt

    from hicachectl.formats.arrays import IntArray
    from hicachectl.formats.profile import Profile
    from hicachectl.requests.chains import Hashing, Requests

    Rank = Callable[[Requests], IntArray]


@dataclass(frozen=True, eq=False, slots=True)
class RankedBlocks:
    """Blocks to warm, best first. Every block comes after the blocks of its prefix.

    requests: requests that use the blocks.
    order: [ranked] int64, indices into the names of the requests.
    values: [ranked] float64, largest first. A value is the chance that a request uses the block,
        averaged over horizons (`value.reuse`). If no block was used twice, a value is the time of
        the last use. If times are unknown, a value is the number in `uses`.
    uses: [ranked] int32, number of requests that used the block.
    last_seen: [ranked] float64, time of the last use; None if unknown.
    """

    requests: Requests
    order: IntArray
    values: npt.NDArray[np.float64]
    uses: npt.NDArray[np.int32]
    last_seen: npt.NDArray[np.float64] | None

    def __len__(self) -> int:
        return len(self.order)


def rank_blocks(requests: Requests, *, budget: int | None = None) -> RankedBlocks:
    """Order all blocks of requests by the savings expected from warming them.

    The estimate is for the time of the last request plus the mean interval between requests. Blocks
    of equal value keep the order of their first use, one chain after another, so that each prefix
    is copied with the states at its end.
    budget: largest number of blocks to return; None for all.
    """
    requests = requests.in_time_order()
    # This raises for a block with two prefixes. A chain could have such a block twice, but
    # `walk_uses` needs chains of distinct blocks.
    forest = requests.forest
    uses = walk_uses(requests)
    closed = forest.closed(_values(requests, uses))
    order = np.argsort(-closed, kind="stable")[:budget]
    seen = None if requests.times is None else requests.times[uses.last[order]]
    return RankedBlocks(requests, order, closed[order], uses.counts[order], seen)


def rank_by_value(requests: Requests) -> IntArray:
    """Return the rank of each distinct page of requests. 0 is best."""
    ranked = rank_blocks(requests)
    rank = np.empty(len(ranked), dtype=np.int64)
    rank[ranked.order] = np.arange(len(ranked))
    return rank


def places_among(pages: pa.StringArray, among: pa.StringArray) -> IntArray:
    """Return the index of each page in `among`; -1 if it is not there."""
    found = pc.index_in(pages, value_set=among.cast(pages.type))
    places: IntArray = found.fill_null(-1).to_numpy().astype(np.int64)
    return places


def rank_by_plan(pages: pa.StringArray) -> Rank:
    """Return a function that ranks the pages of requests in the order of a plan.

    pages: pages of the plan, best first.
    """

    def rank(requests: Requests) -> IntArray:
        places = places_among(requests.page_names, pages)
        ranks = np.empty(len(places), dtype=np.int64)
        ranks[np.argsort(places, kind="stable")] = np.arange(len(places))
        return ranks

    return rank


def pages_within(budget: int, profile: Profile | None, *, hashed: bool) -> int:
    """Return how many pages of a file store fit into a budget.

    A page counts with the objects of all ranks, but without trailing pools.
    budget: number of bytes.
    hashed: whether the requests have page hashes, not block ids.
    Raises UsageError if the size of a page is unknown.
    """
    if not hashed:
        raise UsageError("--budget: block ids have no size; give --budget-pages")
    if profile is None:
        raise UsageError("--budget: page sizes need a profile; give --profile, or --budget-pages")
    page = page_bytes(profile)
    if not page:
        raise UsageError("--budget: the profile does not give a page's bytes; give --budget-pages")
    return budget // page


def prefixes_worth_asking(
    requests: Requests, usable_pages: IntArray, rank: Rank, *, longest_only: bool
) -> IntArray:
    """Return the index of one request for each distinct usable prefix, best first.

    usable_pages: [requests] number of usable pages of each request.
    longest_only: whether to leave out prefixes that another usable prefix continues.
    """
    usable = requests.cut(usable_pages)
    asked = np.flatnonzero(usable_pages)
    last = usable.blocks[usable.offsets[asked + 1] - 1]
    if longest_only:
        parents = usable.forest.parents
        continued = np.zeros(len(parents), dtype=np.bool_)
        continued[parents[parents >= 0]] = True
        asked, last = asked[~continued[last]], last[~continued[last]]
    _, first = np.unique(last, return_index=True)
    chosen: IntArray = asked[first][np.argsort(rank(usable)[last[first]], kind="stable")]
    return chosen


def _values(requests: Requests, uses: Uses) -> npt.NDArray[np.float64]:
    times = requests.times
    if times is None or not len(requests):
        return uses.counts.astype(np.float64)
    if times[-1] <= times[0]:  # all times are equal, so take the order of the requests as time
        times = np.arange(len(requests), dtype=np.float64)
    now = float(times[-1] + (times[-1] - times[0]) / len(times))
    values = reuse_values(requests, times, now, uses)
    return values if values.any() else times[uses.last]


_ROWS_AT_ONCE = 1 << 18
_LONGEST_ROW = 1 << 16


@dataclass(frozen=True, eq=False, slots=True)
class PlannedPages:
    """Pages of a plan file.

    source: path of the file, for messages.
    pages: distinct page hashes, best first.
    parents: for each page, the index of the previous page of its chain; -1 if the file lacks it.
    """

    source: str
    pages: pa.StringArray
    parents: list[int]

    def requests(self, hashing: Hashing) -> Requests:
        """Return a request for each chain of the plan.

        Each page that is not the parent of another page ends a chain.
        """
        pages, inner = self.pages.to_pylist(), set(self.parents)
        ends = (number for number in range(len(pages)) if number not in inner)
        chains = ([pages[number] for number in self._path(end)] for end in ends)
        return requests_of_pages(chains, hashing, source=self.source)

    def _path(self, end: int) -> list[int]:
        path = []
        while end >= 0:
            path.append(end)
            end = self.parents[end]
        return path[::-1]


class PlanRow(TypedDict):
    """Row of a plan file."""

    page: str
    parent: str | None
    depth: int
    value: float
    requests: int
    last_seen: float | None


class _Row(msgspec.Struct):
    page: str | int
    parent: str | int | None = None


def plan_rows(ranked: RankedBlocks) -> Iterator[pa.Table]:
    """Yield the rows of a plan file in tables of at most _ROWS_AT_ONCE rows."""
    requests, forest = ranked.requests, ranked.requests.forest
    for start in range(0, len(ranked), _ROWS_AT_ONCE):
        piece = slice(start, start + _ROWS_AT_ONCE)
        order = ranked.order[piece]
        seen = None if ranked.last_seen is None else ranked.last_seen[piece]
        yield pa.table(
            {
                "page": _names(requests, order),
                "parent": _names(requests, forest.parents[order]),
                "depth": pa.array(forest.depths[order]),
                "value": pa.array(ranked.values[piece].astype(np.float32)),
                "requests": pa.array(ranked.uses[piece]),
                "last_seen": pa.nulls(len(order)) if seen is None else _times(seen),
            }
        )


def read_plan(path: Path) -> PlannedPages:
    """Read the pages of an executable plan.

    A parent without a row was in the destination when the plan was made.
    Raises FormatError with the number of the line for any of these faults:

    - The line is no row of a plan.
    - It has a block id.
    - It repeats the page of an earlier line.
    - An earlier line names its page as a parent.

    Raises UsageError if the file cannot be read or has no pages.
    """
    position: dict[str, int] = {}
    outside: set[str] = set()
    parents: list[int] = []
    for number, _, line in request_lines(path, _LONGEST_ROW, what="pages"):
        try:
            parents.append(_take(line, position, outside))
        except FormatError as error:
            raise FormatError(f"{path}: line {number}: {error}") from error
    return PlannedPages(str(path), pa.array(list(position), pa.string()), parents)


_ROW = msgspec.json.Decoder(_Row)


def _take(line: bytes, position: dict[str, int], outside: set[str]) -> int:
    """Add the page of a row. Return the index of its parent; -1 if no earlier row has the parent.

    line: text of the row.
    position: index of each page so far, to which the page is added.
    outside: parents that no row has listed so far, to which the parent may be added.
    """
    row = decode(_ROW, line)
    if isinstance(row.page, int):
        raise FormatError(
            f"page: {row.page} is a block id, and block ids do not give the keys to copy; plan a "
            "trace of token ids"
        )
    if len(row.page) != PAGE_DIGITS or row.page.strip("0123456789abcdef"):
        raise FormatError(f"page: {row.page!a:.80} is not a page hash (64 hexadecimal digits)")
    if row.page in position:
        raise FormatError(f"page {row.page} occurs twice; remove one of its rows")
    if row.page in outside:
        raise FormatError(f"page {row.page} is the parent of an earlier page; list parents first")
    position[row.page] = len(position)
    if row.parent is None:
        return -1
    parent = str(row.parent)
    if parent not in position:
        outside.add(parent)
    return position.get(parent, -1)


def _names(requests: Requests, blocks: npt.NDArray[np.integer]) -> pa.Array:
    """Return the block ids or page hashes of blocks; null for block -1."""
    none = blocks < 0
    names = requests.names[np.where(none, 0, blocks)]
    if not requests.hashed:
        return pa.array(names, mask=none)
    return pc.if_else(pa.array(~none), hex_pages(names.astype(np.uint8, copy=False)), None)


def _times(seen: npt.NDArray[np.float64]) -> pa.Array:
    whole = np.abs(seen) < 2**53
    if whole.all() and (seen == np.trunc(seen)).all():
        return pa.array(seen.astype(np.int64))
    return pa.array(seen)
