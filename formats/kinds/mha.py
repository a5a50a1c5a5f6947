"""Kind mha, multi-head attention, with K and V of each token by head.

Sources: SGLang srt/mem_cache/pool_host/mha.py (MHATokenToKVPoolHost, Asymmetric...),
srt/configs/model_config.py :: get_num_kv_heads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import structs

from hicachectl.formats.errors import ProfileError, UnsupportedByBackend
from hicachectl.formats.kinds.base import PoolKind, holder
from hicachectl.formats.kinds.pool import PoolName
from hicachectl.formats.layouts import LAYOUTS, PAGE_FIRST_LAYOUTS, TensorLayout
from hicachectl.formats.objects import ANCHOR, HALVES

if TYPE_CHECKING:
    from hicachectl.formats.kinds.base import Span
    from hicachectl.formats.kinds.pool import Pool
    from hicachectl.formats.objects import Shard

# Pools of K and V. In MLA models, these pools hold latents instead.
KV_POOLS = (
    PoolName(name="kv", dcp=True, cp_split=True, parts=HALVES, mooncake=True),
    PoolName(name="swa", trailing=True, parts=HALVES, whole=True, mooncake=True),
    PoolName(name="auxiliary_swa", trailing=True, parts=HALVES, whole=True),
    PoolName(name="draft", draft=True, dcp=True, parts=HALVES, mooncake=True),
    PoolName(
        name="draft_swa",
        trailing=True,
        draft=True,
        dcp=True,
        parts=HALVES,
        whole=True,
        mooncake=True,
    ),
)


def local_kv_heads(kv_heads: int, tp: int) -> int:
    """Return the number of KV heads of one TP rank, at least one."""
    return max(1, kv_heads // tp)


class Mha(PoolKind):
    """Multi-head attention, sharded by KV heads."""

    name = "mha"
    summary = "dtype, layers, kv_heads, head_dim; v_head_dim if it differs."
    words = "an MHA pool"
    required = ("dtype", "layers", "kv_heads", "head_dim")
    anchors = True
    shards = True
    nixl_layouts = (*PAGE_FIRST_LAYOUTS, "page_head")

    def row_items(self, pool: Pool) -> dict[str, int]:
        """Return the items of K and V."""
        return {"head_dim": pool.kv_heads * sum(_widths(pool))}

    def with_cache_dtype(self, pool: Pool, dtype: str) -> Pool:
        """Return the pool with another dtype."""
        # ROCm servers store float8_e4m3fnuz, but report float8_e4m3fn.
        return pool if pool.dtype.startswith(dtype) else structs.replace(pool, dtype=dtype)

    def layouts(self, pool: Pool) -> tuple[str, ...]:
        """Return all layouts, or the two page-first layouts if K and V differ in width."""
        return PAGE_FIRST_LAYOUTS if _is_asymmetric(pool) else LAYOUTS

    def described(self, pool: Pool) -> str:
        """Describe the pool, noting K and V of different width."""
        return self.words + " with K and V of different width" * _is_asymmetric(pool)

    def check_flat(self, pool: Pool) -> None:
        """Refuse K and V of different width."""
        if _is_asymmetric(pool):
            raise UnsupportedByBackend(
                f"pools[{pool.name}]: K and V of different width {_widths(pool)} cannot be stored "
                "as one object; use Mooncake, where SGLang stores such models"
            )

    def tensors(self, pool: Pool, layers: int, tokens: int, tp: int) -> tuple[TensorLayout, ...]:
        """Return K and V of one rank's heads."""
        heads = pool.kv_heads if pool.replicated else local_kv_heads(pool.kv_heads, tp)
        return tuple(
            TensorLayout(
                name,
                ("layer", "token", "head", "channel"),
                (layers, tokens, heads, width),
                pool.dtype,
            )
            for name, width in zip("kv", _widths(pool), strict=True)
        )

    def compared_channels(self, pool: Pool, tensor: TensorLayout) -> int:
        """Return the number of channels per head."""
        return tensor.shape[-1]

    def check_shards(self, pool: Pool, tp: int) -> None:
        """Raise ProfileError if neither heads nor TP ranks are a multiple of the other number."""
        most, least = max(pool.kv_heads, tp), min(pool.kv_heads, tp)
        if not pool.replicated and most % least:
            raise ProfileError(
                f"pools[{pool.name}].kv_heads: SGLang cannot shard {pool.kv_heads} heads over tp "
                f"{tp}, because neither number is a multiple of the other; give another tp"
            )

    def shared_shard(self, pool: Pool, tp_rank: int, tp: int) -> int | None:
        """Return the head that neighbouring ranks share; None if ranks do not outnumber heads.

        Source: srt/layers/linear.py :: QKVParallelLinear.num_kv_head_replicas.
        """
        if not pool.kv_heads or tp <= pool.kv_heads or tp % pool.kv_heads:
            return None
        return tp_rank // (tp // pool.kv_heads)

    def spans(
        self, pool: Pool, tensor: TensorLayout, shard: Shard, tp: int
    ) -> dict[str, list[Span]]:
        """Return which of the model's heads an object holds."""
        held = tensor.shape[tensor.axes.index("head")]
        return {"head": [(0, _first_head(pool, shard, held, tp), held)]}


def _widths(pool: Pool) -> tuple[int, int]:
    """Return the channels of a head in K and in V."""
    return pool.head_dim, pool.v_head_dim or pool.head_dim


def _is_asymmetric(pool: Pool) -> bool:
    return len(set(_widths(pool))) > 1


def _first_head(pool: Pool, shard: Shard, held: int, tp: int) -> int:
    if pool.replicated:
        return 0
    if shard.heads is not None and pool.name == ANCHOR:
        return shard.heads[0] * held  # a key of kv states one of tp_lcm_size slices of heads
    if tp > pool.kv_heads:
        return holder(shard) // (tp // pool.kv_heads)
    return holder(shard) * held
