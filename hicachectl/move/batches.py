"""Batches of page groups to copy, and their layout in memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Literal

import numpy as np

from hicachectl.backends.arena import ALIGNMENT
from hicachectl.io.pipeline import DEFAULT_BUFFER_BYTES, Task
from hicachectl.kernels.relayout import relayout

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt
    import pyarrow as pa

    from hicachectl.formats.arrays import IntArray
    from hicachectl.formats.transfer import TransferUnit
    from hicachectl.move.order import GroupObjects

# Larger than any memory; the sums of a group stay far from overflow.
_MOST_ALIGNED = 2**48
_JOBS = 3  # one reads while the others write or wait for the disk


TrailerMode = Literal["auto", "write", "drop"]


class Action(IntEnum):
    """Action for a page group."""

    NOTHING = 0  # nothing to copy, or not chosen
    SKIP = 1  # the destination has the whole group
    COPY = 2
    COMPLETE = 3  # the destination has part of the group: if equal, add the rest
    COMPARE = 4  # the destination has the whole group: compare bytes
    REPLACE = 5  # remove from the destination, then copy
    CONFLICT = 6  # the destination has another object under one of the keys
    CLEAR = 7  # the source has only a rest of what the destination has whole: compare the rest


WRITING = (Action.COPY, Action.COMPLETE, Action.REPLACE)
COMPARING = (Action.COMPARE, Action.CLEAR)
READS_BACK = (Action.COMPLETE, *COMPARING)


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyOptions:
    """Options of a copy.

    verify: whether to read back and compare each copy; always with move.
    move: whether to remove the originals of compared copies.
    pin: whether to protect copies from eviction, for pin_seconds or the store's default.
    deadline: `time.monotonic()` after which no batch is begun.
    trailers: choice of the trailers to write; see `store_pair.plan_trailers`.
    keeps_trailers: whether to write all objects by system copies, which keep trailers.
    """

    buffer_bytes: int = DEFAULT_BUFFER_BYTES
    jobs: int | None = None
    bytes_per_second: int | None = None
    verify: bool = False
    move: bool = False
    pin: bool = False
    pin_seconds: float | None = None
    deadline: float | None = None
    trailers: TrailerMode = "auto"
    keeps_trailers: bool = False

    def __post_init__(self) -> None:
        """Verify what is moved."""
        object.__setattr__(self, "verify", self.verify or self.move)

    @property
    def job_count(self) -> int:
        """Number of batches copied at a time."""
        return self.jobs or _JOBS


@dataclass(frozen=True, slots=True, eq=False)
class Transform:
    """Objects that one unit makes for `count` groups.

    sources, destinations: (offset, step, nbytes) of each: the first group's offset in the batch's
    memory, and the distance to the next group's.
    """

    unit: TransferUnit
    count: int
    sources: tuple[tuple[int, int, int], ...]
    destinations: tuple[tuple[int, int, int], ...]

    def apply(self, memory: npt.NDArray[np.uint8]) -> None:
        """Write the destination objects into memory."""
        sources, destinations = (
            [_strided(memory, self.count, *block) for block in blocks]
            for blocks in (self.sources, self.destinations)
        )
        relayout(self.unit, sources, destinations)


@dataclass(frozen=True, slots=True, eq=False)
class CopyBatch(Task):
    """Page groups copied together, with one action.

    Memory of a batch: the source objects, each 4 KiB-aligned in the order of `rows`; then the
    transformed objects; then the objects read back. Objects that are a run of source bytes stay in
    place. Offsets count from the batch's memory.

    pages:      [k] page hash of each group.
    owners:     [rows] group of each source object.
    objects:    [n] objects of the destination.
    targets:    [n] `key` and `mtime_ns` of the same objects.
    sizes, offsets: [n] bytes and offset of each object.
    existing:   [n] bytes of the destination's object under the key, or ABSENT.
    origins:    [n] row of each object's first source, or ABSENT.
    by_system:  whether the destination copies the objects by itself.
    back:       offset of the objects read back.
    """

    action: Action = field(kw_only=True)
    pages: pa.StringArray = field(kw_only=True)
    owners: IntArray = field(kw_only=True)
    objects: GroupObjects = field(kw_only=True)
    targets: pa.Table = field(kw_only=True)
    sizes: IntArray = field(kw_only=True)
    offsets: IntArray = field(kw_only=True)
    existing: IntArray = field(kw_only=True)
    origins: IntArray = field(kw_only=True)
    by_system: bool = field(kw_only=True)
    transforms: tuple[Transform, ...] = field(kw_only=True)
    back: int = field(kw_only=True)

    def key_read(self, index: int, listed: pa.Table) -> bytes:
        """Return the key of a source object. listed: the source's rows."""
        key: bytes = listed.column("key")[int(self.rows[index])].as_py()
        return key

    @property
    def nbytes(self) -> int:
        """Bytes read or copied from the source."""
        return int((self.capacities if len(self.rows) else self.sizes).sum())


def cut(
    nbytes: IntArray, objects: IntArray, *, first_bytes: int, most_bytes: int, most_objects: int
) -> Iterator[slice]:
    """Yield slices of groups, in order, each within the limits or of a single group.

    nbytes, objects: [groups] demand. first_bytes: limit of the first batch, small to begin writing
    soon; the limit then doubles up to most_bytes.
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


def aligned(sizes: IntArray) -> IntArray:
    """Return the bytes of memory for objects of these sizes, 0 for unknown ones."""
    within = np.clip(sizes, 0, _MOST_ALIGNED)
    space: IntArray = -(-within // ALIGNMENT) * ALIGNMENT
    return space


def _strided(
    memory: npt.NDArray[np.uint8], count: int, offset: int, step: int, nbytes: int
) -> npt.NDArray[np.uint8]:
    """Return a view of objects at equal steps: [count, nbytes] uint8."""
    whole = memory[offset : offset + step * (count - 1) + nbytes]
    return np.lib.stride_tricks.as_strided(whole, shape=(count, nbytes), strides=(step, 1))
