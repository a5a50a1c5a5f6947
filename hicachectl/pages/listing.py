"""Rows of `ls` as Arrow tables: objects and pages."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.backends.base import SCAN_FIELDS
from hicachectl.formats.errors import UsageError
from hicachectl.formats.keys.columns import coordinate_columns
from hicachectl.formats.objects import ANCHOR, AXES, Names
from hicachectl.pages.deployments import UNRESOLVED
from hicachectl.pages.groups import UNKNOWN_BYTES
from hicachectl.text.vocabulary import STATES

if TYPE_CHECKING:
    from hicachectl.pages.groups import PageGroups
    from hicachectl.pages.inventory import Inventory

_COUNTS = pa.struct([("present", pa.int32()), ("expected", pa.int32())])

Rows = npt.NDArray[np.int64]


class PoolCounts(TypedDict):
    """Objects of a pool of a group."""

    present: int
    expected: int


class Group(TypedDict):
    """Row of a page group of a known page."""

    group: str
    model: str | None
    tag: str | None
    tp_size: int | None
    pp_size: int | None
    cp_size: int | None
    dcp_size: int | None
    state: str
    nbytes: int | None
    mtime: float | None
    pools: dict[str, PoolCounts]
    missing: list[str]


class _Paged(TypedDict):
    page: str


class PageRow(_Paged, Group):
    """Row of `ls`."""


class ObjectRow(TypedDict):
    """Row of `ls --objects`."""

    key: str
    page: str | None
    model: str | None
    tag: str | None
    pool: str | None
    part: str | None
    tp_rank: int | None
    tp_size: int | None
    pp_rank: int | None
    pp_size: int | None
    cp_rank: int | None
    cp_size: int | None
    dcp_rank: int | None
    dcp_size: int | None
    layers: str | None
    heads: str | None
    nbytes: int | None
    mtime: float | None
    replicas: int | None
    offset: int | None


class PagesDocument(TypedDict):
    """Document of `ls`."""

    pages: list[PageRow]


class ObjectsDocument(TypedDict):
    """Document of `ls --objects`."""

    objects: list[ObjectRow]


def key_text(keys: pa.Array) -> pa.StringArray:
    r"""Return keys as text; bytes that are not UTF-8 are written \xNN."""
    try:
        return pc.cast(keys, pa.string())
    except pa.ArrowInvalid:
        texts = [key.decode("utf-8", "backslashreplace") for key in keys.to_pylist()]
        return pa.array(texts, pa.string())


def seconds(times_ns: pa.Array) -> pa.Array:
    """Return Unix nanoseconds as float seconds."""
    return pc.divide(pc.cast(times_ns, pa.float64(), safe=False), 1e9)


def object_rows(
    inventory: Inventory, rows: Rows | None = None, *, pool: str | None = None
) -> pa.Table:
    """Return a row per object in the columns of `ls --objects`, for some rows or one pool."""
    if pool:
        rows = np.flatnonzero(inventory.of_pool(pool))
    objects = inventory.objects if rows is None else inventory.take(rows)
    ids = inventory.affix_ids if rows is None else inventory.affix_ids[rows]
    columns = {
        "key": pa.chunked_array([key_text(c) for c in objects.column("key").chunks], pa.string()),
        "page": inventory.pages(rows),
        **coordinate_columns(inventory.table.resolved, ids),
        "nbytes": objects.column("nbytes"),
        "mtime": seconds(objects.column("mtime_ns")),
        "replicas": _column(objects, "replicas"),
        "offset": _column(objects, "locator"),
    }
    return pa.table(columns)


def _column(objects: pa.Table, name: str) -> pa.Array | pa.ChunkedArray:
    if name in objects.column_names:
        return objects.column(name)
    return pa.nulls(len(objects), SCAN_FIELDS[name].type)


def in_order(rows: pa.Table, column: str, *, asked: str) -> pa.Table:
    """Return rows sorted by a column; with "-" before its name, in descending order.

    asked: the column as the operator named it. Nulls come last; equal rows keep their order. Raises
    UsageError if the store keeps no times and the column has times.
    """
    name = column.removeprefix("-")
    values = rows.column(name)
    if name.endswith("mtime") and len(rows) and values.null_count == len(rows):
        raise UsageError(
            f"--sort-by {asked}: the store keeps no timestamps; sort by another column"
        )
    if pa.types.is_dictionary(values.type):
        values = values.cast(values.type.value_type)
    order = "descending" if column.startswith("-") else "ascending"
    by = pa.table({"values": values})
    return rows.take(pc.sort_indices(by, sort_keys=[("values", order)]))


def page_rows(groups: PageGroups) -> pa.Table:
    """Return a row per page group in the columns of `ls`."""
    ids = pa.array(groups.deployment_ids, mask=groups.deployment_ids == UNRESOLVED)
    stated = [deployment.names.columns for deployment in groups.deployments]
    shards = [deployment.shard for deployment in groups.deployments]
    newest = pa.array(groups.newest_ns, mask=np.full(len(groups), not groups.has_times))
    return pa.table(
        {
            "page": groups.pages,
            "group": pa.array(groups.labels, pa.string()).take(pa.array(groups.label_ids)),
            **{
                name: pa.array([names[name] for names in stated], pa.string()).take(ids)
                for name in Names._fields
            },
            **{
                name: pa.array([getattr(shard, name) for shard in shards], pa.int32()).take(ids)
                for name in (f"{axis}_size" for axis in AXES)
            },
            "state": pa.array(STATES).take(pa.array(groups.states)),
            "nbytes": pa.array(groups.nbytes, mask=groups.nbytes == UNKNOWN_BYTES),
            "mtime": seconds(newest),
            "pools": _pool_counts(groups),
            "missing": _missing_keys(groups),
        }
    )


def _pool_counts(groups: PageGroups) -> pa.StructArray:
    """Return {pool: {present, expected}} of each group; null for pools of other deployments."""
    stored = {spec.pool for deployment in groups.deployments for spec in deployment.specs}
    pools = sorted(stored or {ANCHOR}, key=_pool_order)
    counts = {pool: np.zeros((2, len(groups)), dtype=np.int32) for pool in pools}
    lacks = {pool: np.ones(len(groups), dtype=np.bool_) for pool in pools}
    for number, table in enumerate(groups.tables):
        span = groups.span(number)
        for block in table.blocks:
            pool = block.spec.pool
            present, expected = counts[pool][:, span]
            present[block.groups] += block.counts
            expected[block.groups if block.spec.trailing else slice(None)] += (
                len(block.columns) if block.spec.listed else 0
            )
            lacks[pool][span] = False
    fields = [
        pa.StructArray.from_arrays(
            list(map(pa.array, counts[pool])), fields=list(_COUNTS), mask=pa.array(lacks[pool])
        )
        for pool in pools
    ]
    return pa.StructArray.from_arrays(fields, names=pools)


def _pool_order(pool: str) -> tuple[bool, str]:
    return pool != ANCHOR, pool


def _missing_keys(groups: PageGroups) -> pa.ListArray:
    found = list(groups.missing())
    keys = pa.concat_arrays([groups.keys_of(m) for m in found] or [pa.array([], pa.binary())])
    of_group = np.concatenate([m.groups for m in found] or [np.zeros(0, np.int64)])
    order = np.argsort(of_group, kind="stable")
    offsets = np.searchsorted(of_group[order], np.arange(len(groups) + 1))
    texts = key_text(keys.take(pa.array(order)))
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), texts)
