"""Lines of the `table` format."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.text.terminal import UNUSUAL_PATTERN, escape_controls

if TYPE_CHECKING:
    from collections.abc import Iterator

_STYLES = {"error": "31", "warning": "33", "orphan": "33", "partial": "33", "whole": "32"}


def table_lines(rows: pa.Table, *, colour: bool) -> Iterator[str]:
    r"""Yield the lines of a table of text columns; a leading ">" in a name aligns right.

    Characters that a terminal would interpret or hide are escaped (`escape_controls`).
    """
    names = [name.lstrip(">").upper() for name in rows.column_names]
    cells = [printable(pc.fill_null(column.combine_chunks(), "-")) for column in rows.columns]
    widths = [
        max(len(name), pc.max(pc.utf8_length(cell)).as_py() or 0)
        for name, cell in zip(names, cells, strict=True)
    ]
    padded = []
    for column, width, cell in zip(rows.column_names, widths, cells, strict=True):
        pad = pc.utf8_lpad if column.startswith(">") else pc.utf8_rpad
        padded.append(_coloured(pad(cell, width), cell) if colour else pad(cell, width))
    heads = [
        name.rjust(width) if column.startswith(">") else name.ljust(width)
        for column, name, width in zip(rows.column_names, names, widths, strict=True)
    ]
    yield "  ".join(heads).rstrip()
    for line in pc.binary_join_element_wise(*padded, "  ").to_pylist():
        yield line.rstrip()


def wrapped(text: str, *, indent: int = 0, width: int = 80) -> list[str]:
    """Return a text in lines; all but the first are indented. Commands are never divided."""
    return textwrap.wrap(
        text,
        width,
        subsequent_indent=" " * indent,
        break_on_hyphens=False,
        break_long_words=False,
    )


def printable(cells: pa.StringArray) -> pa.StringArray:
    """Return texts with the characters escaped that a terminal would interpret or hide."""
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
