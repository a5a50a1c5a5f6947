"""SGLang's server flags that determine keys and object sizes, and values derived from the flags.

Source: SGLang srt/arg_groups/; each rule names the function.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from hicachectl.formats.errors import ProfileError
from hicachectl.formats.layouts import LAYOUTS
from hicachectl.formats.objects import MAX_RANKS
from hicachectl.formats.profile import (
    MAX_LAYERS,
    MAX_PAGE_SIZE,
    PREFETCH_THRESHOLD,
    above,
    too_many,
)
from hicachectl.formats.releases import NEWEST_SGLANG, release_of
from hicachectl.formats.wording import not_one_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

# SpeculativeAlgorithm (srt/speculative/spec_info.py); NEXTN is an alias (spec_registry.py).
_ALGORITHMS = (
    "EAGLE", "EAGLE3", "FROZEN_KV_MTP", "STANDALONE", "NGRAM", "DFLASH", "DSPARK", "UNO",
)  # fmt: skip
_BIGRAM_ALGORITHMS = ("EAGLE", "EAGLE3", "FROZEN_KV_MTP")  # SpeculativeAlgorithm.is_eagle
_BOUNDS = {
    **dict.fromkeys(("tp", "dp", "cp", "pp", "dcp", "tp_lcm_size"), MAX_RANKS),
    "page_size": MAX_PAGE_SIZE,
    "speculative_num_steps": MAX_LAYERS,
}

_REFUSED_BESIDE = "SGLang refuses it with --enable-hierarchical-cache"
_NEVER_BESIDE_HICACHE = {
    # dllm_hook.py :: handle_dllm_inference
    "dllm_algorithm": "SGLang disables HiCache for diffusion language models",
    # kv_cache_hook.py :: handle_cache_compatibility
    "disable_radix_cache": _REFUSED_BESIDE,
    "enable_lmcache": _REFUSED_BESIDE,
    # mamba_hook.py :: handle_int8_mamba_checkpoint
    "enable_int8_mamba_checkpoint": _REFUSED_BESIDE,
    # kv_shard_hook.py
    "enable_kv_cache_sharding": "SGLang refuses it with --hicache-storage-backend",
    # hicache_hook.py :: handle_hicache
    "enable_unified_cache_external_linker": _REFUSED_BESIDE,
    "encoder_only": "such a server has no KV cache",
    "prefill_only_disable_kv_cache": "such a server has no KV cache",
}
_STAGED = (
    "SGLang supports pipeline parallelism only with EAGLE (non-multi-layer) speculative decoding"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentFlags:
    """Flags of a server, with SGLang's names and values, before sharding.

    model: served model name; None means the config's `_name_or_path`.
    page_size: --page-size in tokens; None if SGLang chooses. Under DCP, a page in the store has
        `dcp` times as many tokens; see `page_tokens`.
    layout: --hicache-mem-layout; None for the release's default.
    storage_backend, io_backend: values that determine, with `layout`, the layout in use.
    tp: --tp-size, ranks of a pipeline stage; not the attention TP size.
    cp: --attention-context-parallel-size.
    pp_partition: SGLANG_PP_LAYER_PARTITION.
    draft_model_config: the draft's config; None if the target's checkpoint contains the draft.
    mamba_ssm_dtype, mamba_conv_dtype: --mamba-ssm-dtype or SGLANG_MAMBA_*_DTYPE; "" if unset.
    indexer_dtype: --qsa-indexer-dtype; "fp4" for --enable-deepseek-v4-fp4-indexer; for a model
        whose index keys have the dtype that the GPU needs, this dtype.
    dsv4_kv_layout, dsv4_compressed_kv_layout, dsv4_compress_state_dtype: SGLANG_DSV4_KV_LAYOUT,
        …_COMPRESSED_KV_LAYOUT, …_COMPRESS_STATE_DTYPE; "" if unset.
    prefetch_threshold: number of tokens that --hicache-storage-backend-extra-config states.
    resolved: whether a server reported these values after its overrides, so that page_size is
        final.
    launched: whether the values are those of a launch command, whose page_size SGLang may override
        silently.
    """

    model: str | None = None
    page_size: int | None = None
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    layout: str | None = None
    storage_backend: str | None = None
    io_backend: str = "kernel"
    tp: int = 1
    dp: int = 1
    enable_dp_attention: bool = False
    pp: int = 1
    pp_partition: tuple[int, ...] = ()
    cp: int = 1
    enable_dsa_cache_layer_split: bool = False
    dcp: int = 1
    tp_lcm_size: int = 0
    tag: str = ""
    speculative_algorithm: str = ""
    prefetch_threshold: int = PREFETCH_THRESHOLD
    draft_model_config: Mapping[str, Any] | None = None
    speculative_num_steps: int = 0
    enable_multi_layer_eagle: bool = False
    speculative_draft_kv_cache_dtype: str = ""
    dsa_prefill_backend: str = ""
    dsa_decode_backend: str = ""
    disaggregation_mode: str = "null"
    mamba_ssm_dtype: str = ""
    mamba_conv_dtype: str = ""
    disable_hybrid_swa_memory: bool = False
    enable_scattered_sconv: bool = False
    indexer_dtype: str = ""
    dsv4_attn_backend: str = ""
    dsv4_kv_layout: str = ""
    dsv4_compressed_kv_layout: str = ""
    dsv4_compress_state_dtype: str = ""
    enable_encoder_swa_bounded_replay: bool = False
    sglang: str = NEWEST_SGLANG
    resolved: bool = False
    launched: bool = False

    @property
    def page_tokens(self) -> int:
        """Tokens of a page. A page size that is not stated counts as --page-size 1."""
        return (self.page_size or 1) * self.dcp

    @property
    def least_looked_up(self) -> int:
        """Smallest number of tokens left to compute for which a server looks up pages in its store.

        SGLang leaves out the last of these tokens, then the tokens of an incomplete page. The rest
        must have at least `prefetch_threshold` tokens, and at least one page. Source: SGLang
        srt/mem_cache/unified_radix_cache.py :: prefetch_from_storage.
        """
        page = self.page_tokens
        return -(-max(self.prefetch_threshold, 1) // page) * page + 1


def normalised_layout(flags: DeploymentFlags) -> str:
    """Return the host memory layout that SGLang uses.

    Source: srt/arg_groups/hicache_hook.py :: resolve_layout_io_compatibility,
    resolve_storage_layout_compatibility. Raises ProfileError if the layout is unknown.
    """
    layout = flags.layout or release_of(flags.sglang).layout
    if layout not in LAYOUTS:
        raise ProfileError(not_one_of("layout", layout, LAYOUTS))
    if layout == "page_first" and flags.io_backend == "direct":
        return "page_first_direct"
    # Under DCP, Mooncake stores layer_first pages unchanged, through several buffers.
    if layout == "layer_first" and flags.storage_backend == "mooncake" and flags.dcp == 1:
        replacements = {"direct": "page_first_direct", "kernel": "page_first"}
        return replacements.get(flags.io_backend, layout)
    return layout


def stage_layers(text: str, where: str) -> tuple[int, ...]:
    """Parse the number of layers of each pipeline stage. Raises ProfileError."""
    try:
        return tuple(map(int, text.split(",", MAX_RANKS + 1))) if text else ()
    except ValueError:
        raise ProfileError(
            f"{where}: {text!r:.60} is not a list of layers per stage, such as 30,31"
        ) from None


def attention_dp(flags: DeploymentFlags) -> int:
    """Return the number of attention data-parallel groups in a TP group.

    Without --enable-dp-attention, --dp-size counts replicas, except under context parallelism
    (srt/arg_groups/model_override_base.py :: context_parallel_attn_dp_size).
    """
    return flags.dp if flags.enable_dp_attention or flags.cp > 1 else 1


def attention_tp(flags: DeploymentFlags) -> int:
    """Return the attention TP size (srt/runtime_context.py :: derive_attn_tp_size).

    Raises ProfileError if tp is not a multiple of attention dp x cp, or a size is out of bounds.
    """
    for name in ("tp", "dp", "cp", "pp", "dcp"):
        if getattr(flags, name) < 1:
            raise ProfileError(
                f"{name}: must be at least 1, but is {getattr(flags, name)}; check --{name}"
            )
    for problem in _beyond_belief(flags):
        raise ProfileError(problem)
    groups = attention_dp(flags) * flags.cp
    if flags.tp % groups:
        raise ProfileError(
            f"tp: {flags.tp} is not a multiple of attention dp {attention_dp(flags)} x cp "
            f"{flags.cp}; check --tp, --dp and --cp"
        )
    return flags.tp // groups


def _beyond_belief(flags: DeploymentFlags) -> Iterator[str]:
    for name, most in _BOUNDS.items():
        yield from above(name, getattr(flags, name) or 0, most)
    yield from too_many("pp_partition", "stages", len(flags.pp_partition), MAX_RANKS)
    yield from above("pp_partition", max(flags.pp_partition, default=0), MAX_LAYERS)


def canonical_algorithm(stated: str) -> str:
    """Return SGLang's name of a speculative algorithm; "" without one.

    Raises ProfileError if SGLang lacks the algorithm.
    """
    name = stated.upper()
    if name in ("", "NONE"):
        return ""
    if name == "NEXTN":
        return "EAGLE"
    if name not in _ALGORITHMS:
        known = (*_ALGORITHMS, "NEXTN")
        raise ProfileError(not_one_of("speculative_algorithm", stated, known))
    return name


def hash_unit(algorithm: str) -> str:
    """Return the unit of page hashes, token or bigram, under a speculative algorithm."""
    return "bigram" if algorithm in _BIGRAM_ALGORITHMS else "token"


# Flags that SGLang refuses beside HiCache with an L3 store, and pairs of flags that it refuses.


class RefusedFlags(NamedTuple):
    """A combination of flags that SGLang refuses.

    name: field of ServerArgs that messages name.
    why: the reason, for messages.
    """

    name: str
    why: str


def refused_flags(values: Mapping[str, Any]) -> RefusedFlags | None:
    """Return the first combination that SGLang refuses; None without one.

    values: fields of ServerArgs, left out if not stated.
    Raises ProfileError for an algorithm that SGLang lacks.
    """
    return next(_refused(values), None)


def _refused(values: Mapping[str, Any]) -> Iterator[RefusedFlags]:
    for name, why in _NEVER_BESIDE_HICACHE.items():
        if values.get(name):
            yield RefusedFlags(name, why)
    algorithm = canonical_algorithm(str(values.get("speculative_algorithm") or ""))
    staged, dcp = (int(values.get(name) or 1) > 1 for name in ("pp_size", "dcp_size"))
    role = values.get("disaggregation_mode")
    threshold = "disaggregation_decode_host_receive_threshold"
    on_mooncake = values.get("hicache_storage_backend") == "mooncake"
    if float(values.get(threshold) or 1) < 1 and on_mooncake and not dcp:
        why = "SGLang shares only a layer_first host pool, which Mooncake does not store"
        yield RefusedFlags(threshold, why)
    if values.get("hicache_host_memory_mode") == "buffer_only":
        # hicache_hook.py :: resolve_hicache_dcp_compatibility, validate_hicache_host_memory_mode
        for refused, flag in (
            (dcp, "--dcp-size above 1"),
            (role == "decode", "--disaggregation-mode decode"),
        ):
            if refused:
                why = f"SGLang refuses buffer_only with {flag}"
                yield RefusedFlags("hicache_host_memory_mode", why)
    if dcp and algorithm not in ("", "DSPARK"):  # resolve_hicache_dcp_compatibility
        why = "SGLang's HiCache supports --dcp-size above 1 only with DSPARK"
        yield RefusedFlags("speculative_algorithm", why)
    # kv_cache_hook.py, the checks of --enable-unified-memory
    if values.get("enable_unified_memory") and algorithm in ("EAGLE", "EAGLE3"):
        yield RefusedFlags("enable_unified_memory", f"{_REFUSED_BESIDE} and EAGLE or EAGLE3")
    # validation_hook.py :: check_pipeline_parallel_compat, when the engine starts
    plain_eagle = algorithm == "EAGLE" and not values.get("enable_multi_layer_eagle")
    allowed = role == "prefill" if algorithm == "DSPARK" else plain_eagle
    if staged and algorithm and not allowed:
        yield RefusedFlags("pp_size", _STAGED)


def check_flags(flags: DeploymentFlags, algorithm: str, *, multi_layer: bool = False) -> None:
    """Raise ProfileError for flags that SGLang refuses, except for the flags of a live server.

    algorithm: speculative algorithm after SGLang's overrides.
    multi_layer: whether the draft has a runner for each step.
    """
    refused = refused_flags(
        {
            "dcp_size": flags.dcp,
            "disaggregation_mode": flags.disaggregation_mode,
            "enable_multi_layer_eagle": multi_layer,
            "hicache_storage_backend": flags.storage_backend,
            "pp_size": flags.pp,
            "speculative_algorithm": algorithm,
        }
    )
    if refused and not flags.resolved:
        name = refused.name.removesuffix("_size")
        options = dict.fromkeys((name, "speculative_algorithm"))
        said = " and ".join(f"--{option.replace('_', '-')}" for option in options)
        raise ProfileError(f"{name}: {refused.why}; check {said}")
