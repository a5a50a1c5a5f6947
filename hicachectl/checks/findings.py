"""Tables of findings: one row for each problem."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.checks.codes import SEVERITIES
from hicachectl.checks.registry import READING, Need, checks, severity_of
from hicachectl.pages.listing import Rows, object_rows

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from hicachectl.pages.inventory import Inventory

SCHEMA = pa.schema(
    [(name, pa.string()) for name in ("code", "severity", "page", "pool", "part", "key", "detail")]
)
_ROWS_AT_ONCE = 65_536
# With the group of each finding, as `ls` shows it, and its last write, in Unix seconds. Null if
# the finding is about no group, the store keeps no times, or ages were not asked for.
PLACED_SCHEMA = SCHEMA.append(pa.field("group", pa.string())).append(
    pa.field("written", pa.int64())
)
NAMED_SCHEMA = PLACED_SCHEMA.append(pa.field("check", pa.string()))  # with the name of the check


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


def deployment_findings(
    code: str,
    *,
    groups: list[str],
    written: list[int | None],
    pools: list[str | None] | None = None,
    parts: list[str | None] | None = None,
    detail: list[str],
) -> pa.Table:
    """Return one finding of a code for each deployment: PLACED_SCHEMA.

    groups: labels, as `ls` shows them. written: last writes, in Unix seconds.
    Raises ValueError as `findings` does.
    """
    none = [None] * len(groups)
    table = findings(
        code,
        keys=pa.nulls(len(groups), pa.string()),
        pools=pa.array(pools or none, pa.string()),
        parts=pa.array(parts or none, pa.string()),
        detail=pa.array(detail, pa.string()),
    )
    placed = pa.array(groups, pa.string()), pa.array(written, pa.int64())
    return pa.table([*table.columns, *placed], schema=PLACED_SCHEMA)


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


def name_findings(
    found: Iterable[tuple[str, Iterable[pa.Table]]], *, pool: str | None = None
) -> pa.Table:
    """Return findings with the names of their checks: NAMED_SCHEMA.

    found: tables of SCHEMA or PLACED_SCHEMA, by check. pool: only findings about this pool.
    """
    tables = [
        _with_place(table).append_column("check", pa.repeat(pa.scalar(name), len(table)))
        for name, tables in found
        for table in tables
    ]
    table = pa.concat_tables([NAMED_SCHEMA.empty_table(), *tables])
    return table.filter(pc.equal(table.column("pool"), pool)) if pool else table


def _with_place(table: pa.Table) -> pa.Table:
    """Return findings in PLACED_SCHEMA."""
    for field in PLACED_SCHEMA:
        if field.name not in table.column_names:
            table = table.append_column(field, pa.nulls(len(table), field.type))
    return table


def combine_named(tables: Iterable[pa.Table]) -> pa.Table:
    """Return the findings of all checks, from tables of NAMED_SCHEMA: PLACED_SCHEMA.

    tables: may be `packed`. The order is that of `combine`.
    If a check of page tables and the reading report the same fault of an object, only the check's
    finding is kept: its detail is more precise.
    """
    found = pa.concat_tables(map(packed, tables))
    names = found.column("check").cast(pa.string())
    of_tables = pa.array([check.name for check in checks() if Need.PAGE_TABLES in check.needs])
    earlier = found.filter(pc.is_in(names, value_set=of_tables))
    if len(earlier):
        repeated = pc.is_in(_codes_and_keys(found), value_set=_codes_and_keys(earlier).drop_null())
        found = found.filter(pc.invert(pc.and_(pc.equal(names, READING), repeated)))
    return combine([found.drop_columns(["check"])], PLACED_SCHEMA)


def _codes_and_keys(found: pa.Table) -> pa.Array:
    """Return the code and the key of each finding as one text; null without a key."""
    columns = (found.column(name).cast(pa.string()).combine_chunks() for name in ("code", "key"))
    return pc.binary_join_element_wise(*columns, " ")


def combine(tables: Iterable[pa.Table], schema: pa.Schema = SCHEMA) -> pa.Table:
    """Return all findings in one table, worst severity first, then by code, page and key.

    tables: of the schema, SCHEMA or PLACED_SCHEMA, or such tables `packed`.
    """
    table = pa.concat_tables([packed(schema.empty_table()), *map(packed, tables)])
    severities, codes = (table.column(name).unify_dictionaries() for name in ("severity", "code"))
    names = sorted(_words(codes))
    ranks = _numbers(severities, {name: -rank for rank, name in enumerate(SEVERITIES)})
    of_code = _numbers(codes, {name: number for number, name in enumerate(names)})
    ordering = table.select(["page", "key"]).append_column(
        "kind", pa.array(ranks * len(names) + of_code)
    )
    order = pc.sort_indices(ordering, [(name, "ascending") for name in ("kind", "page", "key")])
    del ordering, ranks, of_code
    slices = (order.slice(at, _ROWS_AT_ONCE) for at in range(0, len(order), _ROWS_AT_ONCE))
    return pa.concat_tables([schema.empty_table(), *(_taken(table, rows) for rows in slices)])


def packed(table: pa.Table) -> pa.Table:
    """Return a table of findings that has each text of the repeated columns once.

    Of 290 bytes of a finding about a missing object, 180 are left. Only `combine` and
    `combine_named` take such tables.
    """
    for index, name in enumerate(table.column_names):
        column = table.column(index)
        if name not in ("page", "key") and pa.types.is_string(column.type):
            table = table.set_column(index, name, column.dictionary_encode())
    return table


def _taken(table: pa.Table, rows: pa.Array) -> pa.Table:
    """Return some rows, with plain columns.

    Rows that follow one another are of few parts: Arrow would join all chunks of a column.
    """
    first, last = pc.min_max(rows).values() if len(rows) else (pa.scalar(0), pa.scalar(-1))
    near = table.slice(first.as_py(), last.as_py() - first.as_py() + 1)
    return near.take(pc.subtract(rows, first)).cast(_plain(table.schema))


def _plain(schema: pa.Schema) -> pa.Schema:
    """Return a schema without dictionaries."""
    return pa.schema(
        [
            field.with_type(field.type.value_type) if pa.types.is_dictionary(field.type) else field
            for field in schema
        ]
    )


def severity_ranks(table: pa.Table) -> npt.NDArray[np.int64]:
    """Return the index in `SEVERITIES` of each finding's severity, [n]."""
    encoded = table.column("severity").dictionary_encode().unify_dictionaries()
    return _numbers(encoded, {name: rank for rank, name in enumerate(SEVERITIES)})


def _words(column: pa.ChunkedArray) -> list[str]:
    """Return the texts of a column with a unified dictionary."""
    texts: list[str] = column.chunk(0).dictionary.to_pylist() if column.num_chunks else []
    return texts


def _numbers(column: pa.ChunkedArray, numbers: Mapping[str, int]) -> npt.NDArray[np.int64]:
    """Return the number of each text of a column with a unified dictionary, [n]."""
    if not len(column):
        return np.zeros(0, dtype=np.int64)
    of_word = np.array([numbers[word] for word in _words(column)], dtype=np.int64)
    found: npt.NDArray[np.int64] = of_word[
        np.concatenate([chunk.indices.to_numpy() for chunk in column.chunks])
    ]
    return found
