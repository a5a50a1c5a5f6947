"""Rows of `ls` as Arrow tables: objects, pages, and totals by deployment, pool and object size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.backends.base import SCAN_FIELDS
from hicachectl.formats.errors import UsageError
from hicachectl.formats.keys.columns import coordinate_columns
from hicachectl.formats.objects import ANCHOR, AXES, NAME_COLUMNS
from hicachectl.pages.census import column_sum, column_sums
from hicachectl.pages.deployments import UNRESOLVED
from hicachectl.pages.groups import UNKNOWN_BYTES
from hicachectl.text.jsontext import schema_of
from hicachectl.text.vocabulary import STATES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hicachectl.formats.arrays import IntArray
    from hicachectl.formats.marker import Marker
    from hicachectl.pages.deployments import Deployment
    from hicachectl.pages.groups import PageGroups
    from hicachectl.pages.inventory import Inventory

_COUNTS = pa.struct([("present", pa.int32()), ("expected", pa.int32())])
SIZE_COLUMNS = tuple(f"{axis}_size" for axis in AXES)


class PoolCounts(TypedDict):
    """Numbers of objects of one pool that a group has, and should have."""

    present: int
    expected: int


class _Paged(TypedDict):
    page: str


class _Labelled(TypedDict):
    group: str


class _Named(TypedDict):
    model: str | None
    tag: str | None
    tp_size: int | None
    pp_size: int | None
    cp_size: int | None
    dcp_size: int | None


class GroupNames(_Paged, _Labelled, _Named):
    """Columns that `group_columns` returns."""


class Group(_Labelled, _Named):
    """Row of a page group. It has no page hash, because the page of the document is known."""

    state: str
    nbytes: int | None
    mtime: float | None
    pools: dict[str, PoolCounts]
    missing: list[str]


class PageRow(_Paged, Group):
    """Row of `ls`."""


class ReplicaRow(TypedDict):
    """Copy of an object in a store."""

    kind: str
    location: str
    nbytes: int


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
    replicas: list[ReplicaRow] | None
    offset: int | None


class PagesDocument(TypedDict):
    """Document of `ls`."""

    pages: list[PageRow]


class ObjectsDocument(TypedDict):
    """Document of `ls --objects`."""

    objects: list[ObjectRow]


class Totals(TypedDict):
    """Sums over objects."""

    pages: int
    objects: int
    nbytes: int | None
    first_mtime: float | None
    last_mtime: float | None


class _Kind(_Named):
    layout: str | None
    pool: str | None
    object_nbytes: int | None


class SummaryRow(_Kind, Totals):
    """Row of `ls --summary`."""


_KIND = schema_of(_Kind)


class SummaryDocument(msgspec.Struct, kw_only=True):
    """Document of `ls --summary`."""

    summary: list[SummaryRow] | None = None
    total: Totals
    free_bytes: int | None


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
    inventory: Inventory, rows: IntArray | None = None, *, pool: str | None = None
) -> pa.Table:
    """Return a row per object in the columns of `ls --objects`.

    rows: rows of the objects; None for all objects.
    pool: pool whose objects are returned in place of `rows`; None to return `rows`.
    """
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
    """Return rows sorted by a column.

    Nulls come last, and rows with equal values keep their order.
    column: name of the column; "-" before the name gives the descending order.
    asked: the column as the operator named it, for the message.
    Raises UsageError if the column has times, but the store keeps none.
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
    newest = pa.array(groups.newest_ns, mask=np.full(len(groups), not groups.has_times))
    return pa.table(
        {
            **group_columns(groups, np.arange(len(groups))),
            "state": pa.array(STATES).take(pa.array(groups.states)),
            "nbytes": pa.array(groups.nbytes, mask=groups.nbytes == UNKNOWN_BYTES),
            "mtime": seconds(newest),
            "pools": _pool_counts(groups),
            "missing": _missing_keys(groups),
        }
    )


def group_columns(groups: PageGroups, numbers: IntArray) -> dict[str, pa.Array]:
    """Return the columns of `ls` that name some groups: page, label, model, tag and sizes."""
    of_deployment = groups.deployment_ids[numbers]
    ids = pa.array(of_deployment, mask=of_deployment == UNRESOLVED)
    stated = [deployment.names.columns for deployment in groups.deployments]
    shards = [deployment.shard for deployment in groups.deployments]
    return {
        "page": groups.pages_at(numbers),
        "group": pa.array(groups.labels, pa.string()).take(pa.array(groups.label_ids[numbers])),
        **{
            name: pa.array([names[name] for names in stated], pa.string()).take(ids)
            for name in NAME_COLUMNS
        },
        **{
            name: pa.array([getattr(shard, name) for shard in shards], pa.int32()).take(ids)
            for name in SIZE_COLUMNS
        },
    }


def _pool_counts(groups: PageGroups) -> pa.StructArray:
    """Return {pool: {present, expected}} of each group; null if its deployment lacks the pool."""
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


_SIZES_SHOWN = 4  # number of the most common sizes of a kind that have a row each
_SEVERAL = -2  # stands for all rarer sizes, which share a row


def summarise(
    inventory: Inventory, markers: Iterable[Marker] = (), *, pool: str | None = None
) -> tuple[pa.Table, Totals]:
    """Return totals by deployment, pool and object size, and the total of all objects.

    The rows have the columns of `ls --summary`; the total is a `Totals`. A pool of a deployment has
    a row for each of its four most common sizes, and one row with object_nbytes null for all other
    sizes. Objects of unknown size count as objects of one size; its object_nbytes is null, too.
    Foreign objects have nulls in the columns that only pages have. Bytes are null if any size is
    not known. A page with objects in several rows counts once in the total.
    markers: markers of the store, which state layouts.
    pool: pool whose objects alone are counted; None for all objects.
    """
    if pool:
        inventory = inventory.only(np.flatnonzero(inventory.of_pool(pool)))
    kinds, of_affix = _kinds(inventory, list(markers))
    kind_ids = of_affix[inventory.affix_ids + 1]
    nbytes = inventory.objects.column("nbytes")
    kind, size, numbers = _numbered(kind_ids, inventory.sizes)
    columns = {"row": numbers, "mtime_ns": inventory.objects.column("mtime_ns")}
    aggregates = [([], "count_all"), ("mtime_ns", "min"), ("mtime_ns", "max")]
    sums = pa.table(columns).group_by("row").aggregate(aggregates).sort_by("row")
    pages, distinct_pages = _page_counts(inventory, numbers, len(kind))
    rows = pa.table(
        {
            **dict(zip(kinds.column_names, kinds.take(pa.array(kind)).columns, strict=True)),
            "object_nbytes": pa.array(size, mask=size < 0),
            "pages": pa.array(pages),
            "objects": sums.column("count_all"),
            "nbytes": column_sums(nbytes, numbers, len(kind)),
            "first_mtime": seconds(sums.column("mtime_ns_min")),
            "last_mtime": seconds(sums.column("mtime_ns_max")),
        }
    )
    total: Totals = {
        "pages": distinct_pages,
        "objects": len(nbytes),
        "nbytes": column_sum(nbytes),
        "first_mtime": pc.min(rows.column("first_mtime")).as_py(),
        "last_mtime": pc.max(rows.column("last_mtime")).as_py(),
    }
    return rows.sort_by([(name, "ascending") for name in _KIND.names]), total


def _kinds(inventory: Inventory, markers: list[Marker]) -> tuple[pa.Table, npt.NDArray[np.int32]]:
    """Return the distinct kinds of objects, in the columns _KIND, and the kind of each affix.

    The kinds of affixes are indices: [affixes + 1]. The first entry is for foreign keys.
    """
    table = inventory.table
    ids = np.arange(-1, len(table.affixes), dtype=np.int32)  # -1: foreign keys
    said = coordinate_columns(table.resolved, ids)
    unsaid = pa.nulls(len(ids))
    columns = {name: said.get(name, unsaid).to_pylist() for name in _KIND.names}
    layouts = [_layout(deployment, markers) for deployment in table.deployments]
    for at, number in enumerate(table.deployment_ids, start=1):
        if number != UNRESOLVED:
            for name in SIZE_COLUMNS:
                columns[name][at] = getattr(table.deployments[number].shard, name)
            columns["layout"][at] = layouts[number]
    numbers: dict[tuple[Any, ...], int] = {}
    texts = zip(*(columns[name] for name in _KIND.names), strict=True)
    of_affix = np.array([numbers.setdefault(text, len(numbers)) for text in texts], dtype=np.int32)
    distinct = zip(_KIND, zip(*numbers, strict=True), strict=True)
    kinds = pa.table({field.name: pa.array(values, field.type) for field, values in distinct})
    return kinds, of_affix


def _layout(deployment: Deployment, markers: list[Marker]) -> str | None:
    """Return the layout of a deployment; None if nothing states it.

    The profile states the layout. Without a profile, the markers state it if they all agree.
    """
    if deployment.profile is not None and not deployment.profile.inferred:
        return deployment.profile.layout
    suffixes = {spec.affix[1] for spec in deployment.specs}
    found = {one.identity.layout for one in markers if one.suffix in suffixes} - {""}
    return found.pop() if len(found) == 1 else None


def _numbered(
    kind_ids: npt.NDArray[np.int32], sizes: IntArray
) -> tuple[IntArray, IntArray, IntArray]:
    """Return the kind and the size of each row, and each object's row: [objects]."""
    of_size = pa.array(sizes).dictionary_encode()
    distinct = of_size.dictionary.to_numpy()
    codes = kind_ids * np.int64(len(distinct)) + of_size.indices.to_numpy()
    of_pair = pa.array(codes).dictionary_encode()
    pair_ids = of_pair.indices.to_numpy()
    kind, at = np.divmod(of_pair.dictionary.to_numpy(), max(len(distinct), 1))
    size = distinct[at]
    order = np.lexsort((size, -np.bincount(pair_ids, minlength=len(kind)), kind))
    place = np.arange(len(order)) - np.searchsorted(kind[order], kind[order])
    size[order[place >= _SIZES_SHOWN]] = _SEVERAL
    rows, numbers = np.unique(np.stack([kind, size]), axis=1, return_inverse=True)
    return rows[0], rows[1], numbers.reshape(-1)[pair_ids]


def _page_counts(inventory: Inventory, rows: IntArray, count: int) -> tuple[IntArray, int]:
    """Return the number of distinct pages of each row, and of all rows together.

    Foreign objects have no pages.
    rows: [objects] row of each object.
    """
    known = ~inventory.is_foreign
    pairs, distinct = inventory.page_ranks(known)
    pairs += rows[known] * distinct
    pairs.sort()
    first = np.diff(pairs, prepend=-1) != 0
    counts: IntArray = np.bincount(pairs[first] // max(distinct, 1), minlength=count)
    return counts, distinct
