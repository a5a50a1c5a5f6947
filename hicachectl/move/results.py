"""Results of moving page groups, whichever way they move."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt
    import pyarrow as pa

    from hicachectl.backends.base import BoolArray, IntArray


class GroupStatus(IntEnum):
    """Status of one page group."""

    DONE = 0  # moved as asked, or compared and found equal
    GONE = 1  # it vanished from its source before it was moved
    FAILED = 2
    CONFLICT = 3  # the destination holds another object under one of its keys
    NO_ROOM = 4  # not written: the destination is full
    RACED = 5  # another writer wrote an object of it meanwhile: compare, then complete
    KEPT = 6  # left alone: a server has rewritten what was wrong with it
    IN_FLIGHT = 7  # a server is writing it
    SAME = 8  # compared and found equal: nothing was written


@dataclass(frozen=True, slots=True)
class Problem:
    """What kept a group from being moved: its page, the key at fault where one is, and why."""

    page: str
    key: str | None
    detail: str


@dataclass(slots=True, eq=False)
class MoveResult:
    """Statuses of k page groups that are moved together.

    pages:    [k] page hash of each group.
    statuses: [k] uint8 of GroupStatus. Groups that are DONE so far are open: nothing has gone
        wrong with them, and the work goes on.
    objects, nbytes: what was moved and stayed.
    written:  [n] which objects of a batch were written and stayed.
    """

    pages: pa.StringArray
    statuses: npt.NDArray[np.uint8]
    problems: list[Problem] = field(default_factory=list)
    objects: int = 0
    nbytes: int = 0
    written: BoolArray = field(default_factory=lambda: np.zeros(0, dtype=np.bool_))

    @classmethod
    def of(cls, pages: pa.StringArray) -> MoveResult:
        """Return the result of groups that are all open."""
        return cls(pages, np.full(len(pages), GroupStatus.DONE, dtype=np.uint8))

    @property
    def open(self) -> BoolArray:
        """Which groups nothing has gone wrong with: [k]."""
        is_open: BoolArray = self.statuses == GroupStatus.DONE
        return is_open

    def include(self, groups: IntArray, part: MoveResult) -> None:
        """Take over the result of some of the groups. groups: their places here."""
        self.statuses[groups] = part.statuses
        self.problems += part.problems
        self.objects += part.objects
        self.nbytes += part.nbytes

    def fail(self, group: int, status: GroupStatus, key: bytes | None, detail: str) -> None:
        """Set the status of an open group; the first reason counts."""
        if self.statuses[group] != GroupStatus.DONE:
            return
        self.statuses[group] = status
        if status in (GroupStatus.FAILED, GroupStatus.CONFLICT):
            self.note(group, key, detail)

    def note(self, group: int, key: bytes | None, detail: str) -> None:
        """Add a problem of a group."""
        text = None if key is None else key.decode(errors="backslashreplace")
        self.problems.append(Problem(self.pages[group].as_py(), text, detail))
