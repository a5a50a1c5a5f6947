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

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

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

# A snapshot is not of one moment: what it says of a key and its page has to be asked for again.
_SUSPICIONS = pa.array(["page-index-shared", "page-index-free", "page-index-out-of-range"])


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
    found = _found(now, earlier, grace_seconds)
    why = None if at_once or saved_again else _ONE_SNAPSHOT
    if earlier and any(_LEAKED in table.column("code").to_pylist() for table in found):
        # A save gathers keys, then free pages: one page in flight can be missed by two of them.
        then = _next_state(store, now, now.saved_at_ns - before.saved_at_ns)
        found = _found(then or now, [*earlier, now] if then else [], grace_seconds)
        why = None if then else _NO_THIRD
    return [_confirmed(store, table) for table in found], why


def _found(
    state: TableState, earlier: Sequence[TableState] | None, grace_seconds: float
) -> list[pa.Table]:
    return list(
        check_page_tables(
            state.tables,
            files=state.files,
            bytes_per_page=state.page_bytes,
            saved_at_ns=state.saved_at_ns,
            grace_s=grace_seconds,
            earlier=None if earlier is None else [each.tables for each in earlier],
        )
    )


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
    chosen = found.filter(pc.is_in(found.column("code"), _SUSPICIONS))
    keys: list[bytes] = chosen.column("key").cast(pa.binary()).to_pylist()
    return keys


def _confirmed(store: PageTables, found: pa.Table) -> pa.Table:
    """Leave out what is said of keys that are no longer where the snapshot had them."""
    doubtful = pc.is_in(found.column("code"), _SUSPICIONS).to_numpy(zero_copy_only=False)
    if not doubtful.any():
        return found
    keys = found.filter(pa.array(doubtful)).column("key").cast(pa.binary())
    holds = np.ones(len(found), dtype=np.bool_)
    holds[doubtful] = store.confirm(pa.table({"key": keys})) == Status.OK
    return found.filter(pa.array(holds))
