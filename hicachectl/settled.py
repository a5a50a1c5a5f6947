"""What a look at a living store may judge: what holds still, and what the checks understand."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from hicachectl.checks.sizes import UNKNOWN_SIZE, expected_sizes
from hicachectl.deployments import UNRESOLVED
from hicachectl.groups import ORPHAN, PARTIAL, UNKNOWN, BoolArray, PageGroups

if TYPE_CHECKING:
    from collections.abc import Collection

    from hicachectl.backends.base import Store
    from hicachectl.inventory import Inventory


def changed_groups(
    store: Store, inventory: Inventory, groups: PageGroups, settled: BoolArray
) -> tuple[BoolArray, int]:
    """Look again at settled groups that are not whole: [groups] which have changed since the scan.

    A server that evicts or writes while a store is being listed makes whole pages look partial.
    Also returns how many of the objects that were listed are gone.
    """
    changed = np.zeros(len(groups), dtype=np.bool_)
    suspect = settled & np.isin(groups.states, (PARTIAL, ORPHAN))
    rows = np.flatnonzero(np.append(suspect, False)[groups.of_object])
    still_there = store.exists(inventory.take(rows))
    changed[groups.of_object[rows[~still_there]]] = True
    for missing in groups.missing():
        wanted = np.flatnonzero(suspect[missing.groups])
        keys = groups.keys_of(missing).take(pa.array(wanted))
        arrived = store.exists(pa.table({"key": keys}))
        changed[missing.groups[wanted[arrived]]] = True
    return changed, int((~still_there).sum())


def unjudged(inventory: Inventory, groups: PageGroups, checks: Collection[str]) -> dict[str, str]:
    """List what of a store the given checks do not understand, and why."""
    table = inventory.table
    skipped = {}
    ambiguous = int((groups.states == UNKNOWN).sum())
    if ambiguous and "groups" in checks:
        skipped["ambiguous-groups"] = (
            f"{ambiguous} page groups have keys that read in several ways; give a profile"
        )
    profiled = bool(table.deployments) and table.deployments[0].profile is not None
    others = {d.model for d in table.deployments[1:]} if profiled else set()
    seen = set(groups.deployment_ids.tolist())
    if profiled and any(number in seen for number in range(1, len(table.deployments))):
        skipped["other-deployments"] = (
            f"objects of {', '.join(sorted(others))} that the profile does not describe were "
            "measured against themselves"
        )
    unlisted = {s.pool for sets in groups.object_sets for s in sets if not s.listed}
    if unlisted:
        skipped["unlisted-pools"] = (
            f"{', '.join(sorted(unlisted))}: in the store, but not in the profile"
        )
    sizeless = _pools_without_size(inventory)
    if sizeless and "sizes" in checks:
        skipped["sizes"] = f"{', '.join(sizeless)}: no size that most objects share"
    unsized = inventory.affix_ids[inventory.objects.column("nbytes").is_null().to_numpy()]
    unreadable = int((expected_sizes(inventory.table)[unsized] == UNKNOWN_SIZE).sum())
    if unreadable and {"values", "digests"} & set(checks):
        skipped["unread-objects"] = (
            f"{unreadable} objects were not read, since the store lists no size for them; give a "
            "profile, or --allow-leases"
        )
    return skipped


def _pools_without_size(inventory: Inventory) -> list[str]:
    table = inventory.table
    present = np.unique(inventory.affix_ids)
    pools = set()
    for affix in present[present >= 0].tolist():
        if table.deployment_ids[affix] != UNRESOLVED:
            deployment = table.deployments[table.deployment_ids[affix]]
            member = deployment.members[table.member_ids[affix]]
            if member.nbytes is None:
                pools.add(member.coordinate.pool)
    return sorted(pools)
