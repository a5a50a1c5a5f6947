"""Host pools of an SGLang server and its own copies to and from device pools, for comparison.

Source: SGLang 0.5.23, srt/mem_cache/pool_host/ (mha.py, mla.py, dsa.py, mamba.py) ::
load_to_device_per_layer, backup_from_device_all_layer. On CUDA a server copies

    page_first         by JIT kernels: loads layer by layer; writes back through a staging buffer,
                       64 pages at a time. Without these kernels, by sgl_kernel.
    page_head          by sgl_kernel, layer by layer, and back all layers at once
    page_first_direct  by cudaMemcpyBatchAsync, one copy per page, layer and tensor
    indexer            loads by sgl_kernel, writes back by a JIT kernel
    states             by a JIT kernel
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicachectl.device.plans import PoolForm
    from tests.bench.bench_device import Case

STAGING_PAGES = 64  # pool_host/base.py :: _WRITE_BACK_STAGING_PAGE_CHUNK


def jit_kernels() -> Any:
    """Return the server's JIT kernels, or None if they are not installed."""
    try:
        from sglang.kernels.ops.kvcache import hicache
    except ImportError:
        return None
    return hicache


class ServerPools:
    """Host buffers of one kind of object, one per tensor, and the server's copies."""

    def __init__(
        self,
        case: Case,
        form: PoolForm,
        objects: torch.Tensor,
        pools: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        """Fill host buffers from objects ([n, bytes], host).

        pools, slots: memory of the device pools, and the page slot of each object.
        """
        from sgl_kernel import kvcacheio

        self._sgl, self._jit = kvcacheio, jit_kernels()
        self._case, count = case, len(slots)
        self.buffers = [
            objects[:, tensor.offset : tensor.offset + tensor.nbytes].contiguous().pin_memory()
            for tensor in form.tensors
        ]
        self._layers = [
            pools[count * piece.offset : count * (piece.offset + piece.layers * piece.slot_bytes)]
            .view(piece.layers, count * piece.tokens, piece.row_bytes)
            .unbind()
            for piece in form.pieces
        ]
        self._tables = [
            torch.tensor(
                [layer.data_ptr() for layer in layers], dtype=torch.uint64, device=pools.device
            )
            for layers in self._layers
        ]
        self._rows = [piece.row_bytes for piece in form.pieces]
        self._count, self._tokens = count, form.pieces[0].tokens
        within = torch.arange(self._tokens, device=slots.device)
        self._device_items = (slots[:, None] * self._tokens + within).reshape(-1)
        self._host_items = torch.arange(count * self._tokens, device=slots.device)
        self._device_items_cpu = self._device_items.cpu()
        self._host_items_cpu = self._host_items.cpu()
        self._staging: list[torch.Tensor] = []

    def copies(self) -> tuple[Callable[[], None], Callable[[], None]] | None:
        """Return what loads all layers and what writes them back; None if not installed."""
        if self._case.pool == "mamba":
            return (self._load_states, self._back_up_states) if self._jit else None
        if self._case.pool == "indexer":
            staged = self._jit and self._can_stage()
            return self._load_rows, self._back_up_staged if staged else self._back_up_rows
        layout = self._case.profile.layout
        if layout == "page_first_direct":
            return self._load_pages, self._back_up_pages
        if layout == "page_head":
            return self._load_heads, self._back_up_heads
        if self._jit is None:
            return self._load_rows, self._back_up_rows
        fits = self._jit.can_use_hicache_jit_kernel(
            element_size=self._rows[0], page_size=self._tokens
        )
        return (
            self._load_by_jit if fits else self._load_rows,
            self._back_up_staged if self._can_stage() else self._back_up_rows,
        )

    def _can_stage(self) -> bool:
        if not self._jit.can_use_write_back_jit_kernel(element_size=self._rows[0]):
            return False
        pages = min(self._count, STAGING_PAGES)
        self._staging = [
            torch.empty(
                (pages * self._tokens, len(layers), row), dtype=torch.uint8, device=layers[0].device
            )
            for layers, row in zip(self._layers, self._rows, strict=True)
        ]
        return True

    def _by_token(self) -> list[torch.Tensor]:
        return [
            buffer.view(-1, len(layers), row)
            for buffer, layers, row in zip(self.buffers, self._layers, self._rows, strict=True)
        ]

    def _load_by_jit(self) -> None:
        indices = {"indices_dst": self._device_items, "indices_src": self._host_items}
        hints = {"element_dim": self._rows[0], "page_size": self._tokens}
        sources = self._by_token()
        for layer, into in enumerate(zip(*self._layers, strict=True)):
            rows = [source[:, layer] for source in sources]
            if len(into) == 1:
                self._jit.transfer_hicache_one_layer_mla(
                    cache_dst=into[0], cache_src=rows[0], **indices, **hints
                )
            else:
                self._jit.transfer_hicache_one_layer(
                    k_cache_dst=into[0], v_cache_dst=into[1],
                    k_cache_src=rows[0], v_cache_src=rows[1], **indices, **hints,
                )  # fmt: skip

    def _back_up_staged(self) -> None:
        common = {
            "src_indices": self._device_items,
            "dst_indices": self._host_items_cpu,
            "page_size": self._tokens,
        }
        into = self._by_token()
        if len(into) == 1:
            self._jit.transfer_hicache_all_layer_mla_staged_lf_pf(
                ptr_src=self._tables[0], staging=self._staging[0], dst=into[0], **common
            )
        else:
            self._jit.transfer_hicache_all_layer_staged_lf_pf(
                k_ptr_src=self._tables[0], v_ptr_src=self._tables[1],
                staging_k=self._staging[0], staging_v=self._staging[1],
                dst_k=into[0], dst_v=into[1], **common,
            )  # fmt: skip

    def _load_rows(self) -> None:
        self._load_layers("pf_lf", {})

    def _back_up_rows(self) -> None:
        self._back_up_layers("lf_pf", {})

    def _heads(self) -> dict[str, int]:
        pool = next(pool for pool in self._case.profile.pools if pool.name == self._case.pool)
        assert pool.kv_heads
        return {"page_size": self._tokens, "head_num": pool.kv_heads}

    def _load_heads(self) -> None:
        self._load_layers("ph_lf", self._heads())

    def _back_up_heads(self) -> None:
        self._back_up_layers("lf_ph", self._heads())

    def _load_layers(self, name: str, hints: dict[str, int]) -> None:
        row, layers = self._rows[0], len(self._layers[0])
        kind = "" if len(self.buffers) == 2 else "mla_"
        load = getattr(self._sgl, f"transfer_kv_per_layer_{kind}{name}")
        for layer, into in enumerate(zip(*self._layers, strict=True)):
            both = [memory for pair in zip(self.buffers, into, strict=True) for memory in pair]
            load(
                *both, src_indices=self._host_items, dst_indices=self._device_items,
                layer_id=layer, item_size=row, src_layout_dim=row * layers, **hints,
            )  # fmt: skip

    def _back_up_layers(self, name: str, hints: dict[str, int]) -> None:
        row, layers = self._rows[0], len(self._layers[0])
        kind = "" if len(self.buffers) == 2 else "mla_"
        back_up = getattr(self._sgl, f"transfer_kv_all_layer_{kind}{name}")
        both = [each for pair in zip(self._tables, self.buffers, strict=True) for each in pair]
        back_up(
            *both, src_indices=self._device_items, dst_indices=self._host_items,
            item_size=row, dst_layout_dim=row * layers, num_layers=layers, **hints,
        )  # fmt: skip

    def _pages(self) -> list[torch.Tensor]:
        return [
            buffer.view(self._count, len(layers), self._tokens, row)
            for buffer, layers, row in zip(self.buffers, self._layers, self._rows, strict=True)
        ]

    def _load_pages(self) -> None:
        pages = self._pages()
        for layer, into in enumerate(zip(*self._layers, strict=True)):
            self._sgl.transfer_kv_per_layer_direct_pf_lf(
                src_ptrs=pages, dst_ptrs=list(into), src_indices=self._host_items_cpu,
                dst_indices=self._device_items_cpu, layer_id=layer, page_size=self._tokens,
            )  # fmt: skip

    def _back_up_pages(self) -> None:
        self._sgl.transfer_kv_all_layer_direct_lf_pf(
            src_ptrs=[layer for layers in self._layers for layer in layers],
            dst_ptrs=self._pages(), src_indices=self._device_items_cpu,
            dst_indices=self._host_items_cpu, page_size=self._tokens,
        )  # fmt: skip

    def _load_states(self) -> None:
        from sglang.kernels.ops.mamba.transfer_mamba import transfer_kv_mamba_pf_lf

        for buffer, layers, row in zip(self.buffers, self._layers, self._rows, strict=True):
            load = partial(
                transfer_kv_mamba_pf_lf, src=buffer, src_indices=self._host_items,
                dst_indices=self._device_items, item_size=row, src_layout_dim=row * len(layers),
            )  # fmt: skip
            for layer, into in enumerate(layers):
                load(dst=into, layer_id=layer)

    def _back_up_states(self) -> None:
        from sglang.kernels.ops.mamba.transfer_mamba import transfer_kv_mamba_lf_pf

        each = zip(self._tables, self.buffers, self._layers, self._rows, strict=True)
        for table, buffer, layers, row in each:
            transfer_kv_mamba_lf_pf(
                src_ptrs=table, dst=buffer, src_indices=self._device_items,
                dst_indices=self._host_items, item_size=row, dst_layout_dim=row * len(layers),
                num_layers=len(layers),
            )  # fmt: skip
