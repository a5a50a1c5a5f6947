"""Objects whose size alone is known, not their form."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicachectl.formats.errors import UnsupportedByBackend
from hicachectl.formats.kinds.base import PoolKind
from hicachectl.formats.kinds.pool import PoolName

if TYPE_CHECKING:
    from hicachectl.formats.kinds.pool import Pool

_COMPRESSED = ("c1", "c1_indexer", "c1_indexer_scale", "c2", "c2_indexer", "c2_indexer_scale",
               "c4", "c4_indexer", "c4_indexer_scale", "c128", "c4_rope", "c128_rope")  # fmt: skip
_STATES = ("c4_state", "c4_indexer_state", "c128_state")
# DeepSeek-V4's; its kv is logical.
COMPRESSED_POOLS = (
    *(PoolName(name=f"deepseek_v4_{name}", mooncake="shared") for name in _COMPRESSED),
    *(PoolName(name=f"deepseek_v4_{name}", trailing=True, mooncake="shared") for name in _STATES),
)


class Opaque(PoolKind):
    """Objects of `nbytes` bytes; whether ranks share them the profile states."""

    name = "opaque"
    summary = "nbytes of one object; its bytes are not looked into."
    required = ("nbytes",)
    anchors = True
    has_form = False
    hf3fs_parts = True

    def stored_with_dcp(self, pool: Pool) -> bool:
        """Return True for objects that all ranks share: the form of their keys fits."""
        return pool.replicated

    def names_rank(self, pool: Pool, shared_anchor: bool) -> bool:
        """Tell whether neither the pool nor the anchor is shared by the ranks."""
        return not (pool.replicated or shared_anchor)

    def check_mooncake(self, pool: Pool) -> None:
        """Refuse states, which have an object each."""
        if pool.name == "mamba":
            raise UnsupportedByBackend(
                "pools[mamba]: Mooncake stores each state as an object; kind opaque does not name "
                "them"
            )

    def mooncake_parts(self, pool: Pool, names_rank: bool) -> tuple[str | None, ...]:
        """Return K and V of ranks, else one object; that of a kv or a draft is a K."""
        if names_rank:
            return ("k", "v")
        return ("k",) if pool.name in ("kv", "draft") else (None,)


OPAQUE = Opaque()
