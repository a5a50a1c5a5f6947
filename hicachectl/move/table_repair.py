"""Repair the tables of a 3FS store: keys and pages, on its server or in a new snapshot."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from hicachectl.backends.page_tables import PageTables
from hicachectl.formats.errors import UsageError
from hicachectl.move.page_table_repair import (
    bad_rows,
    delete_keys,
    plan_repair,
    releasable,
    release_pages,
    repaired_table,
)
from hicachectl.text.units import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicachectl.backends.base import Store
    from hicachectl.backends.page_tables import TableState
    from hicachectl.formats.arrays import IntArray
    from hicachectl.pages.groups import PageGroups
    from hicachectl.pages.inventory import Inventory

    Say = Callable[[str], None]

_SAVES_S = 150.0  # two saves of the metadata server (every 60 s by default), and a margin
_POLL_S = 0.5


def has_snapshot_only(store: Store) -> bool:
    """Return whether a repair would write a new snapshot, because the URL names no server."""
    state = store.table_state() if isinstance(store, PageTables) else None
    return state is not None and not state.live


def repair_tables(store: Store, keys: Sequence[bytes], *, dry_run: bool, say: Say) -> None:
    """Delete keys with wrong entries in a table, all keys of a page at once.

    keys: those with wrong entries. say: takes remarks. Raises StoreUnavailable.
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
        for done in delete_keys(server, plan, stopped=threading.Event()):
            deleted += len(done.deleted)
            changed += len(done.changed)
    would = "would be " if dry_run else ""
    say(f"{counted(deleted, 'key')} with wrong table entries {would}deleted")
    if changed:
        say(f"Kept {counted(changed, 'key')}: moved or removed since the snapshot")
    if left:
        say(
            f"Kept {counted(left, 'key')} for pages that the table does not have: deleting such a "
            "key would hand the page out. Stop the metadata server and repair its snapshot (leave "
            "out server=).",
        )


def write_repaired_snapshot(
    store: Store,
    inventory: Inventory,
    groups: PageGroups,
    numbers: IntArray,
    *,
    writers_stopped: bool,
    dry_run: bool,
    say: Say,
) -> bool:
    """Write tables without some groups beside the snapshot, if no server is given.

    numbers: numbers of the groups. writers_stopped: also release leaked pages. Return False if the
    store has a server or no tables.
    """
    if not isinstance(store, PageTables):
        return False
    state = store.table_state()
    if state is None or state.live:
        return False
    removed = np.isin(groups.of_object, numbers)
    keys = inventory.objects.column("key").filter(pa.array(removed)).to_pylist()
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
    """Release the pages that are leaked in two snapshots of a server without writers."""
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
        pages = releasable(table.name, earlier, later, stopped_at_ns=stopped_at_ns)
        released += (
            len(pages)
            if dry_run
            else sum(release_pages(server, table, pages, stopped=threading.Event()))
        )
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
