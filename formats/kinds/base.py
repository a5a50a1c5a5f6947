"""What a kind of pool says: one class, in one file, that all others ask (`kind_of`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicachectl.formats.errors import ProfileError
from hicachectl.formats.layouts import PAGE_FIRST_LAYOUTS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicachectl.formats.kinds.pool import Pool
    from hicachectl.formats.layouts import Column, TensorLayout
    from hicachectl.formats.objects import Shard

Span = tuple[int, int, int]  # index in the object, index in the whole model, length


class PoolKind:
    """What depends on the kind of a pool. A kind overrides what is not so by default.

    name:     `kind` of a profile's pool.
    summary:  the fields that it needs, for the manual.
    words:    a pool of the kind, in messages.
    required: fields of `Pool` that must be stated.
    anchors:  whether a kv pool can be of the kind.
    shards:   True: each TP rank holds a share; False: all hold the same; None: not known.
    linear:   whether the shards are those of linear attention (linear_tp of a profile).
    has_bytes, has_form: whether objects have bytes, and whether their form is known.
    scattered: whether SGLang cannot store the layers of a layer_first page as parts: they lie
              scattered in host memory, and MooncakeStore takes those of MLA KV alone
              (_get_mha_buffer_meta raises).
    splits_layers: whether CP ranks can share out the layers of such an anchor.
    hf3fs_sidecar, hf3fs_parts: whether SGLang stores such a pool beside kv on 3FS, and a kv pool
              of it as parts with zero-copy.
    """

    name = ""
    summary = ""
    words = "such a pool"
    required: tuple[str, ...] = ()
    anchors = False
    shards: bool | None = None
    linear = False
    has_bytes = True
    has_form = True
    scattered = True
    splits_layers = False
    hf3fs_sidecar = True
    hf3fs_parts = False

    # --- the profile ---

    def problems(self, pool: Pool) -> Iterator[str]:
        """Yield what is wrong with a pool beyond missing fields and their bounds."""
        yield from ()

    def row_items(self, pool: Pool) -> dict[str, int]:
        """Return the items of a token in a layer, before sharding, by the field at fault for many.

        Of any pool that states the kind's fields: it bounds what a profile may state.
        """
        return {}

    def dtype(self, pool: Pool) -> str:
        """Return the dtype of what a pool stores. Raises ProfileError."""
        return pool.dtype

    def cache_dtype(self, pool: Pool) -> str:
        """Return what stands in a profile for a server's --kv-cache-dtype."""
        return pool.dtype

    def with_cache_dtype(self, pool: Pool, dtype: str) -> Pool:
        """Return the pool as a server with this --kv-cache-dtype stores it."""
        return pool

    def stored_with_dcp(self, pool: Pool) -> bool:
        """Tell whether SGLang stores pages of such an anchor under decode context parallelism."""
        return False

    # --- the bytes ---

    def layouts(self, pool: Pool) -> tuple[str, ...]:
        """Return the host layouts that SGLang builds the pool in."""
        return PAGE_FIRST_LAYOUTS

    def check_layout(self, pool: Pool, layout: str) -> None:
        """Raise ProfileError if SGLang does not build the pool in a layout."""
        known = self.layouts(pool)
        if layout not in known:
            raise ProfileError(
                f"layout: SGLang does not build {self.described(pool)} in {layout!r}, "
                f"only in {', '.join(known)}"
            )

    def described(self, pool: Pool) -> str:
        """Return the pool in words, for messages."""
        return self.words

    def check_flat(self, pool: Pool) -> None:
        """Raise UnsupportedByBackend if no object can hold a whole page of the pool."""

    def tensors(self, pool: Pool, layers: int, tokens: int, tp: int) -> tuple[TensorLayout, ...]:
        """Return what a rank stores in a page of layer_first, each tensor at offset 0.

        Nothing without a known form. Raises ProfileError.
        """
        return ()

    def compared_channels(self, pool: Pool, tensor: TensorLayout) -> int:
        """Count the leading channels of a row whose magnitudes tell one layer from another.

        0 if nothing tells one layout's order of rows from another's.
        """
        return 0

    def columns(
        self, pool: Pool, tensor: TensorLayout, code_dtype: str
    ) -> tuple[Column, ...] | None:
        """Return the numbers of one row; None if the tensor is one array of its dtype.

        code_dtype: of quantised codes.
        """
        return None

    # --- the shards ---

    def check_shards(self, pool: Pool, tp: int) -> None:
        """Raise ProfileError if nothing tells which rank has which share of the pool."""

    def shared_shard(self, pool: Pool, tp_rank: int, tp: int) -> int | None:
        """Return which share a TP rank has in common with others, as a number; None if alone."""
        return None

    def spans(
        self, pool: Pool, tensor: TensorLayout, shard: Shard, tp: int
    ) -> dict[str, list[Span]]:
        """Return which indices of the model an object holds, along the axes that are sharded."""
        return {}

    # --- the backends ---

    def names_rank(self, pool: Pool, shared_anchor: bool) -> bool:
        """Tell whether Mooncake keys of a pool that may have K and V name the TP rank.

        shared_anchor: whether all ranks share the anchor's objects. The form of a draft's key
        follows the draft, of every other the target.
        """
        return bool(self.shards) if pool.is_draft else not shared_anchor

    def check_mooncake(self, pool: Pool) -> None:
        """Raise UnsupportedByBackend if MooncakeStore has no keys of the right number."""

    def mooncake_parts(self, pool: Pool, names_rank: bool) -> tuple[str | None, ...]:
        """Return the parts of a page on Mooncake, of objects without a known form."""
        return (None,)

    def mooncake_part(self, pool: Pool, tensor: TensorLayout) -> str | None:
        """Return the part that the object of one tensor is on Mooncake."""
        return tensor.name


def holder(shard: Shard) -> int:
    """Return the TP rank whose share an object is; 0 if the ranks share it."""
    if shard.tp_rank is not None:
        return shard.tp_rank
    if shard.heads is None:
        return 0
    first, end = shard.heads
    return first // (end - first)
