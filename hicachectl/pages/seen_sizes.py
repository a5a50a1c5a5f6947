"""Compare a profile with the sizes in a store. Fill in sizes, and refuse a wrong profile."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from shlex import quote
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.formats.errors import ContradictionError
from hicachectl.formats.spec import UNKNOWN_SIZE
from hicachectl.pages.census import SEVERAL
from hicachectl.pages.deployments import UNRESOLVED, AffixTable, Deployment, SeenSize, SizeMix

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from hicachectl.formats.arrays import IntArray
    from hicachectl.formats.spec import ObjectSpec
    from hicachectl.pages.census import Census
    from hicachectl.pages.inventory import Inventory


# A size on a smaller share of the pages may be damage. A size on a larger share is a size that some
# servers write.
_SHARE_OF_PAGES = 0.05
# Servers no longer write another size if all its pages are older than nine tenths of the pages of
# the stated size. The oldest tenth of these does not count, because servers with both settings may
# have run during a change.
_OLDEST = 10
# The first 64 bits of page hashes distinguish the pages of a store.
_FIRST_WORD = 0


def with_seen_sizes(
    table: AffixTable, census: Census, pieces: Callable[[], Iterable[Inventory]]
) -> AffixTable:
    """Return the table with missing sizes filled in.

    A kind is the objects of a deployment that should have one size (`_size_kind`). A spec without a
    size gets the size that most objects of its kind have. A kind with several common sizes gets a
    `SizeMix` instead. If a profile states the size of a kind, the mix has this size, and the other
    common sizes that servers may still write (`_still_written`).
    pieces: returns all objects, with all objects of a page in one piece; called only if a size may
        be mixed.
    """
    kinds, kind_of, stated = _kinds(table)
    if not kinds:
        return table
    by_affix = np.array([*kind_of, UNRESOLVED], dtype=np.int64)
    counted = census.of_kinds(by_affix)
    mixes = _mixes(table, by_affix, counted, stated, pieces)
    mixed = {kind_of[mix.affix_ids[0]] for mix in mixes}
    common = {kind: size for kind, size in _common_sizes(counted).items() if kind not in mixed}

    def sized(number: int, spec: ObjectSpec) -> ObjectSpec:
        kind = kinds.get((number, UNKNOWN_SIZE, *_size_kind(spec)))
        if spec.nbytes != UNKNOWN_SIZE or kind not in common:
            return spec
        return replace(spec, nbytes=common[kind])

    deployments = tuple(
        replace(deployment, specs=tuple(sized(number, spec) for spec in deployment.specs))
        for number, deployment in enumerate(table.deployments)
    )
    return replace(table, deployments=deployments, mixes=tuple(mixes))


def _kinds(
    table: AffixTable,
) -> tuple[dict[tuple[object, ...], int], list[int], dict[int, int]]:
    """Return a number for each kind of object, each affix's kind, and each kind's stated size.

    Empty objects, and objects with an inferred size, have no kind.
    """
    kinds: dict[tuple[object, ...], int] = {}
    kind_of = []
    stated = {}
    inferred = table.profile is not None and table.profile.inferred
    for number, spec in zip(table.deployment_ids, table.specs, strict=True):
        if spec is None or spec.nbytes == 0 or (inferred and spec.nbytes != UNKNOWN_SIZE):
            kind_of.append(UNRESOLVED)
            continue
        kind = kinds.setdefault((number, spec.nbytes, *_size_kind(spec)), len(kinds))
        kind_of.append(kind)
        if spec.nbytes != UNKNOWN_SIZE:
            stated[kind] = spec.nbytes
    return kinds, kind_of, stated


def _size_kind(spec: ObjectSpec) -> tuple[object, ...]:
    """Return a key that objects of equal size share.

    It names the PP and CP ranks, but not the TP rank, because the TP rank does not change sizes.
    """
    coordinate, shard = spec.coordinate, spec.coordinate.shard
    spans = (shard.layers, shard.heads)
    widths = tuple(None if span is None else span[1] - span[0] for span in spans)
    return coordinate.pool, coordinate.part, shard.pp_rank, shard.cp_rank, shard.tp_size, *widths


def _common_sizes(counted: Census) -> dict[int, int]:
    """Return the size that more than half of the objects have, by kind.

    Kinds without such a size are left out.
    """
    common = {}
    for kind, objects in counted.by_affix().items():
        size = max(objects, key=objects.__getitem__)
        if size != UNKNOWN_SIZE and 2 * objects[size] > sum(objects.values()):
            common[kind] = size
    return common


def _mixes(
    table: AffixTable,
    kind_of: IntArray,
    counted: Census,
    stated: dict[int, int],
    pieces: Callable[[], Iterable[Inventory]],
) -> list[SizeMix]:
    """Return the kinds with several common sizes. Empty objects do not count.
    counted: objects of each kind.
    stated: the size of each kind whose size a profile states.
    """
    frequent: dict[int, dict[int, list[Any]]] = defaultdict(dict)
    counts = counted.counts.filter((pc.field("size") > 0) & (pc.field("objects") >= SEVERAL))
    for kind, size, *rest in zip(*counts.to_pydict().values(), strict=True):
        frequent[kind][size] = rest
    # Pages are counted only for kinds with several frequent sizes. Most stores have no such kind.
    kinds = [
        kind
        for kind, sizes in frequent.items()
        if sizes.keys() - {stated.get(kind, next(iter(sizes)))}
    ]
    if not kinds:
        return []
    mixed = np.where(np.isin(kind_of, kinds), kind_of, UNRESOLVED)
    total_of: Counter[int] = Counter()
    of_size: Counter[tuple[int, int]] = Counter()
    for piece in pieces():
        _count_pages(piece, mixed, total_of, of_size)
    mixes = []
    for kind in kinds:
        right, total = stated.get(kind, UNKNOWN_SIZE), total_of[kind]
        seen = {
            size: SeenSize(size, of_size[kind, size], *rest)
            for size, rest in frequent[kind].items()
            if of_size[kind, size] >= max(SEVERAL, _SHARE_OF_PAGES * total)
        }
        if seen and right != UNKNOWN_SIZE:
            own = seen.pop(right, SeenSize(right, of_size[kind, right], 0, None, None))
            others = _still_written(own, list(seen.values()), kind, mixed, pieces)
            seen = {size.nbytes: size for size in (own, *others)}
        if len(seen) > 1:
            ids = tuple(np.flatnonzero(kind_of == kind).tolist())
            spec = table.specs[ids[0]]
            assert spec is not None
            ordered = sorted(seen.values(), key=lambda size: (-size.pages, size.nbytes))
            mixes.append(SizeMix(ids, spec.coordinate, tuple(ordered), total, right))
    return mixes


def _still_written(
    own: SeenSize,
    others: list[SeenSize],
    kind: int,
    kind_of: IntArray,
    pieces: Callable[[], Iterable[Inventory]],
) -> list[SeenSize]:
    """Return the other sizes that servers may still write, by the rule of _OLDEST.

    If write times are not known, all other sizes are returned.
    own: the size that the profile states.
    """
    ends = [seen.newest_ns for seen in others]
    if not others or None in ends:
        return others
    older = np.zeros(len(others), dtype=np.int64)
    for piece in pieces():
        chosen = (kind_of[piece.affix_ids] == kind) & (piece.sizes == own.nbytes)
        times = piece.objects.column("mtime_ns").fill_null(0).to_numpy()[chosen]
        words = piece.page_words(chosen, _FIRST_WORD)
        older += [len(np.unique(words[times < end])) for end in ends]
    return [
        seen
        for seen, count in zip(others, older.tolist(), strict=True)
        if _OLDEST * count >= own.pages
    ]


def _count_pages(
    piece: Inventory, kind_of: IntArray, totals: Counter[int], by_size: Counter[tuple[int, int]]
) -> None:
    """Count the distinct pages of each kind, and of each of its sizes.

    kind_of: [affixes + 1] the kind of each affix, or UNRESOLVED for an affix that does not count.
    """
    kinds = kind_of[piece.affix_ids]
    chosen = kinds >= 0
    pages = pa.table(
        {
            "kind": kinds[chosen],
            "size": piece.sizes[chosen],
            "page": piece.page_words(chosen, _FIRST_WORD),
        }
    )
    distinct = [("page", "count_distinct")]
    for row in pages.group_by("kind").aggregate(distinct).to_pylist():
        totals[row["kind"]] += row["page_count_distinct"]
    for row in pages.group_by(["kind", "size"]).aggregate(distinct).to_pylist():
        by_size[row["kind"], row["size"]] += row["page_count_distinct"]


# Least share of a pool's objects of wrong size that have one common size, if another deployment
# wrote them. If the share is smaller, they may be damaged objects of this deployment.
_NEARLY_ALL = 0.9


def refuse_contradiction(
    table: AffixTable, census: Census, store: str, *, only_others: bool = False
) -> None:
    """Raise ContradictionError if a profile contradicts the store.

    A profile contradicts the store if the store has only objects of other deployments, or if nearly
    all objects of a pool have another size. The message has the expected and the found values.
    store: URL of the store.
    only_others: whether to accept a store that has only objects of other deployments.
    """
    profiled = table.deployments[:1] if table.deployments else ()
    if not profiled or profiled[0].profile is None:
        return
    deployments = np.array([*table.deployment_ids, UNRESOLVED])[census.affixes]
    own = deployments == 0
    if own.any():
        specs = np.array([*table.spec_ids, UNRESOLVED])[census.affixes[own]]
        for pool in dict.fromkeys(spec.pool for spec in profiled[0].specs):
            _refuse_sizes(profiled[0], pool, specs, census.sizes[own], census.objects[own], store)
    elif len(table.deployments) > 1 and not only_others:
        wanted = _described(profiled[0].specs[0])
        found = " and ".join(sorted({_described(d.specs[0]) for d in table.deployments[1:]}))
        raise _contradiction(
            store,
            f"expected {wanted}, found {found}; check model, tag, and TP, PP and CP sizes",
            has_own_pages=False,
        )


def _contradiction(store: str, values: str, *, has_own_pages: bool) -> ContradictionError:
    """Return the exception for a profile that contradicts a store.

    values: expected and found values, and what to check.
    """
    error = ContradictionError(
        f"The profile contradicts the store {store}: {values}, or list what the store has with "
        f"hicachectl ls {quote(store)} --summary"
    )
    error.store, error.has_own_pages = store, has_own_pages
    return error


def _refuse_sizes(
    deployment: Deployment,
    pool: str,
    specs: IntArray,
    sizes: IntArray,
    objects: IntArray,
    store: str,
) -> None:
    """Raise ContradictionError if nearly all objects of a pool have another size than stated.

    specs, sizes, objects: [counts] position of the spec, bytes and number of objects.
    """
    of_pool = np.array([spec.pool == pool and spec.listed for spec in deployment.specs])
    expected = np.array([spec.nbytes for spec in deployment.specs], dtype=np.int64)
    chosen = of_pool[specs] & (sizes >= 0)
    wanted, found, objects = expected[specs[chosen]], sizes[chosen], objects[chosen]
    total = objects.sum()
    if not total or total < SEVERAL * of_pool.sum() or (wanted == found).any():
        return
    pairs, of_pair = np.unique(np.stack([wanted, found]), axis=1, return_inverse=True)
    counts = np.zeros(pairs.shape[1], dtype=np.int64)
    np.add.at(counts, of_pair.reshape(-1), objects)
    # Expected sizes differ by stage and CP rank. Under a wrong profile, objects of each expected
    # size have one found size. So as many pairs are common as there are expected sizes.
    common = np.sort(counts)[::-1][: len(np.unique(wanted))].sum()
    if common >= _NEARLY_ALL * total:
        want, has = pairs[:, counts.argmax()].tolist()
        raise _contradiction(
            store,
            f"expected {want} bytes for {pool} objects, found {has} bytes ({common} of {total} "
            "objects); check dtype, page size, layers and TP size",
            has_own_pages=True,
        )


def _described(spec: ObjectSpec) -> str:
    return f"model {spec.coordinate.names.model!r} {spec.coordinate.shard.sizes_text()}"
