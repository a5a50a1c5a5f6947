"""Models whose layers all have attention over all tokens.

Source: SGLang srt/configs/model_config.py, srt/mem_cache/kv_cache_configurator.py and
srt/mem_cache/hybrid_cache/hybrid_pool_assembler.py; each rule names its symbol.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicachectl.formats.documents import shown
from hicachectl.formats.kinds.pool import Pool
from hicachectl.formats.models.families.base import (
    LOOPS,
    Context,
    count_or_numbers,
    mha_pool,
    mla_pool,
    unless_usual,
)
from hicachectl.formats.models.recorded import architecture
from hicachectl.formats.profile import MAX_LAYERS, above
from hicachectl.formats.releases import release_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicachectl.formats.models.hf_config import HfConfig
    from hicachectl.formats.releases import Release


_DSA_PAGE_TOKENS = 64  # tokens of a physical index page on CUDA (DSATokenToKVPool)


def is_dsa(config: HfConfig) -> bool:
    """Return whether attention is DeepSeek Sparse Attention (is_deepseek_dsa)."""
    fields = config.text if config.architecture in _DSA_NESTED else config.outer
    return architecture(config.architecture).dsa and fields.get("index_topk") is not None


def dsa_page_size(config: HfConfig) -> int:
    """Return the page size that SGLang forces for DSA models on CUDA; 0 for other models.

    Source: _deepseek_family_overrides.
    """
    return _DSA_PAGE_TOKENS * (config.optional_integer("index_kpool") or 1) if is_dsa(config) else 0


def dsa_indexer_layers(config: HfConfig, release: Release) -> tuple[int, ...]:
    """Return the layers whose index keys a release stores.

    If the release does not store all of them, the first of these fields that the config states
    decides: indexer_types, cli_factor (if above 1), index_topk_pattern, index_topk_freq.
    Source: srt/configs/model_config.py :: dsa_layer_skips_topk.
    """
    count = config.integer("num_hidden_layers")
    layers = range(count)
    if not release.compact_indexer:
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
    # Layers before the offset, 2 by default, compute a top-k. Then every `frequency`-th layer does.
    offset = config.optional_integer("index_skip_topk_offset") or 2
    return tuple(i for i in layers if max(i - offset + 1, 0) % frequency == 0)


def mha(config: HfConfig, context: Context) -> tuple[Pool, ...]:
    """Return one pool of all layers (MHATokenToKVPool)."""
    _check_no_windows(config, context)
    layers = range(config.integer("num_hidden_layers"))
    return (mha_pool("kv", config, context, layers, own_v_dim=True),)


def nemotron_nas(config: HfConfig, context: Context) -> tuple[Pool, ...]:
    """Return one pool of all layers, including layers without attention (DeciLMForCausalLM).

    Source: ModelConfig.get_total_num_kv_heads.
    """
    if config.text.get("model_type") != "nemotron-nas":
        raise config.error("model_type", "SGLang serves this architecture only as nemotron-nas")
    heads = config.integer("num_attention_heads")
    found = {heads // group for group in _head_groups(config)}
    if len(found) > 1:
        words = "Variable GQA (VGQA) is not yet supported for nemotron-nas in sglang"
        raise config.error("block_configs", f"SGLang refuses: {words}")
    if not found:
        words = "Couldn't determine number of kv heads"
        raise config.error("block_configs", f"SGLang refuses: {words}")
    return mha(config.changed(n_head_kv=found.pop()), context)  # SGLang reads this field first


def _head_groups(config: HfConfig) -> Iterator[int]:
    """Yield, for each layer with attention, the number of heads that share K and V."""
    blocks = config.text.get("block_configs")
    count = config.integer("num_hidden_layers")
    if not isinstance(blocks, list) or len(blocks) != count:
        raise config.error("block_configs", f"expected {count} tables, found {shown(blocks)}")
    for number, block in enumerate(blocks):
        name = f"block_configs[{number}]"
        attention = config.changed(**{name: block}).section(name).section("attention")
        if not attention.flag("no_op", usual=False):
            yield attention.integer("n_heads_in_group")


def mla(config: HfConfig, context: Context) -> tuple[Pool, ...]:
    """Return latent rows, with index keys for DSA (MLATokenToKVPool, DSATokenToKVPool)."""
    _check_no_windows(config, context)
    dsa = is_dsa(config)
    kv = mla_pool(config, context, range(config.integer("num_hidden_layers")), dsa=dsa)
    release = release_of(context.flags.sglang)
    if not dsa or not release.indexer:
        return (kv,)
    layers = (
        tuple(range(config.integer("num_hidden_layers")))  # _should_elide_dsa_index_k
        if context.draft
        else dsa_indexer_layers(config, release)
    )
    indexer = Pool(
        name="indexer",
        kind="dsa_indexer",
        layers=count_or_numbers(config, layers),
        index_head_dim=config.integer("index_head_dim"),
        compress_ratio=unless_usual(config.optional_integer("index_kpool") or 1, 1),
    )
    return (kv, indexer)


def _check_no_windows(config: HfConfig, context: Context) -> None:
    """Refuse a config that asks for window layers itself (is_hybrid_swa_model)."""
    if config.text.get("is_hybrid_swa") and not context.flags.disable_hybrid_swa_memory:
        raise config.error(
            "is_hybrid_swa",
            "SGLang then has a pool of window layers, which hicachectl does not know for this "
            "model",
            "write a profile file",
        )


def mha_or_mla(config: HfConfig, context: Context) -> tuple[Pool, ...]:
    """Return latent rows if the language model has them, else K and V rows."""
    return (mla if config.text.get("kv_lora_rank") else mha)(config, context)


def no_kv(config: HfConfig, context: Context) -> tuple[Pool, ...]:
    """Return no pool, because the draft reads the target's KV."""
    del config, context
    return ()


def minimax_dspark(config: HfConfig, context: Context) -> tuple[Pool, ...]:
    """Return K and V rows of the draft's own layers (configure_minimax_m3_dspark)."""
    layers = range(minimax_dspark_layers(config))
    return (mha_pool("kv", config, context, layers, own_v_dim=True),)


def minimax_dspark_layers(config: HfConfig) -> int:
    """Return the number of the draft's own layers."""
    return config.section("dflash_config").integer("num_hidden_layers")


def glm4_lite(config: HfConfig, context: Context) -> tuple[Pool, ...]:
    """Return latent rows; `head_dim` is another name of the rope part (Glm4MoeLiteConfig)."""
    rope = config.integer("qk_rope_head_dim")
    if config.text.get("head_dim", rope) != rope:
        raise config.error("head_dim", f"must be qk_rope_head_dim, {rope}, or be left out")
    return mla(config, context)


def longcat_flash(config: HfConfig, context: Context) -> tuple[Pool, ...]:
    """Return latent rows of both attention blocks of each layer (num_attention_layers)."""
    if is_dsa(config):
        raise config.error("index_topk", "hicachectl does not know this model's index keys")
    return (mla_pool(config, context, range(2 * config.integer("num_hidden_layers")), dsa=False),)


def looped(config: HfConfig, context: Context) -> tuple[Pool, ...]:
    """Return a pool for all passes through the layers. Each pass has its own K and V rows."""
    name = LOOPS[config.architecture]
    count = config.optional_integer(name) or 1
    # SGLang multiplies twice by the loops, in num_attention_layers and in num_effective_layers.
    return _repeated(config, context, name, count * count)


def hrm_text(config: HfConfig, context: Context) -> tuple[Pool, ...]:
    """Return K and V rows of all passes through two stacks of layers (HrmTextConfig).

    If a config states `num_layers_per_stack`, its `num_hidden_layers` includes all passes.
    """
    passes = 1
    if config.text.get("num_layers_per_stack") is None:
        passes = config.integer("H_cycles") * (config.integer("L_cycles") + 1)
    return _repeated(config, context, "H_cycles", passes)


def _repeated(config: HfConfig, context: Context, name: str, passes: int) -> tuple[Pool, ...]:
    """Return a pool with every layer once for each pass.

    name: the field that counts the passes.
    """
    layers = passes * config.integer("num_hidden_layers")
    for problem in above(name, layers, MAX_LAYERS):  # before building a list of that length
        raise config.error(*problem.split(": ", 1))
    return (mha_pool("kv", config, context, range(layers), own_v_dim=True),)


# Models whose text fields SGLang copies into the document.
_DSA_NESTED = ("Glm5NextForConditionalGeneration", "Glm5NextForConditionalGenerationNextN")
