"""Read and write the pages of one rank in a file store.

A read can hang in the system and end long after its call, so a read fills memory of its worker
thread, and not the host pool. After length, identity and digest are checked, the bytes are copied
to the host pool, but only while the call is open. A write copies from the host pool into a
temporary file, which is renamed to its final name only while the call is open.
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
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Literal, NamedTuple

from hicachectl.backends.disk.io import CREATE_FILE, LIBC, NO_ROOM, OPEN_FILE, fill, write_all
from hicachectl.backends.file.folders import ObjectDirectory
from hicachectl.backends.object_files.epochs import EpochReader, begin_epoch, owner_of
from hicachectl.backends.object_files.markers import write_marker
from hicachectl.backends.object_files.tree import Temporaries
from hicachectl.backends.sglang.capacity import Capacity
from hicachectl.backends.sglang.page_store import PageStore
from hicachectl.backends.urls import FileParams, params_of
from hicachectl.formats.documents import shown
from hicachectl.formats.errors import FormatError, HicacheError
from hicachectl.formats.hashing import HASH_BYTES
from hicachectl.formats.keys.file import FileGrammar
from hicachectl.formats.kinds.pool import pool_names
from hicachectl.formats.marker import Marker
from hicachectl.formats.objects import ANCHOR, PAGE_DIGITS
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
from hicachectl.formats.wording import reason_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicachectl.backends.sglang.calls import Call, Workers
    from hicachectl.backends.sglang.counters import Counters
    from hicachectl.backends.sglang.page_store import Pieces, ServedPool
    from hicachectl.backends.sglang.settings import Settings
    from hicachectl.backends.urls import StoreUrl
    from hicachectl.formats.plugin_status import Refused

_BYTES_PER_TASK = 1 << 20  # bytes for which a call uses one more thread
# A call for smaller pages uses one thread, because most of its time is spent in Python, which runs
# in one thread at a time. If a page takes longer than _SLOW_SECONDS, the call uses several threads
# all the same, because the threads then wait for the store at the same time.
_LARGE_BYTES = 256 << 10
_SLOW_SECONDS = 200e-6
_EXAMINED_BYTES = 16 << 10  # examining a file takes as long as reading this many bytes
_LONGEST_NAME = 255  # most bytes of a file name on Linux
_Problem = Literal["damaged", "foreign", "unranked", "unstamped", "unreadable", "stale", ""]
_DETAILS: dict[_Problem, str] = {
    "damaged": "its length, trailer or digest is wrong; a rank that may write removes or replaces "
    "the file",
    "foreign": "written for other weights, dtype or layout, or by another rank",
    "unranked": 'its trailer names no rank; with "unranked": "read", servers use such files',
    "unstamped": 'has no trailer; with "unstamped": "read", servers use such files',
    "unreadable": "cannot be read, or is no regular file",
    "stale": "written before the store was cleared",
}
# A write replaces a file that has one of these errors. A file that this user may not read stays,
# because other users may be able to read it.
_BAD_FILE = {errno.EIO, errno.ELOOP}
_MODE = 0o666
_TOUCHED_EVERY_NS = 3600 * 10**9
_MOST_IN_USE = 1 << 15  # most pages remembered as used lately
_AT_SYMLINK_NOFOLLOW = 0x100
_UTIME_NOW, _UTIME_OMIT = (1 << 30) - 1, (1 << 30) - 2
# Two timespecs, which set the atime to the file system's present time and leave the mtime.
_ATIME_ONLY = (ctypes.c_long * 4)(0, _UTIME_NOW, 0, _UTIME_OMIT)

Page = tuple[bytes, bytes]  # file name of a page, and the 32 bytes of the page hash


def named(pages: Sequence[str], suffix: bytes) -> list[Page]:
    """Return file name and hash of each page.

    pages: page hashes in lower-case hexadecimal digits.
    suffix: end of the file names, after the page hash.
    Raises ValueError if a text is not a page hash.
    """
    hashes = list(map(bytes.fromhex, pages))
    if list(map(bytes.hex, hashes)) != list(pages) or set(map(len, hashes)) - {HASH_BYTES}:
        raise ValueError("a key is not a page hash")
    return list(zip([page.encode() + suffix for page in pages], hashes, strict=True))


class Found(NamedTuple):
    """Result of the examination of a file.

    problem: result of `PageFiles.problem`.
    st: stat of the file.
    """

    problem: _Problem
    st: os.stat_result


class Memory:
    """Memory that a page is read into.

    whole: memory for the page, its trailer and one byte more. A file that fills this byte is too
        long.
    page: the part of `whole` for the page.
    trailer: the part of `whole` for the trailer.
    address: address of the page.
    """

    def __init__(self, nbytes: int) -> None:
        """Map memory for a page of `nbytes` bytes."""
        whole = nbytes + TRAILER_BYTES
        mapping = mmap.mmap(-1, whole + 1)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        self.whole = memoryview(mapping)
        self.page, self.trailer = self.whole[:nbytes], self.whole[nbytes:whole]


class _OfThread(threading.local):
    """State of one thread.

    memory: the thread's memory for `PageFiles.read`.
    """

    def __init__(self, nbytes: int) -> None:
        """Map memory for a page of `nbytes` bytes, in each thread at its first access."""
        self.memory = Memory(nbytes)


class PageFiles:
    """The files of one pool in a directory.

    own: state of the calling thread.
    suffix: end of each file name, after the page hash.

    `problem`, `examine` and `read` raise FileNotFoundError if a page has no file.
    """

    def __init__(
        self,
        directory: ObjectDirectory,
        pool: ServedPool,
        suffix: bytes,
        settings: Settings,
        capacity: Capacity | None,
        counters: Counters,
        *,
        touches: bool = True,
    ) -> None:
        """Serve a pool's files.

        capacity: the limits on the space of the files; None if this rank does not write the pool.
        touches: whether a read marks a page as used, which delays its eviction.
        """
        file, identity = pool.coordinate, pool.identity.hash()
        name, rank = trailer_name(pool.name, file.part), trailer_rank(file.shard)
        self.own = _OfThread(pool.nbytes)
        self.suffix = suffix
        self._directory = directory
        self._capacity = capacity
        self._counters = counters
        self._touches = touches
        self._epoch = EpochReader(directory, suffix)
        self._hash = digest_function(settings.digest)
        self._nbytes = pool.nbytes
        self._whole = pool.nbytes + TRAILER_BYTES
        self._rank = rank
        self._takes_bare = settings.unstamped == "read"  # read files without a trailer as well
        self._takes_unranked = settings.unranked == "read"
        # With "unranked": "read", a trailer without a rank is accepted like a trailer with our
        # rank.
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
        """Update which files are stale, and which are long unused.

        Each thread calls this once for each call of SGLang.
        """
        self._epoch.look()
        now = time.time_ns()
        self._unused_ns = now - _TOUCHED_EVERY_NS
        if now > self._in_use_until or len(self._in_use) > _MOST_IN_USE:
            self._in_use, self._in_use_until = set(), now + _TOUCHED_EVERY_NS // 4

    def problem(self, page: Page) -> _Problem:
        """Return why a page's file cannot be used. The digest is not checked.

        The result is a key of `_DETAILS`, or "" for a file that can be used.
        """
        descriptor = self._open(page)
        try:
            # One byte more than the trailer is read. It shows a file that is too long, so that no
            # stat is needed.
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
        """Return whether a page has no file. This is faster than `examine`.

        Raises FileNotFoundError if even the file's folder is missing.
        """
        here, name = self._directory.place(page[0])
        return not os.access(name, os.F_OK, dir_fd=here)

    def examine(self, page: Page) -> Found:
        """Return the stat of a page's file, and its `problem`."""
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
            st = os.fstat(descriptor)
            data = b""
            if st.st_size == self._whole:
                data = os.pread(descriptor, TRAILER_BYTES, self._nbytes)
            return Found(self._problem(page, st, data), st)
        finally:
            os.close(descriptor)

    def read(self, page: Page, memory: Memory) -> Found | None:
        """Read a page, and check its length, trailer and digest.

        Return the stat and the problem of a file that cannot be used, else None. The memory holds
        the page only if the result is None.
        """
        # `_open` is inlined, because one more Python call is measurable for pages of 50 KB.
        here, name = self._directory.place(page[0])
        descriptor = os.open(name, OPEN_FILE, dir_fd=here)
        try:
            st = None if page[1] in self._in_use else os.fstat(descriptor)
            try:
                # `memory.whole` has one byte more than a file should have. It shows a file that is
                # too long, so that no stat is needed.
                nbytes = os.preadv(descriptor, (memory.whole,), 0)
            except OSError:
                nbytes = 0
            if nbytes == self._whole and not self._epoch.time_ns:
                trailer, digest = bytes(memory.trailer), self._hash((memory.page,))
                is_ours = trailer == self._trailers.dump(page[1], digest)
                if is_ours or trailer == self._unranked.dump(page[1], digest):
                    if st is not None:
                        self._touch(descriptor, page, st)
                    if not is_ours:
                        self._note_unranked(page)
                    return None
            return self._read_other(descriptor, page, memory, st or os.fstat(descriptor))
        finally:
            os.close(descriptor)

    def _read_other(
        self, descriptor: int, page: Page, memory: Memory, st: os.stat_result
    ) -> Found | None:
        """Read a page whose file may be stale, or has another trailer than this rank writes."""
        size = st.st_size
        if size not in (self._nbytes, self._whole):
            return Found(self._problem(page, st, b""), st)
        if not _is_filled(descriptor, memory.whole[:size]):
            return Found("damaged", st)
        data = bytes(memory.whole[self._nbytes : size])
        if problem := self._problem(page, st, data):
            return Found(problem, st)
        trailer = parse_trailer(data)
        if trailer and digest_function(trailer.digest_kind)((memory.page,)) != trailer.digest:
            return Found("damaged", st)
        self._touch(descriptor, page, st)
        if trailer and trailer.rank == NO_RANK:
            self._note_unranked(page)
        return None

    def _note_unranked(self, page: Page) -> None:
        """Count a page whose trailer names no rank, if trailers can name this rank."""
        if self._rank != NO_RANK:
            self._counters.noted("unranked", f"{page[0].decode()}: its trailer names no rank")

    def _touch(self, descriptor: int, page: Page, st: os.stat_result) -> None:
        """Mark a page as used if its last use is over an hour ago.

        st: stat of the file before the read, because the read may update the atime.
        """
        is_unused = self._touches and st.st_atime_ns < self._unused_ns
        # A touch sets the ctime, which would revive an object that a `clear` has made stale.
        if is_unused and not self._is_stale(st):
            LIBC.futimens(descriptor, _ATIME_ONLY)
            if self._is_stale(st):  # a `clear` came after the first look
                self.remove(page, Found("stale", st))
        self._in_use.add(page[1])

    def _is_stale(self, st: os.stat_result) -> bool:
        """Return whether a file is older than the last `clear`, which may have come just now."""
        self._epoch.look()
        return self._epoch.stale(st)

    def keep(self, page: Page, found: Found) -> bool:
        """Mark an existing file as used. Return False if the file must be written again.

        A marked file is not evicted before the writer has had time to write the page's anchor.
        """
        try:
            here, name = self._directory.place(page[0])
            if LIBC.utimensat(here, name, _ATIME_ONLY, _AT_SYMLINK_NOFOLLOW):
                # The mark also fails for another user's file. If the file is gone, `stat` raises.
                os.stat(name, dir_fd=here, follow_symlinks=False)
        except FileNotFoundError:
            return False
        # The mark sets the ctime, which revives an object that a `clear` has made stale.
        return not self._is_stale(found.st)

    def write(
        self,
        page: Page,
        views: Sequence[memoryview],
        call: Call,
        replaced: Found | None = None,
    ) -> None:
        """Write a page's file under its name.

        views: the page's bytes in order, in memory that may change after the call.
        replaced: the present file of the page, which the new file replaces; None if there is none.
        The file gets its name only if the call is open, and if the bytes did not change while they
        were written. Raises Ended, OSError with ENOSPC if the limits leave too little space, and
        OSError with EAGAIN if the bytes changed.
        """
        capacity = self._capacity
        if capacity is None or not capacity.admit(self._whole):
            raise OSError(errno.ENOSPC, "no room within max_size and min_free_space")
        try:
            self._write(page, views, call)
        except BaseException:
            capacity.release(self._whole)
            raise
        if replaced is not None:
            capacity.release(replaced.st.st_size)

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
        """Return the digest of a page in host memory. Raises Ended if the call has ended."""
        call.hold()
        try:
            return self._hash(views)
        finally:
            call.let_go()

    def remove(self, page: Page, found: Found) -> bool:
        """Remove a page's file if it is still the file that `found` describes.

        Return whether it was removed.
        """
        removed = self._temporaries.remove_unchanged(page[0], found.st, even_if_read=True)
        if removed and self._capacity is not None:
            self._capacity.release(found.st.st_size)
        return removed

    def _open(self, page: Page) -> int:
        """Open a page's file for reading."""
        here, name = self._directory.place(page[0])
        return os.open(name, OPEN_FILE, dir_fd=here)

    def _problem(self, page: Page, st: os.stat_result, data: bytes) -> _Problem:
        """Return why a file cannot be used; "" if it can be used. The digest is not checked.

        data: bytes of the trailer; b"" if the file is not as long as a page with its trailer.
        """
        if self._epoch.stale(st):
            return "stale"
        if not stat.S_ISREG(st.st_mode):
            return "unreadable"
        if st.st_size == self._nbytes:
            return "" if self._takes_bare else "unstamped"
        try:
            trailer = parse_trailer(data)
        except FormatError:
            trailer = None
        if trailer is None:
            return "damaged"
        if different := self._expected.difference(trailer, self._nbytes, page[1]):
            return "foreign" if different in ("identity", "rank") else "damaged"
        return "" if self._takes_unranked or trailer.rank else "unranked"


def _is_filled(descriptor: int, memory: memoryview) -> bool:
    """Fill memory from a file's start. Return False if the file is too short or has a bad block."""
    try:
        return fill(descriptor, (memory,)) == len(memory)
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        return False


class FilePages(PageStore):
    """Pages in a directory."""

    def __init__(
        self,
        url: StoreUrl,
        counters: Counters,
        settings: Settings,
        *,
        writes: bool = True,
    ) -> None:
        """Serve from the directory of a `file:` URL. `open` opens the directory.

        writes: whether to write. If False, the directory is neither changed nor created. A
            directory in which this process may not create files is never written.
        """
        super().__init__(counters, settings.threads)
        self._url = url
        self._settings = settings
        self._writes = writes
        self._changes = writes  # also False if this process may not create files in the directory
        self._seconds: dict[Workers, float] = {}  # time of one thread for a page, in the last call
        self._clears = self._cleared = 0  # numbers of clears that were asked for, and done
        self._directory: ObjectDirectory | None = None
        self._capacity: Capacity | None = None
        self._files: dict[str, PageFiles] = {}
        self._suffixes: dict[str, bytes] = {}  # ends of the file names, by pool

    def add(self, pool: ServedPool) -> None:
        """Serve a pool.

        Raises ValueError, on all ranks alike, if no file can have the pool's names. Raises
        ValueError also if `unranked` is "refuse", and trailers cannot name this deployment's ranks.
        """
        _check_names(pool)
        if self._settings.unranked != "read" and trailer_rank(pool.coordinate.shard) == NO_RANK:
            sizes = pool.coordinate.shard.sizes_text()
            raise ValueError(
                f"unranked: 'refuse' would refuse every page, because trailers cannot name the "
                f"ranks of {sizes}; remove the key"
            )
        self._pools[pool.name] = pool
        self._suffixes[pool.name] = FileGrammar().affix(pool.coordinate)[1].encode()

    def exists(self, pool: ServedPool, pages: Sequence[str], call: Call) -> list[bool]:
        """Return which pages have a file of our identity and of the right length."""

        def exists(files: PageFiles, page: Page, index: int) -> bool:
            try:
                problem = files.problem(page)
            except FileNotFoundError:
                return False
            if problem:
                self._refuse(problem, pool, pages[index])
            return not problem

        return self._each(self._askers, call, pool, pages, _EXAMINED_BYTES, exists)

    def read(
        self, pool: ServedPool, pages: Sequence[str], pieces: Sequence[Pieces], call: Call
    ) -> list[bool]:
        """Read pages whose length, identity and digest are right."""

        def read(files: PageFiles, page: Page, index: int) -> bool:
            memory = files.own.memory
            try:
                found = files.read(page, memory)
            except FileNotFoundError:
                self.counters.count("gone", 1)
                return False
            if found is not None:
                self._refuse(found.problem, pool, pages[index])
                if found.problem == "damaged" and self._changes:
                    call.check()
                    self._discard(pool, files, page, found)
                return False
            call.copy(memory.address, pieces[index])
            return True

        return self._each(self._readers, call, pool, pages, pool.nbytes, read)

    def write(
        self, pool: ServedPool, pages: Sequence[str], pieces: Sequence[Pieces], call: Call
    ) -> list[bool]:
        """Write missing pages to temporary files; rename each file while the call is open."""
        if not self._changes:
            self.counters.refused("unwritable", "the directory is only read", len(pages))
            return [False] * len(pages)
        keeps_foreign = self._settings.on_foreign == "leave"
        kept: list[int] = []  # pages whose existing file stays

        def write(files: PageFiles, page: Page, index: int) -> bool:
            try:
                found = None if files.is_absent(page) else files.examine(page)
            except FileNotFoundError:
                found = None
            if found is not None and not found.problem:
                if files.keep(page, found):
                    kept.append(index)
                    return True
                # The file was evicted, or a `clear` made it stale. A stale file has to be removed,
                # because the mark that `keep` has set is later than the `clear`, and would make
                # the file count as new.
                files.remove(page, found)
                found = None
            if found is not None and found.problem == "foreign" and keeps_foreign:
                self._refuse("foreign", pool, pages[index])
                return False
            views = [_view(*piece) for piece in pieces[index]]
            files.write(page, views, call, found)
            return True

        done = self._each(self._writers, call, pool, pages, pool.nbytes, write)
        self._count_written(pool, sum(done) - sum(done[index] for index in kept))
        return done

    def clear(self, call: Call) -> None:
        """Turn the objects that this rank writes into misses at once; they are removed later.

        All pages are misses until the new epoch is written into the directory.
        """
        self._clears += 1
        self._writers.map(call, self._open, [()])
        if self._clears != self._cleared:
            self.counters.failed(
                "uncleared", "the directory did not answer yet; until it does, all pages are misses"
            )

    def _written(self) -> list[ServedPool]:
        return [pool for pool in self._pools.values() if pool.writes and self._changes]

    def _forget(self) -> Callable[[], None] | None:
        directory, self._directory = self._directory, None
        self._files = {}
        self._close_capacity()
        return None if directory is None else directory.close

    def _close_capacity(self) -> None:
        capacity, self._capacity = self._capacity, None
        if capacity is not None:
            capacity.close()

    def _each(
        self,
        workers: Workers,
        call: Call,
        pool: ServedPool,
        pages: Sequence[str],
        nbytes: int,
        act: Callable[[PageFiles, Page, int], bool],
    ) -> list[bool]:
        """Return act(files, page, index) for each page; False for pages that fail or are too late.

        nbytes: bytes to handle for each page, which decide the number of threads.
        """
        done = [False] * len(pages)
        other: Refused = "unwritable" if workers is self._writers else "unreadable"
        closed: Refused | None = None  # why the directory cannot be used
        try:
            # The threads share this iterator, so that each page is handled by one of them.
            left = enumerate(named(pages, self._suffixes[pool.name]))
        except ValueError as error:
            self.counters.refused(other, str(error), len(pages))
            return done

        def work() -> None:
            nonlocal closed
            files = self._files_of(pool)
            if files is None:
                closed = "uncleared" if self._clears != self._cleared else "unopened"
                return
            files.look()
            for index, page in left:
                call.check()
                try:
                    done[index] = act(files, page, index)
                except (OSError, HicacheError) as error:
                    full = getattr(error, "errno", None) in NO_ROOM
                    reason: Refused = "full" if full else other
                    self.counters.refused(reason, f"{pages[index]}: {reason_of(error)}")

        tasks = 1
        if nbytes >= _LARGE_BYTES or self._seconds.get(workers, 0.0) > _SLOW_SECONDS:
            tasks = min(self._threads, len(pages), 1 + len(pages) * nbytes // _BYTES_PER_TASK)
        paused, begun = workers.paused, time.monotonic()
        workers.map(call, work, [()] * tasks)
        if pages and not paused:
            self._seconds[workers] = (time.monotonic() - begun) * tasks / len(pages)
        if (call.ended or not call.seconds_left) and not all(done):
            self._count_late(done.count(False), paused=paused)
        elif closed is not None:
            self.counters.count(closed, done.count(False))
        return list(done)  # a copy, because a worker that hangs may still change the list

    def _files_of(self, pool: ServedPool) -> PageFiles | None:
        """Return a pool's files; None if the directory cannot be used now."""
        directory = self._directory
        if (
            directory is None
            or pool.name not in self._files
            or self._clears != self._cleared
            or self._is_gone(directory)
        ):
            self._open()
        return self._files.get(pool.name) if self._clears == self._cleared else None

    def _is_gone(self, directory: ObjectDirectory) -> bool:
        """Return whether the path no longer leads to the open directory; True if unknown."""
        try:
            return directory.vanished
        except OSError:
            return True

    def _open_now(self) -> None:
        """Open or create the directory; do a `clear` that is still pending."""
        if self._directory is None or self._directory.vanished:
            self._files = {}
            self._close_capacity()
            self._directory = self._directory_now(self._directory)
            # `_changes` becomes False if this process may not create files in the directory.
            self._changes = self._writes and os.access(
                ".", os.W_OK, dir_fd=self._directory.descriptor, effective_ids=True
            )
        if self._pools.keys() - self._files.keys():
            self._begin(self._directory)
        if self._clears != self._cleared:
            clears = self._clears
            own = [self._suffixes[pool.name] for pool in self._pools.values() if pool.writes]
            begin_epoch(self._directory, own)
            self._cleared = clears

    def _directory_now(self, earlier: ObjectDirectory | None) -> ObjectDirectory:
        """Return the directory that the path names. Create it if this store is written.

        earlier: the directory opened before, which the path no longer names; None at first.
        """
        if earlier is None and not self._writes:
            return ObjectDirectory.open(self._url.path)
        if earlier is None:
            folders = params_of(self._url, FileParams).folders is not None or None
            return ObjectDirectory.create(self._url.path, folders=folders)
        earlier.reopen(makes=self._writes)
        return earlier

    def _begin(self, directory: ObjectDirectory) -> None:
        """Write the markers, and serve all pools from now on."""
        suffixes = {self._suffixes[pool.name]: pool.name == ANCHOR for pool in self._written()}
        known = () if self._capacity is None else self._capacity.suffixes
        if not suffixes.keys() <= set(known):
            self._close_capacity()
            self._capacity = Capacity(
                directory,
                suffixes,
                max_size=self._settings.max_size or 0,
                min_free_space=self._settings.min_free_space,
                evict=self._settings.evict,
                page_tokens=self._written()[0].identity.page_size,
                counters=self.counters,
            )
        with directory.outer(writes=True) as here:
            for pool in self._written():
                suffix = self._suffixes[pool.name].decode()
                write_marker(
                    here, Marker(suffix, pool.nbytes, pool.identity, self._settings.digest)
                )
        self._files = {
            pool.name: PageFiles(
                directory,
                pool,
                self._suffixes[pool.name],
                self._settings,
                self._capacity if self._suffixes[pool.name] in suffixes else None,
                self.counters,
                touches=self._changes,
            )
            for pool in self._pools.values()
        }

    def _refuse(self, problem: _Problem, pool: ServedPool, page: str) -> None:
        if problem:
            self.counters.refused(problem, f"{pool.name} of page {page}: {_DETAILS[problem]}")

    def _discard(self, pool: ServedPool, files: PageFiles, page: Page, found: Found) -> None:
        """Remove this rank's anchor, then a damaged file, so that the page is written again.

        The file of a trailing pool is removed alone, because the page is whole without it.
        """
        anchor = self._files.get(ANCHOR)
        if anchor is not None and pool.name != ANCHOR and not pool.trailing:
            beside = page[0][:PAGE_DIGITS] + anchor.suffix, page[1]
            with suppress(FileNotFoundError):
                anchor.remove(beside, anchor.examine(beside))
        if files.remove(page, found):
            self.counters.removed("damaged", 1)


def _check_names(pool: ServedPool) -> None:
    """Raise ValueError if file names of the model, for any pool and rank, cannot be used.

    They can be too long, or have characters that are not printable.
    """
    shard = pool.coordinate.shard
    longest = max((one.name for one in pool_names()), key=len)
    last = replace(
        shard,
        tp_rank=shard.tp_size and shard.tp_size - 1,
        pp_rank=shard.pp_size and shard.pp_size - 1,
        cp_rank=shard.cp_size and shard.cp_size - 1,
    )
    suffix = FileGrammar().affix(replace(pool.coordinate, pool=longest, shard=last))[1]
    nbytes = len(os.fsencode(f"{64 * '0'}{suffix}"))
    if nbytes > _LONGEST_NAME or not suffix.isprintable():
        raise ValueError(
            f"model_name: {shown(pool.identity.model)} makes file names of {nbytes} bytes; a name "
            f"has at most {_LONGEST_NAME} bytes, and only printable characters; give another "
            "--served-model-name"
        )


def _view(address: int, nbytes: int) -> memoryview:
    """Return host memory as bytes."""
    return memoryview(_bytes_type(nbytes).from_address(address)).cast("B")


@cache
def _bytes_type(nbytes: int) -> type[ctypes.Array[ctypes.c_char]]:
    return ctypes.c_char * nbytes
