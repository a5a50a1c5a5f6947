"""Kind dsa_indexer, index keys of sparse attention with scales, one block per layer.

Sources: SGLang srt/mem_cache/pool_host/dsa.py, srt/mem_cache/index_key_cache.py,
srt/mem_cache/deepseek_v4_memory_pool.py :: DeepSeekV4IndexerPool.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicachectl.formats.kinds.base import PoolKind, stored_rows
from hicachectl.formats.kinds.pool import PoolName
from hicachectl.formats.layouts import (
    HEADLESS_LAYOUTS,
    PAGE_FIRST_LAYOUTS,
    QUANT_BLOCK,
    Column,
    TensorLayout,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicachectl.formats.kinds.pool import Pool

INDEXER_POOLS = (
    PoolName(name="indexer", cp_split=True, whole=True, mooncake=True),
    PoolName(name="draft_indexer", draft=True, dcp=True, whole=True, mooncake=True),
)

# A scale is max(1e-4, largest magnitude) / 448, where 448 is the largest code (act_quant,
# fused_store_index_cache.cuh).
SCALE_FLOOR = 1e-4 / 448
_SCALE_BYTES = 4
_FP4_BLOCK = 32  # codes that share a ue8m0 scale (get_dsv4_indexer_bytes_per_token)


class DsaIndexer(PoolKind):
    """Index keys of DSA, equal on all TP ranks."""

    name = "dsa_indexer"
    summary = (
        'layers, index_head_dim; compress_ratio if a key has several tokens; row = "fp4" for '
        "fp4 keys."
    )
    words = "a DSA indexer pool"
    required = ("layers", "index_head_dim")
    shards = False
    host_layouts = HEADLESS_LAYOUTS
    nixl_layouts = PAGE_FIRST_LAYOUTS

    def row_items(self, pool: Pool) -> dict[str, int]:
        """Return an upper bound of the items of a key with its scales."""
        return {"index_head_dim": 2 * pool.index_head_dim}

    def problems(self, pool: Pool) -> Iterator[str]:
        """Yield a message if `row` is unknown."""
        if pool.row not in ("", "fp4"):
            yield f"row: fp4 or nothing, not {pool.row!r}"

    def has_identity(self, pool: Pool) -> bool:
        """Return whether the pool is of another model than DeepSeek-V4."""
        return pool.name in {one.name for one in INDEXER_POOLS}

    def tensors(self, pool: Pool, layers: int, tokens: int, tp: int) -> tuple[TensorLayout, ...]:
        """Return one block per layer, with the fp8 keys of all rows and then their scales.

        Layers are outermost in every layout, so the layout does not change the bytes. In a block of
        fp4 keys, the scales of each index page (64 or 128 rows) are next to its keys.
        """
        dim = pool.index_head_dim
        row_bytes = dim + dim // QUANT_BLOCK * _SCALE_BYTES
        if pool.row:
            row_bytes = dim // 2 + dim // _FP4_BLOCK
        block_bytes = stored_rows(pool, tokens) * row_bytes
        return (TensorLayout("indexer", ("layer", "block"), (layers, block_bytes), "uint8"),)

    def columns(
        self, pool: Pool, tensor: TensorLayout, code_dtype: str
    ) -> tuple[Column, ...] | None:
        """Return the keys of all rows, then their scales; none for fp4 keys."""
        if pool.row:
            return ()
        dim = pool.index_head_dim
        tiles = dim // QUANT_BLOCK
        tokens = tensor.shape[-1] // (dim + tiles * _SCALE_BYTES)
        at, tile_axes = tokens * dim, ("token", "tile")
        scales = Column("scales", at, "float32", tile_axes, (tokens, tiles), SCALE_FLOOR)
        keys = Column("keys", 0, code_dtype, ("token", "channel"), (tokens, dim), scales=scales)
        return keys, scales
