"""Infer the profile of a deployment from the keys and object sizes in a store."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from shlex import quote
from typing import TYPE_CHECKING, Any

from msgspec import structs

from hicachectl.formats.errors import ProfileError
from hicachectl.formats.kinds.pool import pool_name
from hicachectl.formats.layouts import DTYPE_BYTES
from hicachectl.formats.objects import ANCHOR, AXES
from hicachectl.formats.profile import Profile, profile_from_mapping, validate_profile
from hicachectl.formats.releases import before
from hicachectl.formats.spec import UNKNOWN_SIZE, object_specs
from hicachectl.text.units import counted

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hicachectl.formats.marker import Marker
    from hicachectl.formats.spec import ObjectSpec
    from hicachectl.pages.deployments import Deployment
    from hicachectl.pages.inventory import Inventory
    from hicachectl.pages.selection import Selection

_OTHER_SOURCES = "give --profile, --server, or --model-config with the server's flags"


def infer_profile(inventory: Inventory, grammar: str, choice: Selection) -> Profile:
    """Return the profile of the only matching deployment. It has shards, pools and object sizes.

    grammar: key grammar of the store.
    Raises ProfileError if not exactly one deployment matches, or if no profile can describe the
    objects.
    """
    chosen = choose_deployment(inventory, choice)
    deployment = _seen(inventory, inventory.table.deployments[chosen])
    profile = _profile(deployment)
    _check_says_all(profile, deployment, grammar)
    return profile


def with_marked_facts(
    profile: Profile, markers: Iterable[Marker], grammar: str
) -> tuple[Profile, list[str]]:
    """Add to an inferred profile the facts on which all markers of its objects agree.

    These facts can be weights, draft_weights, layout, page_size, and the dtypes of pools.
    grammar: key grammar of the store.
    Return the profile, and the names of the added facts.
    """
    suffixes = {spec.affix[1] for spec in object_specs(profile, grammar)}
    found = [one.identity for one in markers if one.suffix in suffixes]
    stated: dict[str, Any] = {}
    for name in ("weights", "draft_weights", "layout", "page_size"):
        values = {getattr(one, name) for one in found} - {""}
        if len(values) == 1:
            stated[name] = values.pop()
    if stated.get("draft_weights") == stated.get("weights") or "weights" not in stated:
        stated.pop("draft_weights", None)  # "" means that the draft has the weights of the model
    pools = []
    for pool in profile.pools:
        dtypes = {one.dtype for one in found if one.pool == pool.name}
        known = len(dtypes) == 1 and dtypes <= set(DTYPE_BYTES)
        pools.append(structs.replace(pool, dtype=dtypes.pop()) if known else pool)
    names = [*stated, *(f"dtype of {pool.name}" for pool in pools if pool.dtype)]
    changed = structs.replace(profile, pools=tuple(pools), **stated)
    return (profile, []) if validate_profile(changed) else (changed, names)


def choose_deployment(inventory: Inventory, choice: Selection) -> int:
    """Return the index of the only deployment that fits the filters on deployments.

    Raises ProfileError if no deployment or several deployments fit.
    """
    deployments = inventory.table.deployments
    if not deployments:
        raise ProfileError(_nothing_seen(inventory))
    # Deployments without kv count only if no matching deployment has kv.
    fitting = [n for n, d in enumerate(deployments) if choice.fits(d, _sizes(d.specs))]
    found = [number for number in fitting if _anchors(deployments[number])] or fitting
    if not found:
        raise ProfileError(
            f"No deployment has these options; the store has: {_listed(deployments)}"
        )
    if len(found) > 1:
        several = [deployments[number] for number in found]
        remedy = (
            "choose one"
            if len(set(map(_options, several))) > 1
            else "no option chooses one, so give --profile"
        )
        raise ProfileError(f"The store has several deployments; {remedy}: {_listed(several)}")
    _check_one_state_size(deployments[found[0]])
    return found[0]


def _seen(inventory: Inventory, deployment: Deployment) -> Deployment:
    """Return the deployment without the specs for which the store has no key."""
    listed = set(inventory.table.affixes)
    return replace(deployment, specs=tuple(s for s in deployment.specs if s.affix in listed))


def _nothing_seen(inventory: Inventory) -> str:
    if not len(inventory.objects):
        return f"The store has no pages to infer a profile from; {_OTHER_SOURCES}"
    ambiguous = [
        "<hash>".join(affix)
        for affix, found in zip(inventory.table.affixes, inventory.table.resolved, strict=True)
        if found.ambiguous
    ]
    if ambiguous:
        return (
            f"The store's keys, such as {ambiguous[0]}, can be read in several ways, so the "
            f"deployment is unknown; {_OTHER_SOURCES}"
        )
    return (
        f"The store has {counted(len(inventory.objects), 'key')}, but none that SGLang writes; "
        "check the store's URL"
    )


def _listed(deployments: Iterable[Deployment]) -> str:
    return "; ".join(sorted(map(_described, deployments)))


def _described(deployment: Deployment) -> str:
    ranks = {spec.coordinate.shard.tp_rank for spec in deployment.specs}
    notes = [] if ranks != {None} else ["keys without TP ranks"]
    if not _anchors(deployment):
        pools = sorted({spec.pool for spec in deployment.specs})
        notes.append(f"only {', '.join(pools)}")
    return _options(deployment) + (f" ({', '.join(notes)})" if notes else "")


def _options(deployment: Deployment) -> str:
    sizes = _sizes(deployment.specs)
    stated = [f"--{axis} {size}" for axis, size in sizes.items() if size > 1 or axis == "tp"]
    return " ".join([f"--model {quote(deployment.names.columns['model'] or '')}", *stated])


def _anchors(deployment: Deployment) -> list[ObjectSpec]:
    return [spec for spec in deployment.specs if spec.pool == ANCHOR]


def _check_one_state_size(deployment: Deployment) -> None:
    sizes: dict[str, set[int]] = defaultdict(set)
    for spec in deployment.specs:
        if pool_name(spec.pool).states:
            sizes[spec.pool].add(spec.coordinate.shard.tp_size or 0)
    for pool, found in sizes.items():
        if len(found) == 1:
            continue
        texts = ", ".join(str(size or "none") for size in sorted(found))
        raise ProfileError(
            f"Model {deployment.names.model!r} has {pool} objects of several TP sizes ({texts}) "
            "beside the same kv objects, perhaps because servers of several TP sizes share the "
            f"store, but an inferred profile has one TP size; {_OTHER_SOURCES}"
        )


def _profile(deployment: Deployment) -> Profile:
    pools: dict[str, list[ObjectSpec]] = defaultdict(list)
    anchors = _anchors(deployment)
    if not anchors:
        raise ProfileError(
            f"The store has no kv objects of model {deployment.names.model!r}; {_OTHER_SOURCES}"
        )
    for spec in sorted(deployment.specs, key=lambda spec: spec.pool != ANCHOR):
        pools[spec.pool].append(spec)
    mapping = {
        "model": deployment.names.model,
        "tag": deployment.names.tag,
        "inferred": True,
        **{axis: _size(anchors, axis) for axis in ("pp", "cp", "dcp")},
        "tp": _size(deployment.specs, "tp"),
        "pools": [_pool(name, specs) for name, specs in pools.items()],
    }
    page_size = anchors[0].coordinate.shard.dcp_page_size
    if page_size is not None:
        mapping["page_size"] = page_size
    if any(pool_name(name).states and not _ranked(specs) for name, specs in pools.items()):
        mapping["sglang"] = before("file_state_rank")
    return profile_from_mapping(mapping, source="profile inferred from the store")


def _pool(name: str, specs: list[ObjectSpec]) -> dict[str, object]:
    nbytes = _common_size(name, specs)
    ranked = _ranked(specs)
    if nbytes:
        return {"name": name, "kind": "opaque", "nbytes": nbytes, "replicated": not ranked}
    if name == ANCHOR and not ranked:  # for DeepSeek-V4, SGLang marks each page by an empty object
        return {"name": name, "kind": "logical"}
    raise ProfileError(f"The store's {name} objects are empty; run hicachectl verify")


def _common_size(name: str, specs: list[ObjectSpec]) -> int:
    by_size: dict[int, list[ObjectSpec]] = defaultdict(list)
    for spec in specs:
        by_size[spec.nbytes].append(spec)
    if len(by_size) == 1 and UNKNOWN_SIZE not in by_size:
        return next(iter(by_size))
    if UNKNOWN_SIZE in by_size:
        raise ProfileError(
            f"{name} objects of one rank have several sizes, and the usual size is unclear; run "
            f"hicachectl ls --objects to see the sizes, and {_OTHER_SOURCES}"
        )
    shown = ", ".join(f"{size} bytes at {_place(found[0])}" for size, found in by_size.items())
    raise ProfileError(
        f"{name} objects differ in size ({shown}), so pipeline stages or context-parallel ranks "
        "have unequal numbers of layers, which an inferred profile cannot state; "
        f"{_OTHER_SOURCES}"
    )


def _place(spec: ObjectSpec) -> str:
    shard = spec.coordinate.shard
    ranks = {axis: getattr(shard, f"{axis}_rank") for axis in ("pp", "cp", "dcp")}
    texts = [f"{axis} rank {rank}" for axis, rank in ranks.items() if rank is not None]
    return " ".join(texts) or (spec.coordinate.part or "every rank")


def _check_says_all(profile: Profile, deployment: Deployment, grammar: str) -> None:
    """Raise ProfileError if a rank has other objects than the profile expects."""
    expected = {e.coordinate for e in object_specs(profile, grammar)}
    for spec in deployment.specs:
        if spec.coordinate not in expected:
            raise ProfileError(
                f"One profile cannot describe both keys like {'<hash>'.join(spec.affix)} and the "
                f"other keys of model {deployment.names.model!r}; {_OTHER_SOURCES}"
            )
    anchored = {_stage(spec) for spec in _anchors(deployment)}
    for pool in profile.pools:
        own = {_stage(spec) for spec in deployment.specs if spec.pool == pool.name}
        if not pool.is_draft and own != anchored:  # objects of drafts exist only on the last stage
            raise ProfileError(
                f"{pool.name} objects exist on some pipeline or context-parallel ranks only, "
                f"which an inferred profile cannot state; {_OTHER_SOURCES}"
            )


def _stage(spec: ObjectSpec) -> tuple[int | None, ...]:
    shard = spec.coordinate.shard
    return shard.pp_rank, shard.cp_rank


def _ranked(specs: Iterable[ObjectSpec]) -> bool:
    return any(spec.coordinate.shard.tp_rank is not None for spec in specs)


def _sizes(specs: Iterable[ObjectSpec]) -> dict[str, int]:
    """Return the size of each axis; 1 if no key states it."""
    return {axis: _size(specs, axis) for axis in AXES}


def _size(specs: Iterable[ObjectSpec], axis: str) -> int:
    return max(getattr(spec.coordinate.shard, f"{axis}_size") or 1 for spec in specs)
