"""Check `groups`: pages of which something is missing."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from hicachectl.checks.findings import findings, object_findings
from hicachectl.checks.registry import COSTS_HITS_ONLY, POOLS_APART
from hicachectl.pages.group_table import ORPHAN
from hicachectl.pages.listing import key_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicachectl.checks.registry import CheckInput
    from hicachectl.formats.objects import Shard
    from hicachectl.pages.groups import BoolArray, Missing, PageGroups
    from hicachectl.pages.inventory import IntArray

_WORDS = {
    "missing-pool": "the page's kv is there without it",
    "missing-part": "other parts of the same pool and shard are there",
    "missing-rank": "other ranks of the page are there",
}


def check_groups(given: CheckInput) -> Iterator[pa.Table]:
    """Find what settled groups lack, and what is left of groups without an anchor.

    missing-rank, -part and -pool for each missing object, orphan-sidecar for each object that is
    left of a group without its anchor.
    """
    groups, in_flight = given.groups, given.in_flight
    for missing in groups.missing():
        counted = ~in_flight[missing.groups] & (groups.states[missing.groups] != ORPHAN)
        yield from _missing(groups, _chosen(missing, counted))
    yield object_findings(
        given.inventory,
        groups.rows_in((groups.states == ORPHAN) & ~in_flight),
        "orphan-sidecar",
        "its page has no kv object, so that no server will ever read it",
        rule=POOLS_APART if given.store.traits.evicts_pools_apart else None,
    )


def _missing(groups: PageGroups, missing: Missing) -> Iterator[pa.Table]:
    """Give a table for each code, with and without its rule, that some of the objects have."""
    specs = missing.deployment.specs
    codes = _codes(groups, missing)
    costs_hits_only = np.array([spec.costs_hits_only for spec in specs])[missing.specs]
    pools = pa.array([spec.pool for spec in specs])
    parts = pa.array([spec.coordinate.part for spec in specs], pa.string())
    for number, (code, detail) in enumerate(_WORDS.items()):
        for rule in (None, COSTS_HITS_ONLY):
            chosen = (codes == number) & (costs_hits_only == (rule is not None))
            if chosen.any():
                some = _chosen(missing, chosen)
                yield findings(
                    code,
                    keys=key_text(groups.keys_of(some)),
                    pages=groups.pages_at(some.groups),
                    pools=pools.take(pa.array(some.specs)),
                    parts=parts.take(pa.array(some.specs)),
                    detail=detail,
                    rule=rule,
                )


def _chosen(missing: Missing, chosen: BoolArray) -> Missing:
    return replace(missing, groups=missing.groups[chosen], specs=missing.specs[chosen])


def _codes(groups: PageGroups, missing: Missing) -> IntArray:
    """Say what the absence of each object is called: [missing] indices into _WORDS."""
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
    """Give each distinct value, with the places that have it, rising."""
    order = np.argsort(values, kind="stable")
    distinct, starts = np.unique(values[order], return_index=True)
    yield from zip(distinct.tolist(), np.split(order, starts[1:]), strict=False)
