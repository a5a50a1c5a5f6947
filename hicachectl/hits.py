"""How far page chains can be restored from a store, and the object that stops each.

A server can use a page's object if it is there and, where its size is known, as long as it has to
be: a shorter one fails the read (files) or is used with stale bytes (Mooncake).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.deployments import UNRESOLVED, other_ranks, profiled_deployment
from hicachectl.formats.keys.base import codec_for
from hicachectl.formats.restorable import (
    ALL_PAGES,
    PoolPages,
    first_absent,
    leading_runs,
    longest,
    positions_of,
    restorable,
)
from hicachectl.inventory import look_up, take_inventory

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicachectl.backends.base import Store
    from hicachectl.chains import Chains
    from hicachectl.deployments import Deployment
    from hicachectl.formats.profile import Profile
    from hicachectl.inventory import Inventory

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

ABSENT, MISFIT, HELD = range(3)  # MISFIT: there, but of another size

_FEW_KEYS = 10_000  # asked for one by one, which takes a file system no second


@dataclass(frozen=True, slots=True)
class Requirement:
    """A pool of which a server needs the objects of all parts and ranks.

    members: positions in the deployment's members. window: as in formats.restorable.
    """

    pool: str
    members: IntArray
    window: int


@dataclass(frozen=True, slots=True)
class Hits:
    """How far each chain can be restored; arrays are [chains] but for page_of.

    deployment:   whose servers would restore; None where the store shows none.
    chains:       cut to their reach.
    page_names, page_of: distinct pages in hex, and which of them each page of `chains` is.
    kv_pages:     leading pages with kv on all ranks.
    usable_pages: the longest prefix that all ranks can restore.
    allowed:      [pages of `chains`] whether all ranks can restore the prefix that ends with each.
    stop_pages:   place in its chain of the page that keeps it from being restored further; -1
        where the whole chain can be.
    stop_members: the first object of that page at fault, a position in the deployment's members;
        -1 without a stop, or without a deployment.
    misfits:      how many of these objects are there, but of another size.
    """

    deployment: Deployment | None
    requirements: tuple[Requirement, ...]
    chains: Chains
    page_names: pa.StringArray
    page_of: IntArray
    kv_pages: IntArray
    usable_pages: IntArray
    allowed: BoolArray
    stop_pages: IntArray
    stop_members: IntArray
    misfits: int

    def usable_within(self, lengths: IntArray) -> IntArray:
        """Find the longest prefix of each chain that is no longer than so many pages: [chains]."""
        return longest(self.allowed, self.chains.offsets, lengths)

    def needed(self, prefix_pages: IntArray | None = None) -> BoolArray:
        """Say what restoring prefixes takes: [page_names, requirements].

        prefix_pages: [chains]; default: the usable ones. Of trailing pools that is no more than
        the window at the end of a prefix.
        """
        offsets = self.chains.offsets
        places = positions_of(offsets)
        prefix_pages = self.usable_pages if prefix_pages is None else prefix_pages
        usable = np.repeat(prefix_pages, np.diff(offsets))
        needed = np.zeros((len(self.page_names), len(self.requirements)), dtype=np.bool_)
        for column, requirement in enumerate(self.requirements):
            wanted = places < usable
            if requirement.window != ALL_PAGES:
                wanted &= places >= usable - requirement.window
            needed[self.page_of[wanted], column] = True
        return needed


def inventory_of_chains(
    store: Store,
    profile: Profile,
    chains: Chains,
    *,
    on_batch: Callable[[int], None] = lambda objects: None,
) -> Inventory:
    """Understand what a store has of the pages of chains, and perhaps more.

    Asks for single keys where they are few, or where a listing lacks what was written lately; if
    none is there, lists all the same, as that may tell why. Raises like `take_inventory`.
    """
    names, _ = chains.within_reach().distinct_pages()
    codec = codec_for(store.grammar)
    affixes = [member.affix for member in profiled_deployment(profile, codec).members]
    if store.traits.lists_late or len(names) * len(affixes) <= _FEW_KEYS:
        keys = [
            pc.cast(pc.binary_join_element_wise(before, names, after, ""), pa.binary())
            for before, after in [*affixes, *other_ranks(affixes, codec)]
        ]
        found = look_up(store, pa.concat_arrays(keys), profile)
        if len(found.objects):
            return found
    return take_inventory(store, profile, on_batch=on_batch)


def find_hits(
    inventory: Inventory, deployment_id: int | None, chains: Chains, *, own: bool = False
) -> Hits:
    """Find how far servers of a deployment can restore chains from a store.

    own: only with objects that are the deployment's, not another model's under the same keys.

    deployment_id: index into the inventory's deployments; None where there is none, so that
    nothing can be restored. Memory: a byte for each page that the chains name and each object a
    page can have, and some 30 bytes a page of a chain.
    """
    chains = chains.within_reach()
    page_names, page_of = chains.distinct_pages()
    if deployment_id is None:
        return _no_hits(chains, page_names, page_of)
    deployment = inventory.table.deployments[deployment_id]
    needed = requirements(deployment)
    state = stored_members(inventory, deployment_id, page_names, own=own)
    held = state == HELD
    pools = [PoolPages(held[:, r.members].all(axis=1)[page_of], r.window) for r in needed]
    kv = [pool.present for r, pool in zip(needed, pools, strict=True) if r.pool == "kv"]
    offsets = chains.offsets
    allowed = restorable(pools, offsets)
    usable = longest(allowed, offsets)
    runs = _all_pages_runs(pools, offsets)
    stops = _stop_pages(pools, offsets, runs, usable)
    members = np.full(len(chains), -1, dtype=np.int64)
    stopped = np.flatnonzero(stops >= 0)
    at = page_of[offsets[:-1][stopped] + stops[stopped]]
    members[stopped] = _stop_members(needed, held[at], stops[stopped], runs[stopped])
    return Hits(
        deployment=deployment,
        requirements=needed,
        chains=chains,
        page_names=page_names,
        page_of=page_of,
        kv_pages=leading_runs(kv[0], offsets) if kv else np.diff(offsets),
        usable_pages=usable,
        allowed=allowed,
        stop_pages=stops,
        stop_members=members,
        misfits=int((state[at, members[stopped]] == MISFIT).sum()),
    )


def requirements(deployment: Deployment) -> tuple[Requirement, ...]:
    """List what a prefix needs of each pool, in the order of the deployment's members.

    Without a profile the window of a trailing pool is taken to be one page.
    """
    members: dict[object, list[int]] = {}
    for number, member in enumerate(deployment.members):
        if member.listed:
            members.setdefault(member.object_set, []).append(number)
    needed = []
    for numbers in members.values():
        first = deployment.members[numbers[0]]
        pool = deployment.profile and deployment.profile.pool(first.coordinate.pool)
        window = pool.trailing_pages if pool else 1
        needed.append(
            Requirement(
                first.coordinate.pool,
                np.array(numbers, dtype=np.int64),
                window if first.trailing else ALL_PAGES,
            )
        )
    return tuple(needed)


def stored_members(
    inventory: Inventory, deployment_id: int, page_names: pa.StringArray, *, own: bool = False
) -> npt.NDArray[np.uint8]:
    """Say how a store has the objects of distinct pages: [pages, members], ABSENT, MISFIT, HELD.

    Servers go by the key alone, so objects count that another model has written under it; own:
    only those that were told to be the deployment's.
    """
    table = inventory.table
    members = table.deployments[deployment_id].members
    numbers = {member.affix: number for number, member in enumerate(members)}
    member_of = tuple(
        UNRESOLVED if own and deployment != deployment_id else numbers.get(affix, UNRESOLVED)
        for affix, deployment in zip(table.affixes, table.deployment_ids, strict=True)
    )
    state = np.full((len(page_names), len(members)), ABSENT, dtype=np.uint8)
    rows = np.flatnonzero(inventory.by_affix(member_of, UNRESOLVED) != UNRESOLVED)
    pages = inventory.pages(rows)
    at = pc.index_in(pages.cast(page_names.type), value_set=page_names).fill_null(-1).to_numpy()
    rows, at = rows[at >= 0], at[at >= 0]
    member_ids = inventory.by_affix(member_of, UNRESOLVED)[rows]
    sizes = inventory.objects.column("nbytes").take(pa.array(rows)).fill_null(-1).to_numpy()
    expected = np.array([-1 if m.nbytes is None else m.nbytes for m in members], dtype=np.int64)
    expected = expected[member_ids]
    fits = (sizes == expected) | (sizes < 0) | (expected < 0)
    state[at, member_ids] = np.where(fits, HELD, MISFIT)
    return state


def _no_hits(chains: Chains, page_names: pa.StringArray, page_of: IntArray) -> Hits:
    nothing = np.zeros(len(chains), dtype=np.int64)
    stops = np.where(np.diff(chains.offsets) > 0, 0, -1)
    return Hits(
        deployment=None,
        requirements=(),
        chains=chains,
        page_names=page_names,
        page_of=page_of,
        kv_pages=nothing,
        usable_pages=nothing,
        allowed=np.zeros(len(page_of), dtype=np.bool_),
        stop_pages=stops,
        stop_members=np.full(len(chains), -1),
        misfits=0,
    )


def _all_pages_runs(pools: list[PoolPages], offsets: IntArray) -> IntArray:
    """Count the leading pages of each chain that every pool with ALL_PAGES has: [chains]."""
    everywhere = np.ones(offsets[-1], dtype=np.bool_)
    for pool in pools:
        if pool.window == ALL_PAGES:
            everywhere &= pool.present
    return leading_runs(everywhere, offsets)


def _stop_pages(
    pools: list[PoolPages], offsets: IntArray, runs: IntArray, usable: IntArray
) -> IntArray:
    """Find the first page that is at fault for each chain: [chains], -1 without a fault.

    runs: of the pools with ALL_PAGES. Where they carry on beyond what is usable, a page that a
    trailing pool lacks for their length is at fault; else the page at which they end.
    """
    starts = offsets[:-1]
    ends = starts + runs
    stops = ends
    for pool in pools:
        if pool.window != ALL_PAGES:
            lacking = first_absent(pool.present, np.maximum(ends - pool.window, starts), ends)
            stops = np.where(runs > usable, np.minimum(stops, lacking), stops)
    return np.where(usable < np.diff(offsets), stops - starts, -1)


def _stop_members(
    needed: tuple[Requirement, ...], held: BoolArray, stops: IntArray, runs: IntArray
) -> IntArray:
    """Find the first member at fault at each stop: [stops].

    held: [stops, members] what the page has. stops: its place in the chain. runs: as above.
    """
    at_fault = np.zeros_like(held)
    beyond = stops >= runs
    for requirement in needed:
        if requirement.window == ALL_PAGES:
            asked = beyond
        else:
            asked = ~beyond & (stops >= runs - requirement.window)
        columns = requirement.members
        at_fault[:, columns] = ~held[:, columns] & asked[:, None]
    first: IntArray = at_fault.argmax(axis=1).astype(np.int64)
    return first
