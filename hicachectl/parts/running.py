"""Run one part of a divided run."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hicachectl import __version__
from hicachectl.formats.documents import shown
from hicachectl.formats.errors import HicacheError, StoreUnavailable, UsageError
from hicachectl.io.interrupts import deferred
from hicachectl.parts.directory import PARTS, result_name, usage_errors
from hicachectl.parts.job import PartInput
from hicachectl.parts.manifest import FORM, MANIFEST, Manifest
from hicachectl.parts.results import (
    FINISH,
    has_all_results,
    is_finished,
    result_of,
    results_of,
    save,
)
from hicachectl.text.units import human_age

if TYPE_CHECKING:
    from hicachectl.parts.directory import RunDirectory
    from hicachectl.parts.job import Job, PartCount, RecordForm, StageResult, Tables

    Work = Callable[[PartInput, Tables, Callable[[int, int], None]], StageResult]

_OF_THE_RUN = -1  # part number in the record of the whole run
_LOOK_SECONDS = 1.0  # longest pause between two looks for the manifest
_FIRST_LOOK_SECONDS = 0.05
_SAY_SECONDS = 60.0
_OWNER_DIGITS = 16

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class PartOutcome:
    """End of a part.

    record: the published result.
    earlier: whether another attempt did the part, on `record.host`.
    """

    record: RecordForm
    earlier: bool


def begin(
    run: RunDirectory,
    job: Job,
    parts: PartCount,
    *,
    on_listed: Callable[[int], None] = lambda objects: None,
) -> Manifest:
    """Return the manifest of a run. If there is none, first list and plan for all parts.

    on_listed: takes the number of objects listed since the last call.
    Raises UsageError if the run is finished, or was begun with other options. Raises FormatError if
    the manifest is damaged. Raises the errors of `Job.publish`.
    """
    manifest = run.manifest()
    if manifest is None:
        _list(run, job, parts, on_listed)
        manifest = run.manifest()
        if manifest is None:
            raise UsageError(f"{run.path}: {MANIFEST} was removed; run the part again")
        with usage_errors(run.path):
            run.remove_listings(besides=manifest.folder)
    _refuse_other(run, job, parts, manifest)
    return manifest


def join(
    run: RunDirectory,
    job: Job,
    parts: int,
    *,
    wait_seconds: float,
    lister: str,
    say: Say = lambda text: None,
) -> Manifest:
    """Wait until part 0 has published the manifest of a run, and return the manifest.

    lister: command line of part 0.
    say: takes a message about the wait, at once and each minute.
    Raises StoreUnavailable if the manifest is not published in time. Raises UsageError and
    FormatError for the reasons that `begin` names.
    """
    began = time.monotonic()
    next_said = 0.0
    while (manifest := run.manifest()) is None:
        waited = time.monotonic() - began
        if waited >= wait_seconds:
            raise StoreUnavailable(
                f"{run.path}: part 0 has not published {MANIFEST} within "
                f"{human_age(wait_seconds)}; run part 0: {lister}"
            )
        if waited >= next_said:
            say(f"Waiting for part 0 to list for all parts, because {run.path} has no {MANIFEST}")
            next_said += _SAY_SECONDS
        # Pauses grow with the wait. So a short wait ends soon after the manifest is published, and
        # a long wait seldom asks the file system.
        pause = min(_LOOK_SECONDS, _FIRST_LOOK_SECONDS + waited / 10)
        time.sleep(min(pause, wait_seconds - waited))
    _refuse_other(run, job, parts, manifest)
    return manifest


def run_part(
    run: RunDirectory,
    job: Job,
    manifest: Manifest,
    part: int,
    *,
    work: Work | None = None,
    on_progress: Callable[[int, int], None] = lambda new, total: None,
) -> PartOutcome:
    """Do one part of a run, unless the part has a result. Finish the run if this was the last part.

    work: function that does the part in place of `Job.work`, for example on another machine.
    on_progress: see `Job.work`.
    Raises UsageError, FormatError, and the errors of the job's methods.
    """
    began = time.monotonic()
    name = result_name(part)
    record: RecordForm | None = None
    with usage_errors(run.path / PARTS):
        results = run.results(create=True)
    with results:
        with usage_errors(run.path / PARTS):
            has_result = results.has(f"{name}.json")
            before = manifest.spent_seconds + run.since_published_ns() / 10**9
        if not has_result:
            # All attempts at a part have one mark, so that an attempt can remove what others left.
            mark = hashlib.sha256(f"{manifest.run} {part}".encode()).hexdigest()[:_OWNER_DIGITS]
            given = PartInput(
                manifest=manifest,
                part=part,
                owner=mark,
                divided=manifest.parts,
                began=began - before,
            )
            with run.listing(manifest) as folder:
                tables = job.tables(folder, manifest, part)
                result = (work or job.work)(given, tables, on_progress)
            with usage_errors(run.path / PARTS):
                record = save(results, name, job.kind, manifest, part, result, began)
    kept = record or result_of(run, manifest, job.kind, part).form
    if job.kind.finishes:
        _finish(run, job, manifest)
    return PartOutcome(kept, earlier=record is None)


def _finish(run: RunDirectory, job: Job, manifest: Manifest) -> None:
    """Call the job's `finish` if all parts have results and `finish` has none yet."""
    if is_finished(run, manifest, job.kind) or not has_all_results(run, manifest):
        return
    began = time.monotonic()
    with run.listing(manifest) as folder:
        result = job.finish(folder, manifest, results_of(run, manifest, job.kind))
    with usage_errors(run.path):
        save(run.directory, FINISH, job.kind, manifest, _OF_THE_RUN, result, began)


def _list(run: RunDirectory, job: Job, parts: PartCount, on_listed: Callable[[int], None]) -> None:
    """List and plan. Publish the manifest, unless another process publishes a manifest first."""
    began = time.monotonic()
    lister = os.urandom(_OWNER_DIGITS // 2).hex()
    try:
        with usage_errors(run.path), run.make_listing(lister) as folder:
            published = job.publish(folder, parts, on_listed)
            manifest = Manifest(
                form=FORM,
                version=__version__,
                run=lister,
                command=job.kind.command,
                identity=_identity(job, len(published.shares)),
                options=job.options,
                spent_seconds=time.monotonic() - began,
                folder=f"listing-{lister}",
                published=published,
            )
            with deferred():  # a signal must not hide whether the published manifest is ours
                run.publish_manifest(manifest)
    except HicacheError:
        # If there is a manifest, the process that published it may have removed the tables of this
        # process, and so caused the error.
        if run.manifest() is None:
            raise
    finally:
        run.remove_unpublished(lister)


def _refuse_other(run: RunDirectory, job: Job, parts: PartCount, manifest: Manifest) -> None:
    """Raise UsageError if a run was not begun with the job's options, or is finished."""
    mine = _identity(job, manifest.parts if callable(parts) else parts)
    mine = {"command": job.kind.command, **mine}
    theirs = {"command": manifest.command, **manifest.identity}
    for name in dict.fromkeys([*mine, *theirs]):
        if mine.get(name) != theirs.get(name):
            raise UsageError(
                f"{run.path}: was begun with {name} {_text(theirs.get(name))}, but this command "
                f"has {_text(mine.get(name))}; give the same options, or another --run"
            )
    if is_finished(run, manifest, job.kind):
        raise UsageError(
            f"{run.path}: the run of {manifest.listed} is finished; give a new --run, such as "
            f"--run {run.path.parent}/$(date +%F), or print this run with: hicachectl merge "
            f"{run.path}"
        )


def _text(value: Any) -> str:
    return "none" if value is None else value if isinstance(value, str) else shown(value)


def _identity(job: Job, parts: int) -> dict[str, Any]:
    """Return a job's identity as read from JSON, with the number of parts."""
    identity: dict[str, Any] = json.loads(json.dumps({"parts": parts, **job.identity}))
    return identity
