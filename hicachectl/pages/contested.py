"""Mark pages as ambiguous if two models whose keys look alike may have written them.

`<hash>_m_0_2.bin` has two readings. It is TP rank 0 of 2 of model m (the wide reading), or the only
rank of model m_0_2 (a narrow reading). Lost ranks are far more common than such model names. So an
object counts as one of a rank even if the other ranks, its fellows, lack the page, unless no other
rank has objects of its size. If a page is ambiguous, all its objects that either model may have
written are ambiguous. No command judges such objects, and no filter selects them for removal.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hicachectl.formats.keys.resolve import (
    Resolved,
    explained,
    rank_count,
    rank_set,
)
from hicachectl.formats.objects import ANCHOR
from hicachectl.formats.spec import UNKNOWN_SIZE
from hicachectl.pages.census import SEVERAL
from hicachectl.pages.deployments import make_table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    import numpy.typing as npt

    from hicachectl.formats.arrays import BoolArray, IntArray
    from hicachectl.formats.keys.base import Affix
    from hicachectl.formats.objects import Coordinate
    from hicachectl.pages.census import Census
    from hicachectl.pages.deployments import AffixTable
    from hicachectl.pages.inventory import Inventory

    Ids = npt.NDArray[np.int32]
    Readings = Sequence[Sequence[Coordinate]]

# Without a profile, a rank that has more objects than each of its fellows may also have objects of
# another model. This counts only if the surplus over the largest fellow is at least _MANY_MORE
# objects, and at least _SHARE_MORE of the rank's own objects.
_MANY_MORE = 20
_SHARE_MORE = 0.05


class _Contest(NamedTuple):
    """An affix of anchors that two models may have written.
    is_rank: whether the table takes the wide reading.
    fellows: affixes of anchors that only the wide reading explains.
    near: affixes whose keys one of the models may have written.
    usual: sizes under the reading that the table takes; empty if they are not known.
    has_more: whether the affix has more objects than the ranks explain.
    """

    affix: int
    is_rank: bool
    fellows: list[int]
    near: list[int]
    usual: set[int]
    has_more: bool

    def doubts(self, sizes: IntArray, is_lone: BoolArray) -> BoolArray:
        """Return which of the affix's objects may be of the other model: [objects].

        is_lone: [objects] whether the page has no object of a fellow.
        """
        usual = self.usual or _common(Counter(sizes[is_lone != self.is_rank].tolist()))
        unfit = ~np.isin(sizes, [*usual, UNKNOWN_SIZE])
        if not self.is_rank:
            return unfit | ~is_lone
        lone = Counter(sizes[unfit & is_lone].tolist())
        narrow = [size for size, count in lone.items() if count >= SEVERAL]
        return unfit & (is_lone | np.isin(sizes, narrow)) | (is_lone & self.has_more)


def with_ambiguous_pages(
    table: AffixTable, census: Census, pieces: Callable[[], Iterable[Inventory]]
) -> tuple[AffixTable, Ids | None]:
    """Return the table and the affix ids with doubtful pages marked as ambiguous.

    If no page is doubtful, the given table is returned, and the affix ids are None.
    pieces: returns all objects, with all objects of a page in one piece. It is called only if the
        counts raise a doubt.
    """
    readings = [
        sorted(_all_readings(table, affix, one), key=explained, reverse=True)
        for affix, one in zip(table.affixes, table.resolved, strict=True)
    ]
    contests = list(_contests(table, readings, census.by_affix()))
    if not contests:
        return table, None
    shared = sorted({affix for contest in contests for affix in contest.near})
    ids, sizes, pages = _joined(pieces(), shared)
    second = np.arange(len(readings) + 1, dtype=np.int32)
    second[shared] = len(readings) + np.arange(len(shared))
    marked = ids.copy()
    for contest in contests:
        mine = ids == contest.affix
        beside = np.isin(pages[mine], pages[np.isin(ids, contest.fellows)])
        doubtful = pages[mine][contest.doubts(sizes[mine], ~beside)]
        rows = np.flatnonzero(np.isin(ids, contest.near) & np.isin(pages, doubtful))
        marked[rows] = second[ids[rows]]
    if (marked == ids).all():
        return table, None
    ambiguous = {affix: Resolved(None, tuple(readings[affix])) for affix in shared}
    judged = set(np.unique(marked).tolist())  # other affixes have only ambiguous objects
    resolved = [
        one if affix in judged else ambiguous.get(affix, one)
        for affix, one in enumerate(table.resolved)
    ]
    affixes = [*table.affixes, *(table.affixes[affix] for affix in shared)]
    resolved += ambiguous.values()
    return make_table(affixes, resolved, table.grammar, table.profile), marked


def _all_readings(table: AffixTable, affix: Affix, resolved: Resolved) -> Iterable[Coordinate]:
    """Return the readings of an affix, including readings that a profile excludes."""
    found = resolved.readings
    return found if len(found) != 1 else dict.fromkeys([*found, *table.grammar.readings(*affix)])


def _joined(pieces: Iterable[Inventory], affixes: list[int]) -> tuple[Ids, IntArray, IntArray]:
    """Return the affix id, size and page number of all objects.

    The page number is -1 for objects of affixes that are not in `affixes`.
    """
    columns, count = [], 0
    for piece in pieces:
        chosen = np.isin(piece.affix_ids, affixes)
        pages = np.full(len(chosen), -1, dtype=np.int64)
        ranks, distinct = piece.page_ranks(chosen)
        pages[chosen] = ranks + count
        count += distinct
        columns.append((piece.affix_ids, piece.sizes, pages))
    ids, sizes, numbers = map(np.concatenate, zip(*columns, strict=True))
    return ids, sizes, numbers


def _contests(
    table: AffixTable, readings: Readings, sizes: Mapping[int, Mapping[int, int]]
) -> Iterator[_Contest]:
    """Yield the affixes of anchors with objects that another model may have written.

    readings: readings of each affix.
    sizes: number of objects by affix and size.
    """
    ranks: dict[object, dict[int, Coordinate]] = defaultdict(dict)
    anchors = [[r for r in of_affix if r.pool == ANCHOR] for of_affix in readings]
    for affix, of_affix in enumerate(anchors):
        for reading in of_affix:
            ranks[rank_set(reading)][affix] = reading
    for affix, own in sizes.items():
        taken = table.resolved[affix].coordinate
        shared = [r for r in anchors[affix] if len(ranks[rank_set(r)]) > 1 < rank_count(r)]
        if taken not in anchors[affix] or not shared:
            continue
        wide = max(shared, key=explained)
        narrow = [r for r in anchors[affix] if explained(r) < explained(wide)]
        alone = set().union(*(ranks[rank_set(reading)] for reading in narrow))
        fellows = {a: r for a, r in ranks[rank_set(wide)].items() if a not in alone}
        if not narrow or not fellows or taken not in (wide, *narrow):
            continue
        spec, has_more = table.specs[affix], False
        usual = set() if spec is None else {spec.nbytes} - {UNKNOWN_SIZE}
        if taken == wide:
            alike = [a for a, r in fellows.items() if _stage(r) == _stage(wide)]
            usual |= _common(sum((Counter(sizes.get(a, {})) for a in alike), Counter[int]()))
            most = max(sum(sizes.get(a, {}).values()) for a in fellows)
            more, count = sum(own.values()) - most, sum(own.values())
            is_profiled = table.profile is not None and table.deployment_ids[affix] == 0
            has_more = not is_profiled and more >= max(_MANY_MORE, _SHARE_MORE * count)
            fits = own.keys() <= usual | {UNKNOWN_SIZE} if usual else len(own) == 1
            if fits and not has_more:
                continue
        models = {wide.names.model, *(reading.names.model for reading in narrow)}
        near = _near(models, readings)
        yield _Contest(affix, taken == wide, list(fellows), near, usual, has_more)


def _stage(reading: Coordinate) -> tuple[int | None, int | None]:
    """Return the ranks on which sizes depend."""
    return reading.shard.pp_rank, reading.shard.cp_rank


def _near(models: set[str], readings: Readings) -> list[int]:
    """Return the affixes that some models may have written.

    If these affixes can name further models, affixes of the further models are returned, too.
    """
    while True:
        near = [
            a for a, of_affix in enumerate(readings) if models & {r.names.model for r in of_affix}
        ]
        found = models | {reading.names.model for affix in near for reading in readings[affix]}
        if found == models:
            return near
        models = found


def _common(counts: Counter[int]) -> set[int]:
    """Return the sizes that are too common to be damage. counts: number of objects by size."""
    total = counts.total()
    return {size for size, count in counts.items() if count >= SEVERAL or 2 * count > total}
