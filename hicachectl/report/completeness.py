"""Count how many pages of a deployment have the objects of each pool and rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hicachectl.formats.keys.columns import shard_fields
from hicachectl.report.names import deployment_name, pool_text, rank_text

if TYPE_CHECKING:
    from hicachectl.formats.arrays import BoolArray
    from hicachectl.pages.groups import PageGroups

_RANKS = 32  # most ranks shown
_POOLS = 40  # most pools shown


@dataclass(frozen=True, slots=True)
class Share:
    """Numbers of pages that have, and that should have, the objects of a pool and rank."""

    pool: str
    rank: str
    present: int
    expected: int

    @property
    def missing(self) -> int:
        """Number of pages that lack the objects."""
        return self.expected - self.present

    @property
    def share(self) -> float:
        """Share of the expected pages that have the objects, from 0 to 1."""
        return self.present / self.expected


@dataclass(frozen=True, slots=True)
class Completeness:
    """Shares of one deployment.

    pages: number of pages judged.
    ranks_left_out: number of ranks not shown, which are the most complete.
    pools_left_out: number of pools not shown, which are the most complete.
    """

    deployment: str
    pages: int
    shares: tuple[Share, ...]
    ranks_left_out: int = 0
    pools_left_out: int = 0


def completeness_of(groups: PageGroups, in_flight: BoolArray) -> list[Completeness]:
    """Return the shares of each deployment with pages, most pages first.

    A trailing pool is expected only for pages that have any of its objects.
    in_flight: [groups] whether the group is in flight, so that it is not judged.
    """
    found = []
    for number, table in enumerate(groups.tables):
        judged = ~in_flight[groups.span(number)]
        pages = int(judged.sum())
        counts: dict[tuple[str, str], tuple[int, int]] = {}
        for block in table.blocks if pages else ():
            if not block.spec.listed:
                continue
            expected = int(judged[block.groups].sum()) if block.spec.trailing else pages
            places = block.places[judged[block.owners]]
            present = np.bincount(places, minlength=len(block.columns)).tolist()
            for position, have in zip(block.columns.tolist(), present, strict=True):
                coordinate = table.specs[position].coordinate
                key = (
                    pool_text(coordinate.pool, coordinate.part),
                    rank_text(shard_fields(coordinate.shard)),
                )
                before = counts.get(key, (0, 0))
                counts[key] = before[0] + have, before[1] + expected
        shares = [Share(*key, *both) for key, both in counts.items() if both[1]]
        if shares:
            name = deployment_name(groups.deployments[number])
            found.append(_of_worst(name, pages, shares))
    return sorted(found, key=lambda one: -one.pages)


def _of_worst(name: str, pages: int, shares: list[Share]) -> Completeness:
    ranks, other_ranks = _worst([(one.rank, one.share) for one in shares], _RANKS)
    pools, other_pools = _worst([(one.pool, one.share) for one in shares], _POOLS)
    kept = tuple(one for one in shares if one.rank in ranks and one.pool in pools)
    return Completeness(name, pages, kept, other_ranks, other_pools)


def _worst(shares: list[tuple[str, float]], most: int) -> tuple[set[str], int]:
    """Return the names with the smallest shares, and the number of other names."""
    worst: dict[str, float] = {}
    for name, share in shares:
        worst[name] = min(worst.get(name, 1.0), share)
    shown = sorted(worst, key=lambda name: worst[name])[:most]
    return set(shown), len(worst) - len(shown)
