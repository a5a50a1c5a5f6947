"""Models with window layers, whose KV SGLang keeps for the last tokens only.

Source: SGLang srt/configs/model_config.py, srt/mem_cache/kv_cache_configurator.py and
srt/mem_cache/hybrid_cache/hybrid_pool_assembler.py; each rule names its symbol.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from hicachectl.formats.kinds.pool import Pool
from hicachectl.formats.models.families.attention import mha
from hicachectl.formats.models.families.base import (
    Context,
    head_dim_of,
    mha_pool,
    split_layers,
    unless_usual,
    window_pages,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicachectl.formats.models.hf_config import HfConfig


def swa(config: HfConfig, context: Context) -> tuple[Pool, ...]:
    """Return pools for full and sliding-window layers, with equal heads (SWAKVPool)."""
    kinds = config.strings("layer_types", config.integer("num_hidden_layers"))
    # The window includes the token itself (models/gpt_oss.py :: get_attention_sliding_window_size).
    retained = config.integer("sliding_window") - 1
    return _windowed(config, context, lambda layer: kinds[layer] == "full_attention", retained)


def swa_or_mha(config: HfConfig, context: Context) -> tuple[Pool, ...]:
    """Return pools for full and window layers; one pool if there is no window (MuseSparkConfig)."""
    kinds = config.strings("layer_types", config.integer("num_hidden_layers"))
    return (swa if "sliding_attention" in kinds else mha)(config, context)


def iquest(config: HfConfig, context: Context) -> tuple[Pool, ...]:
    """Return pools for full and window layers of a pattern of blocks (IQuestQ1Config)."""
    if context.flags.pp > 1:
        raise config.error(
            "pp", "SGLang refuses: 'IQuest Q1 does not support pipeline parallelism.'"
        )
    count = config.integer("num_hidden_layers")
    hybrid = config.flag("use_hybrid_layers", usual=True)
    if not config.flag("use_sliding_window", usual=True):
        return mha(config, context)
    if not hybrid:
        raise config.error(
            "use_hybrid_layers", "is false, so SGLang has window objects without layers"
        )
    block = config.strings("hybrid_layers_types_block")
    kinds = (
        *config.strings("first_layers_types"),
        *block * config.integer("num_hybrid_layers_block"),
        *config.strings("last_layers_types"),
    )
    if len(kinds) != count:
        raise config.error("num_hidden_layers", f"is {count}, but the blocks have {len(kinds)}")
    return _windowed(
        config, context, lambda layer: kinds[layer] == "full_attention", _window_size(config)
    )


def iquest_mtp(config: HfConfig, context: Context) -> tuple[Pool, ...]:
    """Return the window rows of a draft of one layer (IQuestQ1MTPConfig).

    Without a window there are no rows, because HiCache stores only the window layers of such a
    draft.
    """
    if config.integer("num_hidden_layers") != 1:
        raise config.error(
            "num_hidden_layers", "SGLang refuses: 'MTP supports one physical draft layer.'"
        )
    if context.flags.disable_hybrid_swa_memory:
        return mha(config, context)
    if not config.optional_integer("sliding_window"):
        return ()
    return (mha_pool("swa", config, context, range(1)),)


def llama4(config: HfConfig, context: Context) -> tuple[Pool, ...]:
    """Return pools for full and chunked layers, which get_hybrid_layer_ids finds by their numbers.

    A stated window takes precedence over the chunk (load_model_utils.py ::
    resolve_sliding_window_size).
    """
    retained = config.integer(_stated_window(config) or "attention_chunk_size")
    return _windowed(config, context, lambda layer: (layer + 1) % 4 == 0, retained)


def mimo_v2(config: HfConfig, context: Context) -> tuple[Pool, ...]:
    """Return pools for full and window layers, which have different heads. K is wider than V."""
    pattern = config.integers("hybrid_layer_pattern", config.integer("num_hidden_layers"))
    return of_other_heads(config, context, lambda layer: pattern[layer] == 0, _window_size(config))


def of_other_heads(
    config: HfConfig, context: Context, is_full: Callable[[int], bool], retained: int
) -> tuple[Pool, ...]:
    """Return pools for full and window layers with different heads (is_hybrid_swa_compress).

    retained: tokens of a window that stay in the pool.
    """
    _needs_window_pool(config, context)
    full, window = split_layers(config, is_full)
    head_dim = config.optional_integer("swa_head_dim") or head_dim_of(config)
    kv = mha_pool("kv", config, context, full, own_v_dim=True)
    swa = Pool(
        name="swa",
        kind="mha",
        dtype=kv.dtype,
        layers=window,
        kv_heads=config.integer("swa_num_key_value_heads"),
        head_dim=head_dim,
        v_head_dim=unless_usual(config.optional_integer("swa_v_head_dim"), head_dim),
        trailing_pages=window_pages(retained, context),
    )
    return (kv, swa)


def only_windows(config: HfConfig, context: Context) -> tuple[Pool, ...]:
    """Return one pool of all layers. SGLang has it only if hybrid SWA memory is disabled.

    Otherwise no layer is left for the pool by which HiCache finds pages, and mmap refuses to map 0
    bytes (srt/mem_cache/storage/mmap/mmap_allocator.py :: alloc_mmap).
    """
    if not context.flags.disable_hybrid_swa_memory:
        raise config.error(
            "sliding_window_size",
            "all layers have a window, and SGLang's HiCache refuses a kv pool without layers: "
            "'[Errno 22] Invalid argument'",
            "start the server with --disable-hybrid-swa-memory",
        )
    width = config.text.get("v_head_dim", _UNLIMITED_V_HEAD_DIM)
    return mha(config.changed(v_head_dim=width), context)


def gemma4(config: HfConfig, context: Context) -> tuple[Pool, ...]:
    """Return pools for full and window layers with different heads (_gemma4_attention_shapes)."""
    if config.text.get("model_type") == "gemma4_text" and config.text is config.outer:
        raise config.error(
            "model_type", "SGLang fails to read gemma4_text outside the text_config of gemma4"
        )
    _needs_window_pool(config, context)
    kinds = config.strings("layer_types", config.integer("num_hidden_layers"))
    if kinds[-1] != "full_attention":
        raise config.error(
            "layer_types", f"the last layer must have full_attention, but has {kinds[-1]}"
        )
    full, window = split_layers(config, lambda layer: kinds[layer] == "full_attention")
    pages = window_pages(config.integer("sliding_window") - 1, context)
    heads = config.integer("num_key_value_heads")
    swa = mha_pool("swa", config, context, window, trailing_pages=pages)
    shared = bool(config.text.get("attention_k_eq_v"))  # if False, full layers have `heads`, too
    of_full_layers = config.changed(
        head_dim=config.integer("global_head_dim"),
        num_key_value_heads=(shared and config.optional_integer("num_global_key_value_heads"))
        or heads,
    )
    kv = mha_pool("kv", of_full_layers, context, full, own_v_dim=True)
    return (kv, replace(swa, kv_heads=heads))


def _windowed(
    config: HfConfig, context: Context, is_full: Callable[[int], bool], retained: int
) -> tuple[Pool, ...]:
    """Return pools for full and window layers of equal heads.

    retained: tokens of a window that stay in the pool.
    """
    if context.flags.disable_hybrid_swa_memory:
        return mha(config, context)
    full, window = split_layers(config, is_full)
    return (
        mha_pool("kv", config, context, full),
        mha_pool("swa", config, context, window, trailing_pages=window_pages(retained, context)),
    )


def _needs_window_pool(config: HfConfig, context: Context) -> None:
    if context.flags.disable_hybrid_swa_memory:
        raise config.error(
            "architectures", "SGLang cannot disable hybrid SWA memory for this model"
        )


def _window_size(config: HfConfig) -> int:
    return config.integer(_stated_window(config) or _WINDOWS[0])


def _stated_window(config: HfConfig) -> str:
    """Return the first field with a window that a config has; "" without one.

    Source: _get_sliding_window_size.
    """
    return next((name for name in _WINDOWS if config.text.get(name) is not None), "")


_WINDOWS = ("sliding_window_size", "sliding_window", "window_size")

_UNLIMITED_V_HEAD_DIM = 128  # default of UnlimitedLanguageConfig
