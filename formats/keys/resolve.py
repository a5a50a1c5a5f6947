"""Choose between the readings of a key that its grammar leaves open.

The evidence is the set of distinct affixes of a store: a rank suffix is believed where ranks
0..size-1 are seen together, a pool name where the same deployment has an anchor. What stays open
is left open, never guessed.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from hicachectl.formats.kinds.pool import pool_name

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from hicachectl.formats.keys.base import Affix, KeyCodec
    from hicachectl.formats.objects import Coordinate, Sizes

ANCHOR_POOL = "kv"


@dataclass(frozen=True, slots=True)
class Resolved:
    """What an affix stands for: a coordinate, or the readings between which nothing decides.

    coordinate is None for a foreign affix (no readings) and for an ambiguous one.
    """

    coordinate: Coordinate | None
    readings: tuple[Coordinate, ...]

    @property
    def ambiguous(self) -> bool:
        """Whether several readings are left."""
        return self.coordinate is None and bool(self.readings)


def resolve_affixes(
    affixes: Iterable[Affix],
    codec: KeyCodec,
    known: Mapping[Affix, Coordinate] | None = None,
) -> dict[Affix, Resolved]:
    """One `Resolved` for every distinct affix of a store.

    known: affixes that a profile accounts for; they are taken as it says.
    """
    known = known or {}
    readings = {affix: codec.readings(*affix) for affix in affixes}
    narrow = getattr(codec, "narrow", None)
    if narrow is not None:
        readings = narrow(readings)
    ranks = _ranks_seen(reading for found in readings.values() for reading in found)
    resolved = {
        affix: Resolved(known[affix], (known[affix],)) for affix in readings if affix in known
    }
    anchors = {
        affix for affix, found in readings.items() if found[:1] and found[0].pool == ANCHOR_POOL
    }
    for affix in anchors - resolved.keys():
        resolved[affix] = _choose(readings[affix], ranks)
    deployments = {
        deployment_of(found.coordinate)
        for affix, found in resolved.items()
        if found.coordinate is not None and found.coordinate.pool == ANCHOR_POOL
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
    """Choose the reading that explains most of the text with all its ranks seen, if alone."""
    if len(readings) <= 1:
        return Resolved(next(iter(readings), None), readings)
    complete = [r for r in readings if explained(r) and _is_complete(r, ranks)]
    most = max(map(explained, complete), default=0)
    best = [reading for reading in complete if explained(reading) == most]
    return Resolved(best[0] if len(best) == 1 else None, readings)


def explained(reading: Coordinate) -> int:
    """Count the rank pairs of the text that a reading takes as such."""
    return sum(rank is not None for rank in reading.shard.ranks)


def _is_complete(reading: Coordinate, ranks: Mapping[object, set[object]]) -> bool:
    return len(ranks[rank_set(reading)]) == rank_count(reading)


def rank_count(reading: Coordinate) -> int:
    """Count the ranks that write together under a reading; 1 where its key names no sizes."""
    return prod(size or 1 for _, rank, size in reading.shard.axes if rank is not None)


def _ranks_seen(readings: Iterable[Coordinate]) -> dict[object, set[object]]:
    """Gather the rank tuples of each (model, tag, sizes), sidecars with their anchors."""
    seen: dict[object, set[object]] = defaultdict(set)
    for reading in readings:
        seen[rank_set(reading)].add(reading.shard.ranks)
    return seen


def rank_set(reading: Coordinate) -> object:
    """Return what the readings of all ranks that write together have in common."""
    shard = reading.shard
    stated = tuple(None if rank is None else size for _, rank, size in shard.axes)
    return reading.model, reading.tag, stated, shard.dcp_page_size


def deployment_of(coordinate: Coordinate) -> tuple[str, str, Sizes]:
    """Return what tells the deployment of a reading from others: model, tag and sizes."""
    return coordinate.model, coordinate.tag, coordinate.shard.sizes


def _has_anchor(reading: Coordinate, deployments: Collection[tuple[str, str, Sizes]]) -> bool:
    """Whether some anchor's deployment can own a sidecar with this reading."""
    model, tag, own = deployment_of(reading)
    if (model, tag, own) in deployments:
        return True
    # Such pools keep their tp pair beside an anchor without one (HiCacheFile.tp_config_suffix).
    return pool_name(reading.pool).states and (model, tag, rankless(own)) in deployments


def rankless(sizes: Sizes) -> Sizes:
    """Return the sizes of a rank-replicated target whose Mamba keys have these."""
    return (None if sizes[3] is None else sizes[0], *sizes[1:])
