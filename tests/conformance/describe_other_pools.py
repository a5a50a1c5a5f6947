"""Describe the host pools of models that no profile describes, as the plug-in serves them.

Runs inside the SGLang environment. Prints a JSON list with an entry for each pool and layout: name,
layout; by_layer and page (the bytes of a page, layer by layer and as SGLang stores them);
nbytes, parts (name and bytes of each), identity, drafted (its identity in a server with a draft),
wrong (as in describe_pools.py); or refusal, the message of a ValueError.

The pools are SGLang's; only the device memory that they mirror is small.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.conformance import describe_pools
    from tests.conformance.store_cases import LAYOUTS
else:
    import describe_pools
    from store_cases import LAYOUTS

LAYERS, PAGES, PAGE_SIZE = 3, 5, 8
# A host pool's page size, pages and memory are those of the anchor.
_ANCHOR = SimpleNamespace(
    page_size=PAGE_SIZE, page_num=PAGES, size=PAGES * PAGE_SIZE, device="cpu", pin_memory=False
)


def answer(question: None) -> list[dict[str, Any]]:
    """Describe all pools in all layouts."""
    return [_row(name, layout) for name in _POOLS for layout in LAYOUTS[:3]]


def _row(name: str, layout: str) -> dict[str, Any]:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

    from hicachectl.backends.sglang.context import Context
    from hicachectl.backends.sglang.pools import served_pool

    ranks = dict.fromkeys(("tp_rank", "pp_rank", "attn_cp_rank"), 0)
    sizes = dict.fromkeys(("tp_size", "pp_size", "attn_cp_size"), 1)
    config = HiCacheStorageConfig(
        **ranks,
        **sizes,
        is_mla_model=False,
        enable_storage_metrics=False,
        is_page_first_layout=layout == "page_first",
        model_name="tests/Tiny",
    )
    pool, build = _POOLS[name]
    host = build(layout)
    describe_pools.fill(host)
    page = host.get_data_page(PAGE_SIZE, flat=True).view(torch.uint8)
    row = {
        "name": name,
        "layout": layout,
        "page": page.numpy().tobytes().hex(),
        "by_layer": b"".join(_layers(host, layout)).hex(),
    }
    try:
        served = served_pool(pool, host, config, Context(weights="w", page_size=PAGE_SIZE))
    except ValueError as error:
        return {**row, "refusal": str(error)}
    context = Context(weights="w", draft_weights="d", page_size=PAGE_SIZE)
    return {
        **row,
        "nbytes": served.nbytes,
        "parts": [[part.name, part.nbytes] for part in served.parts],
        "identity": served.identity.hash().hex(),
        "drafted": served_pool(pool, host, config, context).identity.hash().hex(),
        "wrong": describe_pools.wrong_pages(served, host),
    }


def _layers(host: Any, layout: str) -> Iterator[bytes]:
    """Yield the bytes of the second page in each layer, by the axes of `init_kv_buffer`."""
    buffer = getattr(host, "kv_buffer", None)
    rows = 1  # of a page
    if buffer is None:
        buffer, rows = host.k_buffer, PAGE_SIZE
    for layer in range(host.layer_num):
        if layout == "layer_first":
            held = buffer[layer][rows : 2 * rows]
        elif layout == "page_first":
            held = buffer[rows : 2 * rows, layer]
        else:
            held = buffer[1, layer]
        yield held.contiguous().view(torch.uint8).numpy().tobytes()


def _compressed_states(layout: str) -> Any:
    """DeepSeek-V4: a ring of 4 states of 6 numbers for each window."""
    from sglang.srt.mem_cache.memory_pool_host import DeepSeekV4StateHostPool

    states = SimpleNamespace(kv_score=torch.zeros(16, 6))
    device = [SimpleNamespace(kv_score_buffer=states, ring_size=4)] * LAYERS
    return DeepSeekV4StateHostPool(
        "c4_state", device, PAGES, PAGE_SIZE, layout=layout, pin_memory=False
    )


def _compressed_keys(layout: str) -> Any:
    """QSA: one key of 16 numbers for each 4 tokens."""
    from sglang.srt.mem_cache.pool_host.qsa import QSAIndexerPoolHost

    device = SimpleNamespace(
        qsa_compress_ratio=4,
        qsa_compressed_k_buffer_pool=[torch.zeros(16, 16, dtype=torch.bfloat16)] * LAYERS,
    )
    return QSAIndexerPoolHost(device, SimpleNamespace(**vars(_ANCHOR), layout=layout))


def _only_keys(layout: str) -> Any:
    """MiniMax: index keys of one head."""
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKOnlyPoolHost

    device = SimpleNamespace(
        store_dtype=torch.bfloat16,
        start_layer=0,
        end_layer=LAYERS - 1,
        head_num=1,
        head_dim=16,
        layer_num=LAYERS,
        k_buffer=[torch.zeros(1)] * LAYERS,
        device="cpu",
    )
    return MHATokenToKOnlyPoolHost(device, _ANCHOR, layout, pin_memory=False)


def _page_rows() -> Any:
    from sglang.srt.mem_cache.device_pool_info import PageRowBufferInfo

    slab = torch.zeros(LAYERS, PAGES, 40, dtype=torch.uint8)
    return PageRowBufferInfo(
        slab=slab, rows=tuple(slab), row_bytes=40, page_size=PAGE_SIZE, num_pages=PAGES
    )


def _packed_keys(layout: str) -> Any:
    """MiniMax with NVFP4: index keys and their scales in one row."""
    from sglang.srt.mem_cache.pool_host.minimax_m3_nvfp4 import MiniMaxM3Nvfp4IndexKPoolHost

    ends = {"start_layer": 0, "end_layer": LAYERS - 1}
    return MiniMaxM3Nvfp4IndexKPoolHost(_page_rows(), _ANCHOR, layout, pin_memory=False, **ends)


def _packed_rows(layout: str) -> Any:
    """MiniMax with NVFP4: K, V and their scales in one row, stored in two halves of the layers."""
    from sglang.srt.mem_cache.pool_host.minimax_m3_nvfp4 import MiniMaxM3Nvfp4MainKVPoolHost

    return MiniMaxM3Nvfp4MainKVPoolHost(
        _page_rows(),
        2.0,
        0,
        PAGE_SIZE,
        layout,
        pin_memory=False,
        device_capacity_tokens=PAGES * PAGE_SIZE,
        start_layer=0,
        end_layer=LAYERS - 1,
    )


_POOLS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "compressed states": ("deepseek_v4_c4_state", _compressed_states),
    "compressed keys": ("indexer", _compressed_keys),
    "only keys": ("indexer", _only_keys),
    "packed keys": ("indexer", _packed_keys),
    "packed rows": ("kv", _packed_rows),
}
