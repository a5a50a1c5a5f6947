"""Base class of pool kinds."""

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
    words:    name of such a pool in messages, such as "an MHA pool".
    required: fields of `Pool` that a profile must state.
    anchors:  whether a kv pool can have this kind.
    shards:   True if each TP rank holds a share, False if all TP ranks hold equal bytes. None if
              that is unknown.
    linear:   whether a profile's linear_tp, if stated, replaces tp as the number of shares.
    has_form: whether the form of the bytes is known.
    scattered: whether the layers of a layer_first page are scattered in host memory, so that
              SGLang cannot store the page as parts. MooncakeStore stores only the layer_first
              pages of MLA KV (_get_mha_buffer_meta raises for other pages).
    splits_layers: whether CP ranks can divide the layers of an anchor of this kind.
    host_layouts: layouts of host pools that SGLang builds.
    identified: whether a profile tells the identity that the storage plug-in gives to objects.
              False for rows whose identity states the server's settings and GPU instead of a dtype.
    interpreted: whether hicachectl knows the numbers in the bytes.
    nixl_layouts: layouts in which NIXL transfers a sidecar of this kind from its place in memory
              (is_stride_page_aligned of pools with get_hybrid_pool_buffer).
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
    host_layouts: tuple[str, ...] = PAGE_FIRST_LAYOUTS
    identified = True
    interpreted = True
    nixl_layouts: tuple[str, ...] = ()

    # --- the profile ---

    def problems(self, pool: Pool) -> Iterator[str]:
        """Yield a message for each invalid field. Callers check missing fields and bounds."""
        yield from ()

    def row_items(self, pool: Pool) -> dict[str, int]:
        """Return the items per token and layer, before sharding, by the field that determines them.

        The bounds on object sizes use this method, also for pools of other kinds.
        """
        return {}

    def dtype(self, pool: Pool) -> str:
        """Return the dtype of the stored bytes. Raises ProfileError."""
        return pool.dtype

    def cache_dtype(self, pool: Pool) -> str:
        """Return the value of the field (`dtype` or `row`) that --kv-cache-dtype determines."""
        return pool.dtype

    def with_cache_dtype(self, pool: Pool, dtype: str) -> Pool:
        """Return the pool as a server with this --kv-cache-dtype stores it."""
        return pool

    def stored_with_dcp(self, pool: Pool) -> bool:
        """Return whether SGLang stores such an anchor under decode context parallelism."""
        return False

    def has_identity(self, pool: Pool) -> bool:
        """Return whether a profile tells the identity of a pool's objects."""
        return self.has_form and self.identified

    # --- the bytes ---

    def layouts(self, pool: Pool) -> tuple[str, ...]:
        """Return the host layouts that SGLang builds the pool in."""
        return self.host_layouts

    def check_layout(self, pool: Pool, layout: str) -> None:
        """Raise ProfileError if SGLang does not build the pool in a layout."""
        known = self.layouts(pool)
        if layout not in known:
            raise ProfileError(
                f"layout: SGLang does not build {self.described(pool)} in {layout!r}; use one "
                f"of {', '.join(known)}"
            )

    def described(self, pool: Pool) -> str:
        """Describe the pool, for messages."""
        return self.words

    def check_flat(self, pool: Pool) -> None:
        """Raise UnsupportedByBackend if one object cannot hold a whole page of the pool."""

    def tensors(self, pool: Pool, layers: int, tokens: int, tp: int) -> tuple[TensorLayout, ...]:
        """Return one rank's tensors of a layer_first page, each at offset 0.

        Returns an empty tuple if the form is unknown. Raises ProfileError.
        """
        return ()

    def compared_channels(self, pool: Pool, tensor: TensorLayout) -> int:
        """Return how many leading channels of a row have magnitudes that show the layer.

        0 means that the magnitudes of this kind are not compared.
        """
        return 0

    def columns(
        self, pool: Pool, tensor: TensorLayout, code_dtype: str
    ) -> tuple[Column, ...] | None:
        """Return the columns of one row of a tensor.

        Returns None if the tensor is one array of its dtype. Returns an empty tuple if the bytes
        are not interpreted.

        code_dtype: dtype of quantised codes.
        """
        return None if self.interpreted else ()

    # --- the shards ---

    def check_shards(self, pool: Pool, tp: int) -> None:
        """Raise ProfileError if a profile does not determine each rank's share of the pool."""

    def shared_shard(self, pool: Pool, tp_rank: int, tp: int) -> int | None:
        """Return the index of the share that a TP rank shares with other ranks; None without one.

        tp: number of TP ranks.
        """
        return None

    def spans(
        self, pool: Pool, tensor: TensorLayout, shard: Shard, tp: int
    ) -> dict[str, list[Span]]:
        """Return which indices of the model an object holds along each sharded axis."""
        return {}


def stored_rows(pool: Pool, tokens: int) -> int:
    """Return the rows of a page in one layer. Raises ProfileError if tokens do not fill rows."""
    ratio = pool.compress_ratio or 1
    if tokens % ratio:
        raise ProfileError(
            f"pools[{pool.name}].compress_ratio: {ratio} tokens of a row do not divide a page of "
            f"{tokens} tokens; give another page_size"
        )
    return tokens // ratio


def holder(shard: Shard) -> int:
    """Return the TP rank whose share an object holds; 0 if ranks share the object."""
    if shard.tp_rank is not None:
        return shard.tp_rank
    if shard.heads is None:
        return 0
    first, end = shard.heads
    return first // (end - first)
