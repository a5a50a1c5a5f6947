"""Specs of a page's objects, for all ranks of a deployment.

Coordinates follow SGLang's key builders (`formats.keys`).
Source: SGLang srt/mem_cache/hicache_storage.py :: HiCacheFile,
storage/mooncake_store/mooncake_store.py :: MooncakeStore, storage/hf3fs/storage_hf3fs.py ::
HiCacheHF3FS, storage/nixl/hicache_nixl.py :: HiCacheNixl, managers/cache_controller.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from hicachectl.formats.errors import (
    CollidingKeys,
    ProfileError,
    UnsupportedByBackend,
    UsageError,
)
from hicachectl.formats.keys.base import codec_for
from hicachectl.formats.keys.nixl import BUFFERED, DIRECT
from hicachectl.formats.keys.versions import (
    check_file_ranks,
    check_mooncake_ranks,
    mamba_keys_name_rank,
    mooncake_keys_name_model,
    mooncake_keys_place_rank,
)
from hicachectl.formats.kinds import kind_of
from hicachectl.formats.kinds.pool import Pool, pool_name
from hicachectl.formats.layouts import HEADLESS_LAYOUTS, PAGE_FIRST_LAYOUTS, TensorLayout
from hicachectl.formats.objects import Coordinate, Shard
from hicachectl.formats.pools import PoolPiece, pool_piece
from hicachectl.formats.profile import Profile, validate_profile
from hicachectl.formats.wording import not_one_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from hicachectl.formats.arrays import IntArray
    from hicachectl.formats.keys.base import Affix


_FILE_STORE = "use a file store"
_ZERO_COPY_LAYOUTS = PAGE_FIRST_LAYOUTS  # HiCacheHF3FS.register_mem_pool_host
_HF3FS_LAYOUTS = (*_ZERO_COPY_LAYOUTS, "layer_first")  # backend_factory.py: bytes_per_page
UNKNOWN_SIZE = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectSpec:
    """One object that a page of a deployment can have.

    affix: text of the key before and after the page hash.
    nbytes: bytes; UNKNOWN_SIZE if neither profile nor store states them.
    anchor: whether servers treat the page as present because of this object.
    trailing_pages: how many last pages of a stored node have the object (Mamba, SWA); 0: all.
    listed: False if found in the store, but not in the profile.
    tensors: contents without gaps; empty if the form is unknown.
    layers, padding_layers: as in `pools.PoolPiece`.
    """

    affix: Affix
    coordinate: Coordinate
    nbytes: int = UNKNOWN_SIZE
    anchor: bool = False
    trailing_pages: int = 0
    listed: bool = True
    tensors: tuple[TensorLayout, ...] = ()
    layers: tuple[int, ...] = ()
    padding_layers: int = 0

    @property
    def pool(self) -> str:
        """Name of the object's pool."""
        return self.coordinate.pool

    @property
    def trailing(self) -> bool:
        """Whether only the last pages of a stored node have the object."""
        return self.trailing_pages > 0

    @property
    def object_set(self) -> tuple[str, int | None, bool]:
        """Identity of the object's set: pool or the pool that it follows, linear TP size of a
        trailing pool, listed or not.

        A whole page has all objects of each set; of a trailing set, it may have none.
        """
        linear_tp = self.coordinate.shard.tp_size if self.trailing else None
        return pool_name(self.pool).follows or self.pool, linear_tp, self.listed

    @property
    def awaited(self) -> bool:
        """Whether a removal treats a page as whole again only if it has this object.

        False for drafts, which servers without speculation do not write, and trailing objects,
        which most pages lack.
        """
        return self.anchor or not self.costs_hits_only

    @property
    def costs_hits_only(self) -> bool:
        """Whether a missing object costs only cache hits: no server reads wrong data."""
        return self.trailing or pool_name(self.pool).draft

    def shares_rank(self, other: ObjectSpec) -> bool:
        """Return whether one rank may write both objects: ranks that both keys state are equal."""
        mine, theirs = self.coordinate.shard.ranks, other.coordinate.shard.ranks
        return all(a is None or b is None or a == b for a, b in zip(mine, theirs, strict=True))


def object_sets(specs: Sequence[ObjectSpec]) -> tuple[IntArray, ...]:
    """Return the spec indices of each object set, sets in order of their first spec."""
    found: dict[object, list[int]] = {}
    for position, spec in enumerate(specs):
        found.setdefault(spec.object_set, []).append(position)
    return tuple(np.array(positions, dtype=np.int64) for positions in found.values())


def fits(sizes: IntArray, expected: IntArray) -> npt.NDArray[np.bool_]:
    """Return which objects have their expected size; True if either size is unknown.

    sizes, expected: bytes, broadcast; negative if unknown.
    """
    fitting: npt.NDArray[np.bool_] = (sizes == expected) | (sizes < 0) | (expected < 0)
    return fitting


# Part and tensors of an object; no tensors if the form is unknown.
_Content = tuple[str | None, tuple[TensorLayout, ...]]


class _Scheme(NamedTuple):
    """How one backend splits a page into objects.

    check:    raises if the backend cannot store the profile's pages.
    shards:   of a pool: one per rank, or per group of ranks that share objects.
    contents: the objects of one shard.
    marker: bytes of the object that stands for an anchor without bytes; None if there is none.
    """

    check: Callable[[Profile], None]
    shards: Callable[[Profile, Pool], Iterable[Shard]]
    contents: Callable[[Profile, PoolPiece], Iterable[_Content]]
    marker: int | None = None


@lru_cache(maxsize=8)
def object_specs(profile: Profile, scheme: str) -> tuple[ObjectSpec, ...]:
    """Return the specs of a page's objects, anchors first, then by pool and rank.

    scheme: "file", "mooncake", "hf3fs", "nixl" or "nixl-buffered". Coordinates are distinct; if
    keys lack a rank (CP on Mooncake and 3FS), the object of rank 0 stands for all ranks.

    Raises ProfileError if the profile is contradictory or incomplete, UnsupportedByBackend if the
    backend has no such objects or the scheme is "unified", which no server writes, and UsageError
    if the scheme is unknown.
    """
    if scheme == "unified":
        raise UnsupportedByBackend(
            "A profile cannot describe objects of the unified key scheme; use another store"
        )
    if scheme not in _SCHEMES:
        raise UsageError(not_one_of("Key scheme", scheme, _SCHEMES))
    problems = validate_profile(profile)
    if problems:
        raise ProfileError("profile: " + "; ".join(problems))
    _SCHEMES[scheme].check(profile)
    pools = [pool for pool in profile.pools if _has_objects(pool, scheme)]
    anchor = next((pool for pool in pools if pool.name == "kv" or not pool.trailing), None)
    pools.sort(key=lambda pool: pool is not anchor)
    return tuple(
        found for pool in pools for found in _pool_objects(profile, scheme, pool, pool is anchor)
    )


def collision_of(profile: Profile, scheme: str) -> str:
    """Return why ranks of a deployment overwrite each other's objects; "" if they do not.

    scheme: as for `object_specs`, which refuses such a deployment.
    """
    try:
        if scheme in _SCHEMES:
            _SCHEMES[scheme].check(profile)
    except CollidingKeys as error:
        return str(error)
    except UnsupportedByBackend:
        pass
    return ""


def _pool_objects(profile: Profile, scheme: str, pool: Pool, anchor: bool) -> Iterator[ObjectSpec]:
    codec = codec_for(scheme)
    _, shards, contents, marker = _SCHEMES[scheme]
    model = profile.key_model if _names_model(profile, scheme) else ""
    tag = profile.tag if scheme == "mooncake" else ""
    # By (pp_rank, cp_rank): contents are the same for all TP ranks of a stage.
    held: dict[tuple[int, int], list[tuple[PoolPiece, str | None, tuple[TensorLayout, ...]]]] = {}
    for shard in shards(profile, pool):
        stage = shard.pp_rank or 0, shard.cp_rank or 0
        if stage not in held:
            piece = pool_piece(profile, pool, pp_rank=stage[0], cp_rank=stage[1])
            held[stage] = [(piece, *one) for one in contents(profile, piece)] if piece else []
        for piece, part, tensors in held[stage]:
            coordinate = Coordinate(model, pool.name, part, tag, shard)
            yield ObjectSpec(
                affix=codec.affix(coordinate),
                coordinate=coordinate,
                nbytes=_nbytes(tensors) or piece.nbytes or marker or 0,
                anchor=anchor,
                trailing_pages=pool.trailing_pages if pool.trailing else 0,
                tensors=tensors,
                layers=piece.layers,
                padding_layers=piece.padding_layers,
            )


def _has_objects(pool: Pool, scheme: str) -> bool:
    return kind_of(pool).has_bytes or _SCHEMES[scheme].marker is not None


def _names_model(profile: Profile, scheme: str) -> bool:
    if scheme == "mooncake":
        return mooncake_keys_name_model(profile)
    return scheme != "hf3fs"


def _stages(profile: Profile) -> Iterator[Shard]:
    """Yield the shard of each stage and CP rank; ranks are None if the size is 1."""
    for pp_rank, cp_rank in product(range(profile.pp), range(profile.cp)):
        shard = Shard()
        if profile.pp > 1:
            shard = replace(shard, pp_rank=pp_rank, pp_size=profile.pp)
        if profile.cp > 1:
            shard = replace(shard, cp_rank=cp_rank, cp_size=profile.cp)
        yield shard


def _check_dcp(profile: Profile) -> None:
    """Refuse DCP deployments that SGLang refuses.

    Source: managers/cache_controller.py :: attach_storage_backend.
    """
    if profile.dcp == 1:
        return
    anchor = profile.pools[0]
    # For opaque pools of an inferred profile, only the form of the keys is known.
    if not kind_of(anchor).stored_with_dcp(anchor):
        raise UnsupportedByBackend(
            f"dcp {profile.dcp}: SGLang stores DCP pages of MLA models only; give dcp 1"
        )
    if profile.layout not in HEADLESS_LAYOUTS:
        raise UnsupportedByBackend(
            f"dcp {profile.dcp}: SGLang does not store DCP pages in layout {profile.layout}; use "
            f"one of {', '.join(HEADLESS_LAYOUTS)}"
        )
    for pool in profile.pools:
        if not pool_name(pool.name).dcp:
            raise UnsupportedByBackend(
                f"dcp {profile.dcp}: SGLang does not store {pool.name} pools under DCP; give dcp 1"
            )


# --- file ---


def _check_file(profile: Profile) -> None:
    _check_dcp(profile)
    check_file_ranks(profile)


def _file_shards(profile: Profile, pool: Pool) -> Iterator[Shard]:
    """Yield the shards of file keys. Their form depends on the target, not the pool.

    Each rank of an MHA target has its own file. Ranks of an MLA target share the first rank's
    file, even for an MHA draft, of which the other ranks then read the wrong shard.
    """
    per_rank = not profile.rank_replicated
    if profile.rank_replicated and pool_name(pool.name).states:
        per_rank = mamba_keys_name_rank(profile)
    for shard in _stages(profile):
        if per_rank:
            for rank in range(profile.tp):
                ranked = replace(shard, tp_rank=rank, tp_size=profile.tp)
                yield _file_dcp(profile, ranked, rank % profile.dcp)
        else:
            for rank in range(profile.dcp):
                yield _file_dcp(profile, shard, rank)


def _file_dcp(profile: Profile, shard: Shard, dcp_rank: int) -> Shard:
    if profile.dcp == 1:
        return shard
    return replace(
        shard,
        tp_size=profile.tp,
        dcp_rank=dcp_rank,
        dcp_size=profile.dcp,
        dcp_page_size=profile.page_size,
    )


def _flat_contents(profile: Profile, piece: PoolPiece) -> Iterator[_Content]:
    yield None, piece.flat(profile.layout) if piece.tensors else ()


# --- mooncake ---


def _check_mooncake(profile: Profile) -> None:
    _check_dcp(profile)
    check_mooncake_ranks(profile)


def _splits_heads(profile: Profile) -> bool:
    """Return should_split_heads (cache_controller.py :: _generate_storage_config)."""
    return (
        profile.tp_lcm_size > profile.tp
        and profile.layout == "page_head"
        and not profile.rank_replicated
    )


def _mooncake_per_rank(profile: Profile, pool: Pool) -> bool:
    """Return whether a pool's keys name the TP rank (_get_hybrid_page_component_keys)."""
    form = pool_name(pool.name).mooncake
    if not form:
        raise UnsupportedByBackend(
            f"pools[{pool.name}]: SGLang does not store this pool on Mooncake; {_FILE_STORE}"
        )
    if form in ("shared", "states"):
        return form == "states"
    return kind_of(pool).names_rank(pool, shared_anchor=profile.rank_replicated)


def _mooncake_shards(profile: Profile, pool: Pool) -> Iterator[Shard]:
    per_rank = _mooncake_per_rank(profile, pool)
    for stage in _stages(profile):
        # Under DCP, keys name the CP rank only if they do not name the TP rank.
        cp_rank = (stage.cp_rank or 0) if profile.dcp > 1 and not per_rank else None
        if cp_rank is None and stage.cp_rank:
            continue
        shard = replace(stage, cp_rank=None, cp_size=None)
        if profile.dcp > 1:
            shard = replace(
                shard,
                tp_size=profile.tp,
                pp_size=profile.pp,
                cp_rank=cp_rank,
                cp_size=profile.cp,
                dcp_size=profile.dcp,
                dcp_page_size=profile.page_size,
            )
        yield from _mooncake_ranks(profile, pool, shard, per_rank)


def _mooncake_ranks(profile: Profile, pool: Pool, shard: Shard, per_rank: bool) -> Iterator[Shard]:
    if per_rank and _splits_heads(profile):
        # KV keys name one slice of the LCM grid; sidecar keys name all slices of their rank.
        step = 1 if pool.name == "kv" else profile.tp_lcm_size // profile.tp
        for first in range(0, profile.tp_lcm_size, step):
            yield replace(shard, tp_size=profile.tp, heads=(first, first + step))
    elif per_rank:
        for rank in range(profile.tp):
            yield replace(shard, tp_rank=rank, tp_size=profile.tp)
    elif profile.dcp > 1:
        for rank in range(profile.dcp):
            yield replace(shard, dcp_rank=rank)
    else:
        yield replace(shard, ranked=mooncake_keys_place_rank(profile))


def _mooncake_contents(profile: Profile, piece: PoolPiece) -> Iterator[_Content]:
    pool = piece.pool
    kind = kind_of(pool)
    per_rank = _mooncake_per_rank(profile, pool)
    if kind.shards not in (None, per_rank):  # MooncakeStore makes too few or too many keys
        raise UnsupportedByBackend(
            f"pools[{pool.name}]: kind {pool.kind} does not fit the Mooncake keys of this pool "
            f"beside kv of kind {profile.pools[0].kind}; {_FILE_STORE}"
        )
    kind.check_mooncake(pool)
    if not piece.tensors:
        yield from ((part, ()) for part in kind.mooncake_parts(pool, per_rank))
        return
    if pool.name == "kv" and _splits_heads(profile):
        piece = piece.head_slice(profile.tp_lcm_size // profile.tp)
    for tensor in piece.parts(profile.layout):
        yield kind.mooncake_part(pool, tensor), (tensor,)


# --- 3FS ---


def _check_hf3fs(profile: Profile) -> None:
    if profile.pp > 1:
        raise CollidingKeys(
            f"pp {profile.pp}: 3FS keys do not name the pp rank, so ranks overwrite each other's "
            f"objects; {_FILE_STORE}"
        )
    if profile.dcp > 1:
        raise UnsupportedByBackend(
            f"dcp {profile.dcp}: SGLang stores DCP pages in file and Mooncake stores only; "
            f"{_FILE_STORE}"
        )
    if not kind_of(profile.pools[0]).has_bytes:
        raise UnsupportedByBackend(
            "pools[kv]: SGLang's 3FS backend cannot store models without KV (DeepSeek-V4), because "
            "it divides files by the size of a kv page; use a file store or Mooncake"
        )
    if profile.layout not in _HF3FS_LAYOUTS:
        raise UnsupportedByBackend(
            f"layout {profile.layout}: SGLang's 3FS backend does not store it; use one of "
            f"{', '.join(_HF3FS_LAYOUTS)}"
        )


def _hf3fs_shards(profile: Profile, pool: Pool) -> Iterator[Shard]:
    """Yield the shards of 3FS keys; `Hf3fsCodec` defines tp_rank."""
    if not profile.rank_replicated:
        for rank in range(profile.tp):
            yield Shard(tp_rank=rank)
    elif pool_name(pool.name).states and mamba_keys_name_rank(profile):
        for rank in range(profile.tp):
            yield Shard(tp_rank=rank, tp_size=profile.tp)
    else:
        yield Shard(tp_rank=0)


def _hf3fs_contents(profile: Profile, piece: PoolPiece) -> Iterator[_Content]:
    pool = piece.pool
    kind = kind_of(pool)
    if pool.name != "kv" and not kind.hf3fs_sidecar:
        raise UnsupportedByBackend(
            f"pools[{pool.name}]: SGLang cannot store {kind.name.upper()} pools beside kv on 3FS; "
            f"{_FILE_STORE}"
        )
    zero_copy = profile.layout in _ZERO_COPY_LAYOUTS and not profile.rank_replicated
    if pool.name != "kv" or not zero_copy or not kind.hf3fs_parts:
        yield from _flat_contents(profile, piece)
    elif not piece.tensors:
        yield from ((part, ()) for part in ("k", "v"))
    else:
        kind.check_flat(pool)  # K and V have separate keys, but must be equally large
        yield from ((tensor.name, (tensor,)) for tensor in piece.parts(profile.layout))


# --- NIXL ---

# Of memory that O_DIRECT can transfer (HiCacheNixl.register_mem_pool_host). Host pools begin at a
# page (pool_host/common.py :: HostTensorAllocator).
_NIXL_ALIGNMENT = 4096
_NIXL_BLOCK = 512  # of any disk: O_DIRECT transfers no other sizes


def _check_nixl(profile: Profile) -> None:
    for axis in ("pp", "cp", "dcp"):
        if (size := getattr(profile, axis)) > 1:
            raise CollidingKeys(
                f"{axis} {size}: NIXL keys do not name the {axis} rank, so ranks overwrite each "
                f"other's objects; {_FILE_STORE}"
            )


def _nixl_shards(profile: Profile, pool: Pool) -> Iterator[Shard]:
    if profile.rank_replicated and not pool_name(pool.name).states:
        yield Shard()
        return
    for rank in range(profile.tp):
        yield Shard(tp_rank=rank, tp_size=profile.tp)


def _nixl_direct_contents(profile: Profile, piece: PoolPiece) -> Iterator[_Content]:
    """Yield parts that O_DIRECT can transfer from their place in memory, else the whole page."""
    if profile.layout in _nixl_part_layouts(piece.pool):
        parts = tuple(_nixl_parts(profile, piece))
        if parts and not any(_nbytes(tensors) % _NIXL_ALIGNMENT for _, tensors in parts):
            _check_nixl_states(piece)
            yield from parts
            return
    for part, tensors in _flat_contents(profile, piece):
        if _nbytes(tensors) % _NIXL_BLOCK:
            raise UnsupportedByBackend(
                f"pools[{piece.pool.name}]: a page of {_nbytes(tensors)} bytes is no multiple of "
                f"{_NIXL_BLOCK}: SGLang's NIXL backend fails to store such pages with direct I/O; "
                "for servers without direct I/O, add direct_io=off to the URL"
            )
        yield part, tensors


def _nixl_buffered_contents(profile: Profile, piece: PoolPiece) -> Iterator[_Content]:
    """Yield parts as they lie in memory; pools that cannot be transferred from there: whole."""
    pool = piece.pool
    layouts = _nixl_part_layouts(pool)
    if piece.tensors and profile.layout in layouts:
        _check_nixl_states(piece)
        yield from _nixl_parts(profile, piece)
    elif pool.name == "kv" or not layouts or not piece.tensors:
        yield from _flat_contents(profile, piece)
    else:
        raise UnsupportedByBackend(
            f"pools[{pool.name}]: layout {profile.layout}: SGLang's NIXL backend without direct "
            "I/O does not store this pool whole; use page_first or page_first_direct"
        )


def _nixl_part_layouts(pool: Pool) -> tuple[str, ...]:
    """Return the layouts in which pages of a pool can be transferred from where they lie.

    Beside kv, only pools with `get_hybrid_pool_buffer` can.
    """
    if pool.name == "kv":
        return PAGE_FIRST_LAYOUTS
    return kind_of(pool).nixl_layouts


def _check_nixl_states(piece: PoolPiece) -> None:
    """Refuse parts that SGLang writes under names that it does not ask for.

    Source: HiCacheNixl._get_hybrid_zero_copy_buffers and batch_exists_v2, which counts a temporal
    state that models with convolutions only do not have.
    """
    if pool_name(piece.pool.name).states and piece.tensors[0].name != "temporal":
        raise UnsupportedByBackend(
            f"pools[{piece.pool.name}]: SGLang's NIXL backend never finds states without a "
            "temporal one again, because it looks for one more object than it writes; use a file "
            "store"
        )


def _nixl_parts(profile: Profile, piece: PoolPiece) -> Iterator[_Content]:
    kind = kind_of(piece.pool)
    tensors = piece.parts(profile.layout)
    for tensor in tensors:
        # The key of a state that is alone names the pool only (_get_hybrid_component_keys).
        alone = len(tensors) == 1 and pool_name(piece.pool.name).states
        yield None if alone else kind.mooncake_part(piece.pool, tensor), (tensor,)


def _nbytes(tensors: Iterable[TensorLayout]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


_SCHEMES = {
    "file": _Scheme(_check_file, _file_shards, _flat_contents, marker=0),
    "mooncake": _Scheme(_check_mooncake, _mooncake_shards, _mooncake_contents),
    "hf3fs": _Scheme(_check_hf3fs, _hf3fs_shards, _hf3fs_contents),
    DIRECT: _Scheme(_check_nixl, _nixl_shards, _nixl_direct_contents, marker=_NIXL_ALIGNMENT),
    BUFFERED: _Scheme(_check_nixl, _nixl_shards, _nixl_buffered_contents, marker=1),
}
