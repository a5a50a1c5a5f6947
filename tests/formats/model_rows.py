"""Profiles of recorded models, and what they store, in the form of a record."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hicachectl.formats.models.config import profile_from_config
from hicachectl.formats.models.flags import DeploymentFlags
from hicachectl.formats.spec import object_specs

if TYPE_CHECKING:
    from hicachectl.formats.profile import Profile

_HOSTS = {
    "MHATokenToKVPoolHost": "mha",
    "AsymmetricMHATokenToKVPoolHost": "mha",
    "MLATokenToKVPoolHost": "mla",
    "DSAIndexerPoolHost": "dsa_indexer",
    "MambaPoolHost": "mamba",
}
_SPECULATION = (
    "speculative_algorithm",
    "speculative_num_steps",
    "speculative_draft_kv_cache_dtype",
    "enable_multi_layer_eagle",
    "kv_cache_dtype",
)


def profile_of(model: dict[str, Any], row: dict[str, Any]) -> Profile:
    """Derive the profile of a recorded model at the sizes of a row. Raises ProfileError."""
    rows = model.get("rows", (row,))
    indexed = any(pool["name"] == "indexer" for x in rows for pool in x.get("pools", ()))
    flags = {
        "model": "tests/Model",
        "page_size": row.get("page_size", 64),
        "tp": row["tp"],
        "pp": row["pp"],
        "kv_cache_dtype": "bfloat16" if indexed else "auto",  # auto depends on the GPU
        "draft_model_config": model.get("draft"),
    }
    stated = {name: x for name, x in model.get("flags", {}).items() if name in _SPECULATION}
    return profile_from_config(model["config"], DeploymentFlags(**{**flags, **stated}))


def allocated(row: dict[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Return what SGLang stores, by pool: kind, layers, bytes, trailing pages, packed, states."""
    return {
        pool["name"]: (
            _HOSTS[pool["host"]],
            pool["layers"],
            pool["nbytes"],
            pool["trailing"],
            pool.get("packed", 0),
            [state for state in pool.get("states", []) if 0 not in state[0]],
        )
        for pool in row["pools"]
    }


def stored(profile: Profile, row: dict[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Return what the first rank of a stage stores by the profile, in the form of `allocated`."""
    found: dict[str, tuple[Any, ...]] = {}
    # Mooncake has each of K, V and the states in an object; the file backend refuses wider K.
    for spec in object_specs(profile, "mooncake"):
        shard = spec.coordinate.shard
        if (shard.tp_rank or 0) or (shard.pp_rank or 0) != row["stage"]:
            continue
        pool = profile.pool(spec.pool)
        assert pool is not None
        *_, nbytes, trailing, _, states = found.get(spec.pool, (0, spec.trailing_pages, 0, []))
        if pool.kind == "mamba":
            tensors = [[list(x.shape[1:]), x.dtype] for x in spec.tensors]
            states = [*states, *tensors]
        layers = tuple(x for x in spec.layers if x in pool.layer_numbers)
        packed = len(spec.layers) - len(layers)
        size = nbytes + spec.nbytes
        found[spec.pool] = (pool.kind, _ranges(layers), size, trailing, packed, states)
    return found


def _ranges(numbers: tuple[int, ...]) -> str:
    starts = [n for n in numbers if n - 1 not in numbers]
    ends = [n for n in numbers if n + 1 not in numbers]
    pairs = zip(starts, ends, strict=True)
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in pairs)
