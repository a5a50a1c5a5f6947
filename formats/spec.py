"""Derive the specs of a page's objects, for all ranks of a deployment and one key grammar."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from hicachectl.formats.errors import CollidingKeys, ProfileError, UnsupportedByBackend
from hicachectl.formats.keys import WHOLE_PAGES, grammar_of
from hicachectl.formats.keys.base import RankPool, Ranks
from hicachectl.formats.kinds import kind_of
from hicachectl.formats.kinds.pool import Pool, pool_name
from hicachectl.formats.layouts import HEADLESS_LAYOUTS, TensorLayout
from hicachectl.formats.objects import ANCHOR, Coordinate
from hicachectl.formats.pools import PoolPiece, pool_piece
from hicachectl.formats.profile import Profile, validate_profile
from hicachectl.formats.releases import release_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from hicachectl.formats.arrays import IntArray
    from hicachectl.formats.keys.base import Affix, Grammar, PageObject

UNKNOWN_SIZE = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectSpec:
    """One object that a page of a deployment can have.

    affix: text of the key before and after the page hash.
    nbytes: bytes of the object; UNKNOWN_SIZE if neither profile nor store states them.
    anchor: whether servers look for this object to tell whether the page exists.
    trailing_pages: number of last pages of a radix tree node that have the object (Mamba, SWA); 0
        if all pages have it.
    listed: whether the profile has the object. False for an object that only the store has.
    tensors: tensors that fill the object without gaps; empty if the form is unknown.
    layers, padding_layers: see `pools.PoolPiece`.
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
        """Whether only the last pages of a radix tree node have the object."""
        return self.trailing_pages > 0

    @property
    def object_set(self) -> tuple[str, int | None, bool]:
        """Identity of the object's set.

        The identity consists of three values:
        - the pool, or the pool that it follows (`PoolName.follows`)
        - for a trailing pool, the TP size in the keys
        - `listed`

        A whole page has all objects of each set, except that it can lack a whole trailing set.
        """
        linear_tp = self.coordinate.shard.tp_size if self.trailing else None
        return pool_name(self.pool).follows or self.pool, linear_tp, self.listed

    @property
    def awaited(self) -> bool:
        """Whether each page that a server writes is expected to have this object.

        False for drafts, because servers without speculation do not write them. False for trailing
        objects, because most pages lack them.
        """
        return self.anchor or not self.costs_hits_only

    @property
    def costs_hits_only(self) -> bool:
        """Whether a missing object costs only cache hits, so that no server reads wrong data."""
        return self.trailing or pool_name(self.pool).draft

    def shares_rank(self, other: ObjectSpec) -> bool:
        """Return whether one rank can be the writer of both objects.

        It can if the two keys state equal ranks, on each axis whose rank both keys state.
        """
        mine, theirs = self.coordinate.shard.ranks, other.coordinate.shard.ranks
        return all(a is None or b is None or a == b for a, b in zip(mine, theirs, strict=True))


def object_sets(specs: Sequence[ObjectSpec]) -> tuple[IntArray, ...]:
    """Return the spec indices of each object set. The sets are in order of their first spec."""
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


@lru_cache(maxsize=8)
def object_specs(profile: Profile, grammar: str) -> tuple[ObjectSpec, ...]:
    """Return the specs of a page's objects, anchors first, then by pool and rank.

    grammar: name of a key grammar.
    The coordinates of the specs are distinct. If keys do not name a rank (CP on Mooncake and 3FS),
    the object of rank 0 stands for the objects of all ranks.

    Raises ProfileError if the profile is contradictory or incomplete, UnsupportedByBackend if
    SGLang's backend cannot store such pages, and UsageError if the grammar is unknown.
    """
    spoken = grammar_of(grammar)
    problems = validate_profile(profile)
    if problems:
        raise ProfileError("profile: " + "; ".join(problems))
    _check_ranks(profile, spoken)
    _check_dcp(profile)
    held = [(pool, found) for pool in profile.pools if (found := _held(profile, spoken, pool))]
    anchor = next((pool for pool, _ in held if pool.name == ANCHOR or not pool.trailing), None)
    held.sort(key=lambda pair: pair[0] is not anchor)
    return tuple(
        ObjectSpec(
            affix=spoken.affix(coordinate),
            coordinate=coordinate,
            nbytes=_nbytes(tensors) or piece.nbytes or spoken.marker or 0,
            anchor=pool is anchor,
            trailing_pages=pool.trailing_pages if pool.trailing else 0,
            tensors=tensors,
            layers=piece.layers,
            padding_layers=piece.padding_layers,
        )
        for pool, found in held
        for coordinate, (piece, tensors) in found.items()
    )


def page_bytes(profile: Profile) -> int:
    """Return the bytes that all ranks together store for a page in files, without trailing pools.

    Raises the errors of `object_specs`.
    """
    return sum(spec.nbytes for spec in object_specs(profile, WHOLE_PAGES) if not spec.trailing)


def collision_of(profile: Profile, grammar: str) -> str:
    """Return why ranks of a deployment overwrite each other's objects; "" if they do not.

    grammar: see `object_specs`, which refuses such a deployment.
    """
    try:
        _check_ranks(profile, grammar_of(grammar))
    except CollidingKeys as error:
        return str(error)
    except UnsupportedByBackend:
        pass
    return ""


def ranks_of(profile: Profile) -> Ranks:
    """Return the first rank of a deployment, with the sizes of all axes."""
    return Ranks(
        tp=profile.tp, pp=profile.pp, cp=profile.cp, dcp=profile.dcp, page_size=profile.page_size
    )


def _check_ranks(profile: Profile, grammar: Grammar) -> None:
    grammar.check_ranks(ranks_of(profile), release_of(profile.sglang), reads=True)


def _check_dcp(profile: Profile) -> None:
    """Refuse DCP deployments that SGLang refuses.

    Source: managers/cache_controller.py :: attach_storage_backend.
    """
    if profile.dcp == 1:
        return
    anchor = profile.pools[0]
    # An opaque pool of an inferred profile passes if ranks share its objects, because only the form
    # of its keys is known.
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


_Held = dict[Coordinate, tuple[PoolPiece, tuple[TensorLayout, ...]]]


def _held(profile: Profile, grammar: Grammar, pool: Pool) -> _Held:
    """Return the piece and tensors of each object of a pool, ranks in order.

    If ranks share an object, the first rank's piece counts. An object of unknown form has no
    tensors.
    """
    if not grammar.unequal_halves:
        kind_of(pool).check_flat(pool)
    found: _Held = {}
    for pp_rank, cp_rank in product(range(profile.pp), range(profile.cp)):
        piece = pool_piece(profile, pool, pp_rank=pp_rank, cp_rank=cp_rank)
        if piece is None:
            continue
        page = _rank_pool(profile, piece)
        stage = page.ranks._replace(pp_rank=pp_rank, cp_rank=cp_rank)
        # All TP ranks of a stage have the same tensors.
        contents: dict[object, tuple[TensorLayout, ...]] = {}
        for tp_rank in range(profile.tp):
            own = page._replace(ranks=stage._replace(tp_rank=tp_rank))
            for one in grammar.objects(own):
                part = one.parts.start
                if part not in contents:
                    contents[part] = _tensors(profile, piece, one)
                found.setdefault(one.coordinate, (piece, contents[part]))
    return found


def _rank_pool(profile: Profile, piece: PoolPiece) -> RankPool:
    """Return a stage's page of a pool, as the first rank holds it."""
    pool, kind = piece.pool, kind_of(piece.pool)
    opaque = kind.has_bytes and not kind.has_form
    sizes = tuple(tensor.nbytes for tensor in piece.tensors)
    parts = tuple(tensor.name for tensor in piece.tensors)
    shared = profile.rank_replicated
    sharded = not (pool.replicated or shared) if kind.shards is None else kind.shards
    return RankPool(
        names=profile.names,
        pool=pool.name,
        ranks=ranks_of(profile),
        parts=(None,) if opaque else parts,
        sizes=(piece.nbytes,) if opaque else sizes,
        layout=profile.layout,
        release=release_of(profile.sglang),
        shared_anchor=shared,
        sharded=sharded,
        scattered=not opaque and kind.scattered and profile.layout == "layer_first",
        opaque=opaque,
        tp_lcm=profile.tp_lcm_size,
        nixl_layouts=kind.nixl_layouts,
    )


def _tensors(profile: Profile, piece: PoolPiece, one: PageObject) -> tuple[TensorLayout, ...]:
    """Return the tensors of an object; none if the form is unknown."""
    if not piece.tensors:
        return ()
    if one.whole:
        return piece.flat(profile.layout)
    if one.head_slices > 1:
        piece = piece.head_slice(one.head_slices)
    return piece.parts(profile.layout)[one.parts]


def _nbytes(tensors: Iterable[TensorLayout]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
