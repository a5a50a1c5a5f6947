"""Object sizes seen in a store, for specs whose size no profile states."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.formats.spec import UNKNOWN_SIZE
from hicachectl.pages.deployments import UNRESOLVED, AffixTable, SeenSize, SizeMix

if TYPE_CHECKING:
    import numpy.typing as npt

    from hicachectl.formats.spec import ObjectSpec
    from hicachectl.pages.page_order import PageWords

    IntArray = npt.NDArray[np.int64]

# A size on fewer pages may be damage; on more pages, some servers write this size.
_PAGES = 3
_SHARE_OF_PAGES = 0.05
_FIRST_WORD = 0  # of a page hash; 64 bits distinguish the pages of a store


def with_seen_sizes(
    table: AffixTable, objects: pa.Table, affix_ids: npt.NDArray[np.int32], page_words: PageWords
) -> AffixTable:
    """Return the table with missing sizes filled in: the size of most objects of the kind.

    A kind with several common sizes gets a `SizeMix` instead.
    """
    kinds, kind_of = _kinds(table)
    if not kinds:
        return table
    rows_kind = np.array([*kind_of, UNRESOLVED], dtype=np.int64)[affix_ids]
    counted = _counted(rows_kind, objects)
    mixes = _mixes(table, kind_of, rows_kind, counted, objects, page_words)
    mixed = {kind_of[mix.affix_ids[0]] for mix in mixes}
    common = {kind: size for kind, size in _common_sizes(counted).items() if kind not in mixed}

    def sized(number: int, spec: ObjectSpec) -> ObjectSpec:
        kind = kinds.get((number, *_size_kind(spec)))
        if spec.nbytes != UNKNOWN_SIZE or kind not in common:
            return spec
        return replace(spec, nbytes=common[kind])

    deployments = tuple(
        replace(deployment, specs=tuple(sized(number, spec) for spec in deployment.specs))
        for number, deployment in enumerate(table.deployments)
    )
    return replace(table, deployments=deployments, mixes=tuple(mixes))


def _kinds(table: AffixTable) -> tuple[dict[tuple[object, ...], int], list[int]]:
    """Return a number for each kind of object without a stated size, and each affix's kind."""
    kinds: dict[tuple[object, ...], int] = {}
    kind_of = []
    for number, spec in zip(table.deployment_ids, table.specs, strict=True):
        if spec is None or spec.nbytes != UNKNOWN_SIZE:
            kind_of.append(UNRESOLVED)
        else:
            kind_of.append(kinds.setdefault((number, *_size_kind(spec)), len(kinds)))
    return kinds, kind_of


def _size_kind(spec: ObjectSpec) -> tuple[object, ...]:
    """Return a key that objects of equal size share: sizes differ by stage, not by TP rank."""
    coordinate, shard = spec.coordinate, spec.coordinate.shard
    spans = (shard.layers, shard.heads)
    widths = tuple(None if span is None else span[1] - span[0] for span in spans)
    return coordinate.pool, coordinate.part, shard.pp_rank, shard.cp_rank, shard.tp_size, *widths


def _counted(kinds: IntArray, objects: pa.Table) -> pa.Table:
    """Count objects by kind and size, with their first and last write times."""
    columns = {"kind": kinds, "size": objects.column("nbytes").fill_null(-1).to_numpy()}
    times = objects.column("mtime_ns")
    aggregates: list[object] = [([], "count_all")]
    if times.null_count < len(times):
        columns["time"] = times
        aggregates += [("time", "min"), ("time", "max")]
    counted = pa.table(columns).group_by(["kind", "size"]).aggregate(aggregates)
    return counted.filter(pc.greater_equal(counted.column("kind"), 0))


def _common_sizes(counted: pa.Table) -> dict[int, int]:
    """Return the size that more than half of a kind's objects have, by kind, if any."""
    totals: dict[int, int] = {}
    found = counted.select(["kind", "size", "count_all"]).to_pylist()
    for row in found:
        totals[row["kind"]] = totals.get(row["kind"], 0) + row["count_all"]
    return {
        row["kind"]: row["size"]
        for row in found
        if row["size"] >= 0 and 2 * row["count_all"] > totals[row["kind"]]
    }


def _mixes(
    table: AffixTable,
    kind_of: list[int],
    rows_kind: IntArray,
    counted: pa.Table,
    objects: pa.Table,
    page_words: PageWords,
) -> list[SizeMix]:
    """Return the kinds with several common sizes; empty objects do not count."""
    # Count pages only for kinds with several frequent sizes: in most stores, for none.
    many = counted.filter(
        pc.and_(
            pc.greater(counted.column("size"), 0),
            pc.greater_equal(counted.column("count_all"), _PAGES),
        )
    )
    kinds, sizes_each = np.unique(many.column("kind").to_numpy(), return_counts=True)
    kinds = kinds[sizes_each > 1]
    if not len(kinds):
        return []
    chosen = np.isin(rows_kind, kinds)
    pages = pa.table(
        {
            "kind": rows_kind[chosen],
            "size": objects.column("nbytes").fill_null(-1).to_numpy()[chosen],
            "page": page_words(chosen, _FIRST_WORD),
        }
    )
    totals = pages.group_by("kind").aggregate([("page", "count_distinct")]).to_pylist()
    total_of = {row["kind"]: row["page_count_distinct"] for row in totals}
    by_size = pages.group_by(["kind", "size"]).aggregate([("page", "count_distinct")])
    rows = {(row["kind"], row["size"]): row for row in many.to_pylist()}
    found: dict[int, list[SeenSize]] = {}
    for row in by_size.to_pylist():
        kind, size, count = row["kind"], row["size"], row["page_count_distinct"]
        least = max(_PAGES, _SHARE_OF_PAGES * total_of[kind])
        if (kind, size) not in rows or count < least:
            continue
        seen = rows[kind, size]
        found.setdefault(kind, []).append(
            SeenSize(size, count, seen["count_all"], seen.get("time_min"), seen.get("time_max"))
        )
    affixes = np.array(kind_of)
    mixes = []
    for kind, sizes in sorted(found.items()):
        if len(sizes) < 2:
            continue
        ids = tuple(np.flatnonzero(affixes == kind).tolist())
        spec = table.spec(ids[0])
        assert spec is not None
        ordered = sorted(sizes, key=lambda seen: (-seen.pages, seen.nbytes))
        mixes.append(SizeMix(ids, spec.coordinate, tuple(ordered), total_of[kind]))
    return mixes
