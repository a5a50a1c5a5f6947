"""Small models for plans: real forms, with few layers and narrow rows."""

from __future__ import annotations

from typing import Any

from hicachectl.formats.kinds.pool import Pool, StateTensor
from hicachectl.formats.profile import Profile


def mha(name: str = "kv", **fields: Any) -> Pool:
    values = {"dtype": "bfloat16", "layers": 4, "kv_heads": 4, "head_dim": 8, **fields}
    return Pool(name=name, kind="mha", **values)


def mla(name: str = "kv", **fields: Any) -> Pool:
    sizes = {"kv_lora_rank": 12, "qk_rope_head_dim": 4, "row": "bf16", "layers": 4}
    return Pool(name=name, kind="mla", **{**sizes, **fields})


def indexer(**fields: Any) -> Pool:
    values = {"layers": 4, "index_head_dim": 128, **fields}
    return Pool(name="indexer", kind="dsa_indexer", **values)


def gdn(layers: Any = 4) -> Pool:
    conv = StateTensor(shape=(32, 3), dtype="bfloat16", groups=(8, 8, 16))
    temporal = StateTensor(shape=(8, 2, 3), dtype="float32")
    return Pool(name="mamba", kind="mamba", layers=layers, temporal=temporal, conv=(conv,))


def mamba2(layers: Any = 4) -> Pool:
    """One group of B and C, which every rank holds whole, and a state that is not divided."""
    conv = StateTensor(shape=(26, 3), dtype="bfloat16", groups=(16, 5, 5), whole=(1, 2))
    undivided = StateTensor(shape=(2, 5), dtype="bfloat16", shard_axis=1, whole=(0,))
    temporal = StateTensor(shape=(8, 2, 5), dtype="float32")
    states = (undivided, conv)
    return Pool(name="mamba", kind="mamba", layers=layers, temporal=temporal, conv=states)


def convolutions(layers: Any = 4) -> Pool:
    """Convolutions of two heads, which more ranks share, and of a stream that is not divided."""
    heads = StateTensor(shape=(3, 10), dtype="bfloat16", shard_axis=1, least=5)
    stream = StateTensor(shape=(3, 7), dtype="bfloat16", shard_axis=1, whole=(0,))
    return Pool(name="mamba", kind="mamba", layers=layers, conv=(heads, stream))


def kda(layers: Any = 4) -> Pool:
    conv = StateTensor(shape=(3, 40), dtype="bfloat16", shard_axis=1, groups=(24, 8, 8))
    temporal = StateTensor(shape=(8, 2, 2), dtype="float32")
    return Pool(name="mamba", kind="mamba", layers=layers, temporal=temporal, conv=(conv, conv))


def opaque(name: str, **fields: Any) -> Pool:
    return Pool(name=name, kind="opaque", **{"nbytes": 100, **fields})


def profile(*pools: Pool, **fields: Any) -> Profile:
    return Profile(**{"model": "a/b", "page_size": 3, "pools": pools, **fields})


LOGICAL = Pool(name="kv", kind="logical")
DCP = profile(mla(), tp=2, dcp=2, page_size=4)
MHA_TWO = profile(mha(), tp=2)
WITH_DRAFT = profile(mla(), mha("draft"), tp=2)
OLD_KDA = profile(mla(), kda(), tp=2, sglang="0.5.22")
CP_TWO = profile(mla(layers=5), cp=2, cp_layer_split=True)
