"""Reports of removals and restores: a row for each group, and sums."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.formats.errors import StoreUnavailable
from hicachectl.move.results import GroupStatus
from hicachectl.pages.census import byte_sum
from hicachectl.text.units import counted, human_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy as np
    import numpy.typing as npt


REMOVED = "removed"
WOULD_REMOVE = "would-remove"  # only dry runs say this
GONE = "gone"  # vanished before the removal
KEPT = "kept"  # a server has rewritten the faulty objects
IN_FLIGHT = "in-flight"  # removed; a server is writing the page again
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
    """Report of a run that removes or restores page groups.

    rows: one for each group tried, or to be tried; `state` is one of the words above.
    moved: number of objects quarantined or restored. deleted: number of objects deleted.
    gone: number of objects that had vanished before.
    nbytes: bytes of groups moved or deleted; None if a size is unknown.
    failures: (key or path, message). untried: number of groups not begun, because the quarantine
        cannot be written to.
    place: the quarantine; None if nothing is kept.
    busy: number of the quarantine's runs locked by another process.
    left: remarks on runs of the quarantine that were left alone.
    origins: URLs of other stores whose pages are restored.
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
        """Number of groups kept because a server had rewritten the faulty objects."""
        return self.count(KEPT)

    @property
    def kept_bytes(self) -> int:
        """Bytes of the groups kept, as far as sizes are known."""
        rows = self.rows.filter(pc.equal(self.rows.column("state"), KEPT))
        return byte_sum(rows.column("nbytes").fill_null(0).to_numpy())

    @property
    def conflicts(self) -> int:
        """Number of groups not restored: the store has another object under a key."""
        return self.count(CONFLICT)

    @property
    def failed(self) -> int:
        """Number of groups that failed."""
        return self.count(FAILED)

    @property
    def remaining(self) -> int:
        """Number of groups that should have been removed and remain."""
        return self.failed + self.untried


@dataclass(frozen=True, slots=True)
class Taken:
    """What a removal took before it ended early; a batch at work may have taken more.

    pages: number of groups that lost objects.
    nbytes: bytes of these groups; None if a size is unknown.
    """

    pages: int
    objects: int
    nbytes: int | None

    def text(self, wanted: int, noun: str = "page") -> str:
        """Return the counts in words. wanted: number of groups or files to remove."""
        objects = f"{counted(self.objects, 'object')} of " if noun == "page" else ""
        return (
            f"Removed at least {objects}{counted(self.pages, noun)} ({human_size(self.nbytes)}) of "
            f"{counted(wanted, noun)} before the end"
        )


@contextmanager
def telling(taken: Callable[[], Taken], tell: Callable[[Taken], None]) -> Iterator[None]:
    """Tell what was taken if a signal ends the block, or a lost store after objects left."""
    try:
        yield
    except StoreUnavailable:
        if (so_far := taken()).pages:
            tell(so_far)
        raise
    except Exception:
        raise
    except BaseException:
        tell(taken())
        raise


def states_of(statuses: npt.NDArray[np.uint8], done: str) -> pa.StringArray:
    """Return each status's state. done: the state for DONE."""
    texts = [_TEXTS.get(status, FAILED) for status in GroupStatus]
    texts[GroupStatus.DONE] = done
    return pa.array(texts).take(pa.array(statuses))


def named(texts: pa.StringArray) -> pa.StringArray:
    """Return names with null in place of ""."""
    return pc.if_else(pc.equal(texts, ""), None, texts)
