"""Decide, object by object, between two models whose keys look alike.

`<hash>_m_0_2.bin` is TP rank 0 of 2 of model m (the wide reading), or the whole page of model m_0_2
(the narrow reading). If a store has both models, two facts decide: the object's size, and whether
its page has other TP ranks (fellows), which only the wide reading explains. If neither fact
decides, the object stays ambiguous.

Lost ranks are far more common than such model names. So an object of the wide size without fellows
counts as a rank that lost its fellows, unless there are very many.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from functools import cached_property
from heapq import nlargest
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from hicachectl.formats.keys.resolve import (
    ANCHOR_POOL,
    Resolved,
    explained,
    rank_count,
    rank_set,
)
from hicachectl.formats.spec import UNKNOWN_SIZE
from hicachectl.pages.deployments import UNRESOLVED, make_table
from hicachectl.pages.page_order import page_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from hicachectl.formats.objects import Coordinate
    from hicachectl.pages.census import Census
    from hicachectl.pages.deployments import AffixTable
    from hicachectl.pages.page_order import Objects

    IntArray = npt.NDArray[np.int64]
    BoolArray = npt.NDArray[np.bool_]
    Ids = npt.NDArray[np.int32]

SizeCounts = dict[int, dict[int, int]]  # number of objects by affix id and size

_WIDE, _NARROW, _OPEN, _NONE = range(4)

_MANY = 3  # from this many objects on, a size is not damage
# An affix may be another model's too if at least _MANY_LONE of its objects, and _SHARE of them,
# have no fellows, and if no fellow rank has more than 1 / _TIMES_FELLOWS as many such objects.
_MANY_LONE = 20
_SHARE = 0.05
_TIMES_FELLOWS = 3


@dataclass(frozen=True, slots=True)
class _Contest:
    """An affix of anchors with a wide reading and narrow readings.

    narrow: readings that explain less of the affix than `wide`, the one that explains most first;
    if the table's reading is narrow, only that one. taken: the table's reading, _WIDE or _NARROW.
    """

    affix: int
    wide: Coordinate
    narrow: tuple[Coordinate, ...]
    taken: int


def decide_objects(
    table: AffixTable, census: Census, load: Callable[[], Objects]
) -> tuple[AffixTable, Ids | None]:
    """Return a table and affix ids that give each object of a contested affix its reading.

    load: returns all objects; called only if an affix is contested. If nothing changes, returns
    the table and None.
    """
    readings = _Readings(table)
    if not readings.has_choice:
        return table, None
    readings.sizes = census.by_affix()
    contests: dict[object, list[_Contest]] = defaultdict(list)
    for contest in readings.contests():
        contests[rank_set(contest.wide)].append(contest)
    if not contests:
        return table, None
    objects = load()
    decided = _Decided(table, objects.affix_ids)
    listing = _Listing(objects, readings, contests)
    for among in contests.values():
        pages = _Pages(listing, readings, among)
        for contest in among:
            pages.decide(contest, decided)
    return decided.result()


@dataclass(slots=True)
class _Alike:
    """Affixes whose objects should have the same size.

    objects: number of objects by size. having: number of affixes by size.
    """

    affixes: list[int] = field(default_factory=list)
    objects: Counter[int] = field(default_factory=Counter)
    having: Counter[int] = field(default_factory=Counter)

    def add(self, affix: int, sizes: Mapping[int, int]) -> None:
        self.affixes.append(affix)
        self.objects.update(sizes)
        self.having.update(sizes.keys())


class _Readings:
    """All readings of a table's affixes, whatever the profile chose."""

    def __init__(self, table: AffixTable) -> None:
        self.table = table
        # Readings by affix id; the one that explains most of the affix comes first.
        self.anchors: list[list[Coordinate]] = []
        self.fellows: dict[object, list[int]] = defaultdict(list)  # affix ids by rank set
        self._sidecars: dict[object, dict[int, Coordinate]] = defaultdict(dict)
        self.sizes: SizeCounts = {}  # counted only if there is a choice
        self._alike: dict[object, _Alike] = defaultdict(_Alike)
        self._largest: dict[object, list[tuple[int, int]]] = {}
        for number, (affix, resolved) in enumerate(zip(table.affixes, table.resolved, strict=True)):
            found = resolved.readings
            if len(found) == 1:  # a profile may have chosen this one from several
                found = table.codec.readings(*affix)
            kv = [reading for reading in found if reading.pool == ANCHOR_POOL]
            self.anchors.append(sorted(kv, key=explained, reverse=True))
            for reading in found:
                if reading.pool == ANCHOR_POOL:
                    self.fellows[rank_set(reading)].append(number)
                else:
                    place = reading.model, reading.tag, reading.shard
                    self._sidecars[place].setdefault(number, reading)

    def sidecars(
        self, wide: Coordinate, narrow: Coordinate
    ) -> dict[int, tuple[Coordinate, Coordinate]]:
        """Return the affixes of sidecars that fit an anchor under both of its readings."""
        ours, theirs = (self._sidecars.get((r.model, r.tag, r.shard), {}) for r in (wide, narrow))
        return {number: (ours[number], theirs[number]) for number in ours.keys() & theirs.keys()}

    def concerned(self, contests: list[_Contest]) -> list[int]:
        """Return the affixes of a rank set's anchors and of the sidecars beside them."""
        found = set(self.fellows[rank_set(contests[0].wide)])
        for contest in contests:
            for narrow in contest.narrow:
                found |= self.sidecars(contest.wide, narrow).keys()
        return sorted(found)

    def _wide(self, readings: list[Coordinate]) -> Coordinate | None:
        """Return the reading that explains most and has fellow ranks in the store."""
        shared = (r for r in readings if rank_count(r) > 1)
        return next((r for r in shared if len(self.fellows[rank_set(r)]) > 1), None)

    @property
    def has_choice(self) -> bool:
        """Whether any anchor affix has several readings, one of them wide."""
        return any(len(readings) > 1 and self._wide(readings) for readings in self.anchors)

    def contests(self) -> Iterator[_Contest]:
        """Yield the anchor affixes that two models may share."""
        for number, readings in enumerate(self.anchors):
            taken, wide = self.table.resolved[number].coordinate, self._wide(readings)
            if wide is None or taken not in readings or len(readings) < 2:
                continue
            if taken == wide:
                narrow = tuple(r for r in readings if explained(r) < explained(wide))
                if narrow and self._looks_shared(number, wide):
                    yield _Contest(number, wide, narrow, _WIDE)
            elif explained(taken) < explained(wide):
                yield _Contest(number, wide, (taken,), _NARROW)

    def _looks_shared(self, affix: int, wide: Coordinate) -> bool:
        """Return whether counts suggest that another model writes an affix too."""
        own, stated, alike = self.sizes.get(affix, {}), self.stated_size(affix), self.alike(wide)
        if stated != UNKNOWN_SIZE:
            fits = own.keys() <= {stated}
        else:  # another TP rank must have each size too
            fits = len(alike.affixes) < 2 or all(alike.having[size] > 1 for size in own)
        if len(own) > 1 or not fits:
            return True
        count, most = sum(own.values()), self._most(wide, affix)
        return count - most >= max(_MANY_LONE, _SHARE * count)

    def _most(self, wide: Coordinate, affix: int) -> int:
        """Return the largest object count of a fellow rank."""
        key = rank_set(wide)
        if key not in self._largest:
            totals = ((sum(self.sizes.get(f, {}).values()), f) for f in self.fellows[key])
            self._largest[key] = nlargest(2, totals)
        return next((count for count, fellow in self._largest[key] if fellow != affix), 0)

    def alike(self, wide: Coordinate) -> _Alike:
        """Return the affixes of a stage's TP ranks, whose objects have the same size."""
        key = rank_set(wide), wide.shard.pp_rank, wide.shard.cp_rank
        if not self._alike:
            for affix, readings in enumerate(self.anchors):
                for reading in readings:
                    place = rank_set(reading), reading.shard.pp_rank, reading.shard.cp_rank
                    self._alike[place].add(affix, self.sizes.get(affix, {}))
        return self._alike[key]

    def stated_size(self, affix: int) -> int:
        spec = self.table.spec(affix)
        return UNKNOWN_SIZE if spec is None else spec.nbytes


class _Decided:
    """Decided objects, under additional ids of their affixes."""

    def __init__(self, table: AffixTable, affix_ids: Ids) -> None:
        self._affix_ids = affix_ids
        self._table = table
        self._numbers: dict[tuple[int, Resolved], int] = {}

    def set(self, affix: int, rows: IntArray, resolved: Resolved) -> None:
        if not len(rows):
            return
        if not self._numbers:
            self._affix_ids = self._affix_ids.copy()
        first = len(self._table.affixes)
        number = self._numbers.setdefault((affix, resolved), first + len(self._numbers))
        self._affix_ids[rows] = number

    def result(self) -> tuple[AffixTable, Ids | None]:
        old, ids = self._table, self._affix_ids
        if not self._numbers:
            return old, None
        resolved = [*old.resolved, *(resolved for _, resolved in self._numbers)]
        left = np.bincount(ids[ids >= 0], minlength=len(resolved))
        for affix, decided in self._numbers:
            if not left[affix]:  # no object keeps the affix's own resolution
                resolved[affix] = decided
        affixes = [*old.affixes, *(old.affixes[affix] for affix, _ in self._numbers)]
        return make_table(affixes, resolved, old.codec, old.profile), ids


class _Listing:
    """Objects of all contested rank sets and of the sidecars beside them, by affix."""

    def __init__(
        self, objects: Objects, readings: _Readings, contests: Mapping[object, list[_Contest]]
    ) -> None:
        chosen = np.zeros(len(readings.anchors) + 1, dtype=np.bool_)
        for among in contests.values():
            chosen[readings.concerned(among)] = True
        affix_ids, of_objects = objects.affix_ids, chosen[objects.affix_ids]
        pages, _ = page_ranks(objects.page_words, of_objects)
        rows = np.flatnonzero(of_objects)
        order = np.argsort(affix_ids[rows], kind="stable")
        self.rows, self.pages = rows[order], pages[order]
        self.sizes = objects.nbytes[self.rows]
        affixes = np.arange(len(readings.anchors) + 1)
        self._starts = np.searchsorted(affix_ids[self.rows], affixes)

    def places(self, affix: int) -> IntArray:
        return np.arange(self._starts[affix], self._starts[affix + 1])


class _Pages:
    """Objects of one contested rank set and of the sidecars beside them, by page."""

    def __init__(self, listing: _Listing, readings: _Readings, contests: list[_Contest]) -> None:
        self._readings = readings
        self._anchors = readings.fellows[rank_set(contests[0].wide)]
        affixes = readings.concerned(contests)
        pieces = [listing.places(affix) for affix in affixes]
        ends = np.cumsum([0, *map(len, pieces)]).tolist()
        self._spans = dict(zip(affixes, map(slice, ends, ends[1:]), strict=True))
        places = np.concatenate(pieces)
        self._rows, self._sizes = listing.rows[places], listing.sizes[places]
        distinct, self._pages = np.unique(listing.pages[places], return_inverse=True)
        self._count = len(distinct)
        self._wide = self._on_page(self._anchors)

    def decide(self, contest: _Contest, decided: _Decided) -> None:
        """Decide the objects of a contested affix, and the sidecars on their pages."""
        narrow = self._narrow(contest)
        explains = set(self._readings.fellows[rank_set(narrow)])
        fellows = [affix for affix in self._anchors if affix not in explains]
        explained_here = [affix for affix in self._anchors if affix in explains]
        # Pages with ranks that the narrow reading does not explain: [pages].
        beyond = self._wide > self._on_page(explained_here)
        mine = self._of_affix(contest.affix)
        choice = self._choose(contest, fellows, mine, beyond)
        self._note(decided, contest.affix, mine, choice, (contest.wide, narrow))
        if (choice == contest.taken).all():
            return
        of_page = np.full(self._count, _NONE, dtype=np.int8)
        of_page[self._pages[mine]] = choice
        for affix, readings in self._readings.sidecars(contest.wide, narrow).items():
            beside = self._of_affix(affix)
            pages = self._pages[beside]
            choice, has_fellows = of_page[pages], beyond[pages]
            # Beside another model's anchor, a sidecar may belong to the fellow ranks.
            choice[(choice == _NARROW) & has_fellows] = _OPEN
            orphaned = choice == _NONE
            choice[orphaned] = np.where(has_fellows[orphaned], _WIDE, _OPEN)
            self._note(decided, affix, beside, choice, readings)

    def _note(
        self,
        decided: _Decided,
        affix: int,
        places: slice,
        choice: npt.NDArray[np.int8],
        readings: tuple[Coordinate, Coordinate],
    ) -> None:
        taken = self._readings.table.resolved[affix].coordinate
        for which, resolved in (
            (_WIDE, Resolved(readings[0], readings[:1])),
            (_NARROW, Resolved(readings[1], readings[1:])),
            (_OPEN, Resolved(None, readings)),
        ):
            if resolved.coordinate is None or resolved.coordinate != taken:
                decided.set(affix, self._rows[places][choice == which], resolved)

    def _of_affix(self, affix: int) -> slice:
        """Return the span of an affix's objects; empty for another rank set."""
        return self._spans.get(affix, slice(0, 0))

    def _on_page(self, affixes: list[int]) -> IntArray:
        """Return the number of objects of some affixes on each page: [pages]."""
        pages = [self._pages[self._of_affix(affix)] for affix in affixes]
        counts: IntArray = np.bincount(
            np.concatenate([np.zeros(0, dtype=np.int64), *pages]), minlength=self._count
        )
        return counts

    @cached_property
    def _lone(self) -> dict[int, int]:
        """Number of objects on pages without a fellow rank, by anchor affix."""
        alone = self._wide[self._pages] == 1
        return {
            affix: int(np.count_nonzero(alone[self._of_affix(affix)])) for affix in self._anchors
        }

    def _narrow(self, contest: _Contest) -> Coordinate:
        """Return the first narrow reading whose ranks are exactly one page's, else the last."""
        for reading in contest.narrow[:-1]:
            own = self._on_page(self._readings.fellows[rank_set(reading)])
            if ((own == rank_count(reading)) & (own == self._wide)).any():
                return reading
        return contest.narrow[-1]

    def _choose(
        self, contest: _Contest, fellows: list[int], mine: slice, beyond: BoolArray
    ) -> npt.NDArray[np.int8]:
        """Return a decision for each object of an affix. beyond: [pages] with fellow ranks."""
        sizes, has_fellows = self._sizes[mine], beyond[self._pages[mine]]
        wide_sizes = self._wide_sizes(contest, fellows, sizes[has_fellows])
        fits_wide = np.isin(sizes, wide_sizes) | (sizes < 0)
        narrow_size = self._narrow_size(contest, sizes[~has_fellows & ~fits_wide])
        fits_narrow = sizes == (UNRESOLVED if narrow_size is None else narrow_size)
        choice = np.full(len(sizes), _OPEN, dtype=np.int8)
        choice[has_fellows | (fits_wide & ~fits_narrow)] = _WIDE
        choice[fits_narrow & ~fits_wide] = _NARROW
        tie = ~has_fellows & fits_wide & (fits_narrow | (narrow_size is None))
        choice[tie] = contest.taken
        if (
            contest.taken == _WIDE
            # On a live store, one rank may have written pages before the others. Only a profile
            # distinguishes such pages from another model's.
            and not self._is_profiled(contest)
            and has_fellows.any()
            and self._is_much(int(tie.sum()), len(sizes), fellows)
        ):
            choice[tie] = _OPEN
        return choice

    def _is_much(self, lone: int, count: int, fellows: list[int]) -> bool:
        """Return whether so many lone objects of an affix may be another model's.

        Evictions and failed ranks cause lone objects too, but about as many of each TP rank.
        """
        if lone < max(_MANY_LONE, _SHARE * count):
            return False
        most = max((self._lone[fellow] for fellow in fellows), default=0)
        return lone >= _TIMES_FELLOWS * most

    def _wide_sizes(self, contest: _Contest, fellows: list[int], own_sizes: IntArray) -> list[int]:
        """Return the sizes of objects under the wide reading.

        own_sizes: of the objects with fellow ranks; used if no other TP rank shows a size.
        """
        alike = self._readings.alike(contest.wide)
        counts = alike.objects.copy()
        for affix in set(alike.affixes).difference(fellows):
            counts.subtract(self._readings.sizes.get(affix, {}))
        if not any(counts.values()):
            values, numbers = np.unique(own_sizes, return_counts=True)
            counts = Counter(dict(zip(values.tolist(), numbers.tolist(), strict=True)))
        total = counts.total()
        common = [size for size, n in counts.items() if n >= _MANY or 2 * n > total]
        stated = self._readings.stated_size(contest.affix)
        if contest.taken == _WIDE and self._is_profiled(contest) and stated != UNKNOWN_SIZE:
            common.append(stated)
        return common

    def _is_profiled(self, contest: _Contest) -> bool:
        table = self._readings.table
        return table.profile is not None and table.deployment_ids[contest.affix] == 0

    def _narrow_size(self, contest: _Contest, sizes: IntArray) -> int | None:
        """Return the size under the narrow reading. sizes: of lone objects without a wide size."""
        stated = self._readings.stated_size(contest.affix)
        if contest.taken == _NARROW and stated != UNKNOWN_SIZE:
            return stated
        values, counts = np.unique(sizes, return_counts=True)
        if not len(values) or counts.max() < _MANY or 2 * counts.max() <= len(sizes):
            return None
        return int(values[counts.argmax()])
