"""The rows that `ls` prints, as Arrow tables: objects, pages, totals."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.backends.base import SCAN_FIELDS
from hicachectl.deployments import UNRESOLVED
from hicachectl.formats.keys.columns import coordinate_columns
from hicachectl.vocabulary import STATES

if TYPE_CHECKING:
    from hicachectl.groups import PageGroups
    from hicachectl.inventory import Inventory

_COUNTS = pa.struct([("present", pa.int32()), ("expected", pa.int32())])

Rows = npt.NDArray[np.int64]


def key_text(keys: pa.Array) -> pa.StringArray:
    r"""Keys as text; bytes that are not UTF-8 are written \xNN."""
    try:
        return pc.cast(keys, pa.string())
    except pa.ArrowInvalid:
        texts = [key.decode("utf-8", "backslashreplace") for key in keys.to_pylist()]
        return pa.array(texts, pa.string())


def seconds(times_ns: pa.Array) -> pa.Array:
    """Unix nanoseconds as float seconds."""
    return pc.divide(pc.cast(times_ns, pa.float64(), safe=False), 1e9)


def object_rows(inventory: Inventory, rows: Rows | None = None, *, pool: str = "") -> pa.Table:
    """Make a row per object, in the columns of `ls --objects`; `rows` and `pool` pick some."""
    objects = inventory.objects
    ids = inventory.affix_ids
    if pool:
        rows = np.flatnonzero(inventory.of_pool(pool))
    if rows is not None:
        objects = objects.take(pa.array(rows))
        ids = ids[rows]
    columns = {
        "key": pa.chunked_array([key_text(c) for c in objects.column("key").chunks], pa.string()),
        "page": objects.column("page"),
        **coordinate_columns(inventory.table.resolved, ids),
        "nbytes": objects.column("nbytes"),
        "mtime": seconds(objects.column("mtime_ns")),
        "replicas": _column(objects, "replicas"),
        "offset": _column(objects, "locator"),
    }
    return pa.table(columns)


def _column(objects: pa.Table, name: str) -> pa.Array | pa.ChunkedArray:
    """Give a column that not every scan has."""
    if name in objects.column_names:
        return objects.column(name)
    return pa.nulls(len(objects), SCAN_FIELDS[name].type)


def page_rows(groups: PageGroups) -> pa.Table:
    """Make a row per page group, in the columns of `ls`."""
    ids = pa.array(groups.deployment_ids, mask=groups.deployment_ids == UNRESOLVED)
    models = pa.array([d.model or None for d in groups.deployments], pa.string())
    tags = pa.array([d.tag or None for d in groups.deployments], pa.string())
    shards = [d.members[0].coordinate.shard for d in groups.deployments]
    newest = pa.array(groups.newest_ns, mask=np.full(len(groups), not groups.has_times))
    return pa.table(
        {
            "page": groups.pages,
            "model": models.take(ids),
            "tag": tags.take(ids),
            "state": pa.array(STATES).take(pa.array(groups.states)),
            "nbytes": pa.array(groups.nbytes),
            "mtime": seconds(newest),
            "pools": _pool_counts(groups),
            "missing": _missing_keys(groups),
            **{
                name: pa.array([getattr(shard, name) for shard in shards], pa.int32()).take(ids)
                for name in ("tp_size", "pp_size", "cp_size", "dcp_size")
            },
        }
    )


def _pool_counts(groups: PageGroups) -> pa.StructArray:
    """{pool: {present, expected}} of each group; a pool its deployment does not have is null."""
    pools = sorted({s.pool for sets in groups.object_sets for s in sets}, key=_pool_order)
    fields = []
    for pool in pools or ["kv"]:  # an Arrow struct needs a field
        of_pool = np.zeros((len(groups.deployments) + 1, groups.present.shape[1]), dtype=np.bool_)
        for number, sets in enumerate(groups.object_sets):
            of_pool[number, : len(sets)] = [s.pool == pool for s in sets]
        columns = of_pool[groups.deployment_ids]
        present = np.where(columns, groups.present, 0).sum(axis=1, dtype=np.int32)
        expected = np.where(columns, groups.expected, 0).sum(axis=1, dtype=np.int32)
        lacks = pa.array(~columns.any(axis=1))
        fields.append(
            pa.StructArray.from_arrays(
                [pa.array(present), pa.array(expected)], fields=list(_COUNTS), mask=lacks
            )
        )
    return pa.StructArray.from_arrays(fields, names=pools or ["kv"])


def _pool_order(pool: str) -> tuple[bool, str]:
    return pool != "kv", pool


def _missing_keys(groups: PageGroups) -> pa.ListArray:
    found = list(groups.missing())
    keys = pa.concat_arrays([groups.keys_of(m) for m in found] or [pa.array([], pa.binary())])
    of_group = np.concatenate([m.groups for m in found] or [np.zeros(0, np.int64)])
    order = np.argsort(of_group, kind="stable")
    offsets = np.searchsorted(of_group[order], np.arange(len(groups) + 1))
    texts = key_text(keys.take(pa.array(order)))
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), texts)


def summary_rows(inventory: Inventory, *, pool: str = "") -> pa.Table:
    """Total by model, tag and pool: pages, objects, bytes. Foreign objects are a row of nulls."""
    objects = object_rows(inventory, pool=pool).select(["page", "model", "tag", "pool", "nbytes"])
    totals = objects.group_by(["model", "tag", "pool"]).aggregate(
        [("page", "count_distinct"), ("nbytes", "count", pc.CountOptions("all")), ("nbytes", "sum")]
    )
    totals = pa.table(
        {
            **{
                name: pc.cast(totals.column(name), pa.string()) for name in ("model", "tag", "pool")
            },
            "pages": totals.column("page_count_distinct"),
            "objects": totals.column("nbytes_count"),
            "nbytes": pc.fill_null(totals.column("nbytes_sum"), 0),
        }
    )
    return totals.sort_by([("model", "ascending"), ("tag", "ascending"), ("pool", "ascending")])
