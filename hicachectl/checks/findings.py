"""Tables of findings. Each row is one problem, and can name the page group that has it."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.checks.codes import SEVERITIES
from hicachectl.checks.registry import READING, Need, Scope, checks, code_named, severity_of
from hicachectl.pages.deployments import UNRESOLVED
from hicachectl.pages.listing import object_rows
from hicachectl.text.jsontext import schema_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from hicachectl.checks.registry import CheckInput
    from hicachectl.formats.arrays import IntArray
    from hicachectl.pages.groups import PageGroups
    from hicachectl.pages.inventory import Inventory


class Finding(TypedDict):
    """Row of a finding in a document."""

    code: str
    severity: str
    page: str | None
    pool: str | None
    part: str | None
    key: str | None
    detail: str


SCHEMA = schema_of(Finding)
NO_NUMBER = -1
_NUMBERS = [pa.field("row", pa.int32()), pa.field("group", pa.int32())]
# Adds numbers of the object and of the page group that each finding is about. They are a row of
# this process's inventory and a group of its `PageGroups`. The number is NO_NUMBER if a finding is
# about no object, or about no group.
LOCATED_SCHEMA = pa.schema([*SCHEMA, *_NUMBERS])
# Adds to SCHEMA the deployment, as the label of its groups in `ls`, and the time of the last write
# of the object, group or deployment. The label is null if the finding is about no deployment. The
# time is null if it is not known.
PLACED_SCHEMA = pa.schema([*SCHEMA, ("deployment", pa.string()), ("written_ns", pa.int64())])
# Adds the name of the check.
NAMED_SCHEMA = PLACED_SCHEMA.append(pa.field("check", pa.string()))
RUN_SCHEMA = pa.schema([*NAMED_SCHEMA, *_NUMBERS])
_ROWS_AT_ONCE = 65_536


def findings(
    code: str,
    *,
    keys: pa.Array,
    pages: pa.Array | None = None,
    pools: pa.Array | None = None,
    parts: pa.Array | None = None,
    rows: IntArray | None = None,
    groups: IntArray | None = None,
    deployments: pa.Array | None = None,
    written_ns: pa.Array | None = None,
    detail: str | pa.Array | None = None,
    rule: str | None = None,
) -> pa.Table:
    """Return one finding of a code for each key, in the columns of RUN_SCHEMA.

    The name of the check is null.
    rows: [keys] objects that the findings are about. If `rows` and `groups` are None, `located`
        looks up the objects by their keys.
    groups: [keys] page groups that the findings are about. A finding about a missing object, or
        about all objects of a page, needs its group, because a repair acts only on groups.
    deployments: [keys] labels of deployments, for findings about a deployment.
    written_ns: [keys] times of the last write, for findings about a deployment.
    detail: one text for all findings, or [keys]; None for the detail of the code.
    rule: name of the code's rule that applies; None for the code's own severity.
    Raises ValueError if no registered check declares the code or the rule, even without keys.
    """
    severity = severity_of(code, rule)
    if detail is None:
        detail = code_named(code).detail
    texts = [
        pa.repeat(pa.scalar(column, pa.string()), len(keys))
        if column is None or isinstance(column, str)
        else column
        for column in (code, severity, pages, pools, parts, keys, detail, deployments)
    ]
    written_ns = pa.nulls(len(keys), pa.int64()) if written_ns is None else written_ns
    check = pa.nulls(len(keys), pa.string())
    numbers = [
        pa.repeat(pa.scalar(NO_NUMBER, pa.int32()), len(keys))
        if given is None
        else pa.array(given.astype(np.int32))
        for given in (rows, groups)
    ]
    return pa.table([*texts, written_ns, check, *numbers], schema=RUN_SCHEMA)


def object_findings(
    inventory: Inventory,
    rows: IntArray,
    code: str,
    detail: str | pa.Array | None = None,
    *,
    rule: str | None = None,
) -> pa.Table:
    """Return one finding of a code for each row, as `findings` does.

    detail: one text for all findings, or [rows]; None for the detail of the code.
    """
    objects = object_rows(inventory, rows)
    return findings(
        code,
        keys=objects.column("key").combine_chunks(),
        pages=objects.column("page"),
        pools=pc.cast(objects.column("pool"), pa.string()),
        parts=pc.cast(objects.column("part"), pa.string()),
        rows=rows,
        detail=detail,
        rule=rule,
    )


def name_findings(found: Iterable[tuple[str, Iterable[pa.Table]]]) -> pa.Table:
    """Return findings with the names of their checks, in the columns of RUN_SCHEMA.

    found: name of each check, and its tables of `findings`.
    """
    named = [
        _with(one, check=pa.repeat(name, len(one))) for name, tables in found for one in tables
    ]
    return pa.concat_tables([RUN_SCHEMA.empty_table(), *named])


def combine_named(tables: Iterable[pa.Table], schema: pa.Schema = PLACED_SCHEMA) -> pa.Table:
    """Return the findings of all checks in one table, in the columns of a schema.

    Findings have the order of `combine`. If a check of page tables and the check READING report the
    same fault of an object, only the finding about the page table is kept, because its detail is
    more precise.
    tables: tables with the columns of the schema and the column `check`. They may be `packed`.
    """
    found = pa.concat_tables(packed(table.select([*schema.names, "check"])) for table in tables)
    names = found.column("check").cast(pa.string())
    of_tables = pa.array([check.name for check in checks() if Need.PAGE_TABLES in check.needs])
    earlier = found.filter(pc.is_in(names, value_set=of_tables))
    if len(earlier):
        repeated = pc.is_in(_codes_and_keys(found), value_set=_codes_and_keys(earlier).drop_null())
        found = found.filter(pc.invert(pc.and_(pc.equal(names, READING), repeated)))
    return combine([found], schema)


def _codes_and_keys(found: pa.Table) -> pa.Array:
    """Return the code and the key of each finding as one text; null if the finding has no key."""
    columns = (found.column(name).cast(pa.string()).combine_chunks() for name in ("code", "key"))
    return pc.binary_join_element_wise(*columns, " ")


def combine(tables: Iterable[pa.Table], schema: pa.Schema = SCHEMA) -> pa.Table:
    """Return all findings in one table, worst severity first, then by code, page and key.

    tables: tables with the columns of the schema. They may be `packed`.
    """
    given = (packed(table.select(schema.names)) for table in tables)
    table = pa.concat_tables([packed(schema.empty_table()), *given])
    codes = pc.cast(table.column("code"), pa.string())
    names = pa.array(sorted(codes.unique().to_pylist()), pa.string())
    of_code = pc.index_in(codes, value_set=names).to_numpy()
    kinds = pa.array(of_code - severity_ranks(table) * len(names))
    ordering = table.select(["page", "key"]).append_column("kind", kinds)
    order = pc.sort_indices(ordering, [(name, "ascending") for name in ("kind", "page", "key")])
    del ordering, codes, of_code, kinds
    slices = (order.slice(at, _ROWS_AT_ONCE) for at in range(0, len(order), _ROWS_AT_ONCE))
    return pa.concat_tables(
        [schema.empty_table(), *(_taken(table, rows).cast(schema) for rows in slices)]
    )


def packed(table: pa.Table) -> pa.Table:
    """Return a table of findings that stores equal texts of a column once, except pages and keys.

    A finding about a missing object then takes 180 bytes, not 290. Only `combine` and
    `combine_named` take such tables.
    """
    for index, name in enumerate(table.column_names):
        column = table.column(index)
        if name not in ("page", "key") and pa.types.is_string(column.type):
            table = table.set_column(index, name, column.dictionary_encode())
    return table


def _taken(table: pa.Table, rows: pa.Array) -> pa.Table:
    """Return some rows of a table.

    `take` joins all chunks of a column. So it gets only the chunks from the first to the last of
    the rows, which are few if the rows are neighbours.
    """
    first, last = pc.min_max(rows).values() if len(rows) else (pa.scalar(0), pa.scalar(-1))
    near = table.slice(first.as_py(), last.as_py() - first.as_py() + 1)
    return near.take(pc.subtract(rows, first))


def severity_ranks(table: pa.Table) -> npt.NDArray[np.int64]:
    """Return the index in `SEVERITIES` of each finding's severity, [n]."""
    severities = pc.cast(table.column("severity"), pa.string())
    ranks: npt.NDArray[np.int64] = (
        pc.index_in(severities, value_set=pa.array(SEVERITIES)).to_numpy().astype(np.int64)
    )
    return ranks


def listing_findings(given: CheckInput, unmet: Collection[Need] = ()) -> Iterator[pa.Table]:
    """Yield the findings of each registered check of objects that reads no bytes.

    unmet: needs that the store or the profile does not meet; checks with such a need do not run.
    """
    unmet = {*unmet, Need.BYTES}
    if "replicas" not in given.inventory.objects.column_names:
        unmet.add(Need.REPLICAS)
    for check in checks():
        if check.scope is Scope.OBJECTS and check.needs.isdisjoint(unmet):
            yield from check.find(given)


def located(found: pa.Table, groups: PageGroups) -> pa.Table:
    """Return findings with the row of each object and the group of each row.

    Findings that have only a key, such as findings about page tables, get the row of the key.
    Findings about ambiguous keys get no group, because no repair may remove such pages.
    found: table with the columns of LOCATED_SCHEMA.
    """
    rows, about = (found.column(name).to_numpy().copy() for name in ("row", "group"))
    has_key = found.column("key").is_valid().to_numpy()
    keyed = np.flatnonzero((rows == NO_NUMBER) & (about == NO_NUMBER) & has_key)
    if len(keyed):
        rows[keyed] = _rows_of(found.column("key").take(pa.array(keyed)), groups.inventory)
    of_object = rows != NO_NUMBER
    about[of_object] = groups.of_object[rows[of_object]]
    in_group = np.flatnonzero(about != NO_NUMBER)
    ambiguous = groups.deployment_ids[about[in_group]] == UNRESOLVED
    about[in_group[ambiguous]] = NO_NUMBER
    return _with(found, row=pa.array(rows), group=pa.array(about))


def _rows_of(keys: pa.ChunkedArray, inventory: Inventory) -> IntArray:
    """Return the row of each key; NO_NUMBER for a key that the listing lacks.

    keys: keys as text.
    """
    keys = pc.cast(keys, pa.binary()).combine_chunks()
    known = pc.is_in(inventory.objects.column("key"), value_set=keys)
    rows = np.flatnonzero(known.to_numpy())
    listed = inventory.take(rows, ["key"]).column("key").combine_chunks()
    places = pc.index_in(keys, value_set=listed).fill_null(NO_NUMBER).to_numpy()
    found: IntArray = np.append(rows, NO_NUMBER)[places]
    return found


def labelled(found: pa.Table, groups: PageGroups) -> pa.Table:
    """Return located findings with their columns `deployment` and `written_ns` filled.

    A finding about an object without a group has the time of the object.
    """
    if not len(found):
        return found
    rows, about = (found.column(name).to_numpy() for name in ("row", "group"))
    lone = np.flatnonzero((about == NO_NUMBER) & (rows != NO_NUMBER))
    grouped = np.flatnonzero(about != NO_NUMBER)
    label_ids = np.zeros(len(found), dtype=np.int64)
    label_ids[grouped] = groups.label_ids[about[grouped]]
    written_ns = np.zeros(len(found), dtype=np.int64)
    written_ns[grouped] = groups.newest_ns[about[grouped]]
    times = groups.inventory.take(rows[lone], ["mtime_ns"]).column("mtime_ns")
    written_ns[lone] = times.fill_null(0).to_numpy()
    labels = pa.array(groups.labels, pa.string())
    return _with(
        found,
        deployment=labels.take(pa.array(label_ids, mask=about == NO_NUMBER)),
        written_ns=pa.array(written_ns, mask=written_ns == 0),
    )


def _with(found: pa.Table, **columns: pa.Array) -> pa.Table:
    """Return findings with other values in some columns."""
    for name, values in columns.items():
        found = found.set_column(found.schema.get_field_index(name), name, values)
    return found
