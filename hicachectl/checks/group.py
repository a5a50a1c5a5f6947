"""Check `groups`: page groups that lack objects."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.checks.codes import COSTS_HITS_ONLY, POOLS_APART, WITHOUT_SIDECAR
from hicachectl.checks.findings import findings, object_findings
from hicachectl.pages.group_table import ORPHAN
from hicachectl.pages.listing import key_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicachectl.checks.registry import CheckInput
    from hicachectl.formats.objects import Shard
    from hicachectl.pages.groups import BoolArray, Missing, PageGroups
    from hicachectl.pages.inventory import IntArray

_WORDS = (
    (
        "missing-pool",
        f"object missing while the page's kv is present: {WITHOUT_SIDECAR}",
    ),
    ("missing-part", "object missing while other parts of the same pool and shard are present"),
    (
        "missing-rank",
        "object missing while other ranks of the page are present: servers miss the page, but read "
        "no wrong data",
    ),
)


def check_groups(given: CheckInput) -> Iterator[pa.Table]:
    """Yield findings for incomplete groups that are not in flight.

    missing-rank, -part or -pool for each missing object of a group with an anchor;
    orphan-sidecar for each object of a group without an anchor.
    """
    groups, in_flight = given.groups, given.in_flight
    tables = [_missing(groups, missing, ~in_flight) for missing in groups.missing()]
    lacking = pa.concat_tables(tables) if tables else pa.table({"kind": []})
    for kind in pc.unique(lacking.column("kind")).to_pylist():
        some = lacking.filter(pc.equal(lacking.column("kind"), kind))
        code, detail = _WORDS[kind // 2]
        yield findings(
            code,
            keys=some.column("keys"),
            pages=some.column("pages"),
            pools=some.column("pools"),
            parts=some.column("parts"),
            detail=detail,
            rule=COSTS_HITS_ONLY if kind % 2 else None,
        )
    yield object_findings(
        given.inventory,
        groups.rows_in((groups.states == ORPHAN) & ~in_flight),
        "orphan-sidecar",
        "the page has no kv object: no server reads this object",
        rule=POOLS_APART if given.store.traits.evicts_pools_apart else None,
    )


def _missing(groups: PageGroups, missing: Missing, settled: BoolArray) -> pa.Table:
    """Return the missing objects of settled groups with an anchor.

    kind: twice the index in _WORDS, plus 1 if the absence only costs hits.
    """
    counted = settled[missing.groups] & (groups.states[missing.groups] != ORPHAN)
    missing = replace(missing, groups=missing.groups[counted], specs=missing.specs[counted])
    specs = missing.deployment.specs
    which = pa.array(missing.specs)
    costs_hits_only = np.array([spec.costs_hits_only for spec in specs])[missing.specs]
    return pa.table(
        {
            "keys": key_text(groups.keys_of(missing)),
            "pages": groups.pages_at(missing.groups),
            "pools": pa.array([spec.pool for spec in specs]).take(which),
            "parts": pa.array([spec.coordinate.part for spec in specs], pa.string()).take(which),
            "kind": 2 * _codes(groups, missing) + costs_hits_only,
        }
    )


def _codes(groups: PageGroups, missing: Missing) -> IntArray:
    """Return the finding code of each missing object: [missing] indices into _WORDS."""
    pool, part, rank = range(3)
    specs, table = missing.deployment.specs, groups.tables[missing.deployment_id]
    own = missing.groups - groups.span(missing.deployment_id).start
    siblings: dict[tuple[str, Shard], list[int]] = {}
    for number, spec in enumerate(specs):
        siblings.setdefault((spec.pool, spec.coordinate.shard), []).append(number)
    anchors = [number for number, spec in enumerate(specs) if spec.anchor]
    codes = np.full(len(own), rank, dtype=np.int64)
    for number, rows in _by_value(missing.specs):
        spec = specs[number]
        if not spec.anchor and not spec.trailing:
            serving = [n for n in anchors if specs[n].shares_rank(spec)]
            codes[rows[table.has_any(own[rows], serving)]] = pool
        if spec.coordinate.part is not None:
            parts = siblings[spec.pool, spec.coordinate.shard]
            codes[rows[table.has_any(own[rows], parts)]] = part
    return codes


def _by_value(values: IntArray) -> Iterator[tuple[int, IntArray]]:
    """Yield each distinct value with its indices, ascending."""
    order = np.argsort(values, kind="stable")
    distinct, starts = np.unique(values[order], return_index=True)
    yield from zip(distinct.tolist(), np.split(order, starts[1:]), strict=False)
