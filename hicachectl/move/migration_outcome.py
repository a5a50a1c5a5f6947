"""Outcome of a migration: sums over its parts, in one document and in words."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from hicachectl.move.results import Problem  # noqa: TC001 - msgspec reads it
from hicachectl.text.units import counted
from hicachectl.text.vocabulary import LOCK

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from hicachectl.move.migration import MigrationRequest

FULL = "destination full"
_COUNTS = ("pages", "objects", "bytes", "skipped", "gone", "conflicts", "failed", "moved")


class MigrationFacts(msgspec.Struct, kw_only=True):
    """Sums and messages of a migration, or of a part of it.

    groups: number of groups that the filters match. named: of these, named by --pages-from, or all.
    matched: rows of --pages-from whose group is there. unknown_keys: number of objects.
    left_out: number of groups not copied, by reason. refused: number of groups in conflict because
    servers refuse the destination's objects.
    pages to moved, resumed: see the document. complete: whether every batch was begun.
    settled: whether a further run has nothing to do.
    stopped_by: "" if nothing ended the run early.
    """

    groups: int = 0
    named: int = 0
    matched: int = 0
    unknown_keys: int = 0
    left_out: dict[str, int] = msgspec.field(default_factory=dict)
    refused: int = 0
    pages: int = 0
    objects: int = 0
    bytes: int = 0
    skipped: int = 0
    gone: int = 0
    conflicts: int = 0
    failed: int = 0
    moved: int = 0
    resumed: int = 0
    seconds: float = 0.0
    complete: bool = True
    settled: bool = True
    stopped_by: str = ""
    remarks: list[str] = msgspec.field(default_factory=list)
    problems: list[Problem] = msgspec.field(default_factory=list)


@dataclass(slots=True)
class MigrationOutcome:
    """Outcome of a migration or dry run.

    document: the command's JSON. problems: conflicts and failures. remarks: other messages.
    journal: path, if the migration is incomplete.
    """

    document: dict[str, Any]
    problems: list[Problem]
    remarks: list[str]
    journal: Path | None = None

    @property
    def all_well(self) -> bool:
        """Whether no group failed or conflicted, and the destination had room."""
        document = self.document
        troubled = document["failed"] or document["conflicts"]
        return not troubled and document["stopped_by"] != FULL


def not_begun(source: str, destination: str) -> MigrationOutcome:
    """Return the outcome of a migration between two URLs whose lock is held."""
    document: dict[str, Any] = {"source": source, "destination": destination}
    document |= dict.fromkeys(_COUNTS, 0)
    document |= {"seconds": 0.0, "resumed": 0, "complete": False, "stopped_by": LOCK}
    return MigrationOutcome({**document, "problems": []}, [], [])


def outcome_of(
    parts: Sequence[MigrationFacts],
    source: str,
    destination: str,
    request: MigrationRequest,
    nothing: str,
) -> MigrationOutcome:
    """Return the outcome of a migration between two URLs from the facts of its parts.

    nothing: why no group matches, if none does.
    """
    problems = [problem for part in parts for problem in part.problems]
    document: dict[str, Any] = {"source": source, "destination": destination}
    document |= {name: _total(parts, name) for name in _COUNTS}
    document |= {
        "seconds": round(sum(part.seconds for part in parts), 3),
        "resumed": _total(parts, "resumed"),
        "complete": all(part.complete for part in parts),
        "stopped_by": next((part.stopped_by for part in parts if part.stopped_by), None),
        "problems": [{"page": p.page, "key": p.key, "detail": p.detail} for p in problems],
    }
    said = dict.fromkeys(remark for part in parts for remark in part.remarks)
    empty = [] if _total(parts, "groups") else [nothing]
    remarks = [*empty, *_not_copied(parts, destination, request), *said]
    return MigrationOutcome(document, problems, remarks)


def _total(parts: Iterable[MigrationFacts], name: str) -> int:
    return sum(getattr(part, name) for part in parts)


def _not_copied(
    parts: Sequence[MigrationFacts], destination: str, request: MigrationRequest
) -> Iterator[str]:
    """Yield messages about pages, objects and rows that were not copied."""
    if _total(parts, "groups") and not _total(parts, "named"):
        yield "No page of SRC matches --pages-from; hicachectl ls lists its pages"
    left_out: Counter[str] = Counter()
    for part in parts:
        left_out.update(part.left_out)
    for why, count in left_out.items():
        if count:
            yield f"Not copied: {counted(count, 'page')} {why}"
    if refused := _total(parts, "refused"):
        yield (
            f"In conflict: {counted(refused, 'page')} of which {destination} has objects "
            "that plug-in servers refuse: of other weights, dtype or layout, or without a trailer; "
            "--if-exists overwrite replaces them"
        )
    if unknown := _total(parts, "unknown_keys"):
        objects = counted(unknown, "object")
        yield f"Not copied: {objects} with unknown keys; hicachectl verify lists them"
    labelled = 0 if request.pages is None else request.pages.labelled
    if unmatched := labelled - _total(parts, "matched"):
        yield f"--pages-from: {counted(unmatched, 'row')} without a matching group in SRC"
