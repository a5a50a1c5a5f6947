"""Kind dsa_indexer, index keys of sparse attention: fp8 keys and scales, one block per layer.

Sources: SGLang srt/mem_cache/pool_host/dsa.py, srt/mem_cache/index_key_cache.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicachectl.formats.kinds.base import PoolKind
from hicachectl.formats.kinds.pool import PoolName
from hicachectl.formats.layouts import (
    HEADLESS_LAYOUTS,
    PAGE_FIRST_LAYOUTS,
    QUANT_BLOCK,
    Column,
    TensorLayout,
)

if TYPE_CHECKING:
    from hicachectl.formats.kinds.pool import Pool

INDEXER_POOLS = (
    PoolName(name="indexer", cp_split=True, mooncake="shared"),
    PoolName(name="draft_indexer", draft=True, dcp=True, mooncake="shared"),
)

# A scale is max(1e-4, largest magnitude) / 448, the largest code: act_quant,
# fused_store_index_cache.cuh.
SCALE_FLOOR = 1e-4 / 448
_SCALE_BYTES = 4


class DsaIndexer(PoolKind):
    """Index keys of DSA, equal on all TP ranks."""

    name = "dsa_indexer"
    summary = "layers, index_head_dim."
    words = "a DSA indexer pool"
    required = ("layers", "index_head_dim")
    shards = False
    nixl_layouts = PAGE_FIRST_LAYOUTS

    def row_items(self, pool: Pool) -> dict[str, int]:
        """Return an upper bound of the items of a key with its scales."""
        return {"index_head_dim": 2 * pool.index_head_dim}

    def layouts(self, pool: Pool) -> tuple[str, ...]:
        """Return all layouts except page_head."""
        return HEADLESS_LAYOUTS

    def tensors(self, pool: Pool, layers: int, tokens: int, tp: int) -> tuple[TensorLayout, ...]:
        """Return one block per layer: fp8 keys of all tokens, then scales.

        Layers are outermost in every layout, so the layout does not change the bytes.
        """
        dim = pool.index_head_dim
        block_bytes = tokens * (dim + dim // QUANT_BLOCK * _SCALE_BYTES)
        return (TensorLayout("indexer", ("layer", "block"), (layers, block_bytes), "uint8"),)

    def columns(
        self, pool: Pool, tensor: TensorLayout, code_dtype: str
    ) -> tuple[Column, ...] | None:
        """Return the keys of all tokens, then their scales."""
        dim = pool.index_head_dim
        tiles = dim // QUANT_BLOCK
        tokens = tensor.shape[-1] // (dim + tiles * _SCALE_BYTES)
        at, tile_axes = tokens * dim, ("token", "tile")
        scales = Column("scales", at, "float32", tile_axes, (tokens, tiles), SCALE_FLOOR)
        keys = Column("keys", 0, code_dtype, ("token", "channel"), (tokens, dim), scales=scales)
        return keys, scales

    def mooncake_part(self, pool: Pool, tensor: TensorLayout) -> str | None:
        """Return None: one object holds the page."""
        return None


DSA_INDEXER = DsaIndexer()
