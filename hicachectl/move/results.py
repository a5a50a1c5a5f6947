"""Results of copying, removing and restoring page groups."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import IntEnum
from itertools import islice
from typing import TYPE_CHECKING, NotRequired, TypedDict

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.formats.arrays import Count  # noqa: TC001 - msgspec reads it
from hicachectl.formats.errors import StoreUnavailable
from hicachectl.formats.objects import NAME_COLUMNS
from hicachectl.pages.census import byte_sum
from hicachectl.pages.listing import SIZE_COLUMNS, group_columns
from hicachectl.text.jsontext import schema_of
from hicachectl.text.units import counted, human_size

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    import numpy.typing as npt

    from hicachectl.formats.arrays import BoolArray, IntArray
    from hicachectl.pages.groups import PageGroups


class GroupStatus(IntEnum):
    """Status of one page group."""

    DONE = 0  # during the run: no problem so far; after the run: copied, removed or restored
    GONE = 1  # vanished before it was copied or removed
    FAILED = 2
    CONFLICT = 3  # the destination has another object under one of the group's keys
    NO_ROOM = 4  # not written, because the destination is full
    RACED = 5  # another writer wrote an object of the group; a retry compares and completes it
    # Not removed, because a server has written to the group meanwhile, or, with Action.CLEAR,
    # because the destination has no equal copy.
    KEPT = 6
    IN_FLIGHT = 7  # a server is writing the group
    SAME = 8  # compared and equal, so nothing was written


@dataclass(frozen=True, slots=True)
class Problem:
    """Reason why a group was not copied, removed or restored completely.

    key: key of the faulty object; None if the reason concerns no single object.
    group: index in the `MoveResult`; -1 for a problem that comes from no `MoveResult`.
    """

    page: str
    key: str | None
    detail: str
    group: int = -1


class ProblemRow(TypedDict):
    """Row for a problem in a document."""

    page: str | None
    key: str | None
    detail: str


@dataclass(slots=True, eq=False)
class MoveResult:
    """Statuses of k page groups copied, removed or restored together.

    pages:    [k] page hashes.
    statuses: [k] uint8 of GroupStatus. A group is open while its status is DONE.
    objects: number of objects removed, or written and not rolled back.
    nbytes: bytes of objects written and not rolled back; 0 for a removal.
    """

    pages: pa.StringArray
    statuses: npt.NDArray[np.uint8]
    problems: list[Problem] = field(default_factory=list)
    objects: int = 0
    nbytes: int = 0

    @classmethod
    def of(cls, pages: pa.StringArray) -> MoveResult:
        """Return a result with all groups open."""
        return cls(pages, np.full(len(pages), GroupStatus.DONE, dtype=np.uint8))

    @property
    def open(self) -> BoolArray:
        """Which groups are open: [k]."""
        is_open: BoolArray = self.statuses == GroupStatus.DONE
        return is_open

    def include(self, groups: IntArray, part: MoveResult) -> None:
        """Add the result of some groups. groups: indices in this result of these groups."""
        self.statuses[groups] = part.statuses
        self.problems += [replace(p, group=int(groups[p.group])) for p in part.problems]
        self.objects += part.objects
        self.nbytes += part.nbytes

    def fail(self, group: int, status: GroupStatus, key: bytes | None, detail: str) -> None:
        """Set the status of an open group. A closed group keeps its status.

        If the status is FAILED or CONFLICT, add a problem with the key and the detail.
        """
        if self.statuses[group] != GroupStatus.DONE:
            return
        self.statuses[group] = status
        if status in (GroupStatus.FAILED, GroupStatus.CONFLICT):
            self.note(group, key, detail)

    def note(self, group: int, key: bytes | None, detail: str) -> None:
        """Add a problem of a group."""
        text = None if key is None else key.decode(errors="backslashreplace")
        self.problems.append(Problem(self.pages[group].as_py(), text, detail, group))


MOST_PROBLEMS = 1000  # problems that a run remembers
_SHOWN = 20


def problem_rows(problems: Iterable[Problem]) -> list[ProblemRow]:
    """Return problems as rows of a document."""
    return [{"page": p.page, "key": p.key, "detail": p.detail} for p in problems]


def problem_lines(problems: Sequence[Problem], pages: int) -> Iterator[str]:
    """Yield the first problems as messages, then the number of problems not shown.

    pages: number of pages with a problem.
    """
    for problem in problems[:_SHOWN]:
        yield f"{problem.key or problem.page}: {problem.detail}"
    if (more := max(pages, len(problems)) - _SHOWN) > 0:
        yield (
            f"Problems of {counted(more, 'other page')} are not shown; --format json lists the "
            f"first {MOST_PROBLEMS} problems of a run or part"
        )


class CopyFacts(msgspec.Struct, kw_only=True):
    """Sums and messages of a copy, or of a part of it.

    pages, objects, bytes: number of pages, objects and bytes written and not rolled back.
    skipped: number of pages that the destination already had.
    gone: number of pages that vanished from the source.
    conflicts: number of pages for which the destination has different objects under the same keys.
    moved: number of pages removed from the source after the copy.
    left_in_source: number of incomplete pages that a move does not remove from the source.
    complete: whether every batch was begun.
    settled: whether nothing is left for another run to do.
    stopped_by: reason for an early end, else "".
    problems: the first MOST_PROBLEMS problems.
    """

    pages: Count = 0
    objects: Count = 0
    bytes: Count = 0
    skipped: Count = 0
    gone: Count = 0
    conflicts: Count = 0
    failed: Count = 0
    moved: Count = 0
    left_in_source: Count = 0
    complete: bool = True
    settled: bool = True
    stopped_by: str = ""
    problems: list[Problem] = msgspec.field(default_factory=list)
    remarks: list[str] = msgspec.field(default_factory=list)

    def add(self, result: MoveResult) -> None:
        """Add the result of a batch."""
        counts = np.bincount(result.statuses, minlength=len(GroupStatus)).tolist()
        self.pages += counts[GroupStatus.DONE]
        self.skipped += counts[GroupStatus.SAME]
        self.gone += counts[GroupStatus.GONE]
        self.conflicts += counts[GroupStatus.CONFLICT]
        self.failed += counts[GroupStatus.FAILED]
        self.left_in_source += counts[GroupStatus.KEPT]
        self.objects += result.objects
        self.bytes += result.nbytes
        self.note(result.problems)

    def fail(self, problems: Collection[Problem]) -> None:
        """Count each problem as one failed group."""
        self.failed += len(problems)
        self.note(problems)

    def note(self, problems: Iterable[Problem]) -> None:
        """Remember problems, at most MOST_PROBLEMS."""
        self.problems += islice(problems, MOST_PROBLEMS - len(self.problems))


def total(parts: Iterable[msgspec.Struct], name: str) -> int:
    """Return the sum of one count over the facts of several parts."""
    return sum(getattr(part, name) for part in parts)


REMOVED = "removed"
WOULD_REMOVE = "would-remove"  # only dry runs say this
GONE = "gone"  # vanished before the removal
KEPT = "kept"  # not removed, because a server has written to the page meanwhile
IN_FLIGHT = "in-flight"  # removed, but a server is writing the page again
RESTORED = "restored"
WOULD_RESTORE = "would-restore"  # only dry runs say this
CONFLICT = "conflict"
FAILED = "failed"
_DONE = (REMOVED, IN_FLIGHT, WOULD_REMOVE, RESTORED, WOULD_RESTORE)
_TEXTS = {
    GroupStatus.GONE: GONE,
    GroupStatus.KEPT: KEPT,
    GroupStatus.IN_FLIGHT: IN_FLIGHT,
    GroupStatus.CONFLICT: CONFLICT,
}


class _Group(TypedDict):
    page: str | None
    model: str | None
    tag: str | None
    tp_size: int | None
    pp_size: int | None
    cp_size: int | None
    dcp_size: int | None
    objects: int
    nbytes: int | None


class RemovedGroup(_Group):
    """Row for a removed page group, or for a removed file of no page. Only a file has a `key`."""

    state: str
    key: NotRequired[str]


class RestoredGroup(_Group):
    """Row for a restored page group."""

    codes: list[str]
    state: str
    detail: str | None


class PinnedGroup(_Group):
    """Row for a page group that was pinned or unpinned."""

    state: str


class Failure(TypedDict):
    """Row for an object that could not be removed."""

    key: str
    detail: str


class UnnamedDeployment(TypedDict):
    """Row for a deployment that no request names."""

    group: str
    pages: int
    bytes: int | None


class FreeDocument(TypedDict):
    """Member `free` of a removal document.

    It has the bytes to free, the pages to remove for that, and the pages that stay.
    """

    target: str
    limit_bytes: int
    asked_bytes: int
    bytes: int
    stored_bytes: int | None
    incomplete_pages: int
    incomplete_bytes: int
    unused_pages: int | None
    unused_bytes: int | None
    order: str
    last_use: float | None
    kept_pages: int
    kept_bytes: int | None
    valued_pages: int | None
    valued_pages_removed: int | None
    requested_tokens: int | None
    usable_tokens_before: int | None
    usable_tokens_after: int | None
    unnamed: list[UnnamedDeployment] | None
    in_place_bytes: int | None


class RemovalDocument(msgspec.Struct, kw_only=True):
    """Document of `rm`."""

    store: str
    pages: int
    objects: int
    bytes: int | None
    gone: int
    kept: int
    in_flight: int
    failed: int
    remaining: int
    lacking_bytes: int | None
    free_bytes: int | None
    seconds: float
    complete: bool = True
    stopped_by: str | None = None
    dry_run: bool
    free: FreeDocument | None
    failures: list[Failure]
    groups: list[RemovedGroup] | None = None


class RestoreDocument(msgspec.Struct, kw_only=True):
    """Document of `restore`."""

    store: str
    quarantine: str
    pages: int
    objects: int
    bytes: int | None
    gone: int
    conflicts: int
    failed: int
    seconds: float
    complete: bool
    stopped_by: str | None
    dry_run: bool
    groups: list[RestoredGroup] | None = None


class PinDocument(msgspec.Struct, kw_only=True):
    """Document of `pin` and `unpin`."""

    store: str
    pages: int
    objects: int
    bytes: int | None
    failed: int
    not_whole: int
    until: float | None
    seconds: float
    dry_run: bool
    groups: list[PinnedGroup] | None = None


# Columns of a `_Group` that tell its page and deployment.
PLACES = ("page", *NAME_COLUMNS, *SIZE_COLUMNS)
# Columns of a `RemovedGroup` without its last member, `key`. A `PinnedGroup` has the same columns.
ROWS = schema_of(RemovedGroup)
ROWS = ROWS.remove(ROWS.get_field_index("key"))


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupReport:
    """Report of a run that removes or restores page groups.

    rows: a row for each group that the run tried, or would try. `state` is one of the words above,
        such as REMOVED.
    moved: number of objects quarantined or restored.
    deleted: number of objects deleted.
    gone: number of objects that vanished before the run could move or delete them.
    nbytes: bytes of groups moved or deleted; None if a size is unknown.
    failures: (key or path, message) for each failure.
    untried: number of groups not tried, because the quarantine cannot be written to.
    place: path of the quarantine that gets the objects; None if they are deleted or restored.
    busy: number of runs of the quarantine that another process has locked.
    left: remarks about runs of the quarantine that were left alone.
    origins: URLs of other stores from which the restored pages were removed.
    """

    rows: pa.Table = field(default_factory=ROWS.empty_table, repr=False)
    moved: int = 0
    deleted: int = 0
    gone: int = 0
    nbytes: int | None = 0
    failures: tuple[tuple[str, str], ...] = ()
    untried: int = 0
    place: str | None = None
    left: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    busy: int = 0

    def count(self, *states: str) -> int:
        """Return the number of rows in these states."""
        found: int = pc.sum(pc.is_in(self.rows.column("state"), pa.array(states))).as_py() or 0
        return found

    @property
    def groups(self) -> int:
        """Number of groups removed or restored."""
        pages = self.rows.filter(self.rows.column("page").is_valid())
        return GroupReport(rows=pages).count(*_DONE)

    @property
    def kept(self) -> int:
        """Number of groups that were not removed, because a server wrote to them meanwhile."""
        return self.count(KEPT)

    @property
    def kept_bytes(self) -> int:
        """Bytes of the groups kept. Objects of unknown size count as 0."""
        rows = self.rows.filter(pc.equal(self.rows.column("state"), KEPT))
        return byte_sum(rows.column("nbytes").fill_null(0).to_numpy())

    @property
    def conflicts(self) -> int:
        """Number of groups not restored, because the store has another object under a key."""
        return self.count(CONFLICT)

    @property
    def failed(self) -> int:
        """Number of groups that failed."""
        return self.count(FAILED)

    @property
    def remaining(self) -> int:
        """Number of groups that should have been removed, but remain."""
        return self.failed + self.untried


@dataclass(frozen=True, slots=True)
class Taken:
    """Pages removed before a removal ended early. An unfinished batch may have removed more.

    pages: number of groups that lost objects.
    nbytes: bytes of these groups; None if a size is unknown.
    """

    pages: int
    objects: int
    nbytes: int | None

    def text(self, wanted: int, noun: str = "page") -> str:
        """Return the counts as a sentence.

        wanted: number of groups or files that the removal should remove.
        noun: "page", or "file" if the removal removes files of no page.
        """
        objects = f"{counted(self.objects, 'object')} of " if noun == "page" else ""
        return (
            f"Removed at least {objects}{counted(self.pages, noun)} ({human_size(self.nbytes)}) of "
            f"{counted(wanted, noun)} before the end"
        )


@contextmanager
def telling(taken: Callable[[], Taken], tell: Callable[[Taken], None]) -> Iterator[None]:
    """Report the removals so far if a signal ends the block.

    Also report them if a lost store ends the block after the first removal.
    """
    try:
        yield
    except StoreUnavailable:
        if (so_far := taken()).pages:
            tell(so_far)
        raise
    except Exception:
        raise
    except BaseException:  # a signal raises KeyboardInterrupt or Terminated, which are no Exception
        tell(taken())
        raise


def states_of(statuses: npt.NDArray[np.uint8], done: str) -> pa.StringArray:
    """Return the state for each status. done: state for DONE."""
    texts = [_TEXTS.get(status, FAILED) for status in GroupStatus]
    texts[GroupStatus.DONE] = done
    return pa.array(texts).take(pa.array(statuses))


def page_columns(groups: PageGroups, numbers: IntArray) -> list[pa.Array]:
    """Return the pages, names and sizes of some groups; null where the keys show none."""
    columns = group_columns(groups, numbers)
    return [columns[name] for name in PLACES]
