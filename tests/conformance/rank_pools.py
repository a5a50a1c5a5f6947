"""SGLang's own device and host pools for one rank of a deployment, on the CPU.

Runs inside the SGLang environment, after sglang_env.prepare().
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tests.conformance import page_values
    from tests.conformance.store_cases import Deployment
else:
    import page_values

HOST_RATIO = 2.0  # SGLang's default --hicache-ratio
_RING = 4  # states of a window
_DRAFTS = ("draft", "draft_swa")


@dataclass(frozen=True, slots=True)
class Rank:
    """A rank's coordinates; `tp` counts within the attention TP group."""

    pp: int
    cp: int
    tp: int


@dataclass(slots=True)
class RankPools:
    """Pools of one rank by name, and the rank's layers on each pool's layer axis."""

    profile: Mapping[str, Any]
    rank: Rank
    host: dict[str, Any] = field(default_factory=dict)
    device: dict[str, Any] = field(default_factory=dict)
    layers: dict[str, slice] = field(default_factory=dict)

    def add(self, table: Mapping[str, Any], device: Any, host: Any) -> None:
        name = table["name"]
        self.device[name], self.host[name] = device, host
        if table["kind"] in ("logical", "opaque"):
            self.layers[name] = slice(None)
            return
        numbers, held = _numbers(table), _held(table, self.profile, self.rank)
        start = numbers.index(held[0])
        # Packed draft layers follow the last stage's own.
        packed = table.get("packed_draft_layers", 0) if held[-1] == numbers[-1] else 0
        self.layers[name] = slice(start, start + len(held) + packed)

    def values(self, name: str, salt: int) -> page_values.Parts:
        """Return the values that one page of a pool must have."""
        table = next(pool for pool in self.profile["pools"] if pool["name"] == name)
        whole = page_values.logical_page(table, self.profile["page_size"], salt)
        tp, dcp = self.profile.get("tp", 1), self.profile.get("dcp", 1)
        mine = page_values.shard(table, whole, self.layers[name], self.rank.tp, tp)
        if dcp == 1 or name != "kv":
            return mine
        return page_values.tokens_of(mine, self.rank.tp % dcp, dcp)


def ranks(profile: Mapping[str, Any]) -> list[Rank]:
    """Return every rank of a deployment with its own attention KV."""
    return [
        Rank(pp, cp, tp)
        for pp in range(profile.get("pp", 1))
        for cp in range(profile.get("cp", 1))
        for tp in range(profile.get("tp", 1))
    ]


@contextlib.contextmanager
def parallel(deployment: Deployment, rank: Rank) -> Iterator[None]:
    """Set this process's rank in SGLang, as its process groups would."""
    from sglang.srt.runtime_context import get_flags, get_parallel

    profile = deployment.profile
    tp, cp, pp, dcp = (profile.get(name, 1) for name in ("tp", "cp", "pp", "dcp"))
    groups = 2 if deployment.attention_dp else 1
    # Rank layout (dp, cp, tp), tp changing fastest: runtime_context.derive_attention_ranks.
    values = {
        "tp_rank": rank.cp * tp + rank.tp,
        "tp_size": groups * cp * tp,
        "attn_tp_rank": rank.tp,
        "attn_tp_size": tp,
        "attn_dp_rank": 0,
        "attn_cp_rank": rank.cp,
        "attn_cp_size": cp,
        "pp_rank": rank.pp,
        "pp_size": pp,
        "attn_dcp_rank": rank.tp % dcp,
        "attn_dcp_size": dcp,
        "dcp_enabled": dcp > 1,
    }
    with (
        get_parallel().override(**values),
        get_flags().dp.override(enabled=deployment.attention_dp),
    ):
        yield


def build_pools(deployment: Deployment, rank: Rank, pages: int) -> RankPools:
    """Build every pool of a rank, with room for at least `pages` pages."""
    from sglang.srt.mem_cache.pool_host import base

    # SGLang reserves 10 GB for others, which a small test machine may not have.
    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0
    profile = deployment.profile
    tables = {pool["name"]: pool for pool in profile["pools"]}
    size = pages * profile["page_size"]
    if tables["kv"]["kind"] == "logical":
        return _compressed_pools(RankPools(profile, rank), pages)
    if tables["kv"]["kind"] == "opaque":
        return _page_row_pools(RankPools(profile, rank), size)
    if tables["kv"]["kind"] == "mla":
        device = _mla_device(profile, tables, rank, size)
    else:
        device = _mha_device(profile, tables["kv"], rank, size)
    pools = RankPools(profile, rank)
    more = {**_packed(profile, rank, size), **_dcp(profile, rank)}
    pools.add(tables["kv"], device, _host(device, profile, **more))
    if _is_mxfp8(tables["kv"]):
        from sglang.srt.mem_cache.pool_host.mha_mxfp8 import MHATokenToKVPoolMXFP8Host

        # Its constructor refuses machines without a GPU.
        host = pools.host["kv"]
        host.__class__ = MHATokenToKVPoolMXFP8Host
        host.k_sf_page_bytes = host.v_sf_page_bytes = profile["page_size"]  # of scales
    if "indexer" in tables:
        pools.add(tables["indexer"], device, _indexer_host(device, pools))
    if "swa" in tables:
        window = _mha_device(profile, tables["swa"], rank, size)
        pools.add(tables["swa"], window, _host(window, profile))
    for table in (tables[name] for name in _DRAFTS if name in tables):
        if _held(table, profile, rank):
            draft = _draft_device(profile, table, rank, size)
            capacity = pools.host["kv"].logical_size  # the draft uses kv's indices
            pools.add(table, draft, _host(draft, profile, host_token_capacity=capacity))
    if "mamba" in tables:
        table = tables["mamba"]
        states = _mamba_device(deployment, table, _numbers(table), pages)
        drafts = [
            _mamba_device(deployment, table, [number], pages)
            for number in range(table.get("packed_draft_layers", 0))
        ]
        pools.add(table, states, _mamba_host(states, profile, drafts))
    return pools


def _is_mxfp8(table: Mapping[str, Any]) -> bool:
    return bool(table.get("dtype") == "mxfp8")


def _numbers(table: Mapping[str, Any]) -> list[int]:
    layers = table["layers"]
    return list(range(layers)) if isinstance(layers, int) else list(layers)


def _stage(profile: Mapping[str, Any], rank: Rank) -> tuple[int, int]:
    """Return the model layers [start, end) of the rank's pipeline stage."""
    partition = profile.get("pp_partition")
    if not partition:
        return 0, 1 << 30
    return sum(partition[: rank.pp]), sum(partition[: rank.pp + 1])


def _held(table: Mapping[str, Any], profile: Mapping[str, Any], rank: Rank) -> list[int]:
    """Return the model layers of a pool that a rank holds; a draft is on the last stage only."""
    if table["name"] in _DRAFTS:
        return _numbers(table) if rank.pp == profile.get("pp", 1) - 1 else []
    start, end = _stage(profile, rank)
    held = [number for number in _numbers(table) if start <= number < end]
    if not profile.get("cp_layer_split"):
        return held
    from sglang.srt.layers.cp.utils import get_layer_shard_range

    kv = [number for number in _numbers(profile["pools"][0]) if start <= number < end]
    owned = kv[slice(*get_layer_shard_range(rank.cp, profile["cp"], len(kv)))]
    return [number for number in held if number in owned]


def _mha_device(profile: Mapping[str, Any], table: Mapping[str, Any], rank: Rank, size: int) -> Any:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    held = _held(table, profile, rank)
    return MHATokenToKVPool(
        size=size,
        page_size=profile["page_size"],
        dtype=torch.float8_e4m3fn if _is_mxfp8(table) else getattr(torch, table["dtype"]),
        head_num=max(1, table["kv_heads"] // profile.get("tp", 1)),
        head_dim=table["head_dim"],
        v_head_dim=table.get("v_head_dim"),
        layer_num=len(held),
        device="cpu",
        enable_memory_saver=False,
        start_layer=held[0],
        end_layer=held[-1],
        enable_alt_stream=False,
    )


def _mla_device(
    profile: Mapping[str, Any], tables: Mapping[str, Any], rank: Rank, size: int
) -> Any:
    from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool, MLATokenToKVPool

    table = tables["kv"]
    start, end = _stage(profile, rank)
    numbers = [number for number in _numbers(table) if start <= number < end]
    common = {
        "size": size,
        "page_size": profile["page_size"],
        "kv_lora_rank": table["kv_lora_rank"],
        "qk_rope_head_dim": table["qk_rope_head_dim"],
        "layer_num": len(numbers),
        "device": "cpu",
        "enable_memory_saver": False,
    }
    if "indexer" not in tables:
        fp8 = table["row"] == "fp8"
        return MLATokenToKVPool(dtype=torch.float8_e4m3fn if fp8 else torch.bfloat16, **common)
    scaled = table["row"] == "fp8_scaled"
    indexed = _numbers(tables["indexer"])
    common |= {
        "dtype": torch.float8_e4m3fn if scaled else torch.bfloat16,
        "kv_cache_dim": 656 if scaled else table["kv_lora_rank"] + table["qk_rope_head_dim"],
        "index_head_dim": tables["indexer"]["index_head_dim"],
        "skip_topk_layers": [number not in indexed for number in numbers],
    }
    if not profile.get("cp_layer_split"):
        return DSATokenToKVPool(**common)
    return _layer_split_device(rank, profile["cp"], common)


def _packed(profile: Mapping[str, Any], rank: Rank, size: int) -> dict[str, Any]:
    """Return the host pool's arguments for draft layers that are packed behind the target's."""
    table = profile["pools"][0]
    numbers = _numbers(table)
    if not table.get("packed_draft_layers") or _held(table, profile, rank)[-1] != numbers[-1]:
        return {}
    last = {**table, "layers": numbers[-1:]}
    drafts = [_mha_device(profile, last, rank, size) for _ in range(table["packed_draft_layers"])]
    return {"draft_buffer_infos": [d.get_device_pool_infos()[0].buffer_info for d in drafts]}


def _dcp(profile: Mapping[str, Any], rank: Rank) -> dict[str, int]:
    """Return the arguments of a host pool that has every dcp-th token of a page."""
    size = profile.get("dcp", 1)
    return {} if size == 1 else {"dcp_size": size, "dcp_rank": rank.tp % size}


def _compressed_pools(pools: RankPools, pages: int) -> RankPools:
    """Add the pools of a model like DeepSeek-V4: an anchor without bytes, and compressed pages."""
    from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool
    from sglang.srt.mem_cache.memory_pool_host import (
        DeepSeekV4PagedHostPool,
        DeepSeekV4StateHostPool,
        LogicalHostPool,
    )

    class NoDeviceMemory(DeepSeekV4TokenToKVPool):  # type: ignore[misc]
        """A device pool that storage does not look into."""

        def __init__(self) -> None:
            self.device, self.layer_num = "cpu", len(profile["pools"][1]["layers"])

        def register_layer_transfer_counter(self, layer_transfer_counter: Any) -> None:
            pass

    profile = pools.profile
    device = NoDeviceMemory()
    page_size, slots = profile["page_size"], int(HOST_RATIO * pages)
    common = {"layout": profile["layout"]}
    for table in profile["pools"]:
        name = table["name"]
        page = page_values.logical_page(table, page_size, 0)["page"]
        count, nbytes = page.shape if page.ndim > 1 else (0, 0)
        if table["kind"] == "logical":
            host = LogicalHostPool(slots * page_size, page_size, **common)
        elif name.endswith("_state"):
            states = torch.zeros(_RING, nbytes // _RING // 4)  # of float32
            ring = SimpleNamespace(kv_score_buffer=SimpleNamespace(kv_score=states))
            ring.ring_size = _RING
            layers = [ring] * count
            host = DeepSeekV4StateHostPool(
                name, layers, slots, page_size, pin_memory=False, **common
            )
        else:
            buffers = [torch.zeros((1, nbytes), dtype=torch.uint8)] * count
            host = DeepSeekV4PagedHostPool(
                name,
                buffers,
                nbytes,
                slots,
                page_size,
                pin_memory=False,
                page_aligned_only=True,
                **common,
            )
        pools.add(table, device, host)
    return pools


def _page_row_pools(pools: RankPools, size: int) -> RankPools:
    """Add the pools of MiniMax-M3 in NVFP4: a row of codes and scales for each page and layer."""
    from sglang.srt.mem_cache import minimax_m3_nvfp4_pool as device_pools
    from sglang.srt.mem_cache.pool_host import minimax_m3_nvfp4 as host_pools

    kv, indexer = pools.profile["pools"]
    page_size, head_dim = pools.profile["page_size"], 128
    row_of_head = 2 * page_size * (head_dim // 2 + head_dim // 16)  # K and V, with their scales
    common = (size, page_size, torch.bfloat16)
    rest = {"device": "cpu", "enable_memory_saver": False}
    heads = kv["nbytes"] // kv["layers"] // row_of_head
    rows = device_pools.MiniMaxM3Nvfp4MainKVPool(*common, heads, head_dim, kv["layers"], **rest)
    keys = device_pools.MiniMaxM3Nvfp4IndexKPool(*common, 1, head_dim, indexer["layers"], **rest)
    placed = {"layout": pools.profile["layout"], "pin_memory": False, "start_layer": 0}
    host = host_pools.MiniMaxM3Nvfp4MainKVPoolHost(
        rows.get_device_pool_infos()[0].buffer_info,
        HOST_RATIO,
        0,
        page_size,
        device_capacity_tokens=rows.size,
        end_layer=kv["layers"] - 1,
        **placed,
    )
    pools.add(kv, rows, host)
    sidecar = host_pools.MiniMaxM3Nvfp4IndexKPoolHost(
        keys.get_device_pool_infos()[0].buffer_info,
        host,
        end_layer=indexer["layers"] - 1,
        **placed,
    )
    pools.add(indexer, keys, sidecar)
    return pools


def _draft_device(
    profile: Mapping[str, Any], table: Mapping[str, Any], rank: Rank, size: int
) -> Any:
    """Return a draft's device pool, whose kind can differ from the target's."""
    if table["kind"] == "mla":
        return _mla_device(profile, {"kv": table}, rank, size)
    return _mha_device(profile, table, rank, size)


def _layer_split_device(rank: Rank, cp: int, arguments: Mapping[str, Any]) -> Any:
    from sglang.srt.mem_cache.dsa_cache_layer_split import LayerSplitDSATokenToKVPool

    class OneProcess(LayerSplitDSATokenToKVPool):  # type: ignore[misc]
        """A pool without the broadcast of layers to other ranks, which storage does not need."""

        def _init_layer_broadcast_comm(self) -> None:
            pass

    return OneProcess(layer_shard_rank=rank.cp, layer_shard_size=cp, **arguments)


def _mamba_device(
    deployment: Deployment, table: Mapping[str, Any], layers: list[int], slots: int
) -> Any:
    from sglang.srt.mem_cache.memory_pool import MambaPool

    linear = deployment.linear_attention
    assert linear is not None
    tp = deployment.profile.get("tp", 1)
    parameters = _cache_parameters(linear, tp, layers)
    if table["kind"] == "mamba":
        _check_profile_shapes(table, parameters.shape, tp)
    pool = MambaPool(
        size=slots,
        spec_state_size=slots,
        cache_params=parameters,
        mamba_layer_ids=layers,
        device="cpu",
    )
    if "side_states" in linear:
        _add_side_states(pool, slots, **linear["side_states"])
    return pool


def _cache_parameters(linear: Mapping[str, Any], tp: int, layers: list[int]) -> Any:
    """Return the shapes and dtypes of a rank's states, as SGLang computes them."""
    if "config" in linear:  # the rank is set (`parallel`)
        module = importlib.import_module(f"sglang.srt.configs.{linear['module']}")
        # Inkling asks for a flag of the server.
        flags = SimpleNamespace(comm=SimpleNamespace(enable_scattered_sconv=False))
        with mock.patch.object(module, "get_exec", return_value=flags, create=True):
            return getattr(module, linear["config"])(**linear["arguments"]).mamba2_cache_params
    from sglang.srt.configs import mamba_utils

    shape = getattr(mamba_utils, linear["shape"]).create(tp_world_size=tp, **linear["arguments"])
    parameters = linear["shape"].replace("StateShape", "CacheParams")
    return getattr(mamba_utils, parameters)(shape=shape, layers=layers)


def _add_side_states(
    pool: Any, slots: int, *, layers: list[int], state: list[int], context: int
) -> None:
    """Register the states that n-gram layers keep for each slot, as HybridReqToTokenPool does."""
    from sglang.srt.mem_cache.ple_state_pool import NGramPool, ShortConvPool

    windows = ShortConvPool(
        size=slots,
        state_shape=tuple(state),
        layer_ids=layers,
        dtype=torch.bfloat16,
        device="cpu",
    )
    pool.register_slot_state(windows)
    pool.register_slot_state(
        NGramPool(size=slots, context_len=context, eos_token_id=0, device="cpu")
    )


def _check_profile_shapes(table: Mapping[str, Any], shape: Any, tp: int) -> None:
    """Raise AssertionError unless our profile's shards have the shapes that SGLang computes."""
    temporal = [shape.temporal] if 0 not in shape.temporal else []
    ours = [*([table["temporal"]] if temporal else []), *table["conv"]]
    for state, actual in zip(ours, [*temporal, *shape.conv], strict=True):
        sharded, axis = list(state["shape"]), state["shard_axis"]
        groups = state.get("groups", [sharded[axis]])
        sharded[axis] = sum(
            group if number in state.get("whole", ()) else max(group // tp, state.get("least", 0))
            for number, group in enumerate(groups)
        )
        if sharded != list(actual):
            raise AssertionError(f"profile states {sharded} at TP {tp}, SGLang {actual}")


def _host(device: Any, profile: Mapping[str, Any], **more: Any) -> Any:
    """Return a host pool like hybrid_pool_assembler.build_kv_host_pool's, but not pinned."""
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
    from sglang.srt.mem_cache.pool_host import mha, mla

    is_mla = isinstance(device, MLATokenToKVPool)
    common = {
        "host_to_device_ratio": HOST_RATIO,
        "host_size": 0,
        "page_size": profile["page_size"],
        "layout": profile["layout"],
        "pin_memory": False,
        **more,
    }
    if is_mla:
        common["override_kv_cache_dim"] = device.kv_cache_dim
    if not hasattr(device, "get_device_pool_infos"):  # 0.5.18 passes the device pool itself
        return (mla.MLATokenToKVPoolHost if is_mla else mha.MHATokenToKVPoolHost)(device, **common)
    info = device.get_device_pool_infos()[0].buffer_info
    common |= {
        "device_capacity_tokens": device.size,
        "start_layer": device.start_layer,
        "end_layer": device.end_layer,
    }
    if not is_mla:
        return mha.get_mha_host_pool_cls(info)(info, **common)
    shards = device.layer_shard_size if device.layer_shard_enabled else 1
    return mla.MLATokenToKVPoolHost(
        info,
        target_layer_num=-(-device.layer_num // shards),
        layer_shard_enabled=device.layer_shard_enabled,
        **common,
    )


def _indexer_host(device: Any, pools: RankPools) -> Any:
    from sglang.srt.mem_cache.pool_host.dsa import DSAIndexerPoolHost

    declaration = next(
        decl for decl in device.host_pool_decls() if decl.pool_name.value == "indexer"
    )
    return DSAIndexerPoolHost(declaration, pools.host["kv"], pin_memory=False)


def _mamba_host(device: Any, profile: Mapping[str, Any], drafts: list[Any]) -> Any:
    from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost

    common = {
        "host_to_device_ratio": HOST_RATIO,
        "host_size": 0,
        "pin_memory": False,
        "layout": profile["layout"],
    }
    if "device_capacity" not in inspect.signature(MambaPoolHost).parameters:  # 0.5.18
        return MambaPoolHost(device, **common)
    if drafts:
        behind = [draft.get_device_pool_infos()[0].buffer_info for draft in drafts]
        common["mtp_draft_buffer_infos"] = behind
    info = device.get_device_pool_infos()[0].buffer_info
    return MambaPoolHost(info, device_capacity=device.size, **common)
