"""The one piece of host memory that objects pass through, and the allocator of its slabs."""

from __future__ import annotations

import mmap
import os
import secrets
import threading
import time
from bisect import bisect_left
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np
import numpy.typing as npt

from hicachectl.formats.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

ALIGNMENT = 4096  # of slabs and objects: what O_DIRECT and page registration ask for
_SHARED_MEMORY = Path("/dev/shm")  # where shm_open keeps its objects on Linux


class ReservationCancelledError(Exception):
    """Another thread gave up, so that waiting for memory makes no sense any more."""


class Arena:
    """One shared, page-aligned, zero-filled anonymous mapping of `nbytes`.

    Pages are taken from the system when they are first touched. Shared, not private: memory
    registered for RDMA or with CUDA then stays the same physical memory across a fork.

    named: make it a POSIX shared memory object that other processes can open by `name`, until
        `forget_name`; then its pages are taken at once.
    """

    def __init__(self, nbytes: int, *, named: bool = False) -> None:
        if nbytes < 1:
            raise ValueError(f"an arena of {nbytes} bytes")
        self.nbytes = -(-nbytes // ALIGNMENT) * ALIGNMENT
        self.name = f"hicachectl-{secrets.token_hex(16)}" if named else None
        try:
            self._map = self._mapped()
        except (OSError, OverflowError) as error:
            self.forget_name()
            raise UsageError(
                f"cannot map a buffer of {nbytes} bytes: {error}; give a smaller --buffer-bytes"
            ) from error
        self.memory = memoryview(self._map)
        self._at_close: list[Callable[[], None]] = []
        self.array: npt.NDArray[np.uint8] = np.frombuffer(self._map, dtype=np.uint8)

    def _mapped(self) -> mmap.mmap:
        if self.name is None:
            return mmap.mmap(-1, self.nbytes)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        descriptor = os.open(_SHARED_MEMORY / self.name, flags, 0o600)
        try:
            # Without its pages, touching what no longer fits would kill the process.
            os.posix_fallocate(descriptor, 0, self.nbytes)
            return mmap.mmap(descriptor, self.nbytes)
        finally:
            os.close(descriptor)

    def forget_name(self) -> None:
        """Take the name away; who has the memory open keeps it, and a crash leaves nothing."""
        name, self.name = self.name, None
        if name is not None:
            (_SHARED_MEMORY / name).unlink(missing_ok=True)

    @property
    def address(self) -> int:
        """Where the arena begins, for registration with a device or a network card."""
        return int(self.array.ctypes.data)

    def view(self, offset: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """Give a part of the arena as uint8, not copied. Raises ValueError outside of it."""
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise ValueError(f"bytes {offset}+{nbytes} of an arena of {self.nbytes}")
        return self.array[offset : offset + nbytes]

    def at_close(self, undo: Callable[[], None]) -> None:
        """Have a registration of the memory undone before it is unmapped; the last comes first."""
        self._at_close.append(undo)

    def close(self) -> None:
        """Unmap; where views are still in use, once the last of them is gone."""
        while self._at_close:
            self._at_close.pop()()
        self.forget_name()
        self.memory.release()
        self.memory = memoryview(b"")
        self.array = np.empty(0, dtype=np.uint8)
        with suppress(BufferError):  # views are alive; the last one unmaps
            self._map.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True, eq=False)
class Slab:
    """A reserved range of an arena; give it back with `release`, or use it in a with block."""

    allocator: SlabAllocator
    offset: int
    nbytes: int

    def release(self) -> None:
        """Give the range back to its allocator, once."""
        self.allocator.release(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class SlabAllocator:
    """Hand out slabs of `nbytes` bytes of memory to threads, first fit, waiting for room.

    Threads are served in the order they came: a large request is not starved by small ones.
    Whoever holds a slab must not reserve another one before releasing it, or all can wait.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes // ALIGNMENT * ALIGNMENT
        self._changed = threading.Condition()
        self._free = [(0, self.nbytes)]  # (offset, length), rising, never adjacent
        self._held: set[Slab] = set()
        self._waiting: deque[object] = deque()
        self._cancelled = False

    @property
    def free_bytes(self) -> int:
        """Bytes not reserved, perhaps in several pieces."""
        with self._changed:
            return sum(length for _, length in self._free)

    def reserve(self, nbytes: int, *, timeout: float | None = None, name: str = "a task") -> Slab:
        """Take `nbytes` (rounded up to 4 KiB), waiting until they are free in one piece.

        timeout: seconds to wait, None for ever; 0 does not wait.
        name:    what the memory is for, in the message when it can never fit.
        Raises UsageError, TimeoutError, or ReservationCancelledError after `cancel`.
        """
        size = max(1, -(-nbytes // ALIGNMENT)) * ALIGNMENT
        if size > self.nbytes:
            raise UsageError(
                f"{name} needs {size} bytes in memory at once, the buffer has {self.nbytes}; "
                f"give a larger --buffer-bytes"
            )
        deadline = None if timeout is None else time.monotonic() + timeout
        turn = object()
        with self._changed:
            self._waiting.append(turn)
            try:
                return self._wait_for(size, turn, deadline)
            finally:
                self._waiting.remove(turn)
                self._changed.notify_all()  # the next in line may fit as well

    def release(self, slab: Slab) -> None:
        """Give a slab back. Raises ValueError when it is not held."""
        with self._changed:
            if slab not in self._held:
                raise ValueError(f"slab at {slab.offset} is not held")
            self._held.remove(slab)
            self._put_back(slab.offset, slab.nbytes)
            self._changed.notify_all()

    def cancel(self) -> None:
        """Let every waiting and later `reserve` raise ReservationCancelledError."""
        with self._changed:
            self._cancelled = True
            self._changed.notify_all()

    def _wait_for(self, size: int, turn: object, deadline: float | None) -> Slab:
        while True:
            if self._cancelled:
                raise ReservationCancelledError
            if self._waiting[0] is turn and (slab := self._take(size)):
                return slab
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise TimeoutError(f"no {size} bytes of the buffer came free")
            self._changed.wait(left)

    def _take(self, size: int) -> Slab | None:
        for index, (offset, length) in enumerate(self._free):
            if length >= size:
                rest = [(offset + size, length - size)] if length > size else []
                self._free[index : index + 1] = rest
                slab = Slab(self, offset, size)
                self._held.add(slab)
                return slab
        return None

    def _put_back(self, offset: int, length: int) -> None:
        at = bisect_left(self._free, (offset, 0))
        if at < len(self._free) and self._free[at][0] == offset + length:
            length += self._free.pop(at)[1]
        if at and sum(self._free[at - 1]) == offset:
            at -= 1
            before, before_length = self._free.pop(at)
            offset, length = before, before_length + length
        self._free.insert(at, (offset, length))


def place(sizes: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], int]:
    """Lay objects out in a slab at 4 KiB-aligned offsets: offsets [n] int64, the slab's bytes."""
    ends = np.cumsum(-(-sizes // ALIGNMENT) * ALIGNMENT, dtype=np.int64)
    offsets = np.concatenate([np.zeros(1, dtype=np.int64), ends])
    return offsets[:-1], int(offsets[-1])
