"""Kind index_keys, index keys of sparse attention as plain numbers, without scales.

MiniMax-M3 has a key for each token, in the order of the host layout. Qwen4 has a key for every
`compress_ratio` tokens. Its layers are outermost in every layout.

Sources: SGLang srt/mem_cache/pool_host/mha.py :: MHATokenToKOnlyPoolHost, pool_host/qsa.py ::
QSAIndexerPoolHost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicachectl.formats.kinds.base import PoolKind, stored_rows
from hicachectl.formats.layouts import HEADLESS_LAYOUTS, PAGE_FIRST_LAYOUTS, TensorLayout

if TYPE_CHECKING:
    from hicachectl.formats.kinds.pool import Pool


class IndexKeys(PoolKind):
    """Index keys of one head, equal on all TP ranks."""

    name = "index_keys"
    summary = "dtype, layers, index_head_dim; compress_ratio if a key has several tokens."
    words = "a pool of index keys"
    required = ("dtype", "layers", "index_head_dim")
    shards = False
    host_layouts = HEADLESS_LAYOUTS
    nixl_layouts = PAGE_FIRST_LAYOUTS

    def has_identity(self, pool: Pool) -> bool:
        """Return whether each token has a key."""
        return not pool.compress_ratio

    def tensors(self, pool: Pool, layers: int, tokens: int, tp: int) -> tuple[TensorLayout, ...]:
        """Return the keys of all layers."""
        row = "row" if pool.compress_ratio else "token"
        shape = (layers, stored_rows(pool, tokens), pool.index_head_dim)
        return (TensorLayout("indexer", ("layer", row, "channel"), shape, pool.dtype),)
