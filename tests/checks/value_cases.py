"""Kinds of objects for value checks: profiles and their specs."""

from __future__ import annotations

from typing import Any

from hicachectl.formats.kinds.pool import Pool, StateTensor
from hicachectl.formats.profile import Profile
from hicachectl.formats.spec import ObjectSpec, object_specs

LLAMA_8B: dict[str, Any] = {
    "kind": "mha",
    "dtype": "bfloat16",
    "layers": 32,
    "kv_heads": 8,
    "head_dim": 128,
}
QWEN3_NEXT: dict[str, Any] = {
    "kind": "mha",
    "dtype": "bfloat16",
    "layers": tuple(range(3, 48, 4)),
    "kv_heads": 2,
    "head_dim": 256,
}
QWEN3_32B: dict[str, Any] = LLAMA_8B | {"layers": 64}
DEEPSEEK: dict[str, Any] = {
    "kind": "mla",
    "layers": 61,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "row": "bf16",
}
INDEXER: dict[str, Any] = {"kind": "dsa_indexer", "layers": 61, "index_head_dim": 128}
GDN: dict[str, Any] = {
    "kind": "mamba",
    "layers": tuple(n for n in range(48) if n % 4 != 3),
    "temporal": StateTensor(shape=(32, 128, 128), dtype="float32"),
    "conv": (StateTensor(shape=(8192, 3), dtype="bfloat16"),),
}


def profile_of(*pools: dict[str, Any], **fields: Any) -> Profile:
    """Return a profile of kv and other pools, with page size 64 by default."""
    names = ("kv", *(pool["kind"].removeprefix("dsa_") for pool in pools[1:]))
    tables = tuple(Pool(**{"name": name} | pool) for name, pool in zip(names, pools, strict=True))
    values: dict[str, Any] = {"model": "m", "page_size": 64, "pools": tables}
    return Profile(**values | fields)


def expected_of(
    profile: Profile, pool: str = "kv", part: str | None = None, scheme: str = "file"
) -> ObjectSpec:
    """Return the first spec of a pool and part."""
    return next(
        e
        for e in object_specs(profile, scheme)
        if e.coordinate.pool == pool and e.coordinate.part == part
    )


def tiny(kind: str, layout: str = "page_first", **fields: Any) -> tuple[Profile, str]:
    """Return a small profile with a pool of a kind and form, and the pool's name."""
    mha = {"kind": "mha", "layers": 3, "kv_heads": 2, "head_dim": 16}
    mla = {"kind": "mla", "layers": 3, "kv_lora_rank": 256, "qk_rope_head_dim": 16}
    pools: tuple[dict[str, Any], ...]
    if kind in ("fp8", "fp8_scaled"):
        pools = (mla | {"row": kind},)
    elif kind == "latent":
        pools = (mla | {"row": "bf16"},)
    elif kind == "indexer":
        indexer = {"kind": "dsa_indexer", "layers": 3, "index_head_dim": 128}
        pools = (mla | {"row": "bf16"}, indexer)
    elif kind == "mamba":
        temporal = StateTensor(shape=(4, 8, 16), dtype="float32")
        conv = (StateTensor(shape=(24, 3), dtype="bfloat16"),)
        states = {"kind": "mamba", "layers": 3, "temporal": temporal, "conv": conv}
        pools = (mha | {"dtype": "bfloat16"}, states)
    else:
        pools = (mha | {"dtype": kind},)
    pool = kind if kind in ("indexer", "mamba") else "kv"
    return profile_of(*pools, **{"page_size": 4, "layout": layout} | fields), pool
