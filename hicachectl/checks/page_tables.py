"""Check the page tables of a 3FS store, even while a server changes them."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.backends.base import Status
from hicachectl.backends.page_tables import PageTables
from hicachectl.checks.codes import PAGE_INDEX_CODES
from hicachectl.checks.findings import findings
from hicachectl.pages.listing import key_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hicachectl.backends.base import Store
    from hicachectl.backends.page_tables import DataFile, PageTable, TableState
    from hicachectl.checks.registry import CheckInput
    from hicachectl.formats.arrays import BoolArray, IntArray


# Most leaked pages, or ranks, that a finding lists.
_NAMED_PAGES = 8
_COMPARED_AT_ONCE = 1 << 20
_PAGE_AND_REST = r"(?s)^(?P<page>[0-9a-f]{64})(?P<rest>.*)$"
_NS = 1_000_000_000


def check_page_tables(
    state: TableState, *, grace_s: float, earlier: Sequence[TableState] | None = None
) -> Iterator[pa.Table]:
    """Yield tables of findings about saved page tables. Some of the tables are empty.

    earlier: states that were saved before `state`. A page is reported as leaked only if it looks
        leaked in each of these states, too, because a page that a server is writing looks leaked
        for a time. If `earlier` is empty, no page is reported as leaked. If it is None, `state`
        alone decides.

    On a live store, page-index-free is only a suspicion. The server saves keys before free pages.
    If it deletes a key between the two, the page of the key is saved as held and as free. The
    finding is right if the key still has the page later.
    """
    known = [{table.name: table for table in saved.tables} for saved in earlier or ()]
    for table in state.tables:
        yield _shared(table)
        yield _out_of_range(table)
        yield _mapped_and_free(table)
        if earlier is None or (known and all(table.name in saved for saved in known)):
            yield _leaked(table, *(saved[table.name] for saved in known))
        if table.name in state.files:
            yield from _checked_file(table, state, grace_s)
    yield from _page_counts(state.tables)


# --- contents of tables; repairs use these functions, too ---


def holders(table: PageTable) -> IntArray:
    """Return, for each key, how many keys have its page: [keys]."""
    held_by = np.ones(len(table.indices), dtype=np.int64)
    ordered = np.sort(table.indices)
    repeated = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
    if len(repeated):
        rows = np.flatnonzero(np.isin(table.indices, repeated))
        _, inverse, counts = np.unique(table.indices[rows], return_inverse=True, return_counts=True)
        held_by[rows] = counts[inverse]
    return held_by


def mapped_and_free(table: PageTable) -> BoolArray:
    """Return which keys have a page that the table also lists as free: [keys]."""
    return np.isin(table.indices, table.free)


def out_of_range(table: PageTable) -> BoolArray:
    """Return which keys have a page outside the table: [keys]."""
    return table.indices >= table.num_pages


@dataclass(frozen=True, slots=True)
class PageRuns:
    """Runs of consecutive pages, ascending. They take little memory even for many pages.

    starts: first page of each run.
    lengths: number of pages of each run.
    """

    starts: IntArray
    lengths: IntArray

    def __len__(self) -> int:
        return int(self.lengths.sum())

    def first(self, count: int) -> list[int]:
        """Return the first pages, at most `count`."""
        pages: list[int] = []
        for start, length in zip(self.starts.tolist(), self.lengths.tolist(), strict=True):
            pages += range(start, start + min(length, count - len(pages)))
            if len(pages) == count:
                break
        return pages


def leaked_pages(*tables: PageTable) -> PageRuns:
    """Return the leaked pages: each state of the table lists them neither as free nor by a key.

    tables: states of one table.
    """
    lists = [pages for table in tables for pages in (table.free, table.indices)]
    num_pages = min(table.num_pages for table in tables)
    known = np.concatenate([np.array([-1, num_pages]), *lists])
    known.sort()
    known = known[: np.searchsorted(known, num_pages) + 1]
    starts, lengths = [], []
    for at in range(0, len(known) - 1, _COMPARED_AT_ONCE):
        some = known[at : at + _COMPARED_AT_ONCE + 1]
        between = np.diff(some) - 1
        gaps = np.flatnonzero(between > 0)
        starts.append(some[gaps] + 1)
        lengths.append(between[gaps])
    return PageRuns(np.concatenate(starts), np.concatenate(lengths))


# --- findings ---
def _shared(table: PageTable) -> pa.Table:
    counts = holders(table)
    rows = np.flatnonzero(counts > 1)
    # List the keys of one page one after the other.
    rows = rows[np.argsort(table.indices[rows], kind="stable")]
    detail = (
        "page ",
        table.indices[rows],
        " is held by ",
        counts[rows],
        " keys, so at most one of them reads its own bytes",
    )
    return _key_findings("page-index-shared", table, rows, *detail)


def _out_of_range(table: PageTable) -> pa.Table:
    rows = np.flatnonzero(out_of_range(table))
    pages = f" is outside the table of {table.num_pages} pages"
    return _key_findings(
        "page-index-out-of-range", table, rows, "page ", table.indices[rows], pages
    )


def _mapped_and_free(table: PageTable) -> pa.Table:
    rows = np.flatnonzero(mapped_and_free(table))
    rest = " is also free, so the next writer may overwrite the page"
    detail = ("page ", table.indices[rows], rest)
    return _key_findings("page-index-free", table, rows, *detail)


def _leaked(table: PageTable, *before: PageTable) -> pa.Table:
    leaked = leaked_pages(table, *before)
    pages = leaked.first(_NAMED_PAGES)
    named = ", ".join(map(str, pages)) + (", …" if len(leaked) > len(pages) else "")
    detail = (
        f"{len(leaked)} of {table.num_pages} pages of {table.name} are neither free nor held by a "
        f"key, so servers cannot use them until they are released; pages: {named}"
    )
    return _table_findings("page-leaked", table.namespace, [detail] if pages else [])


def _checked_file(table: PageTable, state: TableState, grace_s: float) -> Iterator[pa.Table]:
    file, bytes_per_page = state.files[table.name], state.page_bytes.get(table.name)
    if bytes_per_page is not None:
        yield _beyond_the_end(table, file, bytes_per_page)
        yield _wrong_stride(table, file, bytes_per_page)
    behind_ns = file.mtime_ns - state.saved_at_ns
    if behind_ns > grace_s * _NS:
        detail = (
            f"{file.path} was written {_duration(behind_ns)} after the snapshot was saved, so the "
            "saved tables may not describe the file"
        )
        yield _table_findings("snapshot-stale", table.namespace, [detail])


def _duration(length_ns: int) -> str:
    if length_ns >= 60 * _NS:
        return str(timedelta(seconds=length_ns // _NS))
    if length_ns >= _NS:
        return f"{length_ns / _NS:.1f} s"
    return f"{max(1, length_ns // 1_000_000)} ms"


def _beyond_the_end(table: PageTable, file: DataFile, bytes_per_page: int) -> pa.Table:
    whole = file.nbytes // bytes_per_page
    rows = np.flatnonzero((table.indices >= whole) & ~out_of_range(table))
    ending = (
        f" lies beyond the end of {file.path}: the file has {file.nbytes} bytes, {whole} whole "
        f"pages of {bytes_per_page} bytes"
    )
    return _key_findings("truncated", table, rows, "page ", table.indices[rows], ending)


def _wrong_stride(table: PageTable, file: DataFile, bytes_per_page: int) -> pa.Table:
    whole = file.nbytes // bytes_per_page
    detail = (
        f"{table.name} has {table.num_pages} pages, but {file.path} has {whole} pages of "
        f"{bytes_per_page} bytes; the file was written with another page size, or was truncated"
    )
    wrong = whole != table.num_pages
    return _table_findings("page-count-mismatch", table.namespace, [detail] if wrong else [])


def _page_counts(tables: Sequence[PageTable]) -> Iterator[pa.Table]:
    """Yield a finding for namespaces whose ranks have files of different sizes."""
    ranks: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for table in tables:
        ranks[table.namespace][table.num_pages].append(table.rank)
    for namespace, counts in ranks.items():
        if len(counts) > 1:
            said = "; ".join(
                f"{num_pages} pages at {_ranks_text(counts[num_pages])}"
                for num_pages in sorted(counts)
            )
            detail = f"the ranks of {namespace} have files of different sizes: {said}"
            yield _table_findings("page-count-mismatch", namespace, [detail])


def _ranks_text(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_NAMED_PAGES]))
    return f"rank {shown}" + (", …" if len(ranks) > _NAMED_PAGES else "")


def _key_findings(code: str, table: PageTable, rows: IntArray, *detail: str | IntArray) -> pa.Table:
    """Return a finding for each row of a table.

    detail: pieces of the detail, joined in order: texts, and numbers of each row.
    """
    keys = key_text(table.names_at(rows).combine_chunks())
    page, rest = pc.extract_regex(keys, _PAGE_AND_REST).flatten()
    part = pc.if_else(
        pc.is_in(rest, pa.array(["-k", "-v"])), pc.utf8_slice_codeunits(rest, 1, 2), None
    )
    texts = [
        pa.repeat(text, len(rows)) if isinstance(text, str) else pa.array(text).cast(pa.string())
        for text in detail
    ]
    return findings(
        code,
        keys=pc.binary_join_element_wise(pa.repeat(f"{table.name}:", len(rows)), keys, ""),
        pages=page,
        pools=pa.repeat(table.namespace, len(rows)),
        parts=part,
        detail=pc.binary_join_element_wise(*texts, ""),
    )


def _table_findings(code: str, namespace: str, details: Sequence[str]) -> pa.Table:
    return findings(
        code,
        keys=pa.nulls(len(details), pa.string()),
        pools=pa.repeat(namespace, len(details)),
        detail=pa.array(details, pa.string()),
    )


_LEAKED = "page-leaked"
_ONE_SNAPSHOT = (
    "leaked pages were not judged, because the metadata server saved only one snapshot during the "
    "run, in which pages that are being written look leaked; let the run last longer than the "
    "server's --save-interval, or give --grace 0s if no server writes"
)
_NO_THIRD = (
    "leaked pages were not judged, because some pages look leaked in two snapshots, but no third "
    "snapshot was saved in time; run again, or give --grace 0s if no server writes"
)
_LOOK_EVERY_S = 0.2
# A save may take this much longer than the save before it.
_SAVING_S = 5.0
# A little more than twice SGLang's default --save-interval.
_MOST_WAIT_S = 130.0


def saved_tables(store: Store) -> TableState | None:
    """Return a store's page tables as last saved; None if the store has none."""
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

    On a live store, a page is leaked only if three snapshots agree: an earlier one, the latest, and
    the next. This function waits for the next snapshot if the first two agree. If the grace period
    is zero, or the store is not live, the latest snapshot alone decides.
    before: the tables at the start of the run.
    Raises StoreUnavailable.
    """
    if before is None or not isinstance(store, PageTables):
        return [], None
    now = store.table_state() or before
    if now.live and now.tables:
        # This query raises StoreUnavailable if the server has stopped. The snapshot alone would not
        # show that the server has stopped, or has evicted pages since.
        name = now.tables[0].name.encode()
        store.exists(pa.table({"key": pa.array([name + b":hicachectl-probe"], pa.binary())}))
    at_once = not (now.live and grace_seconds)
    saved_again = now.saved_at_ns != before.saved_at_ns
    earlier = None if at_once else [before] if saved_again else []
    found = list(check_page_tables(now, grace_s=grace_seconds, earlier=earlier))
    why = None if at_once or saved_again else _ONE_SNAPSHOT
    if earlier and any(_LEAKED in table.column("code").to_pylist() for table in found):
        # A server saves keys, then free pages. A page that is being written can therefore be absent
        # from both lists, even in two snapshots.
        next_state = _next_state(store, now, now.saved_at_ns - before.saved_at_ns)
        states_before = [*earlier, now] if next_state else []
        found = list(
            check_page_tables(next_state or now, grace_s=grace_seconds, earlier=states_before)
        )
        why = None if next_state else _NO_THIRD
    return [_confirmed(store, table) for table in found], why


def _next_state(store: PageTables, now: TableState, interval_ns: int) -> TableState | None:
    """Wait for the next snapshot and return it.

    Return None if no snapshot is saved in a little more than `interval_ns`.
    interval_ns: time between the last two snapshots.
    """
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
    codes = pa.array(PAGE_INDEX_CODES)
    return pc.is_in(found.column("code"), codes)


def _confirmed(store: PageTables, found: pa.Table) -> pa.Table:
    """Return the findings, but leave out findings about keys that changed after the snapshot.
    Keys may change while a snapshot is saved, so the store is asked again for suspicious keys.
    """
    doubtful = _suspicious(found).to_numpy()
    if not doubtful.any():
        return found
    holds = np.ones(len(found), dtype=np.bool_)
    keys = found.filter(pa.array(doubtful)).column("key").cast(pa.binary())
    holds[doubtful] = store.confirm(pa.table({"key": keys})) == Status.OK
    return found.filter(pa.array(holds))
