"""Kind logical, an anchor without bytes (DeepSeek-V4).

File stores have an empty file for the anchor. NIXL stores have a small file. Other stores have
nothing.
Source: sglang hicache_nixl.py :: HiCacheNixl.register_mem_pool_host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicachectl.formats.kinds.base import PoolKind
from hicachectl.formats.layouts import HEADLESS_LAYOUTS
from hicachectl.formats.objects import ANCHOR

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicachectl.formats.kinds.pool import Pool


class Logical(PoolKind):
    """An anchor without bytes, shared by all TP ranks."""

    name = "logical"
    summary = "An anchor without bytes (DeepSeek-V4)."
    anchors = True
    shards = False
    host_layouts = HEADLESS_LAYOUTS  # layouts of the pools beside it (DeepSeekV4PagedHostPool)
    has_bytes = False
    has_form = False

    def problems(self, pool: Pool) -> Iterator[str]:
        """Yield a message if the pool is a sidecar."""
        if pool.name != ANCHOR:
            yield "kind: only the kv pool can be logical"
