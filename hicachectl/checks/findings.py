"""Tables of findings: one row for each problem."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.checks.registry import SEVERITIES, severity_of
from hicachectl.pages.listing import Rows, object_rows

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hicachectl.pages.inventory import Inventory

SCHEMA = pa.schema(
    [(name, pa.string()) for name in ("code", "severity", "page", "pool", "part", "key", "detail")]
)


def findings(
    code: str,
    *,
    keys: pa.Array,
    pages: pa.Array | None = None,
    pools: pa.Array | None = None,
    parts: pa.Array | None = None,
    detail: str | pa.Array,
    rule: str | None = None,
) -> pa.Table:
    """Return one finding of a code for each key.

    detail: one text for all, or [keys]. rule: the code's rule that applies. Raises ValueError if
    no registered check declares the code or the rule, even without keys.
    """
    severity = severity_of(code, rule)
    return _table(len(keys), code, severity, pages, pools, parts, keys, detail)


def object_findings(
    inventory: Inventory,
    rows: Rows,
    code: str,
    detail: str | pa.Array,
    *,
    rule: str | None = None,
) -> pa.Table:
    """Return one finding of a code for each row; detail: one text for all, or [rows].

    Raises ValueError as `findings` does.
    """
    objects = object_rows(inventory, rows)
    return findings(
        code,
        keys=objects.column("key").combine_chunks(),
        pages=objects.column("page"),
        pools=pc.cast(objects.column("pool"), pa.string()),
        parts=pc.cast(objects.column("part"), pa.string()),
        detail=detail,
        rule=rule,
    )


def reasons(code: str, *, pages: pa.Array, detail: str) -> pa.Table:
    """Return rows that give the reason for removing pages without a finding."""
    return _table(len(pages), code, "info", pages, None, None, None, detail)


def _table(count: int, *columns: str | pa.Array | None) -> pa.Table:
    """Return a table of SCHEMA; a column that is not an array is repeated for each row."""
    texts = [
        pa.repeat(pa.scalar(column, pa.string()), count)
        if column is None or isinstance(column, str)
        else column
        for column in columns
    ]
    return pa.table(texts, schema=SCHEMA)


def without_repeats(found: pa.Table, earlier: Iterable[pa.Table]) -> pa.Table:
    """Return the findings whose code and key no earlier finding has."""
    codes = pc.unique(found.column("code"))
    said = pa.concat_tables([SCHEMA.empty_table(), *earlier])
    said = said.filter(pc.is_in(said.column("code"), codes.drop_null()))
    keys = said.column("key").combine_chunks().drop_null()
    return found.filter(pc.invert(pc.is_in(found.column("key"), value_set=keys)))


def combine(tables: Iterable[pa.Table]) -> pa.Table:
    """Return all findings in one table, worst severity first, then by code, page and key."""
    table = pa.concat_tables([SCHEMA.empty_table(), *tables]).combine_chunks()
    ranked = table.append_column("rank", pa.array(-severity_ranks(table)))
    order = [(name, "ascending") for name in ("rank", "code", "page", "key")]
    return ranked.sort_by(order).drop_columns(["rank"])


def severity_ranks(table: pa.Table) -> npt.NDArray[np.int64]:
    """Return the index in `SEVERITIES` of each finding's severity, [n]."""
    encoded = table.column("severity").combine_chunks().dictionary_encode()
    ranks = np.array([SEVERITIES.index(s) for s in encoded.dictionary.to_pylist()], dtype=np.int64)
    return ranks[encoded.indices.to_numpy()] if len(table) else np.zeros(0, dtype=np.int64)
