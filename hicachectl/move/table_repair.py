"""Repair the tables of a 3FS store, which map keys to pages, on its server or in a new snapshot.

In these tables, a page is a place for one object in a data file.

When the metadata server deletes a key, it frees the key's page for the next writer, even if another
key still maps to that page. All keys of a page are therefore deleted in one call, and only while
they still map to the page that the snapshot states. If the free list of the snapshot has the page,
too, another key may have received the page since the snapshot. The bad keys are then first mapped
to new pages.
Source: sglang srt/mem_cache/storage/hf3fs/mini_3fs_metadata_server.py :: RankMetadata.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.backends.base import batch_spans
from hicachectl.backends.page_tables import PageTables
from hicachectl.checks.page_tables import leaked_pages, mapped_and_free, out_of_range
from hicachectl.formats.errors import UsageError
from hicachectl.text.units import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from hicachectl.backends.base import Store
    from hicachectl.backends.page_tables import PageTable, Snapshot, TableServer, TableState
    from hicachectl.formats.arrays import BoolArray, IntArray
    from hicachectl.pages.groups import PageGroups

    Say = Callable[[str], None]


MAX_BATCH = 128  # SGLang's STORAGE_BATCH_SIZE
PAUSE_S = 0.02  # shortest pause after a call
# Most free pages that the server may search in one call, because a call blocks all engines. For
# each page that a call frees, the server searches all free pages. With 2,000,000 free pages, one
# search took 12 ms, and a call with 128 keys took 1.6 s (measured).
_LOOKED_AT = 4_000_000
_MOST_LEAKED = 1 << 28  # most leaked pages to list; this many take 2 GiB as int64


@dataclass(frozen=True, slots=True)
class BadPage:
    """A page to free, with all its keys in snapshot order.

    free: whether the free list has the page, too.
    """

    index: int
    keys: tuple[str, ...]
    free: bool


@dataclass(frozen=True, slots=True)
class TableRepair:
    """Repair of one table through its server.

    left: keys of pages outside the table. They stay, because the server would give the freed page
        to a writer, and this writer would write past the end of the file. A repaired snapshot omits
        the keys.
    """

    table: PageTable
    pages: tuple[BadPage, ...]
    left: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TableRepairResult:
    """Result of one batch of deletions.

    deleted: keys deleted.
    changed: keys left alone, because they changed or vanished since the snapshot.
    """

    deleted: tuple[str, ...]
    changed: tuple[str, ...]


def bad_rows(table: PageTable, keys: Collection[bytes]) -> BoolArray:
    """Return which rows have one of the keys, or share a page with such a row: [m] bool.

    keys: keys as RANK:NAMESPACE:KEY.
    """
    prefix = f"{table.name}:".encode()
    own = [key for key in keys if key.startswith(prefix)]
    named = pc.is_in(table.keys, pa.array(own, pa.binary())).to_numpy(zero_copy_only=False)
    shared: BoolArray = np.isin(table.indices, table.indices[named])
    return shared


def plan_repair(table: PageTable, bad: BoolArray) -> TableRepair:
    """Plan to delete the keys found by `bad_rows`."""
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


def delete_keys(client: TableServer, repair: TableRepair) -> Iterator[TableRepairResult]:
    """Delete the keys of a plan in small batches with pauses. Yield the result of each batch.

    Each batch first looks up its keys. The lookup counts as use, so that the server does not evict
    the keys before their deletion.
    Raises StoreUnavailable, perhaps after some results were yielded.
    """
    counts = np.array([len(page.keys) for page in repair.pages], dtype=np.int64)
    for span in batch_spans(counts, _batch_size(repair.table)):
        begin = time.monotonic()
        yield _delete(client, repair.table, repair.pages[span])
        _pause_since(begin)


def releasable(name: str, earlier: Snapshot, later: Snapshot) -> IntArray:
    """Return the leaked pages of a table that has no writers: int64, ascending.

    earlier, later: snapshots saved after the engines stopped. The time of a snapshot is the end of
        its save, so only the later save surely began after the stop.
    Raises UsageError if a snapshot lacks the table, or if more than `_MOST_LEAKED` pages are
    leaked.
    """
    tables = [t for each in (later, earlier) for t in each.tables if t.name == name]
    if len(tables) != 2:
        raise UsageError(
            f"{name}: this table is missing from one of the two snapshots; check that both come "
            "from the same metadata server"
        )
    return _leaked(*tables)


def release_pages(client: TableServer, table: PageTable, pages: IntArray) -> None:
    """Free leaked pages in small batches with pauses. Raises StoreUnavailable.

    pages: pages that `releasable` found.
    """
    most = _batch_size(table)
    for start in range(0, len(pages), most):
        begin = time.monotonic()
        client.confirm(*table.place, [], pages[start : start + most].tolist())
        _pause_since(begin)


def repaired_table(table: PageTable, bad: BoolArray, *, release_leaked: bool = False) -> PageTable:
    """Return the table without bad keys, and without pages that are both mapped and free.

    bad: [m] rows found by `bad_rows`.
    release_leaked: whether to free leaked pages as well. This is safe only if no engine will still
        confirm pages that it has reserved.
    Raises UsageError if more than `_MOST_LEAKED` pages are leaked.
    """
    kept = ~bad & ~out_of_range(table)
    indices = table.indices[kept]
    free = table.free[(table.free < table.num_pages) & ~np.isin(table.free, indices)]
    _, first = np.unique(free, return_index=True)
    freed = np.setdiff1d(table.indices[~kept & ~out_of_range(table)], indices)
    free = np.concatenate([free[np.sort(first)], np.setdiff1d(freed, free)])
    if release_leaked:
        free = np.concatenate([free, _leaked(replace(table, free=free, indices=indices))])
    return replace(table, free=free, keys=table.keys.filter(pa.array(kept)), indices=indices)


def _texts(table: PageTable, rows: IntArray) -> list[str]:
    return [key.decode() for key in table.names_at(rows).to_pylist()]


def _leaked(*tables: PageTable) -> IntArray:
    """Return the leaked pages of a table, ascending.

    tables: the table at several times.
    Raises UsageError if more than `_MOST_LEAKED` pages are leaked.
    """
    runs = leaked_pages(*tables)
    if len(runs) > _MOST_LEAKED:
        raise UsageError(
            f"{tables[0].name}: {len(runs)} leaked pages, but at most {_MOST_LEAKED} can be freed; "
            "clear the table"
        )
    before = np.cumsum(runs.lengths) - runs.lengths
    listed: IntArray = np.arange(len(runs)) + np.repeat(runs.starts - before, runs.lengths)
    return listed


def _pause_since(begin: float) -> None:
    """Wait as long as a call took, but at least PAUSE_S.

    begin: `time.monotonic()` before the call.
    """
    time.sleep(max(PAUSE_S, time.monotonic() - begin))


def _batch_size(table: PageTable) -> int:
    return max(1, min(MAX_BATCH, _LOOKED_AT // max(1, len(table.free))))


def _delete(client: TableServer, table: PageTable, batch: Sequence[BadPage]) -> TableRepairResult:
    place = table.place
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


def _move(client: TableServer, table: PageTable, keys: Sequence[str]) -> None:
    """Map keys to newly reserved pages, so that deleting the keys frees only these new pages."""
    place = table.place
    strangers = [f"hicachectl-{os.urandom(16).hex()}" for _ in keys]
    pages = [index for _, index in client.reserve(*place, strangers)]
    client.confirm(*place, zip(keys, pages, strict=True))


_SAVES_S = 150.0  # enough for two saves, because the metadata server saves every 60 s by default
_POLL_S = 0.5


def has_snapshot_only(store: Store) -> bool:
    """Return whether a repair writes a new snapshot, because the URL names no server."""
    state = store.table_state() if isinstance(store, PageTables) else None
    return state is not None and not state.live


def repair_tables(store: Store, keys: Sequence[bytes], *, dry_run: bool, say: Say) -> None:
    """Delete keys with wrong table entries through the server. All keys of a page go in one call.

    keys: keys with wrong entries.
    say: takes remarks.
    Raises StoreUnavailable.
    """
    if not isinstance(store, PageTables):
        return
    state, server = store.table_state(), store.table_server()
    if state is None or server is None or not keys:
        return
    deleted, changed, left = 0, 0, 0
    for table in state.tables:
        plan = plan_repair(table, bad_rows(table, keys))
        left += len(plan.left)
        if dry_run:
            deleted += sum(len(page.keys) for page in plan.pages)
            continue
        for done in delete_keys(server, plan):
            deleted += len(done.deleted)
            changed += len(done.changed)
    would = "would be " if dry_run else ""
    say(f"{counted(deleted, 'key')} with wrong table entries {would}deleted")
    if changed:
        say(f"Kept {counted(changed, 'key')} that a server moved or removed since the snapshot")
    if left:
        say(
            f"Kept {counted(left, 'key')} for pages that the table does not have, because a writer "
            "would get the page of a deleted key. Stop the metadata server and repair its snapshot "
            "(leave out server=).",
        )


def write_repaired_snapshot(
    store: Store,
    groups: PageGroups,
    numbers: IntArray,
    *,
    writers_stopped: bool,
    dry_run: bool,
    say: Say,
) -> bool:
    """Write a snapshot without some groups, if the URL of the store names no server.

    The new snapshot lies beside the present snapshot.
    numbers: numbers of the groups to leave out.
    writers_stopped: whether to release leaked pages as well.
    Return whether the snapshot was, or in a dry run would be, written. It is not written if the URL
    names a server, or if the store has no tables.
    """
    if not isinstance(store, PageTables):
        return False
    state = store.table_state()
    if state is None or state.live:
        return False
    removed = np.isin(groups.of_object, numbers)
    keys = groups.inventory.objects.column("key").filter(pa.array(removed)).to_pylist()
    tables = tuple(
        repaired_table(table, bad_rows(table, keys), release_leaked=writers_stopped)
        for table in state.tables
    )
    path = Path(f"{state.path}.repaired")
    if not dry_run:
        store.write_tables(tables, path)
    would = "would be " if dry_run else ""
    say(
        f"{path} {would}written without {counted(len(numbers), 'page')}, because the URL has "
        "no server=; start the metadata server from it (--persistence-path)",
    )
    return True


def release_leaked(store: Store, *, dry_run: bool, say: Say) -> None:
    """Release the pages that two new snapshots of a server without writers show as leaked."""
    if not isinstance(store, PageTables):
        return
    server, state = store.table_server(), store.table_state()
    if state is None or server is None:
        return
    # The server's clock, which dates the snapshots, may be ahead of this host's.
    stopped_at_ns = max(time.time_ns(), state.saved_at_ns)
    say("Waiting until the metadata server has saved twice, to release leaked pages")
    earlier = _saved_after(store, stopped_at_ns)
    later = _saved_after(store, earlier.saved_at_ns)
    released = 0
    for table in later.tables:
        pages = releasable(table.name, earlier, later)
        if not dry_run:
            release_pages(server, table, pages)
        released += len(pages)
    would = "would be " if dry_run else ""
    say(f"{counted(released, 'leaked page')} {would}released")


def _saved_after(store: PageTables, moment_ns: int) -> TableState:
    deadline = time.monotonic() + _SAVES_S
    while time.monotonic() < deadline:
        state = store.table_state()
        if state is not None and state.saved_at_ns > moment_ns:
            return state
        time.sleep(_POLL_S)
    raise UsageError(
        f"{store.url}: the metadata server saved no snapshot within {_SAVES_S:.0f} s; check its "
        "--persistence-path, and that its --save-interval is shorter"
    )
