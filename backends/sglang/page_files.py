"""The files of one pool's pages: HiCacheFile's names and bytes, then a trailer of ours.

Nothing here has access to host memory. All methods raise OSError.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import stat
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from hicachectl.backends.disk.io import CREATE_FILE, OPEN_FILE, fill, write_all
from hicachectl.backends.object_files.epochs import owner_of
from hicachectl.backends.object_files.tree import Temporaries
from hicachectl.formats.errors import FormatError
from hicachectl.formats.hashing import HASH_BYTES
from hicachectl.formats.trailer import (
    NO_RANK,
    TRAILER_BYTES,
    Expected,
    PoolTrailers,
    digest_function,
    parse_trailer,
    trailer_name,
    trailer_rank,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicachectl.backends.file.folders import ObjectDirectory
    from hicachectl.backends.sglang.calls import Call
    from hicachectl.backends.sglang.capacity import Capacity
    from hicachectl.backends.sglang.counters import Counters
    from hicachectl.backends.sglang.served import ServedPool
    from hicachectl.backends.sglang.settings import Settings

_BAD_FILE = {errno.EACCES, errno.EIO, errno.ELOOP}  # a rename can replace such a file
_MODE = 0o666
_TOUCHED_EVERY_NS = 3600 * 10**9
_MOST_IN_USE = 1 << 15  # pages

Page = tuple[bytes, bytes]  # name of a page's file, and the 32 bytes of its hash


def named(pages: Sequence[str], suffix: bytes) -> list[Page]:
    """Return the files of pages. Raises ValueError unless all are page hashes.

    suffix: end of the names, after the page hash.
    """
    hashes = list(map(bytes.fromhex, pages))
    if list(map(bytes.hex, hashes)) != list(pages) or set(map(len, hashes)) - {HASH_BYTES}:
        raise ValueError("not a page hash")
    return list(zip([page.encode() + suffix for page in pages], hashes, strict=True))


class Found(NamedTuple):
    """A file as it was examined.

    problem: result of `PageFiles.problem`. facts: stat of the open file.
    """

    problem: str
    facts: os.stat_result


class Memory:
    """Memory for a page that is read.

    whole: memory for the page, its trailer and one byte more.
    page, trailer: their parts of it.
    address: address of the page.
    """

    def __init__(self, nbytes: int) -> None:
        """nbytes: bytes of a page."""
        whole = nbytes + TRAILER_BYTES
        mapping = mmap.mmap(-1, whole + 1)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        self.whole = memoryview(mapping)
        self.page, self.trailer = self.whole[:nbytes], self.whole[nbytes:whole]


class _OfThread(threading.local):
    """Objects of which each thread has its own.

    memory: the thread's memory for `PageFiles.read`.
    """

    def __init__(self, nbytes: int) -> None:
        """nbytes: bytes of a page."""
        self.memory = Memory(nbytes)


class PageFiles:
    """The files of one pool in a directory.

    own: memory of each thread.
    suffix: end of each file name, after the page hash.

    A missing file raises FileNotFoundError.
    """

    def __init__(
        self,
        directory: ObjectDirectory,
        pool: ServedPool,
        suffix: bytes,
        settings: Settings,
        capacity: Capacity,
        counters: Counters,
        *,
        touches: bool = True,
    ) -> None:
        """touches: reads count as use, for the order of eviction."""
        file, identity = pool.coordinate, pool.identity.hash()
        name, rank = trailer_name(pool.name, file.part), trailer_rank(file.shard)
        self.own = _OfThread(pool.nbytes)
        self.suffix = suffix
        self._directory = directory
        self._capacity = capacity
        self._counters = counters
        self._touches = touches
        self._epoch = capacity.epoch(suffix)
        self._hash = digest_function(settings.digest)
        self._nbytes = pool.nbytes
        self._whole = pool.nbytes + TRAILER_BYTES
        self._rank = rank
        self._takes_bare = settings.unstamped == "read"  # files without a trailer are pages too
        self._takes_unranked = settings.unranked == "read"
        # A trailer that names no rank is then read like one of ours.
        self._trailers, self._unranked = (
            PoolTrailers(settings.digest, pool.nbytes, identity, name, one)
            for one in (rank, NO_RANK if self._takes_unranked else rank)
        )
        self._expected = Expected(frozenset((name,)), frozenset((rank,)), identity)
        self._temporaries = Temporaries(directory, owner_of(suffix))
        self._unused_ns = 0  # a file with an earlier atime is touched when it is read
        self._in_use: set[bytes] = set()  # pages that need no touch until `_in_use_until`
        self._in_use_until = 0

    def look(self) -> None:
        """Learn which files are stale after a `clear`, or long unused; once per call of SGLang."""
        self._epoch.look()
        now = time.time_ns()
        self._unused_ns = now - _TOUCHED_EVERY_NS
        if now > self._in_use_until or len(self._in_use) > _MOST_IN_USE:
            self._in_use, self._in_use_until = set(), now + _TOUCHED_EVERY_NS // 4

    def problem(self, page: Page) -> str:
        """Return why a file is no page of ours, by its length and trailer, not by its digest.

        "damaged", "foreign", "unranked", "unstamped", "unreadable", "stale"; "" for a page of ours.
        """
        descriptor = self._open(page)
        try:
            # One byte more shows a file that is too long, without a stat.
            data = os.pread(descriptor, TRAILER_BYTES + 1, self._nbytes)
        except OSError:
            data = b""
        finally:
            os.close(descriptor)
        is_ours = self._trailers.digest(data, page[1]) or self._unranked.digest(data, page[1])
        if is_ours and not self._epoch.time_ns:
            return ""
        return self.examine(page).problem

    def is_absent(self, page: Page) -> bool:
        """Return whether a page has no file. This is faster than `examine`."""
        here, name = self._directory.place(page[0])
        return not os.access(name, os.F_OK, dir_fd=here)

    def examine(self, page: Page) -> Found:
        """Return a page's file with its `problem`."""
        try:
            return self._examined(page)
        except OSError as error:
            if error.errno not in _BAD_FILE:
                raise
            here, name = self._directory.place(page[0])
            return Found("unreadable", os.stat(name, dir_fd=here, follow_symlinks=False))

    def _examined(self, page: Page) -> Found:
        descriptor = self._open(page)
        try:
            facts = os.fstat(descriptor)
            data = b""
            if facts.st_size == self._whole:
                data = os.pread(descriptor, TRAILER_BYTES, self._nbytes)
            return Found(self._problem(page, facts, data), facts)
        finally:
            os.close(descriptor)

    def read(self, page: Page, memory: Memory) -> Found | None:
        """Read a page, and check all that is stored of it; return its file if it has a problem.

        Without a problem, the memory holds the page.
        """
        # Without `_open`: for pages of 50 KB, each call of a Python function shows.
        here, name = self._directory.place(page[0])
        descriptor = os.open(name, OPEN_FILE, dir_fd=here)
        try:
            facts = None if page[1] in self._in_use else os.fstat(descriptor)
            try:
                # One byte more shows a file that is too long, without a stat.
                nbytes = os.preadv(descriptor, (memory.whole,), 0)
            except OSError:
                nbytes = 0
            if nbytes == self._whole and not self._epoch.time_ns:
                trailer, digest = bytes(memory.trailer), self._hash((memory.page,))
                is_ours = trailer == self._trailers.dump(page[1], digest)
                if is_ours or trailer == self._unranked.dump(page[1], digest):
                    if facts is not None:
                        self._touch(descriptor, page, facts)
                    if not is_ours:
                        self._note_unranked(page)
                    return None
            return self._read_other(descriptor, page, memory, facts or os.fstat(descriptor))
        finally:
            os.close(descriptor)

    def _read_other(
        self, descriptor: int, page: Page, memory: Memory, facts: os.stat_result
    ) -> Found | None:
        """Read a page that is damaged or has another trailer or none, or that may be stale."""
        size = facts.st_size
        if size not in (self._nbytes, self._whole):
            return Found(self._problem(page, facts, b""), facts)
        if not _is_filled(descriptor, memory.whole[:size]):
            return Found("damaged", facts)
        data = bytes(memory.whole[self._nbytes : size])
        if problem := self._problem(page, facts, data):
            return Found(problem, facts)
        trailer = parse_trailer(data)
        if trailer and digest_function(trailer.digest_kind)((memory.page,)) != trailer.digest:
            return Found("damaged", facts)
        self._touch(descriptor, page, facts)
        if trailer and trailer.rank == NO_RANK:
            self._note_unranked(page)
        return None

    def _note_unranked(self, page: Page) -> None:
        """Count a page that is read although its trailer names no rank, if another one could."""
        if self._rank != NO_RANK:
            self._counters.noted("unranked", f"{page[0].decode()}: its trailer names no rank")

    def _touch(self, descriptor: int, page: Page, facts: os.stat_result) -> None:
        """Mark a page as used if it was not for an hour.

        facts: stat of the file before it was read, since the mount may update the atime then.
        """
        is_unused = self._touches and facts.st_atime_ns < self._unused_ns
        if is_unused and not self._capacity.used(self.suffix, descriptor, facts):
            self.remove(page, Found("stale", facts))
        self._in_use.add(page[1])

    def keep(self, page: Page, found: Found) -> bool:
        """Mark a page that a write found in place; False if it has to be written after all."""
        return self._capacity.keep(page[0], found.facts)

    def write(
        self,
        page: Page,
        views: Sequence[memoryview],
        call: Call,
        replaced: Found | None = None,
    ) -> None:
        """Write a page's file under its name.

        views: the page's bytes in order, in memory that may change after the call. Then, and if the
        bytes changed while they were written, nothing gets the name. replaced: the file in its
        place. Raises Ended, and OSError: ENOSPC without room, EAGAIN if the bytes changed.
        """
        if not self._capacity.admit(self._whole):
            raise OSError(errno.ENOSPC, "no room within max_size and min_free_space")
        try:
            self._write(page, views, call)
        except BaseException:
            self._capacity.release(self._whole)
            raise
        if replaced is not None:
            self._capacity.release(replaced.facts.st_size)

    def _write(self, page: Page, views: Sequence[memoryview], call: Call) -> None:
        key, page_hash = page
        digest = self._digest(views, call)
        trailer = self._trailers.dump(page_hash, digest)
        here, name = self._directory.place_for_new(key)
        temporary = self._temporaries.name(key)
        descriptor = os.open(temporary, CREATE_FILE, _MODE, dir_fd=here)
        try:
            try:
                call.check()
                write_all(descriptor, [*views, trailer])
            finally:
                os.close(descriptor)
            if self._digest(views, call) != digest:
                raise OSError(errno.EAGAIN, "the page changed while it was written")
            call.check()
            os.rename(temporary, name, src_dir_fd=here, dst_dir_fd=here)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary, dir_fd=here)
            raise

    def _digest(self, views: Sequence[memoryview], call: Call) -> bytes:
        """Return the digest of a page while its call lasts. Raises Ended."""
        call.hold()
        try:
            return self._hash(views)
        finally:
            call.let_go()

    def remove(self, page: Page, found: Found) -> bool:
        """Remove a page's file if it is still the one examined. Return whether it was removed."""
        removed = self._temporaries.remove_seen(page[0], found.facts, used_since=True)
        if removed:
            self._capacity.removed(self.suffix, found.facts.st_size)
        return removed

    def _open(self, page: Page) -> int:
        """Open a page's file for reading."""
        here, name = self._directory.place(page[0])
        return os.open(name, OPEN_FILE, dir_fd=here)

    def _problem(self, page: Page, facts: os.stat_result, data: bytes) -> str:
        """Return why a file is no page of ours; "" if it is one, whatever its digest.

        data: the trailer's bytes; b"" for a file without room for one.
        """
        return "stale" if self._epoch.stale(facts) else self._judged(page, facts, data)

    def _judged(self, page: Page, facts: os.stat_result, data: bytes) -> str:
        if not stat.S_ISREG(facts.st_mode):
            return "unreadable"
        if facts.st_size == self._nbytes:
            return "" if self._takes_bare else "unstamped"
        try:
            trailer = parse_trailer(data)
        except FormatError:
            return "damaged"
        if trailer is None:
            return "damaged"
        if different := self._expected.difference(trailer, self._nbytes, page[1]):
            return "foreign" if different in ("identity", "rank") else "damaged"
        return "" if self._takes_unranked or trailer.rank else "unranked"


def _is_filled(descriptor: int, memory: memoryview) -> bool:
    """Read a file's start; return whether it has as many bytes, and all of them can be read."""
    try:
        return fill(descriptor, (memory,)) == len(memory)
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        return False
