"""The draft side of model_pools.py: runners, plan and host pools, all of SGLang's own.

Runs inside the SGLang environment. A runner is what `model_pools.allocated` returns.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.conformance import model_pools
else:
    import __main__ as model_pools


def runners(server_args: Any, target: Any, step: list[str]) -> tuple[Any, ...]:
    """Return the draft's runners as the speculative workers build them; none without a draft."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.runtime_context import get_spec
    from sglang.srt.speculative.draft_worker_common import resolve_draft_worker_attention_backend

    algorithm, spec = target.spec_algorithm, get_spec()
    if algorithm.is_none() or algorithm.is_ngram() or algorithm.is_uno():
        return ()
    # TpModelWorker._init_model_config
    config = ModelConfig.from_server_args(
        server_args,
        model_path=spec.speculative_draft_model_path,
        is_draft_model=True,
        context_length=target.model_config.context_len,
    )
    many = algorithm.is_eagle() and spec.enable_multi_layer_eagle
    depths = range(spec.speculative_num_steps) if many else (None,)
    backend = resolve_draft_worker_attention_backend() if algorithm.is_dflash_family() else None
    return tuple(
        model_pools.allocated(
            server_args,
            config,
            _stand_in(config),
            step,
            target=target,
            depth=depth,
            draft_backend=backend,
        )
        for depth in depths
    )


def plan(target: Any, drafts: tuple[Any, ...]) -> Any:
    """Return the draft plan, and note packed drafts in the target's runner."""
    from sglang.srt.speculative.base_spec_worker import BaseSpecWorker, HiCacheDraftPlan

    if not drafts:
        return HiCacheDraftPlan()
    worker = SimpleNamespace(draft_runners=drafts, model_runner=drafts[0])
    stub = SimpleNamespace(
        target_worker=SimpleNamespace(model_runner=target),
        draft_worker=worker,
    )
    stub._draft_model_runners = lambda: BaseSpecWorker._draft_model_runners(stub)
    return BaseSpecWorker._build_hicache_draft_plan(stub)


def sidecars(plan: Any) -> tuple[Any, ...]:
    """Return the draft's device pools that get host pools of their own (build_kv_cache)."""
    from sglang.srt.speculative.base_spec_worker import HiCacheDraftMode

    return tuple(plan.device_pools) if plan.mode == HiCacheDraftMode.SIDECAR else ()


def host_pools(target: Any, plan: Any, result: Any, transfers: int) -> tuple[list[Any], list[Any]]:
    """Return the sidecar specs and entries of the draft (maybe_register_hicache_draft).

    transfers: the target's number of layers to transfer.
    """
    from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import (
        build_hicache_draft_sidecars,
    )

    if not sidecars(plan):
        return [], []
    controller = SimpleNamespace(
        mem_pool_host=result.host_pool_group,
        page_size=target.page_size,
        transfer_layer_id_max=transfers,
    )
    specs, entries = build_hicache_draft_sidecars(
        draft_device_pools=plan.device_pools,
        tree_cache=SimpleNamespace(cache_controller=controller),
    )
    return list(specs), list(entries)


def _stand_in(config: Any) -> Any:
    """Return what SGLang asks of a draft before it allocates."""
    from sglang.srt.models.registry import ModelRegistry

    model_class = ModelRegistry.models.get(config.hf_config.architectures[0])
    depth = getattr(model_class, "mtp_layer_id_is_depth", False)
    return SimpleNamespace(mtp_layer_id_is_depth=depth)
