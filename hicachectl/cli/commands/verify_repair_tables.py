"""The part of `verify --repair` for 3FS: tables of keys and pages."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hicachectl.cli.session import remark
from hicachectl.formats.errors import UsageError

if TYPE_CHECKING:
    import pyarrow as pa

    from hicachectl.backends.base import Store
    from hicachectl.backends.hf3fs.page_tables import PageTables, TableState
    from hicachectl.move.planning import RepairPlan
    from hicachectl.verify.part import PartCheck

_SAVES_S = 150.0  # two saves of the metadata server (every 60 s by default), and a margin
_POLL_S = 0.5

writers_stopped_option = click.option(
    "--writers-stopped",
    is_flag=True,
    help="3FS: confirm that no engine writes; --repair then releases leaked pages.",
)


def repair_tables(ctx: click.Context, store: Store, found: pa.Table, *, dry_run: bool) -> None:
    """Delete keys with wrong entries in a table, all keys of a page at once."""
    from hicachectl.backends.hf3fs.page_tables import PageTables
    from hicachectl.move.page_table_repair import bad_rows, delete_keys, plan_repair
    from hicachectl.text.units import counted
    from hicachectl.verify.live_tables import suspicious_keys

    if not isinstance(store, PageTables):
        return
    state, keys = store.table_state(), suspicious_keys(found)
    server = store.table_server()
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
    remark(ctx, f"{counted(deleted, 'key')} with wrong table entries {would}deleted")
    if changed:
        remark(ctx, f"Kept {counted(changed, 'key')}: moved or removed since the snapshot")
    if left:
        remark(
            ctx,
            f"Kept {counted(left, 'key')} for pages that the table does not have: deleting such a "
            "key would hand the page out. Stop the metadata server and repair its snapshot (leave "
            "out server=).",
        )


def write_repaired_snapshot(
    ctx: click.Context,
    store: Store,
    checked: PartCheck,
    plan: RepairPlan,
    options: dict[str, Any],
) -> bool:
    """Write tables without the bad groups beside the snapshot, if no server is given.

    Return False if the store has a server or no tables.
    """
    import numpy as np
    import pyarrow as pa

    from hicachectl.backends.hf3fs.page_tables import PageTables
    from hicachectl.backends.hf3fs.snapshot import Snapshot, write_repaired
    from hicachectl.move.page_table_repair import bad_rows, repaired_table
    from hicachectl.text.units import counted

    state = store.table_state() if isinstance(store, PageTables) else None
    if state is None or state.live:
        return False
    doomed = np.isin(checked.groups.of_object, plan.groups)
    keys = checked.inventory.objects.column("key").filter(pa.array(doomed)).to_pylist()
    tables = tuple(
        repaired_table(
            table, bad_rows(table, keys), release_leaked=bool(options["writers_stopped"])
        )
        for table in state.tables
    )
    path = Path(f"{state.path}.repaired")
    if not options["dry_run"]:
        write_repaired(Snapshot(state.saved_at_ns, tables), path, like=state.path)
    would = "would be " if options["dry_run"] else ""
    remark(
        ctx,
        f"{path} {would}written without {counted(len(plan.groups), 'page')}, because the URL has "
        "no server=; start the metadata server from it (--persistence-path)",
    )
    return True


def release_leaked(ctx: click.Context, store: Store, options: dict[str, Any]) -> None:
    """Release the pages that are leaked in two snapshots of a server without writers."""
    from hicachectl.backends.hf3fs.page_tables import PageTables
    from hicachectl.backends.hf3fs.snapshot import Snapshot
    from hicachectl.move.page_table_repair import releasable, release_pages
    from hicachectl.text.units import counted

    if not isinstance(store, PageTables):
        return
    server, state = store.table_server(), store.table_state()
    if state is None or server is None or not options["writers_stopped"]:
        return
    stopped_at_ns = time.time_ns()
    remark(ctx, "Waiting until the metadata server has saved twice, to release leaked pages")
    earlier = _saved_after(store, stopped_at_ns)
    later = _saved_after(store, earlier.saved_at_ns)
    pair = [Snapshot(each.saved_at_ns, each.tables) for each in (earlier, later)]
    released = 0
    for table in later.tables:
        pages = releasable(table.name, *pair, stopped_at_ns=stopped_at_ns)
        released += (
            len(pages)
            if options["dry_run"]
            else sum(release_pages(server, table, pages, stopped=threading.Event()))
        )
    would = "would be " if options["dry_run"] else ""
    remark(ctx, f"{counted(released, 'leaked page')} {would}released")


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
