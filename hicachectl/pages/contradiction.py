"""Refuse a profile that contradicts the store."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hicachectl.formats.errors import ProfileError
from hicachectl.pages.deployments import UNRESOLVED, AffixTable, Deployment

if TYPE_CHECKING:
    import numpy.typing as npt

    from hicachectl.formats.spec import ObjectSpec

    IntArray = npt.NDArray[np.int64]

# Objects of a wrong size on fewer pages may be damaged. On more pages, if nearly all have one size
# and none has the right size, another deployment wrote them.
_PAGES = 3
_NEARLY_ALL = 0.9


def refuse_contradiction(
    table: AffixTable, affix_ids: npt.NDArray[np.int32], nbytes: IntArray
) -> None:
    """Raise ProfileError, with both numbers, if a profile contradicts the store.

    A profile contradicts the store if the store has no object of the profile, or has another size
    for all objects of a pool.
    affix_ids, nbytes: [objects].
    """
    profiled = table.deployments[:1] if table.deployments else ()
    if not profiled or profiled[0].profile is None:
        return
    deployments = np.array([*table.deployment_ids, UNRESOLVED])[affix_ids]
    specs = np.array([*table.spec_ids, UNRESOLVED])[affix_ids]
    own = deployments == 0
    if own.any():
        for pool in dict.fromkeys(spec.pool for spec in profiled[0].specs):
            _refuse_sizes(profiled[0], pool, specs[own], nbytes[own])
    elif len(table.deployments) > 1:
        wanted = _describe(profiled[0].specs[0])
        found = "; ".join(sorted({_describe(d.specs[0]) for d in table.deployments[1:]}))
        raise ProfileError(
            f"The profile contradicts the store: expected {wanted}, found {found}; check model, "
            "tag, and TP, PP and CP sizes"
        )


def _refuse_sizes(deployment: Deployment, pool: str, specs: IntArray, nbytes: IntArray) -> None:
    of_pool = np.array([spec.pool == pool and spec.listed for spec in deployment.specs])
    expected = np.array([spec.nbytes for spec in deployment.specs], dtype=np.int64)
    chosen = of_pool[specs] & (nbytes >= 0)
    wanted, found = expected[specs[chosen]], nbytes[chosen]
    if not len(found) or len(found) < _PAGES * of_pool.sum() or (wanted == found).any():
        return
    pairs, counts = np.unique(np.stack([wanted, found]), axis=1, return_counts=True)
    # Expected sizes differ by stage and CP rank; each has one common pair.
    common = np.sort(counts)[::-1][: len(np.unique(wanted))].sum()
    if common >= _NEARLY_ALL * len(found):
        want, has = pairs[:, counts.argmax()].tolist()
        raise ProfileError(
            f"The profile contradicts the store: expected {want} bytes for {pool} objects, found "
            f"{has} bytes ({common} of {len(found)} objects); check dtype, page size, layers and "
            "TP size"
        )


def _describe(spec: ObjectSpec) -> str:
    return f"model {spec.coordinate.model!r} {spec.coordinate.shard.sizes_text()}"
