"""Results of the parts of a run, and the result of the whole run.

Tables of a result are written first, under names of their own. Then the record is published, so a
record names only whole tables.
"""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from hicachectl.formats.errors import FormatError, UsageError
from hicachectl.io.interrupts import deferred
from hicachectl.io.table_files import pieces, read_document, write_table
from hicachectl.parts.directory import PARTS, result_name, usage_errors
from hicachectl.parts.job import Record, RecordForm, kind_of
from hicachectl.parts.manifest import FORM, dump

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Any

    from hicachectl.backends.disk.directory import Directory
    from hicachectl.parts.directory import RunDirectory
    from hicachectl.parts.job import Kind, StageResult
    from hicachectl.parts.manifest import Manifest
    from hicachectl.results import Result, Shown
    from hicachectl.text.tables import Screen

FINISH = "finish"
MERGED_FILE = "merged.json"
_MOST_SPANS = 20  # most spans of parts that a message names


class RunDocument(msgspec.Struct):
    """Last members of the document of a run in parts."""

    listed: float
    parts: int
    missing_parts: list[int]


def save(
    directory: Directory,
    name: str,
    kind: Kind,
    manifest: Manifest,
    part: int,
    result: StageResult,
    began: float,
) -> RecordForm | None:
    """Write the tables of a result, publish its record and return the record.

    Return None if another attempt has published a record. If this record is not published, its
    tables are removed.
    name: file name of the record, without `.json`.
    part: see `RecordForm`.
    began: `time.monotonic()` at the start of the work.
    Raises OSError, UntrustedError, UnsupportedByBackend.
    """
    form = RecordForm(
        form=FORM,
        run=manifest.run,
        part=part,
        host=socket.gethostname(),
        ended_ns=time.time_ns(),
        seconds=time.monotonic() - began,
        settled=result.settled,
        facts=result.facts,
        tables={},
    )
    attempt = os.urandom(8).hex()  # two attempts at a part may write at once
    try:
        for table_name, table in result.tables.items():
            file_name = f"{name}-{attempt}-{table_name}.parquet"
            schema = kind.schemas[table_name]
            form.tables[table_name] = write_table(directory, file_name, pieces(table), schema)
        with deferred():  # a signal must not hide whether the published record is ours
            ours = directory.publish(f"{name}.json", dump(form))
    except BaseException:
        if not directory.has(f"{name}.json"):  # else the record may be ours
            _remove(directory, form)
        raise
    if ours:
        return form
    _remove(directory, form)
    return None


def _remove(directory: Directory, form: RecordForm) -> None:
    for file in form.tables.values():
        with suppress(OSError):
            directory.remove(file.name)


def _load(run: RunDirectory, directory: Directory, name: str, kind: Kind, next_step: str) -> Record:
    """Read a record.

    next_step: end of the message about a damaged record or table.
    Raises FormatError, UntrustedError, and OSError (FileNotFoundError if the record is missing).
    """
    form = read_document(directory, f"{name}.json", RecordForm, next_step)
    path = f"{directory.path}/{name}.json"
    return Record(form, path, next_step, run.results, kind.schemas)


def result_of(run: RunDirectory, manifest: Manifest, kind: Kind, part: int) -> Record:
    """Read the result of a part. Raises FormatError if it is damaged."""
    name = result_name(part)
    next_step = f"remove {name}.json and run part {part} again"
    with usage_errors(run.path / PARTS), run.results() as results:
        record = _load(run, results, name, kind, next_step)
    if (record.form.run, record.form.part) != (manifest.run, part):
        raise FormatError(f"{record.path}: belongs to another run or part; {next_step}")
    return record


def results_of(run: RunDirectory, manifest: Manifest, kind: Kind) -> dict[int, Record]:
    """Return the result of each part that has one."""
    parts = sorted(run.parts_with_result() & set(range(manifest.parts)))
    return {part: result_of(run, manifest, kind, part) for part in parts}


def has_all_results(run: RunDirectory, manifest: Manifest) -> bool:
    """Return whether all parts have results."""
    return run.parts_with_result() >= set(range(manifest.parts))


def is_finished(run: RunDirectory, manifest: Manifest, kind: Kind) -> bool:
    """Return whether all parts have results, and `finish` has one if the command calls it."""
    if not has_all_results(run, manifest):
        return False
    with usage_errors(run.path):
        return not kind.finishes or run.directory.has(f"{FINISH}.json")


def merge_run(run: RunDirectory) -> Result:
    """Return the result of a whole run, made from the results of its parts so far.

    Raises UsageError if the run has no manifest, FormatError for a damaged result.
    """
    manifest = run.manifest()
    if manifest is None:
        raise UsageError(f"{run.path}: has no run.json; run part 0 first, or check the path")
    kind = kind_of(manifest.command, str(run.path))
    results = results_of(run, manifest, kind)
    missing = [part for part in range(manifest.parts) if part not in results]
    finish = None
    with usage_errors(run.path):
        if not missing and run.directory.has(f"{FINISH}.json"):
            next_step = f"remove {FINISH}.json and run any part again"
            finish = _load(run, run.directory, FINISH, kind, next_step)
    merged = replace(kind.merge(manifest, results, finish), command=kind.command)
    undone = [part for part, record in results.items() if not record.form.settled]
    if undone:
        said = (
            f"{run.path}: not complete: {spans(undone)} of {manifest.parts}; to complete the "
            "work, run all parts with another --run"
        )
        merged = merged.with_undone(said)
    of_run = RunDocument(
        listed=manifest.published.listing_ns / 10**9, parts=manifest.parts, missing_parts=missing
    )
    document = merged.document | msgspec.structs.asdict(of_run)
    incomplete = ""
    if missing:
        incomplete = f"{spans(missing)} of {manifest.parts}"
        document["complete"] = False
        said = f"{run.path}: there is no result of {incomplete}; run the missing parts"
        merged = replace(merged.with_undone(said), failed=True)

    def lines(_document: dict[str, Any], screen: Screen, shown: Shown) -> Iterator[str]:
        yield from merged.lines(merged.document, screen, shown)
        if incomplete:
            yield f"Incomplete: {incomplete} without a result"

    return replace(merged, document=document, lines=lines)


def reason_to_wait(run: RunDirectory) -> str:
    """Return why a run must not be merged now.

    A run must not be merged if a part has no result, if the run is not finished, or if it was
    merged before. Return "" if the run is to be merged, or has no manifest.
    """
    manifest = run.manifest()
    if manifest is None:
        return ""
    with usage_errors(run.path):
        if run.directory.has(MERGED_FILE):
            why = f"the run of {manifest.listed} was merged before"
            return f"{run.path}: not merged, because {why}"
    missing = sorted(set(range(manifest.parts)) - run.parts_with_result())
    if missing:
        parts = f"{spans(missing)} of {manifest.parts}"
        why = f"there is no result of {parts} yet"
        return f"{run.path}: not merged, because {why}; the last part merges"
    if not is_finished(run, manifest, kind_of(manifest.command, str(run.path))):
        return f"{run.path}: not merged, because the run is not finished; run any part again"
    return ""


def refuse_merged(run: RunDirectory) -> None:
    """Raise UsageError if the run was merged before."""
    manifest = run.manifest()
    with usage_errors(run.path):
        merged = run.directory.has(MERGED_FILE)
    if manifest is not None and merged:
        raise UsageError(
            f"{run.path}: the run of {manifest.listed} was merged before; check that the parts "
            f"have a new --run each time, or merge it again with: hicachectl merge {run.path} "
            "--again"
        )


def mark_merged(run: RunDirectory) -> None:
    """Record that the run was merged, if it is finished."""
    manifest = run.manifest()
    if manifest is not None and is_finished(
        run, manifest, kind_of(manifest.command, str(run.path))
    ):
        with usage_errors(run.path):
            run.directory.publish(MERGED_FILE, b"{}\n")


def spans(parts: Sequence[int]) -> str:
    """Return parts in words, such as "parts 3, 5-9"."""
    found: list[list[int]] = []
    for part in parts:
        if found and found[-1][1] == part - 1:
            found[-1][1] = part
        else:
            found.append([part, part])
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in found]
    more = f" and {len(texts) - _MOST_SPANS} more" if len(texts) > _MOST_SPANS else ""
    noun = "part" if len(parts) == 1 else "parts"
    return f"{noun} {', '.join(texts[:_MOST_SPANS])}{more}"
