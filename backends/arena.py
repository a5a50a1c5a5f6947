"""Host memory that objects are read into, and the allocator of its slabs."""

from __future__ import annotations

import mmap
import os
import secrets
import threading
from bisect import bisect_left
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np
import numpy.typing as npt

from hicachectl.formats.errors import UsageError
from hicachectl.formats.wording import failed

if TYPE_CHECKING:
    from collections.abc import Callable

# Slabs and objects begin at multiples of this many bytes, because O_DIRECT and the registration of
# memory need it.
ALIGNMENT = 4096
_MADV_POPULATE_WRITE = 23  # since Linux 5.14
_SHARED_MEMORY = Path("/dev/shm")  # shm_open's directory on Linux


class ReservationCancelledError(Exception):
    """Another thread failed and cancelled all waiting reservations."""


class Arena:
    """One shared, page-aligned, zero-filled mapping of `nbytes` bytes, rounded up to 4 KiB.

    The system allocates memory at first use. The mapping is shared because memory registered for
    RDMA or with CUDA must stay the same physical memory across a fork.

    named: use a POSIX shared memory object, allocated at once. Other processes can open it by
        `name` until `forget_name`.
    Raises UsageError if the system refuses the memory.
    """

    def __init__(self, nbytes: int, *, named: bool = False) -> None:
        if nbytes < 1:
            raise ValueError(f"arena of {nbytes} bytes: must be at least 1")
        self.nbytes = -(-nbytes // ALIGNMENT) * ALIGNMENT
        self.name = f"hicachectl-{secrets.token_hex(16)}" if named else None
        try:
            self._map = self._mapped()
        except (OSError, OverflowError) as error:
            self.forget_name()
            raise UsageError(
                failed("--buffer-bytes", f"allocate {nbytes} bytes", error, "give a smaller size")
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
            # Allocate now. If memory ran out at first use, the system would kill the process.
            os.posix_fallocate(descriptor, 0, self.nbytes)
            return mmap.mmap(descriptor, self.nbytes)
        finally:
            os.close(descriptor)

    def forget_name(self) -> None:
        """Remove the name. Existing mappings stay valid, and a later crash leaves no file."""
        name, self.name = self.name, None
        if name is not None:
            (_SHARED_MEMORY / name).unlink(missing_ok=True)

    @property
    def address(self) -> int:
        """Return the start address, for registration with a device or network card."""
        return int(self.array.ctypes.data)

    def view(self, offset: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return a range of the arena as uint8, not copied.

        Raises ValueError for a range outside the arena.
        """
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise ValueError(f"bytes {offset}+{nbytes} are outside the arena of {self.nbytes}")
        return self.array[offset : offset + nbytes]

    def populate(self) -> None:
        """Allocate all of the memory now, so that no read waits for the system to allocate it.

        Systems before Linux 5.14 allocate each page of memory at its first use instead.
        """
        with suppress(OSError):
            self._map.madvise(_MADV_POPULATE_WRITE)

    def at_close(self, undo: Callable[[], None]) -> None:
        """Make `close` call `undo`, such as a function that unregisters the memory from CUDA.

        The last `undo` runs first.
        """
        self._at_close.append(undo)

    def close(self) -> None:
        """Unmap the memory now, or when the last view in use ends."""
        while self._at_close:
            self._at_close.pop()()
        self.forget_name()
        self.memory.release()
        self.memory = memoryview(b"")
        self.array = np.empty(0, dtype=np.uint8)
        with suppress(BufferError):  # a view is still in use
            self._map.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True, eq=False)
class Slab:
    """A reserved range of an arena. Free the range with `release` or a with block."""

    allocator: SlabAllocator
    offset: int
    nbytes: int

    def release(self) -> None:
        """Free the range. Call once."""
        self.allocator.release(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class SlabAllocator:
    """Allocator of slabs in one memory of `nbytes` bytes. It takes the first free range that fits.

    Threads wait in order of arrival, so small requests cannot starve a large request. A thread must
    release its slab before it reserves another slab. Otherwise all threads can wait for ever.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes // ALIGNMENT * ALIGNMENT
        self._changed = threading.Condition()
        self._free = [(0, self.nbytes)]  # free (offset, length), ascending and never adjacent
        self._held: set[Slab] = set()
        self._waiting: deque[object] = deque()
        self._cancelled = False

    def reserve(self, nbytes: int, *, name: str = "a task") -> Slab:
        """Reserve `nbytes` (rounded up to 4 KiB) in one piece, waiting until they are free.

        name: purpose of the memory, for messages.
        Raises UsageError if the request can never fit, ReservationCancelledError after `cancel`.
        """
        size = max(1, -(-nbytes // ALIGNMENT)) * ALIGNMENT
        if size > self.nbytes:
            raise UsageError(
                f"{name} needs {size} bytes of memory at once, but the buffer has {self.nbytes}; "
                f"give a larger --buffer-bytes"
            )
        turn = object()
        with self._changed:
            self._waiting.append(turn)
            try:
                while not self._cancelled:
                    if self._waiting[0] is turn and (slab := self._take(size)):
                        return slab
                    self._changed.wait()
                raise ReservationCancelledError
            finally:
                self._waiting.remove(turn)
                self._changed.notify_all()  # the next request may fit too

    def release(self, slab: Slab) -> None:
        """Free a slab. Raises ValueError if the slab is not reserved."""
        with self._changed:
            if slab not in self._held:
                raise ValueError(f"slab at {slab.offset} is not reserved")
            self._held.remove(slab)
            self._put_back(slab.offset, slab.nbytes)
            self._changed.notify_all()

    def cancel(self) -> None:
        """Make all waiting and later `reserve` calls raise ReservationCancelledError."""
        with self._changed:
            self._cancelled = True
            self._changed.notify_all()

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
    """Return 4 KiB-aligned offsets of objects in a slab, [n] int64, and the bytes that they need.

    sizes: [n] int64, bytes of each object.
    """
    ends = np.cumsum(-(-sizes // ALIGNMENT) * ALIGNMENT, dtype=np.int64)
    offsets = np.concatenate([np.zeros(1, dtype=np.int64), ends])
    return offsets[:-1], int(offsets[-1])
