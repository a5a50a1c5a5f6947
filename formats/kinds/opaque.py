"""Kind opaque, objects of known size and unknown form."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicachectl.formats.kinds.base import PoolKind
from hicachectl.formats.kinds.pool import PoolName

if TYPE_CHECKING:
    from hicachectl.formats.kinds.pool import Pool

_COMPRESSED = ("c1", "c1_indexer", "c1_indexer_scale", "c2", "c2_indexer", "c2_indexer_scale",
               "c4", "c4_indexer", "c4_indexer_scale", "c128", "c4_rope", "c128_rope")  # fmt: skip
_STATES = ("c4_state", "c4_indexer_state", "c128_state")
# Pools of DeepSeek-V4, whose kv pool is logical.
COMPRESSED_POOLS = (
    *(PoolName(name=f"deepseek_v4_{name}", whole=True, mooncake=True) for name in _COMPRESSED),
    *(
        PoolName(
            name=f"deepseek_v4_{name}", trailing=True, follows="swa", whole=True, mooncake=True
        )
        for name in _STATES
    ),
)


class Opaque(PoolKind):
    """Objects of `nbytes` bytes; `replicated` states whether ranks share them."""

    name = "opaque"
    summary = "nbytes of one object; hicachectl does not interpret its bytes."
    required = ("nbytes",)
    anchors = True
    has_form = False

    def stored_with_dcp(self, pool: Pool) -> bool:
        """Return whether all ranks share the objects, as keys under DCP require."""
        return pool.replicated
