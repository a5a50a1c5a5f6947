"""The document of a bench, its rows, and its lines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

import msgspec
import numpy as np
import pyarrow as pa

from hicachectl.bench.estimate import cost_of
from hicachectl.bench.reads import CACHED, COLD, MIXED, UNKNOWN
from hicachectl.text.tables import table_lines
from hicachectl.text.terminal import escape_controls
from hicachectl.text.units import human_size

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hicachectl.bench.device import Stage
    from hicachectl.bench.prompts import BreakEven, PromptTimes
    from hicachectl.bench.reads import Timing
    from hicachectl.results import Shown
    from hicachectl.text.tables import Screen

READ, WRITE = "read", "write"
# Where the bytes of reads come from, as parts of a sentence.
SOURCES = {
    COLD: "not from the page cache of this host",
    MIXED: "from the disk and from memory",
    CACHED: "from memory, not the disk",
    UNKNOWN: "from the store, perhaps from memory",
}


class BenchRow(TypedDict):
    """Row of reads from one source, of writes, or of a step over objects of one pool."""

    store: str
    step: str
    cache: str | None
    pool: str | None
    batches: int
    pages_per_second: float | None
    bytes_per_second: float
    tokens_per_second: float | None
    p50_seconds: float
    p95_seconds: float
    p99_seconds: float
    restore_10k_seconds: float | None
    restore_100k_seconds: float | None
    share_of_bare: float | None
    faster_from_tokens: int | None


class BenchedPrompts(TypedDict):
    """Row of prompts of one length that a server computed and restored."""

    store: str
    tokens: int
    prompts: int
    computed_seconds: float
    restored_seconds: float


class BenchedStore(TypedDict):
    """Extent of the reads of one store."""

    store: str
    model: str | None
    page_bytes: int
    stored_pages: int
    read_pages: int
    nbytes: int
    gone: int
    failed: int
    ranks: int
    shards: int


class BenchDocument(msgspec.Struct, kw_only=True):
    """Document of `bench`."""

    stores: list[BenchedStore]
    page_size: int | None
    threads: int
    prefill_tokens_per_second: float | None
    prompts: list[BenchedPrompts]
    computed_faster_to_tokens: int | None
    restored_faster_from_tokens: int | None
    verdicts: list[str]
    seconds: float
    complete: bool
    stopped_by: str | None
    rows: list[BenchRow]


class Rates(NamedTuple):
    """Figures that turn times of pages into times of prompts.

    page_tokens: number of tokens of a page; None if unknown.
    threshold: fewest tokens that servers restore.
    prefill: number of tokens that a server computes in a second; None if unknown.
    """

    page_tokens: int | None
    threshold: int
    prefill: float | None


def row_of(
    store: str, timings: Sequence[Timing], rates: Rates, *, step: str, cache: str | None
) -> BenchRow:
    """Return the row of batches with the same step and source."""
    ranks: dict[int, list[Timing]] = {}
    for timing in timings:
        ranks.setdefault(timing.rank, []).append(timing)
    # A prefix is restored when the last rank has it.
    slowest = max(sum(one.seconds for one in some) for some in ranks.values())
    pages = min(sum(one.pages for one in some) for some in ranks.values())
    full = max(timing.pages for timing in timings)
    latencies = [timing.seconds for timing in timings if timing.pages == full]
    row = _row(store, step, sum(timing.nbytes for timing in timings) / slowest, latencies)
    row |= {"cache": cache, "pages_per_second": pages / slowest}
    # Both loops pay for each call as well as for each page. So short batches have another share
    # than full batches, and do not count.
    shares = [
        one.bare_seconds / one.seconds for one in timings if one.bare_seconds and one.pages == full
    ]
    if shares:
        row["share_of_bare"] = float(np.median(shares))
    if (tokens := rates.page_tokens) is None:
        return row
    row["tokens_per_second"] = pages * tokens / slowest
    if step == READ:
        cost = cost_of(timings)
        row["restore_10k_seconds"] = cost.seconds(-(-10_000 // tokens))
        row["restore_100k_seconds"] = cost.seconds(-(-100_000 // tokens))
        if rates.prefill is not None:
            first = cost.faster_from(tokens, rates.threshold, rates.prefill)
            row["faster_from_tokens"] = first
    return row


def stage_row(store: str, stage: Stage) -> BenchRow:
    """Return the row of a step over objects of one pool."""
    row = _row(store, stage.name, stage.nbytes / max(stage.seconds, 1e-9), [stage.seconds])
    return row | {"pool": stage.pool}


def _row(store: str, step: str, rate: float, latencies: Sequence[float]) -> BenchRow:
    """Return a row with the members that every row has."""
    p50, p95, p99 = (float(one) for one in np.percentile(latencies, (50, 95, 99)))
    return BenchRow(
        store=store,
        step=step,
        cache=None,
        pool=None,
        batches=len(latencies),
        pages_per_second=None,
        bytes_per_second=rate,
        tokens_per_second=None,
        p50_seconds=p50,
        p95_seconds=p95,
        p99_seconds=p99,
        restore_10k_seconds=None,
        restore_100k_seconds=None,
        share_of_bare=None,
        faster_from_tokens=None,
    )


def verdict(row: BenchRow, rates: Rates) -> str:
    """Return in one sentence whether reads are faster than computing; "" if tokens are unknown."""
    if rates.page_tokens is None:
        return ""
    said = f"{row['store']}: {row['tokens_per_second']:,.0f} tokens/s {SOURCES[str(row['cache'])]}"
    if rates.prefill is None:
        return said
    first = row["faster_from_tokens"]
    if first is None:
        which = "computing is faster than reading for every prompt"
    elif first <= max(1, -(-rates.threshold // rates.page_tokens)) * rates.page_tokens:
        which = f"reading is faster for every prompt that servers restore (from {first:,} tokens)"
    else:
        which = f"reading is faster for prompts from {first:,} tokens on"
    if first is not None:
        which += "; the server adds time to reading (--probe-server)"
    return f"{said}, prefill {rates.prefill:,.0f} tokens/s: {which}"


def prompts_row(store: str, times: PromptTimes) -> BenchedPrompts:
    """Return the row of prompts of one length."""
    return BenchedPrompts(
        store=store,
        tokens=times.tokens,
        prompts=len(times.computed),
        computed_seconds=min(times.computed),
        restored_seconds=min(times.restored),
    )


def prompts_verdict(store: str, times: Sequence[PromptTimes], break_even: BreakEven) -> str:
    """Return in one sentence which prompts a server restores faster than it computes them."""
    computed_to, restored_from = break_even
    longest = times[-1].tokens
    if restored_from is not None:
        if restored_from == times[0].tokens:
            which = f"every prompt that servers restore (from {restored_from:,} tokens)"
        else:
            which = f"prompts from {restored_from:,} tokens on"
        if computed_to is not None:
            which += f", and slower up to {computed_to:,} tokens"
        elif restored_from > times[0].tokens:
            which += "; shorter prompts take as long either way"
        said = f"restoring is faster than computing for {which}"
    elif computed_to is not None:
        said = f"computing is faster than restoring for prompts up to {computed_to:,} tokens"
        if computed_to < longest:
            said += f"; longer prompts, up to {longest:,} tokens, take as long either way"
    else:
        said = f"prompts up to {longest:,} tokens take as long to restore as to compute"
    return f"{store}: {said}, by the server's own times"


def lines(document: dict[str, Any], screen: Screen, _shown: Shown) -> Iterator[str]:
    """Yield the lines of the `table` format."""
    several = len(document["stores"]) > 1
    yield from table_lines(_for_people(document["rows"], several), screen)
    for one in document["stores"]:
        ranks = f"{one['ranks']} ranks" if one["ranks"] > 1 else "1 rank"
        yield (
            f"{escape_controls(one['store'])}: {one['read_pages']:,} of {one['stored_pages']:,} "
            f"whole pages read, {human_size(one['nbytes'])}, by {ranks} of {one['shards']} in the "
            f"keys, {document['threads']} thread(s) each"
        )
    for one in document["prompts"]:
        yield (
            f"{escape_controls(one['store'])}: prompts of {one['tokens']:,} tokens: computed in "
            f"{one['computed_seconds'] * 1e3:.1f} ms, restored in "
            f"{one['restored_seconds'] * 1e3:.1f} ms"
        )
    yield from map(escape_controls, document["verdicts"])


def _for_people(rows: Sequence[BenchRow], several: bool) -> pa.Table:
    """Return the text columns of rows; ">" marks right-aligned columns."""

    def column(name: str, form: str, scale: float = 1.0) -> pa.Array:
        values = [row[name] for row in rows]  # type: ignore[literal-required]
        texts = [None if value is None else form.format(value * scale) for value in values]
        return pa.array(texts, pa.string())

    columns = {
        "step": pa.array([row["step"] for row in rows]),
        "from": pa.array([row["cache"] or row["pool"] for row in rows], pa.string()),
        ">batches": column("batches", "{:.0f}"),
        ">pages/s": column("pages_per_second", "{:,.0f}"),
        ">GB/s": column("bytes_per_second", "{:.2f}", 1e-9),
        ">p50 ms": column("p50_seconds", "{:.1f}", 1e3),
        ">p95 ms": column("p95_seconds", "{:.1f}", 1e3),
        ">p99 ms": column("p99_seconds", "{:.1f}", 1e3),
        ">10k tokens": column("restore_10k_seconds", "{:.3f} s"),
        ">100k tokens": column("restore_100k_seconds", "{:.3f} s"),
        ">of bare": column("share_of_bare", "{:.2f}"),
    }
    stores = {"store": pa.array([row["store"] for row in rows])} if several else {}
    return pa.table({**stores, **columns})
