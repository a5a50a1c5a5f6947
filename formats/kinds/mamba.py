"""Kind mamba, recurrent states of linear attention and state-space layers.

A page has one set of states per layer, not per token.

Sources: SGLang srt/mem_cache/pool_host/mamba.py, srt/configs/mamba_utils.py.
"""

from __future__ import annotations

from itertools import accumulate
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

MAMBA_POOLS = (
    PoolName(
        name="mamba",
        trailing=True,
        dcp=True,
        states=True,
        parts=("temporal", "conv_"),
        mooncake=True,
    ),
)


def local_state_shape(place: str, state: StateTensor, tp: int) -> tuple[int, ...]:
    """Return the shape of one rank's shard of a state.

    Every rank holds all of each group that `state.whole` names. Each other group of the sharded
    axis is divided by tp, or by its number of heads if that is smaller.
    place: names the state in messages.
    Raises ProfileError if a group cannot be divided in this way.
    """
    held = 0
    for number, group in enumerate(state.lengths):
        heads = group // (state.least or 1)
        if number in state.whole:
            held += group
        elif heads % tp == 0:
            held += group // tp
        elif state.least and tp % heads == 0:
            held += state.least
        else:
            raise ProfileError(
                f"{place}: {group} along axis {state.shard_axis} of {list(state.shape)} is not a "
                f"multiple of the linear TP size {tp}; if every rank holds group {number} whole, "
                "add its number to `whole`"
            )
    shape = list(state.shape)
    shape[state.shard_axis] = held
    return tuple(shape)


def state_spans(state: StateTensor, rank: int, tp: int, held: int) -> list[Span]:
    """Return a rank's span in each group (q, k and v channels of a convolution).

    held: length of the sharded axis in the object.
    """
    groups = state.lengths
    repeated = sum(groups[number] for number in state.whole)
    divided = sum(groups) - repeated
    parts = divided // (held - repeated) if divided else 1
    part = rank * parts // tp  # if ranks outnumber heads, neighbouring ranks share a head
    shares = [
        group if number in state.whole else group // parts for number, group in enumerate(groups)
    ]
    starts = accumulate(groups, initial=0)
    places = accumulate(shares, initial=0)
    return [
        (at, start if number in state.whole else start + part * share, share)
        for number, (at, start, share) in enumerate(zip(places, starts, shares, strict=False))
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
        held = tensor.shape[tensor.axes.index(axis)]
        return {axis: state_spans(state, rank, tp, held)}
