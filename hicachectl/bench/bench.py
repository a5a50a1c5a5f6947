"""Run a bench: choose pages, time their reads, time writes, and time the steps of devices."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
import pyarrow as pa

from hicachectl.backends.capabilities import InFiles, Spreads
from hicachectl.bench.device import timed_stages
from hicachectl.bench.estimate import prefill_of
from hicachectl.bench.prompts import BreakEven, break_even_of, check_probed, timed_prompts
from hicachectl.bench.reads import CACHED, COLD, MIXED, UNKNOWN, timed_reads
from hicachectl.bench.report import (
    READ,
    WRITE,
    BenchDocument,
    BenchedPrompts,
    BenchedStore,
    BenchRow,
    Rates,
    lines,
    prompts_row,
    prompts_verdict,
    row_of,
    stage_row,
    verdict,
)
from hicachectl.bench.sample import choose, own_rows
from hicachectl.bench.writes import check_writable, most_written, timed_writes, writable_bytes
from hicachectl.device.devices import CPU, open_devices
from hicachectl.formats.errors import UsageError
from hicachectl.formats.wording import GIVE_PROFILE, needs_profile
from hicachectl.pages.scanning import take_inventory
from hicachectl.profiles.sources import agree_on_profile
from hicachectl.results import Result
from hicachectl.text.jsontext import schema_of
from hicachectl.text.units import counted
from hicachectl.text.vocabulary import DEADLINE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hicachectl.backends.base import Store
    from hicachectl.bench.reads import Timing
    from hicachectl.bench.sample import Sample
    from hicachectl.formats.profile import Profile

DEFAULT_THRESHOLD = 256  # SGLang's prefetch_threshold, in tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRequest:
    """Options of a bench.

    profile: profile of the deployment; None for the profile that a pack records. Other stores have
        no profile then.
    most_bytes: limit on the bytes of the pages chosen in each store. Writes have at most a quarter
        of these bytes.
    seconds: time for the reads of each store. The writes of each store get as much time again.
    ranks: number of ranks that read at the same time; None for as many as the keys name.
    threads: number of threads of each rank.
    prefill: number of tokens that a server computes in a second; None if not given.
    server: URL of a server whose metrics show the prefill rate; "" for none.
    device: "cpu", "cuda", or "" to time no steps.
    writes: whether to write pages.
    drop_cache: whether to drop files from the page cache before they are read.
    probe_server: whether the server computes and restores prompts of the bench; see `prompts`.
    """

    profile: Profile | None = None
    most_bytes: int = 1 << 30
    seconds: float = 30.0
    ranks: int | None = None
    threads: int = 1
    prefill: float | None = None
    server: str = ""
    device: str = ""
    writes: bool = False
    drop_cache: bool = False
    probe_server: bool = False


@dataclass(slots=True)
class _Found:
    """Results from all stores of a run."""

    stores: list[BenchedStore] = field(default_factory=list)
    rows: list[BenchRow] = field(default_factory=list)
    prompts: list[BenchedPrompts] = field(default_factory=list)
    break_even: BreakEven = field(default_factory=BreakEven)
    verdicts: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    undone: list[str] = field(default_factory=list)
    complete: bool = True


def nothing_measured(request: BenchRequest) -> Result:
    """Return the result of a bench of no store."""
    return _result(_Found(), request, page_size=None, prefill=None, seconds=0.0)


def bench(
    stores: Sequence[Store],
    request: BenchRequest,
    *,
    on_listed: Callable[[int], None] = lambda objects: None,
) -> Result:
    """Measure stores one after another.

    With `probe_server`, the server of the request must have the first store attached.

    on_listed: function that is called with the number of objects of each batch of a listing.
    Raises EmptyStore, UsageError, ProfileError, DeviceError and StoreUnavailable.
    """
    began = time.monotonic()
    found = _Found()
    profiles = [agree_on_profile(store, request.profile) for store in stores]
    for store, profile in zip(stores, profiles, strict=True):
        if request.writes:
            check_writable(store)
        if request.drop_cache and not isinstance(store, InFiles):
            raise UsageError(
                f"--drop-cache: {store.url}: its objects are not files; leave out --drop-cache"
            )
        if request.device and (profile is None or profile.inferred):
            raise UsageError(needs_profile("--device"))
    first, known = stores[0], profiles[0]
    if request.probe_server:
        if known is None or not request.server:
            raise UsageError("--probe-server: needs --server URL")
        check_probed(first, known)
    prefill = request.prefill
    if prefill is None and request.server:
        prefill, why = prefill_of(request.server)
        found.remarks += [f"{request.server}: {why}"] if why else []
    for store, profile in zip(stores, profiles, strict=True):
        _measure(store, profile, request, prefill, found, on_listed)
    if request.probe_server and known is not None:
        _probe(first, known, request, found)
    known = next((profile for profile in profiles if profile is not None), None)
    page_size = None if known is None else known.page_size
    seconds = time.monotonic() - began
    return _result(found, request, page_size=page_size, prefill=prefill, seconds=seconds)


def _result(
    found: _Found,
    request: BenchRequest,
    *,
    page_size: int | None,
    prefill: float | None,
    seconds: float,
) -> Result:
    document = BenchDocument(
        stores=found.stores,
        page_size=page_size,
        threads=request.threads,
        prefill_tokens_per_second=prefill,
        prompts=found.prompts,
        computed_faster_to_tokens=found.break_even.computed_to,
        restored_faster_from_tokens=found.break_even.restored_from,
        verdicts=found.verdicts,
        seconds=seconds,
        complete=found.complete and not found.undone,
        stopped_by=None if found.complete else DEADLINE,
        rows=found.rows,
    )
    return Result(
        document=msgspec.to_builtins(document),
        rows=pa.Table.from_pylist(found.rows, schema_of(BenchRow)),
        rows_name="rows",
        lines=lines,
        remarks=[*found.remarks, *found.undone],
        undone=found.undone,
        failed=bool(found.undone),
    )


def _measure(
    store: Store,
    profile: Profile | None,
    request: BenchRequest,
    prefill: float | None,
    found: _Found,
    on_listed: Callable[[int], None],
) -> None:
    page_tokens = None if profile is None else profile.page_size
    threshold = DEFAULT_THRESHOLD if profile is None else profile.prefetch_threshold
    rates = Rates(page_tokens, threshold, prefill)
    inventory = take_inventory(store, profile, needs_pages=True, on_batch=on_listed)
    sample = choose(
        inventory,
        most_bytes=request.most_bytes,
        ranks=request.ranks,
        short_pages=None if page_tokens is None else max(1, -(-threshold // page_tokens)),
    )
    if isinstance(store, Spreads):
        store.concurrency.limit(request.threads)
    room = writable_bytes(store, sample.page, request.most_bytes) if request.writes else 0
    timings = timed_reads(
        store,
        inventory.objects,
        sample.batches,
        threads=request.threads,
        deadline=time.monotonic() + request.seconds,
        drop_cache=request.drop_cache,
    )
    _note(store, sample, timings, found)
    for cache, some in _by_cache(timings):
        row = row_of(store.url, some, rates, step=READ, cache=cache)
        found.rows.append(row)
        said = rates._replace(prefill=None) if request.probe_server else rates
        found.verdicts += filter(None, [verdict(row, said)])
    if page_tokens is None:
        found.remarks.append(f"{store.url}: tokens are not known; {GIVE_PROFILE}")
    if request.device and profile is not None:
        device = None if request.device == CPU else open_devices((request.device,))[0]
        stages = timed_stages(store, inventory.objects, sample, profile, device)
        found.rows += [stage_row(store.url, stage) for stage in stages]
    left = inventory.objects.take(pa.array(own_rows(inventory)))
    if request.writes:
        deadline = time.monotonic() + request.seconds
        written, problems = timed_writes(
            store, sample.page, left=left, most_bytes=room, deadline=deadline
        )
        found.undone += problems
        found.rows.append(row_of(store.url, written, rates, step=WRITE, cache=None))
    elif len(left):
        found.remarks.append(
            f"{store.url}: {counted(len(left), 'object')} of a bench that was killed; bench "
            "--write removes them"
        )


def _probe(store: Store, profile: Profile, request: BenchRequest, found: _Found) -> None:
    """Let the server compute and restore prompts."""
    probed = timed_prompts(
        store,
        profile,
        request.server,
        most_bytes=most_written(store, request.most_bytes),
        seconds=request.seconds,
    )
    found.prompts += [prompts_row(store.url, times) for times in probed.times]
    if probed.times:
        found.break_even = break_even_of(probed.times)
        found.verdicts.append(prompts_verdict(store.url, probed.times, found.break_even))
        found.remarks += probed.remarks
    else:
        found.undone += probed.remarks
    found.undone += probed.undone


def _note(store: Store, sample: Sample, timings: Sequence[Timing], found: _Found) -> None:
    """Record how many pages were read, and how many objects failed or had vanished."""
    firsts = [timing for timing in timings if timing.bare_seconds is None]
    pages = sum(timing.pages for timing in firsts if timing.rank == 0)
    failed = sum(timing.failed for timing in firsts)
    if len(firsts) < sum(len(some) for some in sample.batches):
        found.complete = False
        found.remarks.append(
            f"{store.url}: {pages} of {sample.pages} chosen pages read; the time of --time-limit "
            "is over"
        )
    if failed:
        found.undone.append(
            f"{store.url}: {counted(failed, 'object')} could not be read; see hicachectl verify"
        )
    found.stores.append(
        BenchedStore(
            store=store.url,
            model=sample.deployment.names.model or None,
            page_bytes=sum(size for _, size in sample.specs),
            stored_pages=sample.stored,
            read_pages=pages,
            nbytes=sum(timing.nbytes for timing in timings),
            gone=sum(timing.gone for timing in firsts),
            failed=failed,
            ranks=len(sample.batches),
            shards=sample.shards,
        )
    )


def _by_cache(timings: Sequence[Timing]) -> Iterator[tuple[str, list[Timing]]]:
    """Yield each source of bytes, with its first reads.

    If there are repeated reads, the source CACHED comes with these in place of its first reads.
    """
    again = any(timing.bare_seconds is not None for timing in timings)
    for cache in (COLD, MIXED, CACHED, UNKNOWN):
        repeated = again and cache == CACHED
        some = [one for one in timings if one.cache == cache]
        if some := [one for one in some if (one.bare_seconds is not None) == repeated]:
            yield cache, some
