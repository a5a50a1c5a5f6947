"""Time writes of a bench's own pages, and remove these pages."""

from __future__ import annotations

import secrets
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from hicachectl.backends.arena import ALIGNMENT, Arena, place
from hicachectl.backends.base import Status, attached, batch_spans, in_batches
from hicachectl.backends.capabilities import RacyWrites
from hicachectl.bench.reads import UNKNOWN, Timing
from hicachectl.bench.sample import BATCH_PAGES, OWN_MODEL
from hicachectl.formats.errors import UsageError
from hicachectl.formats.keys import grammar_of
from hicachectl.formats.objects import PAGE_DIGITS
from hicachectl.io.interrupts import deferred
from hicachectl.text.units import human_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicachectl.backends.base import Store
    from hicachectl.bench.sample import Sized
    from hicachectl.formats.arrays import IntArray

_ARENA_BYTES = 64 << 20
# Divisors of --most and of the free space: a bench writes no more than either quotient.
_WRITTEN_SHARE, _FREE_SHARE = 4, 10


def check_writable(store: Store) -> None:
    """Raise UsageError for a store in which a bench cannot write pages of its own."""
    traits = store.traits
    if not traits.writes or not traits.deletes or traits.append_only:
        why = "pages cannot be written and removed again"
    elif not grammar_of(store.grammar).names_model:
        why = "its keys name no model, so servers could take the bench's pages for their own"
    else:
        return
    raise UsageError(f"--write: {store.url}: {why}; leave out --write")


def most_written(store: Store, most_bytes: int) -> int:
    """Return a limit on the bytes of a bench. The limit leaves most of the free space."""
    free = store.free_bytes()
    return most_bytes if free is None else min(most_bytes, free // _FREE_SHARE)


def writable_bytes(store: Store, page: Sequence[Sized], most_bytes: int) -> int:
    """Return how many bytes a bench may write. Raises UsageError if a page needs more.

    page: objects of a page, of all ranks.
    most_bytes: limit on the bytes that the bench reads.
    """
    needed = sum(one.nbytes for one in page)
    most = most_written(store, most_bytes // _WRITTEN_SHARE)
    if needed > most:
        raise UsageError(
            f"--write: one page has {human_size(needed)}, but a bench writes {human_size(most)} at "
            "most; give a larger --most, or free space"
        )
    return most


def timed_writes(
    store: Store, page: Sequence[Sized], *, left: pa.Table, most_bytes: int, deadline: float
) -> tuple[list[Timing], list[str]]:
    """Write batches of whole pages from one thread, then remove them, also after an interrupt.

    page: objects of a page, of all ranks.
    left: rows of pages that a killed bench has left, which are removed first.
    most_bytes: a result of `writable_bytes`.
    Returns the times, and messages about objects that could not be written or removed. Raises
    StoreUnavailable.
    """
    page_bytes = sum(one.nbytes for one in page)
    pages = min(BATCH_PAGES, most_bytes // page_bytes)
    sizes = np.tile(np.array([one.nbytes for one in page], dtype=np.int64), pages)
    if isinstance(store, RacyWrites):
        # To confirm a write, the store would read it, in the time that is measured. No server
        # writes these keys, so nothing need be confirmed.
        store.confirms_writes = False
    largest = -(-int(sizes.max()) // ALIGNMENT) * ALIGNMENT
    timings: list[Timing] = []
    written: list[pa.Table] = []
    problems = removed(store, left)
    with Arena(max(_ARENA_BYTES, largest)) as arena, attached(arena, store):
        rng = np.random.default_rng()
        arena.array[:] = np.frombuffer(rng.bytes(arena.nbytes), dtype=np.uint8)
        with deferred() as is_interrupted:  # an interrupt must leave no file half-written
            try:
                for _ in range(most_bytes // (pages * page_bytes)):
                    if timings and (is_interrupted() or time.monotonic() > deadline):
                        break
                    written.append(_rows(store, page, pages))
                    timings.append(_timed(store, written[-1], sizes, arena.nbytes, pages))
                    if failed := timings[-1].failed:
                        problems.append(f"{store.url}: {failed} objects could not be written")
                        break
            finally:
                for rows in written:
                    problems += removed(store, rows)
    return timings, problems


def _rows(store: Store, page: Sequence[Sized], pages: int) -> pa.Table:
    """Return rows of new pages. Their keys have another model and other hashes than stored keys."""
    grammar = grammar_of(store.grammar)
    affixes = []
    for spec, _ in page:
        names = spec.coordinate.names._replace(model=OWN_MODEL)
        affixes.append(grammar.affix(replace(spec.coordinate, names=names)))
    hashes = [secrets.token_hex(PAGE_DIGITS // 2) for _ in range(pages)]
    keys = [f"{before}{one}{after}" for one in hashes for before, after in affixes]
    now = pa.array([time.time_ns()] * len(keys), pa.int64())
    return pa.table({"key": pa.array([key.encode() for key in keys], pa.binary()), "mtime_ns": now})


def _timed(store: Store, rows: pa.Table, sizes: IntArray, room: int, pages: int) -> Timing:
    """Write a batch; every call writes the same bytes of the arena."""
    limits, seconds, nbytes, failed = store.limits, 0.0, 0, 0
    aligned = -(-sizes // ALIGNMENT) * ALIGNMENT
    for span in batch_spans(aligned, min(room, limits.batch_bytes), limits.batch_objects):
        part, offsets = rows.slice(span.start, span.stop - span.start), place(sizes[span])[0]
        began = time.perf_counter()
        found = store.write_from(part, offsets, sizes[span], if_absent=True)
        seconds += time.perf_counter() - began
        nbytes += int(sizes[span][found.ok].sum())
        failed += int((~found.ok).sum())
    return Timing(rank=0, cache=UNKNOWN, pages=pages, nbytes=nbytes, failed=failed, seconds=seconds)


def removed(store: Store, rows: pa.Table, step: str = "run bench --write again") -> list[str]:
    """Remove objects of a bench. Return messages about objects that could not be removed.

    step: next step in the messages.
    """
    ones = np.ones(len(rows), dtype=np.int64)
    found = in_batches(ones, store.limits, lambda span: store.delete(rows[span]))
    stays = np.flatnonzero(~np.isin(found.statuses, (Status.OK, Status.GONE)))
    if not len(stays):
        return []
    why = next(iter(found.errors.values()), "the store gives no reason")
    return [f"{store.url}: {len(stays)} objects of the bench could not be removed: {why}; {step}"]
