"""Kind mla, multi-head latent attention, with one row per token and layer.

The rows are equal on all TP ranks.

Sources: SGLang srt/mem_cache/pool_host/mla.py, srt/mem_cache/kv_cache_configurator.py ::
calculate_mla_kv_cache_dim, kernels/ops/quantization/dsa_quant_k_cache.py (scaled rows).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import structs

from hicachectl.formats.errors import ProfileError
from hicachectl.formats.kinds.base import PoolKind
from hicachectl.formats.layouts import (
    DTYPE_BYTES,
    HEADLESS_LAYOUTS,
    QUANT_BLOCK,
    Column,
    TensorLayout,
)
from hicachectl.formats.wording import not_one_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicachectl.formats.kinds.pool import Pool

MLA_ROWS = ("bf16", "fp8", "fp8_scaled")

_SCALE_BYTES = 4
_ROPE_BYTES = 2  # DSATokenToKVPool.rope_storage_dtype is bfloat16
_ROWS = {"bf16": ("bfloat16", 2), "fp8": ("float8_e4m3fn", 1)}  # default dtype, bytes per item


def mla_row(pool: Pool) -> tuple[int, str]:
    """Return channels and dtype of one token's row in one layer.

    A scaled row has dtype uint8. It holds fp8 codes, one fp32 scale for 128 codes, and the bf16
    rope part. That is 656 bytes for 512 + 64 channels. Raises ProfileError if row and dtype
    contradict each other, or if the codes of a scaled row do not fill whole blocks of 128.
    """
    if pool.row == "fp8_scaled":
        if pool.kv_lora_rank % QUANT_BLOCK:
            raise ProfileError(
                f"pools[{pool.name}].kv_lora_rank: {pool.kv_lora_rank} is not a multiple of "
                f"{QUANT_BLOCK}, which row {pool.row!r} needs; give another row"
            )
        scales = pool.kv_lora_rank // QUANT_BLOCK * _SCALE_BYTES
        return pool.kv_lora_rank + scales + pool.qk_rope_head_dim * _ROPE_BYTES, "uint8"
    default, width = _ROWS[pool.row]
    dtype = pool.dtype or default
    if DTYPE_BYTES[dtype] != width:
        raise ProfileError(
            f"pools[{pool.name}].dtype: {dtype} contradicts row {pool.row!r}; leave out dtype, or "
            "give another row"
        )
    return pool.kv_lora_rank + pool.qk_rope_head_dim, dtype


class Mla(PoolKind):
    """Multi-head latent attention."""

    name = "mla"
    summary = (
        "layers, kv_lora_rank, qk_rope_head_dim unless rows have no rope part, and row: bf16, "
        "fp8 or fp8_scaled (656 bytes)."
    )
    words = "an MLA pool"
    required = ("layers", "kv_lora_rank", "row")
    anchors = True
    shards = False
    host_layouts = HEADLESS_LAYOUTS  # rows have no heads
    scattered = False
    splits_layers = True

    def problems(self, pool: Pool) -> Iterator[str]:
        """Yield a message if `row` is unknown."""
        if pool.row and pool.row not in MLA_ROWS:
            yield not_one_of("row", pool.row, MLA_ROWS)

    def row_items(self, pool: Pool) -> dict[str, int]:
        """Return the items of latents and rope part."""
        return {"kv_lora_rank": pool.kv_lora_rank + pool.qk_rope_head_dim}

    def dtype(self, pool: Pool) -> str:
        """Return the dtype of a row."""
        return mla_row(pool)[1]

    def cache_dtype(self, pool: Pool) -> str:
        """Return `row`."""
        return pool.row

    def with_cache_dtype(self, pool: Pool, dtype: str) -> Pool:
        """Return the pool with bf16 or fp8 rows, as dtype says.

        If dtype is fp8, rows that are fp8 or fp8_scaled stay unchanged.
        """
        is_fp8 = dtype.startswith("float8")
        same = is_fp8 == (pool.row != "bf16")
        return pool if same else structs.replace(pool, row="fp8" if is_fp8 else "bf16")

    def stored_with_dcp(self, pool: Pool) -> bool:
        """Return True, because SGLang stores DCP pages of MLA models."""
        return True

    def tensors(self, pool: Pool, layers: int, tokens: int, tp: int) -> tuple[TensorLayout, ...]:
        """Return the rows."""
        channels, dtype = mla_row(pool)
        shape = (layers, tokens, channels)
        return (TensorLayout("kv", ("layer", "token", "channel"), shape, dtype),)

    def compared_channels(self, pool: Pool, tensor: TensorLayout) -> int:
        """Return the number of latents.

        The rope part is not compared, because in every layer its magnitudes differ from the
        magnitudes of the latents.
        """
        return pool.kv_lora_rank

    def columns(
        self, pool: Pool, tensor: TensorLayout, code_dtype: str
    ) -> tuple[Column, ...] | None:
        """Return codes, scales and rope part of a scaled row."""
        if pool.row != "fp8_scaled":
            return None
        rank, rope = pool.kv_lora_rank, pool.qk_rope_head_dim
        tiles = rank // QUANT_BLOCK
        scales = Column("scales", rank, "float32", ("tile",), (tiles,), scale_floor=0.0)
        codes = Column("codes", 0, code_dtype, ("channel",), (rank,), scales=scales)
        if not rope:
            return codes, scales
        at = rank + scales.nbytes
        return codes, scales, Column("rope", at, "bfloat16", ("channel",), (rope,))
