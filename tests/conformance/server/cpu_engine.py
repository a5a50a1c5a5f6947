"""What SGLang needs besides its own code to serve with HiCache on a CPU.

Runs inside the SGLang environment. Replaced, each by something that does the same or fails when
used:

    sgl_kernel                           a stand-in whose attributes can be imported, not called
    pool_host/mha.py :: transfer_kv_*    copies between host and device pools, in torch; the wheel
                                         takes them from sgl_kernel.kvcacheio on CUDA only
    pool_host/base.py :: HostKVCache     pin_memory is False: no device needs pinned memory
    torch.cpu.Event                      accepts `enable_timing` and has `elapsed_time`
    torch.empty, torch.tensor, …         ignore pin_memory, which adapters ask for

The copies are synchronous, so a race between a copy and a forward pass cannot show.
"""

from __future__ import annotations

import functools
import importlib
import importlib.machinery
import inspect
import sys
import time
from typing import TYPE_CHECKING, Any
from unittest import mock

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_CPU_OMP_THREADS_BIND": "0",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}


_PINNING = ("empty", "zeros", "ones", "tensor", "arange", "full", "empty_like", "zeros_like")


class NotCallable(mock.NonCallableMagicMock):
    """A value whose attributes exist; a call of it or of them raises TypeError."""

    def _get_child_mock(self, /, **options: Any) -> NotCallable:
        return NotCallable(**options)


def install() -> None:
    """Make the replacements, before the server imports the modules that use them."""
    import torch

    stand_in = NotCallable(name="sgl_kernel")
    stand_in.__spec__ = importlib.machinery.ModuleSpec("sgl_kernel", None)
    sys.modules["sgl_kernel"] = stand_in
    torch.cpu.Event = _timed(torch.cpu.Event)  # type: ignore[misc]
    for name in _PINNING:
        setattr(torch, name, _unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda tensor, *_, **__: tensor  # type: ignore[method-assign]
    base = importlib.import_module("sglang.srt.mem_cache.pool_host.base")
    base.HostKVCache.__init__ = _without_pinning(base.HostKVCache.__init__)
    mha = importlib.import_module("sglang.srt.mem_cache.pool_host.mha")
    for copy in (
        transfer_kv_all_layer_lf_pf,
        transfer_kv_per_layer_pf_lf,
        transfer_kv_all_layer_direct_lf_pf,
        transfer_kv_per_layer_direct_pf_lf,
    ):
        setattr(mha, copy.__name__, copy)


def _unpinned(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def made(*arguments: Any, pin_memory: bool = False, **options: Any) -> Any:
        return make(*arguments, **options)

    return made


def _timed(event: type[Any]) -> type[Any]:
    class Timed(event):  # type: ignore[misc]
        def __init__(self, enable_timing: bool = False) -> None:
            self._at = 0.0

        def record(self, stream: object = None) -> None:
            self._at = time.perf_counter()

        def elapsed_time(self, end: Timed) -> float:
            """Return the milliseconds until another event."""
            return (end._at - self._at) * 1e3

    return Timed


def _without_pinning(initialize: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(initialize)

    @functools.wraps(initialize)
    def unpinned(*arguments: Any, **options: Any) -> None:
        bound = signature.bind(*arguments, **options)
        bound.arguments["pin_memory"] = False
        initialize(*bound.args, **bound.kwargs)

    return unpinned


# Copies. A device pool has a tensor of [token slot, head, dim] per layer, for K and for V. The host
# pool has one tensor each for K and V: page_first [token slot, layer, head, dim], page_first_direct
# [page, layer, token, head, dim]. Indices name token slots; those of a page are consecutive.


def transfer_kv_all_layer_lf_pf(
    *,
    src_k_layers: Any,
    dst_k: Any,
    src_v_layers: Any,
    dst_v: Any,
    src_indices: Any,
    dst_indices: Any,
    item_size: int,
    dst_layout_dim: int,
    num_layers: int,
    **tuning: Any,
) -> None:
    """Copy tokens of all layers, device to page_first host; `src_*_layers`: [layers] pointers."""
    for pointers, host in ((src_k_layers, dst_k), (src_v_layers, dst_v)):
        slots = _rows(host, dst_layout_dim).view(-1, num_layers, item_size)
        for layer, pointer in enumerate(pointers.tolist()):
            device = _bytes_at(pointer, int(src_indices.max()) + 1, item_size)
            slots[dst_indices.long(), layer] = device[src_indices.long()]


def transfer_kv_per_layer_pf_lf(
    *,
    src_k: Any,
    dst_k: Any,
    src_v: Any,
    dst_v: Any,
    src_indices: Any,
    dst_indices: Any,
    layer_id: int,
    item_size: int,
    src_layout_dim: int,
    **tuning: Any,
) -> None:
    """Copy tokens of one layer, page_first host to device."""
    for host, device in ((src_k, dst_k), (src_v, dst_v)):
        slots = _rows(host, src_layout_dim).view(-1, src_layout_dim // item_size, item_size)
        _rows(device, item_size)[dst_indices.long()] = slots[src_indices.long(), layer_id]


def transfer_kv_all_layer_direct_lf_pf(
    *,
    src_ptrs: Sequence[Any],
    dst_ptrs: Sequence[Any],
    src_indices: Any,
    dst_indices: Any,
    page_size: int,
) -> None:
    """Copy pages of all layers, device to page_first_direct host; `src_ptrs`: all K, then all V."""
    layers = len(src_ptrs) // len(dst_ptrs)
    slots = src_indices.long().view(-1, page_size)
    pages = dst_indices.long()[::page_size] // page_size
    for number, device in enumerate(src_ptrs):
        half, layer = divmod(number, layers)
        dst_ptrs[half][pages, layer] = device[slots]


def transfer_kv_per_layer_direct_pf_lf(
    *,
    src_ptrs: Sequence[Any],
    dst_ptrs: Sequence[Any],
    src_indices: Any,
    dst_indices: Any,
    layer_id: int,
    page_size: int,
) -> None:
    """Copy pages of one layer, page_first_direct host to device; both lists: K, V."""
    pages = src_indices.long()[::page_size] // page_size
    slots = dst_indices.long().view(-1, page_size)
    for host, device in zip(src_ptrs, dst_ptrs, strict=True):
        device[slots] = host[pages, layer_id]


def _rows(tensor: Any, nbytes: int) -> Any:
    """View a tensor as [rows, nbytes] uint8."""
    import torch

    return tensor.view(torch.uint8).view(-1, nbytes)


def _bytes_at(address: int, rows: int, nbytes: int) -> Any:
    import ctypes

    import torch

    buffer = (ctypes.c_uint8 * (rows * nbytes)).from_address(address)
    return torch.frombuffer(buffer, dtype=torch.uint8).view(rows, nbytes)
