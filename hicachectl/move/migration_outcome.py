"""Result of a migration, with sums over its parts, as a document and as messages."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa
from msgspec import UNSET, UnsetType

from hicachectl.formats.arrays import Count  # noqa: TC001 - msgspec reads it
from hicachectl.formats.wording import OTHER_BYTES
from hicachectl.move.results import CopyFacts, ProblemRow, problem_lines, problem_rows, total
from hicachectl.pages.selection import explain_parts
from hicachectl.results import Result
from hicachectl.text.jsontext import schema_of
from hicachectl.text.units import counted, human_size
from hicachectl.text.vocabulary import FULL

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hicachectl.results import Shown
    from hicachectl.text.tables import Screen

_WORDS = {
    "skipped": "already in the destination",
    "moved": "removed from the source",
    "left_in_source": "left in the source, not whole",
    "gone": "vanished from the source during the run",
    "conflicts": "in conflict",
    "failed": "failed",
}
# Words for a store whose files get trailers in place.
_ADOPTED = {
    **_WORDS,
    "skipped": "with trailers already",
    "gone": "removed by a server during the run",
}
_SUMS = ("pages", "objects", "bytes", *_WORDS)


class MigrationDocument(msgspec.Struct, kw_only=True):
    """Document of `migrate`."""

    source: str
    destination: str
    pages: int
    objects: int
    bytes: int
    skipped: int
    gone: int
    conflicts: int
    failed: int
    moved: int
    left_in_source: int
    left_out: int
    seconds: float
    resumed: int = 0
    complete: bool
    stopped_by: str | None
    problems: list[ProblemRow]
    estimated_seconds: float | UnsetType | None = UNSET


class MigrationFacts(CopyFacts, kw_only=True):
    """Sums and messages of a migration, or of a part of it.

    listed: number of objects in the source.
    groups: number of groups that the filters match.
    nothing: why the filters match no group.
    matched: number of rows of a page list whose group the source has.
    unknown_keys: number of objects with unknown keys.
    left_out: number of groups not copied, by reason.
    refused: number of groups in conflict because servers would refuse the destination's objects.
    adopts: see `StorePair`.
    room: free bytes that the migration needs in the destination. Only a dry run sets this number.
    free_bytes: free bytes of the destination; None if unknown, or if this is no dry run.
    deployments: deployments of the source and of the destination, as text; empty if the migration
        changes no name or size, or if this is no dry run.
    """

    listed: Count = 0
    groups: Count = 0
    nothing: str = ""
    matched: Count = 0
    unknown_keys: Count = 0
    left_out: dict[str, int] = msgspec.field(default_factory=dict)
    refused: Count = 0
    adopts: bool = False
    seconds: float = 0.0
    room: Count = 0
    free_bytes: Count | None = None
    deployments: tuple[str, ...] = ()


def result_of(
    parts: Sequence[MigrationFacts],
    source: str,
    destination: str,
    *,
    labelled: int = 0,
    dry_run: bool = False,
) -> Result:
    """Return the result of a migration from the facts of its parts.

    source, destination: URLs of the stores.
    labelled: number of rows of the page list that have a group; 0 without a list.
    """
    problems = [problem for part in parts for problem in part.problems]
    document = MigrationDocument(
        source=source,
        destination=destination,
        **{name: total(parts, name) for name in _SUMS},
        left_out=sum(sum(part.left_out.values()) for part in parts),
        seconds=round(sum(part.seconds for part in parts), 3),
        complete=all(part.complete for part in parts),
        stopped_by=next((part.stopped_by for part in parts if part.stopped_by), None),
        problems=problem_rows(problems),
        estimated_seconds=None if dry_run else UNSET,
    )
    troubled = document.failed + document.conflicts
    adopted = any(part.adopts for part in parts)
    none_adopted = adopted and document.left_out and not (document.pages or document.skipped)
    said = [remark for part in parts for remark in part.remarks]
    undone = list(_not_copied(parts, source, destination, labelled))
    lines = partial(_lines, adopted=adopted)
    free = [part.free_bytes for part in parts if part.free_bytes is not None]
    if dry_run:
        lines = partial(
            lines,
            free=min(free, default=None),
            deployments=next((part.deployments for part in parts if part.deployments), ()),
        )
    if dry_run and free:
        room = total(parts, "room")
        said += filter(None, [lack_of_room(destination, room, min(free), adopts=adopted)])
    troubles = list(problem_lines(problems, troubled))
    return Result(
        document=msgspec.to_builtins(document),
        rows=pa.Table.from_pylist(document.problems, schema=schema_of(ProblemRow)),
        rows_name="problems",
        lines=lines,
        remarks=list(dict.fromkeys([*undone, *said, *troubles])),
        undone=[*undone, *troubles],
        failed=bool(troubled or none_adopted) or document.stopped_by == FULL,
        dry_run=dry_run,
    )


def _lines(
    document: dict[str, Any],
    _screen: Screen,
    _shown: Shown,
    *,
    adopted: bool,
    free: int | None = None,
    deployments: tuple[str, ...] = (),
) -> Iterator[str]:
    """Yield the lines of the `table` format.

    adopted: whether objects got trailers in place.
    free, deployments: `free_bytes` and `deployments` of the facts of a dry run.
    """
    words, verbs = _WORDS, ("copied", "to copy")
    if adopted:
        words, verbs = _ADOPTED, ("given trailers", "to give trailers")
    verb = verbs["estimated_seconds" in document]
    parts = [
        f"{counted(document['pages'], 'page')} {verb}, "
        f"{counted(document['objects'], 'object')}, {human_size(document['bytes'])}"
    ]
    parts += [f"{document[name]} {text}" for name, text in words.items() if document[name]]
    if document["stopped_by"]:
        parts.append(f"stopped: {document['stopped_by']}")
    yield "; ".join(parts)
    if deployments:
        yield "The copies are converted from {} to {}".format(*deployments)
    if free is not None:
        yield f"{human_size(free)} free in the destination"


def lack_of_room(destination: str, nbytes: int, free: int, *, adopts: bool) -> str:
    """Return a message if the destination has too little room, else "".

    nbytes: number of bytes to write.
    free: number of free bytes.
    adopts: see `StorePair`.
    """
    if nbytes <= free:
        return ""
    fewer = "give a smaller --buffer-bytes" if adopts else "choose fewer pages (--page, --pages)"
    return (
        f"{destination}: {human_size(nbytes)} to write, but only {human_size(free)} "
        f"free; {fewer}, make room or give --no-space-check"
    )


def _not_copied(
    parts: Sequence[MigrationFacts], source: str, destination: str, labelled: int
) -> Iterator[str]:
    """Yield messages about pages, objects and rows that were not copied."""
    yield from _not_chosen(parts)
    if left := total(parts, "left_in_source"):
        yield (
            f"Left in {source}: {counted(left, 'page')} not whole, of which {destination} has no "
            f"equal, whole copy; hicachectl ls {source} --state orphan,partial lists them, and "
            "hicachectl rm removes them with the same options"
        )
    if refused := total(parts, "refused"):
        yield (
            f"In conflict: {counted(refused, 'page')} of which {destination} has objects "
            f"of {OTHER_BYTES}, or without a trailer, so that plug-in servers refuse them; "
            "--if-exists overwrite replaces them"
        )
    if unknown := total(parts, "unknown_keys"):
        objects = counted(unknown, "object")
        yield f"Not copied: {objects} with unknown keys; hicachectl verify lists them"
    if unmatched := labelled - total(parts, "matched"):
        yield f"--pages: {counted(unmatched, 'row')} without a matching group in SRC"


def _not_chosen(parts: Sequence[MigrationFacts]) -> Iterator[str]:
    """Yield messages about pages that were not chosen."""
    nothing = explain_parts((part.listed, part.nothing) for part in parts)
    if nothing and not total(parts, "groups"):
        yield nothing
    left_out: Counter[str] = Counter()
    for part in parts:
        left_out.update(part.left_out)
    for why, count in left_out.items():
        if count:
            yield f"Not copied: {counted(count, 'page')} {why}"
