"""What one rank stores of one pool in a page: its layers, heads, states and row widths.

The sizes follow SGLang's own divisions: pipeline stages (srt/distributed/utils.py ::
get_pp_indices), KV heads (srt/configs/model_config.py :: get_num_kv_heads), context-parallel
layer split (srt/layers/cp/utils.py :: get_layer_shard_range) and linear-attention states
(srt/configs/mamba_utils.py). They are equal for all TP and DCP ranks, so neither is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING

from hicachectl.formats.errors import ProfileError, UnsupportedByBackend
from hicachectl.formats.kinds import kind_of
from hicachectl.formats.kinds.pool import pool_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicachectl.formats.kinds.pool import Pool
    from hicachectl.formats.layouts import TensorLayout
    from hicachectl.formats.profile import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPiece:
    """What one rank stores of a pool in one page.

    layers: model layer numbers in stored order. Packed draft layers come last and count on from
        the model's last layer; a draft pool counts its draft's layers from 0.
    padding_layers: unused layers between the target's and the packed draft's (CP layer split).
    tensors: in the axis order of layer_first; none where the bytes have no known form (opaque,
        logical). `nbytes` then says how many there are in one object.
    """

    pool: Pool
    layers: tuple[int, ...] = ()
    padding_layers: int = 0
    tensors: tuple[TensorLayout, ...] = ()
    nbytes: int = 0

    def flat(self, layout: str) -> tuple[TensorLayout, ...]:
        """Lay out an object that holds the whole page (file, 3FS without zero-copy).

        Raises ProfileError for a layout SGLang does not build the pool in, UnsupportedByBackend
        for one that has no flat page.
        """
        kind_of(self.pool).check_flat(self.pool)
        tensors = self._ordered(layout)
        offsets = accumulate((tensor.nbytes for tensor in tensors), initial=0)
        return tuple(
            replace(tensor, offset=offset) for tensor, offset in zip(tensors, offsets, strict=False)
        )

    def parts(self, layout: str) -> tuple[TensorLayout, ...]:
        """Lay out the objects that hold one part each (Mooncake, 3FS -k and -v), in order.

        Raises ProfileError and UnsupportedByBackend like `flat`.
        """
        tensors = self._ordered(layout)
        if layout == "layer_first" and kind_of(self.pool).scattered:
            raise UnsupportedByBackend(
                "layer_first pages of this pool lie scattered in host memory and cannot be stored "
                "as parts; page_first and page_first_direct can"
            )
        return tensors

    def head_slice(self, slices: int) -> PoolPiece:
        """Return one of equal slices along the heads. Raises ProfileError."""
        tensors = []
        for tensor in self.tensors:
            at = tensor.axes.index("head")
            heads, odd = divmod(tensor.shape[at], slices)
            if odd:
                raise ProfileError(
                    f"tp_lcm_size: a rank's {tensor.shape[at]} KV heads do not split into {slices} "
                    "slices"
                )
            shape = (*tensor.shape[:at], heads, *tensor.shape[at + 1 :])
            tensors.append(replace(tensor, shape=shape))
        return replace(self, tensors=tuple(tensors))

    def _ordered(self, layout: str) -> tuple[TensorLayout, ...]:
        if layout == "page_unified":
            raise UnsupportedByBackend(
                "page_unified belongs to the unified key scheme; no SGLang store reads or writes it"
            )
        kind_of(self.pool).check_layout(self.pool, layout)
        return tuple(tensor.in_layout(layout) for tensor in self.tensors)


def pp_ranges(
    num_layers: int, pp: int, partition: Sequence[int] = ()
) -> tuple[tuple[int, int], ...]:
    """Split layers over pipeline stages as half-open ranges.

    Without `partition` the last `num_layers % pp` stages hold one layer more (get_pp_indices).
    Raises ProfileError when a stage would be empty or the partition does not add up.
    """
    if pp == 1:  # SGLang ignores a partition then
        return ((0, num_layers),)
    small = pp - num_layers % pp
    sizes = list(partition) or [num_layers // pp + (rank >= small) for rank in range(pp)]
    if len(sizes) != pp or sum(sizes) != num_layers:
        raise ProfileError(f"pp_partition: {sizes} does not split {num_layers} layers over pp {pp}")
    if min(sizes) < 1:
        raise ProfileError(f"pp: {num_layers} layers cannot fill {pp} stages")
    ends = list(accumulate(sizes))
    return tuple(zip([0, *ends], ends, strict=False))


def layer_shard_range(rank: int, size: int, num_layers: int) -> tuple[int, int]:
    """Give the half-open range of a stage's layers that a CP rank owns under layer split.

    The first `num_layers % size` ranks own one layer more (get_layer_shard_range).
    """
    base, extra = divmod(num_layers, size)
    start = rank * base + min(rank, extra)
    return start, start + base + (rank < extra)


def model_layer_count(profile: Profile) -> int:
    """Count the target model's layers: those of the stages, else up to the largest named one."""
    if profile.pp > 1 and profile.pp_partition:
        return sum(profile.pp_partition)
    return max(
        (max(pool.layer_numbers, default=-1) + 1 for pool in profile.pools if not pool.is_draft),
        default=0,
    )


def stage_ranges(profile: Profile) -> tuple[tuple[int, int], ...]:
    """Give the half-open range of model layers of each pipeline stage. Raises ProfileError."""
    return pp_ranges(model_layer_count(profile), profile.pp, profile.pp_partition)


def pool_piece(
    profile: Profile, pool: Pool, *, pp_rank: int = 0, cp_rank: int = 0
) -> PoolPiece | None:
    """Describe what one rank stores of a pool; None where none of its layers lie on the stage.

    Raises ProfileError when the profile does not say enough, or contradicts itself.
    """
    kind = kind_of(pool)
    if not kind.has_bytes:
        return PoolPiece(pool=pool)
    layers, padding = _piece_layers(profile, pool, pp_rank, cp_rank)
    unplaced = not kind.has_form and not pool.layer_numbers
    if not layers and not padding and not unplaced:
        return None
    if unplaced and pool.is_draft and pp_rank != profile.pp - 1:
        return None
    if not kind.has_form:
        return PoolPiece(pool=pool, layers=layers, padding_layers=padding, nbytes=pool.nbytes)
    # Under DCP a rank holds every dcp-th token of a KV page; a draft holds the page whole.
    tokens = profile.page_size // profile.dcp if pool.name == "kv" else profile.page_size
    if pool.is_draft and kind.shards and profile.cp > 1:
        # runtime_context.py :: draft_attn_parallel_group: it depends on DP attention too.
        raise ProfileError(
            f"pools[{pool.name}]: with cp > 1 SGLang shards draft heads over a group of ranks "
            "that a profile does not state"
        )
    tp = profile.linear_tp if kind.linear and profile.linear_tp else profile.tp
    tensors = kind.tensors(pool, len(layers) + padding, tokens, tp)
    return PoolPiece(pool=pool, layers=layers, padding_layers=padding, tensors=tensors)


def _piece_layers(
    profile: Profile, pool: Pool, pp_rank: int, cp_rank: int
) -> tuple[tuple[int, ...], int]:
    """Give the layers a rank stores, and how many layers of padding."""
    # A draft runs on the last stage alone (EAGLEWorkerV2._hosts_draft), whole on each CP rank.
    hosts_draft = pp_rank == profile.pp - 1
    if pool.is_draft:
        if not hosts_draft:
            return (), 0
        first_packed = max(pool.layer_numbers, default=-1) + 1
        packed = range(first_packed, first_packed + pool.packed_draft_layers)
        return (*pool.layer_numbers, *packed), 0
    layers, padding = _split_layers(profile, pool, pp_rank, cp_rank)
    if hosts_draft:
        total = model_layer_count(profile)
        layers += tuple(range(total, total + pool.packed_draft_layers))
    return layers, padding


def _split_layers(
    profile: Profile, pool: Pool, pp_rank: int, cp_rank: int
) -> tuple[tuple[int, ...], int]:
    """Give the target's layers of a stage or of a CP rank's share of it, and the padding."""
    layers = _stage_layers(profile, pool, pp_rank)
    if not profile.cp_layer_split or profile.cp == 1 or not pool_name(pool.name).cp_split:
        return layers, 0
    anchor = profile.pools[0]
    if not kind_of(anchor).splits_layers:
        raise ProfileError("cp_layer_split: only DSA models, whose kv is of kind mla, have it")
    kv_layers = _stage_layers(profile, anchor, pp_rank)
    start, end = layer_shard_range(cp_rank, profile.cp, len(kv_layers))
    owned = kv_layers[start:end]
    if pool.name == "kv":
        # build_kv_host_pool rounds up, so that all ranks' objects have one size.
        return owned, -(-len(kv_layers) // profile.cp) - len(owned)
    # DSAIndexerPoolHost does not: it holds the owned layers that compute their own top-k.
    return tuple(layer for layer in layers if layer in owned), 0


def _stage_layers(profile: Profile, pool: Pool, pp_rank: int) -> tuple[int, ...]:
    if profile.pp == 1 or not pool.layer_numbers:
        return pool.layer_numbers
    total = model_layer_count(profile)
    if isinstance(pool.layers, int) and pool.layers != total:
        raise ProfileError(
            f"pools[{pool.name}].layers: a count of {pool.layers} out of {total} model layers "
            "does not say which stage holds them; give the layer numbers"
        )
    if max(pool.layer_numbers) >= total:
        raise ProfileError(f"pools[{pool.name}].layers: the stages hold {total} layers only")
    start, end = stage_ranges(profile)[pp_rank]
    return tuple(layer for layer in pool.layer_numbers if start <= layer < end)
