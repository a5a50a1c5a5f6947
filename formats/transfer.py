"""Plan the copies that convert a page's objects from one deployment to another.

Keys, axis order and ranks change; the content does not. A pool's content is indexed by model layer,
KV head, token, channel and so on. An object holds boxes of the content. A box has some layers,
heads and state channels, at an offset that the axis order determines. One strided copy
(`formats.copyplan`) moves the overlap of two boxes.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any

from msgspec import structs

from hicachectl.formats.copyplan import CopyPlan, Extent, Region, joined, overlap
from hicachectl.formats.errors import ProfileError, UnsupportedByBackend
from hicachectl.formats.kinds import kind_of
from hicachectl.formats.kinds.base import holder
from hicachectl.formats.kinds.pool import pool_name
from hicachectl.formats.objects import ANCHOR
from hicachectl.formats.spec import ObjectSpec, object_specs
from hicachectl.formats.transfer_checks import Side, check_release, check_transfer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hicachectl.formats.kinds.base import Span
    from hicachectl.formats.kinds.pool import Pool
    from hicachectl.formats.layouts import TensorLayout
    from hicachectl.formats.profile import Profile


_LayerOrder = dict[object, int]


@dataclass(frozen=True, slots=True)
class TransferUnit:
    """Source objects that must be in memory together, and the destination objects made from them.

    sources, destinations: indices into the plan's objects. Copies in turn index these two tuples.
        A destination without sources stands for an anchor without bytes.
    copies:   copies that fill every byte of every destination once, except in `padded`.
    identity: whether the unit is one source and one destination with equal bytes.
    trailing: whether a page may lack the sources. A page without them lacks the destinations, too.
    padded:   destinations with bytes that no copy fills and that must be zero.
    """

    sources: tuple[int, ...]
    destinations: tuple[int, ...]
    copies: tuple[CopyPlan, ...]
    identity: bool
    trailing: bool
    padded: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """All copies between the objects of one page in two deployments.

    sources, destinations: all objects that a page can have, in `object_specs` order.
    units: the smallest sets of objects such that no copy leads from one set to another. Each
        destination is in one set.
    """

    sources: tuple[ObjectSpec, ...]
    destinations: tuple[ObjectSpec, ...]
    units: tuple[TransferUnit, ...]


def transfer_plan(
    source: Profile, source_grammar: str, destination: Profile, destination_grammar: str
) -> TransferPlan:
    """Plan the transfer of a page between two deployments.

    Grammars are names, as for `object_specs`. Raises UnsupportedByBackend, ProfileError or
    UsageError if a page cannot be transferred whole.
    """
    sources = object_specs(source, source_grammar)
    destinations = object_specs(destination, destination_grammar)
    ours = Side(source, source_grammar, sources)
    theirs = Side(destination, destination_grammar, destinations)
    if _is_plain(ours, theirs):
        units = [_whole_unit((n,), n, spec) for n, spec in enumerate(destinations)]
        return TransferPlan(sources, destinations, tuple(units))
    check_transfer(ours, theirs)
    orders = {pool.name: _layer_order(pool) for pool in source.pools}
    copies = _copies(_regions(ours, orders), _regions(theirs, orders), destinations)
    units = [
        *_connected_units(copies, sources, destinations),
        *_marker_units(ours, theirs),
    ]
    units.sort(key=lambda unit: unit.destinations)
    return TransferPlan(sources, destinations, tuple(units))


def retargeted(profile: Profile, **changes: Any) -> Profile:
    """Return the profile of a deployment that stores the same pages differently.

    The result is not validated.
    changes: fields of a profile; None keeps a value. A new pp without a pp_partition gets SGLang's
        default partition. linear_tp follows tp if both were equal.
    Raises ProfileError if a new release (sglang) has other objects. If `pools` are among the
    changes, the releases are not compared.
    """
    if changes.get("sglang") and not changes.get("pools"):
        check_release(profile, changes["sglang"])
    new = {name: value for name, value in changes.items() if value is not None}
    if new.get("pp", profile.pp) != profile.pp:
        new.setdefault("pp_partition", ())
    if "tp" in new and profile.linear_tp == profile.tp:
        new["linear_tp"] = new["tp"]
    return structs.replace(profile, **new)


def _is_plain(source: Side, destination: Side) -> bool:
    """Return whether only the names in the keys change."""
    old, new = source.profile, destination.profile
    same = structs.replace(new, model=old.model, tag=old.tag, sglang=old.sglang) == old
    if not same or len(source.specs) != len(destination.specs):
        return False
    return all(
        replace(two, affix=one.affix, coordinate=one.coordinate) == one
        and replace(two.coordinate, names=one.coordinate.names) == one.coordinate
        for one, two in zip(source.specs, destination.specs, strict=True)
    )


def _regions(side: Side, orders: dict[str, _LayerOrder]) -> list[tuple[Region, ...]]:
    pools = {pool.name: pool for pool in side.profile.pools}
    return [
        _object_regions(side.profile, pools[spec.pool], spec, orders[spec.pool])
        for spec in side.specs
    ]


class _Sources:
    """Index of the source objects that hold each box, by space and layers."""

    def __init__(self, regions: Sequence[tuple[Region, ...]]) -> None:
        # space -> (first layer, end) -> box -> its holders, each with its own region
        self._boxes: dict[object, dict[tuple[int, int], dict[object, dict[int, Region]]]]
        self._boxes = defaultdict(lambda: defaultdict(lambda: defaultdict(dict)))
        for number, held in enumerate(regions):
            for region in held:
                self._boxes[region.space][_layers(region)][region.box][number] = region

    def copies(
        self, wanted: Sequence[Region], destination: int, replica: int
    ) -> list[list[CopyPlan]]:
        """Return the copies that fill each box of a destination.

        replica: number of the destination among destinations with the same boxes. These
            destinations take turns among holders of equal content. A source that the destination
            needs anyway is preferred, so that units stay small.
        """
        needed = [(place, one) for place, box in enumerate(wanted) for one in self._holders(box)]
        needed.sort(key=lambda pair: len(pair[1]))  # boxes with the fewest holders come first
        feeding: set[int] = set()
        found: list[list[CopyPlan]] = [[] for _ in wanted]
        for place, holders in needed:
            numbers = [number for number in holders if number in feeding] or list(holders)
            chosen = numbers[replica % len(numbers)]
            shared = overlap(holders[chosen], wanted[place], copy_from=chosen, copy_to=destination)
            found[place] += [shared] if shared else []
            feeding.add(chosen)
        return found

    def _holders(self, wanted: Region) -> Iterator[dict[int, Region]]:
        """Yield the holders of each box that overlaps a wanted box."""
        first, end = _layers(wanted)
        for (start, stop), boxes in self._boxes[wanted.space].items():
            if start < end and stop > first:
                yield from (
                    one for one in boxes.values() if _meet(next(iter(one.values())), wanted)
                )


def _meet(one: Region, two: Region) -> bool:
    """Return whether two boxes of one space overlap."""
    return all(
        a.first < b.first + b.length and b.first < a.first + a.length
        for a, b in zip(one.extents, two.extents, strict=True)
    )


def _layers(region: Region) -> tuple[int, int]:
    """Return the layer span of a box, for fast lookup; (0, 1) for a box without layers."""
    span = next(((a.first, a.first + a.length) for a in region.extents if a.name == "layer"), None)
    return span or (0, 1)


def _copies(
    sources: Sequence[tuple[Region, ...]],
    destinations: Sequence[tuple[Region, ...]],
    objects: Sequence[ObjectSpec],
) -> list[CopyPlan]:
    """Return the copies for all destinations.

    Raises UnsupportedByBackend if the sources lack content.
    """
    held = _Sources(sources)
    seen: dict[tuple[object, ...], int] = defaultdict(int)
    found: list[CopyPlan] = []
    for number, regions in enumerate(destinations):
        signature = tuple(region.box for region in regions)
        filled = held.copies(regions, number, seen[signature])
        for region, copies in zip(regions, filled, strict=True):
            if sum(copy.nbytes for copy in copies) != region.nbytes:
                raise UnsupportedByBackend(_gap_text(objects[number]))
            found += copies
        seen[signature] += 1
    return found


def _gap_text(expected: ObjectSpec) -> str:
    coordinate = expected.coordinate
    part = f" part {coordinate.part}" if coordinate.part else ""
    ranks = coordinate.shard.ranks_text()
    what = f"pools[{coordinate.pool}]{part} of {ranks or 'all ranks'}"
    if not expected.tensors:
        return (
            f"{what}: the form of the bytes is unknown, so topology and layout cannot change; give "
            "a profile that describes the pool"
        )
    return f"{what}: the source lacks a part of the content; check both profiles"


def _marker_units(source: Side, destination: Side) -> Iterator[TransferUnit]:
    """Yield a unit for each object that stands for an anchor without bytes.

    Its source is such an object of the source deployment, if that deployment has any.
    """
    there = source.markers
    for position, number in enumerate(destination.markers):
        taken = (there[position % len(there)],) if there else ()
        spec = destination.specs[number]
        if taken and source.specs[taken[0]].nbytes == spec.nbytes:
            yield _whole_unit(taken, number, spec)
        else:
            yield TransferUnit(taken, (number,), (), False, spec.trailing, padded=(0,))


def _whole_unit(taken: tuple[int, ...], destination: int, spec: ObjectSpec) -> TransferUnit:
    copies = (CopyPlan((), spec.nbytes),) if spec.nbytes else ()
    return TransferUnit(taken, (destination,), copies, bool(taken), spec.trailing)


def _connected_units(
    copies: Sequence[CopyPlan],
    sources: Sequence[ObjectSpec],
    destinations: Sequence[ObjectSpec],
) -> list[TransferUnit]:
    parents: dict[tuple[str, int], tuple[str, int]] = {}

    def root(node: tuple[str, int]) -> tuple[str, int]:
        while parents.setdefault(node, node) != node:
            parents[node] = parents[parents[node]]
            node = parents[node]
        return node

    for copy in copies:
        parents[root(("source", copy.source))] = root(("destination", copy.destination))
    sets: dict[tuple[str, int], list[CopyPlan]] = defaultdict(list)
    for copy in copies:
        sets[root(("source", copy.source))].append(copy)
    return [_unit(found, sources, destinations) for found in sets.values()]


def _unit(
    copies: Sequence[CopyPlan],
    sources: Sequence[ObjectSpec],
    destinations: Sequence[ObjectSpec],
) -> TransferUnit:
    taken = sorted({copy.source for copy in copies})
    made = sorted({copy.destination for copy in copies})
    local = joined(
        replace(c, source=taken.index(c.source), destination=made.index(c.destination))
        for c in copies
    )
    filled: dict[int, int] = defaultdict(int)
    for copy in local:
        filled[copy.destination] += copy.nbytes
    sizes = [destinations[number].nbytes for number in made]
    equal = [sources[number].nbytes for number in taken] == sizes and len(sizes) == 1
    return TransferUnit(
        sources=tuple(taken),
        destinations=tuple(made),
        copies=local,
        identity=equal and local[0].run == sizes[0],
        trailing=destinations[made[0]].trailing,
        padded=tuple(at for at, nbytes in enumerate(sizes) if filled[at] != nbytes),
    )


# regions


def _layer_order(pool: Pool) -> _LayerOrder:
    """Return the index of each layer in a whole page of the pool. Packed draft layers are last."""
    names = [*pool.layer_numbers, *(("packed", n) for n in range(pool.packed_draft_layers))]
    return {name: number for number, name in enumerate(names)}


def _object_regions(
    profile: Profile, pool: Pool, expected: ObjectSpec, order: _LayerOrder
) -> tuple[Region, ...]:
    """Return the boxes that an object holds; none for an object without bytes.

    order: layer order of the pool in the source deployment.
    Raises ProfileError if the object has a layer that `order` lacks.
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
    """Yield a box for each combination of spans along the tensor's axes."""
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

    DCP ranks hold different tokens of kv under equal indices. CP ranks may hold different contents
    under equal indices, too, if they do not divide the layers.
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


def _layer_spans(pool: Pool, expected: ObjectSpec, order: _LayerOrder) -> list[Span]:
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
