"""Find the objects to write that a destination already has, by its listing or by lookups."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.backends.capabilities import SingleDeployment
from hicachectl.formats.errors import ProfileError
from hicachectl.formats.identity import profile_tag
from hicachectl.formats.keys import grammar_of
from hicachectl.formats.keys.table import FOREIGN, KeySplitter, page_words
from hicachectl.formats.spec import UNKNOWN_SIZE, fits
from hicachectl.pages.census import SEVERAL, Census
from hicachectl.pages.group_table import ABSENT, UNSIZED, WHOLE, fill_table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    import numpy.typing as npt

    from hicachectl.backends.base import Store
    from hicachectl.formats.arrays import BoolArray, IntArray
    from hicachectl.formats.keys.base import Affix, Grammar
    from hicachectl.formats.profile import Profile
    from hicachectl.move.survey import Objects, Route, Survey
    from hicachectl.pages.inventory import Inventory

_ASKED_AT_ONCE = 8192


def refuse_other_owner(store: Store, profile: Profile | None, *, claims: bool = False) -> None:
    """Raise ProfileError if a store records another deployment than that of the pages to write.

    Only a store whose keys name no deployment records one.
    profile: profile of the pages to write.
    claims: whether to record the profile's deployment in a store that records none.
    Raises StoreUnavailable.
    """
    if not isinstance(store, SingleDeployment):
        return
    tag = None if profile is None or profile.inferred else profile_tag(profile)
    owner = store.claimed_by(tag or "", writes=claims and tag is not None)
    if owner is None or owner == tag:
        return
    next_step = "use other data files and tables, or clear the tables and remove the file"
    ours = f"{tag}, of another model, weights, dtype or layout"
    if tag is None:
        ours = "unknown without the weights"
        next_step = f"give --weights, or a --profile with them, or {next_step}"
    raise ProfileError(
        f"{store.url}: PREFIX.hicachectl-deployment says that servers of deployment {owner} "
        f"use the store, but the deployment of the pages to write is {ours}; {next_step}"
    )


def survey_destination(
    store: Store,
    surveys: Sequence[Survey],
    grammar: str,
    *,
    asks: bool = False,
    on_batch: Callable[[int], None] = lambda objects: None,
) -> list[Survey]:
    """Return the surveys with the targets that the destination already has.

    grammar: grammar of the keys to write.
    asks: whether to look up each target instead of listing the store. In a store whose listing lags
        behind, targets are always looked up.
    Raises StoreUnavailable. If the store is listed, raises the errors of `refuse_destination`.
    """
    if asks or store.traits.lists_late:
        return [survey.having(_asked(store, survey)) for survey in surveys]
    finders = [_TargetFinder(survey) for survey in surveys]
    _listed(store, [survey.route for survey in surveys], finders, grammar, on_batch)
    return [survey.having(finder.found) for survey, finder in zip(surveys, finders, strict=True)]


def listed_targets(surveys: Sequence[Survey], listed: Inventory) -> Iterator[Objects]:
    """Yield, for each survey, the targets that are in a listing of the destination.

    The third array of `Objects` has rows of the listing instead of bytes.
    """
    finders = [_TargetFinder(survey) for survey in surveys]
    start = 0
    for pages in listed.pages().chunks:
        rows = np.arange(start, start + len(pages))
        for finder in finders:
            finder.add(list(listed.table.affixes), pages, listed.affix_ids[rows], rows)
        start += len(pages)
    nothing = np.zeros(0, dtype=np.int64)
    for finder in finders:
        columns = zip((nothing, nothing, nothing), *finder.found, strict=True)
        at, targets, found = map(np.concatenate, columns)
        yield at, targets, found


def refuse_destination(
    store: Store,
    routes: Sequence[Route],
    grammar: str,
    *,
    on_batch: Callable[[int], None] = lambda objects: None,
) -> None:
    """List a destination, and refuse it if servers of another topology use the keys to write.

    A topology is the TP, PP and CP sizes of a deployment. Call this where surveys look up keys,
    because lookups cannot show another topology. A store whose listing lags behind is not listed.
    Raises ProfileError, StoreUnavailable.
    """
    if not store.traits.lists_late:
        _listed(store, routes, (), grammar, on_batch)


def _listed(
    store: Store,
    routes: Iterable[Route],
    finders: Sequence[_TargetFinder],
    grammar: str,
    on_batch: Callable[[int], None],
) -> None:
    splitter = KeySplitter()
    counted = [Census.total(())]
    for batch in store.scan(("key", "nbytes")):
        pages, affix_ids = splitter.split(batch.column("key"))
        sizes = batch.column("nbytes").fill_null(UNSIZED).to_numpy()
        counted.append(Census.of(pa.table([batch.column("nbytes")], ["nbytes"]), affix_ids))
        for finder in finders:
            finder.add(splitter.affixes, pages, affix_ids, sizes)
        on_batch(len(batch))
    sizes_of = Census.total(counted).by_affix()
    for route in routes:
        _refuse_other_topology(store, route, splitter.affixes, sizes_of, grammar)


class _TargetFinder:
    """Search of a listing for the targets of a survey.

    found: targets found in each batch of the listing.
    """

    def __init__(self, survey: Survey) -> None:
        self.found: list[Objects] = []
        self._targets = {target.affix: at for at, target in enumerate(survey.route.targets)}
        self._target_of = np.array([ABSENT])  # target of each affix; the last entry is for FOREIGN
        self._pages = survey.pages
        words = _first_words(survey.pages, np.arange(len(survey.pages)))
        self._order = np.argsort(words, kind="stable")
        self._words = words[self._order]

    def add(
        self,
        affixes: list[Affix],
        pages: pa.StringArray,
        affix_ids: npt.NDArray[np.int32],
        sizes: IntArray,
    ) -> None:
        """Search a batch of the listing."""
        if len(affixes) >= len(self._target_of):
            targets = (self._targets.get(affix, ABSENT) for affix in affixes)
            self._target_of = np.array([*targets, ABSENT])
        target = self._target_of[affix_ids]
        mine = np.flatnonzero(target >= 0)
        if len(mine) and len(self._pages):
            at = self._places(pages, mine)
            mine, at = mine[at >= 0], at[at >= 0]
            self.found.append((at, target[mine], sizes[mine]))

    def _places(self, pages: pa.StringArray, mine: IntArray) -> IntArray:
        """Return each page's row in the survey, or ABSENT: [mine].

        mine: rows of the batch.
        If several forged hashes have the same first 16 digits, only one of these hashes is found.
        For an object of another one, the write finds that the object exists.
        """
        wanted = pages.take(pa.array(mine))
        words = _first_words(pages, mine)
        found = np.minimum(np.searchsorted(self._words, words), len(self._words) - 1)
        places = self._order[found]
        same = pc.equal(self._pages.take(pa.array(places)), wanted)
        return np.where(same.to_numpy(zero_copy_only=False), places, ABSENT)


def _first_words(pages: pa.StringArray, rows: IntArray) -> npt.NDArray[np.uint64]:
    starts = np.zeros(len(rows), dtype=np.int64)
    return page_words(pages.cast(pa.binary()), rows, starts, 0)


def has_whole(store: Store, survey: Survey, items: IntArray) -> BoolArray:
    """Return which groups a destination has whole, with objects of expected sizes: [items].

    All targets of the groups are looked up.
    items: rows of the survey.
    Raises StoreUnavailable.
    """
    route = survey.route
    count = len(route.targets)
    step = max(1, _ASKED_AT_ONCE // max(count, 1))
    whole = np.zeros(len(items), dtype=np.bool_)
    for start in range(0, len(items), step):
        some = items[start : start + step]
        targets = np.tile(np.arange(count), len(some))
        found, sizes = _looked_up(store, survey, np.repeat(some, count), targets)
        owners, targets = np.repeat(np.arange(len(some)), count)[found], targets[found]
        fitting = fits(sizes, route.expected_bytes[targets])
        table = fill_table(
            route.targets, len(some), owners[fitting], targets[fitting], sizes[fitting]
        )
        whole[start : start + step] = table.states == WHOLE
        whole[start + owners[~fitting]] = False
    return whole


def _asked(store: Store, survey: Survey) -> Iterator[Objects]:
    """Yield the targets that a store has, looked up by key."""
    at, targets, _ = survey.touched.objects(np.arange(len(survey.groups)))
    for start in range(0, len(at), _ASKED_AT_ONCE):
        some = slice(start, start + _ASKED_AT_ONCE)
        found, sizes = _looked_up(store, survey, at[some], targets[some])
        yield at[some][found], targets[some][found], sizes


def _looked_up(
    store: Store, survey: Survey, items: IntArray, targets: IntArray
) -> tuple[BoolArray, IntArray]:
    """Look up one target for each item.

    Return a mask of the targets that the store has, [items], and the sizes of these targets.
    """
    keys = survey.keys(items, targets)
    found, places = store.find(keys, ("nbytes",))
    sizes = found.column("nbytes").fill_null(UNSIZED).to_numpy()
    return places != ABSENT, sizes[places[places != ABSENT]]


def _refuse_other_topology(
    store: Store,
    route: Route,
    affixes: list[Affix],
    sizes_of: Mapping[int, Mapping[int, int]],
    grammar: str,
) -> None:
    """Raise ProfileError if servers of another topology or dtype use the keys to write.

    Servers would mix up the objects there with the copies. Each of these signs is enough:

    - The keys have several objects of another size, and none of the expected size.
    - Keys carry no TP size, and the store has ranks that the new topology does not have.

    sizes_of: number of objects by affix and size.
    """
    numbers = {affix: number for number, affix in enumerate(affixes)}
    for target, nbytes in zip(route.targets, route.expected_bytes.tolist(), strict=True):
        counts = sizes_of.get(numbers.get(target.affix, FOREIGN), {})
        if nbytes == UNKNOWN_SIZE or UNKNOWN_SIZE in counts or nbytes in counts:
            continue
        if sum(counts.values()) >= SEVERAL:
            size = max(counts, key=lambda s: counts[s])
            raise ProfileError(
                f"{store.url}: already has {target.coordinate.pool} objects of {size} bytes under "
                f"the keys to write, but they should have {nbytes} bytes, so a deployment with "
                "another topology or dtype wrote them; remove them (hicachectl rm), or give "
                "another --to-tag or --to-model"
            )
    spoken = grammar_of(grammar)
    if spoken.has_tag:  # in such keys, only the tags tell deployments of different TP sizes apart
        _refuse_further_ranks(store, route, affixes, spoken)


def _refuse_further_ranks(
    store: Store, route: Route, affixes: list[Affix], grammar: Grammar
) -> None:
    coordinates = [target.coordinate for target in route.targets]
    own = {(c.names, c.pool, c.part) for c in coordinates}
    ranks = {c.shard.tp_rank for c in coordinates if c.shard.tp_rank is not None}
    if not ranks:
        return
    for affix in affixes:
        for reading in grammar.readings(*affix)[:1]:
            rank = reading.shard.tp_rank
            shared = (reading.names, reading.pool, reading.part) in own
            if shared and rank is not None and rank > max(ranks):
                raise ProfileError(
                    f"{store.url}: already has objects of TP rank {rank} of {reading.names.model}, "
                    f"but the new TP size is {max(ranks) + 1}, and {grammar.title} keys carry no "
                    "TP size, so both deployments would share keys; remove the objects (hicachectl "
                    "rm), or give another --to-tag"
                )
