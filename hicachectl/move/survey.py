"""What of a source is to be moved, and what of it the destination already has."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.checks.sizes import expected_sizes
from hicachectl.formats.errors import ProfileError
from hicachectl.formats.keys.base import codec_for
from hicachectl.formats.keys.table import KeySplitter, join_keys
from hicachectl.formats.spec import UNKNOWN_SIZE, fits
from hicachectl.pages.group_table import ABSENT, UNSIZED, GroupTable, fill_table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import numpy.typing as npt

    from hicachectl.backends.base import Store
    from hicachectl.formats.keys.base import Affix
    from hicachectl.move.routes import Route
    from hicachectl.pages.groups import BoolArray, PageGroups
    from hicachectl.pages.inventory import IntArray, Inventory

_ASKED_AT_ONCE = 8192
_MANY = 3  # objects of a wrong size that are no damage any more

_Objects = tuple["IntArray", "IntArray", "IntArray"]  # of each: its group, its target, its bytes


@dataclass(frozen=True, eq=False)
class Survey:
    """The groups of one route, and two stores' objects of these: tables that count n groups.

    groups: [n] group numbers of the source. pages: [n] their hashes.
    rows: the route's sources; slots are rows of the source's inventory.
    sizes: bytes of each row of the inventory; UNKNOWN_SIZE where neither store nor profile says.
    wanted: the targets that the destination is to have; slots are their bytes, UNSIZED where a
        source is not of the size that its unit takes, or of none that is known.
    there: the targets that the destination has; slots are their bytes, or UNSIZED.
    strays: [n] whether a group has objects that are none of the route's sources.
    """

    route: Route
    groups: IntArray
    pages: pa.StringArray
    rows: GroupTable
    sizes: IntArray
    wanted: GroupTable
    there: GroupTable
    strays: BoolArray

    @cached_property
    def lacking(self) -> GroupTable:
        """The wanted targets that the destination lacks."""
        return self.wanted.without(self.there)

    @property
    def touched(self) -> GroupTable:
        """The targets of all units that have any of their sources."""
        return made_of(self.route, self.rows, self.sizes, partly=True)

    @cached_property
    def left_over(self) -> BoolArray:
        """Which groups have objects that nothing is made of: [n].

        A copy is not all of those. Replicas, which nothing needs to be made of, do not count.
        """
        left = self.strays.copy()
        for unit in self.route.units:
            groups, complete = self.rows.holders(unit.sources)
            left[groups[~complete]] = True
        return left

    def as_if_written(self, items: IntArray) -> Survey:
        """Return the survey of a destination that has all that is wanted of some groups."""
        places, targets, sizes = self.wanted.objects(items)
        written = items[places], targets, sizes
        known = self.there.objects(np.arange(self.there.count))
        return replace(self, there=_targets(self.route, self.there.count, [written, known]))


def survey_source(
    inventory: Inventory, groups: PageGroups, routes: Iterable[Route]
) -> list[Survey]:
    """Survey the groups of each route; nothing is known of the destination yet."""
    sizes = inventory.objects.column("nbytes").fill_null(UNKNOWN_SIZE).to_numpy()
    if (sizes == UNKNOWN_SIZE).any():
        expected = expected_sizes(inventory.table)[inventory.affix_ids]
        sizes = np.where(sizes == UNKNOWN_SIZE, expected, sizes)
    return [_survey(groups, route, sizes) for route in routes]


def _survey(groups: PageGroups, route: Route, sizes: IntArray) -> Survey:
    table, span = groups.tables[route.deployment_id], groups.span(route.deployment_id)
    # An object set is of sources only, or of none.
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
    )


def made_of(route: Route, rows: GroupTable, sizes: IntArray, *, partly: bool = False) -> GroupTable:
    """Return the targets that units make of sources; slots are their bytes, or UNSIZED.

    rows, sizes: as in a survey. partly: units that lack some of their sources count, and the size
    of sources does not.
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
        if expected[0] == UNKNOWN_SIZE:  # as many as the one source has
            nbytes = np.where(actual == UNKNOWN_SIZE, UNSIZED, actual)
        else:
            unfit = (actual != route.sizes[sources]).any(axis=1, keepdims=True)
            nbytes = np.where(unfit & (not partly), UNSIZED, expected)
        for target, column in zip(unit.destinations, nbytes.T, strict=True):
            found.append((groups, np.full(len(groups), target), column))
    return _targets(route, rows.count, found)


def compare(wanted: GroupTable, there: GroupTable) -> tuple[BoolArray, BoolArray, BoolArray]:
    """Say of each group whether a destination has, lacks, and has otherwise any wanted target.

    wanted, there: as in a survey. Otherwise: of another size, where both are known.
    """
    some, lacks, differs = np.zeros((3, wanted.count), dtype=np.bool_)
    for block, theirs in zip(wanted.blocks, there.blocks, strict=True):
        found, groups = block.match(theirs), block.owners
        some[groups[found != ABSENT]] = True
        lacks[groups[found == ABSENT]] = True
        differs[groups[~fits(found, block.values)]] = True
    return some, lacks, differs


def survey_destination(
    store: Store,
    surveys: Sequence[Survey],
    grammar: str,
    *,
    on_batch: Callable[[int], None] = lambda objects: None,
) -> list[Survey]:
    """Find what the destination has of what the surveyed pages become; return the surveys with it.

    grammar: of the keys that are to be written. Raises ProfileError where it holds another
    topology under the same keys, StoreUnavailable.
    """
    if store.traits.lists_late:
        return [replace(survey, there=_asked(store, survey)) for survey in surveys]
    splitter = KeySplitter()
    seen = _SeenSizes()
    found: list[list[_Objects]] = [[] for _ in surveys]
    for batch in store.scan(("key", "nbytes")):
        pages, affix_ids = splitter.split(batch.column("key"))
        sizes = batch.column("nbytes").fill_null(UNSIZED).to_numpy()
        seen.add(affix_ids, sizes)
        for survey, objects in zip(surveys, found, strict=True):
            objects.append(_targets_among(survey, splitter.affixes, pages, affix_ids, sizes))
        on_batch(len(batch))
    for survey in surveys:
        _refuse_other_topology(store, survey.route, splitter.affixes, seen, grammar)
    return [
        replace(survey, there=_targets(survey.route, survey.there.count, objects))
        for survey, objects in zip(surveys, found, strict=True)
    ]


def keys_of(route: Route, targets: IntArray, pages: pa.StringArray) -> pa.BinaryArray:
    """Spell the keys of targets, one for each page."""
    return join_keys([target.affix for target in route.targets], pa.array(targets), pages)


class _SeenSizes:
    """The sizes that objects of each affix have: how many of the smallest and of the largest."""

    def __init__(self) -> None:
        self._counts: dict[tuple[int, int], int] = {}

    def add(self, affix_ids: npt.NDArray[np.int32], sizes: IntArray) -> None:
        pairs, counts = np.unique(
            np.stack([affix_ids.astype(np.int64), sizes]), axis=1, return_counts=True
        )
        for affix, size, count in zip(*pairs.tolist(), counts.tolist(), strict=True):
            self._counts[affix, size] = self._counts.get((affix, size), 0) + count

    def of(self, affix: int) -> dict[int, int]:
        """Count the objects of an affix by their size."""
        return {size: n for (of, size), n in self._counts.items() if of == affix}


def _targets_among(
    survey: Survey,
    affixes: list[Affix],
    pages: pa.StringArray,
    affix_ids: npt.NDArray[np.int32],
    sizes: IntArray,
) -> _Objects:
    """Find the objects of a listing that are targets of the surveyed pages."""
    targets = {target.affix: at for at, target in enumerate(survey.route.targets)}
    target_of = np.array([targets.get(affix, ABSENT) for affix in affixes] + [ABSENT])
    target = target_of[affix_ids]
    mine = np.flatnonzero(target >= 0)
    at = pc.index_in(pages.take(pa.array(mine)), value_set=survey.pages)
    at = at.fill_null(ABSENT).to_numpy()
    mine, at = mine[at >= 0], at[at >= 0]
    return at, target[mine], sizes[mine]


def _asked(store: Store, survey: Survey) -> GroupTable:
    """Ask for each key, of a store whose listing is behind."""
    at, targets, _ = survey.touched.objects(np.arange(len(survey.groups)))
    objects = []
    for start in range(0, len(at), _ASKED_AT_ONCE):
        some = slice(start, start + _ASKED_AT_ONCE)
        keys = keys_of(survey.route, targets[some], survey.pages.take(pa.array(at[some])))
        found: Any = store.look(pa.table({"key": keys}), ("nbytes",))
        place = pc.index_in(keys, value_set=found.column("key").combine_chunks())
        known = place.is_valid().to_numpy(zero_copy_only=False)
        sizes = found.column("nbytes").fill_null(UNSIZED).to_numpy()
        sizes = sizes[place.drop_null().to_numpy()]
        objects.append((at[some][known], targets[some][known], sizes))
    return _targets(survey.route, survey.there.count, objects)


def _targets(route: Route, count: int, objects: Iterable[_Objects]) -> GroupTable:
    """Put targets into the slots of `count` groups; of several for one the first stays."""
    nothing = np.zeros(0, dtype=np.int64)
    columns = zip((nothing, nothing, nothing), *objects, strict=True)
    return fill_table(route.targets, count, *(np.concatenate(column) for column in columns))


def _refuse_other_topology(
    store: Store, route: Route, affixes: list[Affix], seen: _SeenSizes, grammar: str
) -> None:
    """Refuse keys that others' objects have: what they hold would be taken for this deployment's.

    Such are many objects of another size under our keys and none of ours; and where keys carry no
    TP size, ranks beyond ours.
    """
    numbers = {affix: number for number, affix in enumerate(affixes)}
    for target, nbytes in zip(route.targets, route.expected_bytes.tolist(), strict=True):
        counts = seen.of(numbers[target.affix]) if target.affix in numbers else {}
        if nbytes == UNKNOWN_SIZE or UNSIZED in counts or nbytes in counts:
            continue
        if sum(counts.values()) >= _MANY:
            size = max(counts, key=lambda s: counts[s])
            raise ProfileError(
                f"{store.url}: holds {target.coordinate.pool} objects of {size} bytes under the "
                f"keys that objects of {nbytes} bytes would get: another topology or dtype; "
                "remove them (hicachectl rm), or migrate to another --to-tag or --to-model"
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
                    f"{store.url}: holds objects of TP rank {rank} of {reading.model}, whose "
                    f"keys a deployment of TP size {max(ranks) + 1} shares: Mooncake keys carry no "
                    "TP size; remove them (hicachectl rm), or migrate to another --to-tag"
                )
