"""Check `sizes`: objects whose bytes are not what their deployment writes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.deployments import UNRESOLVED, Member
from hicachectl.findings import findings
from hicachectl.formats.errors import ProfileError
from hicachectl.listing import object_rows

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicachectl.groups import BoolArray, PageGroups
    from hicachectl.inventory import IntArray, Inventory

UNKNOWN_SIZE = -1

# Fewer pages than this of one wrong size may be damage; from here on it is another deployment.
_PAGES_TO_CONTRADICT = 3


def check_sizes(
    inventory: Inventory, groups: PageGroups, in_flight: BoolArray, scheme: str
) -> Iterator[pa.Table]:
    """Find truncated and oversized objects of settled groups."""
    # SGLang reads the head of a file that is too long; Mooncake refuses such an object: a miss.
    oversized = "warning" if scheme == "mooncake" else "error"
    expected = _expected(inventory)
    actual = inventory.objects.column("nbytes").fill_null(UNKNOWN_SIZE).to_numpy()
    settled = np.append(~in_flight, True)[groups.of_object]
    wrong = settled & (expected != UNKNOWN_SIZE) & (actual != UNKNOWN_SIZE) & (actual != expected)
    for code, severity, rows in (
        ("truncated", "error", np.flatnonzero(wrong & (actual < expected))),
        ("oversized", oversized, np.flatnonzero(wrong & (actual > expected))),
    ):
        yield _wrong(inventory, code, severity, rows, expected[rows])


def _expected(inventory: Inventory) -> IntArray:
    """[objects] bytes that each should have; UNKNOWN_SIZE where nothing says."""
    table = inventory.table
    sizes = [
        UNKNOWN_SIZE
        if deployment == UNRESOLVED
        else _size(table.deployments[deployment].members[member])
        for deployment, member in zip(table.deployment_ids, table.member_ids, strict=True)
    ]
    return inventory.by_affix(tuple(sizes), UNKNOWN_SIZE)


def _size(member: Member) -> int:
    return UNKNOWN_SIZE if member.nbytes is None else member.nbytes


def _wrong(
    inventory: Inventory, code: str, severity: str, rows: IntArray, expected: IntArray
) -> pa.Table:
    objects = object_rows(inventory, rows)
    actual = pc.cast(objects.column("nbytes"), pa.string())
    wanted = pc.cast(pa.array(expected), pa.string())
    return findings(
        code,
        severity,
        keys=objects.column("key").combine_chunks(),
        pages=objects.column("page"),
        pools=pc.cast(objects.column("pool"), pa.string()),
        parts=pc.cast(objects.column("part"), pa.string()),
        detail=pc.binary_join_element_wise(actual, " bytes, expected ", wanted, ""),
    )


def refuse_contradiction(inventory: Inventory) -> None:
    """Raise ProfileError when a profile cannot be the one that wrote the store.

    That is when nothing of the store is the profile's, or when all objects of one of its pools,
    on several pages, have one and the same other size.
    """
    profiled = [d for d in inventory.table.deployments if d.profile is not None]
    if not profiled or not len(inventory.objects):
        return
    members = profiled[0].members
    own = np.array([d == 0 for d in inventory.table.deployment_ids] + [False])[inventory.affix_ids]
    others = inventory.table.deployments[1:]
    if not own.any():
        if others:
            raise ProfileError(_other_deployment(members[0], [d.members[0] for d in others]))
        return
    positions = inventory.by_affix(inventory.table.member_ids, UNRESOLVED)
    listed = inventory.objects.column("nbytes").fill_null(UNKNOWN_SIZE).to_numpy()
    for pool in dict.fromkeys(member.coordinate.pool for member in members):
        of_pool = np.array([m.coordinate.pool == pool for m in members] + [False])
        expected = np.array([m.nbytes or 0 for m in members] + [0], dtype=np.int64)
        rows = np.flatnonzero(own & of_pool[positions])
        pairs = np.unique(np.stack([expected[positions[rows]], listed[rows]]), axis=1).T.tolist()
        several = len(rows) >= _PAGES_TO_CONTRADICT * int(of_pool.sum())
        # One pair a member at most: every object of it has the same size, and a wrong one.
        if several and len(pairs) <= of_pool.sum() and all(want != has for want, has in pairs):
            want, has = pairs[0]
            raise ProfileError(
                f"the profile contradicts the store: {pool} objects should have {want} bytes, "
                f"all {len(rows)} have {has}; check dtype, page size, layers and TP size"
            )


def _other_deployment(wanted: Member, found: list[Member]) -> str:
    stored = "; ".join(sorted({_describe(member) for member in found}))
    return (
        f"the profile contradicts the store: it expects {_describe(wanted)}, the store has {stored}"
    )


def _describe(member: Member) -> str:
    shard = member.coordinate.shard
    sizes = [
        f"{axis} size {getattr(shard, f'{axis}_size')}"
        for axis in ("tp", "pp", "cp", "dcp")
        if getattr(shard, f"{axis}_size") is not None
    ]
    return " ".join([f"model {member.coordinate.model!r}", *(sizes or ["without TP ranks"])])
