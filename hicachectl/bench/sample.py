"""Choose the pages that a bench reads, in the batches of the ranks that would read them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hicachectl.formats.errors import EmptyStore, UsageError
from hicachectl.formats.spec import UNKNOWN_SIZE
from hicachectl.formats.wording import GIVE_PROFILE
from hicachectl.pages.group_table import WHOLE
from hicachectl.pages.groups import PageGroups
from hicachectl.text.units import human_size

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hicachectl.formats.arrays import IntArray
    from hicachectl.formats.spec import ObjectSpec
    from hicachectl.pages.deployments import Deployment
    from hicachectl.pages.inventory import Inventory

BATCH_PAGES = 128  # pages that SGLang's prefetch reads together
OWN_MODEL = "hicachectl-bench"  # model name of the pages that a bench writes
_FEW_PAGES = 8  # pages of a short batch if the tokens of a page are unknown
_MOST_RANKS = 16  # most reading ranks if no number is given
_MOST_SHORT = 32  # most short batches of a rank

Ranks = tuple[int | None, ...]


class Sized(NamedTuple):
    """An object of a page, and its bytes in the store."""

    spec: ObjectSpec
    nbytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Objects that one rank reads together.

    rows: [n] rows of the inventory.
    sizes: [n] bytes of each object.
    pages: number of pages.
    """

    rows: IntArray
    sizes: IntArray
    pages: int


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """Pages that a bench reads.

    deployment: the deployment of the pages.
    pages: number of pages read.
    stored: number of whole pages of the deployment in the store.
    shards: number of different ranks in the keys.
    batches: batches of each reading rank.
    specs: objects of a page that the first rank reads, with their sizes.
    page: objects of a page, of all ranks, with their sizes.
    """

    deployment: Deployment
    pages: int
    stored: int
    shards: int
    batches: tuple[tuple[Batch, ...], ...]
    specs: tuple[Sized, ...]
    page: tuple[Sized, ...]


def choose(
    inventory: Inventory, *, most_bytes: int, ranks: int | None, short_pages: int | None
) -> Sample:
    """Choose random whole pages of one deployment, and put the oldest first.

    The deployment is the profile's, if it has whole pages; else the one with the most whole pages.

    most_bytes: limit on the bytes of all ranks together.
    ranks: number of reading ranks; None for as many as the keys name.
    short_pages: pages of a short batch; None if unknown.
    Raises EmptyStore if there is no whole page. Raises UsageError if one page has more bytes than
    `most_bytes`, or if a size is unknown.
    """
    groups = PageGroups(inventory)
    number = _largest(groups)
    deployment, table, span = groups.deployments[number], groups.tables[number], groups.span(number)
    whole = np.flatnonzero(table.states == WHOLE)
    columns = [at for at, spec in enumerate(deployment.specs) if spec.listed and not spec.trailing]
    shards = _shards([deployment.specs[at] for at in columns])
    wanted = min(len(shards), _MOST_RANKS) if ranks is None else ranks
    readers = [shards[rank % len(shards)] for rank in range(wanted)]
    own = [[at for at in columns if _holds(deployment.specs[at], shard)] for shard in readers]
    used = np.unique(np.concatenate([np.array(some) for some in own]))
    masks = [np.isin(used, some) for some in own]
    first = _sizes(inventory, table.slots(whole[:1], np.array(columns)))[0].tolist()
    sized = {at: Sized(deployment.specs[at], n) for at, n in zip(columns, first, strict=True)}
    of_page = sum(sized[at].nbytes for some in own for at in some)
    count = min(len(whole), most_bytes // max(1, of_page))
    drawn = np.random.default_rng().choice(whole, count, replace=False)
    # Pages that were written together lie together, and are in the page cache together. So a batch
    # has pages that were written at about the same time, as a server's batch has.
    drawn = drawn[np.argsort(groups.newest_ns[span.start + drawn], kind="stable")]
    slots = table.slots(drawn, used)
    sizes = _sizes(inventory, slots)
    # Pages can differ in size, so the size of the first page does not bound the sum.
    totals = np.cumsum(np.sum([sizes[:, mask].sum(axis=1) for mask in masks], axis=0))
    count = int(np.searchsorted(totals, most_bytes, side="right"))
    if not count:
        raise UsageError(
            f"--most {human_size(most_bytes)}: one page has {human_size(of_page)}; give more"
        )
    lengths = batch_lengths(count, short_pages or _FEW_PAGES)
    return Sample(
        deployment=deployment,
        pages=sum(lengths),
        stored=len(whole),
        shards=len(shards),
        batches=tuple(tuple(_batches(slots[:, m], sizes[:, m], lengths)) for m in masks),
        specs=tuple(sized[at] for at in own[0]),
        page=tuple(sized.values()),
    )


def own_rows(inventory: Inventory) -> IntArray:
    """Return the rows of objects that benches have left, as after a kill: [n].

    If a page was written for only some of its ranks, its keys can be read in two ways. An object
    counts if one of them names the model of a bench.
    """
    own = [
        any(reading.names.model == OWN_MODEL for reading in resolved.readings)
        for resolved in inventory.table.resolved
    ]
    return np.flatnonzero(inventory.by_affix(own, False))


def batch_lengths(pages: int, short: int) -> list[int]:
    """Return the pages of each batch: full batches, and short batches spread among them.

    Short batches show the cost that a batch has besides its pages. Remaining pages are left out,
    because a batch of them would be neither full nor short.
    """
    if pages < BATCH_PAGES:
        return [pages]
    shorts = min(_MOST_SHORT, (pages - BATCH_PAGES) // (4 * short))
    if short > BATCH_PAGES // 2:
        shorts = 0
    fulls = (pages - shorts * short) // BATCH_PAGES
    lengths = []
    for at in range(fulls):
        between = (at + 1) * shorts // fulls - at * shorts // fulls
        lengths += [BATCH_PAGES, *[short] * between]
    return lengths


def _largest(groups: PageGroups) -> int:
    """Return the number of the deployment to read. Raises EmptyStore."""
    best, most = -1, 0
    for at, (deployment, table) in enumerate(zip(groups.deployments, groups.tables, strict=True)):
        whole = int((table.states == WHOLE).sum())
        if whole and not _is_own(deployment) and (deployment.profile is not None or whole > most):
            best, most = at, whole
            if deployment.profile is not None:
                break
    if best < 0:
        raise EmptyStore("No whole page to read; see hicachectl ls")
    return best


def _is_own(deployment: Deployment) -> bool:
    return deployment.names.model == OWN_MODEL


def _shards(specs: Sequence[ObjectSpec]) -> list[Ranks]:
    """Return the ranks that keys name.

    A key that names fewer axes than other keys belongs to several ranks, and adds no rank.
    """
    named = list(dict.fromkeys(spec.coordinate.shard.ranks for spec in specs))
    return [one for one in named if not any(one != two and _within(one, two) for two in named)]


def _holds(spec: ObjectSpec, shard: Ranks) -> bool:
    return _within(spec.coordinate.shard.ranks, shard)


def _within(wide: Ranks, narrow: Ranks) -> bool:
    return all(a is None or a == b for a, b in zip(wide, narrow, strict=True))


def _sizes(inventory: Inventory, slots: IntArray) -> IntArray:
    """Return the bytes of objects. Raises UsageError if a size is unknown."""
    sizes = inventory.sizes[slots]
    expected = inventory.table.expected_sizes[inventory.affix_ids[slots]]
    known: IntArray = np.where(sizes == UNKNOWN_SIZE, expected, sizes)
    if (known < 0).any():
        raise UsageError(f"The sizes of the objects are unknown; {GIVE_PROFILE}")
    return known


def _batches(slots: IntArray, sizes: IntArray, lengths: list[int]) -> Iterator[Batch]:
    start = 0
    for length in lengths:
        some = slice(start, start + length)
        yield Batch(slots[some].ravel(), sizes[some].ravel(), length)
        start += length
