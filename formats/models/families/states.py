"""Models with recurrent states beside K and V, or beside latent rows.

Source: SGLang srt/configs/model_config.py, srt/mem_cache/kv_cache_configurator.py and
srt/mem_cache/hybrid_cache/hybrid_pool_assembler.py; each rule names its symbol.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicachectl.formats.documents import shown
from hicachectl.formats.kinds.pool import Pool, StateTensor
from hicachectl.formats.models.dtypes import quant_method, state_dtypes
from hicachectl.formats.models.families.attention import mha
from hicachectl.formats.models.families.base import (
    NEXTN,
    Context,
    convolved_pool,
    count_or_numbers,
    head_dim_of,
    mha_pool,
    mla_pool,
    split_layers,
    states_pool,
)
from hicachectl.formats.models.flags import attention_tp

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from hicachectl.formats.models.hf_config import HfConfig


def gdn(config: HfConfig, context: Context) -> tuple[Pool, ...]:
    """Return pools for full attention and gated delta net layers (Qwen3NextConfig)."""
    full, linear = split_layers(config, _is_full_attention_layer(config))
    return (mha_pool("kv", config, context, full), gdn_pool(config, context, linear))


def gigachat(config: HfConfig, context: Context) -> tuple[Pool, ...]:
    """Return pools for latent rows and gated delta net layers (GigaChat35Config)."""
    full, linear = split_layers(config, _is_gigachat_full_layer(config))
    return (mla_pool(config, context, full, dsa=False), gdn_pool(config, context, linear))


def kimi_linear(config: HfConfig, context: Context) -> tuple[Pool, ...]:
    """Return pools for latent rows and Kimi delta attention layers (KimiLinearConfig)."""
    delta_layers = config.section("linear_attn_config").integers("kda_layers")  # they count from 1
    full, linear = split_layers(config, lambda layer: layer + 1 not in delta_layers)
    return (mla_pool(config, context, full, dsa=False), kimi_pool(config, context, linear))


def kimi_pool(config: HfConfig, context: Context, layers: tuple[int, ...]) -> Pool:
    """Return the pool of states that a config's `linear_attn_config` describes."""
    section = config.section("linear_attn_config")
    heads, head_dim = (section.integer(name) for name in ("num_heads", "head_dim"))
    return delta_pool(context, layers, heads, head_dim, section.integer("short_conv_kernel_size"))


def gdn_pool(config: HfConfig, context: Context, layers: tuple[int, ...]) -> Pool:
    """Return the states of gated delta net layers."""
    key_heads, value_heads = (config.integer(f"linear_num_{x}_heads") for x in ("key", "value"))
    key_dim, value_dim = (config.integer(f"linear_{x}_head_dim") for x in ("key", "value"))
    groups = (key_heads * key_dim, key_heads * key_dim, value_heads * value_dim)
    temporal = (value_heads, value_dim, key_dim)
    window = config.integer("linear_conv_kernel_dim")
    return convolved_pool(layers, temporal, groups, window, state_dtypes(config, context.flags))


def bailing_lightning(config: HfConfig, context: Context) -> tuple[Pool, ...]:
    """Return pools for latent rows and lightning attention layers (BailingHybridConfig).

    Layers with a short convolution are Kimi delta attention, as in BailingMoeV3.
    """
    if config.text.get("short_conv_kernel_size") is not None:
        return bailing_delta(config, context)
    full, linear = split_layers(config, _is_bailing_full_layer(config))
    heads, head_dim = config.integer("num_attention_heads"), head_dim_of(config)
    dtype, _ = state_dtypes(None, context.flags)
    states = states_pool(
        linear,
        temporal=StateTensor(shape=(heads, head_dim, head_dim), dtype=dtype),
    )
    return (mla_pool(config, context, full, dsa=False), states)


def bailing_delta(config: HfConfig, context: Context) -> tuple[Pool, ...]:
    """Return pools for latent rows and Kimi delta attention layers (BailingHybridConfig)."""
    if config.text.get("use_mla_nope"):
        raise config.error("use_mla_nope", "hicachectl knows this model's rows only with rope")
    full, linear = split_layers(config, _is_bailing_full_layer(config))
    kernel = config.integer("short_conv_kernel_size")
    heads = config.integer("num_attention_heads")
    mamba = delta_pool(context, linear, heads, head_dim_of(config), kernel)
    return (mla_pool(config, context, full, dsa=False), mamba)


def bailing_draft_layers(config: HfConfig) -> int:
    """Return the number of a draft's layers, by NEXTN or num_hidden_layers.

    It is always 1 for a hybrid model (_build_hybrid_linear_kv_pool).
    """
    if config.outer.get("model_type") == "bailing_hybrid":
        return 1
    return config.optional_integer(NEXTN) or config.integer("num_hidden_layers")


def delta_pool(
    context: Context, layers: tuple[int, ...], heads: int, head_dim: int, kernel: int
) -> Pool:
    """Return the states of Kimi delta attention (KimiLinearStateShape)."""
    temporal_dtype, conv_dtype = state_dtypes(None, context.flags)
    return states_pool(
        layers,
        temporal=StateTensor(shape=(heads, head_dim, head_dim), dtype=temporal_dtype),
        conv=(
            StateTensor(  # the window axis comes first
                shape=(kernel - 1, 3 * heads * head_dim),
                dtype=conv_dtype,
                shard_axis=1,
                groups=(heads * head_dim,) * 3,
            ),
        ),
    )


def falcon_h1(config: HfConfig, context: Context) -> tuple[Pool, ...]:
    """Return K, V and Mamba2 states of every layer (FalconH1Config)."""
    layers = range(config.integer("num_hidden_layers"))
    states = _mamba2_pool(
        config, context, layers, _MAMBA_FIELDS, state_dtypes(config, context.flags)
    )
    return (mha_pool("kv", config, context, layers), states)


def granite_hybrid(config: HfConfig, context: Context) -> tuple[Pool, ...]:
    """Return pools for attention and Mamba2 layers (GraniteMoeHybridConfig)."""
    count = config.integer("num_hidden_layers")
    name = "layer_types" if config.text.get("layer_types") is not None else "layers_block_type"
    kinds = config.strings(name, count)
    full, linear = split_layers(config, lambda layer: kinds[layer] == "attention")
    states = _mamba2_pool(config, context, linear, _MAMBA_FIELDS, state_dtypes(None, context.flags))
    return (mha_pool("kv", config, context, full), states)


def nemotron_h(config: HfConfig, context: Context) -> tuple[Pool, ...]:
    """Return pools for attention and Mamba2 layers. Other layers have none (NemotronHConfig)."""
    config = _with_head_dim(config)
    kinds = _nemotron_kinds(config)
    full, linear = (
        tuple(i for i, kind in enumerate(kinds) if kind == wanted)
        for wanted in ("attention", "mamba")
    )
    if not full or not linear:
        raise config.error("num_hidden_layers", "expected both attention and Mamba layers")
    states = _mamba2_pool(
        config, context, linear, _NEMOTRON_FIELDS, state_dtypes(config, context.flags)
    )
    return (mha_pool("kv", config, context, full), states)


def nemotron_h_draft(config: HfConfig, context: Context) -> tuple[Pool, ...]:
    """Return the pool of an MTP draft, whose layers have attention (NemotronHForCausalLMMTP)."""
    return mha(_with_head_dim(config), context)


def _with_head_dim(config: HfConfig) -> HfConfig:
    """Return the config with the head dim that NemotronHConfig.__init__ gives it.

    Without `head_dim`, the class takes 128 and ignores `attention_head_dim`, which the first
    published checkpoints state instead. Raises ProfileError if `attention_head_dim` is not 128,
    because such weights do not load.
    """
    if config.text.get("head_dim") is not None:
        return config
    stated = config.optional_integer("attention_head_dim")
    if stated not in (0, _NEMOTRON_HEAD_DIM):
        raise config.error(
            "attention_head_dim",
            f"is {stated}, but without head_dim SGLang takes {_NEMOTRON_HEAD_DIM}",
        )
    return config.changed(head_dim=_NEMOTRON_HEAD_DIM)


def _nemotron_kinds(config: HfConfig) -> tuple[str, ...]:
    """Return the kind of each layer, from the first field that the config has."""
    count = config.integer("num_hidden_layers")
    if config.text.get("layers_block_type") is not None:
        return config.strings("layers_block_type", count)
    letters = config.letters("hybrid_override_pattern", count)
    return tuple({"*": "attention", "M": "mamba"}.get(letter, "") for letter in letters)


def jet(config: HfConfig, context: Context) -> tuple[Pool, ...]:
    """Return pools for attention and Jet layers (JetNemotronConfig)."""
    kinds = config.strings("layer_types", config.integer("num_hidden_layers"))
    full = tuple(i for i, kind in enumerate(kinds) if kind in ("attn", "swa"))
    linear = tuple(i for i, kind in enumerate(kinds) if kind == "jet")
    if not full or not linear:
        raise config.error("layer_types", "expected both attn and jet layers")
    block = config.section("efficient_attention_config").section("jet")
    heads, key_dim, window = (block.integer(x) for x in ("num_heads", "head_dim", "conv_size"))
    factor = block.text.get("expand_v")
    if not isinstance(factor, int | float) or not 0 < factor <= _MOST_EXPANSION:
        raise block.error(
            "expand_v", f"expected a number up to {_MOST_EXPANSION}, found {shown(factor)}"
        )
    if heads % (tp := attention_tp(context.flags)):
        raise block.error("num_heads", f"{heads} heads cannot be divided by TP {tp}")
    value_dim = int(key_dim * factor)
    blocks = (heads * value_dim, heads * key_dim, heads * key_dim)
    temporal = (heads, value_dim, key_dim)
    dtypes = state_dtypes(config, context.flags)
    states = convolved_pool(linear, temporal, blocks, window, dtypes)
    return (mha_pool("kv", config, context, full), states)


def _mamba2_pool(
    config: HfConfig,
    context: Context,
    layers: Iterable[int],
    fields: tuple[str, ...],
    dtypes: tuple[str, str],
) -> Pool:
    """Return the states of Mamba2 layers (Mamba2StateShape).

    fields: names of the fields for heads, head dim, groups, state size and convolution window.
    dtypes: dtypes of the temporal state and the convolution.
    """
    heads, head_dim, groups, state, window = (config.integer(name) for name in fields)
    tp = attention_tp(context.flags)
    if groups % tp and (groups != 1 or quant_method(config)):
        raise config.error(
            fields[2], f"SGLang refuses {groups} at TP {tp}: {_REFUSED_GROUPS[groups != 1]!r}"
        )  # fmt: skip
    inner = heads * head_dim
    for name in _MAMBA_WIDTHS:  # SGLang divides the convolution by these widths
        stated = config.optional_integer(name) or inner
        if stated != inner:
            raise config.error(name, f"is {stated}, but {heads} heads of {head_dim} are {inner}")
    blocks = (inner, groups * state, groups * state)
    temporal = (heads, head_dim, state)
    whole = (1, 2) if groups == 1 else ()
    held = count_or_numbers(config, tuple(layers))
    return convolved_pool(held, temporal, blocks, window, dtypes, whole=whole)


def _is_bailing_full_layer(config: HfConfig) -> Callable[[int], bool]:
    if isinstance(config.text.get("layer_group_size"), list):
        linear = config.integers("layer_group_size", config.integer("num_hidden_layers"))
        return lambda layer: linear[layer] != 1
    group = config.integer("layer_group_size")
    return lambda layer: (layer + 1) % group == 0


def _is_gigachat_full_layer(config: HfConfig) -> Callable[[int], bool]:
    if config.text.get("layer_types") is not None:
        kinds = config.strings("layer_types", config.integer("num_hidden_layers"))
        return lambda layer: kinds[layer] in ("attention", "full_attention")
    full = config.integers("full_attention_layers")
    return lambda layer: layer in full


def _is_full_attention_layer(config: HfConfig) -> Callable[[int], bool]:
    interval = config.optional_integer("full_attention_interval")
    if interval:
        return lambda layer: (layer + 1) % interval == 0
    if config.text.get("layer_types") is None:
        raise config.error("full_attention_interval", "missing")
    kinds = config.strings("layer_types", config.integer("num_hidden_layers"))
    return lambda layer: kinds[layer] == "full_attention"


# Messages of MambaMixer2: for a quantised model with one group, and for several groups.
_REFUSED_GROUPS = (
    "Tensor parallel currently supported for quantized models only if tensor parallel world size "
    "divides num groups.",
    "If tensor parallel world size does not divide num_groups, then num_groups must equal 1.",
)
_MAMBA_WIDTHS = ("mamba_d_ssm", "mamba_intermediate", "mamba_intermediate_size")
_MAMBA_FIELDS = (
    "mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv",
)  # fmt: skip

_NEMOTRON_HEAD_DIM = 128
_NEMOTRON_FIELDS = (
    "mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel",
)  # fmt: skip

_MOST_EXPANSION = 64
