"""Flags that SGLang refuses beside HiCache with an L3 store, or with each other.

Source: SGLang srt/arg_groups/; each row names the function.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from hicachectl.formats.errors import ProfileError
from hicachectl.formats.models.flags import DeploymentFlags, canonical_algorithm

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Values = Mapping[str, Any]

_REFUSED_BESIDE = "SGLang refuses it with --enable-hierarchical-cache"
_STAGED = (
    "SGLang supports pipeline parallelism only with EAGLE (non-multi-layer) speculative decoding"
)


class RefusedFlags(NamedTuple):
    """A combination of flags that SGLang refuses.

    name: field of ServerArgs that messages name.
    applies: whether fields of ServerArgs state the combination.
    why: the reason, for messages.
    """

    name: str
    applies: Callable[[Values], bool]
    why: str


def _given(name: str, why: str = _REFUSED_BESIDE) -> RefusedFlags:
    return RefusedFlags(name, lambda values: bool(values.get(name)), why)


def _several(values: Values, name: str) -> bool:
    return int(values.get(name) or 1) > 1


def _decodes(values: Values) -> bool:
    return values.get("disaggregation_mode") == "decode"


def _buffers(values: Values) -> bool:
    return values.get("hicache_host_memory_mode") == "buffer_only"


def _algorithm(values: Values) -> str:
    return canonical_algorithm(
        DeploymentFlags(speculative_algorithm=str(values.get("speculative_algorithm") or ""))
    )


def _is_staged_draft(values: Values) -> bool:
    algorithm = _algorithm(values)
    if algorithm == "DSPARK":
        allowed = values.get("disaggregation_mode") == "prefill"
    else:
        allowed = algorithm == "EAGLE" and not values.get("enable_multi_layer_eagle")
    return _several(values, "pp_size") and bool(algorithm) and not allowed


def _is_shared_host_pool(values: Values) -> bool:
    shared = float(values.get("disaggregation_decode_host_receive_threshold") or 1) < 1
    on_mooncake = values.get("hicache_storage_backend") == "mooncake"
    return shared and on_mooncake and not _several(values, "dcp_size")


REFUSED_FLAGS = (
    # dllm_hook.py :: handle_dllm_inference
    _given("dllm_algorithm", "SGLang disables HiCache for diffusion language models"),
    # kv_cache_hook.py :: handle_cache_compatibility
    _given("disable_radix_cache"),
    _given("enable_lmcache"),
    # mamba_hook.py :: handle_int8_mamba_checkpoint
    _given("enable_int8_mamba_checkpoint"),
    # kv_shard_hook.py
    _given("enable_kv_cache_sharding", "SGLang refuses it with --hicache-storage-backend"),
    # hicache_hook.py :: handle_hicache
    _given("enable_unified_cache_external_linker"),
    _given("encoder_only", "such a server has no KV cache"),
    _given("prefill_only_disable_kv_cache", "such a server has no KV cache"),
    RefusedFlags(
        "disaggregation_decode_host_receive_threshold",
        _is_shared_host_pool,
        "SGLang shares only a layer_first host pool, which Mooncake does not store",
    ),
    # hicache_hook.py :: resolve_hicache_dcp_compatibility
    RefusedFlags(
        "hicache_host_memory_mode",
        lambda values: _buffers(values) and _several(values, "dcp_size"),
        "SGLang refuses buffer_only with --dcp-size above 1",
    ),
    RefusedFlags(
        "speculative_algorithm",
        lambda values: _several(values, "dcp_size") and _algorithm(values) not in ("", "DSPARK"),
        "SGLang's HiCache supports --dcp-size above 1 only with DSPARK",
    ),
    # hicache_hook.py :: validate_hicache_host_memory_mode
    RefusedFlags(
        "hicache_host_memory_mode",
        lambda values: _buffers(values) and _decodes(values),
        "SGLang refuses buffer_only with --disaggregation-mode decode",
    ),
    # kv_cache_hook.py, the checks of --enable-unified-memory
    RefusedFlags(
        "enable_unified_memory",
        lambda values: (
            bool(values.get("enable_unified_memory")) and _algorithm(values) in ("EAGLE", "EAGLE3")
        ),
        "SGLang refuses it with --enable-hierarchical-cache and EAGLE or EAGLE3",
    ),
    # validation_hook.py :: check_pipeline_parallel_compat, when the engine starts
    RefusedFlags("pp_size", _is_staged_draft, _STAGED),
)


def refused_flags(values: Values) -> RefusedFlags | None:
    """Return the first combination that SGLang refuses; None without one.

    values: fields of ServerArgs, left out if not stated. Raises ProfileError for an algorithm that
    SGLang lacks.
    """
    return next((row for row in REFUSED_FLAGS if row.applies(values)), None)


def check_flags(flags: DeploymentFlags, algorithm: str, *, multi_layer: bool = False) -> None:
    """Raise ProfileError for flags that SGLang refuses. A live server's are not refused.

    algorithm: SGLang's, after its overrides. multi_layer: whether the draft has a runner for each
    step.
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
