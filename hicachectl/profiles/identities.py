"""The identities that objects with trailers must have, from a profile and a store's markers."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from msgspec.structs import replace

from hicachectl.backends.capabilities import Trailed
from hicachectl.formats.identity import differences, object_identity, profile_identities
from hicachectl.formats.spec import object_specs
from hicachectl.formats.wording import GIVE_PROFILE

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from hicachectl.backends.base import Store
    from hicachectl.formats.identity import Identity
    from hicachectl.formats.keys.base import Affix
    from hicachectl.formats.marker import Marker
    from hicachectl.formats.profile import Profile
    from hicachectl.formats.spec import ObjectSpec

_NAMED = 3  # weights in a message


@dataclass(frozen=True, slots=True)
class Expected:
    """Identities of the objects of a profile's servers in one store.

    identities: identity of the objects with each affix; empty if the weights are unknown.
    marked: suffixes with markers.
    unknown: why objects with trailers cannot be compared with identities, else "".
    """

    identities: Mapping[Affix, Identity] = field(default_factory=dict)
    marked: frozenset[str] = frozenset()
    unknown: str = ""


def markers_of(store: Store) -> list[Marker]:
    """Return a store's markers; none if the store keeps no trailers. Raises like `markers`."""
    return store.markers() if isinstance(store, Trailed) else []


def with_marked_weights(profile: Profile, store: Store) -> Profile:
    """Return a profile with the weights that the store's markers state.

    Unchanged if the profile names weights, or unless the markers that agree with it in everything
    else state the same.
    """
    if profile.weights or profile.inferred:
        return profile
    found = _agreeing(profile, store.grammar, markers_of(store))
    return _named(profile, *found[0]) if len(found) == 1 else profile


def expected_identities(store: Store, profile: Profile | None) -> Expected:
    """Return the identities that a profile's objects must have in a store.

    profile: the result of `with_marked_weights`.
    """
    markers = markers_of(store)
    marked = frozenset(marker.suffix for marker in markers)
    identities = _known(profile, store.grammar)
    return Expected(identities, marked, "" if identities else _unknown(profile, store, markers))


def expect_identities(store: Store, profile: Profile | None) -> None:
    """Let a store report objects of other identities than the profile's as foreign."""
    if isinstance(store, Trailed):
        store.expect_identities(_known(profile, store.grammar))


def _known(profile: Profile | None, grammar: str) -> Mapping[Affix, Identity]:
    if profile is None or profile.inferred or not profile.weights:
        return {}
    return profile_identities(profile, grammar)


def _agreeing(profile: Profile, grammar: str, markers: Iterable[Marker]) -> list[tuple[str, str]]:
    """Return weights and draft weights of the markers that agree in everything else, sorted."""
    found: dict[str, set[str]] = defaultdict(set)
    for spec, marker in _paired(profile, grammar, markers):
        facts = marker.identity
        if object_identity(_named(profile, facts.weights, facts.draft_weights), spec) == facts:
            found[facts.weights] |= {facts.draft_weights} - {""}
    return sorted((weights, draft) for weights, drafts in found.items() for draft in drafts or {""})


def _named(profile: Profile, weights: str, draft_weights: str) -> Profile:
    draft = "" if draft_weights == weights else draft_weights
    return replace(profile, weights=weights, draft_weights=draft)


def _paired(
    profile: Profile, grammar: str, markers: Iterable[Marker]
) -> Iterable[tuple[ObjectSpec, Marker]]:
    """Yield each marker with the spec whose keys it is about."""
    specs = {spec.affix: spec for spec in object_specs(profile, grammar)}
    for marker in markers:
        if (spec := specs.get(("", marker.suffix))) is not None:
            yield spec, marker


def _unknown(profile: Profile | None, store: Store, markers: list[Marker]) -> str:
    """Return why the weights of a profile are unknown; "" if no marker is about its objects."""
    if profile is None or profile.inferred:
        if not markers:
            return ""
        return f"no given profile says which identity the objects must have; {GIVE_PROFILE}"
    several = _agreeing(profile, store.grammar, markers)
    if several:
        return f"the store has objects of {several_weights(several)}"
    for spec, marker in _paired(profile, store.grammar, markers):
        named = _named(profile, marker.identity.weights, marker.identity.draft_weights)
        if (identity := object_identity(named, spec)) is not None:
            return (
                "no marker of the store agrees with the profile: "
                f"{differences(marker.identity, identity)}; check the profile, or give --weights"
            )
        return "the profile does not name the weights; give --weights"
    return ""


def several_weights(found: Iterable[tuple[str, str]]) -> str:
    """Return the words for several weights, with the next step."""
    names = sorted({" with draft ".join(filter(None, pair)) for pair in found})
    shown = ", ".join(names[:_NAMED]) + (", …" if len(names) > _NAMED else "")
    return f"the weights {shown}; choose with --weights"
