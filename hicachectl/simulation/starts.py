"""Pages that caches hold at the start: the pages of a store, or of a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hicachectl.pages.group_table import WHOLE
from hicachectl.prewarming.ranking import places_among
from hicachectl.simulation.caches import Start

if TYPE_CHECKING:
    import numpy.typing as npt

    from hicachectl.formats.arrays import IntArray
    from hicachectl.pages.groups import PageGroups
    from hicachectl.prewarming.ranking import PlannedPages
    from hicachectl.requests.chains import Requests

    Worth = npt.NDArray[np.float64]


def start_from_store(groups: PageGroups, requests: Requests) -> Start:
    """Return the whole pages of the first deployment, the least recently used page first.

    groups: groups of an inventory with the column `atime_ns`, if the store has this column.
    """
    table, span = groups.tables[0], groups.span(0)
    held = np.flatnonzero(table.states == WHOLE)
    trailing = np.zeros(len(held), np.bool_)
    for block in table.blocks:
        if block.spec.trailing:
            trailing |= np.isin(held, block.complete)
    used = groups.used_ns[span.start + held] / 1e9
    places = places_among(groups.pages_at(span.start + held), requests.page_names)
    blocks, order = _ordered(requests, places, used)
    return Start(blocks[order], trailing[order], used[order] if groups.has_times else None)


def start_from_plan(planned: PlannedPages, requests: Requests) -> Start:
    """Return the pages of a plan, the least valuable page first."""
    places = places_among(planned.pages, requests.page_names)
    blocks, order = _ordered(requests, places, -np.arange(len(places), dtype=np.float64))
    return Start(blocks[order])


def _ordered(requests: Requests, places: IntArray, worth: Worth) -> tuple[IntArray, IntArray]:
    """Return the number of each page, and the order of the pages, the least valuable page first.

    Every page stands before the pages of its prefix, so that caches evict it first.

    places: [held] index of each page among the names of the requests; -1 if no request uses it.
    worth: [held] value of each page.
    """
    known, distinct = places >= 0, len(requests.names)
    blocks = places.copy()
    blocks[~known] = distinct + np.arange(np.count_nonzero(~known))
    if not known.any():
        return blocks, np.argsort(worth, kind="stable")
    values = np.full(distinct, -np.inf)
    values[places[known]] = worth[known]
    closed, depths = worth.copy(), np.zeros(len(places), np.int64)
    closed[known] = requests.forest.closed(values)[places[known]]
    depths[known] = requests.forest.depths[places[known]]
    return blocks, np.lexsort((-depths, closed))
