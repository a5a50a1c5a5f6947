"""Check `groups`: pages of which something is missing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.findings import findings
from hicachectl.groups import ORPHAN, BoolArray, Missing, PageGroups
from hicachectl.listing import key_text, object_rows

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicachectl.deployments import Deployment, Member
    from hicachectl.formats.objects import Shard
    from hicachectl.inventory import IntArray, Inventory

_WORDS = {
    "missing-pool": "the page's kv is there without it",
    "missing-part": "other parts of the same pool and shard are there",
    "missing-rank": "other ranks of the page are there",
}


def check_groups(
    inventory: Inventory, groups: PageGroups, in_flight: BoolArray, *, pools_apart: bool = False
) -> Iterator[pa.Table]:
    """Find what settled groups lack, and what is left of groups without an anchor.

    missing-rank, -part and -pool for each missing object, orphan-sidecar for each object that is
    left of a group without its anchor. in_flight: [groups] those to leave alone. pools_apart: the
    store evicts a pool whatever became of others, so that some sidecars are always left (info).
    """
    for missing in groups.missing():
        counted = ~in_flight[missing.groups] & (groups.states[missing.groups] != ORPHAN)
        yield _missing(
            groups,
            Missing(
                missing.deployment_id,
                missing.deployment,
                missing.groups[counted],
                missing.members[counted],
            ),
        )
    yield _orphans(inventory, groups, in_flight, "info" if pools_apart else "warning")


def _missing(groups: PageGroups, missing: Missing) -> pa.Table:
    deployment = missing.deployment
    distinct, rows = np.unique(missing.groups, return_inverse=True)
    present = groups.present_members(missing.deployment_id, distinct)
    codes = _codes(deployment, present)[rows, missing.members]
    names = np.array(list(_WORDS))[codes]
    members = pa.array(missing.members)
    weak = np.array([_is_weak(member) for member in deployment.members])[missing.members]
    severity = np.where(weak | (names == "missing-rank"), "warning", "error")
    return findings(
        pa.array(names, pa.string()),
        pa.array(severity, pa.string()),
        keys=key_text(groups.keys_of(missing)),
        pages=groups.pages_at(missing.groups),
        pools=pa.array([m.coordinate.pool for m in deployment.members]).take(members),
        parts=pa.array([m.coordinate.part for m in deployment.members], pa.string()).take(members),
        detail=pa.array(np.array(list(_WORDS.values()))[codes], pa.string()),
    )


def _codes(deployment: Deployment, present: BoolArray) -> IntArray:
    """Say what the absence of each member is called: [groups, members] indices into _WORDS."""
    pool, part, rank = range(3)
    codes = np.full(present.shape, rank, dtype=np.int64)
    siblings: dict[tuple[str, Shard], list[int]] = {}
    for number, member in enumerate(deployment.members):
        siblings.setdefault((member.coordinate.pool, member.coordinate.shard), []).append(number)
    anchors = [number for number, member in enumerate(deployment.members) if member.anchor]
    for (_, shard), numbers in siblings.items():
        member = deployment.members[numbers[0]]
        if not member.anchor and not member.trailing:
            serving = [n for n in anchors if _serves(deployment.members[n], shard)]
            has_anchor = present[:, serving].any(axis=1)
            codes[np.ix_(has_anchor, np.array(numbers))] = pool
        if member.coordinate.part is not None:
            has_part = present[:, numbers].any(axis=1)
            codes[np.ix_(has_part, np.array(numbers))] = part
    return codes


def _serves(anchor: Member, shard: Shard) -> bool:
    """Whether a rank that holds the anchor also needs the sidecar: equal where both say a rank."""
    return all(
        mine is None or theirs is None or mine == theirs
        for mine, theirs in zip(_ranks(anchor.coordinate.shard), _ranks(shard), strict=True)
    )


def _ranks(shard: Shard) -> tuple[int | None, ...]:
    return shard.tp_rank, shard.pp_rank, shard.cp_rank, shard.dcp_rank


def _is_weak(member: Member) -> bool:
    """Absence costs hits only: servers without speculation share the chain of those with."""
    return member.trailing or member.coordinate.pool.startswith("draft")


def _orphans(
    inventory: Inventory, groups: PageGroups, in_flight: BoolArray, severity: str
) -> pa.Table:
    """One finding for each object of a group that has lost its anchor."""
    chosen = np.append((groups.states == ORPHAN) & ~in_flight, False)
    objects = object_rows(inventory, np.flatnonzero(chosen[groups.of_object]))
    return findings(
        "orphan-sidecar",
        severity,
        keys=objects.column("key").combine_chunks(),
        pages=objects.column("page"),
        pools=pc.cast(objects.column("pool"), pa.string()),
        parts=pc.cast(objects.column("part"), pa.string()),
        detail="its page has no kv object, so that no server will ever read it",
    )
