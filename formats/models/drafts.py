"""Derive what speculative drafts store. A draft has layers in the target's pools, or its own pools.

Source: SGLang srt/speculative/base_spec_worker.py :: BaseSpecWorker._build_hicache_draft_plan. The
FUSED drafts of SGLang exist only without a storage backend (validate_fused_hicache_draft).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec.structs import replace

from hicachectl.formats.errors import ProfileError
from hicachectl.formats.kinds.pool import pool_name
from hicachectl.formats.models.architectures import family_of
from hicachectl.formats.models.families.base import NEXTN, Context, Family
from hicachectl.formats.models.flags import DeploymentFlags, canonical_algorithm, check_flags
from hicachectl.formats.models.hf_config import HfConfig, open_config
from hicachectl.formats.models.recorded import architecture
from hicachectl.formats.pools import pp_ranges
from hicachectl.formats.releases import release_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hicachectl.formats.kinds.pool import Pool

# Algorithms without a draft model or draft KV (BaseSpecWorker._draft_model_runners).
_DRAFTLESS_ALGORITHMS = ("", "NGRAM", "FROZEN_KV_MTP", "UNO")
_DFLASH_FAMILY = ("DFLASH", "DSPARK")
_V4 = "DeepseekV4ForCausalLM"
_ALGORITHMS_OF = {
    _V4: ("EAGLE", "DSPARK"),  # deepseek_v4_hook.py
    "IQuestQ1ForCausalLM": ("EAGLE",),  # model_overrides/iquest_q1.py
}
DSPARK_V4 = "DeepseekV4ForCausalLMDSpark"
_INKLING, _INKLING_MTP = "InklingForConditionalGeneration", "InklingForConditionalGenerationMTP"
# Targets that have only one possible draft (_handle_iquest_q1_mtp_draft).
_ONLY_DRAFTS = {"IQuestQ1ForCausalLM": "IQuestQ1MTP"}
# arg_groups/model_overrides/mimo_v2.py, gigachat35.py, overrides.py :: _step3p_overrides
_MULTI_LAYER_TARGETS = frozenset(
    {
        "GigaChat35ForCausalLM",
        "MiMoV2FlashForCausalLM",
        "MiMoV2ForCausalLM",
        "Step3p5ForCausalLM",
        "Step3p7ForConditionalGeneration",
    }
)
_ROW_FIELDS = ("kind", "kv_heads", "head_dim", "v_head_dim", "kv_lora_rank", "qk_rope_head_dim",
               "row", "dtype", "index_head_dim", "conv")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Target:
    """The model that a draft serves.

    page_size: tokens per page hash.
    pools: pools of the model without the draft.
    """

    model: HfConfig
    flags: DeploymentFlags
    page_size: int
    pools: tuple[Pool, ...]


def algorithm_of(flags: DeploymentFlags) -> str:
    """Return SGLang's speculative algorithm after its overrides; "" without one.

    EAGLE becomes FROZEN_KV_MTP for a draft that reads the target's KV
    (arg_groups/speculative_hook.py :: _resolve_speculative_algorithm_alias). Raises ProfileError.
    """
    algorithm = canonical_algorithm(flags.speculative_algorithm)
    if algorithm in _DRAFTLESS_ALGORITHMS or flags.draft_model_config is None:
        return algorithm
    draft = _as_draft(open_config(flags.draft_model_config, source="draft config"), algorithm)
    if not family_of(draft).frozen_kv:
        return algorithm
    if algorithm != "EAGLE":
        raise draft.error("architectures", f"SGLang serves this draft with EAGLE, not {algorithm}")
    return "FROZEN_KV_MTP"


def with_draft(target: Target, algorithm: str) -> tuple[Pool, ...]:
    """Return the target's pools with the layers or pools of its draft. Raises ProfileError.

    Releases that do not pack drafts store at most the KV of a draft's first runner, as a pool. They
    store neither its index keys nor any KV of a draft with windows (kv_cache_builder.py ::
    maybe_register_hicache_draft of SGLang 0.5.17).
    """
    if algorithm in _DRAFTLESS_ALGORITHMS:
        return target.pools
    if algorithm not in _ALGORITHMS_OF.get(target.model.architecture, (algorithm,)):
        raise target.model.error(
            "speculative_algorithm", f"SGLang does not support {algorithm} for this model"
        )
    multi_layer = _is_multi_layer(target, algorithm)
    check_flags(target.flags, algorithm, multi_layer=multi_layer)
    draft = _draft_config(target, algorithm)
    family = family_of(draft)
    _check_dtype(draft, target.flags, algorithm)
    if multi_layer and draft.architecture == _INKLING_MTP:
        _steps(target.flags)
    rows = {
        pool.name: pool
        for pool in family.pools(draft, Context(target.flags, target.page_size, draft=True))
    }
    release = release_of(target.flags.sglang)
    if not release.packed_drafts:
        stored = release.draft and "kv" in rows and "swa" not in rows
        layers = 1 if multi_layer or not stored else _runner_layers(draft, family, rows)
        old = (replace(rows["kv"], name="draft", layers=layers),) if stored else ()
        return (*target.pools, *old)
    if draft.architecture == _INKLING_MTP:
        return _counted(target, draft, rows)
    if any(pool_name(name).states for name in rows):
        raise draft.error("architectures", "drafts with recurrent states are not supported")
    if draft.architecture == DSPARK_V4:  # _can_pack_hicache_mtp
        _check_same_rows(target, draft, rows)
        return _packed(target, dict.fromkeys(rows, _runner_layers(draft, family, rows)))
    if algorithm == "EAGLE" and draft.optional_integer(NEXTN):
        _check_one_layer(draft, family, rows)
        _check_same_rows(target, draft, rows)
        return _packed(target, dict.fromkeys(rows, _steps(target.flags) if multi_layer else 1))
    return (*target.pools, *_sidecars(target, draft, family, rows))


def _draft_config(target: Target, algorithm: str) -> HfConfig:
    """Return the draft's config as SGLang changes it (ModelConfig._config_draft_model)."""
    only = _ONLY_DRAFTS.get(target.model.architecture)
    if target.flags.draft_model_config is not None:
        draft = _as_draft(
            open_config(target.flags.draft_model_config, source="draft config"), algorithm
        )
        if only not in (None, draft.architecture):
            raise draft.error("architectures", f"SGLang serves this target only with {only}")
        return draft
    draft = _as_draft(target.model, algorithm)
    if algorithm == "DSPARK" and draft.architecture == DSPARK_V4:  # _handle_dspark
        return draft
    if algorithm == "EAGLE" and draft.architecture != target.model.architecture:
        if NEXTN in family_of(draft).stated:
            draft.required(NEXTN)
        if draft.optional_integer(NEXTN):
            return draft
    raise ProfileError(
        f"draft_model_config: missing; {algorithm} needs a draft model, which "
        f"{target.model.source} does not describe; give --draft-model-config"
    )


def _as_draft(config: HfConfig, algorithm: str) -> HfConfig:
    """Return a config as SGLang changes it for a draft (ModelConfig._config_draft_model)."""
    known = architecture(config.architecture)
    name, nextn = known.draft, known.nextn
    if config.architecture == _V4 and algorithm == "DSPARK" and _has_dspark(config):
        name, nextn = DSPARK_V4, None
    if not name:
        return config
    fields = {} if nextn is None else {NEXTN: nextn}
    return HfConfig(name, config.outer, {**config.text, **fields}, config.source)


def _has_dspark(config: HfConfig) -> bool:
    """Return whether a checkpoint has a DSpark draft (checkpoint_bundles_dspark_draft)."""
    names = ("block_size", "markov_rank", "noise_token_id", "target_layer_ids")
    return any(config.text.get(f"dspark_{name}") is not None for name in names)


def _is_multi_layer(target: Target, algorithm: str) -> bool:
    """Return whether the draft has a runner of one layer for each speculative step."""
    flags = target.flags
    forced = target.model.architecture in _MULTI_LAYER_TARGETS and not flags.resolved
    return algorithm == "EAGLE" and (flags.enable_multi_layer_eagle or forced)


def _check_dtype(draft: HfConfig, flags: DeploymentFlags, algorithm: str) -> None:
    """Refuse drafts whose dtype depends on the attention backend (configure_kv_cache_dtype)."""
    stated = flags.speculative_draft_kv_cache_dtype or flags.kv_cache_dtype
    if algorithm in _DFLASH_FAMILY and stated.startswith("fp8"):
        raise draft.error(
            "kv_cache_dtype",
            f"for a {algorithm} draft, the meaning of {stated} depends on the draft's attention "
            "backend: with fa4, it means the model's dtype",
            "write a profile file",
        )


def _steps(flags: DeploymentFlags) -> int:
    if flags.speculative_num_steps < 1:
        raise ProfileError(
            "speculative_num_steps: missing or 0; the draft of this model has one layer for each "
            "step; give --speculative-num-steps"
        )
    return flags.speculative_num_steps


def _runner_layers(draft: HfConfig, family: Family, rows: dict[str, Pool]) -> int:
    """Return the number of layers of a draft's runner.

    If neither family nor config states the number, count the layers of the pool kv, or of swa if kv
    is missing.
    Source: layer_setup.py :: _compute_model_num_layers, _resolve_pp_layer_range.
    """
    if family.draft_layers:
        return family.draft_layers(draft)
    states = architecture(draft.architecture).stages == "divided"
    own = 0 if states else draft.optional_integer(NEXTN)
    return own or len(rows["kv" if "kv" in rows else "swa"].layer_numbers)


def _check_one_layer(draft: HfConfig, family: Family, rows: dict[str, Pool]) -> None:
    layers = _runner_layers(draft, family, rows)
    if layers != 1:
        raise draft.error(
            NEXTN if layers == draft.optional_integer(NEXTN) else "num_hidden_layers",
            f"a draft of {layers} layers cannot be packed, as SGLang packs drafts of one layer",
        )


def _check_same_rows(target: Target, draft: HfConfig, rows: dict[str, Pool]) -> None:
    """Refuse drafts that SGLang cannot append to the target's objects."""
    ours = {pool.name: pool for pool in target.pools}
    # host_pool_config.py :: _validate_packed_draft_pools, build_hybrid_swa_stack
    for name in ("indexer", "swa"):
        if (name in ours) != (name in rows):
            here, there = ("target", "draft") if name in ours else ("draft", "target")
            raise draft.error(
                "speculative_algorithm",
                f"the {here} has a {name} pool, but the {there} has none, and SGLang packs drafts "
                "of the same pools",
            )
    _check_rows(ours, draft, rows)


def _check_rows(ours: Mapping[str, Pool], draft: HfConfig, rows: Mapping[str, Pool]) -> None:
    for name, pool in rows.items():
        for field in _ROW_FIELDS:
            target_value, value = getattr(ours[name], field), getattr(pool, field)
            if target_value != value:  # check_packed_kv_rows, MambaPoolHost
                raise draft.error(
                    field,
                    f"{_shown(value)} differs from the target's {_shown(target_value)}, and packed "
                    "rows must be equal",
                )


def _shown(value: object) -> str:
    """Return a field's value for a message. States are shown by their shapes."""
    return repr([list(state.shape) for state in value] if isinstance(value, tuple) else value)


def _counted(target: Target, draft: HfConfig, rows: dict[str, Pool]) -> tuple[Pool, ...]:
    """Append a draft with a number of layers for each pool (build_hybrid_mamba_swa_stack).

    A pool that the target lacks becomes the draft's own pool.
    """
    if target.model.architecture != _INKLING:
        raise draft.error("architectures", f"hicachectl knows this draft only for {_INKLING}")
    ours = {pool.name: pool for pool in target.pools}
    behind = {name: pool for name, pool in rows.items() if name in ours}
    _check_rows(ours, draft, behind)
    layers = {name: len(pool.layer_numbers) for name, pool in behind.items()}
    *packed, states = _packed(target, layers)
    own = (pool for name, pool in rows.items() if name not in ours)
    return (*packed, *own, states)


def _packed(target: Target, layers: Mapping[str, int]) -> tuple[Pool, ...]:
    """Append the draft's layers to the target's objects.

    layers: number of the draft's layers in each pool.

    A pool that `layers` lacks gets no layers. An MTP layer with full attention adds no states,
    because it shares the target's state pool (KVCacheConfigurator._build_hybrid_linear_kv_pool).
    """
    return tuple(
        replace(pool, packed_draft_layers=layers.get(pool.name, 0)) for pool in target.pools
    )


def _sidecars(
    target: Target, draft: HfConfig, family: Family, rows: dict[str, Pool]
) -> tuple[Pool, ...]:
    """Return the draft's own pools (build_hicache_draft_sidecars).

    If a draft has a runner for each step, only the first runner's pools are stored.
    """
    if not rows:
        return ()
    if "swa" in rows:  # SGLang stores only the window layers of such a draft
        return (_window_sidecar(target, draft, rows["swa"]),)
    kv = rows["kv"]
    layers = _runner_layers(draft, family, rows)
    most = _last_stage_layers(target)
    if layers > most:
        raise draft.error(
            "num_hidden_layers",
            f"a draft of {layers} layers has no sidecar, as SGLang's HiCache allows at most the "
            f"{most} layers of the target's last stage",
        )
    pools = [replace(kv, name="draft", layers=layers)]
    if "indexer" in rows:
        pools.append(replace(rows["indexer"], name="draft_indexer", layers=layers))
    return tuple(pools)


def _window_sidecar(target: Target, draft: HfConfig, window: Pool) -> Pool:
    ours = next((pool for pool in target.pools if pool.name == "swa"), None)
    if ours is None:
        raise draft.error(
            "architectures",
            "a draft with window layers needs a target with a swa pool, as SGLang's HiCache "
            "stores them beside the target's",
        )
    layers = len(window.layer_numbers)
    return replace(window, name="draft_swa", layers=layers, trailing_pages=ours.trailing_pages)


def _last_stage_layers(target: Target) -> int:
    flags, layers = target.flags, target.model.integer("num_hidden_layers")
    start, end = pp_ranges(layers, flags.pp, flags.pp_partition)[-1]
    return end - start
