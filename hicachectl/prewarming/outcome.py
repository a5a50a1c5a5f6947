"""Outcome of a prewarm, made of its plan, the copied slices and the final count.

In a run in parts, each part copies one slice of the plan.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypedDict

import msgspec
import numpy as np
import pyarrow as pa
from msgspec import UNSET, UnsetType

from hicachectl.formats.arrays import Count  # noqa: TC001 - msgspec reads it
from hicachectl.formats.errors import StoreUnavailable
from hicachectl.move.results import (
    CopyFacts,
    Problem,
    ProblemRow,
    problem_lines,
    problem_rows,
    total,
)
from hicachectl.pages.naming import DeploymentDocument, deployment_text
from hicachectl.prewarming.through_server import PulledServer  # noqa: TC001 - hints are read
from hicachectl.requests.measuring import failed_text, passes, served_share, served_text
from hicachectl.results import Result
from hicachectl.text.units import counted, human_size, minute
from hicachectl.text.vocabulary import BUDGET, DEADLINE, FULL

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from hicachectl.formats.arrays import IntArray
    from hicachectl.prewarming.through_server import ThroughServer
    from hicachectl.results import Shown
    from hicachectl.text.tables import Screen

_PLAN = "plan"
EVICTS = "destination evicts"
# Next step for each reason for an early end, if --min-usable failed.
_NEXT_STEPS = {
    BUDGET: "give a larger --budget or --budget-pages",
    DEADLINE: "give a later --deadline",
    FULL: "enlarge the destination",
    EVICTS: "enlarge the destination",
}
_OTHER_STEP = "look for these pages in another source"
# Reasons for an early end. If a run has several, the first in this order counts.
_REASONS = (FULL, EVICTS, DEADLINE)


class PlannedPage(TypedDict):
    """Row for a page that a dry run would copy."""

    page: str
    parent: str | None
    depth: int
    bytes: int | None


class PrewarmDocument(msgspec.Struct, kw_only=True):
    """Document of `prewarm`."""

    destination: str
    source: str | None
    requested_pages: int
    already_there: int
    copied_pages: int
    bytes: int
    missing_pages: int
    usable_tokens: int
    served_tokens: int | None
    requested_tokens: int
    deployment: DeploymentDocument | None
    not_pinned: int
    pinned_until: float | None
    gone: int
    failed: int
    seconds: float
    complete: bool
    stopped_by: str | None
    problems: list[ProblemRow]
    attempts: int | UnsetType = UNSET
    opened_anyway: bool | UnsetType = UNSET
    plan: list[PlannedPage] | UnsetType = UNSET
    pulled: list[PulledServer] | UnsetType = UNSET


class PrewarmFacts(CopyFacts, kw_only=True):
    """Sums and messages of a plan, of a copied slice of it, or of both.

    chained: whether the prefixes of the pages are known.
    requested: number of requested pages.
    skipped: number of requested pages that the source could give and the destination has.
    missing: number of requested pages that cannot be restored from the source.
    requested_tokens: tokens of all chains, or of the pages if there are no chains.
    not_pinned: number of pages that --pin cannot pin, because the destination had them, at least in
        part, and its master pins only new objects.
    cut: whether the budget excludes pages.
    """

    chained: bool = True
    requested: Count = 0
    missing: Count = 0
    requested_tokens: Count = 0
    not_pinned: Count = 0
    cut: bool = False


class FinishFacts(msgspec.Struct, kw_only=True):
    """Counts of the tokens and pages that servers can restore from the destination after the run.

    usable_tokens: usable tokens of all chains, or of the pages if there are no chains.
    served_tokens: tokens of all chains that servers fetch; None if the prefixes of the pages are
        unknown.
    only_there: number of requested pages that only the destination has.
    not_pinned: number of pages that --pin did not pin, although the destination has them.
    pinned_until: Unix seconds at which the pins end; None without pins, or if each copy was pinned
        by its write.
    deployment: the deployment for which tokens are counted; see `profile_document`.
    """

    usable_tokens: Count = 0
    served_tokens: Count | None = None
    only_there: Count = 0
    not_pinned: Count = 0
    pinned_until: float | None = None
    deployment: DeploymentDocument | None = None
    remarks: list[str] = msgspec.field(default_factory=list)


@dataclass(slots=True)
class PrewarmOutcome:
    """Result of a run or a dry run.

    document: members of `PrewarmDocument`.
    problems: failed or conflicting pages.
    usable_pages: [chains] number of pages that servers can restore; empty without chains.
    plan: pages to copy, best first, with columns as in `PlannedPage`; None without a plan.
    interruption: exception that ended the copying, such as KeyboardInterrupt. It is raised after
        the report.
    """

    document: dict[str, Any]
    problems: list[Problem]
    remarks: list[str]
    usable_pages: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    plan: pa.Table | None = None
    interruption: BaseException | None = None

    def interrupt(self, by: BaseException) -> None:
        """Record that a signal ended the run early."""
        self.interruption = by
        reason = "interrupted" if isinstance(by, KeyboardInterrupt) else "terminated"
        self.document |= {"complete": False, "stopped_by": reason}

    def add_pulls(self, servers: Iterable[ThroughServer], seconds: float) -> None:
        """Add the pulls of live servers. seconds: duration of the run, with the pulls."""
        document = self.document
        document["pulled"] = [server.document() for server in servers]
        document["seconds"] = round(seconds, 3)
        if any(not server["complete"] and not server["error"] for server in document["pulled"]):
            document["stopped_by"] = document["stopped_by"] or DEADLINE
        document["complete"] &= all(server["complete"] for server in document["pulled"])

    @property
    def messages(self) -> list[str]:
        """The remarks and the first problems."""
        return [*self.remarks, *problem_lines(self.problems, self.document["failed"])]

    def result(
        self, *, min_usable: float | None = None, dry_run: bool = False, unfinished: bool = False
    ) -> Result:
        """Return the result of the command.

        min_usable: least share of usable tokens; None for no limit.
        unfinished: whether usable tokens are not counted yet, as the remarks explain.
        """
        document = self.document
        troubles = list(problem_lines(self.problems, document["failed"]))
        gate = [] if unfinished else self._gate(min_usable, dry_run=dry_run)
        failed = bool(gate) or unfinished or (self._has_failures and not dry_run)
        summary = self._summary(dry_run=dry_run)
        cut = failed or document["stopped_by"] not in (None, BUDGET)
        rows = pa.Table.from_pylist([_row(document)])
        if dry_run and self.plan is not None:
            document, rows = {**document, _PLAN: None}, self.plan
        return Result(
            document=document,
            rows=rows,
            rows_name=_PLAN,
            lines=_lines,
            remarks=[*self.messages, summary, *gate],
            undone=[*troubles, *([summary] if cut else []), *gate],
            failed=failed,
            ending=self._ending,
            dry_run=dry_run,
        )

    @property
    def _has_failures(self) -> bool:
        """Whether pages or servers failed, or the destination was full."""
        document = self.document
        servers = document.get("pulled", ())
        failed = bool(document["failed"]) or document["stopped_by"] == FULL
        return failed or any(server["failed"] or server["error"] for server in servers)

    @property
    def _ending(self) -> BaseException | None:
        """The exception to raise after the report: a signal, or servers that were lost."""
        if self.interruption is not None:
            return self.interruption
        lost = [server["error"] for server in self.document.get("pulled", ()) if server["error"]]
        return StoreUnavailable("; ".join(lost)) if lost else None

    def _gate(self, min_usable: float | None, *, dry_run: bool) -> list[str]:
        """Return the message of a failed --min-usable in a list; empty if it passed.

        A dry run knows only the share before the copy, so it fails only if nothing was requested.
        """
        if min_usable is None or passes(self.document, min_usable):
            return []
        if dry_run and served_share(self.document) is not None:
            return []
        document = self.document
        step = _NEXT_STEPS.get(document["stopped_by"], _OTHER_STEP)
        if document["source"] and document["missing_pages"] and step == _OTHER_STEP:
            lacks = counted(document["missing_pages"], "requested page")
            source = document["source"]
            step = f"{source} cannot restore {lacks}, so no further run copies them; {step}"
        return [failed_text(self.document, min_usable, f"{step}, or give a lower share")]

    def _summary(self, *, dry_run: bool) -> str:
        """Return the outcome as one line."""
        document = self.document
        parts = [
            f"{counted(document['copied_pages'], 'page')} {'to copy' if dry_run else 'copied'}, "
            f"{human_size(document['bytes'])}",
            f"{document['already_there']} already in the destination",
            f"{document['missing_pages']} cannot be restored from the source",
            served_text(document, now=dry_run),
        ]
        if (until := document["pinned_until"]) is not None:
            parts.append(f"pinned until {minute(int(until * 1e9))} UTC")
        if document["not_pinned"]:
            parts.append(f"{document['not_pinned']} not pinned")
        if document["stopped_by"]:
            parts.append(f"stopped: {document['stopped_by']}")
        return "; ".join(parts)


def _lines(document: dict[str, Any], _screen: Screen, _shown: Shown) -> Iterator[str]:
    """Yield the lines of the `table` format."""
    for name, value in _row(document).items():
        if value is not None:
            yield f"{name.replace('_', ' ')}: {value}"


def _row(document: dict[str, Any]) -> dict[str, Any]:
    deployment = document["deployment"]
    row = {**document, "deployment": deployment and deployment_text(deployment)}
    for name in ("problems", "pulled", _PLAN):
        row.pop(name, None)
    return row


def outcome_of(
    parts: Sequence[PrewarmFacts],
    finish: FinishFacts,
    source: str | None,
    destination: str,
    seconds: float,
) -> PrewarmOutcome:
    """Return the outcome of a plan and its copied slices. source, destination: URLs."""
    problems = [problem for part in parts for problem in part.problems]
    reasons = [part.stopped_by for part in parts]
    cut = any(part.cut for part in parts)
    reason = next((one for one in _REASONS if one in reasons), BUDGET if cut else None)
    nbytes = total(parts, "bytes")
    document = PrewarmDocument(
        destination=destination,
        source=source,
        requested_pages=total(parts, "requested"),
        already_there=total(parts, "skipped") + finish.only_there,
        copied_pages=total(parts, "pages"),
        bytes=nbytes,
        missing_pages=total(parts, "missing") - finish.only_there,
        usable_tokens=finish.usable_tokens,
        served_tokens=finish.served_tokens,
        requested_tokens=total(parts, "requested_tokens"),
        deployment=finish.deployment,
        not_pinned=total(parts, "not_pinned") + finish.not_pinned,
        pinned_until=finish.pinned_until,
        gone=total(parts, "gone"),
        failed=total(parts, "failed") + total(parts, "conflicts"),
        seconds=round(seconds, 3),
        complete=reason is None,
        stopped_by=reason,
        problems=problem_rows(problems),
    )
    remarks = [*finish.remarks, *(remark for part in parts for remark in part.remarks)]
    if reason == EVICTS:
        remarks.append(
            f"{destination}: evicts newly written objects; it holds about "
            f"{human_size(nbytes)} of the requested pages, so set --budget to this size"
        )
    return PrewarmOutcome(msgspec.to_builtins(document), problems, list(dict.fromkeys(remarks)))


def nothing_copied(source: str | None, destination: str) -> PrewarmOutcome:
    """Return the outcome of a run that has copied nothing. source, destination: URLs."""
    return outcome_of([], FinishFacts(), source, destination, 0.0)
