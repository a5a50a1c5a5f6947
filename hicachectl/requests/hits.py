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

from hicachectl.formats.keys.base import codec_for
from hicachectl.formats.keys.table import join_keys
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
from hicachectl.pages.group_table import fill_table
from hicachectl.pages.inventory import look_up, take_inventory

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicachectl.backends.base import Store
    from hicachectl.formats.profile import Profile
    from hicachectl.pages.deployments import Deployment
    from hicachectl.pages.group_table import GroupTable, SlotBlock
    from hicachectl.pages.inventory import Inventory
    from hicachectl.requests.chains import Chains

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

MISFIT, HELD = range(2)  # of a slot that is not ABSENT; MISFIT: an object of another size

_FEW_KEYS = 10_000  # asked for one by one, which takes a file system no second


@dataclass(frozen=True, slots=True)
class Hits:
    """How far each chain can be restored; arrays are [chains] but for page_of.

    deployment:   whose servers would restore; None where the store shows none.
    needs:        the object sets that servers need, whose slots are ABSENT, MISFIT or HELD for
        each of page_names. Of trailing sets a prefix needs the pages at its end only.
    chains:       cut to their reach.
    page_names, page_of: distinct pages in hex, and which of them each page of `chains` is.
    kv_pages:     leading pages with kv on all ranks.
    usable_pages: the longest prefix that all ranks can restore.
    allowed:      [pages of `chains`] whether all ranks can restore the prefix that ends with each.
    stop_pages:   place in its chain of the page that keeps it from being restored further; -1
        where the whole chain can be.
    stop_specs:   the first object of that page at fault, a position in the deployment's specs;
        -1 without a stop, or without a deployment.
    misfits:      how many of these objects are there, but of another size.
    """

    deployment: Deployment | None
    needs: tuple[SlotBlock, ...]
    chains: Chains
    page_names: pa.StringArray
    page_of: IntArray
    kv_pages: IntArray
    usable_pages: IntArray
    allowed: BoolArray
    stop_pages: IntArray
    stop_specs: IntArray
    misfits: int

    def usable_within(self, lengths: IntArray) -> IntArray:
        """Find the longest prefix of each chain that is no longer than so many pages: [chains]."""
        return longest(self.allowed, self.chains.offsets, lengths)

    def needed(self, prefix_pages: IntArray | None = None) -> BoolArray:
        """Say what restoring prefixes takes: [page_names, needs].

        prefix_pages: [chains]; default: the usable ones. Of trailing pools that is no more than
        the window at the end of a prefix.
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
    affixes = [spec.affix for spec in object_specs(profile, codec.scheme)]
    if store.traits.lists_late or len(names) * len(affixes) <= _FEW_KEYS:
        asked = [*affixes, *other_ranks(affixes, codec)]
        keys = [join_keys(asked, pa.repeat(n, len(names)), names) for n in range(len(asked))]
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
    nothing can be restored. Memory: a byte for each page that the chains name and each object of
    the object sets it has, and some 30 bytes a page of a chain.
    """
    chains = chains.within_reach()
    page_names, page_of = chains.distinct_pages()
    if deployment_id is None:
        return _no_hits(chains, page_names, page_of)
    table = _held_objects(inventory, deployment_id, page_names, own=own)
    needs = tuple(block for block in table.blocks if block.spec.listed)
    pools = [
        PoolPages(_held(block, table.count)[page_of], block.spec.trailing_pages) for block in needs
    ]
    kv = [pool.present for b, pool in zip(needs, pools, strict=True) if b.spec.pool == "kv"]
    offsets = chains.offsets
    allowed = restorable(pools, offsets)
    usable = longest(allowed, offsets)
    runs = _all_pages_runs(pools, offsets)
    stops = _stop_pages(pools, offsets, runs, usable)
    stopped = np.flatnonzero(stops >= 0)
    at = page_of[offsets[:-1][stopped] + stops[stopped]]
    specs, is_misfit = _at_fault(needs, at, stops[stopped], runs[stopped])
    stop_specs = np.full(len(chains), -1, dtype=np.int64)
    stop_specs[stopped] = specs
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
        misfits=int(is_misfit.sum()),
    )


def _held_objects(
    inventory: Inventory, deployment_id: int, page_names: pa.StringArray, *, own: bool
) -> GroupTable:
    """Return the objects that servers of a deployment find of distinct pages: MISFIT or HELD.

    Servers go by the key alone, so objects count that another model has written under it; own:
    only those that were told to be the deployment's.
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
    return fill_table(specs, len(page_names), at, of_objects[rows], held)


def _held(block: SlotBlock, count: int) -> BoolArray:
    """Return which pages have every object of a set, of the right size: [pages]."""
    held = np.zeros(count, dtype=np.bool_)
    held[block.where(block.values == HELD).complete] = True
    return held


def _no_hits(chains: Chains, page_names: pa.StringArray, page_of: IntArray) -> Hits:
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


def _at_fault(
    needs: tuple[SlotBlock, ...], pages: IntArray, stops: IntArray, runs: IntArray
) -> tuple[IntArray, BoolArray]:
    """Find the first spec at fault at each stop: [stops], and whether its object is a misfit.

    pages: [stops] the page. stops: its place in its chain. runs: as above.
    """
    beyond = stops >= runs
    first = np.full(len(pages), np.iinfo(np.int64).max)
    is_misfit = np.zeros(len(pages), dtype=np.bool_)
    for block in needs:
        in_window = ~beyond & (stops >= runs - block.spec.trailing_pages)
        asked = np.flatnonzero(in_window if block.spec.trailing else beyond)
        slots = block.of(pages[asked])
        column = (slots != HELD).argmax(axis=1)
        found = slots[np.arange(len(asked)), column]
        earlier = (found != HELD) & (block.columns[column] < first[asked])
        first[asked[earlier]] = block.columns[column[earlier]]
        is_misfit[asked[earlier]] = found[earlier] == MISFIT
    return first, is_misfit
