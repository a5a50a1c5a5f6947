"""What of a source is to be moved, and what of it the destination already has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.formats.errors import ProfileError
from hicachectl.formats.keys.base import codec_for
from hicachectl.formats.keys.table import KeySplitter, join_keys
from hicachectl.formats.spec import UNKNOWN_SIZE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from hicachectl.backends.base import Store
    from hicachectl.formats.keys.base import Affix
    from hicachectl.groups import BoolArray, PageGroups
    from hicachectl.inventory import IntArray, Inventory
    from hicachectl.migrating.routes import Route

ABSENT = -1
UNSIZED = -2  # there, of a size that the store does not list

_ASKED_AT_ONCE = 8192
_MANY = 3  # objects of a wrong size that are no damage any more


@dataclass(frozen=True, slots=True, eq=False)
class Survey:
    """The groups of one route.

    groups: [n] group numbers of the source. pages: [n] their hashes.
    rows: [n, sources] rows of the source's objects, ABSENT where there is none.
    sizes: [n, sources] bytes of each; UNKNOWN_SIZE where neither store nor profile says.
    due: [n, units] whether all sources of a unit are there.
    there: [n, targets] bytes of what the destination has; ABSENT, or UNSIZED.
    strays: [n] whether a group has objects that are none of the route's sources.
    """

    route: Route
    groups: IntArray
    pages: pa.StringArray
    rows: IntArray
    sizes: IntArray
    due: BoolArray
    there: IntArray
    strays: BoolArray

    @property
    def needed(self) -> BoolArray:
        """Which targets the due units fill: [n, targets]."""
        return self.due[:, self.route.unit_of_target]

    @property
    def touched(self) -> BoolArray:
        """Which targets the units fill that have any of their sources: [n, targets]."""
        return self._touched_units(self.rows)[:, self.route.unit_of_target]

    def left_over(self, items: IntArray) -> BoolArray:
        """Which of some groups have objects that nothing is made of: [items].

        A copy is not all of those. Replicas, which nothing needs to be made of, do not count.
        """
        undone = self._touched_units(self.rows[items]) & ~self.due[items]
        left: BoolArray = self.strays[items] | undone.any(axis=1)
        return left

    def _touched_units(self, rows: IntArray) -> BoolArray:
        units = self.route.units
        touched = np.zeros((len(rows), len(units)), dtype=np.bool_)
        for number, unit in enumerate(units):
            touched[:, number] = (rows[:, list(unit.sources)] != ABSENT).any(axis=1)
        return touched

    @property
    def wanted_bytes(self) -> IntArray:
        """Bytes of each target: [n, targets]."""
        wanted = np.broadcast_to(self.route.target_bytes, self.there.shape).copy()
        for unit in self.route.units:
            for target, source in zip(unit.destinations, unit.sources, strict=False):
                if self.route.target_bytes[target] == UNKNOWN_SIZE:
                    wanted[:, target] = self.sizes[:, source]
        return wanted


def survey_source(inventory: Inventory, groups: PageGroups, route: Route) -> Survey:
    """Find the sources of every group of a route; nothing is known of the destination yet."""
    numbers = np.flatnonzero(groups.deployment_ids == route.deployment_id)
    place = np.full(len(groups) + 1, ABSENT, dtype=np.int64)
    place[numbers] = np.arange(len(numbers))
    count = len(route.sources)
    source_of = np.full(len(route.deployment.specs) + 1, ABSENT, dtype=np.int64)
    source_of[route.sources] = np.arange(count)
    specs = inventory.by_affix(inventory.table.spec_ids, ABSENT)
    at = place[groups.of_object]
    chosen = np.flatnonzero(at >= 0)
    is_source = source_of[specs[chosen]] >= 0
    strays = np.zeros(len(numbers), dtype=np.bool_)
    strays[at[chosen[~is_source]]] = True
    chosen = chosen[is_source]
    rows = np.full((len(numbers), count), ABSENT, dtype=np.int64)
    rows[at[chosen], source_of[specs[chosen]]] = chosen
    listed = inventory.objects.column("nbytes").fill_null(UNKNOWN_SIZE).to_numpy()
    sizes = np.where(rows >= 0, np.append(listed, UNKNOWN_SIZE)[rows], 0)
    sizes = np.where((rows >= 0) & (sizes == UNKNOWN_SIZE), route.sizes, sizes)
    due = (
        np.stack([(rows[:, list(unit.sources)] >= 0).all(axis=1) for unit in route.units], axis=1)
        if route.units
        else np.zeros((len(numbers), 0), dtype=np.bool_)
    )
    return Survey(
        route=route,
        groups=numbers,
        pages=groups.pages_at(numbers),
        rows=rows,
        sizes=sizes,
        due=due,
        there=np.full((len(numbers), len(route.targets)), ABSENT, dtype=np.int64),
        strays=strays,
    )


def survey_destination(
    store: Store,
    surveys: Sequence[Survey],
    grammar: str,
    *,
    on_batch: Callable[[int], None] = lambda objects: None,
) -> None:
    """Note in the surveys what the destination has of what their pages become.

    grammar: of the keys that are to be written. Raises ProfileError where it holds another
    topology under the same keys, StoreUnavailable.
    """
    if store.traits.lists_late:
        for survey in surveys:
            _ask(store, survey)
        return
    splitter = KeySplitter()
    seen = _SeenSizes()
    for batch in store.scan(("key", "nbytes")):
        pages, affix_ids = splitter.split(batch.column("key"))
        sizes = batch.column("nbytes").fill_null(UNSIZED).to_numpy()
        seen.add(affix_ids, sizes)
        for survey in surveys:
            _note(survey, splitter.affixes, pages, affix_ids, sizes)
        on_batch(len(batch))
    for survey in surveys:
        _refuse_other_topology(store, survey.route, splitter.affixes, seen, grammar)


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


def _note(
    survey: Survey,
    affixes: list[Affix],
    pages: pa.StringArray,
    affix_ids: npt.NDArray[np.int32],
    sizes: IntArray,
) -> None:
    targets = {target.affix: at for at, target in enumerate(survey.route.targets)}
    target_of = np.array([targets.get(affix, ABSENT) for affix in affixes] + [ABSENT])
    target = target_of[affix_ids]
    mine = np.flatnonzero(target >= 0)
    if not len(mine):
        return
    at = pc.index_in(pages.take(pa.array(mine)), value_set=survey.pages)
    at = at.fill_null(ABSENT).to_numpy()
    mine, at = mine[at >= 0], at[at >= 0]
    survey.there[at, target[mine]] = sizes[mine]


def _ask(store: Store, survey: Survey) -> None:
    """Ask for each key, of a store whose listing is behind."""
    at, targets = np.nonzero(survey.touched)
    for start in range(0, len(at), _ASKED_AT_ONCE):
        some = slice(start, start + _ASKED_AT_ONCE)
        keys = keys_of(survey.route, targets[some], survey.pages.take(pa.array(at[some])))
        found: Any = store.look(pa.table({"key": keys}), ("nbytes",))
        place = pc.index_in(keys, value_set=found.column("key").combine_chunks())
        known = place.is_valid().to_numpy(zero_copy_only=False)
        sizes = found.column("nbytes").fill_null(UNSIZED).to_numpy()
        survey.there[at[some][known], targets[some][known]] = sizes[place.drop_null().to_numpy()]


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
