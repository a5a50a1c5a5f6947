"""Kind mamba, recurrent states of linear attention and state-space layers.

A page has one set of states per layer, not per token.

Sources: SGLang srt/mem_cache/pool_host/mamba.py, srt/configs/mamba_utils.py.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from hicachectl.formats.errors import ProfileError
from hicachectl.formats.kinds.base import PoolKind, holder
from hicachectl.formats.kinds.pool import PoolName
from hicachectl.formats.layouts import PAGE_FIRST_LAYOUTS, TensorLayout

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicachectl.formats.kinds.base import Span
    from hicachectl.formats.kinds.pool import Pool, StateTensor
    from hicachectl.formats.objects import Shard

MAMBA_POOLS = (PoolName(name="mamba", trailing=True, dcp=True, states=True, mooncake="states"),)


def local_state_shape(place: str, state: StateTensor, tp: int) -> tuple[int, ...]:
    """Return the shape of one rank's shard of a state. place: names the state in the error.

    Each group of the sharded axis is divided by tp. Raises ProfileError if a group is not a
    multiple of tp: SGLang then replicates groups, and the profile must state the widened shape.
    """
    groups = state.groups or (state.shape[state.shard_axis],)
    for group in groups:
        if group % tp:
            raise ProfileError(
                f"{place}: {group} along axis {state.shard_axis} of {list(state.shape)} is not a "
                f"multiple of the linear TP size {tp}; SGLang then replicates groups, so give the "
                "widened shape"
            )
    shape = list(state.shape)
    shape[state.shard_axis] = sum(group // tp for group in groups)
    return tuple(shape)


def state_spans(state: StateTensor, rank: int, held: int) -> list[Span]:
    """Return a rank's span in each group (q, k and v channels of a convolution).

    held: length of the sharded axis in the object.
    """
    whole = state.shape[state.shard_axis]
    groups = state.groups or (whole,)
    ranks = whole // held
    starts = accumulate(groups, initial=0)
    places = accumulate((group // ranks for group in groups), initial=0)
    return [
        (at, start + rank * (end - start) // ranks, (end - start) // ranks)
        for at, (start, end) in zip(places, pairwise(starts), strict=False)
    ]


class Mamba(PoolKind):
    """Recurrent states, each with its own sharded axis."""

    name = "mamba"
    summary = "layers, temporal, conv; shapes before sharding."
    words = "a Mamba pool"
    required = ("layers",)
    shards = True
    linear = True
    nixl_layouts = PAGE_FIRST_LAYOUTS

    def states(self, pool: Pool) -> dict[str, StateTensor]:
        """Return a layer's states before sharding, by name, in stored order."""
        found = {} if pool.temporal is None else {"temporal": pool.temporal}
        return found | {f"conv_{index}": state for index, state in enumerate(pool.conv)}

    def problems(self, pool: Pool) -> Iterator[str]:
        """Yield a message if the pool has no state."""
        if not self.states(pool):
            yield "temporal, conv: a mamba pool needs at least one state"

    def tensors(self, pool: Pool, layers: int, tokens: int, tp: int) -> tuple[TensorLayout, ...]:
        """Return one rank's share of each state of all layers."""
        tensors = []
        for name, state in self.states(pool).items():
            axes = ("layer", *(f"state_{axis}" for axis in range(len(state.shape))))
            place = f"pools[{pool.name}], state {name}"
            shape = local_state_shape(place, state, 1 if pool.replicated else tp)
            tensors.append(TensorLayout(name, axes, (layers, *shape), state.dtype))
        return tuple(tensors)

    def spans(
        self, pool: Pool, tensor: TensorLayout, shard: Shard, tp: int
    ) -> dict[str, list[Span]]:
        """Return an object's share of each group along the sharded axis."""
        state = self.states(pool)[tensor.name]
        axis = f"state_{state.shard_axis}"
        rank = 0 if pool.replicated else holder(shard)
        return {axis: state_spans(state, rank, tensor.shape[tensor.axes.index(axis)])}


MAMBA = Mamba()
