"""Identities that objects with trailers must have, and which objects servers therefore accept."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

from hicachectl.backends.base import take_rows
from hicachectl.backends.capabilities import Trailed
from hicachectl.formats.identity import differences, object_identity, profile_identities
from hicachectl.formats.spec import object_specs
from hicachectl.formats.wording import GIVE_PROFILE

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import numpy.typing as npt

    from hicachectl.backends.base import Store
    from hicachectl.formats.arrays import IntArray
    from hicachectl.formats.identity import Identity
    from hicachectl.formats.keys.base import Affix
    from hicachectl.formats.marker import Marker
    from hicachectl.formats.profile import Profile
    from hicachectl.formats.spec import ObjectSpec
    from hicachectl.pages.inventory import Inventory

_NAMED = 3  # most weights that a message names
# States of an object: its trailer is as expected, is missing, or has another identity or rank.
OWN, BARE, OTHER = range(3)

_ASKED_AT_ONCE = 8192
_NOT_ASKED = -1


@dataclass(frozen=True, slots=True)
class Expected:
    """Identities that the objects of a profile's servers have in one store.

    identities: identity of the objects of each affix; empty if the weights are unknown.
    marked: suffixes for which the store has markers.
    unknown: why objects with trailers cannot be compared with identities; "" if they can.
    """

    identities: Mapping[Affix, Identity] = field(default_factory=dict)
    marked: frozenset[str] = frozenset()
    unknown: str = ""


def markers_of(store: Store) -> list[Marker]:
    """Return a store's markers; empty if it keeps no trailers. Raises as `Trailed.markers` does."""
    return store.markers() if isinstance(store, Trailed) else []


def with_marked_weights(profile: Profile, store: Store) -> Profile:
    """Return a profile with the weights that the store's markers state.

    Only markers that agree with the profile in everything else count. The profile stays unchanged
    if it names weights, or if these markers do not all state the same weights.
    """
    if profile.weights or profile.inferred:
        return profile
    found = _agreeing(profile, store.grammar, markers_of(store))
    return _named(profile, *found[0]) if len(found) == 1 else profile


def expected_identities(store: Store, profile: Profile | None) -> Expected:
    """Return the identities that a profile's objects must have in a store.

    profile: result of `with_marked_weights`.
    """
    markers = markers_of(store)
    marked = frozenset(marker.suffix for marker in markers)
    identities = _known(profile, store.grammar)
    return Expected(identities, marked, "" if identities else _unknown(profile, store, markers))


def expect_identities(store: Store, profile: Profile | None) -> None:
    """Make a store report which objects have another identity than the profile's."""
    if isinstance(store, Trailed):
        store.expect_identities(_known(profile, store.grammar))


def _known(profile: Profile | None, grammar: str) -> Mapping[Affix, Identity]:
    if profile is None or profile.inferred or not profile.weights:
        return {}
    return profile_identities(profile, grammar)


def _agreeing(profile: Profile, grammar: str, markers: Iterable[Marker]) -> list[tuple[str, str]]:
    """Return the weights and draft weights of markers that agree with a profile in all other facts.

    The result is sorted.
    """
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
    """Yield the markers of a profile's objects, each with the spec of the objects."""
    specs = {spec.affix: spec for spec in object_specs(profile, grammar)}
    for marker in markers:
        if (spec := specs.get(("", marker.suffix))) is not None:
            yield spec, marker


def _unknown(profile: Profile | None, store: Store, markers: list[Marker]) -> str:
    """Return why the weights of a profile are unknown; "" if its objects have no marker."""
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
    """Return a text that names several weights, with the next step."""
    names = sorted({" with draft ".join(filter(None, pair)) for pair in found})
    shown = ", ".join(names[:_NAMED]) + (", …" if len(names) > _NAMED else "")
    return f"the weights {shown}; choose with --weights"


def acceptance_of(store: Store, inventory: Inventory, profile: Profile | None) -> Acceptance:
    """Return the rule by which a profile's servers accept the objects of a listing."""
    return Acceptance(store, inventory, expected_identities(store, profile))


class Acceptance:
    """Comparison of the trailers of listed objects with the expected identities.

    Objects of affixes without a marker have no trailers, and count as OWN. Objects of affixes
    without an expected identity count as OWN, too.
    """

    def __init__(
        self, store: Store, inventory: Inventory, expected: Expected, *, bare: bool = False
    ) -> None:
        """Prepare. bare: whether objects without a trailer count as OWN, too."""
        self._bare = OWN if bare else BARE
        self._objects = inventory.objects.select(["key"])
        self._hashes: list[bytes] = []
        asked: list[int] = []
        for affix in inventory.table.affixes:
            identity = expected.identities.get(affix)
            if identity is None or affix[1] not in expected.marked:
                asked.append(_NOT_ASKED)
            else:
                asked.append(len(self._hashes))
                self._hashes.append(identity.hash())
        self._hash_of = inventory.by_affix(asked, _NOT_ASKED)
        self._store = store if isinstance(store, Trailed) and self._hashes else None

    @property
    def compares(self) -> bool:
        """Whether any object can be other than OWN."""
        return self._store is not None

    def of(self, rows: IntArray) -> npt.NDArray[np.int8]:
        """Return OWN, BARE or OTHER for each row of the listing: [rows].

        Open each object that may have a trailer. An object without a whole trailer is BARE.
        """
        found = np.full(len(rows), OWN, dtype=np.int8)
        if self._store is None:
            return found
        asked = np.flatnonzero(self._hash_of[rows] != _NOT_ASKED)
        for start in range(0, len(asked), _ASKED_AT_ONCE):
            some = asked[start : start + _ASKED_AT_ONCE]
            wanted = self._hash_of[rows[some]].tolist()
            trailers = self._store.read_trailers(take_rows(self._objects, rows[some]))
            identities = trailers.column("identity").to_pylist()
            ranks = trailers.column("own_rank").to_pylist()
            found[some] = [
                self._bare
                if identity is None
                else OWN
                if own_rank and identity == self._hashes[n]
                else OTHER
                for identity, own_rank, n in zip(identities, ranks, wanted, strict=True)
            ]
        return found
