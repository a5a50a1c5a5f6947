"""Profiles of recorded models, and what they store, in the form of a record."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

from hicachectl.formats.layouts import DTYPE_BYTES
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
    "LogicalHostPool": "logical",
    "DeepSeekV4StateHostPool": "blocks",
    "MHATokenToKOnlyPoolHost": "index_keys",
    "QSAIndexerPoolHost": "index_keys",
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
    page_size = model.get("flags", {}).get("page_size", 64)
    flags = {
        "model": "tests/Model",
        "page_size": next((x["page_size"] for x in rows if "page_size" in x), page_size),
        "tp": row["tp"],
        "pp": row["pp"],
        "kv_cache_dtype": "bfloat16" if indexed else "auto",  # auto depends on the GPU
        "draft_model_config": model.get("draft"),
    }
    stated = {name: x for name, x in model.get("flags", {}).items() if name in _SPECULATION}
    stated |= model.get("profile", {})
    return profile_from_config(model["config"], DeploymentFlags(**{**flags, **stated}))


def allocated(row: dict[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Return what SGLang stores, by pool: kind, layers, bytes, trailing pages, packed, states."""
    return {
        pool["name"]: (
            _kind(pool),
            pool["layers"],
            pool["nbytes"],
            pool["trailing"],
            pool.get("packed", 0),
            [state for state in pool.get("states", []) if 0 not in state[0]],
        )
        for pool in map(_as_described, row["pools"])
    }


def has_ngrams(model: dict[str, Any]) -> bool:
    """Return whether a model has states of n-gram layers, which a profile gives as bytes only."""
    return any("kind" in pool for pool in map(_as_described, model["rows"][0]["pools"]))


def _kind(pool: dict[str, Any]) -> str:
    if pool["host"] == "DeepSeekV4PagedHostPool":
        return "dsa_indexer" if pool["name"].endswith("_indexer") else "dsv4"
    return pool.get("kind") or _HOSTS[pool["host"]]


def _as_described(pool: dict[str, Any]) -> dict[str, Any]:
    """Return a pool without what a profile leaves out."""
    if pool["host"] == "LogicalHostPool":
        return {**pool, "layers": ""}  # it holds nothing of them
    states = sum(prod(shape) * DTYPE_BYTES[dtype] for shape, dtype in pool.get("states", ()))
    if states and pool["nbytes"] > states * _count(pool["layers"]) and not pool.get("packed"):
        return {**pool, "kind": "opaque", "states": []}  # states of slots lie behind
    return pool


def _count(ranges: str) -> int:
    spans = [span.partition("-") for span in ranges.split(",")]
    return sum(int(last or first) - int(first) + 1 for first, _, last in spans)


def stored(profile: Profile, row: dict[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Return what the first rank of a stage stores by the profile, in the form of `allocated`."""
    found: dict[str, tuple[Any, ...]] = {}
    # The file backend refuses K and V of different width; Mooncake has each in an object.
    wider = any(pool.v_head_dim for pool in profile.pools)
    for spec in object_specs(profile, "mooncake" if wider else "file"):
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


def refusal_of(rows: list[dict[str, Any]], row: dict[str, Any]) -> str:
    """Return the words, after the kind of error, with which a row must be refused; else nothing."""
    words: str = rows[0].get("refusal", row.get("refusal", ""))
    if words or row["pp"] == 1:
        return words
    whole, *stages = [_layers(x) for x in rows if x["tp"] == 1 and "pools" in x]
    if all(layers == whole for layers in stages):
        return "pp: SGLang gives every stage of this model pools of all layers"
    if sum(map(len, stages)) < len(whole):
        return "pp: a stage of this model numbers the layers of its later passes beyond"
    return ""


def _layers(row: dict[str, Any]) -> set[int]:
    """Return the layers of a row's pools."""
    found = {x for pool in row["pools"] for x in pool["layers"].split(",")}
    ends = [[int(x) for x in part.split("-")] for part in found if part]
    return {x for end in ends for x in range(end[0], end[-1] + 1)}


def _ranges(numbers: tuple[int, ...]) -> str:
    starts = [n for n in numbers if n - 1 not in numbers]
    ends = [n for n in numbers if n + 1 not in numbers]
    pairs = zip(starts, ends, strict=True)
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in pairs)
