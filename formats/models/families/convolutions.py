"""Models whose states are the last inputs of short convolutions, beside K and V.

Source: SGLang srt/configs/lfm2.py, zaya.py and inkling.py (mamba2_cache_params), and
srt/models/zaya.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from hicachectl.formats.documents import shown
from hicachectl.formats.kinds.pool import Pool, StateTensor
from hicachectl.formats.models.dtypes import state_dtypes
from hicachectl.formats.models.families.base import (
    NEXTN,
    Context,
    mha_pool,
    split_layers,
    states_pool,
)
from hicachectl.formats.models.families.windows import of_other_heads
from hicachectl.formats.models.flags import attention_tp, canonical_algorithm
from hicachectl.formats.profile import MAX_LAYERS

if TYPE_CHECKING:
    from hicachectl.formats.models.hf_config import HfConfig


def lfm2(config: HfConfig, context: Context) -> tuple[Pool, ...]:
    """Return pools for attention and short-convolution layers (Lfm2Config)."""
    kinds = config.strings("layer_types", config.integer("num_hidden_layers"))
    full, convolved = split_layers(config, lambda layer: kinds[layer] == "full_attention")
    shape = (config.integer("hidden_size"), config.integer("conv_L_cache") - 1)
    _, dtype = state_dtypes(config, context.flags)
    states = states_pool(
        convolved,
        (StateTensor(shape=shape, dtype=dtype),),
    )
    return (mha_pool("kv", config, context, full), states)


def zaya(config: HfConfig, context: Context) -> tuple[Pool, ...]:
    """Return K, V and states of compressed convolutional attention (ZayaConfig).

    TP divides the inputs of the convolution by heads. Every rank holds the last hidden state whole.
    """
    heads = _first_of(config, "cca_num_q_heads", "num_attention_heads")
    groups = _first_of(config, "num_query_groups_list", "num_query_groups")
    _check_heads(config, context, heads, groups)
    dim = config.integer("kv_channels" if config.text.get("head_dim") is None else "head_dim")
    times = ("cca_time0", "cca_time1")  # configs without these fields have 2
    window = sum(config.integer(name) - 1 if name in config.text else 1 for name in times)
    _, dtype = state_dtypes(config, context.flags)
    blocks = (heads * dim, groups * dim)
    layers, full = _zaya_layers(config)
    config = config.changed(head_dim=dim, num_hidden_layers=layers)
    states = states_pool(
        full,
        conv=(
            StateTensor(shape=(sum(blocks), window), dtype=dtype, groups=blocks),
            StateTensor(shape=(config.integer("hidden_size"), 1), dtype=dtype, whole=(0,)),
        ),
    )
    return (mha_pool("kv", config, context, full), states)


def inkling(config: HfConfig, context: Context) -> tuple[Pool, ...]:
    """Return K and V of full and window layers, and states of all layers (InklingModelConfig).

    A layer keeps the inputs of six convolutions. Two read K and V with the heads of full layers,
    two read K and V with the heads of window layers, and two read the outputs of attention and MLP.
    """
    if config.text is config.outer:
        raise config.error("text_config", "missing")
    layers = config.integer("num_hidden_layers")
    windows = config.integers("local_layer_ids")
    if len(set(windows)) != len(windows) or not set(windows) <= set(range(layers)):
        raise config.error("local_layer_ids", f"expected different layers from 0 to {layers - 1}")
    if config.text.get("swa_num_key_value_heads") is None:
        config = config.changed(swa_num_key_value_heads=config.integer("num_key_value_heads"))
    # models/inkling.py :: get_attention_sliding_window_size
    retained = config.integer("sliding_window_size") - 1
    kv, swa = of_other_heads(config, context, lambda layer: layer not in windows, retained)
    length, width = config.integer("sconv_kernel_size") - 1, config.integer("hidden_size")
    whole = () if context.flags.enable_scattered_sconv else (0,)
    stream = StateTensor(shape=(length, width), dtype="bfloat16", shard_axis=1, whole=whole)
    heads = (config.integer(f"{of}num_key_value_heads") for of in ("", "", "swa_", "swa_"))
    of_heads = [
        StateTensor(
            shape=(length, count * pool.head_dim),
            dtype="bfloat16",
            shard_axis=1,
            least=pool.head_dim,
        )
        for count, pool in zip(heads, (kv, kv, swa, swa), strict=True)
    ]
    states = states_pool(layers, (*of_heads, stream, stream))
    return (kv, swa, states)


def inkling_mtp(config: HfConfig, context: Context) -> tuple[Pool, ...]:
    """Return the pools of a draft that has one layer for each step, without empty pools.

    SGLang stores layers with a window in draft_swa, for every page (swa_uses_full_indices). Without
    --enable-multi-layer-eagle, the draft has one layer, which shares the target's states
    (KVCacheConfigurator._init_pools).
    """
    steps = _inkling_steps(config, context)
    windows = _inkling_windows(config, steps)
    kv, swa, states = inkling(config, context)
    pools = [replace(kv, layers=steps - windows)] if windows < steps else []
    if windows:
        pools.append(
            replace(swa, name="draft_swa", layers=windows, hit_policy="all_pages", trailing_pages=1)
        )
    if context.flags.enable_multi_layer_eagle:
        pools.append(replace(states, layers=steps))
    return tuple(pools)


def _inkling_steps(config: HfConfig, context: Context) -> int:
    """Return the number of steps. Raises ProfileError for settings that SGLang refuses."""
    flags, most = context.flags, config.integer(NEXTN)
    if canonical_algorithm(flags.speculative_algorithm) != "EAGLE":
        raise config.error("speculative_algorithm", "this draft has a profile with EAGLE only")
    steps = flags.speculative_num_steps
    if flags.enable_multi_layer_eagle:
        if steps > most:  # load_weights
            raise config.error(
                "speculative_num_steps",
                f"SGLang refuses: {steps} steps need as many layers, but the draft has {most}",
            )
    elif config.text.get("mtp_local_layer_ids"):
        raise config.error(
            "mtp_local_layer_ids",
            "SGLang refuses: a banded MTP head (mtp_local_layer_ids set) requires "
            "--enable-multi-layer-eagle",
        )
    elif steps != 1:  # speculative/draft_utils.py :: _assert_draft_needs_no_conv_sidecar
        raise config.error(
            "enable_multi_layer_eagle",
            "SGLang refuses: Inkling's draft model runs its own short convs, which need the "
            "conv-state sidecar the multi-step draft decode backend cannot carry",
            "use --enable-multi-layer-eagle",
        )
    return steps


def _inkling_windows(config: HfConfig, steps: int) -> int:
    """Return how many of a draft's first `steps` layers have a window. Raises ProfileError."""
    if not config.text.get("mtp_local_layer_ids"):
        return 0
    windows, most = config.integers("mtp_local_layer_ids"), config.integer(NEXTN)
    if len(set(windows)) != len(windows) or not set(windows) <= set(range(most)):
        raise config.error("mtp_local_layer_ids", f"expected different layers from 0 to {most - 1}")
    for name in ("num_key_value_heads", "head_dim"):
        usual = config.text.get(f"swa_{name}") or config.text.get(name)
        if config.text.get(f"mtp_swa_{name}") not in (None, usual):
            raise config.error(
                f"mtp_swa_{name}",
                "SGLang refuses: banded MTP head geometry must match the trunk swa geometry",
            )
    return sum(layer < steps for layer in windows)


def _zaya_layers(config: HfConfig) -> tuple[int, tuple[int, ...]]:
    """Return the number of layers, and the layers with attention ("a" in `zaya_layers`).

    Without `zaya_layers`, every second layer has attention, from layer 0 on.
    """
    kinds = config.text.get("zaya_layers")
    if not kinds:
        count = config.integer("num_hidden_layers")
        return count, tuple(range(0, count, 2))
    if not isinstance(kinds, list) or "a" not in kinds or len(kinds) > MAX_LAYERS:
        raise config.error("zaya_layers", f"expected a list with an 'a', found {shown(kinds)}")
    return len(kinds), tuple(layer for layer, kind in enumerate(kinds) if kind == "a")


def _first_of(config: HfConfig, listed: str, stated: str) -> int:
    """Return the first nonzero number of a list by layer, else the number for all layers.

    listed: field with the list.
    stated: field with the number for all layers.
    """
    found = [one for one in (config.text.get(listed) and config.integers(listed)) or () if one]
    return config.changed(**{stated: found[0]}).integer(stated) if found else config.integer(stated)


def _check_heads(config: HfConfig, context: Context, heads: int, groups: int) -> None:
    """Raise ProfileError if an assertion of ZayaConfig or ZayaAttention would fail."""
    size, tp = context.flags.tp, attention_tp(context.flags)
    words = ""
    if groups != config.integer("num_key_value_heads"):
        words = "num_query_groups must equal num_key_value_heads for ZAYA1 checkpoints"
    elif tp != size:
        words = (
            f"ZAYA1 head-parallel attention requires the attention TP group ({tp}) to equal the "
            f"global TP group ({size}); attention DP is not supported for ZAYA1."
        )
    elif heads % groups:
        words = "num_q_heads must be a multiple of num_k_heads"
    elif heads % tp:
        words = (
            f"num_attention_heads ({heads}) must be divisible by tp_size ({tp}) for ZAYA1 "
            "head-parallel attention"
        )
    elif groups % tp:
        words = (
            f"num_query_groups ({groups}) must be divisible by tp_size ({tp}); set tp_size <= "
            "num_k_heads to keep both grouped-mean and conv_qk.1 head-local on each rank"
        )
    if words:
        raise config.error("num_query_groups", f"SGLang refuses: {words}")
