"""Check a store's own tables of keys and pages, while a server may go on changing them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.backends.base import Status
from hicachectl.backends.hf3fs.page_tables import PageTables
from hicachectl.checks.page_tables import check_page_tables
from hicachectl.checks.registry import PAGE_INDEX_CODES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicachectl.backends.base import Store
    from hicachectl.backends.hf3fs.page_tables import TableState
    from hicachectl.checks.registry import CheckInput

_LEAKED = "page-leaked"
_ONE_SNAPSHOT = (
    "the metadata server saved one snapshot during the run, and a page that is being written "
    "looks leaked in it; run longer than its --save-interval, or with --grace 0s"
)
_NO_THIRD = (
    "some pages look leaked in two snapshots, and no third was saved in time to confirm it; run "
    "again, or with --grace 0s where nobody writes"
)
_LOOK_EVERY_S = 0.2
_SAVING_S = 5.0  # that a save may take longer than the one before
_MOST_WAIT_S = 130.0  # twice SGLang's default --save-interval, and a little


def saved_tables(store: Store) -> TableState | None:
    """Return a store's own tables as last saved; None where it has none."""
    return store.table_state() if isinstance(store, PageTables) else None


def check_tables_of(given: CheckInput) -> Iterator[pa.Table]:
    """Find what is wrong with the tables of the store that is checked."""
    grace_seconds = given.grace_ns / 1e9
    found, unsure = check_tables(given.store, given.tables, grace_seconds=grace_seconds)
    if unsure is not None:
        given.skip(_LEAKED, unsure)
    yield from found


def check_tables(
    store: Store, before: TableState | None, *, grace_seconds: float
) -> tuple[list[pa.Table], str | None]:
    """Find what is wrong with the tables; also say why leaked pages could not be told, if so.

    before: the tables as they were when the run began. On a live store a page in no list may be
    one that a writer has just reserved: it is leaked when an earlier snapshot and the one saved
    last agree, and so does the next, which is waited for; or at once where there is no grace.
    Raises StoreUnavailable.
    """
    if before is None or not isinstance(store, PageTables):
        return [], None
    now = store.table_state() or before
    if now.live and now.tables:
        # Where the server has gone meanwhile, nobody said what of this was evicted: that raises.
        name = now.tables[0].name.encode()
        store.exists(pa.table({"key": pa.array([name + b":hicachectl-probe"], pa.binary())}))
    at_once = not (now.live and grace_seconds)
    saved_again = now.saved_at_ns != before.saved_at_ns
    earlier = None if at_once else [before] if saved_again else []
    found = list(check_page_tables(now, grace_s=grace_seconds, earlier=earlier))
    why = None if at_once or saved_again else _ONE_SNAPSHOT
    if earlier and any(_LEAKED in table.column("code").to_pylist() for table in found):
        # A save gathers keys, then free pages: one page in flight can be missed by two of them.
        then = _next_state(store, now, now.saved_at_ns - before.saved_at_ns)
        before_then = [*earlier, now] if then else []
        found = list(check_page_tables(then or now, grace_s=grace_seconds, earlier=before_then))
        why = None if then else _NO_THIRD
    return [_confirmed(store, table) for table in found], why


def _next_state(store: PageTables, now: TableState, interval_ns: int) -> TableState | None:
    """Wait for the next snapshot, as long as the last one took, within bounds; None: none came."""
    wait_s = min(interval_ns / 1e9 + _SAVING_S, _MOST_WAIT_S)
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline:
        time.sleep(_LOOK_EVERY_S)
        then = store.table_state()
        if then is not None and then.saved_at_ns != now.saved_at_ns:
            return then
    return None


def suspicious_keys(found: pa.Table) -> list[bytes]:
    """List the keys whose entries in a table are wrong."""
    keys: list[bytes] = found.filter(_suspicious(found)).column("key").cast(pa.binary()).to_pylist()
    return keys


def _suspicious(found: pa.Table) -> pa.ChunkedArray:
    codes = pa.array([code.name for code in PAGE_INDEX_CODES])
    return pc.is_in(found.column("code"), codes)


def _confirmed(store: PageTables, found: pa.Table) -> pa.Table:
    """Leave out what is said of keys that are no longer where the snapshot had them.

    A snapshot is not of one moment: what it says of a key and its page has to be asked for again.
    """
    doubtful = _suspicious(found).to_numpy()
    if not doubtful.any():
        return found
    holds = np.ones(len(found), dtype=np.bool_)
    keys = found.filter(pa.array(doubtful)).column("key").cast(pa.binary())
    holds[doubtful] = store.confirm(pa.table({"key": keys})) == Status.OK
    return found.filter(pa.array(holds))
