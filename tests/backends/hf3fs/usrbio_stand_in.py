"""A stand-in for 3FS's `hf3fs_fuse.io`, which copies real bytes as the FUSE daemon does.

The daemon opens the shared memory by name, in its own mapping. Its threads complete reads in the
reverse order of submission. Like the real package, it refuses wrong calls, such as descriptors
that are not registered. Source: 3FS hf3fs_fuse/io.py, src/lib/py/usrbio_binding.cc.
"""

from __future__ import annotations

import errno
import mmap
import os
import queue
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

if TYPE_CHECKING:
    import datetime
    from types import SimpleNamespace


@dataclass
class Piece:
    """A slice of an iovec."""

    iovec: Iovec
    start: int
    stop: int
    result: int = 0
    userdata: Any = None


class Iovec:
    """Registered memory; its link under the mount is removed with it."""

    def __init__(self, daemon: Daemon, memory: SimpleNamespace) -> None:
        target = Path("/dev/shm") / memory.name
        self._link = Path(daemon.mount) / "3fs-virt" / "iovs" / str(uuid4())
        self._link.symlink_to(target)
        descriptor = os.open(self._link, os.O_RDWR)
        try:
            self.size = os.fstat(descriptor).st_size
            self.daemons_view = mmap.mmap(descriptor, self.size)
        finally:
            os.close(descriptor)
        assert len(memory.buf) == self.size

    def __getitem__(self, part: slice) -> Piece:
        start, stop, step = part.indices(self.size)
        assert step == 1
        return Piece(self, start, stop)

    def __del__(self) -> None:
        self._link.unlink()


class Ring:
    """A queue of reads; one thread submits and waits."""

    def __init__(self, daemon: Daemon, entries: int) -> None:
        self._daemon = daemon
        self._entries = entries
        self._prepared: list[tuple[Piece, int, int]] = []
        self._waiting = 0
        self._done: queue.Queue[Piece] = queue.Queue()
        self._owner = threading.get_ident()

    def prepare(self, piece: Piece, read: bool, fd: int, off: int, userdata: Any = None) -> Ring:
        assert read
        if self._waiting + len(self._prepared) >= self._entries:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        if fd not in self._daemon.registered:
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))
        piece.userdata = userdata
        self._prepared.append((piece, fd, off))
        return self

    def submit(self) -> Ring:
        work, self._prepared = self._prepared, []
        self._waiting += len(work)
        if not self._daemon.silent:
            serving = threading.Thread(target=self._serve, args=(work[::-1],))
            self._daemon.threads.append(serving)
            serving.start()
        return self

    def _serve(self, work: list[tuple[Piece, int, int]]) -> None:
        for piece, fd, off in work:
            view = memoryview(piece.iovec.daemons_view)[piece.start : piece.stop]
            try:
                piece.result = self._daemon.fail.get(off) or os.preadv(fd, [view], off)
            except OSError as error:
                piece.result = -(error.errno or errno.EIO)
            finally:
                view.release()
            self._daemon.served += 1
            self._done.put(piece)

    def wait(
        self,
        *,
        max_results: int = 0,
        min_results: int = 0,
        timeout: datetime.timedelta | None = None,
    ) -> list[Piece]:
        assert timeout is not None
        found: list[Piece] = []
        try:
            while len(found) < max(1, min_results):
                found.append(self._done.get(timeout=timeout.total_seconds()))
            while len(found) < max_results:
                found.append(self._done.get_nowait())
        except queue.Empty:
            pass
        self._waiting -= len(found)
        return found


@dataclass
class Daemon:
    """The functions of the module, and the state of its daemon.

    silent: never complete a read. fail: result by file offset, in bytes.
    """

    mount: str
    registered: set[int] = field(default_factory=set)
    fail: dict[int, int] = field(default_factory=dict)
    silent: bool = False
    served: int = 0
    rings: int = 0
    threads: list[threading.Thread] = field(default_factory=list)

    def settle(self) -> None:
        """Wait until the threads have released their last memory."""
        for thread in self.threads:
            thread.join()

    def extract_mount_point(self, path: str) -> str | None:
        return self.mount if Path(path).is_relative_to(self.mount) else None

    def register_fd(self, fd: int) -> None:
        if fd in self.registered:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        os.fstat(fd)
        self.registered.add(fd)

    def deregister_fd(self, fd: int) -> None:
        os.fstat(fd)  # fails if it is closed
        self.registered.remove(fd)

    def make_iovec(
        self, shm: SimpleNamespace, hf3fs_mount_point: str, block_size: int = 0, numa: int = -1
    ) -> Iovec:
        assert hf3fs_mount_point == self.mount
        return Iovec(self, shm)

    def make_ioring(
        self,
        hf3fs_mount_point: str,
        entries: int,
        for_read: bool = True,
        io_depth: int = 0,
        priority: int | None = None,
        timeout: int | None = None,
        numa: int = -1,
        flags: int = 0,
    ) -> Ring:
        assert hf3fs_mount_point == self.mount
        assert for_read
        self.rings += 1
        return Ring(self, entries)
