"""Run one part of a divided run."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hicachectl import __version__
from hicachectl.formats.errors import UsageError
from hicachectl.io.interrupts import deferred
from hicachectl.parts.claims import Claim, owners_before
from hicachectl.parts.directory import usage_errors
from hicachectl.parts.job import PartInput
from hicachectl.parts.manifest import FORM, Manifest, refuse_other
from hicachectl.parts.records import RecordForm, save
from hicachectl.parts.results import FINISH, PLAN, Place, finish_name, results_of

if TYPE_CHECKING:
    from hicachectl.parts.directory import RunDirectory
    from hicachectl.parts.job import Job, PartCount
    from hicachectl.parts.records import StageResult

_OF_THE_RUN = -1  # in place of a part

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class PartOutcome:
    """How a run of a part ended. earlier: the part was settled before, on `record.host`."""

    record: RecordForm
    earlier: bool


@dataclass(frozen=True, slots=True)
class Begun:
    """A run whose listing is published. since: monotonic time, not before the listing began."""

    manifest: Manifest
    since: float


def begin(
    run: RunDirectory,
    job: Job,
    parts: PartCount,
    *,
    on_listed: Callable[[int], None] = lambda objects: None,
    say: Say = lambda text: None,
) -> Begun:
    """Return the manifest of a run; if there is none, list and plan for all parts.

    on_listed: takes the number of new objects. say: takes remarks, such as for whom this process
    waits. Raises UsageError if the run was begun with other options, FormatError for a damaged
    manifest, and as `Job.publish`.
    """
    since = time.monotonic()
    manifest = run.manifest()
    if manifest is None:
        with usage_errors(run.path):
            claim = Claim.take(
                run.directory,
                "claim",
                done=run.has_manifest,
                on_wait=lambda host: say(f"Waiting for the listing of {host}"),
            )
        if claim is not None:
            with claim:
                if not run.has_manifest():
                    _publish(run, job, claim, parts, on_listed)
        else:
            since = time.monotonic()
        manifest = run.manifest()
        if manifest is None:
            raise UsageError(f"{run.path}: run.json was removed; run the part again")
    else:
        since = time.monotonic()
    mine = _identity(job, manifest.parts if callable(parts) else parts)
    refuse_other(manifest, job.kind.command, mine, str(run.path))
    with usage_errors(run.path):
        run.remove_listings(besides=manifest.folder)
    return Begun(manifest, since)


def run_part(
    run: RunDirectory,
    job: Job,
    begun: Begun,
    part: int,
    *,
    on_progress: Callable[[int, int], None] = lambda new, total: None,
    say: Say = lambda text: None,
) -> PartOutcome:
    """Do one part of a run, unless it is settled; after the last one, finish the run.

    on_progress: takes new and total bytes. say: takes remarks. Raises UsageError, FormatError,
    ClaimLostError, and as the methods of the job.
    """
    with usage_errors(run.part_path(part)):
        directory = run.part(part, create=True)
    with directory:
        place = Place(run, directory, part, begun.manifest, job.kind)
        outcome = _settle(place, job, begun, on_progress, say)
    if job.kind.finishes:
        _finish(run, job, begun.manifest, say)
    return outcome


def _finish(run: RunDirectory, job: Job, manifest: Manifest, say: Say) -> None:
    """Call the job's `finish` if all parts have results and none has finished them yet."""
    with usage_errors(run.path):
        name = finish_name(run, manifest)
        if name is None:
            return
        claim = Claim.take(
            run.directory,
            f"{FINISH}.claim",
            done=lambda: run.directory.has(f"{name}.json"),
            on_wait=lambda host: say(f"Waiting for {host}, which finishes the run"),
        )
    if claim is None:
        return
    with claim:
        began = time.monotonic()
        with run.listing(manifest) as folder:
            result = job.finish(folder, manifest, results_of(run, manifest, job.kind))
        claim.check()
        form = _form(manifest, _OF_THE_RUN, claim, result, began)
        with usage_errors(run.path):  # keeps a record that appeared since the last look
            save(run.directory, name, form, result.tables, job.kind.schemas)


def _publish(
    run: RunDirectory,
    job: Job,
    claim: Claim,
    parts: PartCount,
    on_listed: Callable[[int], None],
) -> None:
    """List and plan, and publish the manifest unless another process has."""
    began = time.monotonic()

    def listed(objects: int) -> None:
        claim.check()
        on_listed(objects)

    try:
        with usage_errors(run.path), run.make_listing(claim.owner) as folder:
            published = job.publish(folder, parts, listed)
            manifest = Manifest(
                form=FORM,
                version=__version__,
                run=claim.owner,
                command=job.kind.command,
                identity=_identity(job, len(published.shares)),
                options=job.options,
                spent_seconds=time.monotonic() - began,
                folder=f"listing-{claim.owner}",
                published=published,
            )
            claim.check()
            with deferred():  # a signal must not hide whose manifest it is
                run.publish_manifest(manifest)
    except BaseException:
        with suppress(OSError):
            if not run.has_manifest():  # else it may be ours
                run.remove_listing(claim.owner)
        raise


def _identity(job: Job, parts: int) -> dict[str, Any]:
    """Return a job's identity as read from JSON, with the number of parts."""
    identity: dict[str, Any] = json.loads(json.dumps({"parts": parts, **job.identity}))
    return identity


def _settle(
    place: Place, job: Job, begun: Begun, on_progress: Callable[[int, int], None], say: Say
) -> PartOutcome:
    """Do a part unless it is settled; wait for another process that is doing it."""
    with usage_errors(place.path):
        claim = Claim.take(
            place.directory,
            "claim",
            done=lambda: place.settled() is not None,
            on_wait=lambda host: say(f"Waiting for {host}, which works on part {place.part}"),
        )
    with claim or nullcontext():
        settled = place.settled()  # maybe only since the last look
        if settled is not None:
            return PartOutcome(settled.form, earlier=True)
        if claim is None:
            raise UsageError(f"{place.path}: its result was removed; run the part again")
        return PartOutcome(_attempt(place, job, begun, claim, on_progress), earlier=False)


def _attempt(
    place: Place,
    job: Job,
    begun: Begun,
    claim: Claim,
    on_progress: Callable[[int, int], None],
) -> RecordForm:
    """Plan, work and publish the result of one attempt."""
    began = time.monotonic()
    manifest, attempt = begun.manifest, claim.attempt

    def progressed(new: int, total: int) -> None:
        claim.check()
        on_progress(new, total)

    with usage_errors(place.path):
        earlier = owners_before(place.directory, "claim", attempt)
        since_published = claim.taken_ns - place.run.published_ns()
    before = manifest.spent_seconds + max(since_published, 0) / 10**9
    with place.run.listing(manifest) as folder:
        given = PartInput(
            manifest=manifest,
            part=place.part,
            attempt=attempt,
            owner=claim.owner,
            earlier=earlier,
            tables=job.tables(folder, manifest, place.part),
            plan=None,
            divided=manifest.parts,
            parts_here=1,
            seconds_of=lambda limit: limit / manifest.parts,
            age=lambda: max(before + time.monotonic() - began, time.monotonic() - begun.since),
            check=claim.check,
        )
        if job.plans:
            plan = _kept_plan(place, job, given, claim, began, progressed)
            given = replace(given, plan=plan)
        result = job.work(given, progressed)
    claim.check()
    form = _form(manifest, place.part, claim, result, began)
    if result.planned:
        of_plan = place.load(PLAN).form.tables
        form.tables.update((name, of_plan[name]) for name in result.planned)
    place.keep(f"result-{attempt}", form, result.tables)
    return form


def _kept_plan(
    place: Place,
    job: Job,
    given: PartInput,
    claim: Claim,
    began: float,
    on_progress: Callable[[int, int], None],
) -> StageResult:
    """Return the part's plan: the first one that was kept, or a new one."""
    kept = place.plan()
    if kept is None:
        plan = job.plan(given, on_progress)
        claim.check()
        form = _form(given.manifest, given.part, claim, plan, began)
        if place.keep(PLAN, form, plan.tables):
            return plan
        kept = place.plan()
        if kept is None:
            raise UsageError(f"{place.path}: its plan was removed; give another --run")
    return kept


def _form(
    manifest: Manifest, part: int, claim: Claim, result: StageResult, began: float
) -> RecordForm:
    return RecordForm(
        form=FORM,
        run=manifest.run,
        part=part,
        attempt=claim.attempt,
        owner=claim.owner,
        host=claim.host,
        seconds=time.monotonic() - began,
        settled=result.settled,
        facts=result.facts,
        tables={},
    )
