"""Base class of pool kinds; `kind_of` returns a pool's kind."""

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
    """Properties of one kind of pool; subclasses override the defaults.

    name:     `kind` in a profile.
    summary:  required fields, for the manual.
    words:    such a pool, in messages.
    required: fields of `Pool` that must be stated.
    anchors:  whether a kv pool can have this kind.
    shards:   True: each TP rank holds a share; False: all hold the same; None: unknown.
    linear:   whether shards follow linear attention (a profile's linear_tp).
    has_bytes, has_form: whether objects have bytes; whether their form is known.
    scattered: whether SGLang cannot store layer_first pages as parts: their layers are scattered
              in host memory, and MooncakeStore stores only those of MLA KV
              (_get_mha_buffer_meta raises).
    splits_layers: whether CP ranks can divide the layers of such an anchor.
    hf3fs_sidecar: whether SGLang stores such a pool beside kv on 3FS.
    hf3fs_parts: whether SGLang stores such a kv pool as parts on 3FS with zero-copy.
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
        """Yield a message for each invalid field; callers check missing fields and bounds."""
        yield from ()

    def row_items(self, pool: Pool) -> dict[str, int]:
        """Return the items per token and layer, before sharding, by field, to bound object sizes.

        Called for pools of every kind.
        """
        return {}

    def dtype(self, pool: Pool) -> str:
        """Return the dtype of the stored bytes. Raises ProfileError."""
        return pool.dtype

    def cache_dtype(self, pool: Pool) -> str:
        """Return the value that corresponds to a server's --kv-cache-dtype."""
        return pool.dtype

    def with_cache_dtype(self, pool: Pool, dtype: str) -> Pool:
        """Return the pool as a server with this --kv-cache-dtype stores it."""
        return pool

    def stored_with_dcp(self, pool: Pool) -> bool:
        """Return whether SGLang stores such an anchor under decode context parallelism."""
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
                f"layout: SGLang does not build {self.described(pool)} in {layout!r}, only in "
                f"{', '.join(known)}"
            )

    def described(self, pool: Pool) -> str:
        """Return a description of the pool, for messages."""
        return self.words

    def check_flat(self, pool: Pool) -> None:
        """Raise UnsupportedByBackend if one object cannot hold a whole page of the pool."""

    def tensors(self, pool: Pool, layers: int, tokens: int, tp: int) -> tuple[TensorLayout, ...]:
        """Return one rank's tensors of a layer_first page, each at offset 0.

        Empty if the form is unknown. Raises ProfileError.
        """
        return ()

    def compared_channels(self, pool: Pool, tensor: TensorLayout) -> int:
        """Return how many leading channels of a row distinguish layers by magnitude; 0 if none."""
        return 0

    def columns(
        self, pool: Pool, tensor: TensorLayout, code_dtype: str
    ) -> tuple[Column, ...] | None:
        """Return the columns of one row; None if the tensor is one array of its dtype.

        code_dtype: dtype of quantised codes.
        """
        return None

    # --- the shards ---

    def check_shards(self, pool: Pool, tp: int) -> None:
        """Raise ProfileError if it is unknown which rank has which share of the pool."""

    def shared_shard(self, pool: Pool, tp_rank: int, tp: int) -> int | None:
        """Return the number of the share that a TP rank has in common with others, or None."""
        return None

    def spans(
        self, pool: Pool, tensor: TensorLayout, shard: Shard, tp: int
    ) -> dict[str, list[Span]]:
        """Return which indices of the model an object holds along each sharded axis."""
        return {}

    # --- the backends ---

    def names_rank(self, pool: Pool, shared_anchor: bool) -> bool:
        """Return whether Mooncake keys name the TP rank, for pools that may have K and V.

        shared_anchor: whether ranks share the anchor's objects. Draft keys follow the draft, all
        other keys the target.
        """
        return bool(self.shards) if pool.is_draft else not shared_anchor

    def check_mooncake(self, pool: Pool) -> None:
        """Raise UnsupportedByBackend if MooncakeStore's keys do not match the pool's objects."""

    def mooncake_parts(self, pool: Pool, names_rank: bool) -> tuple[str | None, ...]:
        """Return the parts of a page on Mooncake, for objects of unknown form."""
        return (None,)

    def mooncake_part(self, pool: Pool, tensor: TensorLayout) -> str | None:
        """Return the part of the Mooncake object that holds one tensor."""
        return tensor.name


def holder(shard: Shard) -> int:
    """Return the TP rank whose share an object holds; 0 if ranks share the object."""
    if shard.tp_rank is not None:
        return shard.tp_rank
    if shard.heads is None:
        return 0
    first, end = shard.heads
    return first // (end - first)
