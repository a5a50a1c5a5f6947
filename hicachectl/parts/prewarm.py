"""`prewarm` in parts. All parts share one plan, and each part copies a slice of it.

After the last part, the tokens that servers can restore are counted once for the whole run.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa

from hicachectl.formats.forms import convert
from hicachectl.io.interrupts import persistent
from hicachectl.move.run_mark import RunMark
from hicachectl.move.survey import Action
from hicachectl.pages.published import refuse_unmounted
from hicachectl.parts.job import (
    CopyJob,
    Kind,
    StageResult,
    urls_of,
)
from hicachectl.parts.manifest import MANIFEST, Published
from hicachectl.parts.slices import (
    planned_pages,
    read_chains,
    read_plan,
    slice_tables,
    write_plan,
)
from hicachectl.prewarming.outcome import FinishFacts, PrewarmFacts, outcome_of
from hicachectl.prewarming.prewarm import (
    Warming,
    after,
    copy_pages,
    finish_facts,
    pages_with_problems,
    pin_pages,
    plan_prewarm,
    touch_pages,
)
from hicachectl.text.vocabulary import DEADLINE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from hicachectl.backends.base import Store
    from hicachectl.backends.disk.directory import Directory
    from hicachectl.parts.job import PartCount, PartInput, Record, RecordForm, Tables
    from hicachectl.parts.manifest import Manifest
    from hicachectl.prewarming.page_plan import PrewarmRequest
    from hicachectl.results import Result


class _Options(msgspec.Struct, kw_only=True):
    """Options that merging needs."""

    min_usable: float | None


def merge(manifest: Manifest, results: Mapping[int, Record], finish: Record | None) -> Result:
    """Return the outcome of the parts."""
    plan = convert(manifest.published.facts, PrewarmFacts, MANIFEST)
    options = convert(manifest.options, _Options, MANIFEST)
    records = [record for _, record in sorted(results.items())]
    seconds = manifest.spent_seconds + sum(record.form.seconds for record in records)
    restorable = FinishFacts(
        remarks=["Usable tokens are counted after the last part; until then they are reported as 0"]
    )
    if finish is not None:
        restorable = convert(finish.facts, FinishFacts, finish.path)
        seconds += finish.form.seconds
    elif len(results) == manifest.parts:
        restorable.remarks = ["The run is not finished; run any part again"]
    outcome = outcome_of(
        [plan, *(convert(record.facts, PrewarmFacts, record.path) for record in records)],
        restorable,
        *urls_of(manifest),
        seconds,
    )
    if finish is None:
        outcome.document["complete"] = False
    result = outcome.result(min_usable=options.min_usable, unfinished=finish is None)
    return result if finish is not None else result.with_undone(*restorable.remarks)


def undone(manifest: Manifest, record: RecordForm) -> Iterator[str]:
    """Yield messages about work that a slice has not done. `merge` gives all other messages."""
    if not record.settled:
        facts = convert(record.facts, PrewarmFacts, "The result")
        outcome = outcome_of([facts], FinishFacts(), *urls_of(manifest), 0.0)
        yield from outcome.messages
        if facts.stopped_by:
            yield f"Stopped: {facts.stopped_by}"


KIND = Kind("prewarm", {}, merge, undone, finishes=True)


class PrewarmJob(CopyJob):
    """A prewarm whose slices are copied by many processes."""

    kind = KIND

    def __init__(
        self,
        source: Store,
        destination: Store,
        request: PrewarmRequest,
        asked: Callable[[], PrewarmRequest] | None,
        inputs: Mapping[str, Any],
        min_usable: float | None,
    ) -> None:
        """Check the destination. Raises UsageError if it is a pack.

        request: request without chains and pages.
        asked: function that returns the request with chains and pages, for the lister; None if this
            process does not list.
        inputs: options that name the chains and pages, with their values.
        """
        identity = {
            **inputs,
            "--budget": request.budget_bytes,
            "--budget-pages": request.budget_pages,
            "--deadline": request.deadline_seconds,
            "--min-usable": min_usable,
            "--pin": request.options.pin,
            "--pin-ttl": request.options.pin_seconds,
            "--trailers": request.options.trailers,
        }
        super().__init__(source, destination, request, _Options(min_usable=min_usable), identity)
        self._request = request
        self._asked = asked

    def publish(
        self, folder: Directory, parts: PartCount, on_listed: Callable[[int], None]
    ) -> Published:
        """Plan for all parts. See `Job.publish`."""
        now = time.time_ns()
        assert self._asked is not None
        request = self._asked()
        on_listed(0)
        plan = plan_prewarm(Warming(self._source, self._destination, request), on_listed=on_listed)
        written = write_plan(folder, plan, request.requests, parts)
        return Published(
            listing_ns=now,
            table=written.listing.to_mapping(),
            files=written.files,
            shares=written.shares,
            facts=msgspec.to_builtins(plan.facts),
        )

    def tables(self, folder: Directory, manifest: Manifest, part: int) -> Tables:
        """Return the tables of a slice. See `Job.tables`."""
        return slice_tables(folder, manifest.published, part, self._listing(manifest))

    def work(
        self, given: PartInput, tables: Tables, on_progress: Callable[[int, int], None]
    ) -> StageResult:
        """Copy a slice. See `Job.work`."""
        destination, options = self._destination, given.options(self._request.options, self._source)
        if (seconds := self._request.deadline_seconds) is not None:
            options = replace(options, deadline=given.began + seconds)
        request = replace(self._request, options=options)
        warming = Warming(self._source, destination, request)
        RunMark(given.owner).put(destination)
        listing = self._listing(given.manifest)
        pages = planned_pages(warming, listing, tables["pages"](), tables["objects"](), asks=True)
        if not request.allow_empty:
            refuse_unmounted(self._source, pages.groups.inventory)
        best = tables["best"]()
        best = best.column("page").filter(best.column("copied")).combine_chunks()
        facts = PrewarmFacts(skipped=pages.count(Action.SKIP))
        pages.exclude_oversized(warming.options, facts)
        with persistent():
            copy_pages(warming, pages, facts, on_progress, best)
            given.sweep_attempts(destination)
        return StageResult(msgspec.to_builtins(facts), settled=facts.settled)

    def finish(
        self, folder: Directory, manifest: Manifest, results: Mapping[int, Record]
    ) -> StageResult:
        """Mark all pages as used (`touch_pages`), and count the tokens that servers can restore.

        Also pin pages if requested. See `Job.finish`.
        """
        files = manifest.published.files
        plan = convert(manifest.published.facts, PrewarmFacts, MANIFEST)
        slices = [convert(one.facts, PrewarmFacts, one.path) for one in results.values()]
        is_late = any(one.stopped_by == DEADLINE for one in slices)
        request, names = self._request, pa.array([], pa.string())
        if plan.chained:
            requests, names = read_chains(folder, files)
            request = replace(request, requests=requests)
        listing = self._listing(manifest)
        warming = Warming(self._source, self._destination, request)
        pages = planned_pages(warming, listing, *read_plan(folder, files, listing), asks=False)
        until = after(time.monotonic()) if is_late else None
        with persistent():
            touch_pages(self._destination, pages.survey, pages.order, until=until)
            without = pages_with_problems(slices)
            pin = partial(pin_pages, warming, pages)
            facts, _ = finish_facts(
                self._destination, request, pages, names, without=without, pin=pin
            )
        return StageResult(msgspec.to_builtins(facts))
