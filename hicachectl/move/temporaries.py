"""Remove a file store's temporary files of unfinished writes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.backends.base import Status
from hicachectl.checks.names import stale_temporaries
from hicachectl.move.reports import (
    FAILED,
    GONE,
    KEPT,
    REMOVED,
    ROWS,
    WOULD_REMOVE,
    GroupReport,
    total,
)
from hicachectl.pages.listing import key_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicachectl.backends.base import Store

GRACE_SECONDS = 60.0  # verify's default; a younger file may belong to a running write

_COLUMNS = ("nbytes", "mtime_ns")


def find_temporaries(
    store: Store,
    *,
    before: float | None = None,
    on_batch: Callable[[int], None] = lambda objects: None,
) -> pa.Table:
    """Return temporary files that `verify` calls stale: key, nbytes, mtime_ns.

    before: Unix seconds; only files last written earlier. Files younger than GRACE_SECONDS are
    never listed. Raises StoreUnavailable.
    """
    newest_ns = time.time_ns() - int(GRACE_SECONDS * 1e9)
    if before is not None:
        newest_ns = min(newest_ns, int(before * 1e9) - 1)
    found = []
    for batch in store.scan(_COLUMNS) if store.traits.lists_temporaries else ():
        on_batch(len(batch))
        found.append(batch.filter(stale_temporaries(batch, newest_ns)))
    schema = pa.schema([("key", pa.binary()), *((name, pa.int64()) for name in _COLUMNS)])
    return pa.Table.from_batches(found, schema=found[0].schema if found else schema)


def remove_temporaries(
    store: Store,
    stale: pa.Table,
    *,
    dry_run: bool = False,
    on_progress: Callable[[int], None] = lambda files: None,
) -> GroupReport:
    """Delete temporary files, except files written since the listing.

    The result's rows have the columns of reports.ROWS (page, model and tag null) and `key`.
    Raises StoreUnavailable.
    """
    states = np.full(len(stale), WOULD_REMOVE if dry_run else GONE, dtype=object)
    failed: list[tuple[str, str]] = []
    texts = key_text(stale.column("key").combine_chunks())
    size = store.limits.batch_objects
    for start in range(0, 0 if dry_run else len(stale), size):
        some = stale.slice(start, size)
        now = store.look(some, _COLUMNS)
        place = pc.index_in(some.column("key"), value_set=now.column("key").combine_chunks())
        there = place.is_valid().to_numpy(zero_copy_only=False)
        same = pc.equal(some.column("mtime_ns"), now.column("mtime_ns").take(place))
        unchanged = pc.fill_null(same, False).to_numpy(zero_copy_only=False)
        states[start + np.flatnonzero(there & ~unchanged)] = KEPT
        rows = np.flatnonzero(there & unchanged)
        result = store.delete(some.take(pa.array(rows)))
        for row, status in zip((start + rows).tolist(), result.statuses.tolist(), strict=True):
            states[row] = {Status.OK: REMOVED, Status.GONE: GONE}.get(Status(status), FAILED)
        failed += [
            (texts[start + int(rows[number])].as_py(), f"cannot be removed: {message}")
            for number, message in result.errors.items()
        ]
        on_progress(len(some))
    taken = np.isin(states, (REMOVED, WOULD_REMOVE))
    sizes = stale.column("nbytes")
    return GroupReport(
        deleted=int(taken.sum()),
        gone=int((states == GONE).sum()),
        nbytes=total(sizes.filter(pa.array(taken))),
        failures=tuple(failed),
        rows=_rows(texts, sizes, states),
    )


def _rows(keys: pa.StringArray, sizes: pa.ChunkedArray, states: np.ndarray) -> pa.Table:
    columns = {
        **{name: pa.nulls(len(keys), ROWS.field(name).type) for name in ("page", "model", "tag")},
        "objects": pa.repeat(1, len(keys)),
        "nbytes": sizes,
        "state": pa.array(states, pa.string()),
        "key": keys,
    }
    return pa.table(columns)
