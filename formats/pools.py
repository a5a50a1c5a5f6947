"""Compute the layers, heads, states and row widths of one rank's piece of one pool.

The divisions are those of SGLang:
- layers among pipeline stages (srt/distributed/utils.py :: get_pp_indices)
- KV heads among TP ranks (srt/configs/model_config.py :: get_num_kv_heads)
- layers among context-parallel ranks (srt/layers/cp/utils.py :: get_layer_shard_range)
- states of linear attention (srt/configs/mamba_utils.py)

All TP and DCP ranks have pieces of equal sizes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING

from hicachectl.formats.errors import ProfileError
from hicachectl.formats.kinds import kind_of
from hicachectl.formats.kinds.pool import pool_name
from hicachectl.formats.objects import ANCHOR

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicachectl.formats.kinds.pool import Pool
    from hicachectl.formats.layouts import TensorLayout
    from hicachectl.formats.profile import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPiece:
    """One rank's piece of a pool in one page.

    layers: model layer numbers in stored order. Numbers of packed draft layers follow the model's
        last number. The layers of a draft pool are the draft's layers.
    padding_layers: unused layers between target and packed draft layers (CP layer split).
    tensors: tensors in the axis order of layer_first; none if the form is unknown (opaque,
        logical).
    nbytes: bytes of an object without tensors.
    """

    pool: Pool
    layers: tuple[int, ...] = ()
    padding_layers: int = 0
    tensors: tuple[TensorLayout, ...] = ()
    nbytes: int = 0

    def flat(self, layout: str) -> tuple[TensorLayout, ...]:
        """Return the tensors of an object with the whole page (file, 3FS without zero-copy).

        Raises ProfileError if SGLang does not build the pool in this layout, UnsupportedByBackend
        for a pool without flat pages.
        """
        kind_of(self.pool).check_flat(self.pool)
        tensors = self.parts(layout)
        offsets = accumulate((tensor.nbytes for tensor in tensors), initial=0)
        return tuple(
            replace(tensor, offset=offset) for tensor, offset in zip(tensors, offsets, strict=False)
        )

    def parts(self, layout: str) -> tuple[TensorLayout, ...]:
        """Return the tensors of objects with one part each (Mooncake, 3FS -k and -v), in order.

        Raises ProfileError as `flat` does.
        """
        kind_of(self.pool).check_layout(self.pool, layout)
        return tuple(tensor.in_layout(layout) for tensor in self.tensors)

    def head_slice(self, slices: int) -> PoolPiece:
        """Return one slice of a piece that is divided along the heads. Raises ProfileError.

        slices: number of equal slices.
        """
        tensors = []
        for tensor in self.tensors:
            at = tensor.axes.index("head")
            heads, odd = divmod(tensor.shape[at], slices)
            if odd:
                raise ProfileError(
                    f"tp_lcm_size: a rank's {tensor.shape[at]} KV heads cannot be split into "
                    f"{slices} equal slices; give another tp_lcm_size"
                )
            shape = (*tensor.shape[:at], heads, *tensor.shape[at + 1 :])
            tensors.append(replace(tensor, shape=shape))
        return replace(self, tensors=tuple(tensors))


def pp_ranges(
    num_layers: int, pp: int, partition: Sequence[int] = ()
) -> tuple[tuple[int, int], ...]:
    """Return the half-open layer range of each pipeline stage.

    Without `partition`, the last `num_layers % pp` stages have one more layer (get_pp_indices).
    Raises ProfileError if a stage is empty, or if the partition does not divide `num_layers` layers
    among `pp` stages.
    """
    if pp == 1:  # SGLang then ignores the partition
        return ((0, num_layers),)
    sizes = list(partition) or _even(num_layers, pp)
    if len(sizes) != pp or sum(sizes) != num_layers:
        raise ProfileError(
            f"pp_partition: {sizes} does not split {num_layers} layers over pp {pp}; give the "
            "layers of each stage"
        )
    if min(sizes) < 1:
        raise ProfileError(f"pp: {num_layers} layers cannot fill {pp} stages; give a smaller pp")
    ends = list(accumulate(sizes))
    return tuple(zip([0, *ends], ends, strict=False))


def _even(num_layers: int, pp: int) -> list[int]:
    small = pp - num_layers % pp
    return [num_layers // pp + (rank >= small) for rank in range(pp)]


def partition_text(partition: Sequence[int], pp: int) -> str:
    """Return the layers of each pipeline stage, such as `16,15`; "" for SGLang's own division."""
    if pp == 1 or not partition or list(partition) == _even(sum(partition), pp):
        return ""
    return ",".join(map(str, partition))


def layer_shard_range(rank: int, size: int, num_layers: int) -> tuple[int, int]:
    """Return a CP rank's half-open range of a stage's layers under layer split.

    The first `num_layers % size` ranks own one more layer (get_layer_shard_range).
    """
    base, extra = divmod(num_layers, size)
    start = rank * base + min(rank, extra)
    return start, start + base + (rank < extra)


def model_layer_count(profile: Profile) -> int:
    """Return the target's number of layers.

    It is the sum of pp_partition. If there is one stage or no pp_partition, it is the highest layer
    number in the target's pools plus 1.
    """
    if profile.pp > 1 and profile.pp_partition:
        return sum(profile.pp_partition)
    return max(
        (max(pool.layer_numbers, default=-1) + 1 for pool in profile.pools if not pool.is_draft),
        default=0,
    )


def stage_ranges(profile: Profile) -> tuple[tuple[int, int], ...]:
    """Return each pipeline stage's half-open range of model layers. Raises ProfileError."""
    return pp_ranges(model_layer_count(profile), profile.pp, profile.pp_partition)


def pool_piece(
    profile: Profile, pool: Pool, *, pp_rank: int = 0, cp_rank: int = 0
) -> PoolPiece | None:
    """Return one rank's piece of a pool; None if its stage has no layers of the pool.

    Raises ProfileError if the profile is incomplete or contradictory.
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
    # Under DCP, a rank holds every dcp-th token of a KV page, but all tokens of a draft's page.
    tokens = profile.page_size // profile.dcp if pool.name == ANCHOR else profile.page_size
    if pool.is_draft and kind.shards and profile.cp > 1:
        # runtime_context.py :: draft_attn_parallel_group also depends on DP attention.
        raise ProfileError(
            f"pools[{pool.name}]: not supported with cp {profile.cp}, because SGLang shards draft "
            "heads over a group of ranks that a profile does not state; leave out the pool"
        )
    tp = profile.linear_tp if kind.linear and profile.linear_tp else profile.tp
    tensors = kind.tensors(pool, len(layers) + padding, tokens, tp)
    return PoolPiece(pool=pool, layers=layers, padding_layers=padding, tensors=tensors)


def _piece_layers(
    profile: Profile, pool: Pool, pp_rank: int, cp_rank: int
) -> tuple[tuple[int, ...], int]:
    """Return a rank's layers and number of padding layers."""
    # Only the last stage runs the draft (EAGLEWorkerV2._hosts_draft). Each of its CP ranks holds
    # all layers of the draft.
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
    """Return a rank's target layers and number of padding layers."""
    layers = _stage_layers(profile, pool, pp_rank)
    if not profile.cp_layer_split or profile.cp == 1 or not pool_name(pool.name).cp_split:
        return layers, 0
    anchor = profile.pools[0]
    if not kind_of(anchor).splits_layers:
        raise ProfileError(
            "cp_layer_split: needs a DSA model, with a kv pool of kind mla; leave it out"
        )
    kv_layers = _stage_layers(profile, anchor, pp_rank)
    start, end = layer_shard_range(cp_rank, profile.cp, len(kv_layers))
    owned = kv_layers[start:end]
    if pool.name == ANCHOR:
        # build_kv_host_pool rounds up, so objects of all ranks have the same size.
        return owned, -(-len(kv_layers) // profile.cp) - len(owned)
    # DSAIndexerPoolHost does not round. It holds the owned layers that compute their own top-k.
    return tuple(layer for layer in layers if layer in owned), 0


def _stage_layers(profile: Profile, pool: Pool, pp_rank: int) -> tuple[int, ...]:
    if profile.pp == 1 or not pool.layer_numbers:
        return pool.layer_numbers
    total = model_layer_count(profile)
    if isinstance(pool.layers, int) and pool.layers != total:
        raise ProfileError(
            f"pools[{pool.name}].layers: the count {pool.layers} does not show which of the "
            f"model's {total} layers the pool has; give a list of layer numbers"
        )
    if max(pool.layer_numbers) >= total:
        raise ProfileError(
            f"pools[{pool.name}].layers: there is no layer {max(pool.layer_numbers)}; give layers "
            f"below {total}, counted from 0"
        )
    start, end = stage_ranges(profile)[pp_rank]
    return tuple(layer for layer in pool.layer_numbers if start <= layer < end)
