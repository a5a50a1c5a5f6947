"""What cannot be transferred between two deployments, and why; said before anything is written."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from hicachectl.formats.errors import ProfileError, UnsupportedByBackend, UsageError
from hicachectl.formats.kinds import kind_of

if TYPE_CHECKING:
    from hicachectl.formats.kinds.pool import Pool
    from hicachectl.formats.profile import Profile
    from hicachectl.formats.spec import ObjectSpec

# What a profile fixes for good: other values name other pages, or mean other bytes.
_FIXED = {
    "page_size": "another page size names other pages: the chain of hashes differs",
    "hash_unit": "another hash unit names other pages: the chain of hashes differs",
    "cp": "pages cannot be re-cut for another number of context-parallel ranks",
    "cp_layer_split": "pages cannot be re-cut for another layer split",
    "dcp": "pages cannot be re-cut for another decode context parallelism",
}
_GRAMMARS_WITHOUT_CP = ("mooncake", "hf3fs")


class Side(NamedTuple):
    """A deployment that a page is taken from or made for; specs: its objects under a grammar."""

    profile: Profile
    grammar: str
    specs: tuple[ObjectSpec, ...]


def check_transfer(source: Side, destination: Side) -> None:
    """Refuse deployments between which a page cannot be transferred whole.

    Raises UsageError where pages or their cut differ, ProfileError where the pools do,
    UnsupportedByBackend where keys cannot name, or no copy can make, all that is held.
    """
    _check_profiles(source.profile, destination.profile)
    for profile, grammar, _ in (source, destination):
        if profile.cp > 1 and profile.dcp == 1 and grammar in _GRAMMARS_WITHOUT_CP:
            raise UnsupportedByBackend(
                f"cp {profile.cp}: {grammar} keys name no context-parallel rank, so the pages of "
                "ranks after the first are lost"
            )
    _check_pools(source.profile, destination.profile)
    for profile, _, specs in (source, destination):
        for spec in specs:
            _check_shared_shard(profile, spec)


def _check_profiles(source: Profile, destination: Profile) -> None:
    """Refuse deployments whose pages are not the same content."""
    for profile, which in ((source, "source"), (destination, "destination")):
        if profile.inferred:
            raise UsageError(
                f"the {which}'s profile was inferred from what a store shows, which does not do "
                "to change bytes; give --profile or --model-config"
            )
    for name, reason in _FIXED.items():
        one, two = getattr(source, name), getattr(destination, name)
        if one != two:
            raise UsageError(f"{name}: {one} to {two}: {reason}")
    if source.dcp > 1:
        for name in ("tp", "pp", "pp_partition"):
            if getattr(source, name) != getattr(destination, name):
                raise UnsupportedByBackend(f"{name}: pages under DCP keep their topology")
    ours, theirs = ({pool.name: pool for pool in p.pools} for p in (source, destination))
    for name in (*ours, *theirs):
        if name not in ours or name not in theirs:
            which = "destination" if name in ours else "source"
            raise ProfileError(f"pools[{name}]: the {which} has no such pool")
        _check_pool(ours[name], theirs[name])


def _check_pools(source: Profile, destination: Profile) -> None:
    """Refuse pools that cannot be cut or ordered anew."""
    # DeepSeek-V4 has one block of bytes a layer, in every host layout (DeepSeekV4PagedHostPool).
    ordered = kind_of(destination.pools[0]).has_bytes and source.layout != destination.layout
    for pool in destination.pools:
        if ordered and not kind_of(pool).has_form:
            raise UnsupportedByBackend(
                f"pools[{pool.name}]: its byte order is not known, so it cannot go from "
                f"{source.layout} to {destination.layout}"
            )
    for profile in (source, destination):
        for pool in profile.pools:
            kind = kind_of(pool)
            kind.check_shards(pool, profile.tp)
            if kind.linear and not pool.replicated and profile.linear_tp not in (0, profile.tp):
                raise ProfileError(
                    f"linear_tp: {profile.linear_tp} beside tp {profile.tp}: which rank of the one "
                    "has which state is not in the keys"
                )


def _check_pool(one: Pool, two: Pool) -> None:
    ours, theirs = _comparable(one), _comparable(two)
    for name in (n for n in one.__struct_fields__ if getattr(ours, n) != getattr(theirs, n)):
        raise ProfileError(
            f"pools[{one.name}].{name}: {getattr(ours, name)!r} in the source, "
            f"{getattr(theirs, name)!r} in the destination: other bytes, which no copy makes"
        )


def _comparable(pool: Pool) -> Pool:
    """Leave out what layers a pool has, which the objects tell, and spell out its dtype."""
    dtype, v_head_dim = kind_of(pool).dtype(pool), pool.v_head_dim or pool.head_dim
    return replace(pool, layers=0, packed_draft_layers=0, dtype=dtype, v_head_dim=v_head_dim)


def _check_shared_shard(profile: Profile, expected: ObjectSpec) -> None:
    """Refuse objects that hold the first rank's shard under a key that all ranks share."""
    coordinate = expected.coordinate
    pool = profile.pool(coordinate.pool)
    if pool is None or pool.replicated or not kind_of(pool).shards:
        return
    shared = coordinate.shard.tp_rank is None and coordinate.shard.heads is None
    if profile.tp > 1 and shared:
        raise UnsupportedByBackend(
            f"pools[{pool.name}]: beside an MLA target its keys name no rank, and hold the "
            f"first of {profile.tp} shards only"
        )
