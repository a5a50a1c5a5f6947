"""Multi-head attention: K and V of each token, by head.

Sources: SGLang srt/mem_cache/pool_host/mha.py (MHATokenToKVPoolHost, Asymmetric...),
srt/configs/model_config.py :: get_num_kv_heads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from msgspec import structs

from hicachectl.formats.errors import ProfileError, UnsupportedByBackend
from hicachectl.formats.kinds.base import PoolKind, holder
from hicachectl.formats.kinds.pool import PoolName
from hicachectl.formats.layouts import PAGE_FIRST_LAYOUTS, Geometry, TensorLayout, check_layout

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicachectl.formats.kinds.base import Span
    from hicachectl.formats.kinds.pool import Pool
    from hicachectl.formats.objects import Shard

# The pools that hold K and V; an MLA model has them too, with latents instead.
KV_POOLS = (
    PoolName(name="kv", dcp=True, cp_split=True, mooncake="kv"),
    PoolName(name="swa", trailing=True, mooncake="window"),
    PoolName(name="auxiliary_swa", trailing=True),
    PoolName(name="draft", draft=True, dcp=True, mooncake="parts"),
    PoolName(name="draft_swa", trailing=True, draft=True, dcp=True, mooncake="window"),
)

_AXES = {
    "layer_first": ("layer", "token", "head", "channel"),
    "page_first": ("token", "layer", "head", "channel"),
    "page_first_direct": ("layer", "token", "head", "channel"),
    "page_head": ("head", "token", "layer", "channel"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MhaGeometry(Geometry):
    """K and V of one rank: `heads` KV heads of `head_dim` (V: `v_head_dim`) channels."""

    layers: int
    tokens: int
    heads: int
    head_dim: int
    v_head_dim: int
    dtype: str

    @property
    def asymmetric(self) -> bool:
        """Whether K and V have rows of different width."""
        return self.head_dim != self.v_head_dim

    def tensors(self, layout: str) -> Iterator[TensorLayout]:
        """Yield K, then V."""
        if self.asymmetric:
            check_layout(layout, PAGE_FIRST_LAYOUTS, "an MHA pool with K and V of different width")
        check_layout(layout, _AXES, "an MHA pool")
        axes = _AXES[layout]
        lengths = {"layer": self.layers, "token": self.tokens, "head": self.heads}
        for name, width in (("k", self.head_dim), ("v", self.v_head_dim)):
            shape = tuple(({**lengths, "channel": width})[axis] for axis in axes)
            yield TensorLayout(name, axes, shape, self.dtype)

    def check_flat(self) -> None:
        """Raise UnsupportedByBackend for K and V of different width."""
        if self.asymmetric:
            raise UnsupportedByBackend(
                f"K and V of different width ({self.head_dim}, {self.v_head_dim}) have no "
                "flat page: SGLang stores such models on Mooncake only"
            )

    def head_slice(self, slices: int) -> MhaGeometry:
        """Return one slice of the LCM grid; heads are outermost in page_head."""
        if self.heads % slices:
            raise ProfileError(
                f"tp_lcm_size: a rank's {self.heads} KV heads do not split into {slices} slices"
            )
        return replace(self, heads=self.heads // slices)


def local_kv_heads(kv_heads: int, tp: int) -> int:
    """Count the KV heads of one TP rank; with fewer heads than ranks each rank holds one."""
    return max(1, kv_heads // tp)


class Mha(PoolKind):
    """Multi-head attention, sharded by KV heads."""

    name = "mha"
    summary = "dtype, layers, kv_heads, head_dim; v_head_dim where it differs."
    required = ("dtype", "layers", "kv_heads", "head_dim")
    anchors = True
    shards = True
    # register_mem_host_pool_v2 takes K's size for a page; the write of K and V then fails.
    hf3fs_sidecar = False
    hf3fs_parts = True

    def row_items(self, pool: Pool) -> dict[str, int]:
        """Return the items of K and V."""
        widths = pool.head_dim + (pool.v_head_dim or pool.head_dim)
        return {"head_dim": pool.kv_heads * widths}

    def with_cache_dtype(self, pool: Pool, dtype: str) -> Pool:
        """Return the pool with another dtype."""
        # ROCm names its own form of e4m3 like the other.
        return pool if pool.dtype.startswith(dtype) else structs.replace(pool, dtype=dtype)

    def layouts(self, pool: Pool) -> tuple[str, ...]:
        """Return every page layout, or two of them for rows of different width."""
        asymmetric = pool.v_head_dim not in (0, pool.head_dim)
        return PAGE_FIRST_LAYOUTS if asymmetric else tuple(_AXES)

    def geometry(self, pool: Pool, layers: int, tokens: int, tp: int) -> Geometry:
        """Return the heads of one rank."""
        return MhaGeometry(
            layers=layers,
            tokens=tokens,
            heads=pool.kv_heads if pool.replicated else local_kv_heads(pool.kv_heads, tp),
            head_dim=pool.head_dim,
            v_head_dim=pool.v_head_dim or pool.head_dim,
            dtype=pool.dtype,
        )

    def compared_channels(self, pool: Pool, tensor: TensorLayout) -> int:
        """Count all channels of a head."""
        return tensor.shape[-1]

    def check_shards(self, pool: Pool, tp: int) -> None:
        """Refuse heads that ranks do not share out evenly."""
        most, least = max(pool.kv_heads, tp), min(pool.kv_heads, tp)
        if not pool.replicated and most % least:
            raise ProfileError(
                f"pools[{pool.name}].kv_heads: {pool.kv_heads} heads and tp {tp} do not "
                "divide one another, so SGLang does not shard them"
            )

    def shared_shard(self, pool: Pool, tp_rank: int, tp: int) -> int | None:
        """Return the head that neighbouring ranks hold, if there are more ranks than heads.

        Source: srt/layers/linear.py :: QKVParallelLinear.num_kv_head_replicas.
        """
        if not pool.kv_heads or tp <= pool.kv_heads or tp % pool.kv_heads:
            return None
        return tp_rank // (tp // pool.kv_heads)

    def spans(
        self, pool: Pool, tensor: TensorLayout, shard: Shard, tp: int
    ) -> dict[str, list[Span]]:
        """Return the heads of an object, out of the whole model's."""
        held = tensor.shape[tensor.axes.index("head")]
        return {"head": [(0, _first_head(pool, shard, held, tp), held)]}


def _first_head(pool: Pool, shard: Shard, held: int, tp: int) -> int:
    if pool.replicated:
        return 0
    if shard.heads is not None and pool.name == "kv":
        return shard.heads[0] * held  # a slice of the LCM grid
    if tp > pool.kv_heads:
        return holder(shard) // (tp // pool.kv_heads)
    return holder(shard) * held


MHA = Mha()
