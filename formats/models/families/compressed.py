"""Models with compressed or sparse KV in pools of their own.

Source: SGLang srt/mem_cache/kv_cache_configurator.py, srt/mem_cache/deepseek_v4_memory_pool.py and
srt/mem_cache/hybrid_cache/hybrid_pool_assembler.py; each rule names its symbol.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from msgspec.structs import replace

from hicachectl.formats.kinds import kind_of
from hicachectl.formats.kinds.pool import Pool
from hicachectl.formats.layouts import DTYPE_BYTES
from hicachectl.formats.models.dtypes import (
    compress_state_bytes,
    index_keys_dtype,
    is_nvfp4_packed,
    model_dtype,
    state_dtypes,
)
from hicachectl.formats.models.families.attention import mla
from hicachectl.formats.models.families.base import (
    NEXTN,
    Context,
    count_or_numbers,
    mha_pool,
    split_layers,
    window_pages,
)
from hicachectl.formats.models.families.states import gdn_pool, kimi_pool
from hicachectl.formats.models.flags import attention_tp, canonical_algorithm
from hicachectl.formats.wording import not_one_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicachectl.formats.models.flags import DeploymentFlags
    from hicachectl.formats.models.hf_config import HfConfig

_RATIOS = (0, 1, 2, 4, 128)  # collect_sources_by_ratio
_SHARED_RATIOS = (1, 2)  # layers of these ratios read the rows of a source layer
_LAYOUTS = ("v4", "v41", "v41_new")
_COMPRESSED_LAYOUTS = ("", "auto", "fp8", "fp4")
_ROW_WIDTH = 512
_ROPE_WIDTH = 64  # width of the rope part at the end of a row
_STATE_RING = 8  # rows per window page (get_compress_state_ring_size, without speculation)


def deepseek_v4(config: HfConfig, context: Context) -> tuple[Pool, ...]:
    """Return an anchor without bytes, window rows of all layers, and compressed rows by ratio.

    DeepSeek-V4 has rows, index keys and states of each layer of ratio 4, and rows of each layer of
    ratio 128 (_init_compressed_pools). DeepSeek-V4.1 has rows and index keys of its source layers.
    """
    count = config.integer("num_hidden_layers")
    stated = config.integers("compress_ratios")
    ratios = stated[:count]  # later entries belong to MTP layers
    if len(ratios) < count or not set(ratios) <= set(_RATIOS):
        raise config.error("compress_ratios", f"expected {count} of {_RATIOS}, found {stated}")
    for name, width in (("head_dim", _ROW_WIDTH), ("qk_rope_head_dim", _ROPE_WIDTH)):
        if config.integer(name) != width:
            raise config.error(name, f"must be {width}, the width in SGLang's DeepSeek-V4 rows")
    if _is_v41(config) and context.flags.pp > 1:
        raise config.error(
            "pp", "SGLang refuses: 'DeepSeek-V4.1 does not support pipeline parallelism yet; "
            "disable it to serve this model.'"
        )  # fmt: skip
    main = _main_row(config, context.flags)
    pages = window_pages(config.integer("sliding_window"), context)
    window = Pool(name="swa", kind="dsv4", row=main, layers=count, trailing_pages=pages)
    if context.flags.enable_encoder_swa_bounded_replay:
        windows: tuple[Pool, ...] = ()  # each request rebuilds its windows (has_paged_swa)
    else:
        windows = (window,)
    sources = config.integers("kv_source_layer_ids") if set(_SHARED_RATIOS) & set(ratios) else ()
    pools: list[Pool] = [Pool(name="kv", kind="logical"), *windows]
    for ratio in sorted(set(ratios) - {0}):
        layers = tuple(
            layer
            for layer in range(count)
            if ratios[layer] == ratio and (ratio not in _SHARED_RATIOS or layer in sources)
        )
        row = _compressed_row(config, context.flags, main, ratio)
        name = f"deepseek_v4_c{ratio}"
        pools.append(Pool(name=name, kind="dsv4", row=row, layers=layers, compress_ratio=ratio))
        if ratio != 128:
            fp4 = ratio in _SHARED_RATIOS or context.flags.indexer_dtype == "fp4"
            keys = Pool(
                name=f"{name}_indexer",
                kind="dsa_indexer",
                layers=layers,
                index_head_dim=config.integer("index_head_dim"),
                compress_ratio=ratio,
                row="fp4" if fp4 else "",
            )
            pools.append(keys)
        if ratio == 4:
            pools += _states(config, context.flags, layers, pages)
    return tuple(pools)


def deepseek_v4_dspark(config: HfConfig, context: Context) -> tuple[Pool, ...]:
    """Return the window rows of all stages of a DSpark draft (DeepseekV4ForCausalLMDSpark)."""
    pools = deepseek_v4(config, context)
    layers = dspark_stages(config)
    return tuple(replace(pool, layers=layers) for pool in pools if pool.name == "swa")


def dspark_stages(config: HfConfig) -> int:
    """Return the number of stages of a DSpark draft, one for each target layer that it reads.

    Source: parse_dspark_draft_config. If the config names no layers, NEXTN counts the stages.
    """
    section, name = config, "dspark_target_layer_ids"
    if config.text.get(name) is None:
        name, nested = "target_layer_ids", config.text.get("dflash_config")
        if isinstance(nested, Mapping) and name in nested:
            section = config.section("dflash_config")
    if section.text.get(name) is None:
        return config.optional_integer(NEXTN) or 1
    layers = section.integers(name)
    if not layers:
        raise section.error(name, "names no layer")
    return len(layers)


def deepseek_v4_page_size(config: HfConfig) -> int:
    """Return the page size that SGLang forces (_deepseek_v4_overrides)."""
    return 256


def _is_v41(config: HfConfig) -> bool:
    return str(config.outer.get("model_type", "")).startswith("deepseek_v41")


def _states(
    config: HfConfig, flags: DeploymentFlags, layers: tuple[int, ...], pages: int
) -> tuple[Pool, ...]:
    """Return the states of compressors of ratio 4 (CompressStatePool).

    A state has latents and scores of two overlapping windows. With speculation there are twice as
    many states (get_compress_state_ring_size).
    """
    ring = _STATE_RING * (2 if canonical_algorithm(flags.speculative_algorithm) else 1)
    item = compress_state_bytes(flags)
    widths = {"": _ROW_WIDTH, "_indexer": config.integer("index_head_dim")}
    return tuple(
        Pool(
            name=f"deepseek_v4_c4{part}_state",
            kind="blocks",
            layers=layers,
            nbytes=ring * 2 * 2 * width * item,
            trailing_pages=pages,
        )
        for part, width in widths.items()
    )


def _main_row(config: HfConfig, flags: DeploymentFlags) -> str:
    """Return the form of window rows (select_dsv4_kv_layout)."""
    backend, layout = flags.dsv4_attn_backend, flags.dsv4_kv_layout.lower()
    if backend == "trtllm":
        return "uniform_fp8"
    if backend == "flashmla_mega" and layout != "v41_new":
        return "v41"
    if layout == "auto" or (not layout and _is_v41(config) and backend in ("", "auto")):
        raise config.error(
            "dsv4_kv_layout",
            "the GPU decides",
            "give the server's SGLANG_DSV4_KV_LAYOUT (v4, v41 or v41_new) or --dsv4-attn-backend",
        )
    if layout not in ("", *_LAYOUTS):
        raise config.error(*not_one_of("dsv4_kv_layout", layout, _LAYOUTS).split(": ", 1))
    return layout or "v4"


def _compressed_row(config: HfConfig, flags: DeploymentFlags, main: str, ratio: int) -> str:
    """Return the form of compressed rows beside window rows (resolve_compressed_kv_layout)."""
    option = flags.dsv4_compressed_kv_layout.lower()
    if option not in _COMPRESSED_LAYOUTS:
        known = _COMPRESSED_LAYOUTS[1:]
        words = not_one_of("dsv4_compressed_kv_layout", option, known)
        raise config.error(*words.split(": ", 1))
    if not main.startswith("v41"):
        if option == "fp4":
            raise config.error("dsv4_compressed_kv_layout", f"SGLang has no fp4 beside {main} rows")
        return main
    fp4 = option == "fp4" or (option != "fp8" and ratio in _SHARED_RATIOS)
    return main.replace("v41", "v41_fp4") if fp4 else main


def minimax_sparse(config: HfConfig, context: Context) -> tuple[Pool, ...]:
    """Return K and V of all layers, and index keys of sparse layers (MiniMaxSparseKVPool)."""
    count = config.integer("num_hidden_layers")
    sparse = config.section("sparse_attention_config")
    frequency = sparse.integers("sparse_attention_freq", count)
    layers = tuple(layer for layer in range(count) if frequency[layer])
    if is_nvfp4_packed(config):
        words = "packs K and V with scales"
        if len(layers) < count:
            words = "refuses it: 'M3.1 NVFP4 requires sparse attention in every layer'"
        raise config.error(
            "quantization_config",
            f"the GPU decides: on Blackwell, SGLang {words}; elsewhere it has fp8 rows",
            "profile --print-probe prints a script that, in the server's environment, tells which "
            "rows the server has",
        )
    if context.flags.pp > 1:
        raise config.error(
            "pp",
            "SGLang refuses: 'MiniMax-M3 sparse HiCache does not support pipeline parallelism "
            "(pp_size>1) yet.'",
        )
    without_values = (0,) * count
    if sparse.text.get("sparse_disable_index_value") is not None:
        without_values = sparse.integers("sparse_disable_index_value", count)
    if not all(without_values[layer] for layer in layers):
        raise sparse.error(
            "sparse_disable_index_value",
            "SGLang refuses: 'MiniMax sparse HiCache currently supports index-k-only sparse "
            "layers; index_kv_pool (value-bearing) layers are not cached/restored yet.'",
        )
    kv = mha_pool("kv", config, context, range(count))
    if not layers:
        return (kv,)
    model = model_dtype(config, context.flags)
    keys = Pool(
        name="indexer",
        kind="index_keys",
        # With fp8 KV, the dtype of index keys depends on the GPU and the attention backend
        # (get_minimax_sparse_index_dtype).
        dtype=index_keys_dtype(
            config, context.flags, usual="" if kv.dtype == "float8_e4m3fn" else model
        ),
        layers=count_or_numbers(config, layers),
        index_head_dim=sparse.integer("sparse_index_dim"),
    )
    return (kv, keys)


def qwen4(config: HfConfig, context: Context) -> tuple[Pool, ...]:
    """Return pools of K, V and delta net states, with index keys (QSATokenToKVPool).

    States of n-gram layers follow the delta net states. A profile describes both together, as bytes
    of unknown form.
    """
    full, linear = split_layers(config, _is_qwen4_full_layer(config))
    kv, states = mha_pool("kv", config, context, full), gdn_pool(config, context, linear)
    if config.text.get("ple_layer_ids"):
        if context.flags.pp > 1:
            raise config.error(
                "pp", "hicachectl knows n-gram states only without pipeline parallelism"
            )
        tensors = kind_of(states).tensors(
            states, len(states.layer_numbers), 1, attention_tp(context.flags)
        )
        nbytes = sum(tensor.nbytes for tensor in tensors) + _ngram_bytes(config, context)
        states = replace(states, kind="opaque", nbytes=nbytes, temporal=None, conv=())
    ratio = config.optional_integer("indexer_compress_ratio")
    if not ratio:
        return (kv, states)
    config.integer("indexer_n_heads")  # without it, SGLang builds no index keys
    keys = Pool(
        name="indexer",
        kind="index_keys",
        dtype=index_keys_dtype(config, context.flags, usual="bfloat16"),
        layers=kv.layers,
        index_head_dim=config.integer("indexer_head_dim"),
        compress_ratio=ratio,
    )
    return (kv, keys, states)


def qwen4_page_size(config: HfConfig) -> int:
    """Return the page size that SGLang forces for compressed index keys; 0 without such keys."""
    return 64 if config.optional_integer("indexer_compress_ratio") else 0


def _is_qwen4_full_layer(config: HfConfig) -> Callable[[int], bool]:
    if config.text.get("layer_types") is None:
        interval = config.integer("full_attention_interval")
        return lambda layer: (layer + 1) % interval == 0
    kinds = config.strings("layer_types", config.integer("num_hidden_layers"))
    return lambda layer: kinds[layer] != "linear_attention"


def _ngram_bytes(config: HfConfig, context: Context) -> int:
    """Return the bytes of n-gram states of all layers that have them (Qwen4ExpTextConfig)."""
    layers = len(set(config.integers("ple_layer_ids")))
    size = config.integer("ngram_size")
    window = (config.integer("ple_conv_kernel_size") - 1) * size
    channels = config.integer("hidden_size") * config.integer("hc_count")
    _, dtype = state_dtypes(config, context.flags)
    return layers * window * channels * DTYPE_BYTES[dtype] + (size - 1) * 8  # int64 tokens


def glm5_next(config: HfConfig, context: Context) -> tuple[Pool, ...]:
    """Return latent rows, their pooled index keys, and Kimi delta attention states."""
    config.integer("index_topk")  # without it, SGLang builds rows of another size
    delta_layers = config.section("linear_attn_config").integers("kda_layers")
    states = kimi_pool(config, context, delta_layers)
    pools = mla(config, context)
    full = set(range(config.integer("num_hidden_layers"))) - set(delta_layers)
    held = tuple(
        replace(pool, layers=tuple(layer for layer in pool.layer_numbers if layer in full))
        for pool in pools
    )
    return (*held, states)
