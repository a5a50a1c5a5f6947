"""Pairs of stores. Check a copy between two stores, and decide which trailers the copies get."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.backends.capabilities import (
    Archive,
    Mounted,
    Profiled,
    ReportsLosses,
    Spreads,
    Trailed,
    copier_of,
)
from hicachectl.formats.errors import StoreUnavailable, UsageError
from hicachectl.formats.identity import profile_identities
from hicachectl.formats.spec import object_specs
from hicachectl.formats.trailer import DEFAULT_DIGEST, NO_RANK, trailer_rank
from hicachectl.formats.transfer import transfer_plan
from hicachectl.formats.wording import OTHER_BYTES, inferred_refused, one_place
from hicachectl.io.pipeline import DEFAULT_BUFFER_BYTES
from hicachectl.move.destination import refuse_destination, refuse_other_owner, survey_destination
from hicachectl.move.pinning import PIN_SECONDS
from hicachectl.move.survey import planned_route, survey_source, verbatim_routes
from hicachectl.pages.group_table import ABSENT
from hicachectl.profiles.identities import BARE, OTHER, Acceptance, expected_identities, markers_of

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Mapping

    from hicachectl.backends.base import Store
    from hicachectl.formats.arrays import BoolArray, IntArray
    from hicachectl.formats.identity import Identity
    from hicachectl.formats.keys.base import Affix
    from hicachectl.formats.marker import Marker
    from hicachectl.formats.profile import Profile
    from hicachectl.formats.spec import ObjectSpec
    from hicachectl.formats.transfer import TransferPlan
    from hicachectl.move.survey import Route, Survey
    from hicachectl.pages.deployments import AffixTable
    from hicachectl.pages.groups import PageGroups
    from hicachectl.pages.inventory import Inventory
    from hicachectl.profiles.identities import Expected


_JOBS = 3  # batches at a time, so that one is read while the other two are written or synced

TrailerMode = Literal["auto", "write", "drop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyOptions:
    """Options of a copy.

    jobs: number of batches copied at a time; three by default. Between two stores that both do a
        call with several threads (`Spreads`), it is at most three.
    verify: whether to read back and compare each copy; always true for a move.
    move: whether to remove the originals of compared copies.
    pin: whether to protect pages from eviction.
    pin_seconds: duration of the pins.
    deadline: `time.monotonic()` after which no batch is begun.
    trailers: mode that decides which trailers to write; see `plan_trailers`.
    """

    buffer_bytes: int = DEFAULT_BUFFER_BYTES
    jobs: int | None = None
    bytes_per_second: int | None = None
    verify: bool = False
    move: bool = False
    pin: bool = False
    pin_seconds: float = PIN_SECONDS
    deadline: float | None = None
    trailers: TrailerMode = "auto"

    def __post_init__(self) -> None:
        """Let a move verify its copies, because it removes the originals."""
        object.__setattr__(self, "verify", self.verify or self.move)

    @property
    def job_count(self) -> int:
        """Number of batches copied at a time, unless both stores are `Spreads`."""
        return self.jobs or _JOBS


class StorePair:
    """A source, a destination, and the transfer between them.

    profile: profile of the source; None if only its keys are known.
    target: profile of the destination; None without a profile.
    grammar: grammar of the keys to write. It is the destination's, or the source's for a new pack.
    trailers: plan for the trailers of the copies.
    adopts: whether both stores are one store whose files get trailers in place.
    options: options of the copies.
    jobs: number of batches copied at a time.
    remarks: messages about the trailers of the copies, and about objects of the destination that
        servers have lost.
    """

    def __init__(
        self,
        source: Store,
        destination: Store,
        profile: Profile | None,
        target: Profile | None,
        options: CopyOptions,
        *,
        may_adopt: bool = False,
    ) -> None:
        """Plan the transfer; set the destination's grammar, profile and trailers.

        may_adopt: whether source and destination may be one store if trailers are to be written.
        Raises UsageError, ProfileError or UnsupportedByBackend if the transfer is impossible, and
        StoreUnavailable.
        """
        self.source = source
        self.destination = destination
        self.profile = profile
        self.target = target
        self.grammar = destination.grammar
        if isinstance(destination, Archive):
            if destination.open_grammar:
                self.grammar = source.grammar
            destination.use_grammar(self.grammar)
        self._shared = _shared_places(source, destination)
        self.adopts = False
        self._may_adopt, self._writes_trailers = may_adopt, options.trailers == "write"
        # Whether an object can have the same key in both stores.
        self._keeps_keys = True
        self._plan = self._planned()
        if target is not None and isinstance(destination, Profiled):
            destination.use_profile(target)
        refuse_other_owner(destination, target)
        self.trailers = plan_trailers(self, options.trailers)
        self.options = options
        self.jobs = options.job_count
        if isinstance(source, Spreads) and isinstance(destination, Spreads):
            self.jobs = min(self.jobs, _JOBS)  # each call already uses several threads
        losses = destination.losses if isinstance(destination, ReportsLosses) else ()
        self.remarks = [*map(str, losses), *filter(None, [self.trailers.remark])]

    def refuse_removals(self, option: str) -> None:
        """Raise UsageError if an option could remove objects that both stores have."""
        if self.unchanged and self._shared:
            raise UsageError(
                f"{self.source.url}: has objects of {self.destination.url}, which {option} would "
                f"remove; leave out {option}"
            )

    def refuse_one_place(self, changed: Store, option: str) -> None:
        """Raise StoreUnavailable if a new file in one store also appears in the other store.

        Different device numbers do not prove that the stores differ, because one directory can have
        several mounts.
        changed: store from which the option would remove objects.
        """
        other = self.destination if changed is self.source else self.source
        if not (self._keeps_keys and isinstance(changed, Mounted) and isinstance(other, Mounted)):
            return
        with changed.probe() as name:
            if other.shows(name):
                evidence = f"a new file of {changed.url} is also in {other.url}"
                raise StoreUnavailable(one_place(self.source.url, evidence, option))

    def claim(self) -> None:
        """Record the deployment to write, if the keys of the destination name no deployment.

        Call this before the first write.
        Raises ProfileError if the destination has pages of another deployment. Raises
        StoreUnavailable.
        """
        refuse_other_owner(self.destination, self.target, claims=True)

    @property
    def unchanged(self) -> bool:
        """Whether all objects keep their key and bytes."""
        return self._plan is None

    def _planned(self) -> TransferPlan | None:
        """Return the transfer of a page; None if all objects keep their key and bytes."""
        source, profile = self.source, self.profile
        same = bool(self._shared) and source.places == self.destination.places
        if self.target in (None, profile) and self.grammar == source.grammar:
            self.adopts = same and self._may_adopt and self._writes_trailers
            if same and not self.adopts:
                trailers = "to give its files trailers, give --trailers write; " * self._may_adopt
                raise UsageError(
                    f"{source.url}: source and destination are the same, and the pages would "
                    "not change; to convert pages inside a store, give --profile of the servers "
                    f"that wrote them and another --to-tp or --to-profile; {trailers}else give "
                    "another destination"
                )
            return None
        if profile is None or profile.inferred:
            raise UsageError(f"{source.url}: {inferred_refused('changing keys or bytes')}")
        plan = transfer_plan(profile, source.grammar, self.target or profile, self.grammar)
        old, new = ({o.coordinate for o in objs} for objs in (plan.sources, plan.destinations))
        self._keeps_keys = self.grammar == source.grammar and not old.isdisjoint(new)
        if self._shared and old & new:
            raise UsageError(
                f"{source.url}: the new objects would have the keys of the objects being read; "
                "migrate to another store, or give another --to-model or --to-tag"
            )
        return plan

    def routes(self, table: AffixTable) -> list[Route]:
        """Return the route of each deployment to copy."""
        if self._plan is not None:
            return [planned_route(table.deployments[0], self._plan)]
        if self.adopts:  # the trailers name the profile's weights, so adopt only its deployment
            return list(verbatim_routes(table.deployments[:1]))
        return list(verbatim_routes(table.deployments))

    def refuse_destination(
        self, table: AffixTable, *, on_batch: Callable[[int], None] = lambda objects: None
    ) -> None:
        """Raise ProfileError as `survey` does. table: affixes of the source."""
        if self.adopts:
            return
        refuse_destination(self.destination, self.routes(table), self.grammar, on_batch=on_batch)

    def survey(
        self,
        groups: PageGroups,
        *,
        first_only: bool = False,
        asks: bool = False,
        on_batch: Callable[[int], None] = lambda objects: None,
    ) -> list[Survey]:
        """Survey the groups of each deployment in both stores.

        first_only: whether to survey the first deployment only.
        asks: whether to look up each object in the destination, instead of listing the destination.

        Raises ProfileError if the destination is listed, and servers with another topology (other
        TP, PP or CP sizes) or dtype use the same keys there. Raises StoreUnavailable.
        """
        routes = self.routes(groups.inventory.table)
        surveyed = survey_source(groups, routes[:1] if first_only else routes)
        if self.adopts:
            return list(map(self.trailers.with_adopted, surveyed))
        surveys = survey_destination(
            self.destination,
            surveyed,
            self.grammar,
            asks=asks,
            on_batch=on_batch,
        )
        return [self.trailers.with_foreign(survey, groups.inventory.objects) for survey in surveys]


def _shared_places(source: Store, destination: Store) -> set[Hashable]:
    # One class may extend the other. A NIXL store with side files, for example, is a subclass.
    if not (isinstance(source, type(destination)) or isinstance(destination, type(source))):
        return set()
    return set(source.places) & set(destination.places)


_ASKED_AT_ONCE = 8192
_STATED = ["identity", "own_rank", "ranked"]  # columns that `read_trailers` returns


@dataclass(frozen=True, slots=True)
class TrailerPlan:
    """Plan for the trailers that copied objects get.

    expected: identities that the objects of the source should have.
    identities: identities to write into new trailers, keyed by affix; empty to write no trailers.
    keeps: whether copies keep the trailers of their sources, because the system copies whole files.
    bare: whether objects without a trailer are copied, even from a store with trailers.
    always: whether every object of the destination must have a trailer after the copy.
    remark: message for the user, or "".
    """

    source: Store
    destination: Store
    expected: Expected
    identities: Mapping[Affix, Identity]
    keeps: bool
    bare: bool
    always: bool = False
    remark: str = ""

    def acceptance(self, inventory: Inventory) -> Acceptance:
        """Return the rule that decides which objects of the source can be copied."""
        return Acceptance(self.source, inventory, self.expected, bare=self.bare)

    def refused(self, groups: PageGroups) -> Iterable[tuple[BoolArray, str]]:
        """Yield masks of groups that cannot be copied, [groups], each with the reason."""
        acceptance = self.acceptance(groups.inventory)
        if not acceptance.compares:
            return
        values = acceptance.of(np.arange(len(groups.of_object)))
        for value, why in (
            (OTHER, f"with objects of {OTHER_BYTES}; hicachectl verify lists them"),
            (BARE, "with objects without a trailer; --trailers write or drop copies them"),
        ):
            found = np.zeros(len(groups) + 1, dtype=np.bool_)  # last entry: objects without a group
            found[groups.of_object[values == value]] = True
            yield found[:-1], why

    def with_foreign(self, survey: Survey, objects: pa.Table) -> Survey:
        """Return the survey with its `foreign` and `unproven` groups.

        A trailer in the destination states the identity of its object, and with it the layout.
        objects: listing of the source.
        """
        markers = markers_of(self.destination)
        if not isinstance(self.destination, Trailed) or not (markers or self.always):
            return survey
        at, targets, _ = survey.existing.objects(np.arange(len(survey.groups)))
        relaid = survey.route.relaid
        doubtful = np.flatnonzero((self._doubtful(survey, markers) | relaid)[targets])
        foreign, unproven = np.zeros((2, len(survey.groups)), dtype=np.bool_)
        for start in range(0, len(doubtful), _ASKED_AT_ONCE):
            some = doubtful[start : start + _ASKED_AT_ONCE]
            keys = survey.keys(at[some], targets[some])
            theirs = _identities_in(self.destination, keys)
            ours = self._wanted(survey, at[some], targets[some], objects)
            pairs = list(zip(theirs, ours, strict=True))
            proven = np.array([here == copied is not None for here, copied in pairs])
            unproven[at[some][~proven & relaid[targets[some]]]] = True
            refused = [
                here != copied and copied is not None and (here is not None or self.always)
                for here, copied in pairs
            ]
            foreign[at[some][refused]] = True
        return replace(survey, foreign=foreign, unproven=unproven)

    def with_adopted(self, survey: Survey) -> Survey:
        """Return the survey of a store that gets trailers in place.

        Objects that need no new trailer count as copied. To find them, open each object that may
        have a trailer.
        """
        assert isinstance(self.destination, Trailed)
        targets = survey.route.targets
        hashes = [None if one is None else one.hash() for one in map(self._identity, targets)]
        marked = {marker.suffix for marker in markers_of(self.destination)}
        unnamed = np.array([ours is None for ours in hashes])
        asked = ~unnamed & [target.affix[1] in marked for target in targets]
        rankless = [trailer_rank(target.coordinate.shard) == NO_RANK for target in targets]
        at, slots, sizes = survey.wanted.objects(np.arange(len(survey.groups)))
        done, may_have = unnamed[slots], np.flatnonzero(asked[slots])
        for start in range(0, len(may_have), _ASKED_AT_ONCE):
            some = may_have[start : start + _ASKED_AT_ONCE]
            keys = pa.table({"key": survey.keys(at[some], slots[some])})
            trailers = self.destination.read_trailers(keys).select(_STATED).to_pydict()
            stated = zip(slots[some].tolist(), *trailers.values(), strict=True)
            done[some] = [
                bool(own_rank) and identity == hashes[slot] and (ranked or rankless[slot])
                for slot, identity, own_rank, ranked in stated
            ]
        return survey.having([(at[done], slots[done], sizes[done])])

    def _identity(self, target: ObjectSpec) -> Identity | None:
        return self.identities.get(target.affix)

    def _doubtful(self, survey: Survey, markers: list[Marker]) -> BoolArray:
        """Return which targets may have a trailer in the destination that differs from the copy's.

        The result is a mask: [targets].
        """
        known: dict[str, set[bytes]] = defaultdict(set)
        for marker in (*markers, *(markers_of(self.source) if self.keeps else ())):
            known[marker.suffix].add(marker.identity.hash())
        for (_, suffix), identity in self.identities.items():
            known[suffix].add(identity.hash())
        ends = [target.affix[1] for target in survey.route.targets]
        least = 1 if self.always else 2
        return np.array([len(known.get(end, ())) >= least for end in ends], dtype=np.bool_)

    def _wanted(
        self, survey: Survey, at: IntArray, targets: IntArray, objects: pa.Table
    ) -> list[bytes | None]:
        """Return the identity that the copy of each target would have; None if unknown.

        at, targets: survey row and target of each copy.
        objects: listing of the source.
        """
        if not self.keeps:
            known = [self.identities.get(target.affix) for target in survey.route.targets]
            hashes = [None if identity is None else identity.hash() for identity in known]
            return [hashes[target] for target in targets.tolist()]
        # Each object keeps its key, so a target has the number of its source.
        items, places = np.unique(at, return_inverse=True)
        slots = survey.rows.slots(items, np.arange(len(survey.route.sources)))
        rows = slots[places, targets]
        keys = objects.column("key").take(pa.array(rows, mask=rows == ABSENT))
        return _identities_in(self.source, keys)


def plan_trailers(stores: StorePair, mode: TrailerMode) -> TrailerPlan:
    """Decide which trailers are written, and tell the destination.

    Raises UsageError if the mode is impossible, or if copies without trailers could mix objects of
    different weights.
    """
    source, destination, target = stores.source, stores.destination, stores.target
    expected = expected_identities(source, stores.profile)
    trailed = isinstance(destination, Trailed)
    identities = _identities(target, stores.grammar) if trailed else {}
    if mode == "write" and not identities:
        raise UsageError(_cannot_write(destination, trailed=trailed))
    markers = markers_of(source)
    keeps = bool(markers) and mode == "auto" and stores.unchanged and trailed
    keeps = keeps and copier_of(destination, source) is not None
    writes = mode == "write" or (
        mode == "auto"
        and not keeps
        and bool(identities)
        and (bool(markers) or bool(markers_of(destination)) or isinstance(source, Archive))
    )
    if markers and not keeps and not stores.adopts:
        _refuse_mixtures(stores, markers, expected)
    if isinstance(destination, Trailed):
        destination.expect_identities(identities)
        if not keeps:
            others = _others(markers, identities) if stores.unchanged and writes else {}
            new = {**others, **identities} if writes else {}
            destination.write_trailers(new, _digest(destination, markers, new))
    return TrailerPlan(
        source=source,
        destination=destination,
        expected=expected,
        identities=identities if writes or keeps else {},
        keeps=keeps,
        bare=keeps or not writes or mode == "write",
        always=mode == "write",
        remark="" if markers or writes else _bare_remark(stores),
    )


def _bare_remark(stores: StorePair) -> str:
    """Return a remark if servers of the destination refuse copies without trailers, else ""."""
    specs = () if stores.target is None else object_specs(stores.target, stores.grammar)
    suffixes = {marker.suffix for marker in markers_of(stores.destination)}
    if suffixes.isdisjoint(spec.affix[1] for spec in specs):
        return ""
    return (
        f"{stores.destination.url}: its servers read objects with trailers, but the copies get "
        "none, unless --weights names the weights"
    )


def _identities(target: Profile | None, grammar: str) -> Mapping[Affix, Identity]:
    if target is None or target.inferred or not target.weights:
        return {}
    return profile_identities(target, grammar)


def _cannot_write(destination: Store, *, trailed: bool) -> str:
    if not trailed:
        return f"--trailers write: {destination.url} keeps no trailers; leave out --trailers"
    return (
        "--trailers write: the weights are unknown; give --weights, with --profile, --model-config "
        "or --server"
    )


def _refuse_mixtures(stores: StorePair, markers: list[Marker], expected: Expected) -> None:
    """Raise UsageError if only trailers tell the weights of objects, and copies lose trailers."""
    url = stores.source.url
    if stores.profile is not None and not stores.unchanged and not expected.identities:
        raise UsageError(f"{url}: the weights of its objects are unknown: {expected.unknown}")
    known = {suffix for _, suffix in expected.identities}
    for suffix, found in _by_suffix(markers).items():
        if len(found) > 1 and suffix not in known and stores.unchanged:
            raise UsageError(
                f"{url}: objects with names like <hash>{suffix} have {len(found)} identities, "
                "which copies without trailers would mix up; give their profile and --weights, or "
                "copy to a file store"
            )


def _others(
    markers: Iterable[Marker], identities: Mapping[Affix, Identity]
) -> Mapping[Affix, Identity]:
    """Return the identities of other deployments whose objects keep their key and bytes."""
    found = _by_suffix(markers)
    return {
        ("", suffix): next(iter(of.values()))
        for suffix, of in found.items()
        if ("", suffix) not in identities
    }


def _by_suffix(markers: Iterable[Marker]) -> dict[str, dict[bytes, Identity]]:
    """Return the identities of each suffix, keyed by identity hash."""
    found: dict[str, dict[bytes, Identity]] = defaultdict(dict)
    for marker in markers:
        found[marker.suffix][marker.identity.hash()] = marker.identity
    return found


def _digest(destination: Trailed, markers: Iterable[Marker], new: Mapping[Affix, Identity]) -> str:
    """Return the digest algorithm of new trailers.

    It is that of the destination's trailers with the same identities, else that of the source's
    trailers, else the default.
    """
    hashes = {identity.hash() for identity in new.values()}
    own = [one.digest for one in destination.markers() if one.identity.hash() in hashes]
    return next(iter([*own, *(one.digest for one in markers)]), DEFAULT_DIGEST)


def _identities_in(store: Store, keys: pa.BinaryArray | pa.ChunkedArray) -> list[bytes | None]:
    """Return the hash of the identity in each object's trailer.

    The hash is None for an object without a trailer and for a null key. It is b"" for a trailer of
    another rank.
    """
    assert isinstance(store, Trailed)
    known = pa.table({"key": keys}).filter(keys.is_valid())
    trailers = store.read_trailers(known)
    own = trailers.column("own_rank")
    found = iter(pc.if_else(own, trailers.column("identity"), b"").to_pylist())
    return [next(found) if valid else None for valid in keys.is_valid().to_pylist()]
