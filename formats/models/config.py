"""Build a profile from a Hugging Face config and a server's flags."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hicachectl.formats.errors import ProfileError
from hicachectl.formats.kinds import kind_of
from hicachectl.formats.kinds.pool import pool_name
from hicachectl.formats.models.architectures import family_of
from hicachectl.formats.models.drafts import Target, algorithm_of, with_draft
from hicachectl.formats.models.dtypes import forced_dtype
from hicachectl.formats.models.families.attention import dsa_page_size, is_dsa
from hicachectl.formats.models.families.base import Context
from hicachectl.formats.models.flags import (
    DeploymentFlags,
    attention_tp,
    check_flags,
    hash_unit,
    normalised_layout,
)
from hicachectl.formats.models.hf_config import HfConfig, open_config
from hicachectl.formats.models.recorded import architecture
from hicachectl.formats.profile import Profile, validate_profile

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hicachectl.formats.kinds.pool import Pool
    from hicachectl.formats.models.families.base import Family


def profile_from_config(
    config: Mapping[str, Any], flags: DeploymentFlags, *, source: str = "config.json"
) -> Profile:
    """Derive the profile of a deployment.

    source: names the config in messages.
    Raises ProfileError in these cases:
    - The architecture is unknown.
    - The config lacks a field.
    - The flags contradict each other or the model.
    - The result depends on a fact, such as the GPU, that neither config nor flags state.
    """
    model = open_config(config, source=source)
    family = family_of(model)
    if family.draft_only:
        raise model.error("architectures", "this is a draft model", "give the target's config")
    flags = forced_dtype(model, flags)
    tp = attention_tp(flags)
    layout = normalised_layout(flags)
    algorithm = algorithm_of(flags)
    check_flags(flags, algorithm)
    page_size = _page_size(model, family, flags) * flags.dcp
    pools = family.pools(model, Context(flags, page_size))
    _check_stages(model, flags.pp)
    _check_parallelism(model, flags, pools)
    _check_layout(model, layout, pools)
    profile = Profile(
        model=_served_name(model, flags),
        sglang=flags.sglang,
        page_size=page_size,
        layout=layout,
        tp=tp,
        pp=flags.pp,
        pp_partition=_pp_partition(model, flags),
        cp=flags.cp,
        cp_layer_split=flags.enable_dsa_cache_layer_split and flags.cp > 1 and is_dsa(model),
        dcp=flags.dcp,
        tp_lcm_size=_split_heads(flags, tp, layout, pools),
        tag=flags.tag,
        hash_unit=hash_unit(algorithm),
        speculative_algorithm=algorithm,
        prefetch_threshold=flags.prefetch_threshold,
        pools=with_draft(Target(model, flags, page_size, pools), algorithm),
    )
    problems = validate_profile(profile)
    if problems:
        raise ProfileError(f"{source}: " + "; ".join(problems))
    return profile


def _served_name(model: HfConfig, flags: DeploymentFlags) -> str:
    name = flags.model or model.outer.get("_name_or_path")
    if not isinstance(name, str) or not name:
        raise ProfileError(
            f"model: missing in the flags and in {model.source}; give the served model name "
            "(--served-model-name)"
        )
    return name


def _page_size(model: HfConfig, family: Family, flags: DeploymentFlags) -> int:
    """Return --page-size after SGLang's overrides, in tokens."""
    if flags.page_size is not None and flags.page_size < 1:
        raise ProfileError(
            f"page_size: must be at least 1, but is {flags.page_size}; check --page-size"
        )
    if flags.resolved and flags.page_size is not None:
        return flags.page_size
    forced = (family.page_size or dsa_page_size)(model)
    if not forced:
        if flags.page_size is None:
            raise ProfileError(
                "page_size: missing, and SGLang's default depends on the GPU and the attention "
                "backend; give the server's page size (--page-size)"
            )
        return flags.page_size
    if flags.page_size not in (None, forced) and not flags.launched:
        raise ProfileError(
            f"page_size: is {flags.page_size}, but on CUDA SGLang always sets {forced} for this "
            "model; leave out --page-size, or write a profile file for another platform"
        )
    return forced


def _check_stages(config: HfConfig, stages: int) -> None:
    """Refuse several stages if SGLang does, or if a stage's pools are not those of its own layers.

    Source: SGLang srt/model_executor/model_runner.py :: ModelRunner.support_pp and
    model_runner_components/layer_setup.py :: _resolve_pp_layer_range.
    """
    if stages == 1:
        return
    if config.architecture == _LOOPED and config.optional_integer("num_loops") > 1:
        raise config.error(
            "pp", "a stage of this model numbers the layers of its later passes beyond the layers "
            "of its pool"
        )  # fmt: skip
    divided = architecture(config.architecture).stages
    if divided == "undivided":
        raise config.error(
            "pp", "SGLang gives every stage of this model pools of all layers, most of them "
            "unused; a profile cannot describe that"
        )  # fmt: skip
    words = _STAGE_REFUSALS.get(config.architecture, "" if divided else _NO_STAGES)
    if words:
        raise config.error("pp", f"SGLang refuses: {words!r}")


_NO_STAGES = "Pipeline Parallel is not compatible with this model."  # ModelRunner
# srt/arg_groups/model_hook.py
_STAGE_REFUSALS = {
    "InternS2MobiusForConditionalGeneration": "Intern-S2-Mobius does not support: pipeline "
    "parallelism (--pp-size must be 1).",
}
_LOOPED = "NanbeigeForCausalLM"  # nanbeige.py :: NanbeigeModel.forward, logical_id


def _check_parallelism(model: HfConfig, flags: DeploymentFlags, pools: tuple[Pool, ...]) -> None:
    """Refuse flags that SGLang refuses, or whose keys a profile cannot describe."""
    names = [pool.name for pool in pools]
    latent = kind_of(pools[0]).shards is False
    if flags.dcp > 1 and (not latent or "indexer" in names):
        # resolve_hicache_dcp_compatibility, _dsa_dcp_overrides
        raise model.error(
            "dcp", "SGLang's HiCache supports dcp only for MLA models without an indexer pool"
        )
    has_dp = flags.enable_dp_attention and flags.dp > 1
    if (
        flags.cp > 1
        and not has_dp
        and (not latent or any(pool_name(name).states for name in names))
    ):
        # CacheController._generate_storage_config uses the full TP rank, not the attention TP rank
        raise model.error(
            "cp",
            "not supported without DP attention, because keys name the full TP size, but heads "
            "are split by the attention TP size",
        )


def _check_layout(model: HfConfig, layout: str, pools: tuple[Pool, ...]) -> None:
    """Refuse layouts that a host pool of the model cannot have."""
    built = [kind_of(pool).layouts(pool) for pool in pools]
    if any(layout not in layouts for layouts in built):
        known = [one for one in built[0] if all(one in layouts for layouts in built)]
        raise model.error(
            "layout",
            f"SGLang does not build {layout} for this model",
            f"use {' or '.join(known)}",
        )


def _pp_partition(model: HfConfig, flags: DeploymentFlags) -> tuple[int, ...]:
    layers = model.integer("num_hidden_layers")
    if flags.pp == 1:  # get_pp_indices then ignores the partition
        return ()
    if flags.pp > layers:
        raise ProfileError(f"pp: {layers} layers cannot fill {flags.pp} stages; give a smaller pp")
    if flags.pp_partition and sum(flags.pp_partition) != layers:
        raise ProfileError(
            f"pp_partition: {list(flags.pp_partition)} sums to {sum(flags.pp_partition)}, but the "
            f"model has {layers} layers; check --pp-partition"
        )
    return flags.pp_partition


def _split_heads(flags: DeploymentFlags, tp: int, layout: str, pools: tuple[Pool, ...]) -> int:
    """Return tp_lcm_size; 0 if it has no effect (CacheController._generate_storage_config)."""
    if flags.tp_lcm_size % tp:
        raise ProfileError(
            f"tp_lcm_size: {flags.tp_lcm_size} is not a multiple of tp {tp}; check --tp-lcm-size"
        )
    splits = layout == "page_head" and flags.tp_lcm_size > tp and kind_of(pools[0]).shards
    return flags.tp_lcm_size if splits else 0
