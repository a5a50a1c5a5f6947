"""Findings: one thing wrong each, as rows of an Arrow table."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.text.vocabulary import CODES, SEVERITIES

if TYPE_CHECKING:
    from collections.abc import Iterable

SCHEMA = pa.schema(
    [(name, pa.string()) for name in ("code", "severity", "page", "pool", "part", "key", "detail")]
)


def findings(
    code: str | pa.Array,
    severity: str | pa.Array,
    *,
    keys: pa.Array,
    pages: pa.Array | None = None,
    pools: pa.Array | None = None,
    parts: pa.Array | None = None,
    detail: str | pa.Array,
) -> pa.Table:
    """Make a table of findings, one for each key; plain strings hold for all of them.

    Raises ValueError on a code that `vocabulary.CODES` does not list.
    """
    codes = {code} if isinstance(code, str) else set(pc.unique(code).to_pylist())
    if undeclared := codes.difference(CODES):
        raise ValueError(f"{', '.join(sorted(undeclared))}: no such finding code")
    return _rows(code, severity, keys, pages, pools, parts, detail)


def reasons(code: str, *, pages: pa.Array, detail: str) -> pa.Table:
    """Make rows that say why pages are removed where no finding asked for it."""
    return _rows(code, "info", pa.nulls(len(pages), pa.string()), pages, None, None, detail)


def _rows(
    code: str | pa.Array,
    severity: str | pa.Array,
    keys: pa.Array,
    pages: pa.Array | None,
    pools: pa.Array | None,
    parts: pa.Array | None,
    detail: str | pa.Array,
) -> pa.Table:
    nothing = pa.nulls(len(keys), pa.string())

    def column(value: str | pa.Array | None) -> pa.Array:
        if value is None:
            return nothing
        return pa.repeat(value, len(keys)) if isinstance(value, str) else value

    columns = [code, severity, pages, pools, parts, keys, detail]
    return pa.table([column(value) for value in columns], schema=SCHEMA)


def without_repeats(found: pa.Table, earlier: Iterable[pa.Table]) -> pa.Table:
    """Leave out findings of which an earlier one, of one of some tables, has the code and key."""
    codes = pc.unique(found.column("code"))
    said = pa.concat_tables([SCHEMA.empty_table(), *earlier])
    said = said.filter(pc.is_in(said.column("code"), codes.drop_null()))
    keys = said.column("key").combine_chunks().drop_null()
    return found.filter(pc.invert(pc.is_in(found.column("key"), value_set=keys)))


def combine(tables: Iterable[pa.Table]) -> pa.Table:
    """Gather all findings in one table: the worst first, then by code, page and key."""
    table = pa.concat_tables([SCHEMA.empty_table(), *tables]).combine_chunks()
    ranked = table.append_column("rank", pa.array(-severity_ranks(table)))
    order = [(name, "ascending") for name in ("rank", "code", "page", "key")]
    return ranked.sort_by(order).drop_columns(["rank"])


def severity_ranks(table: pa.Table) -> npt.NDArray[np.int64]:
    """Return the place of each finding's severity in `SEVERITIES`."""
    encoded = table.column("severity").combine_chunks().dictionary_encode()
    ranks = np.array([SEVERITIES.index(s) for s in encoded.dictionary.to_pylist()], dtype=np.int64)
    return ranks[encoded.indices.to_numpy()] if len(table) else np.zeros(0, dtype=np.int64)
