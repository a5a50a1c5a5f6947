"""Order the pages of chains by the value of warming them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import pyarrow.compute as pc

from hicachectl.formats.hashing import HASH_BYTES, restorable_pages
from hicachectl.prewarming.forest import grow_forest
from hicachectl.prewarming.plan import plan_order
from hicachectl.prewarming.trace import Trace
from hicachectl.requests.chains import Chains, hex_pages, raw_pages

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt
    import pyarrow as pa

    from hicachectl.prewarming.plan_file import PlannedPages
    from hicachectl.requests.chains import Hashing

    IntArray = npt.NDArray[np.int64]
    Rank = Callable[[Chains, pa.StringArray, IntArray], IntArray]


@dataclass(frozen=True, slots=True, eq=False)
class Ranker:
    """Ranking of pages by the requests that use them.

    times: [chains] float64, not decreasing; None if unknown: pages that more requests share then
    come first, and pages with equal counts keep the order of the chains.
    output_tokens: [chains], -1 if unknown.
    """

    times: npt.NDArray[np.float64] | None = None
    output_tokens: IntArray | None = None

    def __call__(self, chains: Chains, names: pa.StringArray, page_of: IntArray) -> IntArray:
        """Return each distinct page's rank; see `PrewarmRequest.rank`."""
        unknown = np.full(len(chains), -1, dtype=np.int64)
        blocks = page_of.astype(np.int32)
        trace = Trace(
            times=self.times,
            offsets=chains.offsets,
            blocks=blocks,
            input_tokens=chains.tokens,
            output_tokens=unknown if self.output_tokens is None else self.output_tokens,
            block_tokens=0,
            forest=grow_forest(raw_pages(names), blocks, chains.offsets),
        )
        rank = np.full(len(names), len(names), dtype=np.int64)
        plan = plan_order(trace)
        order = plan.order
        if self.times is None:
            # One chain after another, so that each prefix is copied with the states at its end.
            first = np.full(len(names), len(page_of), dtype=np.int64)
            np.minimum.at(first, page_of, np.arange(len(page_of)))
            order = order[np.lexsort((first[order], -plan.values))]
        rank[order] = np.arange(len(order))
        return rank


def chains_of_trace(trace: Trace, hashing: Hashing) -> Chains:
    """Return the chains of a trace whose blocks are pages."""
    names = trace.forest.names.reshape(-1, HASH_BYTES).astype(np.uint8, copy=False)
    tokens = trace.input_tokens.astype(np.int64)
    reach = [restorable_pages(n, hashing.page_size, bigram=hashing.bigram) for n in tokens.tolist()]
    pages = names[trace.blocks]
    return Chains(pages, trace.offsets, tokens, np.array(reach, np.int64), trace.sample)


def prefixes_worth_asking(
    chains: Chains, usable_pages: IntArray, rank: Rank, *, longest_only: bool
) -> IntArray:
    """Return the indices of chains that contain each usable prefix once, best first.

    longest_only: leave out a prefix that another usable prefix continues.
    """
    usable = replace(chains, reach=usable_pages).within_reach()
    names, page_of = usable.distinct_pages()
    some = np.flatnonzero(usable_pages)
    last = usable.offsets[some + 1] - 1
    if longest_only:
        inner = np.ones(len(page_of), dtype=np.bool_)
        inner[last] = False
        ends_nothing = np.zeros(len(names), dtype=np.bool_)
        ends_nothing[page_of[inner]] = True
        kept = ~ends_nothing[page_of[last]]
        some, last = some[kept], last[kept]
    _, first = np.unique(page_of[last], return_index=True)
    ranks = rank(usable, names, page_of)[page_of[last[first]]]
    chosen: IntArray = some[first][np.argsort(ranks, kind="stable")]
    return chosen


class PlannedOrder:
    """Ranking of pages by an existing plan."""

    def __init__(self, pages: pa.StringArray) -> None:
        self._pages = pages

    def __call__(self, chains: Chains, names: pa.StringArray, page_of: IntArray) -> IntArray:
        """Return each distinct page's rank in the plan's order."""
        places = pc.index_in(names, value_set=self._pages.cast(names.type)).to_numpy()
        rank = np.empty(len(places), dtype=np.int64)
        rank[np.argsort(places, kind="stable")] = np.arange(len(places))
        return rank


def chains_of_plan(planned: PlannedPages, page_size: int) -> tuple[Chains, PlannedOrder]:
    """Return a plan's chains, one for each page that is not a parent, and the plan's order."""
    inner = np.zeros(len(planned), dtype=np.bool_)
    inner[planned.parents[planned.parents >= 0]] = True
    chains = [_path(planned.parents, leaf) for leaf in np.flatnonzero(~inner).tolist()]
    lengths = np.array([len(chain) for chain in chains], dtype=np.int64)
    order = np.concatenate([np.zeros(0, dtype=np.int64), *chains]).astype(np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    made = Chains(planned.hashes[order], offsets, lengths * page_size, lengths)
    return made, PlannedOrder(hex_pages(planned.hashes))


def _path(parents: IntArray, leaf: int) -> IntArray:
    chain = []
    at = leaf
    while at >= 0:
        chain.append(at)
        at = int(parents[at])
    return np.array(chain[::-1], dtype=np.int64)
