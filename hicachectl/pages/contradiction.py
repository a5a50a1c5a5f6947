"""Refuse a profile that contradicts the store."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hicachectl.formats.errors import ProfileError
from hicachectl.pages.census import SEVERAL
from hicachectl.pages.deployments import UNRESOLVED, AffixTable, Deployment

if TYPE_CHECKING:
    from hicachectl.formats.arrays import IntArray
    from hicachectl.formats.spec import ObjectSpec
    from hicachectl.pages.census import Census

# Objects of a wrong size on fewer pages may be damaged. On more pages, if nearly all have one size
# and none has the right size, another deployment wrote them.
_NEARLY_ALL = 0.9
_LIST = "or list what the store has with hicachectl ls --summary"


def refuse_contradiction(table: AffixTable, census: Census, *, only_others: bool = False) -> None:
    """Raise ProfileError, with both numbers, if a profile contradicts the store.

    A profile contradicts the store if the store has only objects of other deployments, or has
    another size for all objects of a pool. only_others: accept the former.
    """
    profiled = table.deployments[:1] if table.deployments else ()
    if not profiled or profiled[0].profile is None:
        return
    deployments = np.array([*table.deployment_ids, UNRESOLVED])[census.affixes]
    own = deployments == 0
    if own.any():
        specs = np.array([*table.spec_ids, UNRESOLVED])[census.affixes[own]]
        for pool in dict.fromkeys(spec.pool for spec in profiled[0].specs):
            _refuse_sizes(profiled[0], pool, specs, census.sizes[own], census.objects[own])
    elif len(table.deployments) > 1 and not only_others:
        wanted = _describe(profiled[0].specs[0])
        found = "; ".join(sorted({_describe(d.specs[0]) for d in table.deployments[1:]}))
        raise ProfileError(
            f"The profile contradicts the store: expected {wanted}, found {found}; check model, "
            f"tag, and TP, PP and CP sizes, {_LIST}"
        )


def _refuse_sizes(
    deployment: Deployment, pool: str, specs: IntArray, sizes: IntArray, objects: IntArray
) -> None:
    """specs, sizes, objects: the spec, size and number of the objects of each count."""
    of_pool = np.array([spec.pool == pool and spec.listed for spec in deployment.specs])
    expected = np.array([spec.nbytes for spec in deployment.specs], dtype=np.int64)
    chosen = of_pool[specs] & (sizes >= 0)
    wanted, found, objects = expected[specs[chosen]], sizes[chosen], objects[chosen]
    total = objects.sum()
    if not total or total < SEVERAL * of_pool.sum() or (wanted == found).any():
        return
    pairs, of_pair = np.unique(np.stack([wanted, found]), axis=1, return_inverse=True)
    counts = np.zeros(pairs.shape[1], dtype=np.int64)
    np.add.at(counts, of_pair.reshape(-1), objects)
    # Expected sizes differ by stage and CP rank; each has one common pair.
    common = np.sort(counts)[::-1][: len(np.unique(wanted))].sum()
    if common >= _NEARLY_ALL * total:
        want, has = pairs[:, counts.argmax()].tolist()
        raise ProfileError(
            f"The profile contradicts the store: expected {want} bytes for {pool} objects, found "
            f"{has} bytes ({common} of {total} objects); check dtype, page size, layers and "
            f"TP size, {_LIST}"
        )


def _describe(spec: ObjectSpec) -> str:
    return f"model {spec.coordinate.names.model!r} {spec.coordinate.shard.sizes_text()}"
