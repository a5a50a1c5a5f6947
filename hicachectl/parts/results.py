"""Plans and results of the parts of a run, and the outcome of the whole run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hicachectl.formats.errors import FormatError, UsageError
from hicachectl.parts.directory import attempts_with_result, usage_errors
from hicachectl.parts.job import kind_of
from hicachectl.parts.records import Record, RecordForm, StageResult, load, save

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    import pyarrow as pa

    from hicachectl.backends.disk.directory import Directory
    from hicachectl.parts.directory import RunDirectory
    from hicachectl.parts.job import Kind, Merged
    from hicachectl.parts.manifest import Manifest
    from hicachectl.text.tables import Screen
    from hicachectl.verification.report_text import Shown

PLAN = "plan"
FINISH = "finish"
_MOST_SPANS = 20  # named in one message


@dataclass(frozen=True, slots=True)
class Place:
    """The open directory of a part, with its plan and results."""

    run: RunDirectory
    directory: Directory
    part: int
    manifest: Manifest
    kind: Kind

    @property
    def path(self) -> Path:
        """Return the directory's path, for messages."""
        return self.run.part_path(self.part)

    def load(self, name: str) -> Record:
        """Read a record. Raises FormatError if it is damaged."""
        next_step = f"remove {name}.json beside it and run part {self.part} again"
        if name == PLAN:  # without it, the changes of an earlier attempt are unknown
            next_step = "give another --run"
        schemas, manifest = self.kind.schemas, self.manifest
        with usage_errors(self.path):
            record = load(
                self.directory, name, schemas, lambda: self.run.part(self.part), next_step
            )
        if (record.form.run, record.form.part) != (manifest.run, self.part):
            raise FormatError(f"{record.path}: belongs to another run or part; {next_step}")
        return record

    def result(self) -> Record | None:
        """Return the result of the latest attempt that has one."""
        with usage_errors(self.path):
            attempts = attempts_with_result(self.directory)
        return self.load(f"result-{attempts[-1]}") if attempts else None

    def settled(self) -> Record | None:
        """Return the part's result if it need not be done again."""
        result = self.result()
        return result if result is not None and result.form.settled else None

    def plan(self) -> StageResult | None:
        """Return the kept plan; None if there is none."""
        with usage_errors(self.path):
            kept = self.directory.has(f"{PLAN}.json")
        return self.load(PLAN).whole() if kept else None

    def keep(self, name: str, form: RecordForm, tables: Mapping[str, pa.Table]) -> bool:
        """Publish a record, unless its name exists; return whether it is ours."""
        with usage_errors(self.path):
            return save(self.directory, name, form, tables, self.kind.schemas)


def results_of(run: RunDirectory, manifest: Manifest, kind: Kind) -> dict[int, Record]:
    """Return the latest result of each part that has one."""
    found = {}
    for part in range(manifest.parts):
        with usage_errors(run.path):
            try:
                directory = run.part(part)
            except FileNotFoundError:
                continue
        with directory:
            result = Place(run, directory, part, manifest, kind).result()
        if result is not None:
            found[part] = result
    return found


def finish_name(run: RunDirectory, manifest: Manifest) -> str | None:
    """Return the name of the record that finishes the present results; None if one is missing.

    A later result of any part gives another name.
    """
    total = 0
    for part in reversed(range(manifest.parts)):  # schedulers start low parts first
        try:
            with run.part(part) as directory:
                attempts = attempts_with_result(directory)
        except FileNotFoundError:
            return None
        if not attempts:
            return None
        total += attempts[-1] + 1
    return f"{FINISH}-{total}"


def merge_run(run: RunDirectory) -> Merged:
    """Return the outcome of a whole run, from the results that are there.

    Raises UsageError if the run has no manifest, FormatError for a damaged result.
    """
    manifest = run.manifest()
    if manifest is None:
        raise UsageError(f"{run.path}: has no run.json; run a part first, or check the path")
    kind = kind_of(manifest.command, str(run.path))
    results = results_of(run, manifest, kind)
    with usage_errors(run.path):
        name = finish_name(run, manifest) if kind.finishes else None
        finished = None
        if name is not None and run.directory.has(f"{name}.json"):
            next_step = f"remove {name}.json and run any part again"
            finished = load(run.directory, name, kind.schemas, run.again, next_step)
    merged = replace(kind.merge(manifest, results, finished), command=kind.command)
    missing = [part for part in range(manifest.parts) if part not in results]
    undone = [part for part, record in results.items() if not record.form.settled]
    if undone:
        said = f"{run.path}: {_spans(undone)} of {manifest.parts}: not complete; run again"
        merged = _with_undone(merged, said)
    document = {**merged.document, "parts": manifest.parts, "missing_parts": missing}
    if not missing:
        return replace(merged, document=document)
    document["complete"] = False
    said = f"{run.path}: {_spans(missing)} of {manifest.parts}: no result; run the missing parts"

    def lines(screen: Screen, shown: Shown) -> Iterator[str]:
        yield from merged.lines(screen, shown)
        yield f"Incomplete: {_spans(missing)} of {manifest.parts} without a result"

    return replace(_with_undone(merged, said), document=document, failed=True, lines=lines)


def _with_undone(merged: Merged, said: str) -> Merged:
    return replace(merged, remarks=[said, *merged.remarks], undone=[said, *merged.undone])


def _spans(parts: Sequence[int]) -> str:
    """Return parts in words, such as "parts 3, 5-9"."""
    spans: list[list[int]] = []
    for part in parts:
        if spans and spans[-1][1] == part - 1:
            spans[-1][1] = part
        else:
            spans.append([part, part])
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in spans]
    more = f" and {len(texts) - _MOST_SPANS} more" if len(texts) > _MOST_SPANS else ""
    noun = "part" if len(parts) == 1 else "parts"
    return f"{noun} {', '.join(texts[:_MOST_SPANS])}{more}"
