"""Choose between possible readings of a key.

The evidence is the store's set of affixes. A rank suffix is accepted if all ranks 0..size-1 exist.
A pool name is accepted if the same deployment has an anchor. Without evidence, a key stays
ambiguous.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from hicachectl.formats.kinds.pool import pool_name
from hicachectl.formats.objects import ANCHOR

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from hicachectl.formats.keys.base import Affix, Grammar
    from hicachectl.formats.objects import Coordinate, Names, Sizes


@dataclass(frozen=True, slots=True)
class Resolved:
    """Meaning of an affix, which is one coordinate or several readings.

    coordinate: the coordinate; None if the affix is foreign (without readings) or ambiguous.
    readings: the possible readings.
    """

    coordinate: Coordinate | None
    readings: tuple[Coordinate, ...]

    @property
    def ambiguous(self) -> bool:
        """Whether several readings remain."""
        return self.coordinate is None and bool(self.readings)


def resolve_affixes(
    affixes: Iterable[Affix],
    grammar: Grammar,
    known: Mapping[Affix, Coordinate] | None = None,
) -> dict[Affix, Resolved]:
    """Return the meaning of every distinct affix of a store.

    known: coordinates of affixes that a profile describes. They take precedence over the evidence.
    """
    known = known or {}
    readings = grammar.narrow({affix: grammar.readings(*affix) for affix in affixes})
    ranks = _ranks_seen(reading for found in readings.values() for reading in found)
    resolved = {
        affix: Resolved(known[affix], (known[affix],)) for affix in readings if affix in known
    }
    # Anchors come first, because the other affixes are matched with the anchors' deployments.
    anchors = {affix for affix, found in readings.items() if found[:1] and found[0].pool == ANCHOR}
    for affix in anchors - resolved.keys():
        resolved[affix] = _choose(readings[affix], ranks)
    deployments = {
        deployment_of(found.coordinate)
        for affix, found in resolved.items()
        if found.coordinate is not None and found.coordinate.pool == ANCHOR
    }
    for affix in readings.keys() - resolved.keys():
        anchored = tuple(r for r in readings[affix] if _has_anchor(r, deployments))
        resolved[affix] = (
            Resolved(anchored[0], anchored)
            if len(anchored) == 1
            else _choose(anchored or readings[affix], ranks)
        )
    return resolved


def _choose(readings: tuple[Coordinate, ...], ranks: Mapping[object, set[object]]) -> Resolved:
    """Choose, among the readings whose ranks all exist, the reading that states the most ranks.

    If several readings state the most ranks, or no reading is left, the key stays ambiguous.
    """
    if len(readings) <= 1:
        return Resolved(next(iter(readings), None), readings)
    complete = [r for r in readings if explained(r) and _is_complete(r, ranks)]
    most = max(map(explained, complete), default=0)
    best = [reading for reading in complete if explained(reading) == most]
    return Resolved(best[0] if len(best) == 1 else None, readings)


def explained(reading: Coordinate) -> int:
    """Return the number of axes whose rank a reading states."""
    return sum(rank is not None for rank in reading.shard.ranks)


def _is_complete(reading: Coordinate, ranks: Mapping[object, set[object]]) -> bool:
    return len(ranks[rank_set(reading)]) == rank_count(reading)


def rank_count(reading: Coordinate) -> int:
    """Return the number of ranks that write together; 1 if the key states no sizes."""
    return prod(size or 1 for _, rank, size in reading.shard.axes if rank is not None)


def _ranks_seen(readings: Iterable[Coordinate]) -> dict[object, set[object]]:
    """Collect the rank tuples of sidecars and anchors for each (model, tag, sizes)."""
    seen: dict[object, set[object]] = defaultdict(set)
    for reading in readings:
        seen[rank_set(reading)].add(reading.shard.ranks)
    return seen


def rank_set(reading: Coordinate) -> object:
    """Return the fields that all ranks of a deployment share."""
    shard = reading.shard
    stated = tuple(None if rank is None else size for _, rank, size in shard.axes)
    return reading.names, stated, shard.dcp_page_size


def deployment_of(coordinate: Coordinate) -> tuple[Names, Sizes]:
    """Return the names and sizes of a reading."""
    return coordinate.names, coordinate.shard.sizes


def _has_anchor(reading: Coordinate, deployments: Collection[tuple[Names, Sizes]]) -> bool:
    names, own = deployment_of(reading)
    if (names, own) in deployments:
        return True
    # State keys have a tp pair even if the anchor's keys have none (HiCacheFile.tp_config_suffix).
    return pool_name(reading.pool).states and (names, rankless(own)) in deployments


def rankless(sizes: Sizes) -> Sizes:
    """Return the sizes that the anchor keys of a rank-replicated target state.

    sizes: sizes that the Mamba keys of the target state.
    """
    return (None if sizes[3] is None else sizes[0], *sizes[1:])
