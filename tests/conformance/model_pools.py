"""Tell what SGLang allocates and stores for models, from their configs, without building a model.

Runs inside the SGLang environment: `model_pools.py REQUEST`. The request is a JSON object of models
by name: config (a config.json), draft (the config.json of a draft with a checkpoint of its own),
flags (fields of ServerArgs; page_size is 64 unless given), env (environment variables) and gpu
("hopper" unless given, or "blackwell").

Prints a JSON object of `classes`, the architectures that SGLang registers, and `answers`. An answer
lists the rows of one model, one for each of RANKS and pipeline stage, for the first rank of the TP
group: tp, pp, stage, page_size, dtype (of KV), staged (whether the model's class divides its layers
into stages) and pools: name, host (class), layers (model layer numbers), packed (layers of drafts
behind them, absent if 0), nbytes (of the object that the file backend writes), policy ("all_pages"
or "trailing_pages"), trailing (pages) and states (shape and dtype). Where SGLang refuses: refusal
(its words) and where (its step).

Everything is SGLang's own: ServerArgs, ModelConfig, KVCacheConfigurator and the stack strategies,
on the meta device, with the answers of a Hopper or Blackwell GPU wherever SGLang asks the platform.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import inspect
import json
import logging
import os
import sys
import tempfile
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tests.conformance import draft_pools, sglang_env
else:
    import draft_pools
    import sglang_env

RANKS = ((1, 1), (2, 1), (4, 1), (1, 2))  # TP and PP sizes
_PAGES = 4
_SLOTS = 4  # of states
_MOST_LAYERS = 1024
_CUDA = {"is_cuda": True, "has_flashinfer": True, "has_amx": False}
_GPUS = {
    "hopper": {
        **_CUDA,
        "is_sm90": True,
        "is_hopper_with_cuda_12_3": True,
        "device_sm": 90,
        "device_capability": (9, 0),
    },
    "blackwell": {
        **_CUDA,
        "is_sm100": True,
        "is_blackwell": True,
        "device_sm": 100,
        "device_capability": (10, 0),
    },
}


def main() -> None:
    """Answer the request that the command line names."""
    parser = argparse.ArgumentParser(description="Describe the pools of models.")
    parser.add_argument("request", type=Path)
    request = json.loads(parser.parse_args().request.read_text())
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    with contextlib.redirect_stdout(sys.stderr), _without_a_gpu():
        answers = {name: list(_rows(model)) for name, model in request.items()}
        classes = _classes()
    print(json.dumps({"classes": classes, "answers": answers}))


@contextlib.contextmanager
def _without_a_gpu() -> Iterator[None]:
    """Take SGLang to CUDA, and allocate nothing."""
    from sglang.srt import platforms
    from sglang.srt.layers.quantization import QUANTIZATION_METHODS
    from sglang.srt.layers.quantization.mxfp4 import Mxfp4Config
    from sglang.srt.mem_cache import memory_pool
    from sglang.srt.mem_cache.hybrid_cache import hybrid_pool_assembler
    from sglang.srt.mem_cache.pool_host import base, common
    from sglang.srt.platforms.cuda import CudaSRTPlatform

    def allocate(_self: Any, dims: Any, dtype: torch.dtype, device: str) -> torch.Tensor:
        del device
        return torch.empty(dims, dtype=dtype, device="meta")

    module = torch.get_device_module
    replaced = (
        mock.patch.object(platforms, "_current_platform", CudaSRTPlatform()),
        mock.patch.object(common.HostTensorAllocator, "allocate", allocate),
        mock.patch.object(common, "_cuda_host_register", mock.Mock(), create=True),
        mock.patch.object(base, "host_memory_budget_bytes", mock.Mock(return_value=1 << 60)),
        mock.patch.object(
            torch, "get_device_module", lambda d=None: module("cpu" if str(d) == "meta" else d)
        ),
        mock.patch.object(hybrid_pool_assembler, "HybridCacheController", mock.MagicMock()),
        mock.patch.object(memory_pool.MHATokenToKVPool, "_init_kv_copy_and_warmup", mock.Mock()),
        mock.patch.dict(QUANTIZATION_METHODS, mxfp4=Mxfp4Config),  # registered on CUDA
        mock.patch.object(torch.cuda, "get_device_name", mock.Mock(return_value="NVIDIA")),
    )
    with contextlib.ExitStack() as stack:
        for patch in replaced:
            stack.enter_context(patch)
        yield


@contextlib.contextmanager
def _on_a_gpu(name: str, variables: Mapping[str, str]) -> Iterator[None]:
    """Answer SGLang's questions as a GPU does, in a server with these environment variables."""
    from sglang.srt.mem_cache import deepseek_v4_memory_pool as compressed
    from sglang.srt.runtime_context import override_platform
    from sglang.srt.utils import common

    capability = _GPUS[name]["device_capability"]
    asked = mock.Mock(return_value=capability)
    cuda = SimpleNamespace(is_available=lambda: True, get_device_capability=asked)
    present = {**vars(torch), "cuda": cuda, "version": SimpleNamespace(cuda="12.9")}
    sm100 = mock.Mock(return_value=name == "blackwell")
    with (
        mock.patch.object(torch.cuda, "get_device_capability", asked),
        mock.patch.object(compressed, "torch", SimpleNamespace(**present)),
        mock.patch.object(common, "is_sm100_supported", sm100),
        mock.patch.dict(os.environ, variables),
        override_platform(**_GPUS[name]),
    ):
        yield


def _rows(model: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    flags = {"page_size": 64, **model.get("flags", {})}
    on_a_gpu = _on_a_gpu(model.get("gpu", "hopper"), model.get("env", {}))
    with tempfile.TemporaryDirectory() as folder, on_a_gpu:
        _write_config(Path(folder) / "target", model["config"])
        if "draft" in model:
            _write_config(Path(folder) / "draft", model["draft"])
            flags["speculative_draft_model_path"] = f"{folder}/draft"
        for tp, pp in RANKS:
            staged = pp == 1 or _has_stages(model["config"]["architectures"][0])
            for stage in range(pp if staged else 0):
                row = {"tp": tp, "pp": pp, "stage": stage}
                yield {**row, **_answer(folder, flags, (tp, pp, stage))}


def _write_config(folder: Path, config: Mapping[str, Any]) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))


def _answer(folder: str, flags: Mapping[str, Any], place: tuple[int, int, int]) -> dict[str, Any]:
    step = ["arguments"]
    try:
        return _described(f"{folder}/target", flags, place, step)
    except Exception as error:  # what SGLang raises is the answer
        words = f"{type(error).__name__}: {error}".replace(folder, "MODEL").splitlines()[0]
        return {"refusal": words[:300], "where": step[0]}


def _described(
    folder: str, flags: Mapping[str, Any], place: tuple[int, int, int], step: list[str]
) -> dict[str, Any]:
    from sglang.srt.arg_groups.overrides import resolved_view
    from sglang.srt.arg_groups.validation_hook import check_pipeline_parallel_compat
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.environ import envs
    from sglang.srt.runtime_context import publish
    from sglang.srt.server_args import ServerArgs

    tp, pp, stage = place
    speculative = "speculative_algorithm" in flags
    with envs.SGLANG_ENABLE_PP_SPEC.override(speculative and pp > 1):
        server_args = ServerArgs(
            model_path=folder,
            device="cuda",
            tp_size=tp,
            pp_size=pp,
            enable_hierarchical_cache=True,
            hicache_storage_backend="file",
            max_mamba_cache_size=_SLOTS,
            max_running_requests=2,
            **flags,
        )
        server_args.resolve_once()
        if speculative and pp > 1:
            check_pipeline_parallel_compat(resolved_view(server_args))
    publish(server_args, role="scheduler")
    step[0] = "config"
    config = ModelConfig.from_server_args(server_args)
    with _rank(tp, pp, stage):
        runner = allocated(server_args, config, _stand_in(config, pp, stage), step)
        step[0] = "draft"
        # The draft is on the last stage (Scheduler.maybe_init_draft_worker).
        drafts = draft_pools.runners(server_args, runner, step) if stage == pp - 1 else ()
        plan = draft_pools.plan(runner, drafts)
        step[0] = "host"
        return {
            "page_size": runner.page_size,
            "dtype": str(runner.kv_cache_dtype).removeprefix("torch."),
            "pools": _host_pools(runner, plan),
        }


def allocated(
    server_args: Any,
    config: Any,
    model: Any,
    step: list[str],
    *,
    target: Any = None,
    depth: int | None = None,
    draft_backend: str | None = None,
) -> Any:
    """Return a configurator and the pools that it allocates, as ModelRunner has them.

    target: of a draft, the target's runner. depth: of a draft with a runner for each step.
    draft_backend: the attention backend that a worker names for its draft.
    """
    from sglang.srt.configs.model_config import AttentionArch
    from sglang.srt.mem_cache import kv_cache_dtype
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
    from sglang.srt.model_executor.model_runner_components.layer_setup import resolve_layer_indices
    from sglang.srt.model_executor.model_runner_components.load_model_utils import (
        resolve_sliding_window_size,
    )
    from sglang.srt.model_executor.pool_configurator import MemoryPoolConfig
    from sglang.srt.runtime_context import get_model, get_parallel, get_schedule, get_spec
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    draft = target is not None
    algorithm = SpeculativeAlgorithm.from_string(get_spec().speculative_algorithm)
    info = resolve_layer_indices(
        model=model, model_config=config, is_draft_worker=draft, draft_model_idx=depth
    )
    window = resolve_sliding_window_size(model, config)
    name, dtype = kv_cache_dtype.configure_kv_cache_dtype(
        server_args_kv_cache_dtype=get_model().kv_cache_dtype,
        model=model,
        model_dtype=config.dtype,
        is_draft_worker=draft,
        is_dflash=algorithm.is_dflash_family(),
        speculative_draft_attention_backend=draft_backend,
        speculative_draft_kv_cache_dtype=get_spec().speculative_draft_kv_cache_dtype,
    )
    page_size = get_schedule().page_size
    tokens = _PAGES * page_size
    step[0] = "draft pools" if draft else "pools"
    configurator = KVCacheConfigurator(
        device="meta",
        gpu_id=0,
        attn_dp_size=1,
        pp_size=1 if draft else get_parallel().pp_size,
        pp_group=None,
        model=model,
        model_config=config,
        server_args=server_args,
        kv_cache_dtype=dtype,
        kv_cache_dtype_str=name or get_model().kv_cache_dtype,
        model_dtype=config.dtype,
        page_size=page_size,
        sliding_window_size=window,
        spec_algorithm=algorithm,
        is_draft_worker=draft,
        post_capture_kv_active=False,
        spec_aux_config=SimpleNamespace(draft_model_config=None, dflash_draft_num_layers=None),
        is_hybrid_swa=config.is_hybrid_swa,
        is_hybrid_swa_compress=config.is_hybrid_swa_compress,
        use_mla_backend=config.attention_arch == AttentionArch.MLA,
        layer_info=info,
        forward_stream=None,
        req_to_token_pool=None,
        token_to_kv_pool_allocator=None,
        memory_pool_config=None,
        draft_model_idx=depth,
    )
    sizes = MemoryPoolConfig(
        max_total_num_tokens=tokens,
        max_running_requests=2,
        full_max_total_num_tokens=tokens,
        swa_max_total_num_tokens=tokens,
        c4_max_total_num_tokens=tokens // 4,
        c128_max_total_num_tokens=max(1, tokens // 128),
        c4_state_pool_size=_SLOTS,
        c128_state_pool_size=_SLOTS,
    )
    pools = configurator._init_pools(
        sizes=configurator._derive_pool_sizes(config=sizes),
        req_to_token_pool=target.req_to_token_pool if draft else None,
        token_to_kv_pool_allocator=target.token_to_kv_pool_allocator if draft else None,
    )
    return SimpleNamespace(
        kv_cache_configurator=configurator,
        model_config=config,
        page_size=page_size,
        kv_cache_dtype=dtype,
        spec_algorithm=algorithm,
        req_to_token_pool=pools.req_to_token_pool,
        token_to_kv_pool=pools.token_to_kv_pool,
        token_to_kv_pool_allocator=pools.token_to_kv_pool_allocator,
        mtp_draft_device_pools=(),
        mtp_draft_mamba_pools=(),
    )


def _host_pools(runner: Any, plan: Any) -> list[dict[str, Any]]:
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.hybrid_cache import hybrid_pool_assembler as assembler
    from sglang.srt.mem_cache.unified_cache.components import ComponentType

    # As managers/scheduler.py and mem_cache/registry.py :: create_unified_radix_cache.
    configurator = runner.kv_cache_configurator
    components = {ComponentType.FULL: None}
    window = configurator.sliding_window_size
    if configurator.is_hybrid_swa:
        components[ComponentType.SWA] = None
        if not window or window <= 0:
            raise ValueError("SWAComponent requires a positive sliding_window_size")
    if configurator.mambaish_config is not None:
        components[ComponentType.MAMBA] = None
    params = CacheInitParams(
        disable=False,
        req_to_token_pool=runner.req_to_token_pool,
        token_to_kv_pool_allocator=runner.token_to_kv_pool_allocator,
        page_size=configurator.page_size,
        sliding_window_size=window,
        pp_size=configurator.pp_size,
        mtp_draft_device_pools=runner.mtp_draft_device_pools,
        mtp_draft_mamba_pools=runner.mtp_draft_mamba_pools,
        sidecar_draft_device_pools=draft_pools.sidecars(plan),
    )
    result = assembler._select_strategy(runner.token_to_kv_pool, set(components)).build(
        cache=SimpleNamespace(components=components, page_size=configurator.page_size),
        kvcache=runner.token_to_kv_pool,
        params=params,
        server_args=configurator.server_args,
        load_cache_event=None,
    )
    transfers = assembler.HybridCacheController.call_args.kwargs["transfer_layer_id_max"]
    specs, draft_entries = draft_pools.host_pools(runner, plan, result, transfers)
    entries = [*result.host_pool_group.entry_map.values(), *draft_entries]
    sources = {
        spec.pool_name.value: spec.indices_from_pool.value for spec in (*result.sidecars, *specs)
    }
    trailing = {"swa": -(-(window or 0) // configurator.page_size), "mamba": 1}
    # Controllers count layers from the first that the device pool states.
    first = getattr(runner.token_to_kv_pool, "start_layer", None) or 0
    return [
        _row(
            entry,
            0 if entry in draft_entries else first,
            trailing.get(sources.get(entry.name.value, entry.name.value), 0),
        )
        for entry in entries
    ]


def _row(entry: Any, first: int, trailing: int) -> dict[str, Any]:
    """Describe a pool of one rank. trailing: 0 where all pages of a node have the object."""
    host = entry.host_pool
    mapped = [i for i in range(_MOST_LAYERS) if entry.layer_mapper(i) is not None]
    packed = len(entry.packed_draft_device_pools)
    row = {
        "name": entry.name.value,
        "host": type(host).__name__,
        "layers": _ranges([first + i for i in mapped[: len(mapped) - packed]]),
        "nbytes": _page_bytes(host),
        "trailing": trailing,
    }
    if packed:
        row["packed"] = packed
    if entry.name.value == "mamba":
        states = [getattr(host, "temporal_buffer", None), *(host.conv_buffer or ())]
        row["states"] = [
            [list(state.shape[3:]), str(state.dtype).removeprefix("torch.")]
            for state in states
            if state is not None
        ]
    return row


def _ranges(numbers: list[int]) -> str:
    starts = [n for n in numbers if n - 1 not in numbers]
    ends = [n for n in numbers if n + 1 not in numbers]
    pairs = zip(starts, ends, strict=True)
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in pairs)


def _page_bytes(host: Any) -> int:
    """Return the bytes of a page's object; of K and V together where no flat page exists."""
    if type(host).__name__ == "LogicalHostPool":
        return 0
    if type(host).__name__.startswith("Asymmetric"):
        both = sum(t.numel() * t.itemsize for t in (host.k_buffer, host.v_buffer))
        return int(both // host.page_num)
    host.pin_memory = False  # refused by a machine without a GPU
    page = host.get_dummy_flat_data_page()
    return int(page.numel() * page.itemsize)


@contextlib.contextmanager
def _rank(tp: int, pp: int, stage: int) -> Iterator[None]:
    from sglang.srt.runtime_context import get_parallel

    values = {
        "tp_rank": 0,
        "tp_size": tp,
        "attn_tp_rank": 0,
        "attn_tp_size": tp,
        "attn_dp_rank": 0,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "pp_rank": stage,
        "pp_size": pp,
        "attn_dcp_rank": 0,
        "attn_dcp_size": 1,
        "dcp_enabled": False,
    }
    with get_parallel().override(**values):
        yield


def _stand_in(config: Any, pp: int, stage: int) -> Any:
    """Return what SGLang asks of a model before it allocates: stages and the window."""
    from sglang.srt.distributed.utils import get_pp_indices
    from sglang.srt.models.registry import ModelRegistry

    name = config.hf_config.architectures[0]
    model_class, model = ModelRegistry.models.get(name), SimpleNamespace()
    if pp > 1 and _has_stages(name):
        stages = get_pp_indices(config.num_hidden_layers, stage, pp)
        model.start_layer, model.end_layer = stages
    # Models without a pool of their own for window layers have the method too.
    if config.is_hybrid_swa and hasattr(model_class, "get_attention_sliding_window_size"):
        asked = model_class.__new__(model_class)
        torch.nn.Module.__init__(asked)
        asked.config = config.hf_config
        asked.text_config = config.hf_text_config
        # A wrapper asks its language model, whose method is a function of its module.
        module = sys.modules[model_class.__module__]
        if function := getattr(module, "get_attention_sliding_window_size", None):
            size = mock.Mock(return_value=function(asked.config))
            language_model = SimpleNamespace(get_attention_sliding_window_size=size)
            asked.thinker = SimpleNamespace(language_model=language_model)
        window = asked.get_attention_sliding_window_size()
        model.get_attention_sliding_window_size = lambda: window
    return model


def _has_stages(architecture: str) -> bool:
    from sglang.srt.models.registry import ModelRegistry

    model_class = ModelRegistry.models.get(architecture)
    if model_class is None:
        return False
    source = inspect.getsource(sys.modules[model_class.__module__])
    return hasattr(model_class, "start_layer") or "start_layer" in source


def _classes() -> list[str]:
    """Return the registered architectures, also of modules that this environment cannot import."""
    import sglang.srt.models as package
    from sglang.srt.models.registry import ModelRegistry

    found = set(ModelRegistry.models)
    for path in Path(package.__path__[0]).rglob("*.py"):
        assigned = [x for x in ast.parse(path.read_text()).body if isinstance(x, ast.Assign)]
        for node in assigned:
            if any(isinstance(x, ast.Name) and x.id == "EntryClass" for x in node.targets):
                found |= {x.id for x in ast.walk(node.value) if isinstance(x, ast.Name)}
    return sorted(found)


if __name__ == "__main__":
    sglang_env.prepare()
    main()
