"""Check `groups`: page groups that lack objects."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from hicachectl.checks.codes import COSTS_HITS_ONLY, POOLS_APART
from hicachectl.checks.findings import findings, object_findings
from hicachectl.pages.group_table import ORPHAN
from hicachectl.pages.listing import key_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicachectl.checks.registry import CheckInput
    from hicachectl.formats.arrays import IntArray
    from hicachectl.formats.objects import Shard
    from hicachectl.pages.groups import Missing, PageGroups

_CODES = ("missing-pool", "missing-part", "missing-rank")
_POOL, _PART, _RANK = range(len(_CODES))


def check_groups(given: CheckInput) -> Iterator[pa.Table]:
    """Yield findings for incomplete groups that are not in flight.

    missing-rank, -part or -pool for each missing object of a group with an anchor;
    orphan-sidecar for each object of a group without an anchor.
    """
    groups, judged = given.groups, ~given.in_flight
    for missing in groups.missing():
        counted = judged[missing.groups] & (groups.states[missing.groups] != ORPHAN)
        lacking = replace(missing, groups=missing.groups[counted], specs=missing.specs[counted])
        yield from _missing(groups, lacking)
    yield object_findings(
        given.inventory,
        groups.rows_in((groups.states == ORPHAN) & judged),
        "orphan-sidecar",
        rule=POOLS_APART if given.store.traits.evicts_pools_apart else None,
    )


def _missing(groups: PageGroups, missing: Missing) -> Iterator[pa.Table]:
    """Yield the findings about the missing objects of one deployment."""
    specs = missing.deployment.specs
    costs_hits_only = np.array([spec.costs_hits_only for spec in specs])[missing.specs]
    code_ids = _code_ids(groups, missing)
    pools = pa.array([spec.pool for spec in specs])
    parts = pa.array([spec.coordinate.part for spec in specs], pa.string())
    for rule, of_rule in ((None, ~costs_hits_only), (COSTS_HITS_ONLY, costs_hits_only)):
        for code_id, code in enumerate(_CODES):
            chosen = np.flatnonzero(of_rule & (code_ids == code_id))
            if not len(chosen):
                continue
            own = replace(missing, groups=missing.groups[chosen], specs=missing.specs[chosen])
            yield findings(
                code,
                keys=key_text(groups.keys_of(own)),
                pages=groups.pages_at(own.groups),
                pools=pools.take(pa.array(own.specs)),
                parts=parts.take(pa.array(own.specs)),
                groups=own.groups,
                rule=rule,
            )


def _code_ids(groups: PageGroups, missing: Missing) -> IntArray:
    """Return the finding code of each missing object: [missing] indices into _CODES."""
    specs, table = missing.deployment.specs, groups.tables[missing.deployment_id]
    own = missing.groups - groups.span(missing.deployment_id).start
    siblings: dict[tuple[str, Shard], list[int]] = {}
    for number, spec in enumerate(specs):
        siblings.setdefault((spec.pool, spec.coordinate.shard), []).append(number)
    anchors = [number for number, spec in enumerate(specs) if spec.anchor]
    code_ids = np.full(len(own), _RANK, dtype=np.int64)
    for number, rows in _by_value(missing.specs):
        spec = specs[number]
        if not spec.anchor and not spec.trailing:
            serving = [n for n in anchors if specs[n].shares_rank(spec)]
            code_ids[rows[table.has_any(own[rows], serving)]] = _POOL
        if spec.coordinate.part is not None:
            parts = siblings[spec.pool, spec.coordinate.shard]
            code_ids[rows[table.has_any(own[rows], parts)]] = _PART
    return code_ids


def _by_value(values: IntArray) -> Iterator[tuple[int, IntArray]]:
    """Yield each distinct value with its indices, ascending."""
    order = np.argsort(values, kind="stable")
    distinct, starts = np.unique(values[order], return_index=True)
    yield from zip(distinct.tolist(), np.split(order, starts[1:]), strict=False)
