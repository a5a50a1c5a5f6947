"""Deployments of a store and their specs, from a profile or from keys.

A deployment is one combination of a model, a tag, and TP, PP, CP and DCP sizes. It has one spec for
each affix, so later steps find specs by affix id.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import numpy as np

from hicachectl.formats.keys.labels import group_label
from hicachectl.formats.keys.resolve import (
    Resolved,
    deployment_of,
    rankless,
    resolve_affixes,
)
from hicachectl.formats.keys.table import page_starts
from hicachectl.formats.kinds.pool import default_hit_policy, pool_name
from hicachectl.formats.objects import ANCHOR, Coordinate, Shard
from hicachectl.formats.spec import UNKNOWN_SIZE, ObjectSpec, object_specs

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from hicachectl.formats.arrays import BoolArray, IntArray
    from hicachectl.formats.keys.base import Affix, Grammar
    from hicachectl.formats.objects import Names, Sizes
    from hicachectl.formats.profile import Profile


UNRESOLVED = -1  # deployment id of an affix that is foreign or ambiguous


@dataclass(frozen=True, slots=True)
class Deployment:
    """A deployment and the objects that its pages can have.

    profile: profile that states the deployment; None if the deployment is inferred from keys.
    specs: specs of the objects, anchors first.
    """

    names: Names
    profile: Profile | None
    specs: tuple[ObjectSpec, ...]

    @property
    def shard(self) -> Shard:
        """Shard of the first spec. `ls` shows the sizes of this shard."""
        return self.specs[0].coordinate.shard if self.specs else Shard()

    def label(self, grammar: Grammar, specs: Iterable[ObjectSpec] | None = None) -> str:
        """Return the label of a group that has objects of the given specs.

        specs: None for all specs of the deployment.
        """
        specs = self.specs if specs is None else specs
        return group_label(grammar, self.names, (spec.affix for spec in specs))


@dataclass(frozen=True, slots=True)
class SeenSize:
    """A size of a kind of object, with counts and write times.

    oldest_ns, newest_ns: first and last write, Unix nanoseconds; None if the store keeps no times.
    """

    nbytes: int
    pages: int
    objects: int
    oldest_ns: int | None
    newest_ns: int | None


@dataclass(frozen=True, slots=True)
class SizeMix:
    """A kind of object with several common sizes.

    coordinate: coordinate of the kind's first affix.
    sizes: common sizes, most pages first.
    pages: number of pages with an object of the kind.
    stated: size that a profile states; UNKNOWN_SIZE without a profile. A stated size is one of
        `sizes`, and some pages of each other size may be as new as pages of the stated size.
    """

    affix_ids: tuple[int, ...]
    coordinate: Coordinate
    sizes: tuple[SeenSize, ...]
    pages: int
    stated: int = UNKNOWN_SIZE

    @property
    def others(self) -> tuple[int, ...]:
        """Sizes that the profile does not state; empty without a profile."""
        if self.stated == UNKNOWN_SIZE:
            return ()
        return tuple(size.nbytes for size in self.sizes if size.nbytes != self.stated)


@dataclass(frozen=True)
class AffixTable:
    """Deployment and spec of each affix of a store. Lists are indexed by affix id.
    An affix with ambiguous pages (`contested`) has a second id for the objects of these pages.

    deployment_ids: index of the affix's deployment in `deployments`, or UNRESOLVED.
    spec_ids: index of the affix's spec among the specs of its deployment, or UNRESOLVED.
    """

    grammar: Grammar
    profile: Profile | None
    affixes: tuple[Affix, ...]
    resolved: tuple[Resolved, ...]
    deployments: tuple[Deployment, ...]
    deployment_ids: tuple[int, ...]
    spec_ids: tuple[int, ...]
    mixes: tuple[SizeMix, ...] = ()

    @cached_property
    def specs(self) -> tuple[ObjectSpec | None, ...]:
        """The spec of each affix id; None if the affix is foreign or ambiguous."""
        return tuple(
            None if number == UNRESOLVED else self.deployments[number].specs[position]
            for number, position in zip(self.deployment_ids, self.spec_ids, strict=True)
        )

    @cached_property
    def expected_sizes(self) -> IntArray:
        """Expected bytes of an object by affix id: [affixes + 1]; UNKNOWN_SIZE if not known.

        The last entry is for foreign keys.
        """
        sizes = [UNKNOWN_SIZE if spec is None else spec.nbytes for spec in self.specs]
        return np.array([*sizes, UNKNOWN_SIZE], dtype=np.int64)

    @cached_property
    def anchors(self) -> BoolArray:
        """Whether an object is an anchor, or may be one, by affix id: [affixes + 1].

        The last entry is for foreign keys.
        """
        anchors = [
            any(reading.pool == ANCHOR for reading in one.readings) if spec is None else spec.anchor
            for spec, one in zip(self.specs, self.resolved, strict=True)
        ]
        return np.array([*anchors, False], dtype=np.bool_)

    @cached_property
    def page_starts(self) -> IntArray:
        """Number of bytes before the page hash of a key, by affix id: [affixes + 1].

        It is -1 if the keys have no page hash, and for foreign keys, which have the last entry.
        """
        known = np.array([*(bool(one.readings) for one in self.resolved), False])
        return np.where(known, page_starts(self.affixes), -1)


def assign_affixes(
    affixes: Sequence[Affix], grammar: Grammar, profile: Profile | None
) -> AffixTable:
    """Resolve the affixes of a store and assign them to deployments.

    Affixes that the profile lacks form deployments by model, tag and sizes, with specs from keys
    alone.
    """
    specs = () if profile is None else profiled_deployment(profile, grammar.name).specs
    known = {spec.affix: spec.coordinate for spec in specs}
    resolved = resolve_affixes(affixes, grammar, known)
    return make_table(affixes, [resolved[affix] for affix in affixes], grammar, profile)


def make_table(
    affixes: Sequence[Affix],
    resolved: Sequence[Resolved],
    grammar: Grammar,
    profile: Profile | None,
) -> AffixTable:
    """Assign affixes to deployments by their resolved coordinates.

    affixes, resolved: [ids] affixes and their readings. An affix may occur twice, with different
        readings.
    """
    read = zip(affixes, (one.coordinate for one in resolved), strict=True)
    rest = dict.fromkeys((affix, c) for affix, c in read if c is not None)
    deployments: list[Deployment] = []
    if profile is not None:
        own = profiled_deployment(profile, grammar.name)
        for spec in own.specs:
            rest.pop((spec.affix, spec.coordinate), None)
        unlisted = _unlisted_specs(own, rest)
        for spec in unlisted:
            del rest[spec.affix, spec.coordinate]
        deployments.append(replace(own, specs=own.specs + unlisted))
    deployments += _inferred_deployments([coordinate for _, coordinate in rest], grammar)
    places: dict[tuple[Affix, Coordinate | None], tuple[int, int]] = {
        (spec.affix, spec.coordinate): (number, position)
        for number, deployment in enumerate(deployments)
        for position, spec in enumerate(deployment.specs)
    }
    placed = [
        places.get((affix, one.coordinate), (UNRESOLVED, UNRESOLVED))
        for affix, one in zip(affixes, resolved, strict=True)
    ]
    return AffixTable(
        grammar=grammar,
        profile=profile,
        affixes=tuple(affixes),
        resolved=tuple(resolved),
        deployments=tuple(deployments),
        deployment_ids=tuple(deployment for deployment, _ in placed),
        spec_ids=tuple(spec for _, spec in placed),
    )


@lru_cache(maxsize=8)
def profiled_deployment(profile: Profile, grammar: str) -> Deployment:
    """Return the deployment of a profile, under a key grammar."""
    specs = object_specs(profile, grammar)
    return Deployment(specs[0].coordinate.names, profile, specs)


def other_ranks(affixes: Collection[Affix], grammar: Grammar) -> list[Affix]:
    """Return the affixes that fellow TP ranks of some affixes would have, under any reading.

    If the store has objects with the returned affixes, the keys with the given affixes belong to
    another deployment.
    """
    readings = [reading for affix in affixes for reading in grammar.readings(*affix)]
    ranks = {grammar.affix(coordinate) for coordinate in _with_fellow_ranks(readings)}
    return sorted(ranks - set(affixes) - {grammar.affix(reading) for reading in readings})


def _unlisted_specs(
    deployment: Deployment, coordinates: Iterable[tuple[Affix, Coordinate]]
) -> tuple[ObjectSpec, ...]:
    """Return specs for sidecars of the profile's anchors that the profile does not list.

    Objects of such specs are not orphans, and pages are whole without them.
    """
    anchors = {deployment_of(spec.coordinate) for spec in deployment.specs if spec.anchor}
    return tuple(
        ObjectSpec(affix=affix, coordinate=coordinate, trailing_pages=1, listed=False)
        for affix, coordinate in coordinates
        if coordinate.pool != ANCHOR and not anchors.isdisjoint(_owners(coordinate))
    )


def _owners(coordinate: Coordinate) -> set[tuple[Names, Sizes]]:
    """Return the names and sizes of the deployments that may own a sidecar."""
    names, own = deployment_of(coordinate)
    # Keys of Mamba states have a TP size even if the keys of the anchor have none (MLA on file).
    shared = {(names, rankless(own))} if pool_name(coordinate.pool).states else set()
    return {(names, own)} | shared


def _inferred_deployments(
    coordinates: Collection[Coordinate], grammar: Grammar
) -> list[Deployment]:
    # Mamba states join the deployment of any other object, not only of anchors, because their group
    # must not depend on the presence of anchors.
    shared = {deployment_of(c) for c in coordinates if not pool_name(c.pool).states}
    gathered: dict[tuple[Names, Sizes], list[Coordinate]] = defaultdict(list)
    for coordinate in coordinates:
        identity = deployment_of(coordinate)
        owners = _owners(coordinate) & shared
        gathered[identity if identity in owners or not owners else owners.pop()].append(coordinate)
    return [
        Deployment(names, None, _inferred_specs(found, grammar))
        for (names, _), found in sorted(gathered.items(), key=repr)
    ]


def _inferred_specs(found: list[Coordinate], grammar: Grammar) -> tuple[ObjectSpec, ...]:
    anchor = _anchor_pool({coordinate.pool for coordinate in found})
    specs = [
        ObjectSpec(
            affix=grammar.affix(coordinate),
            coordinate=coordinate,
            anchor=coordinate.pool == anchor,
            trailing_pages=int(default_hit_policy(coordinate.pool) == "trailing_pages"),
        )
        for coordinate in _with_fellow_ranks(found)
    ]
    return tuple(sorted(specs, key=lambda spec: (not spec.anchor, spec.pool, _rank_order(spec))))


def _with_fellow_ranks(found: list[Coordinate]) -> set[Coordinate]:
    """Return the coordinates, and those of the TP ranks that they imply: rank 1 of 2 implies 0."""
    any_rank = {
        replace(coordinate, shard=replace(coordinate.shard, tp_rank=0))
        for coordinate in found
        if coordinate.shard.tp_rank is not None
    }
    return set(found) | {
        replace(coordinate, shard=replace(coordinate.shard, tp_rank=rank))
        for coordinate in any_rank
        for rank in range(coordinate.shard.tp_size or 0)
        # Under DCP a TP rank has only one DCP rank (HiCacheStorageConfig.__post_init__).
        if rank % (coordinate.shard.dcp_size or 1) == (coordinate.shard.dcp_rank or 0)
    }


def _rank_order(spec: ObjectSpec) -> tuple[object, ...]:
    shard = spec.coordinate.shard
    ranks = (shard.pp_rank, shard.cp_rank, shard.dcp_rank, shard.tp_rank)
    sizes = spec.coordinate.part or "", shard.tp_size or 0
    # The affix breaks the tie between rank None and rank 0, since sets have no order.
    return *(rank or 0 for rank in ranks), *sizes, spec.affix


def _anchor_pool(pools: set[str]) -> str:
    """Return the anchor pool: kv or, without kv, the first pool of DeepSeek-V4 that all pages have.

    If there is no such pool, the result is kv, because all objects are sidecars without their kv.
    """
    compressed = sorted(
        p for p in pools if p.startswith("deepseek_v4_") and default_hit_policy(p) == "all_pages"
    )
    return ANCHOR if ANCHOR in pools or not compressed else compressed[0]
