"""The deployments whose stores SGLang writes for the conformance tests.

Plain data: profiles (schema of hicachectl.formats.profile) and the other settings SGLang needs.
Models have real shapes (heads, row widths, quant blocks) but few layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

NEWEST = "0.5.23"
# The last release with mamba keys without a TP pair, for models whose ranks share their KV.
LEGACY = "0.5.18"
LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
DEFAULT_LAYOUT = "page_first"


@dataclass(frozen=True, slots=True)
class Deployment:
    """One served model.

    linear_attention: class in sglang.srt.configs.mamba_utils and the arguments of its `create`, or
        the class of a config, its module beside mamba_utils, and its arguments;
        side_states: layers and shape of windows, and tokens of context, kept with each state.
    attention_dp: DP attention is on; keys then count the attention TP ranks.
    groups: `enable_group_semantics`; Mooncake then evicts the objects of a page together.
    """

    profile: dict[str, Any]
    linear_attention: dict[str, Any] | None = None
    attention_dp: bool = False
    groups: bool = False


@dataclass(frozen=True, slots=True)
class Case:
    """Deployments that share one store and serve the same prompt.

    node_pages: pages of a radix node, the unit that SGLang backs up. Mamba states lie at the end
    of a node, sliding windows on its last pages.
    """

    deployments: tuple[Deployment, ...]
    node_pages: int = 3
    sglang: str = NEWEST


def _mha(name: str, layers: int | list[int], kv_heads: int = 4, **more: Any) -> dict[str, Any]:
    return {
        "name": name,
        "kind": "mha",
        "dtype": "bfloat16",
        "layers": layers,
        "kv_heads": kv_heads,
        "head_dim": 64,
        **more,
    }


def _mla(layers: int | list[int], row: str = "bf16", name: str = "kv") -> dict[str, Any]:
    return {
        "name": name,
        "kind": "mla",
        "layers": layers,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "row": row,
    }


def _indexer(layers: int | list[int]) -> dict[str, Any]:
    return {"name": "indexer", "kind": "dsa_indexer", "layers": layers, "index_head_dim": 128}


def _mamba(layers: list[int], temporal: list[int], conv: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "name": "mamba",
        "kind": "mamba",
        "layers": layers,
        "temporal": {"shape": temporal, "dtype": "float32", "shard_axis": 0},
        "conv": [{"dtype": "bfloat16", **conv}],
    }


def _convolutions(layers: list[int], *states: Mapping[str, Any]) -> dict[str, Any]:
    conv = [{"dtype": "bfloat16", **state} for state in states]
    return {"name": "mamba", "kind": "mamba", "layers": layers, "conv": conv}


def _profile(model: str, pools: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    return {
        "model": model,
        "sglang": NEWEST,
        "page_size": 8,
        "layout": DEFAULT_LAYOUT,
        **fields,
        "pools": pools,
    }


def _dsa(model: str, pools: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    # Except on HIP, DSATokenToKVPool asserts pages of 64 tokens.
    return _profile(model, pools, page_size=64, **fields)


# A small Qwen3-Next: 4 key heads and 8 value heads of 32, a convolution over 4 tokens.
_GATED_DELTA = {
    "shape": "Mamba2StateShape",
    "arguments": {
        "intermediate_size": 8 * 32,
        "n_groups": 4,
        "num_heads": 8,
        "head_dim": 32,
        "state_size": 32,
        "conv_kernel": 4,
        "conv_shard_groups": [4 * 32, 4 * 32, 8 * 32],
    },
}
_GATED_DELTA_POOL = _mamba(
    [0, 1, 2, 4, 5, 6],
    [8, 32, 32],
    {"shape": [512, 3], "shard_axis": 0, "groups": [128, 128, 256]},
)
# A small Kimi-Linear: the convolution's window is its first axis.
_KIMI_DELTA = {
    "shape": "KimiLinearStateShape",
    "arguments": {"num_heads": 4, "head_dim": 32, "conv_kernel_size": 4},
}
_KIMI_DELTA_POOL = _mamba(
    [0, 1, 2],
    [4, 32, 32],
    {"shape": [3, 384], "shard_axis": 1, "groups": [128, 128, 128]},
)


# A small Falcon-H1: one group of B and C, of which every rank has a copy.
_MAMBA2 = {
    "shape": "Mamba2StateShape",
    "arguments": {
        "intermediate_size": 8 * 32,
        "n_groups": 1,
        "num_heads": 8,
        "head_dim": 32,
        "state_size": 16,
        "conv_kernel": 4,
    },
}
_MAMBA2_POOL = _mamba(
    [0, 1],
    [8, 32, 16],
    {"shape": [288, 3], "shard_axis": 0, "groups": [256, 16, 16], "whole": [1, 2]},
)


# A small Zaya: q and k heads before their convolution, and the last hidden state, which every rank
# holds whole.
_ZAYA = {
    "module": "zaya",
    "config": "ZayaConfig",
    "arguments": {
        "hidden_size": 128,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_query_groups": 4,
        "num_key_value_heads": 4,
        "head_dim": 64,
    },
}
_ZAYA_POOL = _convolutions(
    [0, 2, 4],
    {"shape": [768, 2], "shard_axis": 0, "groups": [512, 256]},
    {"shape": [128, 1], "shard_axis": 0, "whole": [0]},
)
# A small Inkling: inputs of convolutions of K and V, with two heads in full layers and four in
# window layers, and of two streams, which every rank holds whole. Its draft has a full layer, a
# window layer and the states of both.
_INKLING = {
    "module": "inkling",
    "config": "InklingModelConfig",
    "arguments": {
        "hidden_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "swa_num_key_value_heads": 4,
        "head_dim": 64,
        "local_layer_ids": [0, 1],
    },
}
_FULL_HEADS, _WINDOW_HEADS = (
    {"shape": [3, width], "shard_axis": 1, "least": 64} for width in (128, 256)
)
_STREAM = {"shape": [3, 128], "shard_axis": 1, "whole": [0]}
_INKLING_POOL = {
    **_convolutions(
        [0, 1, 2], _FULL_HEADS, _FULL_HEADS, _WINDOW_HEADS, _WINDOW_HEADS, _STREAM, _STREAM
    ),
    "packed_draft_layers": 2,
}


# Qwen4: n-gram layers keep windows and the last tokens with each state, in bytes behind the others.
_SIDE_STATES = {"layers": [0, 4], "state": [64, 6], "context": 2}
_SIDE_STATES_POOL: dict[str, Any] = {
    "name": "mamba",
    "kind": "opaque",
    "layers": _GATED_DELTA_POOL["layers"],
    "nbytes": 6 * (4 * 32 * 32 * 4 + 256 * 3 * 2) + 2 * 64 * 6 * 2 + 2 * 8,
}


# MiniMax-M3 in NVFP4 on Blackwell: rows of 4-bit codes and scales, whose form profiles do not have.
_PACKED_ROWS: list[dict[str, Any]] = [
    {"name": "kv", "kind": "opaque", "layers": 4, "nbytes": 4 * 2 * 2 * 128 * (64 + 8)},
    {"name": "indexer", "kind": "opaque", "layers": 4, "nbytes": 4 * 128 * (64 + 8)},
]


def _mla_mamba(sglang: str, **fields: Any) -> Deployment:
    fields = {"tp": 2, "page_size": 16, **fields, "sglang": sglang}
    profile = _profile("moonshotai/Kimi-Linear-Tiny", [_mla([3, 4]), _KIMI_DELTA_POOL], **fields)
    return Deployment(profile, linear_attention=_KIMI_DELTA)


def _hybrid_mamba(*, groups: bool = False, **fields: Any) -> Deployment:
    pools = [_mha("kv", [3, 7]), _GATED_DELTA_POOL]
    profile = _profile("Qwen/Qwen3-Next-Tiny", pools, tp=2, **fields)
    return Deployment(profile, linear_attention=_GATED_DELTA, groups=groups)


def _split_layers(attention_dp: bool) -> Deployment:
    # Five layers over two ranks: rank 0 owns three, rank 1 two and a padding layer in kv.
    profile = _dsa("zai-org/GLM-Tiny", [_mla(5), _indexer(5)], cp=2, cp_layer_split=True)
    return Deployment(profile, attention_dp=attention_dp)


def _drafted(model: str, pools: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    return _profile(model, pools, tp=2, speculative_algorithm="STANDALONE", **fields)


def is_trailing(pool: str) -> bool:
    """Return whether only the last pages of a node have a pool."""
    return pool in ("mamba", "swa") or follows_windows(pool)


def follows_windows(pool: str) -> bool:
    """Return whether SGLang writes a pool with each window: compression states of DeepSeek-V4."""
    return pool.endswith("_state")


def has_values(profile: Mapping[str, Any]) -> bool:
    """Return whether a profile describes the bytes of a pool."""
    return any(pool["kind"] not in ("logical", "opaque") for pool in profile["pools"])


def _compressed(**more: Any) -> dict[str, Any]:
    """Return a small DeepSeek-V4: kv without bytes, windows with states, compressed pages."""
    rows = {"kind": "dsv4", "row": "v4"}
    layers = [1, 2]
    pools: list[dict[str, Any]] = [
        {"name": "kv", "kind": "logical"},
        {"name": "swa", **rows, "layers": [0, *layers], "trailing_pages": 2},
        {"name": "deepseek_v4_c4", **rows, "layers": layers, "compress_ratio": 4},
        {
            "name": "deepseek_v4_c4_indexer",
            "kind": "dsa_indexer",
            "layers": layers,
            "index_head_dim": 128,
            "compress_ratio": 4,
        },
        {"name": "deepseek_v4_c128", **rows, "layers": [0], "compress_ratio": 128},
        {
            "name": "deepseek_v4_c4_state",
            "kind": "blocks",
            "layers": layers,
            "nbytes": 768,
            "trailing_pages": 2,
        },
    ]
    return {**_profile("deepseek-ai/DeepSeek-V4-Tiny", pools, tp=2), "page_size": 256, **more}


_SWA = _mha("swa", [0, 1, 3, 4], trailing_pages=2, hit_policy="trailing_pages")

CASES: dict[str, Case] = {
    "gqa_tp2": Case((Deployment(_profile("Qwen/Qwen3-Tiny", [_mha("kv", 4)], tp=2)),)),
    "mla_indexer": Case(
        # Layer 2 reuses layer 1's top-k and has no index keys.
        (Deployment(_dsa("deepseek-ai/DeepSeek-Tiny", [_mla(4), _indexer([0, 1, 3])], tp=2)),)
    ),
    "mla_fp8_indexer": Case(
        (Deployment(_dsa("deepseek-ai/DeepSeek-Tiny", [_mla(3, "fp8_scaled"), _indexer(3)], tp=2)),)
    ),
    "hybrid_mamba": Case((_hybrid_mamba(),)),
    "mla_mamba": Case((_mla_mamba(NEWEST),)),
    "mamba2": Case(
        (
            Deployment(
                _profile("tiiuae/Falcon-H1-Tiny", [_mha("kv", 2), _MAMBA2_POOL], tp=2),
                linear_attention=_MAMBA2,
            ),
        )
    ),
    "zaya": Case(
        (
            Deployment(
                _profile("Zyphra/ZAYA1-Tiny", [_mha("kv", [0, 2, 4]), _ZAYA_POOL], tp=2),
                linear_attention=_ZAYA,
            ),
        )
    ),
    "inkling": Case(
        (
            Deployment(
                _profile(
                    "thinkingmachines/Inkling-Tiny",
                    [
                        _mha("kv", [2], kv_heads=2, packed_draft_layers=1),
                        _mha("swa", [0, 1], trailing_pages=2),
                        _mha("draft_swa", 1, hit_policy="all_pages"),
                        _INKLING_POOL,
                    ],
                    tp=2,
                    speculative_algorithm="EAGLE",
                ),
                linear_attention=_INKLING,
            ),
        )
    ),
    "mha_draft": Case(
        (
            Deployment(
                _drafted("meta-llama/Llama-Tiny", [_mha("kv", 4), _mha("draft", 1, kv_heads=2)])
            ),
        )
    ),
    "pp2": Case(
        (Deployment(_profile("Qwen/Qwen3-Tiny", [_mha("kv", 5)], tp=2, pp=2, pp_partition=[3, 2])),)
    ),
    "cp2": Case((_split_layers(attention_dp=True),)),
    "cp2_without_dp": Case((_split_layers(attention_dp=False),)),
    "two_models": Case(
        (
            Deployment(_profile("deepseek-ai/DeepSeek-Tiny", [_mla(2)], tp=2)),
            Deployment(_profile("Qwen/Qwen3-Tiny", [_mha("kv", 4)], tp=2)),
        )
    ),
    "swa": Case((Deployment(_profile("openai/gpt-oss-tiny", [_mha("kv", [2, 5]), _SWA], tp=2)),)),
    "fp8_mha": Case(
        (Deployment(_profile("Qwen/Qwen3-FP8-Tiny", [_mha("kv", 3, dtype="float8_e4m3fn")], tp=2)),)
    ),
    "deepseek_v4": Case((Deployment(_compressed()),)),
    "side_states": Case(
        (
            Deployment(
                _profile("Qwen/Qwen4-Tiny", [_mha("kv", [3, 7]), _SIDE_STATES_POOL], tp=2),
                linear_attention={**_GATED_DELTA, "side_states": _SIDE_STATES},
            ),
        )
    ),
    "packed_rows": Case(
        (
            Deployment(
                {**_profile("MiniMaxAI/MiniMax-M3-Tiny", _PACKED_ROWS, tp=2), "page_size": 128}
            ),
        )
    ),
    "dcp2": Case((_mla_mamba(NEWEST, tp=4, dcp=2),)),
    "mha_layouts": Case((Deployment(_profile("Qwen/Qwen3-Tiny", [_mha("kv", 3)])),)),
    "legacy_mla_mamba": Case((_mla_mamba(LEGACY),), sglang=LEGACY),
}
# Stores that `write_store.py all` writes: (case, layout).
VARIANTS: tuple[tuple[str, str], ...] = (
    *((case, DEFAULT_LAYOUT) for case in CASES if case != "mha_layouts"),
    *(("mha_layouts", layout) for layout in LAYOUTS),
)

# Cases for SGLang's controller with the plug-in, which writes them to files.
# DCP, side states and packed rows are refused.
PLUGIN_CASES: dict[str, Case] = {
    **{
        name: case
        for name, case in CASES.items()
        if case.sglang == NEWEST and name not in ("dcp2", "side_states", "packed_rows")
    },
    "packed_draft": Case(
        (
            Deployment(
                _profile(
                    "Qwen/Qwen3-Eagle-Tiny",
                    [_mha("kv", 4, packed_draft_layers=1)],
                    tp=2,
                    speculative_algorithm="EAGLE",
                )
            ),
        )
    ),
    "mla_draft": Case(
        (Deployment(_drafted("deepseek-ai/DeepSeek-Tiny", [_mla(3), _mla(1, name="draft")])),)
    ),
    "mla_mha_draft": Case(
        (Deployment(_drafted("deepseek-ai/DeepSeek-Tiny", [_mla(3), _mha("draft", 1)])),)
    ),
    "asymmetric": Case(
        (Deployment(_profile("XiaomiMiMo/MiMo-Tiny", [_mha("kv", 2, v_head_dim=32)], tp=2)),)
    ),
}

_SPLIT = {"layout": "page_head", "tp_lcm_size": 4}
# Cases that SGLang writes to Mooncake: those of files, and those that only Mooncake has.
MOONCAKE_CASES: dict[str, Case] = {
    **{
        name: case
        for name, case in CASES.items()
        # Keys without CP ranks make cp2_without_dp equal to cp2; layouts are below.
        if case.sglang == NEWEST
        and name not in ("cp2_without_dp", "mha_layouts", "side_states", "packed_rows")
    },
    "mla_pp2": Case(
        (
            Deployment(
                _dsa(
                    "deepseek-ai/DeepSeek-Tiny",
                    [_mla(4), _indexer(4)],
                    tp=2,
                    pp=2,
                    pp_partition=[3, 1],
                )
            ),
        )
    ),
    "mla_mla_draft": Case(
        (Deployment(_drafted("deepseek-ai/DeepSeek-Tiny", [_mla(3), _mla(1, name="draft")])),)
    ),
    # Every rank stores its own shard of such a draft, but only the first rank stores kv.
    "mla_mha_draft": PLUGIN_CASES["mla_mha_draft"],
    "tag_and_none": Case((_hybrid_mamba(tag="teamA"), _hybrid_mamba())),
    "groups": Case((_hybrid_mamba(groups=True),)),
    "split_heads": Case(
        (Deployment(_profile("Qwen/Qwen3-Tiny", [_mha("kv", 3)], tp=2, **_SPLIT)),)
    ),
    "split_heads_pp2": Case(
        (
            Deployment(
                _drafted(
                    "meta-llama/Llama-Tiny",
                    [_mha("kv", 5), _mha("draft", 1)],
                    pp=2,
                    pp_partition=[3, 2],
                    **_SPLIT,
                )
            ),
        )
    ),
    "asymmetric": PLUGIN_CASES["asymmetric"],
    # The draft's keys contain a printed list with commas.
    "split_heads_draft": Case(
        (
            Deployment(
                _drafted("meta-llama/Llama-Tiny", [_mha("kv", 3), _mha("draft", 1)], **_SPLIT)
            ),
        )
    ),
}
# Of PLUGIN_CASES: SGLang stores such a draft from one rank only, and such K and V on Mooncake only.
PLUGIN_REFUSES = ("mla_mha_draft", "asymmetric")
# (case, layout); in layer_first, MooncakeStore accepts only MLA pages without an indexer.
MOONCAKE_VARIANTS: tuple[tuple[str, str], ...] = (
    *((name, case.deployments[0].profile["layout"]) for name, case in MOONCAKE_CASES.items()),
    ("mla_mla_draft", "layer_first"),
    ("hybrid_mamba", "page_first_direct"),
)


# Cases that SGLang can write to 3FS: no second MHA pool, PP stage, CP rank or model.
HF3FS_CASES: dict[str, Case] = {
    name: CASES[name]
    for name in (
        "gqa_tp2", "mla_indexer", "hybrid_mamba", "mla_mamba", "fp8_mha", "side_states", "zaya",
    )
}  # fmt: skip
# (case, layout): K and V are separate in page_first layouts, one flat page in layer_first.
HF3FS_VARIANTS: tuple[tuple[str, str], ...] = (
    *((name, DEFAULT_LAYOUT) for name in HF3FS_CASES),
    ("gqa_tp2", "layer_first"),
    ("hybrid_mamba", "page_first_direct"),
    ("mla_indexer", "layer_first"),
)


# With direct I/O, SGLang fails to write objects that are no multiple of a disk block.
NIXL_CASES: dict[str, Case] = {
    **{
        name: CASES[name]
        for name in (*HF3FS_CASES, "mha_draft", "mla_fp8_indexer", "swa")
        if name not in ("side_states", "zaya")
    },
    # K or V of a page are no multiple of 4 KiB, so direct I/O writes them together.
    "short_pages": Case((Deployment(_profile("Qwen/Qwen3-Short", [_mha("kv", 2, kv_heads=1)])),)),
    "mla_blocks": Case(
        (Deployment(_dsa("deepseek-ai/DeepSeek-Tiny", [_mla(16), _indexer(16)], tp=2)),)
    ),
    "mla_fp8_blocks": Case(
        (Deployment(_dsa("z-ai/GLM-Tiny", [_mla(16, "fp8_scaled"), _indexer(16)], tp=2)),)
    ),
    "zaya": CASES["zaya"],
    "stages": Case((Deployment(_profile("Qwen/Qwen3-Stages", [_mha("kv", 4)], pp=2)),)),
    "mla_fp8": Case((Deployment(_dsa("moonshotai/Kimi-Tiny", [_mla(3, "fp8")], tp=2)),)),
    "deepseek_v4": CASES["deepseek_v4"],
}
_NIXL_BUFFERED_ONLY = (
    "deepseek_v4",
    "mla_fp8_indexer",
    "mla_indexer",
    "mla_mamba",
    "stages",
    "zaya",
)
# (backend, case, layout). Without direct I/O, layer_first has no objects of most sidecars.
NIXL_VARIANTS: tuple[tuple[str, str, str], ...] = (
    *(("nixl", name, DEFAULT_LAYOUT) for name in NIXL_CASES if name not in _NIXL_BUFFERED_ONLY),
    ("nixl", "gqa_tp2", "layer_first"),
    ("nixl", "mha_draft", "page_head"),
    ("nixl-buffered", "short_pages", "page_first_direct"),
    ("nixl-buffered", "mla_indexer", DEFAULT_LAYOUT),
    ("nixl-buffered", "mla_fp8_indexer", DEFAULT_LAYOUT),
    ("nixl-buffered", "mla_mamba", DEFAULT_LAYOUT),
    ("nixl-buffered", "mha_draft", DEFAULT_LAYOUT),
    ("nixl-buffered", "deepseek_v4", DEFAULT_LAYOUT),
)


# Cases that SGLang cannot write: an error of its own for each backend, and hicachectl's.
_FLAT = "Models with head_dim != v_head_dim do not support the flat-page interface"
_ONE_SIZE = "K and V of different width"
_SCALES = "MXFP8 KV host pool does not expose flat storage (L3) pages yet"
_UNSTORED = "SGLang does not store mxfp8 pages"
REFUSED: dict[tuple[str, str], tuple[str, str]] = {
    **{("mxfp8", name): (_SCALES, _UNSTORED) for name in ("file", "mooncake", "hf3fs", "nixl")},
    **{("asymmetric", name): (_FLAT, _ONE_SIZE) for name in ("file", "hf3fs", "nixl")},
    ("side_states", "mooncake"): (
        "Mamba storage zero-copy does not carry registered slot side states",
        "SGLang does not store slot side states there",
    ),
    ("deepseek_v4", "hf3fs"): ("integer division or modulo by zero", "models without KV"),
    ("deepseek_v4", "nixl"): ("writing failed", "no multiple of"),
    ("swa", "hf3fs"): ("0:swa: writing failed", "cannot store MHA pools beside kv on 3FS"),
    ("mha_draft", "hf3fs"): ("0:draft: writing failed", "cannot store MHA pools beside kv on 3FS"),
    **{
        ("dcp2", name): ("HiCache L3 with DCP requires file or Mooncake storage.", "dcp")
        for name in ("hf3fs", "nixl")
    },
}
REFUSED_CASES: dict[str, Case] = {
    "mxfp8": Case((Deployment(_profile("Qwen/Qwen3-Tiny", [_mha("kv", 2, dtype="mxfp8")])),)),
    **{name: {**MOONCAKE_CASES, **CASES}[name] for name, _ in REFUSED if name != "mxfp8"},
}


def store_name(case: str, layout: str) -> str:
    """Return the folder name of a variant."""
    return f"{case}-{layout}" if case == "mha_layouts" else case
