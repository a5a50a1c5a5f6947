"""Rows of `ls --summary`: totals by deployment, pool and object size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.formats.keys.columns import coordinate_columns
from hicachectl.formats.objects import AXES
from hicachectl.formats.spec import UNKNOWN_SIZE
from hicachectl.pages.census import Census, column_sum, column_sums, page_ranks
from hicachectl.pages.deployments import UNRESOLVED
from hicachectl.pages.listing import seconds

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy.typing as npt

    from hicachectl.formats.arrays import IntArray
    from hicachectl.formats.marker import Marker
    from hicachectl.pages.deployments import Deployment
    from hicachectl.pages.inventory import Inventory

_SIZES = tuple(f"{axis}_size" for axis in AXES)
_KIND = pa.schema(
    [
        ("model", pa.string()),
        ("tag", pa.string()),
        *((name, pa.int32()) for name in _SIZES),
        ("layout", pa.string()),
        ("pool", pa.string()),
    ]
)


class Totals(TypedDict):
    """Sums over objects."""

    pages: int
    objects: int
    nbytes: int | None
    first_mtime: float | None
    last_mtime: float | None


class _Kind(TypedDict):
    model: str | None
    tag: str | None
    tp_size: int | None
    pp_size: int | None
    cp_size: int | None
    dcp_size: int | None
    layout: str | None
    pool: str | None
    object_nbytes: int | None


class SummaryRow(_Kind, Totals):
    """Row of `ls --summary`."""


class SummaryDocument(msgspec.Struct, kw_only=True):
    """Document of `ls --summary`."""

    summary: list[SummaryRow] | None = None
    total: Totals
    free_bytes: int | None


# Each of the most common sizes of a kind has a row. Rarer sizes share one, with this size.
_SIZES_SHOWN = 4
_SEVERAL = -2


def summarise(
    inventory: Inventory, markers: Iterable[Marker] = (), *, pool: str | None = None
) -> tuple[pa.Table, Totals]:
    """Return totals by deployment, pool and object size, and the total of all objects.

    The rows have the columns of `ls --summary`, the total has those that add up. A pool of a
    deployment has a row for each of its four most common sizes. Others share a row with
    object_nbytes null, as do unknown sizes. Foreign objects have nulls for what only pages have.
    Bytes are null if any size is not known. A page with objects in several rows counts once in the
    total.
    markers: markers of the store, which state layouts.
    pool: count only the objects of this pool.
    """
    if pool:
        inventory = inventory.only(np.flatnonzero(inventory.of_pool(pool)))
    kinds, of_affix = _kinds(inventory, list(markers))
    kind_ids = of_affix[inventory.affix_ids + 1]
    nbytes = inventory.objects.column("nbytes")
    sizes = nbytes.fill_null(UNKNOWN_SIZE).to_numpy()
    of_row, numbers = _numbered(kind_ids, sizes)
    sums = (
        pa.table(
            {
                "row": numbers,
                "mtime_ns": inventory.objects.column("mtime_ns"),
            }
        )
        .group_by("row")
        .aggregate(
            [
                ([], "count_all"),
                ("mtime_ns", "min"),
                ("mtime_ns", "max"),
            ]
        )
        .sort_by("row")
    )
    pages, distinct_pages = _page_counts(inventory, numbers, len(of_row))
    rows = kinds.take(of_row.column("kind"))
    size = of_row.column("size")
    for name, values in (
        ("object_nbytes", pc.if_else(pc.less(size, 0), None, size)),
        ("pages", pa.array(pages)),
        ("objects", sums.column("count_all")),
        ("nbytes", column_sums(nbytes, numbers, len(of_row))),
        ("first_mtime", seconds(sums.column("mtime_ns_min"))),
        ("last_mtime", seconds(sums.column("mtime_ns_max"))),
    ):
        rows = rows.append_column(name, values)
    total: Totals = {
        "pages": distinct_pages,
        "objects": len(nbytes),
        "nbytes": column_sum(nbytes),
        "first_mtime": pc.min(rows.column("first_mtime")).as_py(),
        "last_mtime": pc.max(rows.column("last_mtime")).as_py(),
    }
    return rows.sort_by([(name, "ascending") for name in (*_KIND.names, "object_nbytes")]), total


def unusual_sizes(inventory: Inventory) -> pa.Table:
    """Return how many objects do not have the most common size of their kind of key.

    A row for each deployment and pool: the columns of `summarise` that name them, `objects`, and
    `unusual`. Parts, ranks and pipeline stages have keys of their own, so their sizes may differ.
    """
    kinds, of_affix = _kinds(inventory, [])
    by_size = Census.of(inventory.objects, inventory.affix_ids).counts
    by_affix = by_size.group_by("affix").aggregate([("objects", "sum"), ("objects", "max")])
    kind_ids = of_affix[by_affix.column("affix").to_numpy() + 1]
    by_kind = by_affix.append_column("kind", pa.array(kind_ids)).group_by("kind")
    counts = by_kind.aggregate([("objects_sum", "sum"), ("objects_max", "sum")])
    total, usual = counts.column("objects_sum_sum"), counts.column("objects_max_sum")
    return (
        kinds.take(counts.column("kind"))
        .append_column("objects", total)
        .append_column("unusual", pc.subtract(total, usual))
    )


def _kinds(inventory: Inventory, markers: list[Marker]) -> tuple[pa.Table, npt.NDArray[np.int32]]:
    """Return the distinct kinds of objects, in the columns _KIND, and the kind of each affix.

    The first kind is of foreign keys, those of affix ids follow: [affixes + 1].
    """
    table = inventory.table
    ids = np.arange(-1, len(table.affixes), dtype=np.int32)  # -1: foreign keys
    said = coordinate_columns(table.resolved, ids)
    columns = {name: said[name].to_pylist() for name in _KIND.names if name != "layout"}
    columns["layout"] = [None] * len(ids)
    layouts = [_layout(deployment, markers) for deployment in table.deployments]
    for at, number in enumerate(table.deployment_ids, start=1):
        if number != UNRESOLVED:
            for name in _SIZES:
                columns[name][at] = getattr(table.deployments[number].shard, name)
            columns["layout"][at] = layouts[number]
    numbers: dict[tuple[Any, ...], int] = {}
    texts = zip(*(columns[name] for name in _KIND.names), strict=True)
    of_affix = np.array([numbers.setdefault(text, len(numbers)) for text in texts], dtype=np.int32)
    distinct = zip(_KIND, zip(*numbers, strict=True), strict=True)
    kinds = pa.table({field.name: pa.array(values, field.type) for field, values in distinct})
    return kinds, of_affix


def _layout(deployment: Deployment, markers: list[Marker]) -> str | None:
    """Return the layout that the profile, or all markers of the deployment, state."""
    if deployment.profile is not None and not deployment.profile.inferred:
        return deployment.profile.layout
    suffixes = {spec.affix[1] for spec in deployment.specs}
    found = {one.identity.layout for one in markers if one.suffix in suffixes} - {""}
    return found.pop() if len(found) == 1 else None


def _numbered(kind_ids: npt.NDArray[np.int32], sizes: IntArray) -> tuple[pa.Table, IntArray]:
    """Return the kind and the size of each row, and each object's row: [objects]."""
    objects = pa.table({"kind": kind_ids, "size": sizes})
    counts = objects.group_by(["kind", "size"]).aggregate([([], "count_all")])
    order = [("kind", "ascending"), ("count_all", "descending"), ("size", "ascending")]
    counts = counts.sort_by(order)
    of_kind, of_size = (counts.column(name).to_numpy() for name in ("kind", "size"))
    place = np.arange(len(counts)) - np.searchsorted(of_kind, of_kind)
    shown = np.unique(of_size[place < _SIZES_SHOWN])
    width = len(shown) + 1  # the last is for rarer sizes

    def codes(kinds: npt.NDArray[Any], values: IntArray) -> IntArray:
        at = np.minimum(np.searchsorted(shown, values), max(len(shown) - 1, 0))
        known = shown[at] == values if len(shown) else np.zeros(len(values), dtype=np.bool_)
        return kinds.astype(np.int64) * width + np.where(known, at, width - 1)

    own = codes(of_kind, of_size)[place < _SIZES_SHOWN]
    of_object = codes(kind_ids, sizes)
    of_object = np.where(
        np.isin(of_object, own), of_object, kind_ids.astype(np.int64) * width + width - 1
    )
    distinct, numbers = np.unique(of_object, return_inverse=True)
    size_of = np.append(shown, _SEVERAL)[distinct % width]
    return pa.table({"kind": distinct // width, "size": size_of}), numbers


def _page_counts(inventory: Inventory, rows: IntArray, count: int) -> tuple[IntArray, int]:
    """Return the number of distinct pages of each row, and of all; foreign objects have none."""
    known = ~inventory.is_foreign
    pairs, distinct = page_ranks(inventory.page_words, known)
    pairs += rows[known] * distinct
    pairs.sort()
    first = np.diff(pairs, prepend=-1) != 0
    counts: IntArray = np.bincount(pairs[first] // max(distinct, 1), minlength=count)
    return counts, distinct
