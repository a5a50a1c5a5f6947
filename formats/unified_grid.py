"""How the unified key scheme cuts a page into objects: layers by heads, whoever stores them.

Source: SGLang srt/mem_cache/hicache_key_scheme.py :: plan_unified_kv, _layer_chunks,
_resolve_head_group. Without agreed sizes each rank stores its own shard as one object.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hicachectl.formats.errors import UnsupportedByBackend
from hicachectl.formats.keys.unified import unified_namespace
from hicachectl.formats.layouts import MhaGeometry, MlaGeometry
from hicachectl.formats.pools import local_kv_heads, mla_row, pool_piece, stage_ranges

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicachectl.formats.profile import Pool, Profile

_SCALED_ROW_DTYPE = "float8_e4m3fn"  # the logical one; scaled rows are bytes


@dataclass(frozen=True, slots=True)
class UnifiedChunk:
    """One object: a run of model layers, and a group of KV heads unless ranks share the KV.

    namespace: the digest that stands for the model in the key.
    """

    namespace: str
    layers: tuple[int, int]
    heads: tuple[int, int] | None
    geometry: MhaGeometry | MlaGeometry


def unified_chunks(profile: Profile) -> Iterator[UnifiedChunk]:
    """List the objects of a page, layers first. Raises UnsupportedByBackend where there are none.

    Their bytes are those of `unified_page`.
    """
    anchor = profile.pools[0]
    _check(profile, anchor)
    namespace = unified_namespace(
        model_id=profile.model,
        dtype=_logical_dtype(anchor),
        page_size=profile.page_size,
        rank_replicated=profile.rank_replicated,
        total_kv_heads=anchor.kv_heads,
        head_group=_head_group(profile, anchor),
        layer_partition=profile.unified_layer_partition,
    )
    for layers in _layer_runs(profile):
        for heads, geometry in _head_groups(profile, anchor, layers):
            yield UnifiedChunk(namespace, layers, heads, geometry)


def _check(profile: Profile, anchor: Pool) -> None:
    if anchor.kind not in ("mha", "mla"):
        raise UnsupportedByBackend("the unified key scheme holds kv pages of kind mha and mla only")
    if profile.cp > 1 or profile.dcp > 1:
        raise UnsupportedByBackend("the unified key scheme has no context parallelism")
    for pp_rank, (start, end) in enumerate(stage_ranges(profile)):
        piece = pool_piece(profile, anchor, pp_rank=pp_rank)
        if piece is None or piece.layers != tuple(range(start, end)):
            raise UnsupportedByBackend(
                f"the unified key scheme names runs of layers; kv is not just {start} to {end - 1}"
            )


def _logical_dtype(anchor: Pool) -> str:
    if anchor.kind == "mha":
        return anchor.dtype
    return _SCALED_ROW_DTYPE if anchor.row == "fp8_scaled" else mla_row(anchor)[1]


def _head_group(profile: Profile, anchor: Pool) -> int:
    """Give the KV heads of one object; 0 where ranks share the KV."""
    if profile.rank_replicated:
        return 0
    if anchor.kv_heads % profile.tp:
        raise UnsupportedByBackend(
            f"the unified key scheme cannot name {anchor.kv_heads} KV heads that {profile.tp} "
            "ranks hold in part or in common"
        )
    held = local_kv_heads(anchor.kv_heads, profile.tp)
    group = profile.unified_head_group
    if not group and held == 1 and profile.tp > 1:
        raise UnsupportedByBackend(
            "unified_head_group: one KV head a rank can be a shard or a copy, so the unified key "
            "scheme wants it stated"
        )
    if group and held % group:
        raise UnsupportedByBackend(
            f"unified_head_group: {group} does not divide the {held} KV heads of a rank"
        )
    return group or held


def _layer_runs(profile: Profile) -> Iterator[tuple[int, int]]:
    step = profile.unified_layer_partition
    stages = stage_ranges(profile)
    for start, end in stages:
        if not step:
            yield start, end
            continue
        if start % step:
            raise UnsupportedByBackend(
                f"unified_layer_partition: the stage from layer {start} on starts off the grid of "
                f"{step} layers"
            )
        yield from ((first, min(first + step, end)) for first in range(start, end, step))


def _head_groups(
    profile: Profile, anchor: Pool, layers: tuple[int, int]
) -> Iterator[tuple[tuple[int, int] | None, MhaGeometry | MlaGeometry]]:
    piece = pool_piece(replace(profile, pp=1, pp_partition=()), anchor)
    assert piece is not None  # _check
    count = layers[1] - layers[0]
    geometry = piece.geometry
    if isinstance(geometry, MlaGeometry):
        yield None, replace(geometry, layers=count)
        return
    assert isinstance(geometry, MhaGeometry)
    group = _head_group(profile, anchor)
    if not group:
        yield None, replace(geometry, layers=count)
        return
    for number in range(anchor.kv_heads // group):
        yield (number, number + 1), replace(geometry, layers=count, heads=group)
