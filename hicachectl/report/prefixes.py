"""Make the prefix tree of requests. It shows what a store can serve, and where requests stop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.formats.restorable import positions_of
from hicachectl.report.names import NO_RANKS, pool_text, rank_text
from hicachectl.requests.measuring import served_share
from hicachectl.text.terminal import escape_controls

if TYPE_CHECKING:
    import numpy.typing as npt

    from hicachectl.formats.arrays import IntArray
    from hicachectl.requests.chains import Forest
    from hicachectl.requests.hits import Hits
    from hicachectl.requests.measuring import HitsReport

# States of a page, the best first. If the requests of a page see several states, the best counts.
USABLE, KV_ONLY, LOST = range(3)
_NODES = 400  # most nodes drawn
_STOPS = 9  # most stops shown


@dataclass(frozen=True, slots=True)
class Node:
    """A run of pages that the same requests share, with one state.

    first, last: half-open range of pages, counted from the start of the prefix.
    top, bottom: half-open range of rows, one for each request.
    state: state of the pages.
    """

    first: int
    last: int
    top: int
    bottom: int
    state: int


@dataclass(frozen=True, slots=True)
class Stop:
    """A missing object, without which some requests have no more usable pages.

    requests: number of these requests.
    pages_lost: number of their pages that are not usable.
    elsewhere: another deployment that has the page, such as "tp 4"; "" if there is none.
    at: index of the page in the chains.
    row: row at which the stop is drawn; None if it is not drawn.
    """

    key: str
    pool: str
    rank: str
    page: str
    elsewhere: str
    requests: int
    pages_lost: int
    at: int
    row: float | None


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """Requests as a prefix tree, and sums over them.

    page_size: number of tokens of a page; None if unknown.
    usable_share, served_share: shares of the requested tokens, counted as in `hits`; None if no
        token is requested.
    below: number of requests with usable pages that servers do not fetch, because these pages have
        fewer tokens than the prefetch threshold.
    requests: number of requests.
    pages, usable, kv_only: numbers of all pages, of usable pages, and of the leading pages after
        these that have kv, summed over the requests.
    unstopped: number of requests that nothing stops.
    nodes: nodes that are drawn, most requests first.
    hidden: number of nodes that are not drawn.
    stops: stops that are shown, most requests first.
    stop_count: number of all stops.
    """

    deployment: str
    page_size: int | None
    usable_share: float | None
    served_share: float | None
    below: int
    requests: int
    pages: int
    usable: int
    kv_only: int
    unstopped: int
    nodes: tuple[Node, ...]
    hidden: int
    stops: tuple[Stop, ...]
    stop_count: int


def prefix_tree(hits: Hits, measured: HitsReport, deployment: str) -> PrefixTree:
    """Return the tree of the chains of hits.

    measured: report on these hits.
    deployment: name of the measured deployment.
    Raises FormatError if chains contradict each other.
    """
    chains = hits.chains
    forest = chains.forest
    counts = np.bincount(hits.page_of, minlength=len(forest)).astype(np.int64)
    runs = _runs(forest, _states(hits), counts, hits.page_of)
    nodes, rows = _placed(runs)
    stopped_by = measured.rows.column("stopped_by")
    stops, stop_count = _stops(hits, stopped_by, runs, rows)
    reasons = pc.struct_field(stopped_by, "reason")
    return PrefixTree(
        deployment=deployment,
        page_size=chains.page_size,
        usable_share=measured.document["usable_share"],
        served_share=served_share(measured.document),
        below=len(reasons) - int(reasons.null_count),
        requests=len(chains),
        pages=len(hits.page_of),
        usable=int(hits.usable_pages.sum()),
        kv_only=int(np.maximum(hits.kv_pages - hits.usable_pages, 0).sum()),
        unstopped=int((hits.stop_pages < 0).sum()),
        nodes=tuple(nodes),
        hidden=len(runs.heads) - len(nodes),
        stops=tuple(stops),
        stop_count=stop_count,
    )


def _states(hits: Hits) -> npt.NDArray[np.int8]:
    """Return the state of each distinct page: [page_names]."""
    lengths = np.diff(hits.chains.offsets)
    places = positions_of(hits.chains.offsets)
    of_place = np.full(len(places), LOST, dtype=np.int8)
    of_place[places < np.repeat(hits.kv_pages, lengths)] = KV_ONLY
    of_place[places < np.repeat(hits.usable_pages, lengths)] = USABLE
    states = np.full(len(hits.page_names), LOST, dtype=np.int8)
    np.minimum.at(states, hits.page_of, of_place)
    return states


@dataclass(frozen=True, slots=True, eq=False)
class _Runs:
    """Runs of pages. Arrays are [runs] unless stated otherwise.

    heads: first page of the run.
    parents: run before the run; -1 if there is none.
    first, last: half-open range of pages, counted from the start of the prefix.
    requests: number of requests that use the run.
    states: state of the pages.
    of_page: [pages] run of the page.
    """

    heads: IntArray
    parents: IntArray
    first: IntArray
    last: IntArray
    requests: IntArray
    states: npt.NDArray[np.int8]
    of_page: IntArray


def _runs(
    forest: Forest, states: npt.NDArray[np.int8], counts: IntArray, page_of: IntArray
) -> _Runs:
    """Divide a forest into runs.

    A page continues the run of its parent if the same requests use both pages, in the same state.
    """
    parents = forest.parents
    begins = (parents < 0) | (counts != counts[parents]) | (states != states[parents])
    heads = np.flatnonzero(begins)
    numbers = np.cumsum(begins) - 1
    # The run of a page begins at the page itself, or at the nearest earlier page that begins a run.
    last = np.maximum.accumulate(np.where(begins[page_of], np.arange(len(page_of)), 0))
    of_page = np.zeros(len(forest), dtype=np.int64)
    of_page[page_of] = numbers[page_of[last]]
    first = forest.depths[heads].astype(np.int64)
    return _Runs(
        heads=heads,
        parents=np.where(parents[heads] < 0, -1, of_page[parents[heads]]),
        first=first,
        last=first + np.bincount(of_page, minlength=len(heads)),
        requests=counts[heads],
        states=states[heads],
        of_page=of_page,
    )


def _placed(runs: _Runs) -> tuple[list[Node], dict[int, float]]:
    """Place the runs with the most requests. Return the nodes, and the middle row of each node."""
    # In this order, a run comes after its parent, which has at least as many requests as the run.
    order = np.lexsort((runs.first, -runs.requests))[:_NODES].tolist()
    nodes: list[Node] = []
    rows: dict[int, float] = {}
    free = {-1: 0}  # next free row for a child of each run
    for number in order:
        parent = int(runs.parents[number])
        top = free[parent]
        bottom = free[parent] = top + int(runs.requests[number])
        free[number] = top
        rows[number] = (top + bottom) / 2
        nodes.append(
            Node(int(runs.first[number]), int(runs.last[number]), top, bottom,
                 int(runs.states[number]))
        )  # fmt: skip
    return nodes, rows


def _stops(
    hits: Hits, stopped_by: pa.ChunkedArray, runs: _Runs, rows: dict[int, float]
) -> tuple[list[Stop], int]:
    """Return the objects that stop the most requests, and the number of all such objects."""
    chains = np.flatnonzero(hits.stop_pages >= 0)
    starts = hits.chains.offsets[:-1][chains]
    pages = hits.page_of[starts + hits.stop_pages[chains]]
    specs = len(hits.deployment.specs) + 1 if hits.deployment else 1
    codes = pages * specs + hits.stop_specs[chains] + 1
    _, first, of_chain = np.unique(codes, return_index=True, return_inverse=True)
    requests = np.bincount(of_chain, minlength=len(first))
    lengths = np.diff(hits.chains.offsets)[chains]
    lost = np.bincount(of_chain, lengths - hits.usable_pages[chains], minlength=len(first))
    order = np.lexsort((-lost, -requests))[:_STOPS].tolist()
    stops = []
    for number in order:
        chain = int(chains[first[number]])
        said = stopped_by[chain].as_py()
        stops.append(
            Stop(
                key=escape_controls(said["key"] or ""),
                pool=pool_text(said["pool"], said["part"]),
                rank=rank_text(said["shard"]) if said["shard"] else NO_RANKS,
                page=said["page"],
                elsewhere=escape_controls(said["exists_at"] or ""),
                requests=int(requests[number]),
                pages_lost=int(lost[number]),
                at=int(hits.stop_pages[chain]),
                row=rows.get(int(runs.of_page[pages[first[number]]])),
            )
        )
    return stops, len(first)
