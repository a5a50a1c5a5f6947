"""Offer pools and deployments to the plug-in that it must refuse; print what it says.

Runs inside the SGLang environment. Prints a JSON object: the message of each refusal by the name of
its function below; null for what was served.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.conformance import rank_pools
    from tests.conformance.store_cases import CASES, MOONCAKE_CASES
else:
    import rank_pools
    from store_cases import CASES, MOONCAKE_CASES

_OFFERS: dict[str, Callable[[], None]] = {}


def answer(question: None) -> dict[str, str | None]:
    """Make all offers."""
    return {name: _refusal(offer) for name, offer in _OFFERS.items()}


def _refusal(offer: Callable[[], None]) -> str | None:
    try:
        offer()
    except ValueError as error:
        return str(error)
    return None


def _offered(offer: Callable[[], None]) -> Callable[[], None]:
    _OFFERS[offer.__name__] = offer
    return offer


def _hosts(case: str, **profile: Any) -> dict[str, Any]:
    """Return the host pools of a case's first rank."""
    deployment = {**MOONCAKE_CASES, **CASES}[case].deployments[0]
    deployment = dataclasses.replace(deployment, profile={**deployment.profile, **profile})
    rank = rank_pools.Rank(0, 0, 0)
    with rank_pools.parallel(deployment, rank):
        return rank_pools.build_pools(deployment, rank, 3).host


def _serve(name: str, host: Any, **config: Any) -> None:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

    from hicachectl.backends.sglang.context import Context
    from hicachectl.backends.sglang.pools import served_pool

    ranks = dict.fromkeys(("tp_rank", "pp_rank", "attn_cp_rank"), 0)
    sizes = dict.fromkeys(("tp_size", "pp_size", "attn_cp_size"), 1)
    given = HiCacheStorageConfig(
        **{
            **ranks,
            **sizes,
            "is_mla_model": False,
            "enable_storage_metrics": False,
            "is_page_first_layout": True,
            "model_name": "tests/Tiny",
            **config,
        }
    )
    served_pool(name, host, given, Context(weights="w", page_size=8))


# Pools of the case stores in deployments that have such settings: pool, case, and settings.
_SETTINGS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "dcp": (
        "kv",
        "mla_mla_draft",
        {"dcp_size": 2, "tp_size": 2, "logical_page_size": 16, "is_mla_model": True},
    ),
    "tp_lcm_size": ("kv", "gqa_tp2", {"tp_lcm_size": 2}),
    "no_model": ("kv", "gqa_tp2", {"model_name": None}),
    "unknown_pool": ("c9000", "gqa_tp2", {}),
    "headed_draft_on_one_rank": ("draft", "mla_mha_draft", {"is_mla_model": True}),
}


def _serve_with_settings(name: str, case: str, settings: dict[str, Any]) -> None:
    hosts = _hosts(case)
    _serve(name, hosts.get(name, hosts["kv"]), **settings)


_OFFERS.update({name: partial(_serve_with_settings, *it) for name, it in _SETTINGS.items()})


@_offered
def split_heads() -> None:
    """Heads split for several TP sizes."""
    kv = _hosts("gqa_tp2", layout="page_head")["kv"]
    _serve("kv", kv, should_split_heads=True, tp_lcm_size=4, tp_size=2)


@_offered
def unknown_form() -> None:
    """A host pool of a newer SGLang, which may order bytes differently."""
    host = _hosts("gqa_tp2")["kv"]
    host.__class__ = type("InterleavedPoolHost", (type(host),), {})
    _serve("kv", host)


@_offered
def unknown_layout() -> None:
    """A layout with K and V in two buffers."""
    host = _hosts("mla_mla_draft")["kv"]
    host.layout = "page_first_kv_split"
    _serve("kv", host, is_mla_model=True)


@_offered
def page_envelope() -> None:
    """Pages that hold all pools."""
    host = _hosts("gqa_tp2")["kv"]
    host.stores_page_envelope = True
    _serve("kv", host)


@_offered
def sharded_pages() -> None:
    """SGLang's pool with pages divided over ranks."""
    from sglang.srt.mem_cache.pool_host.page_interleave import PageInterleaveHostPool

    host = PageInterleaveHostPool.__new__(PageInterleaveHostPool)
    host.host_pool = _hosts("gqa_tp2")["kv"]
    _serve("kv", host)


@_offered
def no_memory() -> None:
    """SGLang's MLA pool without memory, as on ranks that share one host copy."""
    from sglang.srt.mem_cache.pool_host.mla import MLAHostAllocation, MLATokenToKVPoolHost

    allocation = MLAHostAllocation(
        dtype=torch.bfloat16,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        kv_cache_dim=576,
        size_per_token=1152,
    )
    host = MLATokenToKVPoolHost(
        allocation,
        host_to_device_ratio=2.0,
        host_size=0,
        page_size=8,
        layout="page_first",
        pin_memory=False,
        device_capacity_tokens=32,
        start_layer=0,
        end_layer=0,
        target_layer_num=1,
    )
    _serve("kv", host, is_mla_model=True)


@_offered
def asymmetric() -> None:
    """SGLang's pool for K and V of different width."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    device = MHATokenToKVPool(
        size=32,
        page_size=8,
        dtype=torch.bfloat16,
        head_num=2,
        head_dim=64,
        v_head_dim=32,
        layer_num=2,
        device="cpu",
        enable_memory_saver=False,
        start_layer=0,
        end_layer=1,
        enable_alt_stream=False,
    )
    _serve("kv", rank_pools._host(device, {"page_size": 8, "layout": "page_first"}))


@_offered
def mxfp8() -> None:
    """SGLang's pool with scales outside the pages; its kernels need a GPU."""
    from sglang.srt.mem_cache.pool_host.mha_mxfp8 import MHATokenToKVPoolMXFP8Host

    host = _hosts("gqa_tp2")["kv"]
    host.__class__ = MHATokenToKVPoolMXFP8Host
    _serve("kv", host)


@_offered
def indexer_in_layer_first() -> None:
    """A pool whose get_page_buffer_meta raises in its layout."""
    hosts = _hosts("mla_indexer", layout="layer_first")
    _serve("kv", hosts["kv"], is_mla_model=True)
    _serve("indexer", hosts["indexer"], is_mla_model=True)


@_offered
def states_beside_slots() -> None:
    """A Mamba pool whose get_page_buffer_meta raises for its side states."""
    host = _hosts("hybrid_mamba")["mamba"]
    host.slot_state_device_tensors = [torch.zeros(1)]
    _serve("mamba", host)


@_offered
def headed_draft_beside_latents() -> None:
    """A draft of K and V beside a target whose TP ranks share their objects."""
    hosts = _hosts("mla_mha_draft")
    _serve("kv", hosts["kv"], is_mla_model=True, tp_size=2)
    _serve("draft", hosts["draft"], is_mla_model=True, tp_size=2)


@_offered
def uneven_pages() -> None:
    """A pool whose pages do not follow each other."""
    host = _hosts("gqa_tp2")["kv"]
    stated = host.get_page_buffer_meta

    def moved(indices: Any) -> Any:
        pointers, sizes = stated(indices)
        return [pointer + 4096 * (int(indices[0]) == 16) for pointer in pointers], sizes

    host.get_page_buffer_meta = moved
    _serve("kv", host)


@_offered
def pages_elsewhere() -> None:
    """A pool whose last page ends behind its memory."""
    host = _hosts("gqa_tp2")["kv"]
    host.kv_buffer = host.kv_buffer.view(-1)[:-1]
    _serve("kv", host)
