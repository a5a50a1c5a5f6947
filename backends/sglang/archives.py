"""Whether a server may use the pages of a pack, by the profile that the pack records."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from msgspec import structs

from hicachectl.formats.identity import object_identity
from hicachectl.formats.keys import WHOLE_PAGES, grammar_of
from hicachectl.formats.spec import object_specs

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from hicachectl.backends.capabilities import Archive
    from hicachectl.backends.sglang.served import ServedPool
    from hicachectl.formats.identity import Identity
    from hicachectl.formats.profile import Profile
    from hicachectl.formats.spec import ObjectSpec

_AXES = ("tp", "pp", "cp")


def archive_problem(
    archive: Archive, pools: Iterable[ServedPool], *, reads_unstamped: bool = False
) -> str:
    """Return why a server cannot use an archive's pages; "" if it can.

    A pool that the archive lacks is no problem: its pages are misses.

    reads_unstamped: use an archive whose profile does not name the weights.
    Raises ProfileError, UnsupportedByBackend.
    """
    profile = archive.recorded_profile()
    if profile is None or profile.inferred:
        return (
            "does not record its deployment; pack the pages again with --profile, which "
            "`hicachectl profile --server URL` writes"
        )
    if not (profile.weights or reads_unstamped):
        return (
            "does not name the weights of its pages; pack them again with a profile that does, or "
            'give "unstamped": "read"'
        )
    if not (grammar := grammar_of(archive.grammar)).served:
        return (
            f"has the keys of a {grammar.title} store, which servers cannot read; migrate the pack "
            "to a file store, and that one to a pack"
        )
    specs = object_specs(profile, WHOLE_PAGES)
    for pool in pools:
        files = [spec for spec in specs if spec.pool == pool.name]
        if files and (different := [*_differences(profile, files, pool)]):
            return (
                f"its pages of {pool.name} have {', '.join(different)}; attach a pack of this "
                "deployment, or convert the pack with hicachectl migrate"
            )
    return ""


def _differences(profile: Profile, files: list[ObjectSpec], pool: ServedPool) -> Iterator[str]:
    """Yield `FACT THEIRS instead of OURS`."""
    held, shard = files[0].coordinate.shard, pool.coordinate.shard
    theirs: dict[str, object] = {"model": profile.key_model}
    ours: dict[str, object] = {"model": pool.identity.model}
    theirs |= dict(zip(_AXES, held.sizes, strict=False))
    ours |= dict(zip(_AXES, shard.sizes, strict=False))
    mine = next((spec for spec in files if spec.coordinate.shard == shard), None)
    if mine is not None:
        theirs["bytes"], ours["bytes"] = mine.nbytes, pool.nbytes
        identity = _identity(profile, mine, pool.identity)
        if identity is not None:
            theirs |= _facts(identity)
            ours |= _facts(pool.identity)
    for name, value in ours.items():
        if theirs[name] != value:
            yield f"{name} {theirs[name] or 'none'} instead of {value or 'none'}"


def _identity(profile: Profile, spec: ObjectSpec, ours: Identity) -> Identity | None:
    """Return the identity of the archive's objects; our weights stand for unnamed ones."""
    if not profile.weights:
        draft = ours.draft_weights or ours.weights
        profile = structs.replace(profile, weights=ours.weights, draft_weights=draft)
    return object_identity(profile, spec)


def _facts(identity: Identity) -> dict[str, object]:
    return {
        name.replace("_", " "): value
        for name, value in asdict(identity).items()
        if name not in ("pool", "part")
    }
