"""Hits: the part of each page chain that a store can serve, and the object that stops the chain.

An object is usable if it exists and has its expected size, or if sizes are unknown. The size
matters, because a read of a shorter object fails (files) or returns stale bytes (Mooncake). Where
servers compare trailers, an object of another identity or rank, or without a trailer, is not
usable.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.formats.keys import grammar_of
from hicachectl.formats.keys.table import join_keys
from hicachectl.formats.objects import ANCHOR
from hicachectl.formats.restorable import (
    ALL_PAGES,
    PoolPages,
    first_absent,
    leading_runs,
    longest,
    positions_of,
    restorable,
)
from hicachectl.formats.spec import UNKNOWN_SIZE, fits, object_specs
from hicachectl.pages.deployments import UNRESOLVED, other_ranks
from hicachectl.pages.group_table import ABSENT, fill_table
from hicachectl.pages.scanning import look_up, take_inventory
from hicachectl.profiles.identities import BARE, OTHER, acceptance_of, with_marked_weights

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicachectl.backends.base import Store
    from hicachectl.formats.arrays import BoolArray, IntArray
    from hicachectl.formats.profile import Profile
    from hicachectl.pages.deployments import Deployment
    from hicachectl.pages.group_table import GroupTable, SlotBlock
    from hicachectl.pages.inventory import Inventory
    from hicachectl.profiles.identities import Acceptance
    from hicachectl.requests.chains import Requests


# Values of a slot that is not ABSENT:
#
# - MISFIT: an object of another size
# - HELD: a usable object
# - UNTRAILED: an object without a trailer, where servers compare trailers
# - FOREIGN: an object of another identity or rank, where servers compare trailers
MISFIT, HELD, UNTRAILED, FOREIGN = range(4)
_REFUSED = {BARE: UNTRAILED, OTHER: FOREIGN}
CLEARED = 4  # fault of an ABSENT slot whose object is from before a server's `clear`
_FEW_KEYS = 10_000  # keys that lookups find in under a second on a file system


@dataclass(frozen=True, slots=True)
class Hits:
    """Restorable part of each chain. Arrays are [chains] unless stated otherwise.

    deployment:   deployment of the servers that restore pages; None if nothing can be restored.
    needs:        slots of the objects that servers need, one block for each
        `ObjectSpec.object_set`. For each page of `page_names`, a slot is ABSENT, MISFIT, HELD,
        UNTRAILED or FOREIGN.
    chains:       requests, each cut to the pages that a server can take from a store
        (`Requests.reach`).
    page_names:   distinct pages, in hexadecimal digits.
    page_of:      [pages of `chains`] index of each page in `page_names`.
    kv_pages:     number of leading pages that have kv on all ranks.
    usable_pages: number of pages in the longest prefix that all ranks can restore.
    allowed:      [pages of `chains`] whether all ranks can restore the prefix up to the page.
    stop_pages:   index, in the chain, of the page that stops the chain; -1 if no page stops it.
    stop_specs:   index, in the deployment's specs, of the first faulty object of that page; -1
        without a stop or a deployment.
    stop_faults:  value of that object's slot (ABSENT, MISFIT, UNTRAILED or FOREIGN), or CLEARED.
        ABSENT without a stop.
    """

    deployment: Deployment | None
    needs: tuple[SlotBlock, ...]
    chains: Requests
    page_names: pa.StringArray
    page_of: IntArray
    kv_pages: IntArray
    usable_pages: IntArray
    allowed: BoolArray
    stop_pages: IntArray
    stop_specs: IntArray
    stop_faults: IntArray

    def usable_within(self, lengths: IntArray) -> IntArray:
        """Return the longest usable prefix of each chain, of at most `lengths` pages: [chains]."""
        return longest(self.allowed, self.chains.offsets, lengths)

    @property
    def found(self) -> bool:
        """Whether the store has an object of any requested page."""
        return any(len(block.groups) for block in self.needs)

    @property
    def trailing(self) -> bool:
        """Whether there is a pool that servers need only at the end of a prefix."""
        return any(block.spec.trailing for block in self.needs)

    @property
    def beyond(self) -> BoolArray:
        """Whether a page is beyond the usable prefix of its chain: [pages of `chains`]."""
        usable = np.repeat(self.usable_pages, np.diff(self.chains.offsets))
        return positions_of(self.chains.offsets) >= usable

    @property
    def lacking(self) -> BoolArray:
        """Whether a page is beyond the usable prefix of a chain: [page_names]."""
        lacking = np.zeros(len(self.page_names), dtype=np.bool_)
        lacking[self.page_of[self.beyond]] = True
        return lacking

    @property
    def unreachable_pages(self) -> IntArray:
        """Number of pages of each chain that are whole, but that no server reaches: [chains].

        Such pages are beyond the usable prefix. A server would use them only if it could restore
        the pages before them.
        """
        unreachable = np.flatnonzero(self.beyond & self.whole[self.page_of])
        found: IntArray = np.diff(np.searchsorted(unreachable, self.chains.offsets))
        return found

    @property
    def unreachable(self) -> BoolArray:
        """Whether a page is whole, but in the usable prefix of no chain: [page_names]."""
        unreachable = self.whole
        unreachable[self.page_of[~self.beyond]] = False
        return unreachable

    @property
    def begun(self) -> BoolArray:
        """Whether the store has an object of a page, usable or not: [page_names]."""
        begun = np.zeros(len(self.page_names), dtype=np.bool_)
        for block in self.needs:
            begun[block.groups] = True
        return begun

    @property
    def whole(self) -> BoolArray:
        """Whether servers can use all objects of a page, except trailing pools: [page_names]."""
        whole = np.full(len(self.page_names), self.deployment is not None)
        for block in self.needs:
            if not block.spec.trailing:
                whole &= _held(block, len(whole))
        return whole

    def needed(self, prefix_pages: IntArray | None = None) -> BoolArray:
        """Return which blocks of `needs` each page must have: [page_names, needs].

        Without these, servers cannot restore the prefixes. A prefix needs trailing pools only in
        the window at its end.
        prefix_pages: [chains] length of each prefix; None for `usable_pages`.
        """
        offsets = self.chains.offsets
        places = positions_of(offsets)
        prefix_pages = self.usable_pages if prefix_pages is None else prefix_pages
        usable = np.repeat(prefix_pages, np.diff(offsets))
        needed = np.zeros((len(self.page_names), len(self.needs)), dtype=np.bool_)
        for column, block in enumerate(self.needs):
            wanted = places < usable
            if block.spec.trailing:
                wanted &= places >= usable - block.spec.trailing_pages
            needed[self.page_of[wanted], column] = True
        return needed


def inventory_of_chains(
    store: Store,
    profile: Profile,
    chains: Requests,
    *,
    only_others: bool = False,
    needs_pages: bool = False,
    on_batch: Callable[[int], None] = lambda objects: None,
) -> Inventory:
    """Return an inventory with at least the pages of chains.

    Look up keys if they are few, or if listings lack recent writes. If no key exists, list the
    store, because its other keys may show why the pages are missing. `take_inventory` explains the
    other arguments and the errors.
    """
    names = chains.within_reach().page_names
    grammar = grammar_of(store.grammar)
    affixes = [spec.affix for spec in object_specs(profile, grammar.name)]
    if store.traits.lists_late or len(names) * len(affixes) <= _FEW_KEYS:
        asked = [*affixes, *other_ranks(affixes, grammar)]
        keys = [join_keys(asked, pa.repeat(n, len(names)), names) for n in range(len(asked))]
        found = look_up(store, pa.concat_arrays(keys), profile, only_others=only_others)
        if len(found.objects):
            return found
    return take_inventory(
        store, profile, only_others=only_others, needs_pages=needs_pages, on_batch=on_batch
    )


def hits_of_store(
    store: Store,
    profile: Profile,
    chains: Requests,
    *,
    needs_pages: bool = False,
    without: pa.StringArray | None = None,
    on_batch: Callable[[int], None] = lambda objects: None,
) -> tuple[Inventory, Hits]:
    """Return the part of each chain that servers of a profile can restore from a store.

    If the profile names no weights, and all markers of the store name the same weights, the hits
    are for these weights. A store that has only pages of other deployments has no hits.
    without: pages that count as missing, because their objects are known to be from other writers.
    Return the inventory with the pages of the chains, and the hits. Raises as `take_inventory`
    does.
    """
    profile = with_marked_weights(profile, store)
    inventory = inventory_of_chains(
        store, profile, chains, only_others=True, needs_pages=needs_pages, on_batch=on_batch
    )
    if without is not None and len(without):
        pages = inventory.pages()
        others = pc.is_in(pages, value_set=without.cast(pages.type)).to_numpy()
        inventory = inventory.only(np.flatnonzero(~others))
    acceptance = acceptance_of(store, inventory, profile)
    return inventory, find_hits(inventory, 0, chains, acceptance=acceptance)


def find_hits(
    inventory: Inventory,
    deployment_id: int | None,
    chains: Requests,
    *,
    own: bool = False,
    acceptance: Acceptance | None = None,
) -> Hits:
    """Return the part of each chain that servers of a deployment can restore from a store.

    The search takes one byte of memory for each slot of each distinct page, and about 30 bytes for
    each page of a chain.
    deployment_id: index of the deployment in the inventory; None if nothing can be restored.
    own: whether to ignore objects that another model wrote under the same keys.
    acceptance: rule by which servers accept objects by their trailers; None to accept all objects.
    """
    chains = chains.within_reach()
    page_names, page_of = chains.page_names, chains.blocks.astype(np.int64)
    if deployment_id is None:
        return _no_hits(chains, page_names, page_of)
    table = _held_objects(inventory, deployment_id, page_names, own=own, acceptance=acceptance)
    needs = tuple(block for block in table.blocks if block.spec.listed)
    pools = [
        PoolPages(_held(block, table.count)[page_of], block.spec.trailing_pages) for block in needs
    ]
    kv = [pool.present for b, pool in zip(needs, pools, strict=True) if b.spec.pool == ANCHOR]
    offsets = chains.offsets
    allowed = restorable(pools, offsets)
    usable = longest(allowed, offsets)
    runs = _all_pages_runs(pools, offsets)
    stops = _stop_pages(pools, offsets, runs, usable)
    stopped = np.flatnonzero(stops >= 0)
    at = page_of[offsets[:-1][stopped] + stops[stopped]]
    specs, slots = _at_fault(needs, at, stops[stopped], runs[stopped])
    slots[_are_cleared(inventory, table, page_names, at, specs) & (slots == ABSENT)] = CLEARED
    stop_specs = np.full(len(chains), -1, dtype=np.int64)
    stop_specs[stopped] = specs
    stop_faults = np.full(len(chains), ABSENT, dtype=np.int64)
    stop_faults[stopped] = slots
    return Hits(
        deployment=inventory.table.deployments[deployment_id],
        needs=needs,
        chains=chains,
        page_names=page_names,
        page_of=page_of,
        kv_pages=leading_runs(kv[0], offsets) if kv else np.diff(offsets),
        usable_pages=usable,
        allowed=allowed,
        stop_pages=stops,
        stop_specs=stop_specs,
        stop_faults=stop_faults,
    )


def _held_objects(
    inventory: Inventory,
    deployment_id: int,
    page_names: pa.StringArray,
    *,
    own: bool,
    acceptance: Acceptance | None,
) -> GroupTable:
    """Return a table of distinct pages. A slot has the value of the object that servers find.

    SGLang looks only at keys, so objects of another model count, too, except with `own`.
    """
    table = inventory.table
    specs = table.deployments[deployment_id].specs
    numbers = {spec.affix: number for number, spec in enumerate(specs)}
    spec_of = tuple(
        UNRESOLVED if own and deployment != deployment_id else numbers.get(affix, UNRESOLVED)
        for affix, deployment in zip(table.affixes, table.deployment_ids, strict=True)
    )
    of_objects = inventory.by_affix(spec_of, UNRESOLVED)
    rows = np.flatnonzero(of_objects != UNRESOLVED)
    pages = inventory.pages(rows)
    at = pc.index_in(pages.cast(page_names.type), value_set=page_names).fill_null(-1).to_numpy()
    rows, at = rows[at >= 0], at[at >= 0]
    sizes = inventory.objects.column("nbytes").take(pa.array(rows))
    sizes = sizes.fill_null(UNKNOWN_SIZE).to_numpy()
    expected = np.array([spec.nbytes for spec in specs], dtype=np.int64)[of_objects[rows]]
    held = np.where(fits(sizes, expected), HELD, MISFIT).astype(np.int8)
    if acceptance is not None:
        found = acceptance.of(rows)
        for value, refused in _REFUSED.items():
            held[(held == HELD) & (found == value)] = refused
    return fill_table(specs, len(page_names), at, of_objects[rows], held)


def _are_cleared(
    inventory: Inventory,
    table: GroupTable,
    page_names: pa.StringArray,
    at: IntArray,
    specs: IntArray,
) -> BoolArray:
    """Return which objects the store has only from before a server's `clear`: [n].

    at: [n] index of the object's page in `page_names`.
    specs: [n] index of the object's spec.
    """
    affixes = [spec.affix for spec in table.specs]
    keys = join_keys(affixes, pa.array(specs), page_names.take(pa.array(at)))
    cleared = inventory.take(inventory.cleared_rows, ["key"]).column("key").combine_chunks()
    found: BoolArray = pc.is_in(keys, value_set=cleared).to_numpy(zero_copy_only=False)
    return found


def _held(block: SlotBlock, count: int) -> BoolArray:
    """Return which pages have every object of a block, all usable by servers (HELD): [pages]."""
    held = np.zeros(count, dtype=np.bool_)
    held[block.where(block.values == HELD).complete] = True
    return held


def _no_hits(chains: Requests, page_names: pa.StringArray, page_of: IntArray) -> Hits:
    nothing = np.zeros(len(chains), dtype=np.int64)
    stops = np.where(np.diff(chains.offsets) > 0, 0, -1)
    return Hits(
        deployment=None,
        needs=(),
        chains=chains,
        page_names=page_names,
        page_of=page_of,
        kv_pages=nothing,
        usable_pages=nothing,
        allowed=np.zeros(len(page_of), dtype=np.bool_),
        stop_pages=stops,
        stop_specs=np.full(len(chains), -1),
        stop_faults=np.full(len(chains), ABSENT),
    )


def _all_pages_runs(pools: list[PoolPages], offsets: IntArray) -> IntArray:
    """Return how many leading pages of each chain have the objects of all ALL_PAGES pools."""
    everywhere = np.ones(offsets[-1], dtype=np.bool_)
    for pool in pools:
        if pool.window == ALL_PAGES:
            everywhere &= pool.present
    return leading_runs(everywhere, offsets)


def _stop_pages(
    pools: list[PoolPages], offsets: IntArray, runs: IntArray, usable: IntArray
) -> IntArray:
    """Return the index of the first faulty page in each chain: [chains]; -1 without a fault.

    This is the page at index `runs`, the first page that lacks an object of an ALL_PAGES pool. But
    if `runs` is larger than `usable`, it is the first page that a trailing pool lacks in its window
    at the end of these leading pages.
    runs: [chains] number of leading pages that all ALL_PAGES pools have.
    usable: [chains] number of usable pages.
    """
    starts = offsets[:-1]
    ends = starts + runs
    stops = ends
    for pool in pools:
        if pool.window != ALL_PAGES:
            lacking = first_absent(pool.present, np.maximum(ends - pool.window, starts), ends)
            stops = np.where(runs > usable, np.minimum(stops, lacking), stops)
    return np.where(usable < np.diff(offsets), stops - starts, -1)


def _at_fault(
    needs: tuple[SlotBlock, ...], pages: IntArray, stops: IntArray, runs: IntArray
) -> tuple[IntArray, IntArray]:
    """Return the first faulty spec at each stop, and the value of its slot: [stops] each.

    pages: [stops] numbers of the pages that stop chains.
    stops: [stops] indices of these pages in their chains.
    runs: see `_stop_pages`.
    """
    beyond = stops >= runs
    first = np.full(len(pages), np.iinfo(np.int64).max)
    values = np.full(len(pages), ABSENT, dtype=np.int64)
    for block in needs:
        in_window = ~beyond & (stops >= runs - block.spec.trailing_pages)
        asked = np.flatnonzero(in_window if block.spec.trailing else beyond)
        slots = block.of(pages[asked])
        column = (slots != HELD).argmax(axis=1)
        found = slots[np.arange(len(asked)), column]
        earlier = (found != HELD) & (block.columns[column] < first[asked])
        first[asked[earlier]] = block.columns[column[earlier]]
        values[asked[earlier]] = found[earlier]
    return first, values
