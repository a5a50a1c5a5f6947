"""Surveys: which objects of a source to copy, and which the destination has."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.backends.capabilities import Archive, Profiled
from hicachectl.checks.sizes import expected_sizes
from hicachectl.formats.errors import ProfileError, UsageError
from hicachectl.formats.keys.base import codec_for
from hicachectl.formats.keys.table import KeySplitter, page_words
from hicachectl.formats.spec import UNKNOWN_SIZE, fits
from hicachectl.formats.transfer import transfer_plan
from hicachectl.formats.wording import inferred_refused
from hicachectl.move.batches import Action
from hicachectl.move.routes import planned_route, verbatim_routes
from hicachectl.pages.group_table import ABSENT, UNSIZED, GroupTable, fill_table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import numpy.typing as npt

    from hicachectl.backends.base import Store
    from hicachectl.formats.keys.base import Affix
    from hicachectl.formats.profile import Profile
    from hicachectl.formats.transfer import TransferPlan
    from hicachectl.move.routes import Route
    from hicachectl.pages.groups import BoolArray, PageGroups
    from hicachectl.pages.inventory import IntArray, Inventory

_ASKED_AT_ONCE = 8192
_MANY = 3  # this many objects of a wrong size mean another topology, not damage

IfExists = Literal["skip", "verify", "overwrite"]
_Objects = tuple["IntArray", "IntArray", "IntArray"]  # group, target and bytes of each object


@dataclass(frozen=True, eq=False)
class Survey:
    """The n groups of one route, with their objects in both stores.

    groups: [n] group numbers of the source. pages: [n] page hashes.
    rows:   table of the route's sources; a slot has the object's row in the inventory.
    sizes:  bytes of each row of the inventory; UNKNOWN_SIZE if neither store nor profile has them.
    wanted: table of targets to write; a slot has the target's bytes, or UNSIZED if a source's size
        is unknown or not as expected.
    there:  table of targets in the destination; a slot has the bytes, or UNSIZED.
    strays: [n] whether a group has objects that are not sources of the route.
    times:  mtime_ns of each row of the inventory, null if the store keeps none.
    foreign: [n] whether a target in the destination has another identity than its copy would have,
        or is older than a server's `clear`.
    """

    route: Route
    groups: IntArray
    pages: pa.StringArray
    rows: GroupTable
    sizes: IntArray
    wanted: GroupTable
    there: GroupTable
    strays: BoolArray
    times: pa.Int64Array
    foreign: BoolArray

    @cached_property
    def lacking(self) -> GroupTable:
        """Wanted targets that the destination lacks."""
        return self.wanted.without(self.there)

    @property
    def touched(self) -> GroupTable:
        """Targets that are made from at least one existing source."""
        return made_of(self.route, self.rows, self.sizes, partly=True)

    @cached_property
    def left_over(self) -> BoolArray:
        """Which groups have uncopied objects, except replicas of copied ones: [n]."""
        left = self.strays.copy()
        for unit in self.route.units:
            groups, complete = self.rows.holders(unit.sources)
            left[groups[~complete]] = True
        return left

    @cached_property
    def unfit(self) -> BoolArray:
        """Which groups have a source of unknown or wrong size: [n]."""
        blocks = self.wanted.blocks
        return self.wanted.where(block.values == UNSIZED for block in blocks).having()

    def keys(self, items: IntArray, targets: IntArray) -> pa.BinaryArray:
        """Return the key of one target for each item: [items]. items: rows of the survey."""
        return self.route.keys(targets, self.pages.take(pa.array(items)))

    def as_if_written(self, items: IntArray) -> Survey:
        """Return the survey as if the destination had all wanted targets of the items."""
        places, targets, sizes = self.wanted.objects(items)
        written = items[places], targets, sizes
        known = self.there.objects(np.arange(self.there.count))
        return replace(self, there=_targets(self.route, self.there.count, [written, known]))


class StorePair:
    """A source, a destination, and the transfer between them.

    profile: of the source; None: only its keys are known.
    target:  profile of the destination; None: the source's.
    grammar: of the keys to write: the destination's, or the source's for a new pack.
    """

    def __init__(
        self, source: Store, destination: Store, profile: Profile | None, target: Profile | None
    ) -> None:
        """Plan the transfer; set the destination's grammar and profile.

        Raises UsageError, ProfileError or UnsupportedByBackend if that is impossible.
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
        self._plan = self._planned()
        if target is not None and isinstance(destination, Profiled):
            destination.use_profile(target)

    @property
    def unchanged(self) -> bool:
        """Whether all objects keep key and bytes."""
        return self._plan is None

    def _planned(self) -> TransferPlan | None:
        """Return a page's transfer; None if all objects keep key and bytes."""
        source, profile = self.source, self.profile
        same = source.url == self.destination.url
        if self.target in (None, profile) and self.grammar == source.grammar:
            if same:
                raise UsageError(
                    f"{source.url}: source and destination are the same; give another destination"
                )
            return None
        if profile is None or profile.inferred:
            raise UsageError(f"{source.url}: {inferred_refused('changing keys or bytes')}")
        plan = transfer_plan(profile, source.grammar, self.target or profile, self.grammar)
        old, new = ({o.coordinate for o in objs} for objs in (plan.sources, plan.destinations))
        if same and old & new:
            raise UsageError(
                f"{source.url}: the new objects would have the keys of the objects being read; "
                "migrate to another store, or give another --to-model or --to-tag"
            )
        return plan

    def survey(
        self,
        inventory: Inventory,
        groups: PageGroups,
        *,
        first_only: bool = False,
        on_batch: Callable[[int], None] = lambda objects: None,
    ) -> list[Survey]:
        """Survey the groups of each deployment in both stores, or of the first only.

        Raises ProfileError if the destination has objects of another topology under the same keys,
        StoreUnavailable.
        """
        deployments = inventory.table.deployments
        routes = list(verbatim_routes(deployments))
        if self._plan is not None:
            routes = [planned_route(deployments[0], self._plan)]
        surveys = survey_source(inventory, groups, routes[:1] if first_only else routes)
        return survey_destination(self.destination, surveys, self.grammar, on_batch=on_batch)


def survey_source(
    inventory: Inventory, groups: PageGroups, routes: Iterable[Route]
) -> list[Survey]:
    """Survey the groups of each route in the source only."""
    sizes = inventory.objects.column("nbytes").fill_null(UNKNOWN_SIZE).to_numpy()
    if (sizes == UNKNOWN_SIZE).any():
        expected = expected_sizes(inventory.table)[inventory.affix_ids]
        sizes = np.where(sizes == UNKNOWN_SIZE, expected, sizes)
    times = pa.nulls(len(sizes), pa.int64())
    if "mtime_ns" in inventory.objects.column_names:
        times = inventory.objects.column("mtime_ns").combine_chunks().cast(pa.int64())
    return [_survey(groups, route, sizes, times) for route in routes]


def _survey(groups: PageGroups, route: Route, sizes: IntArray, times: pa.Int64Array) -> Survey:
    table, span = groups.tables[route.deployment_id], groups.span(route.deployment_id)
    # An object set holds either sources only or no source.
    taken = [block for block in table.blocks if block.columns[0] < len(route.sources)]
    others = [block for block in table.blocks if block.columns[0] >= len(route.sources)]
    rows = GroupTable(route.sources, table.count, tuple(taken))
    return Survey(
        route=route,
        groups=np.arange(span.start, span.stop),
        pages=groups.pages_at(span),
        rows=rows,
        sizes=sizes,
        wanted=made_of(route, rows, sizes),
        there=_targets(route, table.count, ()),
        strays=table.having(others),
        times=times,
        foreign=np.zeros(table.count, dtype=np.bool_),
    )


def made_of(route: Route, rows: GroupTable, sizes: IntArray, *, partly: bool = False) -> GroupTable:
    """Return the targets that the route makes from sources, like `Survey.wanted`.

    rows, sizes: as in a survey. partly: include targets that lack sources; ignore sizes of sources.
    """
    found: list[_Objects] = []
    for unit in route.units:
        groups, complete = rows.holders(unit.sources)
        groups = groups if partly else groups[complete]
        if not len(groups):
            continue
        sources = np.array(unit.sources, dtype=np.int64)
        actual = sizes[rows.slots(groups, sources)]
        expected = route.target_bytes[list(unit.destinations)]
        if expected[0] == UNKNOWN_SIZE:  # the size of the single source
            nbytes = np.where(actual == UNKNOWN_SIZE, UNSIZED, actual)
        else:
            unfit = (actual != route.sizes[sources]).any(axis=1, keepdims=True)
            nbytes = np.where(unfit & (not partly), UNSIZED, expected)
        for target, column in zip(unit.destinations, nbytes.T, strict=True):
            found.append((groups, np.full(len(groups), target), column))
    return _targets(route, rows.count, found)


def compare(wanted: GroupTable, there: GroupTable) -> tuple[BoolArray, BoolArray, BoolArray]:
    """Compare the wanted targets with the destination's.

    Return three arrays [n]: whether the destination has any wanted target of the group, lacks any,
    and has any in another size. An unknown size equals any size. wanted, there: as in a survey.
    """
    some, lacks, differs = np.zeros((3, wanted.count), dtype=np.bool_)
    for block, theirs in zip(wanted.blocks, there.blocks, strict=True):
        found, groups = block.match(theirs), block.owners
        some[groups[found != ABSENT]] = True
        lacks[groups[found == ABSENT]] = True
        differs[groups[~fits(found, block.values)]] = True
    return some, lacks, differs


def decide(survey: Survey, chosen: BoolArray, if_exists: IfExists) -> npt.NDArray[np.int8]:
    """Return the action for each group: [n] of Action. chosen: [n] whether a group is wanted."""
    some, lacks, differs = compare(survey.wanted, survey.there)
    actions = np.full(len(survey.groups), Action.COPY, dtype=np.int8)
    actions[some] = Action.COMPLETE
    actions[some & ~lacks] = Action.COMPARE if if_exists == "verify" else Action.SKIP
    if if_exists == "overwrite":
        actions[some] = Action.REPLACE
    else:
        actions[differs | survey.foreign] = Action.CONFLICT
    actions[~chosen | ~(some | lacks) | survey.unfit] = Action.NOTHING
    return actions


def survey_destination(
    store: Store,
    surveys: Sequence[Survey],
    grammar: str,
    *,
    on_batch: Callable[[int], None] = lambda objects: None,
) -> list[Survey]:
    """Return the surveys with the targets that the destination has.

    grammar: of the keys to write. Raises ProfileError if the destination has objects of another
    topology under the same keys, StoreUnavailable.
    """
    if store.traits.lists_late:
        return [replace(survey, there=_asked(store, survey)) for survey in surveys]
    splitter = KeySplitter()
    seen = _SeenSizes()
    finders = [_TargetFinder(survey) for survey in surveys]
    for batch in store.scan(("key", "nbytes")):
        pages, affix_ids = splitter.split(batch.column("key"))
        sizes = batch.column("nbytes").fill_null(UNSIZED).to_numpy()
        seen.add(affix_ids, sizes)
        for finder in finders:
            finder.add(splitter.affixes, pages, affix_ids, sizes)
        on_batch(len(batch))
    for survey in surveys:
        _refuse_other_topology(store, survey.route, splitter.affixes, seen, grammar)
    return [
        replace(survey, there=_targets(survey.route, survey.there.count, finder.found))
        for survey, finder in zip(surveys, finders, strict=True)
    ]


class _SeenSizes:
    """Numbers of objects by affix and size."""

    def __init__(self) -> None:
        self._counts: dict[tuple[int, int], int] = {}

    def add(self, affix_ids: npt.NDArray[np.int32], sizes: IntArray) -> None:
        pairs, counts = np.unique(
            np.stack([affix_ids.astype(np.int64), sizes]), axis=1, return_counts=True
        )
        for affix, size, count in zip(*pairs.tolist(), counts.tolist(), strict=True):
            self._counts[affix, size] = self._counts.get((affix, size), 0) + count

    def of(self, affix: int) -> dict[int, int]:
        """Return the number of objects of an affix by size."""
        return {size: n for (of, size), n in self._counts.items() if of == affix}


class _TargetFinder:
    """Search of a listing for the targets of a survey. found: an entry for each batch."""

    def __init__(self, survey: Survey) -> None:
        self.found: list[_Objects] = []
        self._targets = {target.affix: at for at, target in enumerate(survey.route.targets)}
        self._target_of = np.array([ABSENT])  # of each affix, or ABSENT; the last is for FOREIGN
        self._pages = survey.pages
        words = _first_words(survey.pages, np.arange(len(survey.pages)))
        self._order = np.argsort(words, kind="stable")
        self._words = words[self._order]
        # SHA-256 never gives equal first words, but forged page hashes can have them.
        self._alike = bool((self._words[1:] == self._words[:-1]).any())

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
        """Return each page's row in the survey, or ABSENT: [mine]. mine: rows of the batch."""
        wanted = pages.take(pa.array(mine))
        if self._alike:
            known: IntArray = (
                pc.index_in(wanted, value_set=self._pages).fill_null(ABSENT).to_numpy()
            )
            return known
        words = _first_words(pages, mine)
        found = np.minimum(np.searchsorted(self._words, words), len(self._words) - 1)
        places = self._order[found]
        same = pc.equal(self._pages.take(pa.array(places)), wanted)
        return np.where(same.to_numpy(zero_copy_only=False), places, ABSENT)


def _first_words(pages: pa.StringArray, rows: IntArray) -> npt.NDArray[np.uint64]:
    starts = np.zeros(len(rows), dtype=np.int64)
    return page_words(pages.cast(pa.binary()), rows, starts, 0)


def _asked(store: Store, survey: Survey) -> GroupTable:
    """Look up a store's targets by key, because its listing lags behind."""
    at, targets, _ = survey.touched.objects(np.arange(len(survey.groups)))
    objects = []
    for start in range(0, len(at), _ASKED_AT_ONCE):
        some = slice(start, start + _ASKED_AT_ONCE)
        keys = survey.keys(at[some], targets[some])
        found: Any = store.look(pa.table({"key": keys}), ("nbytes",))
        place = pc.index_in(keys, value_set=found.column("key").combine_chunks())
        known = place.is_valid().to_numpy(zero_copy_only=False)
        sizes = found.column("nbytes").fill_null(UNSIZED).to_numpy()
        sizes = sizes[place.drop_null().to_numpy()]
        objects.append((at[some][known], targets[some][known], sizes))
    return _targets(survey.route, survey.there.count, objects)


def _targets(route: Route, count: int, objects: Iterable[_Objects]) -> GroupTable:
    """Return a table of `count` groups; if a slot has several targets, the first counts."""
    nothing = np.zeros(0, dtype=np.int64)
    columns = zip((nothing, nothing, nothing), *objects, strict=True)
    return fill_table(route.targets, count, *(np.concatenate(column) for column in columns))


def _refuse_other_topology(
    store: Store, route: Route, affixes: list[Affix], seen: _SeenSizes, grammar: str
) -> None:
    """Raise ProfileError if another topology uses the keys to write.

    Servers would mix up the objects. Signs are several objects of another size and none of the
    expected size, or, if keys carry no TP size, ranks that the new topology does not have.
    """
    numbers = {affix: number for number, affix in enumerate(affixes)}
    for target, nbytes in zip(route.targets, route.expected_bytes.tolist(), strict=True):
        counts = seen.of(numbers[target.affix]) if target.affix in numbers else {}
        if nbytes == UNKNOWN_SIZE or UNSIZED in counts or nbytes in counts:
            continue
        if sum(counts.values()) >= _MANY:
            size = max(counts, key=lambda s: counts[s])
            raise ProfileError(
                f"{store.url}: already has {target.coordinate.pool} objects of {size} bytes under "
                f"the keys to write, but they should have {nbytes} bytes: a deployment with "
                "another topology or dtype wrote them; remove them (hicachectl rm), or give "
                "another --to-tag or --to-model"
            )
    if grammar == "mooncake":
        _refuse_further_ranks(store, route, affixes, grammar)


def _refuse_further_ranks(store: Store, route: Route, affixes: list[Affix], grammar: str) -> None:
    coordinates = [target.coordinate for target in route.targets]
    own = {(c.model, c.tag, c.pool, c.part) for c in coordinates}
    ranks = {c.shard.tp_rank for c in coordinates if c.shard.tp_rank is not None}
    if not ranks:
        return
    codec = codec_for(grammar)
    for affix in affixes:
        for reading in codec.readings(*affix)[:1]:
            rank = reading.shard.tp_rank
            shared = (reading.model, reading.tag, reading.pool, reading.part) in own
            if shared and rank is not None and rank > max(ranks):
                raise ProfileError(
                    f"{store.url}: already has objects of TP rank {rank} of {reading.model}, but "
                    f"the new TP size is {max(ranks) + 1}: Mooncake keys carry no TP size, so both "
                    "would share keys; remove them (hicachectl rm), or give another --to-tag"
                )
