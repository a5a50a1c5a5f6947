"""Find and remove temporary files and cleared objects that servers left in a file store."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.backends.base import Result, Status, joined
from hicachectl.backends.capabilities import Trailed, present_ns
from hicachectl.checks.structure import stale_temporaries
from hicachectl.formats.objects import PAGE_DIGITS
from hicachectl.move.results import (
    FAILED,
    GONE,
    KEPT,
    PLACES,
    REMOVED,
    ROWS,
    WOULD_REMOVE,
    GroupReport,
    Taken,
    telling,
)
from hicachectl.pages.census import column_sum
from hicachectl.pages.listing import key_text
from hicachectl.text.vocabulary import DEFAULT_GRACE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicachectl.backends.base import Store

_COLUMNS = ("nbytes", "mtime_ns", "cleared_ns")


def find_temporaries(
    store: Store,
    *,
    before: float | None = None,
    dry_run: bool = False,
    on_batch: Callable[[int], None] = lambda objects: None,
) -> pa.Table:
    """Return the files that `verify` calls stale, in the columns key, nbytes, mtime_ns, cleared_ns.

    Stale files are temporary files, and objects that servers no longer find since a `clear`. Only
    cleared objects have a cleared_ns. Files written or cleared less than DEFAULT_GRACE_SECONDS ago
    may belong to a running write, and are left out.
    before: Unix seconds. Only files that were last written before this time are returned.
    dry_run: whether the files will stay. If so, this call creates no file in the store to learn the
        time of its file system.
    Raises StoreUnavailable.
    """
    now_ns = present_ns(store, changes=not dry_run)
    newest_ns = settled_ns = now_ns - int(DEFAULT_GRACE_SECONDS * 1e9)
    if before is not None:
        newest_ns = min(newest_ns, round(before * 1e6) * 1000 - 1)
    found = []
    for batch in store.scan(_COLUMNS) if store.traits.lists_temporaries else ():
        on_batch(len(batch))
        old = pc.less_equal(pc.fill_null(batch.column("mtime_ns"), 0), newest_ns)
        cleared = pc.and_(pc.less_equal(batch.column("cleared_ns"), settled_ns), old)
        stale = pc.or_(stale_temporaries(batch, newest_ns), pc.fill_null(cleared, False))
        found.append(batch.filter(stale))
    schema = pa.schema([("key", pa.binary()), *((name, pa.int64()) for name in _COLUMNS)])
    return pa.Table.from_batches(found, schema=found[0].schema if found else schema)


def remove_temporaries(
    store: Store,
    stale: pa.Table,
    *,
    dry_run: bool = False,
    on_progress: Callable[[int], None] = lambda files: None,
    on_end: Callable[[Taken], None] = lambda taken: None,
) -> GroupReport:
    """Delete files of `find_temporaries`, except files written since the listing.

    The kv objects of cleared pages are deleted first. The rows of the report have the columns of
    results.ROWS and the column `key`. Their pages, names and sizes are null.
    on_end: takes the removals so far if a signal or a lost store ends the removal.
    Raises StoreUnavailable.
    """
    stale = stale.take(pa.array(np.argsort(_are_sidecars(stale), kind="stable")))
    # Without a dry run, a file is GONE unless the lookups below still find it.
    states = np.full(len(stale), WOULD_REMOVE if dry_run else GONE, dtype=object)
    failed: list[tuple[str, str]] = []
    texts = key_text(stale.column("key").combine_chunks())
    size = store.limits.batch_objects

    def so_far() -> Taken:
        removed = states == REMOVED
        sizes = stale.column("nbytes").filter(pa.array(removed))
        return Taken(int(removed.sum()), int(removed.sum()), column_sum(sizes))

    with telling(so_far, on_end):
        for start in range(0, 0 if dry_run else len(stale), size):
            some = stale.slice(start, size)
            now, places = store.find(some.column("key").combine_chunks(), _COLUMNS)
            rows = np.flatnonzero(places >= 0)
            times = (some.column("mtime_ns").take(rows), now.column("mtime_ns").take(places[rows]))
            unchanged = pc.fill_null(pc.equal(*times), False).to_numpy()
            states[start + rows[~unchanged]] = KEPT
            rows = rows[unchanged]
            result = _deleted(store, some.take(pa.array(rows)))
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
        nbytes=column_sum(sizes.filter(pa.array(taken))),
        failures=tuple(failed),
        rows=_rows(texts, sizes, states),
    )


def _are_sidecars(stale: pa.Table) -> np.ndarray:
    """Return which files are sidecars: [files]. Their names are like <hash>.pool…."""
    keys = stale.column("key").combine_chunks()
    sixty_fifth = pc.binary_slice(keys, PAGE_DIGITS, PAGE_DIGITS + 1)
    sidecars: np.ndarray = pc.equal(sixty_fifth, b".").to_numpy(zero_copy_only=False)
    return sidecars


def _deleted(store: Store, some: pa.Table) -> Result:
    """Delete temporary files. Delete cleared objects that were not written again."""
    is_cleared = some.column("cleared_ns").is_valid().to_numpy()
    if not isinstance(store, Trailed) or not is_cleared.any():
        return store.delete(some)
    kinds = ((store.delete, ~is_cleared), (store.remove_cleared, is_cleared))
    calls = ((delete, np.flatnonzero(chosen)) for delete, chosen in kinds)
    return joined(len(some), ((rows, delete(some.take(pa.array(rows)))) for delete, rows in calls))


def _rows(keys: pa.StringArray, sizes: pa.ChunkedArray, states: np.ndarray) -> pa.Table:
    columns = {
        **{name: pa.nulls(len(keys), ROWS.field(name).type) for name in PLACES},
        "objects": pa.repeat(1, len(keys)),
        "nbytes": sizes,
        "state": pa.array(states, pa.string()),
        "key": keys,
    }
    return pa.table(columns)
