"""Page groups that servers may still be writing: one rule for every command.

SGLang writes the objects of a page one by one, sidecars first. A group is in flight while its
newest object is younger than the grace. A store without times is looked at again after the grace.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.pages.group_table import ORPHAN, PARTIAL

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicachectl.backends.base import Store
    from hicachectl.pages.groups import BoolArray, PageGroups
    from hicachectl.pages.inventory import Inventory


_CLOCK_SKEW_NS = 60 * 10**9  # between this host's clock and a file server's


def groups_in_flight(
    store: Store, groups: PageGroups, *, now_ns: int, grace_ns: int, listing_ns: int = 0
) -> BoolArray:
    """Return which groups are younger than the grace: [groups].

    None is if no server writes to the store, or if it keeps no times.
    now_ns: start of the listing, Unix nanoseconds.
    listing_ns: duration of the listing. Groups written during the listing are in flight; a later
        time comes from a wrong clock.
    """
    if not store.traits.live:
        return np.zeros(len(groups), dtype=np.bool_)
    age = now_ns - groups.newest_ns
    young: BoolArray = (age < grace_ns) & (age > -listing_ns - max(grace_ns, _CLOCK_SKEW_NS))
    return young


def needs_second_look(store: Store) -> bool:
    """Return whether servers write to the store, but it keeps no times that would show it."""
    return store.traits.live and "mtime_ns" not in store.traits.columns


def are_incomplete(groups: PageGroups) -> BoolArray:
    """Return which groups lack an object: [groups]."""
    incomplete: BoolArray = np.isin(groups.states, (PARTIAL, ORPHAN))
    return incomplete


def changed_groups(
    store: Store, inventory: Inventory, groups: PageGroups, settled: BoolArray
) -> tuple[BoolArray, int]:
    """Return which settled, incomplete groups have changed since the listing: [groups].

    Evictions and writes during a listing make whole pages look partial. Also returns how many
    listed objects are gone.
    """
    changed = np.zeros(len(groups), dtype=np.bool_)
    suspect = settled & are_incomplete(groups)
    rows = groups.rows_in(suspect)
    still_there = store.exists(inventory.take(rows))
    changed[groups.of_object[rows[~still_there]]] = True
    others = inventory.take(inventory.split_rows, ["key"]).column("key").combine_chunks()
    for missing in groups.missing():
        wanted = np.flatnonzero(suspect[missing.groups])
        keys = groups.keys_of(missing).take(pa.array(wanted))
        arrived = store.exists(pa.table({"key": keys}))
        if len(others):  # another model's objects do not count as arrived
            arrived &= ~pc.is_in(keys, value_set=others).to_numpy(zero_copy_only=False)
        changed[missing.groups[wanted[arrived]]] = True
    return changed, int((~still_there).sum())


def look_again(
    store: Store,
    inventory: Inventory,
    groups: PageGroups,
    *,
    after_seconds: float,
    on_wait: Callable[[float, int], None] = lambda seconds, pages: None,
) -> tuple[BoolArray, int]:
    """Wait, then return `changed_groups` of all incomplete groups.

    after_seconds: what is left of the grace since the listing began.
    on_wait: called before a wait, with its seconds and the number of incomplete groups.
    """
    suspects = int(are_incomplete(groups).sum())
    if suspects and after_seconds > 0:
        on_wait(after_seconds, suspects)
        time.sleep(after_seconds)
    return changed_groups(store, inventory, groups, np.ones(len(groups), dtype=np.bool_))
