"""Refuse transfers that cannot succeed, before anything is written."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from hicachectl.formats.errors import ProfileError, UnsupportedByBackend, UsageError
from hicachectl.formats.keys import grammar_of
from hicachectl.formats.kinds import kind_of
from hicachectl.formats.objects import ANCHOR
from hicachectl.formats.releases import release_of, since
from hicachectl.formats.spec import ranks_of
from hicachectl.formats.wording import inferred_refused

if TYPE_CHECKING:
    from hicachectl.formats.kinds.pool import Pool
    from hicachectl.formats.profile import Profile
    from hicachectl.formats.releases import Release
    from hicachectl.formats.spec import ObjectSpec

# Fields that a transfer cannot change, because other values mean other pages or bytes.
_FIXED = {
    "page_size": "page hashes depend on the page size",
    "hash_unit": "page hashes depend on the hash unit",
    "cp": "hicachectl cannot convert pages between numbers of context-parallel ranks",
    "cp_layer_split": "hicachectl cannot convert pages between layer splits",
    "dcp": "hicachectl cannot convert pages between sizes of decode context parallelism",
}


class Side(NamedTuple):
    """The source or destination deployment.

    specs: specs of its objects under the grammar.
    """

    profile: Profile
    grammar: str
    specs: tuple[ObjectSpec, ...]

    @property
    def markers(self) -> tuple[int, ...]:
        """Return the numbers of the objects that stand for an anchor without bytes."""
        if kind_of(self.profile.pools[0]).has_bytes:
            return ()
        return tuple(number for number, spec in enumerate(self.specs) if spec.pool == ANCHOR)


def check_transfer(source: Side, destination: Side) -> None:
    """Refuse deployments between which a page cannot be transferred whole.

    Raises UsageError if pages or their division among ranks differ. Raises ProfileError if pools
    differ. Raises UnsupportedByBackend if keys cannot name all objects, or if copies cannot produce
    all objects.
    """
    _check_profiles(source.profile, destination.profile)
    for profile, grammar, _ in (source, destination):
        grammar_of(grammar).check_ranks(ranks_of(profile), release_of(profile.sglang))
    _check_pools(source.profile, destination.profile)
    for profile, _, specs in (source, destination):
        for spec in specs:
            _check_shared_shard(profile, spec)


def check_release(profile: Profile, sglang: str) -> None:
    """Raise ProfileError if servers of another release have other objects than a profile says.

    A profile names the layers of one release. Sources: pool_host/dsa.py :: DSAIndexerPoolHost,
    speculative/base_spec_worker.py :: HiCacheDraftMode.
    """
    old, new = release_of(profile.sglang), release_of(sglang)
    for pool in profile.pools:
        why = ""
        if pool.name == "indexer" and pool.kind == "dsa_indexer":
            why = _other_index_keys(profile, pool, old, new)
        elif pool.name.startswith("draft") or pool.packed_draft_layers:
            drafts = {(one.draft, one.packed_drafts) for one in (old, new)}
            why = "the two releases store drafts in other objects" if len(drafts) > 1 else ""
        if why:
            raise ProfileError(
                f"sglang {sglang}: pools[{pool.name}]: cannot convert from {profile.sglang}, "
                f"because {why}; describe the servers of {sglang} with --to-profile FILE "
                f"(hicachectl profile --model-config config.json --sglang {sglang} -o FILE)"
            )


def _other_index_keys(profile: Profile, pool: Pool, old: Release, new: Release) -> str:
    """Return why two releases store different index keys; "" if they store the same index keys."""
    if old.indexer != new.indexer:
        return f"releases before {since('indexer')} store no index keys"
    # A release without `compact_indexer` stores the index keys of all layers.
    every = len(pool.layer_numbers) == len(profile.pools[0].layer_numbers)
    if old.compact_indexer == new.compact_indexer or (old.compact_indexer and every):
        return ""
    edge = f"releases before {since('compact_indexer')}"
    if old.compact_indexer:
        return f"{edge} need the index keys of all layers, which the pages lack"
    return (
        f"{edge} store the index keys of all layers, and later releases only the index keys of "
        "layers that compute a top-k of their own, which the profile does not tell"
    )


def _check_profiles(source: Profile, destination: Profile) -> None:
    for profile, which in ((source, "source"), (destination, "destination")):
        if profile.inferred:
            raise UsageError(inferred_refused(f"Changing the bytes of {which} pages"))
    for name, reason in _FIXED.items():
        one, two = getattr(source, name), getattr(destination, name)
        if one != two:
            raise UsageError(
                f"{name}: cannot change from {one} to {two}, because {reason}; "
                f"give a destination with {name} {one}"
            )
    if source.dcp > 1:
        for name in ("tp", "pp", "pp_partition"):
            if getattr(source, name) != getattr(destination, name):
                raise UnsupportedByBackend(
                    f"{name}: cannot change from {getattr(source, name)} to "
                    f"{getattr(destination, name)} under dcp {source.dcp}; keep it"
                )
    ours, theirs = ({pool.name: pool for pool in p.pools} for p in (source, destination))
    for name in (*ours, *theirs):
        if name not in ours or name not in theirs:
            which = "destination" if name in ours else "source"
            raise ProfileError(
                f"pools[{name}]: the {which} does not have this pool; give profiles of the same "
                "pools"
            )
        _check_pool(ours[name], theirs[name])


def _check_pools(source: Profile, destination: Profile) -> None:
    # The layout orders nothing in DeepSeek-V4, whose anchor has no bytes. Its pools have one block
    # of bytes per layer in every layout (DeepSeekV4PagedHostPool).
    ordered = kind_of(destination.pools[0]).has_bytes and source.layout != destination.layout
    for pool in destination.pools:
        if ordered and not kind_of(pool).has_form:
            raise UnsupportedByBackend(
                f"pools[{pool.name}]: the axis order of the bytes is unknown, so the layout cannot "
                f"change from {source.layout} to {destination.layout}; keep it"
            )
    for profile in (source, destination):
        for pool in profile.pools:
            kind = kind_of(pool)
            kind.check_shards(pool, profile.tp)
            if kind.linear and not pool.replicated and profile.linear_tp not in (0, profile.tp):
                raise ProfileError(
                    f"linear_tp: {profile.linear_tp} differs from tp {profile.tp}, and keys do "
                    f"not show which rank holds which state; keep the topology and layout"
                )


def _check_pool(one: Pool, two: Pool) -> None:
    ours, theirs = _comparable(one), _comparable(two)
    for name in (n for n in one.__struct_fields__ if getattr(ours, n) != getattr(theirs, n)):
        raise ProfileError(
            f"pools[{one.name}].{name}: cannot change from {getattr(ours, name)!r} (source) to "
            f"{getattr(theirs, name)!r} (destination); give a destination with equal pools"
        )


def _comparable(pool: Pool) -> Pool:
    """Return a pool with explicit dtype and V width, and without layers.

    Layers are left out, because `formats.transfer` compares them by regions.
    """
    dtype, v_head_dim = kind_of(pool).dtype(pool), pool.v_head_dim or pool.head_dim
    return replace(pool, layers=0, packed_draft_layers=0, dtype=dtype, v_head_dim=v_head_dim)


def _check_shared_shard(profile: Profile, expected: ObjectSpec) -> None:
    """Refuse objects with the first rank's shard under a key that all ranks share."""
    coordinate = expected.coordinate
    pool = profile.pool(coordinate.pool)
    if pool is None or pool.replicated or not kind_of(pool).shards:
        return
    shared = coordinate.shard.tp_rank is None and coordinate.shard.heads is None
    if profile.tp > 1 and shared:
        raise UnsupportedByBackend(
            f"pools[{pool.name}]: keys beside an MLA target do not name the TP rank, so the store "
            f"holds only the first of {profile.tp} shards; let servers write these pages again"
        )
