"""Lines of the `table` format."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.text.terminal import UNUSUAL_PATTERN, escape_controls
from hicachectl.text.units import human_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_GAP = "  "
# Columns with cells that may be shortened, and the least width of each column. A cell loses its
# middle, or its end if the column has sentences.
_SHORTENED = {
    "KEY": 24, "OBJECT": 16, "MODEL": 12, "POOLS": 12, "DEPLOYMENT": 16, "STORE": 16, "RUN": 16,
    "TAG": 8, "RANKS": 8, "FOUND": 12, "DETAIL": 24, "MEANING": 24, "STOPPED BY": 16,
}  # fmt: skip
_SENTENCES = ("DETAIL", "MEANING", "STOPPED BY", "POOLS")
# Columns that a narrow terminal leaves out, the least useful first.
_LEAST_USEFUL = (
    "TRAILER DIGEST", "IDENTITY", "DIGEST", "LAYOUT", "TAG", "OLDEST", "REMOVED", "RANKS", "PART",
    "OBJECTS", "NEWEST", "FOUND", "SIZES", "AGE", "POOLS", "DETAIL", "STORE", "KV PAGES",
    "USABLE TOKENS", "USABLE PAGES",
)  # fmt: skip

_STYLES = {"error": "31", "warning": "33", "orphan": "33", "partial": "33", "whole": "32"}


class Screen(NamedTuple):
    """The screen that shows a table.

    colour: whether to colour cells.
    width: characters in a line; None if the output is no terminal, so that lines have no limit.
    """

    colour: bool = False
    width: int | None = None

    def cut(self, line: str) -> str:
        """Return a line cut to the width of the screen, so that it does not wrap."""
        if self.width is None or len(line) <= self.width:
            return line
        return line[: self.width - 1] + "…"


NO_SCREEN = Screen()


def table_lines(rows: pa.Table, screen: Screen) -> Iterator[str]:
    r"""Yield the lines of a table of text columns. A leading ">" in a name aligns the column right.

    Characters that a terminal would interpret or hide are escaped (`escape_controls`). On a
    terminal, long cells are shortened. If lines would still wrap, the least useful columns are left
    out.
    """
    columns = [
        _Column.of(name, printable(pc.fill_null(column.combine_chunks(), "-")))
        for name, column in zip(rows.column_names, rows.columns, strict=True)
    ]
    if screen.width is not None:
        columns = _fitted(columns, screen.width)
    padded = []
    for column in columns:
        pad = pc.utf8_lpad if column.right else pc.utf8_rpad
        text = pad(column.cells, column.width)
        padded.append(_coloured(text, column.cells) if screen.colour else text)
    heads = [c.name.rjust(c.width) if c.right else c.name.ljust(c.width) for c in columns]
    yield screen.cut(_GAP.join(heads).rstrip())
    for line in pc.binary_join_element_wise(*padded, _GAP).to_pylist():
        yield line.rstrip()


@dataclass(frozen=True, slots=True)
class _Column:
    name: str
    right: bool
    cells: pa.StringArray
    width: int

    @classmethod
    def of(cls, name: str, cells: pa.StringArray) -> _Column:
        head = name.lstrip(">").upper()
        longest = pc.max(pc.utf8_length(cells)).as_py() or 0
        return cls(head, name.startswith(">"), cells, max(len(head), longest))

    @property
    def least(self) -> int:
        """Least width to which the cells can be shortened."""
        return min(self.width, max(len(self.name), _SHORTENED.get(self.name, self.width)))

    def narrowed(self, width: int) -> _Column:
        """Return the column with its long cells shortened. Keys and names keep both ends."""
        if width >= self.width:
            return self
        tail = 0 if self.name in _SENTENCES else (width - 1) // 2
        parts = [pc.utf8_slice_codeunits(self.cells, 0, width - 1 - tail), "…"]
        if tail:
            parts.append(pc.utf8_slice_codeunits(self.cells, -tail))
        short = pc.binary_join_element_wise(*parts, "")
        long = pc.greater(pc.utf8_length(self.cells), width)
        return replace(self, cells=pc.if_else(long, short, self.cells), width=width)


def _fitted(columns: list[_Column], width: int) -> list[_Column]:
    """Return the columns for which a line of the terminal has room, with shortened cells."""
    for name in (None, *_LEAST_USEFUL):
        if name is not None and len(columns) > 1:
            columns = [column for column in columns if column.name != name]
        if _total([column.least for column in columns]) <= width:
            break
    widths = [column.width for column in columns]
    while (excess := _total(widths) - width) > 0:
        spare = [w - column.least for w, column in zip(widths, columns, strict=True)]
        widest = max(range(len(widths)), key=lambda at: (spare[at] > 0, widths[at]))
        if spare[widest] <= 0:
            return _cut(columns, widths, width)
        # Narrow the widest column to the width of the next widest in one step, because a cell may
        # have thousands of characters.
        others = [w for at, w in enumerate(widths) if at != widest and spare[at] > 0]
        step = widths[widest] - max([w for w in others if w < widths[widest]], default=0)
        widths[widest] -= min(spare[widest], excess, max(step, 1))
    return [column.narrowed(w) for column, w in zip(columns, widths, strict=True)]


def _cut(columns: list[_Column], widths: list[int], width: int) -> list[_Column]:
    """Return the first columns that fit at their least widths.

    The first column is always returned. If it alone is too wide, it is cut to the width.
    """
    kept: list[_Column] = []
    for column, least in zip(columns, widths, strict=True):
        if kept and _total([*(c.width for c in kept), least]) > width:
            break
        kept.append(column.narrowed(min(least, width)))
    return kept


def _total(widths: list[int]) -> int:
    return sum(widths) + len(_GAP) * (len(widths) - 1)


def printable(cells: pa.StringArray) -> pa.StringArray:
    """Escape the characters of texts that a terminal would interpret or hide."""
    bad = pc.match_substring_regex(cells, UNUSUAL_PATTERN)
    if not pc.any(bad).as_py():
        return cells
    escaped = pa.array(map(escape_controls, cells.filter(bad).to_pylist()), cells.type)
    return pc.replace_with_mask(cells, bad, escaped)


def _coloured(padded: pa.StringArray, plain: pa.StringArray) -> pa.StringArray:
    for word, style in _STYLES.items():
        painted = pc.binary_join_element_wise(f"\x1b[{style}m", padded, "\x1b[0m", "")
        padded = pc.if_else(pc.equal(plain, word), painted, padded)
    return padded


def human_sizes(nbytes: pa.Array) -> pa.Array:
    """Return `human_size` for each value of a column."""
    return pc.fill_null(human_column(nbytes, human_size), human_size(None))


def human_column(values: pa.Array, text: Callable[[Any], str]) -> pa.StringArray:
    """Return the text of each value. Call `text` once for each distinct value. Nulls stay null."""
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    distinct = pc.dictionary_encode(values)
    return pa.array([text(v) for v in distinct.dictionary.to_pylist()], pa.string()).take(
        distinct.indices
    )
