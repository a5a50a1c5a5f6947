"""The content of objects, as regions of a page independent of the deployment.

A pool's content is indexed by model layer, KV head, token, channel and so on. An object holds
boxes of it: some layers, heads and state channels. The axis order determines a box's offset.
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

from hicachectl.formats.copyplan import Extent, Region
from hicachectl.formats.errors import ProfileError
from hicachectl.formats.kinds import kind_of
from hicachectl.formats.kinds.base import holder
from hicachectl.formats.kinds.pool import pool_name
from hicachectl.formats.objects import ANCHOR

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicachectl.formats.kinds.base import Span
    from hicachectl.formats.kinds.pool import Pool
    from hicachectl.formats.layouts import TensorLayout
    from hicachectl.formats.profile import Profile
    from hicachectl.formats.spec import ObjectSpec

LayerOrder = dict[object, int]


def layer_order(pool: Pool) -> LayerOrder:
    """Return the index of each layer in a whole page of the pool, packed draft layers last."""
    names = [*pool.layer_numbers, *(("packed", n) for n in range(pool.packed_draft_layers))]
    return {name: number for number, name in enumerate(names)}


def object_regions(
    profile: Profile, pool: Pool, expected: ObjectSpec, order: LayerOrder
) -> tuple[Region, ...]:
    """Return the boxes that an object holds; none for an object without bytes.

    order: layer order of the pool in the source deployment. Raises ProfileError if the object has a
    layer that `order` lacks.
    """
    if not expected.tensors:
        return _opaque_region(profile, pool, expected) if kind_of(pool).has_bytes else ()
    layers = _layer_spans(pool, expected, order)
    return tuple(
        region
        for tensor in expected.tensors
        for region in _tensor_regions(profile, pool, expected, tensor, layers)
    )


def _tensor_regions(
    profile: Profile,
    pool: Pool,
    expected: ObjectSpec,
    tensor: TensorLayout,
    layers: list[Span],
) -> Iterator[Region]:
    """Yield a box per combination of spans along the tensor's axes."""
    strides = tensor.strides
    spans: dict[str, list[Span]] = {
        axis: [(0, 0, length)] for axis, length in zip(tensor.axes, tensor.shape, strict=True)
    }
    spans |= kind_of(pool).spans(pool, tensor, expected.coordinate.shard, profile.tp)
    spans["layer"] = layers
    space = (*_space(profile, pool, expected), tensor.name)
    names = sorted(spans)
    for chosen in product(*(spans[name] for name in names)):
        placed = list(zip(names, chosen, strict=True))
        offset = tensor.offset + sum(at * strides[name] for name, (at, _, _) in placed)
        extents = tuple(
            Extent(name, first, length, strides[name]) for name, (_, first, length) in placed
        )
        yield Region(space, extents, tensor.itemsize, offset)


def _space(profile: Profile, pool: Pool, expected: ObjectSpec) -> tuple[object, ...]:
    """Return the identity of the content that an object's indices refer to.

    DCP ranks hold different tokens of kv under equal indices. Contents of CP ranks may differ too,
    unless the ranks divide the layers.
    """
    shard = expected.coordinate.shard
    split = profile.cp_layer_split and pool_name(pool.name).cp_split
    dcp_rank = shard.dcp_rank if pool.name == ANCHOR else None
    return pool.name, dcp_rank or 0, 0 if split else shard.cp_rank or 0


def _opaque_region(profile: Profile, pool: Pool, expected: ObjectSpec) -> tuple[Region, ...]:
    """Return an object of unknown form as one item, with its rank and layers as identity."""
    shard = expected.coordinate.shard
    shared = pool.replicated or (shard.tp_rank is None and shard.heads is None)
    place = None if shared else (profile.tp, holder(shard))
    layers = expected.layers or (profile.pp, shard.pp_rank)
    space = (*_space(profile, pool, expected), expected.coordinate.part, place, layers)
    return (Region(space, (), expected.nbytes, 0),)


def _layer_spans(pool: Pool, expected: ObjectSpec, order: LayerOrder) -> list[Span]:
    own = set(pool.layer_numbers)
    held = [layer for layer in expected.layers if layer in own]
    packed = len(expected.layers) - len(held)
    names: list[object] = [*held, *(("packed", number) for number in range(packed))]
    padding = expected.padding_layers
    spans: list[Span] = []
    for place, name in enumerate(names):
        if name not in order:
            raise ProfileError(
                f"pools[{pool.name}]: the source does not store {_layer_text(name)}; give profiles "
                "of the same layers"
            )
        at, number = place + (padding if place >= len(held) else 0), order[name]
        last = spans[-1] if spans else None
        if last is not None and (last[0] + last[2], last[1] + last[2]) == (at, number):
            spans[-1] = (last[0], last[1], last[2] + 1)
        else:
            spans.append((at, number, 1))
    return spans


def _layer_text(name: object) -> str:
    return f"layer {name}" if isinstance(name, int) else "packed draft layers"
