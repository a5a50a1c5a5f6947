"""Page groups that servers may still be writing: one rule for every command.

SGLang writes the objects of a page one by one, sidecars first. A group is in flight while its
newest object is younger than the grace period. If the store keeps no times, its incomplete groups
are looked up again after the grace period.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from hicachectl.backends.capabilities import present_ns
from hicachectl.pages.group_table import ORPHAN, PARTIAL

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicachectl.backends.base import Store
    from hicachectl.formats.arrays import BoolArray, IntArray
    from hicachectl.pages.groups import PageGroups

# This host's clock and a file server's may differ by this much.
_CLOCK_SKEW_NS = 60 * 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class ListingTime:
    """Time of a listing. The ages of the listed objects are relative to its start.
    start_ns: start of the listing, Unix nanoseconds, by `present_ns`.
    duration_ns: duration of the listing.
    began: start of the listing, by `time.monotonic` of this process.
    """

    start_ns: int
    duration_ns: int = 0
    began: float

    @classmethod
    def now(cls, store: Store, *, changes: bool) -> ListingTime:
        """Record the start of a listing. changes: see `present_ns`. Raises StoreUnavailable."""
        began = time.monotonic()
        return cls(start_ns=present_ns(store, changes=changes), began=began)

    def ended(self) -> ListingTime:
        """Return the time with the duration of the listing, which has just ended."""
        return replace(self, duration_ns=int((time.monotonic() - self.began) * 1e9))


def groups_in_flight(
    store: Store, groups: PageGroups, listed: ListingTime, grace_seconds: float
) -> BoolArray:
    """Return which groups are younger than the grace period: [groups].

    No group is in flight if no server writes to the store, or if the store keeps no times. Groups
    written during the listing are in flight. A group with a much later time is not in flight,
    because the clock of its writer must be wrong.
    """
    if not store.traits.live:
        return np.zeros(len(groups), dtype=np.bool_)
    grace_ns = int(grace_seconds * 1e9)
    age = listed.start_ns - groups.newest_ns
    ahead = listed.duration_ns + max(grace_ns, _CLOCK_SKEW_NS)
    young: BoolArray = (age < grace_ns) & (age > -ahead)
    return young


def are_incomplete(groups: PageGroups) -> BoolArray:
    """Return which groups lack an object: [groups]."""
    incomplete: BoolArray = np.isin(groups.states, (PARTIAL, ORPHAN))
    return incomplete


def changed_groups(
    store: Store, groups: PageGroups, among: BoolArray, *, most: int | None = None
) -> tuple[BoolArray, int]:
    """Return which of some groups are incomplete and have changed since the listing: [groups].

    Evictions and writes during a listing make whole pages look partial. Also returns how many
    listed objects are gone.
    among: [groups] bool, the groups to look up.
    most: largest number of groups to look up; None for all.
    """
    changed = np.zeros(len(groups), dtype=np.bool_)
    suspect = among & are_incomplete(groups)
    if most is not None:
        suspect[np.flatnonzero(suspect)[most:]] = False
    rows = groups.rows_in(suspect)
    still_there = store.exists(groups.inventory.take(rows))
    changed[groups.of_object[rows[~still_there]]] = True
    for missing in groups.missing():
        wanted = np.flatnonzero(suspect[missing.groups])
        keys = groups.keys_of(missing).take(pa.array(wanted))
        arrived = store.exists(pa.table({"key": keys}))
        changed[missing.groups[wanted[arrived]]] = True
    return changed, int((~still_there).sum())


def look_again(
    store: Store,
    groups: PageGroups,
    listed: ListingTime,
    grace_seconds: float,
    *,
    most: int | None = None,
    on_wait: Callable[[float, int], None] = lambda seconds, pages: None,
) -> tuple[BoolArray, int]:
    """Call `changed_groups` after the grace period, which began with the listing.

    Wait for the end of this period only if some groups are incomplete.
    most: see `changed_groups`.
    on_wait: called before a wait, with its seconds and the number of incomplete groups.
    """
    suspects = int(are_incomplete(groups).sum())
    left = listed.began + grace_seconds - time.monotonic()
    if suspects and left > 0:
        on_wait(left, suspects)
        time.sleep(left)
    return changed_groups(store, groups, np.ones(len(groups), dtype=np.bool_), most=most)


def look_if_needed(
    store: Store,
    groups: PageGroups,
    listed: ListingTime,
    grace_seconds: float,
    numbers: IntArray,
    *,
    on_wait: Callable[[float, int], None],
) -> BoolArray:
    """Return which groups have changed since the listing: [groups].

    If servers write to the store, and it keeps no times that would show their writes, incomplete
    groups are looked up again. This is done only if one of the groups in `numbers` is incomplete.
    """
    traits = store.traits
    if not traits.live or "mtime_ns" in traits.columns or not are_incomplete(groups)[numbers].any():
        return np.zeros(len(groups), dtype=np.bool_)
    return look_again(store, groups, listed, grace_seconds, on_wait=on_wait)[0]
