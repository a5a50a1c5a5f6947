"""Check a store's own tables of keys and pages, while a server may go on changing them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.backends.base import Status
from hicachectl.checks.page_tables import check_page_tables

if TYPE_CHECKING:
    from hicachectl.backends.base import Store
    from hicachectl.backends.page_tables import TableState

# A snapshot is not of one moment: what it says of a key and its page has to be asked for again.
_SUSPICIONS = pa.array(["page-index-shared", "page-index-free", "page-index-out-of-range"])


def check_tables(
    store: Store, before: TableState | None, *, grace_seconds: float
) -> tuple[list[pa.Table], str | None]:
    """Find what is wrong with the tables; also say why leaked pages could not be told, if so.

    before: the tables as they were when the run began. On a live store a page in no list may be
    one that a writer has just reserved: it is leaked when an earlier snapshot and the one saved
    last agree, or at once where there is no grace. Raises StoreUnavailable.
    """
    if before is None:
        return [], None
    now = store.table_state() or before
    if now.live and now.tables:
        # Where the server has gone meanwhile, nobody said what of this was evicted: that raises.
        name = now.tables[0].name.encode()
        store.exists(pa.table({"key": pa.array([name + b":hicachectl-probe"], pa.binary())}))
    at_once = not (now.live and grace_seconds)
    saved_again = now.saved_at_ns != before.saved_at_ns
    found = check_page_tables(
        now.tables,
        files=now.files,
        bytes_per_page=now.page_bytes,
        saved_at_ns=now.saved_at_ns,
        grace_s=grace_seconds,
        earlier=None if at_once else before.tables if saved_again else (),
    )
    why = None
    if not (at_once or saved_again):
        why = (
            "the metadata server saved one snapshot during the run, and a page that is being "
            "written looks leaked in it; run longer than its --save-interval, or with --grace 0s"
        )
    return [_confirmed(store, table) for table in found], why


def suspicious_keys(found: pa.Table) -> list[bytes]:
    """List the keys whose entries in a table are wrong."""
    chosen = found.filter(pc.is_in(found.column("code"), _SUSPICIONS))
    keys: list[bytes] = chosen.column("key").cast(pa.binary()).to_pylist()
    return keys


def _confirmed(store: Store, found: pa.Table) -> pa.Table:
    """Leave out what is said of keys that are no longer where the snapshot had them."""
    doubtful = pc.is_in(found.column("code"), _SUSPICIONS).to_numpy(zero_copy_only=False)
    if not doubtful.any():
        return found
    keys = found.filter(pa.array(doubtful)).column("key").cast(pa.binary())
    holds = np.ones(len(found), dtype=np.bool_)
    holds[doubtful] = store.confirm(pa.table({"key": keys})) == Status.OK
    return found.filter(pa.array(holds))
