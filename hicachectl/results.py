"""Result of a command, with its document, its messages, and how it ends."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hicachectl.text.units import counted
from hicachectl.text.vocabulary import BUDGET, LOCK

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    import pyarrow as pa

    from hicachectl.backends.disk.permissions import Permissions
    from hicachectl.text.tables import Screen

DEFAULT_LIMIT = 20


@dataclass(frozen=True, slots=True)
class Shown:
    """Extent of a table of findings.

    limit: most groups of findings to show.
    every: whether to show a line for each finding instead of groups.
    """

    limit: int = DEFAULT_LIMIT
    every: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Result of a command, from one process or from all parts of a run.

    document: members of the JSON document.
    rows: table of the rows that formats such as jsonl print, one row a line.
    rows_name: member of the document that the rows replace. A document without this member has no
        rows in JSON.
    lines: function that returns the lines of the `table` format. It takes the document, the screen,
        and the extent of a table of findings.
    remarks: messages, in the order of printing.
    undone: messages about work that was not done, which --quiet keeps. Some may be in `remarks`,
        too.
    changes: messages about changes of the store, which --quiet keeps. Some may be in `remarks`,
        too.
    failed: whether the run failed, for example because of findings or failed objects. The exit
        status is then 4, unless `excused` or `ending` decides otherwise.
    ending: exception to raise after the result was written. It decides the exit status.
    excused: whether the exit status is 0 although the run failed.
    dry_run: whether the command was asked to change nothing.
    command: name of the command, if the result is of a run in parts; else "".
    write_catalog: function that writes the digests of a run in parts to a file. It takes the path,
        readable_by and allow_shrink, and returns what `save_catalog` returns. None if the run
        recorded no digests.
    """

    document: dict[str, Any]
    rows: pa.Table
    rows_name: str
    lines: Callable[[dict[str, Any], Screen, Shown], Iterator[str]]
    remarks: Sequence[str] = ()
    undone: Sequence[str] = ()
    changes: Sequence[str] = ()
    failed: bool = False
    ending: BaseException | None = None
    excused: bool = False
    dry_run: bool = False
    command: str = ""
    write_catalog: Callable[[Path, Permissions, bool], str] | None = None

    @property
    def succeeded(self) -> bool:
        """Whether the run did its work, so that the exit status is 0."""
        return not self.failed and self.ending is None

    def with_undone(self, *texts: str) -> Result:
        """Return the result with further messages about work not done, before all its messages."""
        return replace(self, remarks=[*texts, *self.remarks], undone=[*texts, *self.undone])

    def stopped_by_lock(self, why: str) -> Result:
        """Return the result of a run that did nothing, because another process has its lock."""
        document = {**self.document, "complete": False, "stopped_by": LOCK}
        return replace(self, document=document, remarks=(), undone=(why,), failed=False)


def undone_line(document: Mapping[str, Any]) -> str:
    """Return a message about the work that a run did not do. Return "" if the run did all its work.

    A run that has used up its budget or reached its target did all its work.
    document: document of the run.
    """
    reason, in_flight = document.get("stopped_by"), document.get("in_flight")
    if document.get("lacking_bytes") == 0:
        in_flight = 0
    parts = [f"stopped: {reason}"] if reason not in (None, BUDGET) else []
    if in_flight:
        parts.append(f"{counted(in_flight, 'page')} in flight, not judged")
    if not parts:
        return ""
    places = (document.get(name) for name in ("store", "destination", "quarantine", "directory"))
    return f"{next(filter(None, places))}: not complete: {', '.join(parts)}; run again later"
