"""A profile of a store's deployment, as far as the store itself shows it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicachectl.formats.errors import ProfileError
from hicachectl.formats.profile import Profile, profile_from_mapping

if TYPE_CHECKING:
    from hicachectl.deployments import Deployment, Member
    from hicachectl.inventory import Inventory


def infer_profile(inventory: Inventory, model: str = "") -> Profile:
    """State the shards, pools and object sizes that were seen of the one deployment of a store.

    model: which one, where the store has several. Raises ProfileError when there is none or the
    choice is open, and where a profile cannot say what was seen.
    """
    wanted = model.replace("/", "-")
    found = [d for d in inventory.table.deployments if not wanted or d.model == wanted]
    if not found:
        raise ProfileError(f"the store has no pages{f' of model {model!r}' if model else ''}")
    if len(found) > 1:
        names = ", ".join(sorted(f"{d.model} ({_topology(d)})" for d in found))
        raise ProfileError(f"the store has several deployments, choose one by --model: {names}")
    return _profile(found[0])


def _profile(deployment: Deployment) -> Profile:
    pools: dict[str, list[Member]] = {}
    for member in deployment.members:
        pools.setdefault(member.coordinate.pool, []).append(member)
    anchors = [m for m in deployment.members if m.anchor]
    if not anchors:
        raise ProfileError(f"no kv objects of model {deployment.model!r} are in the store")
    mapping = {
        "model": deployment.model,
        "inferred": True,
        **{axis: _size(anchors, axis) for axis in ("pp", "cp", "dcp")},
        "tp": max(_size(list(deployment.members), "tp"), 1),
        "pools": [_pool(name, members) for name, members in pools.items()],
    }
    return profile_from_mapping(mapping, source="what the store shows")


def _pool(name: str, members: list[Member]) -> dict[str, object]:
    sizes = {member.nbytes for member in members}
    if len(sizes) != 1 or None in sizes:
        raise ProfileError(
            f"{name} objects have no single size in this store, which an inferred profile cannot "
            "state; give --model-config or --server"
        )
    ranked = any(member.coordinate.shard.tp_rank is not None for member in members)
    return {"name": name, "kind": "opaque", "nbytes": sizes.pop(), "replicated": not ranked}


def _size(members: list[Member], axis: str) -> int:
    return max(getattr(member.coordinate.shard, f"{axis}_size") or 1 for member in members)


def _topology(deployment: Deployment) -> str:
    members = list(deployment.members)
    return " ".join(f"{axis}={_size(members, axis)}" for axis in ("tp", "pp", "cp", "dcp"))
