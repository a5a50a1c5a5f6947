"""Derive a model's pools from its config, by what its KV is, as SGLang does.

`architectures` says which family an architecture belongs to.

Source: SGLang srt/configs/model_config.py, srt/mem_cache/kv_cache_configurator.py and
srt/mem_cache/hybrid_cache/hybrid_pool_assembler.py; each rule names its symbol.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec.structs import replace

from hicachectl.formats.keys.versions import sglang_version
from hicachectl.formats.kinds.pool import Pool, StateTensor
from hicachectl.formats.models.dtypes import kv_dtype, mla_row, state_dtypes
from hicachectl.formats.models.flags import attention_tp

if TYPE_CHECKING:
    from hicachectl.formats.models.flags import DeploymentFlags
    from hicachectl.formats.models.hf_config import HfConfig

# Up to this version, HiCache also stored index keys of layers that reuse another layer's top-k.
_ALL_INDEXER_LAYERS_UNTIL = (0, 5, 18)
_DSA_PAGE_TOKENS = 64  # in a physical index page on CUDA (DSATokenToKVPool)


@dataclass(frozen=True, slots=True)
class Context:
    """Inputs of a family besides the config. page_size: tokens per page hash."""

    flags: DeploymentFlags
    page_size: int
    draft: bool = False


PoolBuilder = Callable[["HfConfig", Context], tuple[Pool, ...]]


@dataclass(frozen=True, slots=True)
class Family:
    """Rules for the pools of an architecture.

    build: the pools.
    stated: fields that a config must state, because SGLang's config class has a number of its own
        for configs without them.
    own_mtp: the checkpoint has an MTP layer that SGLang counts as one NextN layer, regardless of
        the config (ModelConfig._config_draft_model).
    draft_only: served only as a draft.
    """

    build: PoolBuilder
    stated: tuple[str, ...] = ()
    own_mtp: bool = False
    draft_only: bool = False

    def pools(self, config: HfConfig, context: Context) -> tuple[Pool, ...]:
        """Return the pools of a model, the anchor first. Raises ProfileError."""
        for name in self.stated:
            config.required(name)
        return self.build(config, context)


def is_dsa(config: HfConfig) -> bool:
    """Return whether attention is DeepSeek Sparse Attention (is_deepseek_dsa)."""
    return config.architecture in _DSA_ARCHITECTURES and config.outer.get("index_topk") is not None


def dsa_page_size(config: HfConfig) -> int:
    """Return SGLang's page size in tokens for DSA models on CUDA (_deepseek_family_overrides)."""
    return _DSA_PAGE_TOKENS * (config.optional_integer("index_kpool") or 1)


def dsa_indexer_layers(config: HfConfig, version: tuple[int, ...]) -> tuple[int, ...]:
    """Return the layers whose index keys are stored. The first field that the config has decides.

    Source: srt/configs/model_config.py :: dsa_layer_skips_topk.
    """
    count = config.integer("num_hidden_layers")
    layers = range(count)
    if version <= _ALL_INDEXER_LAYERS_UNTIL:
        return tuple(layers)
    if config.text.get("indexer_types") is not None:
        kinds = config.strings("indexer_types", count)
        return tuple(i for i in layers if kinds[i] != "shared")
    factor = config.optional_integer("cli_factor")
    if factor > 1:
        return tuple(i for i in layers if i % factor == 0)
    pattern = config.text.get("index_topk_pattern")
    if pattern is not None:
        return tuple(i for i in layers if i >= len(pattern) or pattern[i] != "S")
    frequency = config.optional_integer("index_topk_freq") or 1
    # Without an offset, the first group starts after layer 0, as with offset 2.
    offset = config.optional_integer("index_skip_topk_offset") or 2
    return tuple(i for i in layers if max(i - offset + 1, 0) % frequency == 0)


def mha(config: HfConfig, context: Context) -> tuple[Pool, ...]:
    """Return one pool of all layers (MHATokenToKVPool)."""
    return (_mha_pool("kv", config, context, range(config.integer("num_hidden_layers"))),)


def mla(config: HfConfig, context: Context) -> tuple[Pool, ...]:
    """Return latent rows, with index keys for DSA (MLATokenToKVPool, DSATokenToKVPool)."""
    dsa = is_dsa(config)
    kv = _mla_pool(config, context, range(config.integer("num_hidden_layers")), dsa=dsa)
    if not dsa:
        return (kv,)
    if config.optional_integer("index_kpool") > 1:
        raise config.error("index_kpool", "the form of pooled index keys is unknown to hicachectl")
    layers = dsa_indexer_layers(config, sglang_version(context.flags.sglang))
    indexer = Pool(
        name="indexer",
        kind="dsa_indexer",
        layers=_count_or_numbers(config, layers),
        index_head_dim=config.integer("index_head_dim"),
    )
    return (kv, indexer)


def gdn(config: HfConfig, context: Context) -> tuple[Pool, ...]:
    """Return pools for full attention and gated delta net layers (Qwen3NextConfig)."""
    full, linear = _split(config, _is_full_attention_layer(config))
    key_heads, value_heads = (config.integer(f"linear_num_{x}_heads") for x in ("key", "value"))
    key_dim, value_dim = (config.integer(f"linear_{x}_head_dim") for x in ("key", "value"))
    groups = (key_heads * key_dim, key_heads * key_dim, value_heads * value_dim)
    temporal_dtype, conv_dtype = state_dtypes(config, context.flags)
    mamba = Pool(
        name="mamba",
        kind="mamba",
        layers=linear,
        temporal=StateTensor(shape=(value_heads, value_dim, key_dim), dtype=temporal_dtype),
        conv=(
            StateTensor(
                shape=(sum(groups), config.integer("linear_conv_kernel_dim") - 1),
                dtype=conv_dtype,
                groups=groups,
            ),
        ),
    )
    return (_mha_pool("kv", config, context, full), mamba)


def kimi_linear(config: HfConfig, context: Context) -> tuple[Pool, ...]:
    """Return pools for latent rows and Kimi delta attention layers (KimiLinearConfig)."""
    linear_config = config.section("linear_attn_config")
    delta_layers = linear_config.integers("kda_layers")  # counted from 1
    full, linear = _split(config, lambda layer: layer + 1 not in delta_layers)
    kernel = linear_config.integer("short_conv_kernel_size")
    heads, head_dim = (linear_config.integer(name) for name in ("num_heads", "head_dim"))
    mamba = _delta_pool(context, linear, heads, head_dim, kernel)
    return (_mla_pool(config, context, full, dsa=False), mamba)


def bailing_delta(config: HfConfig, context: Context) -> tuple[Pool, ...]:
    """Return pools for latent rows and Kimi delta attention layers (BailingHybridConfig)."""
    if config.text.get("use_mla_nope"):
        raise config.error("use_mla_nope", "hicachectl knows this model's rows only with rope")
    group = config.integer("layer_group_size")
    full, linear = _split(config, lambda layer: (layer + 1) % group == 0)
    kernel = config.integer("short_conv_kernel_size")
    heads = config.integer("num_attention_heads")
    mamba = _delta_pool(context, linear, heads, _head_dim(config), kernel)
    return (_mla_pool(config, context, full, dsa=False), mamba)


def _delta_pool(
    context: Context, layers: tuple[int, ...], heads: int, head_dim: int, kernel: int
) -> Pool:
    """Return the states of Kimi delta attention (KimiLinearStateShape)."""
    temporal_dtype, conv_dtype = state_dtypes(None, context.flags)
    return Pool(
        name="mamba",
        kind="mamba",
        layers=layers,
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
    return (_mha_pool("kv", config, context, layers), states)


def granite_hybrid(config: HfConfig, context: Context) -> tuple[Pool, ...]:
    """Return pools for attention and Mamba2 layers (GraniteMoeHybridConfig)."""
    count = config.integer("num_hidden_layers")
    name = "layer_types" if config.text.get("layer_types") is not None else "layers_block_type"
    kinds = config.strings(name, count)
    full, linear = _split(config, lambda layer: kinds[layer] == "attention")
    states = _mamba2_pool(config, context, linear, _MAMBA_FIELDS, state_dtypes(None, context.flags))
    return (_mha_pool("kv", config, context, full), states)


def lfm2(config: HfConfig, context: Context) -> tuple[Pool, ...]:
    """Return pools for attention and short-convolution layers (Lfm2Config)."""
    if context.page_size != 1:
        raise config.error("page_size", "SGLang serves this model only with --page-size 1")
    kinds = config.strings("layer_types", config.integer("num_hidden_layers"))
    full, convolved = _split(config, lambda layer: kinds[layer] == "full_attention")
    shape = (config.integer("hidden_size"), config.integer("conv_L_cache") - 1)
    _, dtype = state_dtypes(config, context.flags)
    states = Pool(
        name="mamba",
        kind="mamba",
        layers=convolved,
        conv=(StateTensor(shape=shape, dtype=dtype),),
    )
    return (_mha_pool("kv", config, context, full), states)


def nemotron_h(config: HfConfig, context: Context) -> tuple[Pool, ...]:
    """Return pools for attention and Mamba2 layers; others have neither (NemotronHConfig)."""
    pattern = config.letters("hybrid_override_pattern", config.integer("num_hidden_layers"))
    full, linear = (
        tuple(i for i, letter in enumerate(pattern) if letter == wanted) for wanted in "*M"
    )
    if not full or not linear:
        raise config.error("hybrid_override_pattern", "expected both * and M layers")
    states = _mamba2_pool(
        config, context, linear, _NEMOTRON_FIELDS, state_dtypes(config, context.flags)
    )
    return (_mha_pool("kv", config, context, full), states)


def _mamba2_pool(
    config: HfConfig,
    context: Context,
    layers: Iterable[int],
    fields: tuple[str, ...],
    dtypes: tuple[str, str],
) -> Pool:
    """Return the states of Mamba2 layers (Mamba2StateShape).

    fields: names of heads, head dim, groups, state size and convolution window.
    dtypes: of the temporal state and the convolution.
    """
    heads, head_dim, groups, state, window = (config.integer(name) for name in fields)
    tp = attention_tp(context.flags)
    if groups % tp:
        raise config.error(
            fields[2], f"{groups} groups cannot be divided by TP {tp}; SGLang then repeats groups, "
            "which a profile cannot describe"
        )  # fmt: skip
    inner = heads * head_dim
    stated = config.optional_integer("mamba_d_ssm") or inner
    if stated != inner:
        raise config.error(
            "mamba_d_ssm", f"is {stated}, but {heads} heads of {head_dim} are {inner}"
        )
    blocks = (inner, groups * state, groups * state)
    return Pool(
        name="mamba",
        kind="mamba",
        layers=_count_or_numbers(config, tuple(layers)),
        temporal=StateTensor(shape=(heads, head_dim, state), dtype=dtypes[0]),
        conv=(StateTensor(shape=(sum(blocks), window - 1), dtype=dtypes[1], groups=blocks),),
    )


def swa(config: HfConfig, context: Context) -> tuple[Pool, ...]:
    """Return pools for full and sliding-window layers, with equal heads (SWAKVPool)."""
    kinds = config.strings("layer_types", config.integer("num_hidden_layers"))
    # The window includes the token itself: models/gpt_oss.py :: get_attention_sliding_window_size.
    retained = config.integer("sliding_window") - 1
    return _windowed(config, context, lambda layer: kinds[layer] == "full_attention", retained)


def llama4(config: HfConfig, context: Context) -> tuple[Pool, ...]:
    """Return pools for full and chunked layers, as get_hybrid_layer_ids: never by layer_types."""
    chunk = config.integer("attention_chunk_size")
    return _windowed(config, context, lambda layer: (layer + 1) % 4 == 0, chunk)


def mimo_v2(config: HfConfig, context: Context) -> tuple[Pool, ...]:
    """Return pools for full and sliding-window layers, of different heads; K wider than V."""
    _needs_window_pool(config, context)
    pattern = config.integers("hybrid_layer_pattern", config.integer("num_hidden_layers"))
    full, window = _split(config, lambda layer: pattern[layer] == 0)
    head_dim = config.optional_integer("swa_head_dim") or config.integer("head_dim")
    kv = _mha_pool("kv", config, context, full)
    swa = Pool(
        name="swa",
        kind="mha",
        dtype=kv.dtype,
        layers=window,
        kv_heads=config.integer("swa_num_key_value_heads"),
        head_dim=head_dim,
        v_head_dim=_other(config.optional_integer("swa_v_head_dim"), head_dim),
        trailing_pages=_pages(_window_size(config), context),
    )
    return (kv, swa)


def _windowed(
    config: HfConfig, context: Context, is_full: Callable[[int], bool], retained: int
) -> tuple[Pool, ...]:
    """Return pools for full and window layers of equal heads. retained: tokens of a window."""
    if context.flags.disable_hybrid_swa_memory:
        return mha(config, context)
    full, window = _split(config, is_full)
    return (
        _mha_pool("kv", config, context, full),
        _mha_pool("swa", config, context, window, trailing_pages=_pages(retained, context)),
    )


def pixtral(config: HfConfig, context: Context) -> tuple[Pool, ...]:
    """Return latent rows if the language model has them, else K and V rows."""
    return (mla if config.text.get("kv_lora_rank") else mha)(config, context)


def longcat_flash(config: HfConfig, context: Context) -> tuple[Pool, ...]:
    """Return latent rows of two attention blocks a layer (ModelConfig.num_attention_layers)."""
    if is_dsa(config):
        raise config.error("index_topk", "hicachectl does not know this model's index keys")
    _one_stage(config, context)
    return (_mla_pool(config, context, range(2 * config.integer("num_hidden_layers")), dsa=False),)


def looped(loops: str) -> PoolBuilder:
    """Return the builder of models that pass their layers several times, each with its own KV.

    loops: the field that counts the passes; 1 if absent.
    """

    def build(config: HfConfig, context: Context) -> tuple[Pool, ...]:
        count = config.optional_integer(loops) or 1
        if count > 1:
            _one_stage(config, context)
        # Both num_attention_layers and num_effective_layers multiply by the loops.
        layers = range(count * count * config.integer("num_hidden_layers"))
        return (_mha_pool("kv", config, context, layers),)

    return build


def _one_stage(config: HfConfig, context: Context) -> None:
    if context.flags.pp > 1:
        raise config.error("pp", "hicachectl knows this model's KV layers only for one stage")


def gemma4(config: HfConfig, context: Context) -> tuple[Pool, ...]:
    """Return pools for full and window layers, of different heads (_gemma4_attention_shapes)."""
    _needs_window_pool(config, context)
    kinds = config.strings("layer_types", config.integer("num_hidden_layers"))
    if kinds[-1] != "full_attention":
        raise config.error("layer_types", f"the last layer has full attention, not {kinds[-1]}")
    full, window = _split(config, lambda layer: kinds[layer] == "full_attention")
    pages = _pages(config.integer("sliding_window") - 1, context)
    swa = _mha_pool("swa", config, context, window, trailing_pages=pages)
    shared = bool(config.text.get("attention_k_eq_v"))  # else full layers have as many heads
    kv = replace(
        _mha_pool("kv", config, context, full),
        head_dim=config.integer("global_head_dim"),
        kv_heads=(shared and config.optional_integer("num_global_key_value_heads")) or swa.kv_heads,
    )
    return (kv, swa)


def _needs_window_pool(config: HfConfig, context: Context) -> None:
    if context.flags.disable_hybrid_swa_memory:
        raise config.error(
            "architectures", "SGLang cannot disable hybrid SWA memory for this model"
        )


def _mha_pool(
    name: str,
    config: HfConfig,
    context: Context,
    layers: Iterable[int],
    *,
    trailing_pages: int = 1,
) -> Pool:
    head_dim = _head_dim(config)
    return Pool(
        name=name,
        kind="mha",
        dtype=kv_dtype(config, context.flags, dsa=False, draft=context.draft),
        layers=_count_or_numbers(config, tuple(layers)),
        kv_heads=_kv_heads(config),
        head_dim=head_dim,
        v_head_dim=_other(config.optional_integer("v_head_dim"), head_dim),
        trailing_pages=trailing_pages,
    )


def _mla_pool(config: HfConfig, context: Context, layers: Iterable[int], *, dsa: bool) -> Pool:
    dtype = kv_dtype(config, context.flags, dsa=dsa, draft=context.draft)
    return Pool(
        name="kv",
        kind="mla",
        dtype=dtype,
        layers=_count_or_numbers(config, tuple(layers)),
        kv_lora_rank=config.integer("kv_lora_rank"),
        qk_rope_head_dim=config.integer("qk_rope_head_dim"),
        row=mla_row(dtype, context.flags, dsa=dsa),
    )


def _head_dim(config: HfConfig) -> int:
    """Return the head dim; hidden_size / num_attention_heads if the config has none.

    Source: ModelConfig._derive_model_shapes.
    """
    stated = config.optional_integer("head_dim")
    return stated or config.integer("hidden_size") // config.integer("num_attention_heads")


def _kv_heads(config: HfConfig) -> int:
    """Return the KV heads of the whole model: the first field stated, else the attention heads.

    Source: ModelConfig.get_total_num_kv_heads.
    """
    if config.text.get("multi_query"):
        return 1
    attention = config.text.get("attn_config")
    if isinstance(attention, Mapping) and "kv_n_heads" in attention:  # Dbrx
        return config.section("attn_config").integer("kv_n_heads")
    found = [name for name in _KV_HEADS if config.text.get(name) is not None]
    return config.integer(found[0] if found else "num_attention_heads")


def _other(value: int, usual: int) -> int:
    return 0 if value == usual else value


def _is_full_attention_layer(config: HfConfig) -> Callable[[int], bool]:
    interval = config.optional_integer("full_attention_interval")
    if interval:
        return lambda layer: (layer + 1) % interval == 0
    if config.text.get("layer_types") is None:
        raise config.error("full_attention_interval", "missing")
    kinds = config.strings("layer_types", config.integer("num_hidden_layers"))
    return lambda layer: kinds[layer] == "full_attention"


def _window_size(config: HfConfig) -> int:
    """Return the first stated window size (ModelConfig._get_sliding_window_size)."""
    names = ("sliding_window_size", "sliding_window", "window_size")
    found = [name for name in names if config.text.get(name) is not None]
    return config.integer(found[0] if found else names[0])


def _pages(tokens: int, context: Context) -> int:
    """Return a retained window's number of pages (SWAComponent.full_window_pages)."""
    return max(1, -(-tokens // context.page_size))


def _split(
    config: HfConfig, is_full: Callable[[int], bool]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the full-attention layers and the others. Raises ProfileError if either is empty."""
    layers = range(config.integer("num_hidden_layers"))
    full = tuple(layer for layer in layers if is_full(layer))
    others = tuple(layer for layer in layers if not is_full(layer))
    if not full or not others:
        missing = "window or linear" if full else "full-attention"
        raise config.error(
            "num_hidden_layers",
            f"this hybrid model has no {missing} layers; check the config, or write a profile file",
        )
    return full, others


def _count_or_numbers(config: HfConfig, layers: tuple[int, ...]) -> int | tuple[int, ...]:
    count = config.integer("num_hidden_layers")
    return count if layers == tuple(range(count)) else layers


_DSA_ARCHITECTURES = frozenset(
    {
        "DeepseekV32ForCausalLM",
        "DeepseekV3ForCausalLM",
        "GlmMoeDsaForCausalLM",
        "HYV4ForCausalLM",
        "LongcatFlashForCausalLM",
        "MistralLarge3ForCausalLM",
        "PixtralForConditionalGeneration",
    }
)
_MAMBA_FIELDS = (
    "mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv",
)  # fmt: skip
_NEMOTRON_FIELDS = (
    "mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel",
)  # fmt: skip
_KV_HEADS = (
    "n_head_kv", "num_kv_heads", "num_key_value_heads", "multi_query_group_num",
    "num_attention_groups",
)  # fmt: skip
