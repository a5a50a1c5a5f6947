"""Repair a 3FS store's page tables: take bad keys and leaked pages out without new damage.

The metadata server frees the page of each key it deletes, whoever else holds that page, and gives
it to the next writer. So keys of one page go in one call, only while they are where the snapshot
had them; a key whose page is free, which may be another's by now, is moved off it before.
Source: sglang srt/mem_cache/storage/hf3fs/mini_3fs_metadata_server.py :: RankMetadata.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.checks.page_tables import leaked_pages, mapped_and_free, out_of_range
from hicachectl.formats.errors import UsageError

if TYPE_CHECKING:
    import threading
    from collections.abc import Collection, Iterator, Sequence

    import numpy.typing as npt

    from hicachectl.backends.hf3fs.metadata import MetadataClient
    from hicachectl.backends.hf3fs.snapshot import PageTable, Snapshot

    BoolArray = npt.NDArray[np.bool_]
    IntArray = npt.NDArray[np.int64]

MAX_BATCH = 128  # SGLang's STORAGE_BATCH_SIZE
PAUSE_S = 0.02
# For each page it frees, the server looks through its list of free pages, and answers no engine
# meanwhile: measured 12 ms for 2,000,000 of them, 1.6 s for a call with 128 keys.
_LOOKED_AT = 4_000_000
_MOST_LEAKED = 1 << 28  # pages that are listed to be freed, 2 GiB of numbers


@dataclass(frozen=True, slots=True)
class BadPage:
    """A page whose keys are to go, and all of them: keys in the order of the snapshot.

    free: it was free as well, so that it may have become another key's.
    """

    index: int
    keys: tuple[str, ...]
    free: bool


@dataclass(frozen=True, slots=True)
class TableRepair:
    """What is to be done to one table through its server.

    left: keys of pages that the table has not. To delete one would put its page among the free
        ones, and the next writer past the end of the file; a repaired snapshot leaves them out.
    """

    table: PageTable
    pages: tuple[BadPage, ...]
    left: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TableRepairResult:
    """What became of keys: deleted, or left since they had moved or gone since the snapshot."""

    deleted: tuple[str, ...]
    changed: tuple[str, ...]


def bad_rows(table: PageTable, keys: Collection[bytes]) -> BoolArray:
    """Find keys, written RANK:NAMESPACE:KEY, and those that share a page with one: [m] bool."""
    prefix = f"{table.name}:".encode()
    own = [key for key in keys if key.startswith(prefix)]
    named = pc.is_in(table.keys, pa.array(own, pa.binary())).to_numpy(zero_copy_only=False)
    shared: BoolArray = np.isin(table.indices, table.indices[named])
    return shared


def plan_repair(table: PageTable, bad: BoolArray) -> TableRepair:
    """Plan to delete the keys that `bad_rows` gave."""
    lost, free = out_of_range(table), mapped_and_free(table)
    rows = np.flatnonzero(bad & ~lost)
    rows = rows[np.argsort(table.indices[rows], kind="stable")]
    keys = _texts(table, rows)
    starts = np.flatnonzero(np.diff(table.indices[rows], prepend=-1)).tolist()
    pages = [
        BadPage(int(table.indices[rows[start]]), tuple(keys[start:end]), bool(free[rows[start]]))
        for start, end in pairwise([*starts, len(rows)])
    ]
    return TableRepair(table, tuple(pages), tuple(_texts(table, np.flatnonzero(bad & lost))))


def delete_keys(
    client: MetadataClient,
    repair: TableRepair,
    *,
    stopped: threading.Event,
    pause_s: float = PAUSE_S,
) -> Iterator[TableRepairResult]:
    """Delete what a plan says in small batches with pauses, and tell of each; ends at `stopped`.

    Keys are asked for before, which makes them the most recent: none is evicted in between.
    Raises StoreUnavailable; what was told until then is done.
    """
    most = _batch_size(repair.table)
    for batch in _batches(repair.pages, most):
        if stopped.is_set():
            return
        begin = time.monotonic()
        yield _delete(client, repair.table, batch)
        stopped.wait(max(pause_s, time.monotonic() - begin))


def releasable(name: str, earlier: Snapshot, later: Snapshot, *, stopped_at_ns: int) -> IntArray:
    """List the leaked pages of a table that nobody writes to: int64, ascending.

    Both snapshots have to be from after the engines stopped, at `stopped_at_ns`: the time of a
    snapshot is that of its end, and only one that was begun after another one ended is known to
    have begun after the stop. Raises UsageError where they are not, or too much is leaked.
    """
    if not stopped_at_ns < earlier.saved_at_ns < later.saved_at_ns:
        raise UsageError(
            "leaked pages are released by two snapshots that the metadata server saved one after "
            "the other after every writer stopped; wait for it to save again"
        )
    tables = [t for each in (later, earlier) for t in each.tables if t.name == name]
    if len(tables) != 2:
        raise UsageError(f"the two snapshots do not both have a table {name}")
    runs = leaked_pages(*tables)
    if len(runs) > _MOST_LEAKED:
        raise UsageError(
            f"{name}: {len(runs)} pages are in no list, more than are released; clear the table"
        )
    return _listed(runs.starts, runs.lengths)


def release_pages(
    client: MetadataClient,
    table: PageTable,
    pages: IntArray,
    *,
    stopped: threading.Event,
    pause_s: float = PAUSE_S,
) -> Iterator[int]:
    """Free pages that `releasable` gave in small batches; gives how many each had."""
    most = _batch_size(table)
    for start in range(0, len(pages), most):
        if stopped.is_set():
            return
        begin = time.monotonic()
        some = pages[start : start + most].tolist()
        client.confirm(table.rank, table.namespace, [], some)
        yield len(some)
        stopped.wait(max(pause_s, time.monotonic() - begin))


def repaired_table(table: PageTable, bad: BoolArray, *, release_leaked: bool = False) -> PageTable:
    """Make a table without the keys that `bad_rows` gave, each page in one list at most.

    release_leaked: also free what is in no list. Only where no engine has reserved pages that it
        will confirm. Raises UsageError where that is too much.
    """
    kept = ~bad & ~out_of_range(table)
    indices = table.indices[kept]
    free = table.free[(table.free < table.num_pages) & ~np.isin(table.free, indices)]
    _, first = np.unique(free, return_index=True)
    freed = np.setdiff1d(table.indices[~kept & ~out_of_range(table)], indices)
    free = np.concatenate([free[np.sort(first)], np.setdiff1d(freed, free)])
    if release_leaked:
        runs = leaked_pages(replace(table, free=free, indices=indices))
        if len(runs) > _MOST_LEAKED:
            raise UsageError(f"{table.name}: {len(runs)} pages are in no list, more than are freed")
        free = np.concatenate([free, _listed(runs.starts, runs.lengths)])
    return replace(table, free=free, keys=table.keys.filter(pa.array(kept)), indices=indices)


def _texts(table: PageTable, rows: IntArray) -> list[str]:
    return [key.decode() for key in table.names_at(rows).to_pylist()]


def _listed(starts: IntArray, lengths: IntArray) -> IntArray:
    """List the numbers of runs."""
    before = np.cumsum(lengths) - lengths
    listed: IntArray = np.arange(lengths.sum()) + np.repeat(starts - before, lengths)
    return listed


def _batch_size(table: PageTable) -> int:
    return max(1, min(MAX_BATCH, _LOOKED_AT // max(1, len(table.free))))


def _batches(pages: Sequence[BadPage], most: int) -> Iterator[list[BadPage]]:
    """Cut into batches of at most so many keys, and of one page whatever it has."""
    batch: list[BadPage] = []
    keys = 0
    for page in pages:
        if batch and keys + len(page.keys) > most:
            yield batch
            batch, keys = [], 0
        batch.append(page)
        keys += len(page.keys)
    if batch:
        yield batch


def _delete(
    client: MetadataClient, table: PageTable, batch: Sequence[BadPage]
) -> TableRepairResult:
    place = table.rank, table.namespace
    asked = [key for page in batch for key in page.keys]
    current = dict(zip(asked, client.page_indices(*place, asked), strict=True))
    doomed = [page for page in batch if all(current[key] == page.index for key in page.keys)]
    to_move = [key for page in doomed if page.free for key in page.keys]
    if to_move:
        _move(client, table, to_move)
    keys = [key for page in doomed for key in page.keys]
    if keys:
        client.delete(*place, keys)
    left = set(asked) - set(keys)
    return TableRepairResult(tuple(keys), tuple(key for key in asked if key in left))


def _move(client: MetadataClient, table: PageTable, keys: Sequence[str]) -> None:
    """Map keys to pages that we reserve, so that to delete them frees those and no other."""
    place = table.rank, table.namespace
    strangers = [f"hicachectl-{os.urandom(16).hex()}" for _ in keys]
    pages = [index for _, index in client.reserve(*place, strangers)]
    client.confirm(*place, zip(keys, pages, strict=True))
