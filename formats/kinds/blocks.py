"""Kind blocks, one block of bytes of unknown form for each layer (states of DeepSeek-V4).

Source: SGLang srt/mem_cache/memory_pool_host.py :: DeepSeekV4StateHostPool.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicachectl.formats.kinds.base import PoolKind
from hicachectl.formats.layouts import HEADLESS_LAYOUTS, PAGE_FIRST_LAYOUTS, TensorLayout

if TYPE_CHECKING:
    from hicachectl.formats.kinds.pool import Pool


class Blocks(PoolKind):
    """Blocks of `nbytes` bytes, equal on all TP ranks. Layers are outermost in every layout."""

    name = "blocks"
    summary = "layers, nbytes of one layer; hicachectl does not interpret the bytes."
    words = "a pool of blocks"
    required = ("layers", "nbytes")
    shards = False
    host_layouts = HEADLESS_LAYOUTS
    identified = interpreted = False
    nixl_layouts = PAGE_FIRST_LAYOUTS

    def tensors(self, pool: Pool, layers: int, tokens: int, tp: int) -> tuple[TensorLayout, ...]:
        """Return one block per layer."""
        return (TensorLayout("blocks", ("layer", "block"), (layers, pool.nbytes), "uint8"),)
