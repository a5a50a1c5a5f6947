"""Print the hicachectl profile of an SGLang server, without loading its model.

    python probe.py FLAG… > profile.toml

Run the script in the server's environment, with the flags and the environment variables of the
server, on a machine with a GPU of the server's type. The script needs SGLang 0.5.23, but not
hicachectl. SGLang's own code gives pools, sizes and layers, on the meta device:

- ServerArgs and ModelConfig
- KVCacheConfigurator
- the draft plan of the speculative workers
- `StackStrategy` of hybrid_pool_assembler.py, which chooses the host pools

Comments in the profile say which facts are uncertain. The exit code is 2 if SGLang refuses the
flags, or if no profile can describe the server. stderr says why.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import math
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

RELEASE = "0.5.23"
STATE_SLOTS = 4
_PAGES = 4
_MOST_LAYERS = 1024
_WITHOUT = "check the store without a profile"
_STATED_LAYERS = re.compile(r"self\.start_layer\b[^=\n]*=[^=]")


class Rank(NamedTuple):
    """First TP rank of a pipeline stage.

    tp: TP size.
    pp: number of pipeline stages.
    stage: number of the stage, from 0.
    """

    tp: int
    pp: int
    stage: int


class StoredPool(NamedTuple):
    """A pool that HiCache stores.

    host: SGLang's host pool, with buffers that have no memory.
    layers: numbers of the model's layers that the pool stores. The layers of a draft are numbered
        from 0.
    packed: number of draft layers that the pool stores after the model's layers.
    trailing: number of last pages of a node of SGLang's radix tree that have an object; 0 if all
        pages have an object.
    """

    name: str
    host: Any
    layers: tuple[int, ...]
    packed: int
    trailing: int


class Stored(NamedTuple):
    """Pools that a rank stores. runner: object with ModelRunner's members about the KV cache."""

    runner: Any
    pools: tuple[StoredPool, ...]


@contextlib.contextmanager
def without_memory() -> Iterator[None]:
    """Let SGLang's pools allocate nothing."""
    from sglang.srt.mem_cache import memory_pool
    from sglang.srt.mem_cache.hybrid_cache import hybrid_pool_assembler
    from sglang.srt.mem_cache.pool_host import base, common

    def allocate(_self: Any, dims: Any, dtype: torch.dtype, device: str) -> torch.Tensor:
        del device
        if not math.prod(dims):
            # A pool without layers asks for 0 bytes. SGLang's own allocation refuses this.
            common.alloc_mmap(dims, dtype)
        return torch.empty(dims, dtype=dtype, device="meta")

    module = torch.get_device_module
    replaced = (
        mock.patch.object(common.HostTensorAllocator, "allocate", allocate),
        mock.patch.object(common, "_cuda_host_register", mock.Mock(), create=True),
        mock.patch.object(base, "host_memory_budget_bytes", mock.Mock(return_value=1 << 60)),
        mock.patch.object(
            torch, "get_device_module", lambda d=None: module("cpu" if str(d) == "meta" else d)
        ),
        mock.patch.object(hybrid_pool_assembler, "HybridCacheController", mock.MagicMock()),
        mock.patch.object(memory_pool.MHATokenToKVPool, "_init_kv_copy_and_warmup", mock.Mock()),
        # MiniMax-M3 compares the scales of two pools. Tensors on the meta device have no values,
        # so compare their shapes.
        mock.patch.object(torch, "equal", lambda one, two: one.shape == two.shape),
    )
    with contextlib.ExitStack() as stack:
        for patch in replaced:
            stack.enter_context(patch)
        yield


def stored(server_args: Any, rank: Rank, enter: Callable[[str], None]) -> Stored:
    """Return the pools that one rank stores. Raises the exceptions of SGLang.

    server_args: resolved ServerArgs.
    enter: function that is called with the name of each step of SGLang before the step.
    """
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.runtime_context import publish

    publish(server_args, role="scheduler")
    enter("config")
    config = ModelConfig.from_server_args(server_args)
    if rank.pp > 1 and not takes_stages(config.hf_config.architectures[0]):
        enter("stages")
        raise AssertionError(_words_on_stages())
    with _as_rank(rank):
        runner = _allocated(server_args, config, _stand_in(config, rank), enter)
        enter("draft")
        # The draft is on the last stage (Scheduler.maybe_init_draft_worker).
        last = rank.stage == rank.pp - 1
        drafts = _draft_runners(server_args, runner, enter) if last else ()
        plan = _draft_plan(runner, drafts)
        enter("host")
        return Stored(runner, _host_pools(runner, plan))


def _allocated(
    server_args: Any,
    config: Any,
    model: Any,
    enter: Callable[[str], None],
    *,
    target: Any = None,
    depth: int | None = None,
    draft_backend: str | None = None,
) -> Any:
    """Return a stand-in for ModelRunner: a configurator and the pools that it allocates.

    target: runner of the target, if the model is a draft; else None.
    depth: number of the draft's step, if each step has its own runner; else None.
    draft_backend: attention backend that SGLang chooses for a DFlash draft; None for other models.
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
    enter("draft pools" if draft else "pools")
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
        c4_state_pool_size=STATE_SLOTS,
        c128_state_pool_size=STATE_SLOTS,
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


def _host_pools(runner: Any, plan: Any) -> tuple[StoredPool, ...]:
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.hybrid_cache import hybrid_pool_assembler as assembler
    from sglang.srt.mem_cache.unified_cache.components import ComponentType

    # This code follows managers/scheduler.py, and create_unified_radix_cache of
    # mem_cache/registry.py.
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
        sidecar_draft_device_pools=_draft_sidecars(plan),
    )
    result = assembler._select_strategy(runner.token_to_kv_pool, set(components)).build(
        cache=SimpleNamespace(components=components, page_size=configurator.page_size),
        kvcache=runner.token_to_kv_pool,
        params=params,
        server_args=configurator.server_args,
        load_cache_event=None,
    )
    transfers = assembler.HybridCacheController.call_args.kwargs["transfer_layer_id_max"]
    specs, draft_entries = _draft_host_pools(runner, plan, result, transfers)
    entries = [*result.host_pool_group.entry_map.values(), *draft_entries]
    sources = {
        spec.pool_name.value: spec.indices_from_pool.value for spec in (*result.sidecars, *specs)
    }
    trailing = {"swa": -(-(window or 0) // configurator.page_size), "mamba": 1}
    # Controllers count layers from the first layer of the device pool.
    first = getattr(runner.token_to_kv_pool, "start_layer", None) or 0
    return tuple(
        _stored_pool(
            entry,
            first,
            trailing.get(sources.get(entry.name.value, entry.name.value), 0),
        )
        for entry in entries
    )


def _stored_pool(entry: Any, first: int, trailing: int) -> StoredPool:
    mapped = [i for i in range(_MOST_LAYERS) if entry.layer_mapper(i) is not None]
    if entry.name.value.startswith("draft"):  # all layers belong to drafts
        return StoredPool(entry.name.value, entry.host_pool, tuple(range(len(mapped))), 0, trailing)
    packed = len(entry.packed_draft_device_pools)
    layers = tuple(first + i for i in mapped[: len(mapped) - packed])
    return StoredPool(entry.name.value, entry.host_pool, layers, packed, trailing)


def page_bytes(host: Any) -> int:
    """Return the number of bytes of a page's object.

    A pool with K and V of different widths gives no flat page, so their bytes are added.
    """
    if type(host).__name__ == "LogicalHostPool":
        return 0
    if type(host).__name__.startswith("Asymmetric"):
        both = sum(t.numel() * t.itemsize for t in (host.k_buffer, host.v_buffer))
        return int(both // host.page_num)
    host.pin_memory = False  # a machine without a GPU refuses pinned memory
    page = host.get_dummy_flat_data_page()
    return int(page.numel() * page.itemsize)


def _draft_runners(server_args: Any, target: Any, enter: Callable[[str], None]) -> tuple[Any, ...]:
    """Return the runners of the server's draft, built in the way of SGLang's speculative workers.

    The result is empty if the server has no draft.
    """
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
        _allocated(
            server_args,
            config,
            _draft_stand_in(config),
            enter,
            target=target,
            depth=depth,
            draft_backend=backend,
        )
        for depth in depths
    )


def _draft_plan(target: Any, drafts: tuple[Any, ...]) -> Any:
    """Return SGLang's plan for the pools of the drafts.

    SGLang also adds the pools of packed drafts to the target's runner.
    """
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


def _draft_sidecars(plan: Any) -> tuple[Any, ...]:
    """Return the draft's device pools that get their own host pools. Source: build_kv_cache."""
    from sglang.srt.speculative.base_spec_worker import HiCacheDraftMode

    return tuple(plan.device_pools) if plan.mode == HiCacheDraftMode.SIDECAR else ()


def _draft_host_pools(
    target: Any, plan: Any, result: Any, transfers: int
) -> tuple[list[Any], list[Any]]:
    """Return the draft's sidecar specs, and the entries of its host pools.

    transfers: number of the target's layers to transfer.
    Source: maybe_register_hicache_draft.
    """
    from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import (
        build_hicache_draft_sidecars,
    )

    if not _draft_sidecars(plan):
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


def _draft_stand_in(config: Any) -> Any:
    """Return an object with the draft's members that SGLang reads: layers and quantisation."""
    model_class, sources = _model_class(config.hf_config.architectures[0])
    return SimpleNamespace(
        mtp_layer_id_is_depth="mtp_layer_id_is_depth = True" in sources,
        quant_config=_quant_config(config, model_class),
        **_draft_layers(config, model_class),
    )


def _draft_layers(config: Any, model_class: type | None) -> dict[str, int]:
    """Return the attributes in which a draft states its layers. Most drafts have no such attribute.

    Source: layer_setup.py.
    """
    from sglang.srt.models.dspark import DSparkDraftMixin
    from sglang.srt.speculative.dspark_components.dspark_config import parse_dspark_draft_config

    if config.hf_config.architectures[0] == "DeepseekV4ForCausalLMDSpark":
        found = parse_dspark_draft_config(draft_hf_config=config.hf_config).target_layer_ids
        stages = len(found) if found is not None else config.num_nextn_predict_layers or 1
        return {"num_stages": stages, "start_layer": 0, "end_layer": stages}
    if model_class and issubclass(model_class, DSparkDraftMixin):
        return {"num_stages": config.num_hidden_layers}
    if model_class and _states_its_layers(model_class):
        one = "config.num_hidden_layers = 1" in _sources(model_class)
        return {"start_layer": 0, "end_layer": 1 if one else config.num_hidden_layers}
    return {}


@contextlib.contextmanager
def _as_rank(rank: Rank) -> Iterator[None]:
    from sglang.srt.runtime_context import get_parallel

    ranks = ("tp_rank", "attn_tp_rank", "attn_dp_rank", "attn_cp_rank", "attn_dcp_rank")
    single = ("attn_dp_size", "attn_cp_size", "attn_dcp_size", "moe_ep_size", "moe_dp_size")
    values = {
        **dict.fromkeys(ranks, 0),
        **dict.fromkeys(single, 1),
        **dict.fromkeys(("tp_size", "attn_tp_size", "moe_tp_size"), rank.tp),
        "pp_rank": rank.stage,
        "pp_size": rank.pp,
        "dcp_enabled": False,
    }
    with get_parallel().override(**values):
        yield


def _stand_in(config: Any, rank: Rank) -> Any:
    """Return an object with the model's members that SGLang reads.

    These members state the layers of the rank's stage, the window and the quantisation.
    """
    from sglang.srt.distributed.utils import get_pp_indices

    model_class, sources = _model_class(config.hf_config.architectures[0])
    model = SimpleNamespace(quant_config=_quant_config(config, model_class))
    states = _states_its_layers(model_class) if model_class else _STATED_LAYERS.search(sources)
    if rank.pp > 1 and states:
        stages = get_pp_indices(config.num_hidden_layers, rank.stage, rank.pp)
        model.start_layer, model.end_layer = stages
    # A model without a pool for its window layers can also have the method
    # `get_attention_sliding_window_size`, so check `is_hybrid_swa`, too.
    if config.is_hybrid_swa and hasattr(model_class, "get_attention_sliding_window_size"):
        asked = model_class.__new__(model_class)
        torch.nn.Module.__init__(asked)
        asked.config = config.hf_config
        asked.text_config = config.hf_text_config
        # The method of a wrapper calls the same method of the language model inside, which was not
        # built. So give the wrapper a stand-in for the language model. The stand-in returns the
        # result of the wrapper module's function `get_attention_sliding_window_size`.
        module = sys.modules[model_class.__module__]
        if function := getattr(module, "get_attention_sliding_window_size", None):
            size = mock.Mock(return_value=function(asked.config))
            language_model = SimpleNamespace(get_attention_sliding_window_size=size)
            asked.thinker = SimpleNamespace(language_model=language_model)
        window = asked.get_attention_sliding_window_size()
        model.get_attention_sliding_window_size = lambda: window
    return model


def _quant_config(config: Any, model_class: type | None) -> Any:
    """Return the quantisation that the loaded model would have; None if it would have none."""
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.model_loader.loader import _get_quantization_config

    if config.quantization is None or not keeps_quant_config(model_class):
        return None
    return _get_quantization_config(config, LoadConfig())


def keeps_quant_config(model_class: type | None) -> bool:
    """Return whether the models of a class have a member `quant_config`.

    SGLang reads this member to choose a dtype for `--kv-cache-dtype auto`.
    Source: mem_cache/kv_cache_dtype.py :: configure_kv_cache_dtype.
    """
    for base in model_class.__mro__ if model_class else ():
        if "__init__" not in vars(base) or base is torch.nn.Module:
            continue
        source = inspect.getsource(vars(base)["__init__"])
        if "self.quant_config = " in source:
            return True
        if not re.search(r"super\(.*\)\.__init__\([^)]", source):
            return False
    return False


def takes_stages(architecture: str) -> bool:
    """Return whether a model's `forward` has the argument that several stages need."""
    model_class, sources = _model_class(architecture)
    forward = getattr(model_class, "forward", None)
    if forward is None:  # a factory, or a module that this machine cannot import
        return "pp_proxy_tensors" in sources
    return "pp_proxy_tensors" in inspect.signature(forward).parameters


def _words_on_stages() -> str:
    from sglang.srt.model_executor.model_runner import ModelRunner

    found = re.search(r'assert self\.support_pp, \(\s*"(.*?)"', inspect.getsource(ModelRunner))
    assert found
    return found[1]


def _states_its_layers(model_class: type) -> bool:
    """Return whether a model states its layers to its runner.

    If only a module inside the model knows the layers, resolve_layer_indices takes all layers for
    each stage, and the NEXTN layers for a draft. A NextN model derives from the class of its
    target, but has another module inside. So the first class that names its inner module decides.
    """
    tells = hasattr(model_class, "start_layer")
    for base in _bases(model_class):
        own = inspect.getsource(vars(base)["__init__"]) if "__init__" in vars(base) else ""
        if _STATED_LAYERS.search(own):
            return True
        found = re.search(r"self\.model = (\w+)\(", own)
        if inner := found and getattr(sys.modules[base.__module__], found[1], None):
            return tells and bool(_STATED_LAYERS.search(_sources(inner)))
    return tells


def _model_class(architecture: str) -> tuple[Any, str]:
    """Return a model's class, and its source with the sources of its bases in SGLang.

    If the class cannot be imported, it is None, and the source is that of the files that define it.
    """
    import sglang.srt.models as package
    from sglang.srt.models.registry import ModelRegistry

    ModelRegistry.get_supported_archs()
    model_class = ModelRegistry.models.get(architecture)
    if model_class is None:
        files = [path.read_text() for path in Path(package.__path__[0]).rglob("*.py")]
        return None, "".join(x for x in files if f"class {architecture}(" in x)
    return model_class, _sources(model_class)


def _sources(model_class: type) -> str:
    return "".join(inspect.getsource(x) for x in _bases(model_class))


def _bases(model_class: type) -> list[type]:
    """Return a class and its bases in SGLang."""
    return [x for x in inspect.getmro(model_class) if x.__module__.startswith("sglang.")]


class Refused(Exception):
    """No profile can describe this server, for the reason in the text."""


def main(arguments: list[str]) -> int:
    """Print the profile of a server with these command-line arguments. Return the exit code."""
    steps = ["arguments"]
    try:
        with contextlib.redirect_stdout(sys.stderr), without_memory():
            text = _profile_text(_server_arguments(arguments), steps.append)
    except Refused as error:
        print(f"probe: {error}", file=sys.stderr)
        return 2
    except Exception as error:  # SGLang refuses flags with exceptions of many types
        words = f"{type(error).__name__}: {error}"
        print(f"probe: SGLang refuses ({steps[-1]}): {words}", file=sys.stderr)
        return 2
    print(text, end="")
    return 0


def _server_arguments(arguments: list[str]) -> Any:
    """Return the resolved ServerArgs of a server with HiCache and few state slots."""
    from sglang.srt.server_args import prepare_server_args

    small = ("--max-mamba-cache-size", str(STATE_SLOTS), "--max-running-requests", "2")
    server_args = prepare_server_args([*arguments, "--enable-hierarchical-cache", *small])
    server_args.resolve_once()
    return server_args


def _profile_text(server_args: Any, enter: Callable[[str], None]) -> str:
    from sglang.version import __version__

    flags = server_args.resolved_dict()
    if not flags["enable_hierarchical_cache"]:
        raise Refused("SGLang disables HiCache for these flags; the server stores no pages")
    tp, pp = _attention_tp(flags), flags["pp_size"]
    whole = stored(server_args, Rank(1, 1, 0), enter)
    stages = [stored(server_args, Rank(tp, pp, stage), enter) for stage in range(pp)]
    enter("profile")
    replicated = _is_replicated(whole.runner)
    pools, comments = [], []
    for pool in whole.pools:
        row, comment = _described(whole.runner, pool, stages, tp, replicated)
        pools.append(row)
        comments += [comment] if comment else []
    if __version__ != RELEASE:
        comments.append(f"This script was written for SGLang {RELEASE}, not {__version__}.")
    if flags["device"] == "cpu":
        comments.append(
            "SGLang was run without a GPU here. On a GPU, it may choose another page size, dtype "
            "or row form."
        )
    scalars = _scalars(whole.runner, flags, tp, replicated) | {"sglang": __version__}
    _check_ranks(scalars, flags, replicated, [pool.name for pool in whole.pools])
    partition = _partition(whole, pp)
    if partition:
        scalars["pp_partition"] = partition
    lines = [*(f"# {line}" for line in comments), *_toml(scalars)]
    for pool_row in pools:
        lines += ["", "[[pools]]", *_toml(pool_row)]
    return "\n".join(lines) + "\n"


def _attention_tp(flags: Mapping[str, Any]) -> int:
    return int(flags["tp_size"] // (flags["attn_dp_size"] or 1) // (flags["attn_cp_size"] or 1))


def _is_replicated(runner: Any) -> bool:
    """Return whether TP ranks share KV objects.

    Source: CacheController._generate_storage_config.
    """
    from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool
    from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, MLATokenToKVPool

    pool = runner.token_to_kv_pool
    if isinstance(pool, HybridLinearKVPool):
        return bool(pool.use_mla)
    return isinstance(pool, (MLATokenToKVPool, DeepSeekV4TokenToKVPool))


def _scalars(runner: Any, flags: Mapping[str, Any], tp: int, replicated: bool) -> dict[str, Any]:
    """Return the fields of a profile, without its pools.

    Fields with default values are left out, except model, page size, layout and TP size.
    """
    algorithm = runner.spec_algorithm
    extra, threshold = _extra_config(flags)
    dcp, cp = flags["dcp_size"] or 1, flags["attn_cp_size"] or 1
    found: dict[str, Any] = {
        "model": flags["served_model_name"] or flags["model_path"],
        "page_size": runner.page_size * dcp,
        "layout": flags["hicache_mem_layout"],
        "tp": tp,
    }
    lcm = extra.get("tp_lcm_size") or 0
    split = not replicated and flags["hicache_mem_layout"] == "page_head" and lcm > tp
    others = {
        "pp": (flags["pp_size"], 1),
        "cp": (cp, 1),
        "cp_layer_split": (bool(flags["enable_dsa_cache_layer_split"]) and cp > 1, False),
        "dcp": (dcp, 1),
        "tp_lcm_size": (lcm if split else 0, 0),
        "tag": (str(extra.get("extra_backend_tag") or ""), ""),
        "hash_unit": ("bigram" if algorithm.is_eagle() else "token", "token"),
        "speculative_algorithm": ("" if algorithm.is_none() else algorithm.name, ""),
        "prefetch_threshold": (max(threshold, 0), 256),
    }
    return found | {name: value for name, (value, usual) in others.items() if value != usual}


def _extra_config(flags: Mapping[str, Any]) -> tuple[Mapping[str, Any], int]:
    """Return the options of the storage backend, and SGLang's prefetch threshold."""
    from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import (
        HybridCacheController,
    )

    stated = flags["hicache_storage_backend_extra_config"]
    found, threshold, *_ = HybridCacheController.parse_storage_backend_extra_config(stated)
    return found or {}, threshold


def _check_ranks(
    scalars: Mapping[str, Any], flags: Mapping[str, Any], replicated: bool, names: list[str]
) -> None:
    attn_dp = flags["attn_dp_size"] or 1
    if scalars.get("cp", 1) > 1 and attn_dp == 1 and (not replicated or "mamba" in names):
        raise Refused(
            f"cp {scalars['cp']}: without DP attention, keys name the full TP size, but heads are "
            f"divided by the attention TP size; a profile has only one TP size; {_WITHOUT}"
        )


def _partition(whole: Stored, pp: int) -> list[int]:
    """Return the number of layers of each stage.

    The result is empty if a profile does not need these numbers, because hicachectl computes the
    same stages without them.
    """
    from sglang.srt.distributed.utils import get_pp_indices

    layers = whole.runner.model_config.num_hidden_layers
    seen = any(layers - 1 in pool.layers for pool in whole.pools)
    if pp == 1 or (seen and not os.environ.get("SGLANG_PP_LAYER_PARTITION")):
        return []
    stages = [get_pp_indices(layers, stage, pp) for stage in range(pp)]
    return [end - start for start, end in stages]


def _described(
    runner: Any, pool: StoredPool, stages: list[Stored], tp: int, replicated: bool
) -> tuple[dict[str, Any], str]:
    """Return the fields of a pool in a profile, and a comment; "" for no comment.

    A pool gets a kind with known bytes only if, in each stage that has the pool, the object size of
    this kind equals the size of a page in the host pool. Otherwise the pool is opaque.
    """
    form = _FORMS.get(type(pool.host).__name__)
    row = form(runner, pool) if form else {}
    held = [(one.runner, mine) for one in stages for mine in one.pools if mine.name == pool.name]
    fits = row and all(
        _form_bytes(row, mine, its_runner.page_size, tp) == page_bytes(mine.host)
        for its_runner, mine in held
    )
    usual = pool.name in ("mamba", "swa", "draft_swa", "auxiliary_swa")
    trailing: dict[str, Any] = {"trailing_pages": pool.trailing} if pool.trailing > 1 else {}
    if bool(pool.trailing) != (usual or pool.name.endswith("_state")):
        trailing["hit_policy"] = "trailing_pages" if pool.trailing else "all_pages"
    if fits:
        return {"name": pool.name, **row, **trailing}, ""
    sizes = {page_bytes(mine.host) for _, mine in held}
    if len(sizes) != 1:
        raise Refused(
            f"pools[{pool.name}]: the objects of {type(pool.host).__name__} have {sorted(sizes)} "
            f"bytes in different stages, but a profile can state only one size; {_WITHOUT}"
        )
    opaque: dict[str, Any] = {"name": pool.name, "kind": "opaque", "nbytes": sizes.pop()}
    if replicated and pool.name != "mamba":
        opaque["replicated"] = True
    return opaque | trailing, (
        f"pools[{pool.name}]: this script does not know how {type(pool.host).__name__} orders its "
        f"bytes. The profile states only the number of bytes, at tp {tp} and pp {len(stages)}."
    )


def _mha_form(runner: Any, pool: StoredPool) -> dict[str, Any]:
    host = pool.host
    dims = {"kv_heads": host.head_num, "head_dim": host.head_dim}
    if host.v_head_dim != host.head_dim:
        dims["v_head_dim"] = host.v_head_dim
    return {"kind": "mha", "dtype": _dtype(runner, pool), **_layers(pool), **dims}


def _mla_form(runner: Any, pool: StoredPool) -> dict[str, Any]:
    host, dtype = pool.host, _dtype(runner, pool)
    row = "fp8" if dtype.startswith("float8") else "bf16"
    if host.kv_cache_dim != host.kv_lora_rank + host.qk_rope_head_dim:
        row = "fp8_scaled"
    dims = {"kv_lora_rank": host.kv_lora_rank, "qk_rope_head_dim": host.qk_rope_head_dim}
    return {"kind": "mla", "dtype": dtype, **_layers(pool), **dims, "row": row}


def _indexer_form(_runner: Any, pool: StoredPool) -> dict[str, Any]:
    dim = getattr(pool.host.device_pool, "index_head_dim", None)
    return {"kind": "dsa_indexer", **_layers(pool), "index_head_dim": dim} if dim else {}


def _mamba_form(runner: Any, pool: StoredPool) -> dict[str, Any]:
    config, host = runner.kv_cache_configurator.mambaish_config, pool.host
    divided = _CONVOLUTIONS.get(type(config).__name__, _channels)(config, host)
    found: dict[str, Any] = {"kind": "mamba", **_layers(pool)}
    temporal = getattr(host, "temporal_buffer", None)
    if temporal is not None and temporal.numel():
        found["temporal"] = _state(temporal, {})
    buffers = host.conv_buffer or ()
    return found | {"conv": [_state(*one) for one in zip(buffers, divided, strict=True)]}


def _channels(config: Any, host: Any) -> list[dict[str, Any]]:
    """Return the fields of each convolution's state that say how TP divides the state."""
    shape = config.mamba2_cache_params.shape
    axis = getattr(shape, "conv_slice_axis", 0)
    divided: dict[str, Any] = {"shard_axis": axis} if axis else {}
    groups = list(getattr(shape, "conv_shard_groups", None) or ())
    inner, channels = getattr(shape, "intermediate_size", 0), getattr(shape, "conv_dim", 0)
    if groups:
        divided["groups"] = groups
    elif channels > inner:
        # The channels are x, B and C of Mamba2. Take the width of the buffer, because conv_dim also
        # counts the copies of groups at TP > 1.
        rest = host.conv_buffer[0].shape[3 + axis] - inner
        divided["groups"] = [inner, rest // 2, rest // 2]
        if rest == 2 * shape.state_size:  # there is one group, and each rank has a copy
            divided["whole"] = [1, 2]
    return [divided] * len(host.conv_buffer or ())


def _zaya_convolutions(config: Any, _host: Any) -> list[dict[str, Any]]:
    heads = (config.num_attention_heads, config.num_key_value_heads)
    return [{"groups": [count * config.head_dim for count in heads]}, {"whole": [0]}]


def _inkling_convolutions(config: Any, _host: Any) -> list[dict[str, Any]]:
    from sglang.srt.runtime_context import get_exec

    stream = {} if get_exec().comm.enable_scattered_sconv else {"whole": [0]}
    least = (config.head_dim, config.head_dim, config.swa_head_dim, config.swa_head_dim)
    divided = [*({"least": dim} for dim in least), stream, stream]
    return [{"shard_axis": 1, **one} for one in divided]


# For each class of SGLang's config: the function that returns how TP divides the states of the
# model's convolutions. For all other classes, `_channels` does.
_CONVOLUTIONS: dict[str, Callable[[Any, Any], list[dict[str, Any]]]] = {
    "ZayaConfig": _zaya_convolutions,
    "InklingModelConfig": _inkling_convolutions,
}


def _state(buffer: torch.Tensor, divided: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a state.

    buffer: host buffer [slots, layers, 1, …]; the axes after the third are the shape of the state.
    """
    return {"shape": list(buffer.shape[3:]), "dtype": _name(buffer.dtype), **divided}


def _layers(pool: StoredPool) -> dict[str, Any]:
    count = len(pool.layers)
    known = count if pool.layers == tuple(range(count)) else list(pool.layers)
    return {"layers": known} | ({"packed_draft_layers": pool.packed} if pool.packed else {})


def _dtype(runner: Any, pool: StoredPool) -> str:
    """Return the dtype of K and V.

    Host pools hold fp8 as uint8, so the runner gives the dtype of a uint8 pool.
    """
    own = pool.host.dtype
    return _name(runner.kv_cache_dtype if own == torch.uint8 else own)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _form_bytes(row: Mapping[str, Any], pool: StoredPool, page_size: int, tp: int) -> int:
    """Return the number of bytes of a rank's object, computed from the pool's fields in a profile.

    row: these fields.
    Return -1 if TP does not divide a state.
    """
    layers = len(pool.layers) + pool.packed
    if row["kind"] == "logical":
        return 0
    if row["kind"] == "mamba":
        states = [*row["conv"], *([row["temporal"]] if "temporal" in row else [])]
        shares = [_share_bytes(state, tp) for state in states]
        return -1 if -1 in shares else layers * sum(shares)
    if row["kind"] == "dsa_indexer":
        dim = row["index_head_dim"]
        return int(layers * page_size * (dim + dim // 128 * 4))
    if row["kind"] == "mla":
        rank, rope = row["kv_lora_rank"], row["qk_rope_head_dim"]
        width = getattr(torch, row["dtype"]).itemsize * (rank + rope)
        if row["row"] == "fp8_scaled":
            width = rank + rank // 128 * 4 + 2 * rope
        return int(layers * page_size * width)
    heads = max(1, row["kv_heads"] // tp)
    width = row["head_dim"] + row.get("v_head_dim", row["head_dim"])
    return int(layers * page_size * heads * width * getattr(torch, row["dtype"]).itemsize)


def _share_bytes(state: Mapping[str, Any], tp: int) -> int:
    """Return the number of bytes of a rank's share of a state.

    Return -1 if TP does not divide the groups of the state.
    """
    axis, least = state.get("shard_axis", 0), state.get("least", 0)
    groups = state.get("groups") or [state["shape"][axis]]
    ranks = min(tp, groups[0] // least) if least else tp
    parts = [1 if number in state.get("whole", ()) else ranks for number in range(len(groups))]
    if any(group % part for group, part in zip(groups, parts, strict=True)):
        return -1
    items = sum(group // part for group, part in zip(groups, parts, strict=True))
    for place, length in enumerate(state["shape"]):
        items *= 1 if place == axis else length
    return int(items * getattr(torch, state["dtype"]).itemsize)


# For each class of SGLang's host pool: the function that returns the fields of the pool. Pools of
# all other classes are opaque.
_FORMS: dict[str, Callable[[Any, StoredPool], dict[str, Any]]] = {
    "MHATokenToKVPoolHost": _mha_form,
    "AsymmetricMHATokenToKVPoolHost": _mha_form,
    "MLATokenToKVPoolHost": _mla_form,
    "DSAIndexerPoolHost": _indexer_form,
    "MambaPoolHost": _mamba_form,
    "LogicalHostPool": lambda *_: {"kind": "logical"},
}


def _toml(fields: Mapping[str, Any]) -> list[str]:
    return [f"{name} = {_value(value)}" for name, value in fields.items()]


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(_toml(value)) + " }"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_value, value)) + "]"
    return json.dumps(value)  # JSON and TOML write texts, numbers and booleans alike


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
