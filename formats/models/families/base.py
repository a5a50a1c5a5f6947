"""Rules and pools that the families of models share.

Source: SGLang srt/configs/model_config.py, srt/mem_cache/kv_cache_configurator.py and
srt/mem_cache/hybrid_cache/hybrid_pool_assembler.py; each rule names its symbol.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec.structs import replace

from hicachectl.formats.kinds.pool import Pool, StateTensor
from hicachectl.formats.models.dtypes import kv_dtype, mla_row

if TYPE_CHECKING:
    from hicachectl.formats.models.flags import DeploymentFlags
    from hicachectl.formats.models.hf_config import HfConfig


@dataclass(frozen=True, slots=True)
class Context:
    """Inputs of a family besides the config.

    page_size: tokens per page hash.
    draft: whether the model is the draft of a target.
    """

    flags: DeploymentFlags
    page_size: int
    draft: bool = False


# The field that counts a checkpoint's MTP layers.
NEXTN = "num_nextn_predict_layers"

# Models that pass through their layers several times, and the field that counts the passes.
LOOPS = {"NanbeigeForCausalLM": "num_loops", "IQuestLoopCoderForCausalLM": "loop_num"}

PoolBuilder = Callable[["HfConfig", Context], tuple[Pool, ...]]


@dataclass(frozen=True, slots=True)
class Family:
    """Rules for the pools of an architecture.

    build: function that returns the pools.
    stated: fields that a config must state.
    asks: fields that a config must state if its class fills them (`Architecture.filled`).
    draft_only: whether SGLang serves the model only as a draft.
    draft_layers: function that returns the number of layers of a draft's runner. None means the
        number that NEXTN states, or all layers without it (_compute_model_num_layers).
    frozen_kv: whether the draft has no KV, but reads the target's (FROZEN_KV_MTP).
    page_size: function that returns the page size that SGLang forces on CUDA; 0 if it forces no
        page size. None means the rule for DSA models.
    """

    build: PoolBuilder
    stated: tuple[str, ...] = ()
    asks: tuple[str, ...] = ()
    draft_only: bool = False
    draft_layers: Callable[[HfConfig], int] | None = None
    frozen_kv: bool = False
    page_size: Callable[[HfConfig], int] | None = None

    def pools(self, config: HfConfig, context: Context) -> tuple[Pool, ...]:
        """Return the pools of a model, the anchor first. Raises ProfileError."""
        for name in self.stated:
            config.required(name)
        _check_loops(config)
        return self.build(config, context)


def _check_loops(config: HfConfig) -> None:
    """Refuse loops in the config of a model without loops.

    SGLang multiplies the layers of such a model, too.
    Source: layer_setup.py :: _get_loop_num.
    """
    for architecture, name in LOOPS.items():
        stated = (config.outer.get(name), config.text.get(name))
        if config.architecture != architecture and any(x not in (None, 0, 1) for x in stated):
            raise config.error(
                name,
                "SGLang multiplies the layers of the pool by it, but this model has no loops",
                "correct the checkpoint's config, or write a profile file",
            )


def one_layer(config: HfConfig) -> int:
    """Return 1, because the runner of an MTP draft has one layer, whatever its config counts."""
    del config
    return 1


def nextn_layers(config: HfConfig) -> int:
    """Return the number of layers of a draft that has only the layers counted by NEXTN."""
    return config.integer(NEXTN)


def all_layers(config: HfConfig) -> int:
    """Return the number of layers of a draft whose runner has all layers of its config."""
    return config.integer("num_hidden_layers")


def mtp_of(build: PoolBuilder, *names: str) -> PoolBuilder:
    """Return the builder of an MTP draft with one layer in each named pool of its target."""

    def draft(config: HfConfig, context: Context) -> tuple[Pool, ...]:
        pools = build(config, context)
        return tuple(replace(pool, layers=1) for pool in pools if pool.name in names)

    return draft


def one_token_pages(build: PoolBuilder) -> PoolBuilder:
    """Return the builder of models whose states SGLang keeps only with pages of one token.

    Source: srt/arg_groups/mamba_hook.py, "no_buffer only supports page_size=1."
    """

    def checked(config: HfConfig, context: Context) -> tuple[Pool, ...]:
        if context.page_size != 1:
            raise config.error("page_size", "SGLang serves this model only with --page-size 1")
        return build(config, context)

    return checked


def mha_pool(
    name: str,
    config: HfConfig,
    context: Context,
    layers: Iterable[int],
    *,
    trailing_pages: int = 1,
    own_v_dim: bool = False,
) -> Pool:
    """Return the pool of some layers' K and V rows (MHATokenToKVPool).

    own_v_dim: whether SGLang reads `v_head_dim` for this pool. SGLang does so if the model has only
        one pool (_build_kv_pool), or if K and V differ in window layers (is_hybrid_swa_compress).
        Otherwise V has K's width, whatever the config states.
    """
    head_dim = head_dim_of(config)
    v_head_dim = config.optional_integer("v_head_dim") if own_v_dim else 0
    return Pool(
        name=name,
        kind="mha",
        dtype=kv_dtype(config, context.flags, dsa=False, draft=context.draft),
        layers=count_or_numbers(config, tuple(layers)),
        kv_heads=kv_heads_of(config),
        head_dim=head_dim,
        v_head_dim=unless_usual(v_head_dim, head_dim),
        trailing_pages=trailing_pages,
    )


def states_pool(
    layers: int | tuple[int, ...],
    conv: tuple[StateTensor, ...] = (),
    temporal: StateTensor | None = None,
) -> Pool:
    """Return the pool of some layers' states (MambaPool)."""
    return Pool(name="mamba", kind="mamba", layers=layers, temporal=temporal, conv=conv)


def convolved_pool(
    layers: int | tuple[int, ...],
    temporal: tuple[int, ...],
    groups: tuple[int, ...],
    window: int,
    dtypes: tuple[str, str],
    *,
    whole: tuple[int, ...] = (),
) -> Pool:
    """Return the pool of a temporal state and the state of one convolution.

    temporal: shape of the temporal state.
    groups, whole: fields of the convolution's `StateTensor`. Its channel axis comes before its
        window axis.
    window: number of inputs of the convolution; the state keeps all but the last input.
    dtypes: dtypes of the temporal state and of the convolution's state.
    """
    shape = (sum(groups), window - 1)
    conv = StateTensor(shape=shape, dtype=dtypes[1], groups=groups, whole=whole)
    return states_pool(layers, (conv,), StateTensor(shape=temporal, dtype=dtypes[0]))


def mla_pool(config: HfConfig, context: Context, layers: Iterable[int], *, dsa: bool) -> Pool:
    """Return the pool of some layers' latent rows (MLATokenToKVPool).

    dsa: whether the model is a DSA model.
    """
    dtype = kv_dtype(config, context.flags, dsa=dsa, draft=context.draft)
    return Pool(
        name="kv",
        kind="mla",
        dtype=dtype,
        layers=count_or_numbers(config, tuple(layers)),
        kv_lora_rank=config.integer("kv_lora_rank"),
        qk_rope_head_dim=rope_dim_of(config),
        row=mla_row(dtype, context.flags, dsa=dsa),
    )


def rope_dim_of(config: HfConfig) -> int:
    """Return the width of the rope part of latent rows, which can be 0."""
    stated = config.text.get("qk_rope_head_dim")
    return 0 if type(stated) is int and stated == 0 else config.integer("qk_rope_head_dim")


def split_layers(
    config: HfConfig, is_full: Callable[[int], bool]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the full-attention layers, and the other layers.

    Raises ProfileError if the model has no full-attention layer, or no other layer.
    """
    layers = range(config.integer("num_hidden_layers"))
    full = tuple(layer for layer in layers if is_full(layer))
    others = tuple(layer for layer in layers if not is_full(layer))
    if not full or not others:
        missing = "window or linear" if full else "full-attention"
        raise config.error(
            "num_hidden_layers",
            f"this hybrid model has no {missing} layers",
        )
    return full, others


def count_or_numbers(config: HfConfig, layers: tuple[int, ...]) -> int | tuple[int, ...]:
    """Return a pool's `layers`, as a count if they are all layers of the model, else as numbers."""
    count = config.integer("num_hidden_layers")
    return count if layers == tuple(range(count)) else layers


def window_pages(tokens: int, context: Context) -> int:
    """Return a retained window's number of pages (SWAComponent.full_window_pages)."""
    return max(1, -(-tokens // context.page_size))


def head_dim_of(config: HfConfig) -> int:
    """Return the head dim; hidden_size / num_attention_heads if the config states no head dim.

    Source: ModelConfig._derive_model_shapes.
    """
    stated = config.optional_integer("head_dim")
    return stated or config.integer("hidden_size") // config.integer("num_attention_heads")


def kv_heads_of(config: HfConfig) -> int:
    """Return the KV heads of the whole model, by the first of `_KV_HEADS` that the config states.

    A config that states none of these fields has as many KV heads as attention heads. With
    `multi_query`, there is one KV head. DBRX states the number in `attn_config`.

    Source: ModelConfig.get_total_num_kv_heads.
    """
    if config.text.get("multi_query"):
        return 1
    attention = config.text.get("attn_config")
    of_dbrx = config.outer.get("model_type") == "dbrx"
    if of_dbrx and isinstance(attention, Mapping) and "kv_n_heads" in attention:
        return config.section("attn_config").integer("kv_n_heads")
    found = [name for name in _KV_HEADS if config.text.get(name) is not None]
    return config.integer(found[0] if found else "num_attention_heads")


def unless_usual(value: int, usual: int) -> int:
    """Return a value, or 0 if it is the usual one, which a profile leaves out."""
    return 0 if value == usual else value


_KV_HEADS = (
    "n_head_kv", "num_kv_heads", "num_key_value_heads", "multi_query_group_num",
    "num_attention_groups",
)  # fmt: skip
