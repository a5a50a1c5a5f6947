"""What runs that remove or restore page groups report: a row for each group, and sums."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.move.results import GroupStatus

if TYPE_CHECKING:
    import numpy.typing as npt

    from hicachectl.backends.base import IntArray

REMOVED = "removed"
WOULD_REMOVE = "would-remove"  # in a dry run
GONE = "gone"  # it had vanished before we came
KEPT = "kept"  # a server has rewritten what was wrong with it
IN_FLIGHT = "in-flight"  # removed; a server is writing it anew
RESTORED = "restored"
WOULD_RESTORE = "would-restore"  # in a dry run
CONFLICT = "conflict"
FAILED = "failed"
_DONE = (REMOVED, IN_FLIGHT, WOULD_REMOVE, RESTORED, WOULD_RESTORE)
_TEXTS = {
    GroupStatus.GONE: GONE,
    GroupStatus.KEPT: KEPT,
    GroupStatus.IN_FLIGHT: IN_FLIGHT,
    GroupStatus.CONFLICT: CONFLICT,
}

ROWS = pa.schema(
    [
        ("page", pa.string()),
        ("model", pa.string()),
        ("tag", pa.string()),
        ("objects", pa.int64()),
        ("nbytes", pa.int64()),
        ("state", pa.string()),
    ]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupReport:
    """What a run that removes or restores page groups did.

    rows: a row for each group that was tried, or would be; `state` is one of the words above.
    moved: objects quarantined or restored. deleted: objects. gone: objects that had vanished.
    nbytes: of the groups moved or deleted; None where a size is not known.
    failures: (key or place, message). untried: groups left because the quarantine is full.
    place: the quarantine that the objects are in; None where nothing is kept.
    unrecorded: folders of the quarantine with objects that no record names; left alone, since
    they may be the only copies. busy: runs of the quarantine that another process works on.
    """

    rows: pa.Table = field(default_factory=ROWS.empty_table, repr=False)
    moved: int = 0
    deleted: int = 0
    gone: int = 0
    nbytes: int | None = 0
    failures: tuple[tuple[str, str], ...] = ()
    untried: int = 0
    place: str | None = None
    unrecorded: tuple[str, ...] = ()
    busy: int = 0

    def count(self, *states: str) -> int:
        """Count the rows in some states."""
        found: int = pc.sum(pc.is_in(self.rows.column("state"), pa.array(states))).as_py() or 0
        return found

    @property
    def groups(self) -> int:
        """How many page groups were removed or restored."""
        pages = self.rows.filter(self.rows.column("page").is_valid())
        return GroupReport(rows=pages).count(*_DONE)

    @property
    def kept(self) -> int:
        """How many groups were left alone, since a server had rewritten what was wrong."""
        return self.count(KEPT)

    @property
    def conflicts(self) -> int:
        """How many groups have an object in the store again."""
        return self.count(CONFLICT)

    @property
    def failed(self) -> int:
        """How many groups failed."""
        return self.count(FAILED)

    @property
    def remaining(self) -> int:
        """How many groups should have gone and are still there."""
        return self.failed + self.untried


def states_of(statuses: npt.NDArray[np.uint8], done: str) -> pa.StringArray:
    """Return the word for each status. done: the word for DONE."""
    texts = [_TEXTS.get(status, FAILED) for status in GroupStatus]
    texts[GroupStatus.DONE] = done
    return pa.array(texts).take(pa.array(statuses))


def named(texts: pa.StringArray) -> pa.StringArray:
    """Return names, with null in place of "", for the rows of a result."""
    return pc.if_else(pc.equal(texts, ""), None, texts)


def sums_by_group(sizes: pa.ChunkedArray | pa.Array, owners: IntArray, count: int) -> pa.Int64Array:
    """Sum sizes by group: [count], null where one is not known."""
    sums = np.zeros(count, dtype=np.int64)
    np.add.at(sums, owners, sizes.fill_null(0).to_numpy())
    unknown = np.zeros(count, dtype=np.bool_)
    if sizes.null_count:
        unknown[owners[np.asarray(sizes.is_null())]] = True
    return pa.array(sums, mask=unknown)


def total(sizes: pa.ChunkedArray | pa.Array) -> int | None:
    """Sum sizes; None where one is not known."""
    found: int | None = pc.sum(sizes, skip_nulls=False, min_count=0).as_py()
    return found
