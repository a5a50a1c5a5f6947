"""Name deployments in documents and messages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hicachectl.formats.objects import AXES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from hicachectl.formats.profile import Profile
    from hicachectl.pages.deployments import Deployment

_SHOWN = 8


def profile_document(profile: Profile) -> dict[str, Any]:
    """Return the deployment of a profile in JSON types."""
    return {
        "model": profile.model,
        "tag": profile.tag,
        **{f"{axis}_size": getattr(profile, axis) for axis in AXES},
        "page_size": profile.page_size,
        "layout": profile.layout,
    }


def deployment_document(deployment: Deployment, page_size: int | None = None) -> dict[str, Any]:
    """Return a deployment in JSON types; None for what neither a profile nor the keys state.

    page_size: that requests were hashed with, if keys do not state it.
    """
    profile = deployment.profile
    if profile is not None and not profile.inferred:
        return profile_document(profile)
    shard = deployment.shard
    return {
        "model": deployment.model,
        "tag": deployment.tag,
        **{f"{axis}_size": getattr(shard, f"{axis}_size") for axis in AXES},
        "page_size": shard.dcp_page_size or page_size,
        "layout": None,
    }


def deployment_text(document: Mapping[str, Any]) -> str:
    """Return the readable form of such a document: `org/model tp 8`."""
    sizes = [
        f"{axis} {size}"
        for axis in AXES
        if (size := document[f"{axis}_size"]) is not None and (axis == "tp" or size > 1)
    ]
    return " ".join(filter(None, [document["model"], *sizes]))


def place_text(deployment: Deployment, own: Deployment) -> str:
    """Return where pages of another deployment are, seen from one's own: `tp 4`, `model b tp 4`."""
    shard, ours = deployment.shard, own.shard
    names = [
        f"{what} {theirs}"
        for what, theirs, mine in (
            ("model", deployment.model, own.model),
            ("tag", deployment.tag, own.tag),
        )
        if theirs and theirs != mine
    ]
    sizes = [
        f"{axis} {size}" if size is not None else f"no {axis} ranks"
        for axis, size, mine in zip((*AXES, "page"), shard.sizes, ours.sizes, strict=True)
        if size != mine or (names and size is not None)
    ]
    return " ".join([*names, *sizes]) or _ranks_text(deployment, own)


def _ranks_text(deployment: Deployment, own: Deployment) -> str:
    """Return the TP ranks that one's own deployment does not have; keys do not state its size."""
    ours = {spec.coordinate.shard.tp_rank for spec in own.specs}
    ranks = {spec.coordinate.shard.tp_rank for spec in deployment.specs} - ours - {None}
    found = ", ".join(str(rank) for rank in sorted(rank for rank in ranks if rank is not None))
    return f"tp ranks {found}" if found else "other keys"


def same_model(deployment: Deployment, own: Deployment, scheme: str) -> bool:
    """Return whether a deployment has one's own model. scheme: of the keys.

    Without a profile, the tag of Mooncake keys is a part of the model's name.
    """
    theirs, ours = deployment.model, own.model
    return theirs == ours or (scheme == "mooncake" and theirs.endswith(f"_{ours}"))


def listed(texts: Iterable[str]) -> str:
    """Return distinct texts in one line, the first of many."""
    every = sorted(set(texts))
    more = [f"{len(every) - _SHOWN} more"] if len(every) > _SHOWN else []
    return ", ".join([*every[:_SHOWN], *more])
