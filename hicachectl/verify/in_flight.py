"""Page groups of a live store that are in flight, or changed while it was listed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.pages.group_table import ORPHAN, PARTIAL

if TYPE_CHECKING:
    from hicachectl.backends.base import Store
    from hicachectl.pages.groups import BoolArray, PageGroups
    from hicachectl.pages.inventory import Inventory


_CLOCK_SKEW_NS = 60 * 10**9  # between our clock and a file server's


def groups_in_flight(
    store: Store, groups: PageGroups, *, now_ns: int, listing_ns: int, grace_ns: int
) -> BoolArray:
    """Say which groups are younger than the grace: [groups]; none of a store without writers.

    now_ns: when the listing began, Unix nanoseconds; listing_ns: how long it took. Groups that
    were written meanwhile are in flight; a time further ahead is a wrong clock's.
    """
    if not store.traits.live:
        return np.zeros(len(groups), dtype=np.bool_)
    age = now_ns - groups.newest_ns
    young: BoolArray = (age < grace_ns) & (age > -listing_ns - max(grace_ns, _CLOCK_SKEW_NS))
    return young


def changed_groups(
    store: Store, inventory: Inventory, groups: PageGroups, settled: BoolArray
) -> tuple[BoolArray, int]:
    """Look again at settled groups that are not whole: [groups] which have changed since the scan.

    A server that evicts or writes while a store is being listed makes whole pages look partial.
    Also returns how many of the objects that were listed are gone.
    """
    changed = np.zeros(len(groups), dtype=np.bool_)
    suspect = settled & np.isin(groups.states, (PARTIAL, ORPHAN))
    rows = groups.rows_in(suspect)
    still_there = store.exists(inventory.take(rows))
    changed[groups.of_object[rows[~still_there]]] = True
    others = inventory.take(inventory.split_rows, ["key"]).column("key").combine_chunks()
    for missing in groups.missing():
        wanted = np.flatnonzero(suspect[missing.groups])
        keys = groups.keys_of(missing).take(pa.array(wanted))
        arrived = store.exists(pa.table({"key": keys}))
        if len(others):  # another model's, which were there before
            arrived &= ~pc.is_in(keys, value_set=others).to_numpy(zero_copy_only=False)
        changed[missing.groups[wanted[arrived]]] = True
    return changed, int((~still_there).sum())
