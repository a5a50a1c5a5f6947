"""A pool kind, added as another package would add it: without a change to the product.

A page holds the last inputs of each layer's short convolution: [layers, channels, width], sharded
by channels, one object of each page and TP rank.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from hicachectl.formats import kinds
from hicachectl.formats.errors import ProfileError
from hicachectl.formats.kinds.base import PoolKind, holder
from hicachectl.formats.kinds.pool import PoolName
from hicachectl.formats.layouts import TensorLayout

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicachectl.formats.kinds.base import Span
    from hicachectl.formats.kinds.pool import Pool
    from hicachectl.formats.objects import Shard

NAMES = (PoolName(name="conv_state"),)


class ConvState(PoolKind):
    """Windows of short convolutions; the pool's `conv` states one, [channels, width]."""

    name = "conv_state"
    summary = "layers, conv: one window, [channels, width]."
    words = "a pool of convolution windows"
    required = ("layers", "conv")
    shards = True

    def problems(self, pool: Pool) -> Iterator[str]:
        """Yield a message if there is not one window with two axes."""
        if [len(state.shape) for state in pool.conv] != [2]:
            yield "conv: a conv_state pool needs one window, [channels, width]"

    def tensors(self, pool: Pool, layers: int, tokens: int, tp: int) -> tuple[TensorLayout, ...]:
        """Return the windows of one rank's channels, independent of `tokens`."""
        channels, width = pool.conv[0].shape
        shape = (layers, channels // tp, width)
        return (TensorLayout("window", ("layer", "channel", "tap"), shape, pool.conv[0].dtype),)

    def check_shards(self, pool: Pool, tp: int) -> None:
        """Refuse channels that cannot be divided evenly among ranks."""
        if pool.conv[0].shape[0] % tp:
            raise ProfileError(f"pools[{pool.name}].conv: channels do not divide over {tp} ranks")

    def spans(
        self, pool: Pool, tensor: TensorLayout, shard: Shard, tp: int
    ) -> dict[str, list[Span]]:
        """Return the channels of a rank."""
        held = tensor.shape[tensor.axes.index("channel")]
        return {"channel": [(0, holder(shard) * held, held)]}


@contextmanager
def registered() -> Iterator[PoolKind]:
    """Register the kind during a test only."""
    kind = ConvState()
    kinds.register(kind, NAMES)
    try:
        yield kind
    finally:
        kinds.unregister(kind, NAMES)
