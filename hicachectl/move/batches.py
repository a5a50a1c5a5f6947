"""Batches of page groups that are copied together: what is read, made and written, and where."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np

from hicachectl.io.pipeline import DEFAULT_BUFFER_BYTES, Task
from hicachectl.kernels.relayout import relayout

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt
    import pyarrow as pa

    from hicachectl.backends.base import IntArray
    from hicachectl.formats.transfer import TransferUnit
    from hicachectl.move.order import GroupObjects

_JOBS = 3  # one reads while others write, or wait for the disk


class Action(IntEnum):
    """What is done with a page group."""

    NOTHING = 0  # it has nothing that could be copied, or was not chosen
    SKIP = 1  # the destination has it whole
    COPY = 2
    COMPLETE = 3  # the destination has a part: add the rest, if that part is the same
    COMPARE = 4  # the destination has it whole: read both
    REPLACE = 5  # remove what the destination has, and copy
    CONFLICT = 6  # the destination has another object under one of its keys


WRITING = (Action.COPY, Action.COMPLETE, Action.REPLACE)
READS_BACK = (Action.COMPLETE, Action.COMPARE)


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyOptions:
    """How to copy.

    jobs: threads. verify: read back and compare what was written. move: then remove it from the
    source. pin: protect it from eviction, for pin_seconds or the store's default. deadline:
    `time.monotonic()` after which no batch is begun.
    """

    buffer_bytes: int = DEFAULT_BUFFER_BYTES
    jobs: int | None = None
    bytes_per_second: int | None = None
    verify: bool = False
    move: bool = False
    pin: bool = False
    pin_seconds: float | None = None
    deadline: float | None = None

    @property
    def job_count(self) -> int:
        """How many batches are copied at a time."""
        return self.jobs or _JOBS


@dataclass(frozen=True, slots=True, eq=False)
class Transform:
    """Objects of `count` groups that one unit makes of others.

    sources, destinations: (offset, step, nbytes) of each source and destination of the unit: where
    that of the first group is in the batch's memory, and how far it is to that of the next.
    """

    unit: TransferUnit
    count: int
    sources: tuple[tuple[int, int, int], ...]
    destinations: tuple[tuple[int, int, int], ...]

    def apply(self, memory: npt.NDArray[np.uint8]) -> None:
        """Make the destinations, in the batch's memory."""
        sources, destinations = (
            [_strided(memory, self.count, *block) for block in blocks]
            for blocks in (self.sources, self.destinations)
        )
        relayout(self.unit, sources, destinations)


@dataclass(frozen=True, slots=True, eq=False)
class CopyBatch(Task):
    """Page groups that are copied together, all with one action.

    Memory of a batch: the objects that are read, each 4 KiB-aligned in the order of `rows`; then
    the objects made of them; then, where the destination is read back, its objects. An object
    that is a run of bytes of its source has no place of its own. Offsets count from the batch's
    own memory.

    pages:      [k] page hash of each group.
    owners:     [rows] the group of each object that is read.
    objects:    [n] objects of the destination; `keys` are those of messages.
    targets:    [n] `key` and `mtime_ns` of the same objects.
    sizes, offsets: [n] bytes of each, and where they are.
    there:      [n] bytes that the destination has under the key already, or ABSENT.
    origins:    [n] row of the first source object of each, or ABSENT.
    by_system:  the destination copies the objects from the source by itself.
    back:       where the objects that are read back begin.
    """

    action: Action = field(kw_only=True)
    pages: pa.StringArray = field(kw_only=True)
    owners: IntArray = field(kw_only=True)
    objects: GroupObjects = field(kw_only=True)
    targets: pa.Table = field(kw_only=True)
    sizes: IntArray = field(kw_only=True)
    offsets: IntArray = field(kw_only=True)
    there: IntArray = field(kw_only=True)
    origins: IntArray = field(kw_only=True)
    by_system: bool = field(kw_only=True)
    transforms: tuple[Transform, ...] = field(kw_only=True)
    back: int = field(kw_only=True)

    def key_read(self, index: int, listed: pa.Table) -> bytes:
        """Return the key, for messages, of an object that is read. listed: the source's rows."""
        key: bytes = listed.column("key")[int(self.rows[index])].as_py()
        return key

    @property
    def nbytes(self) -> int:
        """Bytes that the batch takes from the source, read or copied."""
        return int((self.capacities if len(self.rows) else self.sizes).sum())


def cut(
    nbytes: IntArray, objects: IntArray, *, first_bytes: int, most_bytes: int, most_objects: int
) -> Iterator[slice]:
    """Cut groups, in their order, into batches of limited size, or of one group.

    nbytes, objects: [groups] what each group adds to a batch. first_bytes: of the first batch,
    so that writing soon begins; each may be twice as large as the one before.
    """
    by_bytes, by_objects = np.cumsum(nbytes), np.cumsum(objects)
    start, limit = 0, min(first_bytes, most_bytes)
    while start < len(nbytes):
        spent = (by_bytes[start - 1], by_objects[start - 1]) if start else (0, 0)
        end = min(
            int(np.searchsorted(by_bytes, spent[0] + limit, side="right")),
            int(np.searchsorted(by_objects, spent[1] + most_objects, side="right")),
        )
        end = max(end, start + 1)
        yield slice(start, end)
        start, limit = end, min(2 * limit, most_bytes)


def _strided(
    memory: npt.NDArray[np.uint8], count: int, offset: int, step: int, nbytes: int
) -> npt.NDArray[np.uint8]:
    """View objects of one size that lie at equal steps: [count, nbytes] uint8."""
    whole = memory[offset : offset + step * (count - 1) + nbytes]
    return np.lib.stride_tricks.as_strided(whole, shape=(count, nbytes), strides=(step, 1))
