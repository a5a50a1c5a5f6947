"""Check a store's page tables while a server may change them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.backends.base import Status
from hicachectl.backends.page_tables import PageTables
from hicachectl.checks.codes import PAGE_INDEX_CODES
from hicachectl.checks.page_tables import check_page_tables

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicachectl.backends.base import Store
    from hicachectl.backends.page_tables import TableState
    from hicachectl.checks.registry import CheckInput

_LEAKED = "page-leaked"
_ONE_SNAPSHOT = (
    "leaked pages were not judged: the metadata server saved only one snapshot during the run, and "
    "pages being written look leaked in it; let the run last longer than the "
    "server's --save-interval, or give --grace 0s if no server writes"
)
_NO_THIRD = (
    "leaked pages were not judged: some pages look leaked in two snapshots, but no third snapshot "
    "was saved in time; run again, or give --grace 0s if no server writes"
)
_LOOK_EVERY_S = 0.2
# A save may take this much longer than the save before it.
_SAVING_S = 5.0
# A little more than twice SGLang's default --save-interval.
_MOST_WAIT_S = 130.0


def saved_tables(store: Store) -> TableState | None:
    """Return a store's page tables as last saved; None without any."""
    return store.table_state() if isinstance(store, PageTables) else None


def check_tables_of(given: CheckInput) -> Iterator[pa.Table]:
    """Yield the findings about page tables."""
    grace_seconds = given.grace_ns / 1e9
    found, unsure = check_tables(given.store, given.tables, grace_seconds=grace_seconds)
    if unsure is not None:
        given.skip(_LEAKED, unsure)
    yield from found


def check_tables(
    store: Store, before: TableState | None, *, grace_seconds: float
) -> tuple[list[pa.Table], str | None]:
    """Return the findings about page tables, and the reason if leaked pages cannot be judged.

    before: the tables at the start of the run. On a live store a page is leaked only if an earlier
    snapshot, the latest and the next agree; this function waits for the next. Without a grace one
    snapshot decides. Raises StoreUnavailable.
    """
    if before is None or not isinstance(store, PageTables):
        return [], None
    now = store.table_state() or before
    if now.live and now.tables:
        # Raises if the server has stopped: the snapshot alone does not show later evictions.
        name = now.tables[0].name.encode()
        store.exists(pa.table({"key": pa.array([name + b":hicachectl-probe"], pa.binary())}))
    at_once = not (now.live and grace_seconds)
    saved_again = now.saved_at_ns != before.saved_at_ns
    earlier = None if at_once else [before] if saved_again else []
    found = list(check_page_tables(now, grace_s=grace_seconds, earlier=earlier))
    why = None if at_once or saved_again else _ONE_SNAPSHOT
    if earlier and any(_LEAKED in table.column("code").to_pylist() for table in found):
        # A server saves keys, then free pages. A page being written can be absent from both lists,
        # even in two snapshots.
        next_state = _next_state(store, now, now.saved_at_ns - before.saved_at_ns)
        states_before = [*earlier, now] if next_state else []
        found = list(
            check_page_tables(next_state or now, grace_s=grace_seconds, earlier=states_before)
        )
        why = None if next_state else _NO_THIRD
    return [_confirmed(store, table) for table in found], why


def _next_state(store: PageTables, now: TableState, interval_ns: int) -> TableState | None:
    """Return the next snapshot, or None if a save interval passes without one."""
    wait_s = min(interval_ns / 1e9 + _SAVING_S, _MOST_WAIT_S)
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline:
        time.sleep(_LOOK_EVERY_S)
        state = store.table_state()
        if state is not None and state.saved_at_ns != now.saved_at_ns:
            return state
    return None


def suspicious_keys(found: pa.Table) -> list[bytes]:
    """Return the keys whose entries in a table look wrong."""
    keys: list[bytes] = found.filter(_suspicious(found)).column("key").cast(pa.binary()).to_pylist()
    return keys


def _suspicious(found: pa.Table) -> pa.ChunkedArray:
    codes = pa.array([code.name for code in PAGE_INDEX_CODES])
    return pc.is_in(found.column("code"), codes)


def _confirmed(store: PageTables, found: pa.Table) -> pa.Table:
    """Return the findings without those about keys that have changed since the snapshot.

    Keys may change while a snapshot is saved, so suspicious keys are looked up again.
    """
    doubtful = _suspicious(found).to_numpy()
    if not doubtful.any():
        return found
    holds = np.ones(len(found), dtype=np.bool_)
    keys = found.filter(pa.array(doubtful)).column("key").cast(pa.binary())
    holds[doubtful] = store.confirm(pa.table({"key": keys})) == Status.OK
    return found.filter(pa.array(holds))
