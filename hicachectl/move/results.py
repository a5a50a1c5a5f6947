"""Results of copying, removing and restoring page groups."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import IntEnum
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from hicachectl.text.units import counted

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    import numpy.typing as npt
    import pyarrow as pa

    from hicachectl.formats.arrays import BoolArray, IntArray


class GroupStatus(IntEnum):
    """Status of one page group."""

    DONE = 0  # no problem so far; after the run: copied, removed or restored
    GONE = 1  # vanished before it was copied or removed
    FAILED = 2
    CONFLICT = 3  # the destination has another object under one of the group's keys
    NO_ROOM = 4  # not written: the destination is full
    RACED = 5  # another writer wrote an object of the group; a retry compares, then completes it
    KEPT = 6  # not removed: a server has rewritten the faulty objects
    IN_FLIGHT = 7  # a server is writing the group
    SAME = 8  # compared and equal: nothing was written


@dataclass(frozen=True, slots=True)
class Problem:
    """Reason why a group was not copied, removed or restored completely.

    key: key of the object at fault.
    group: index in the `MoveResult`, or -1.
    """

    page: str
    key: str | None
    detail: str
    group: int = -1


@dataclass(slots=True, eq=False)
class MoveResult:
    """Statuses of k page groups copied, removed or restored together.

    pages:    [k] page hashes.
    statuses: [k] uint8 of GroupStatus. A group is open while DONE.
    objects, nbytes: number and bytes of objects removed, or written and not rolled back.
    written:  [n] which objects were written and not rolled back.
    full:     whether a backup's destination had no room for an object.
    """

    pages: pa.StringArray
    statuses: npt.NDArray[np.uint8]
    problems: list[Problem] = field(default_factory=list)
    objects: int = 0
    nbytes: int = 0
    written: BoolArray = field(default_factory=lambda: np.zeros(0, dtype=np.bool_))
    full: bool = False

    @classmethod
    def of(cls, pages: pa.StringArray, *, objects: int = 0) -> MoveResult:
        """Return a result with all groups open. objects: number in the batch."""
        statuses = np.full(len(pages), GroupStatus.DONE, dtype=np.uint8)
        return cls(pages, statuses, written=np.zeros(objects, dtype=np.bool_))

    @property
    def open(self) -> BoolArray:
        """Which groups are open: [k]."""
        is_open: BoolArray = self.statuses == GroupStatus.DONE
        return is_open

    def include(self, groups: IntArray, part: MoveResult) -> None:
        """Add the result of some groups. groups: indices in this result."""
        self.statuses[groups] = part.statuses
        self.problems += [replace(p, group=int(groups[p.group])) for p in part.problems]
        self.objects += part.objects
        self.nbytes += part.nbytes

    def fail(self, group: int, status: GroupStatus, key: bytes | None, detail: str) -> None:
        """Set the status of an open group: the first reason counts."""
        if self.statuses[group] != GroupStatus.DONE:
            return
        self.statuses[group] = status
        if status in (GroupStatus.FAILED, GroupStatus.CONFLICT):
            self.note(group, key, detail)

    def note(self, group: int, key: bytes | None, detail: str) -> None:
        """Add a problem of a group."""
        text = None if key is None else key.decode(errors="backslashreplace")
        self.problems.append(Problem(self.pages[group].as_py(), text, detail, group))


MOST_PROBLEMS = 1000  # remembered by a run
_SHOWN = 20


def problem_rows(problems: Iterable[Problem]) -> list[dict[str, str | None]]:
    """Return problems as rows of a document."""
    return [{"page": p.page, "key": p.key, "detail": p.detail} for p in problems]


def problem_lines(problems: Sequence[Problem], pages: int) -> Iterator[str]:
    """Yield the first problems as messages, and the number of the other ones.

    pages: number of pages with a problem.
    """
    for problem in problems[:_SHOWN]:
        yield f"{problem.key or problem.page}: {problem.detail}"
    if (more := max(pages, len(problems)) - _SHOWN) > 0:
        yield (
            f"Problems of {counted(more, 'other page')} are not shown; --format json lists the "
            f"first {MOST_PROBLEMS} of a run or part"
        )


@dataclass(slots=True, eq=False)
class RunResult:
    """Sum of batch results.

    counts:   [GroupStatus] number of groups with each status.
    objects, nbytes: number and bytes of objects written and not rolled back.
    moved:    number of groups removed from the source after the copy.
    full:     whether the destination had no room. complete: whether every batch was begun.
    problems: the first MOST_PROBLEMS.
    """

    counts: IntArray = field(default_factory=lambda: np.zeros(len(GroupStatus), dtype=np.int64))
    objects: int = 0
    nbytes: int = 0
    moved: int = 0
    full: bool = False
    complete: bool = True
    problems: list[Problem] = field(default_factory=list)

    def count(self, status: GroupStatus) -> int:
        """Return the number of groups with a status."""
        return int(self.counts[status])

    def add(self, result: MoveResult) -> None:
        """Add the result of a batch."""
        self.counts += np.bincount(result.statuses, minlength=len(GroupStatus))
        self.objects += result.objects
        self.nbytes += result.nbytes
        self.note(result.problems)

    def fail(self, problems: Collection[Problem]) -> None:
        """Count each problem as one failed group."""
        self.counts[GroupStatus.FAILED] += len(problems)
        self.note(problems)

    def note(self, problems: Iterable[Problem]) -> None:
        """Remember problems, at most MOST_PROBLEMS."""
        self.problems += islice(problems, MOST_PROBLEMS - len(self.problems))
