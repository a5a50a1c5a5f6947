"""Plan files: JSON lines, best first.

A row is {"page", "parent", "depth", "value", "requests", "last_seen"}. "parent" is the previous
page of the chain, or null. Both are page hashes, or block ids if the trace has no token ids.
Executing a plan needs only "page".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.formats.errors import FormatError
from hicachectl.formats.forms import decode
from hicachectl.formats.objects import PAGE_DIGITS
from hicachectl.requests.chains import hex_pages, requests_of_pages
from hicachectl.requests.reading import request_lines

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import numpy.typing as npt

    from hicachectl.prewarming.ranking import RankedBlocks
    from hicachectl.requests.chains import Hashing, Requests

_ROWS_AT_ONCE = 1 << 18
_LONGEST_ROW = 1 << 16


@dataclass(frozen=True, eq=False, slots=True)
class PlannedPages:
    """Pages of a plan file.

    source: the file, for messages.
    pages: distinct hashes, best first.
    parents: index of the previous page of each page's chain; -1 if none is in the file.
    """

    source: str
    pages: pa.StringArray
    parents: list[int]

    def requests(self, hashing: Hashing) -> Requests:
        """Return a request for each page that is no parent: its pages, from the first known one."""
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


class _Row(msgspec.Struct):
    page: str | int
    parent: str | int | None = None


def plan_rows(ranked: RankedBlocks) -> Iterator[pa.Table]:
    """Yield the rows of a plan file, some at a time."""
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

    A parent without a row was in the destination when the plan was made. Raises FormatError naming
    a line that is not a plan's row, has a block id, repeats a page, or has an earlier page's
    parent; UsageError if the file cannot be read or has no pages.
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
    """Add a row's page; return the index of its parent, -1 if not in the file.

    outside: parents that no row has listed so far.
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
    """Return ids or hex hashes; null for -1."""
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
