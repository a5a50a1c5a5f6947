"""Time reads of batches through the store, and by a bare loop over the same files."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from hicachectl.backends.arena import ALIGNMENT, Arena, ReservationCancelledError, place
from hicachectl.backends.base import Status, attached, batch_spans, keys_of, take_rows
from hicachectl.backends.capabilities import InFiles
from hicachectl.backends.disk.io import LIBC, OPEN_FILE, Closing, closing_descriptor
from hicachectl.formats.errors import UntrustedError, UsageError
from hicachectl.io.forking import SharedCounter, Workers
from hicachectl.text.units import human_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hicachectl.backends.base import ReadResult, Store
    from hicachectl.bench.sample import Batch
    from hicachectl.formats.arrays import IntArray

    Send = Callable[[Any], None]
    Divided = list[list["_Piece"]]  # the calls of each thread

COLD, MIXED, CACHED, UNKNOWN = "cold", "mixed", "cached", "unknown"
# Largest share of a cold batch, and least share of a cached batch, that is in the page cache.
# Read-ahead for other files brings a few pages into memory, and reclaim removes a few.
_COLD_SHARE, _CACHED_SHARE = 0.05, 0.95
# Memory that all reads of a thread reuse. It is larger than most caches of a processor.
_REGION_BYTES = 32 << 20
_MOST_MEMORY = 2 << 30
# Share of the time for the first reads of the batches.
_FIRST_SHARE = 0.6
# Most rounds of reads from memory, and seconds after which only the first round goes on.
_MOST_ROUNDS = 8
_ROUNDS_SECONDS = 1.0
# Batches of more than this many bytes, or seconds, make a turn. A turn is read through the store,
# and by the bare loop. If each batch were read twice in a row, the second reader would find the
# bytes in the processor's cache.
_TURN_BYTES, _TURN_SECONDS = 128 << 20, 0.5


class Timing(msgspec.Struct, kw_only=True):
    """Times of one read of a batch by one rank.

    rank: number of the rank.
    cache: place of the batch's bytes before the read: cold, mixed, cached or unknown.
    pages: number of pages.
    nbytes: bytes of the objects that were read.
    gone: number of objects that had vanished.
    failed: number of objects that could not be read.
    seconds: duration of the read through the store.
    bare_seconds: duration of the bare loop; None without one.
    """

    rank: int
    cache: str
    pages: int
    nbytes: int
    gone: int = 0
    failed: int
    seconds: float
    bare_seconds: float | None = None


def timed_reads(
    store: Store,
    objects: Any,
    batches: Sequence[Sequence[Batch]],
    *,
    threads: int,
    deadline: float,
    drop_cache: bool = False,
) -> list[Timing]:
    """Read the batches of all ranks at once; return the times of the batches that began in time.

    Several ranks are processes, as on a server, if the store can be used in forked processes.
    Otherwise they are threads.
    objects: table of the inventory.
    batches: batches of each rank.
    threads: number of threads of each rank.
    deadline: `time.monotonic()` after which no batch begins, except each rank's first batch.
    drop_cache: whether to drop the objects' files from the page cache before their first read.
    Raises StoreUnavailable, and UsageError if the memory is refused.
    """
    count, found = len(batches), list[Timing]()
    region = _region(batches, count * threads)
    began = time.monotonic()

    def read(rank: int, arena: Arena, base: int, keep: Callable[[Timing], None]) -> None:
        with _Reader(store, objects, arena, base, region, threads) as reader:
            reader.drops = drop_cache
            reader.time_all(rank, batches[rank], began, deadline, keep)

    if count > 1 and store.limits.forkable:
        counter = SharedCounter()

        def child(send: Send) -> None:
            rank = next(counter.deal(range(count)))
            with _memory(threads * region, store) as arena:
                read(rank, arena, 0, lambda timing: send(msgspec.to_builtins(timing)))

        try:
            with Workers(count, child) as workers:
                found.extend(msgspec.convert(told, Timing) for told in workers)
        finally:
            counter.close()
        return found
    with _memory(count * threads * region, store) as arena:
        if count == 1:
            read(0, arena, 0, found.append)
        else:
            _in_threads(
                count, lambda rank, keep: read(rank, arena, rank * threads * region, keep), found
            )
    return found


def _region(batches: Sequence[Sequence[Batch]], readers: int) -> int:
    """Return the bytes of memory of each reading thread.

    Raises UsageError if all threads together need too much memory.
    """
    largest = max(int(batch.sizes.max()) for some in batches for batch in some)
    least = -(-largest // ALIGNMENT) * ALIGNMENT
    if least * readers > _MOST_MEMORY:
        raise UsageError(
            f"{readers} readers of objects of {human_size(largest)} need more memory than "
            f"{human_size(_MOST_MEMORY)}; give fewer --ranks or --threads"
        )
    ample = _MOST_MEMORY // readers // ALIGNMENT * ALIGNMENT
    return max(least, min(_REGION_BYTES, ample))


def _in_threads(
    count: int, read: Callable[[int, Callable[[Timing], None]], None], found: list[Timing]
) -> None:
    """Call `read` for each rank in a thread.

    After an error or an interrupt, every rank ends when its present batch has been read.
    """
    stopped = threading.Event()

    def keep(timing: Timing) -> None:
        if stopped.is_set():
            raise ReservationCancelledError
        found.append(timing)

    with ThreadPoolExecutor(count) as pool:
        done = [pool.submit(read, rank, keep) for rank in range(count)]
        try:
            for one in done:
                one.result()
        except BaseException:
            stopped.set()
            raise


@contextmanager
def _memory(nbytes: int, store: Store) -> Iterator[Arena]:
    """Yield an attached arena after the system has allocated its memory."""
    with Arena(nbytes, named=store.limits.named_arena) as arena, attached(arena, store):
        # The system allocates memory when it is first used. This must not count as time of reads.
        arena.array[::ALIGNMENT] = 0
        yield arena


class _Piece(NamedTuple):
    """Objects of one call.

    named: rows of the objects.
    offsets: [n] offsets in the arena.
    sizes: [n] bytes.
    places: directory and name of each file.
    """

    named: Any
    offsets: IntArray
    sizes: IntArray
    places: list[tuple[int, bytes]]


class _Reader(Closing):
    """Reader of one rank. Each of its threads reuses a region of the arena."""

    drops = False

    def __init__(
        self, store: Store, objects: Any, arena: Arena, base: int, region: int, threads: int
    ) -> None:
        """Use the regions of the arena from `base` on. objects: table of the inventory."""
        self.files = store if isinstance(store, InFiles) else None
        self._store = store
        wanted = [name for name in ("key", "locator") if name in objects.column_names]
        self._objects = objects.select(wanted)
        self._memory = arena.memory
        self._starts = [base + thread * region for thread in range(threads)]
        self._region = region
        self._pool = ThreadPoolExecutor(threads) if threads > 1 else None
        self._flags = OPEN_FILE | os.O_NOATIME

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()

    def time_all(
        self,
        rank: int,
        batches: Sequence[Batch],
        began: float,
        deadline: float,
        keep: Callable[[Timing], None],
    ) -> None:
        """Time the first read of each batch. If its objects are files, also time reads from memory.

        began, deadline: see `timed_reads`.
        keep: takes each timing.
        """
        first_end = began + (deadline - began) * _FIRST_SHARE
        turns: list[list[tuple[Batch, Divided]]] = [[]]
        nbytes = seconds = 0.0
        for number, batch in enumerate(batches):
            if number and time.monotonic() > first_end:
                break
            pieces = self.pieces(batch)
            timing = self._read(rank, self._cache(pieces, drops=self.drops), batch, pieces)
            keep(timing)
            if nbytes > _TURN_BYTES or seconds > _TURN_SECONDS:
                turns.append([])
                nbytes = seconds = 0.0
            turns[-1].append((batch, pieces))
            nbytes, seconds = nbytes + float(batch.sizes.sum()), seconds + timing.seconds
        again_from = time.monotonic()
        for number in range(_MOST_ROUNDS if self.files is not None else 0):
            for turn in turns:
                now = time.monotonic()
                if now > deadline or (number and now > again_from + _ROUNDS_SECONDS):
                    return
                for timing in self._turn(rank, turn, bare_first=bool(number % 2)):
                    keep(timing)

    def _turn(
        self, rank: int, turn: Sequence[tuple[Batch, Divided]], *, bare_first: bool
    ) -> list[Timing]:
        """Read some batches through the store, and by the bare loop."""
        caches = [self._cache(pieces, drops=False) for _, pieces in turn]
        bare = [self._bare(pieces) for _, pieces in turn] if bare_first else []
        timings = [
            self._read(rank, cache, batch, pieces)
            for cache, (batch, pieces) in zip(caches, turn, strict=True)
        ]
        bare = bare or [self._bare(pieces) for _, pieces in turn]
        for timing, seconds in zip(timings, bare, strict=True):
            timing.bare_seconds = seconds
        return timings

    def pieces(self, batch: Batch) -> Divided:
        """Divide a batch among the threads; return the calls of each thread."""
        limits = self._store.limits
        named = take_rows(self._objects, batch.rows)
        room = -(-batch.sizes // ALIGNMENT) * ALIGNMENT
        most = min(self._region, max(limits.batch_bytes, int(room.max())))
        ends = np.cumsum(batch.sizes)
        share = np.minimum(
            (ends - 1) * len(self._starts) // max(1, int(ends[-1])), len(self._starts) - 1
        )
        divided: Divided = []
        for thread, start in enumerate(self._starts):
            own = np.flatnonzero(share == thread)
            calls = []
            for span in batch_spans(room[own], most, limits.batch_objects):
                some = own[span]
                part, sizes = named.slice(int(some[0]), len(some)), batch.sizes[some]
                calls.append(_Piece(part, place(sizes)[0] + start, sizes, self._places(part)))
            divided.append(calls)
        return divided

    def _places(self, named: Any) -> list[tuple[int, bytes]]:
        if self.files is None:
            return []
        found = []
        for key in keys_of(named):
            try:
                found.append(self.files.place_of(key))
            except (OSError, UntrustedError):
                found.append((-1, b"-"))  # the read through the store reports the error
        return found

    def _read(self, rank: int, cache: str, batch: Batch, pieces: Divided) -> Timing:
        began = time.perf_counter()
        if self._pool is None:
            results = self._calls(pieces[0])
        else:
            results = [one for some in self._pool.map(self._calls, pieces) for one in some]
        seconds = time.perf_counter() - began
        calls = [piece for some in pieces for piece in some]
        statuses = np.concatenate([read.statuses for read in results])
        sizes = np.concatenate([piece.sizes for piece in calls])
        gone = int((statuses == Status.GONE).sum())
        return Timing(
            rank=rank,
            cache=cache,
            pages=batch.pages,
            nbytes=int(sizes[statuses == Status.OK].sum()),
            gone=gone,
            failed=int((statuses != Status.OK).sum()) - gone,
            seconds=seconds,
        )

    def _calls(self, pieces: list[_Piece]) -> list[ReadResult]:
        read = self._store.read_into
        return [read(one.named, one.offsets, one.sizes, identify=False) for one in pieces]

    def _bare(self, pieces: Divided) -> float:
        """Return how long opens, preadv calls and closes of the same files take.

        The loop uses the memory and the number of threads of the reads through the store.
        """
        began = time.perf_counter()
        if self._pool is None:
            self._loop(pieces[0])
        else:
            list(self._pool.map(self._loop, pieces))
        return time.perf_counter() - began

    def _loop(self, pieces: list[_Piece]) -> None:
        flags, memory = self._flags, self._memory
        for piece in pieces:
            starts, ends = piece.offsets.tolist(), (piece.offsets + piece.sizes).tolist()
            for (directory, name), start, end in zip(piece.places, starts, ends, strict=True):
                try:
                    descriptor = os.open(name, flags, dir_fd=directory)
                    os.preadv(descriptor, (memory[start:end],), 0)
                    os.close(descriptor)
                except OSError:
                    continue

    def _cache(self, pieces: Divided, *, drops: bool) -> str:
        """Return where a batch's bytes are. drops: whether to drop them from the page cache first.

        The result is COLD, MIXED, CACHED or UNKNOWN.
        """
        if self.files is None:
            return UNKNOWN
        total = cached = 0
        for piece in (one for some in pieces for one in some):
            for (directory, name), size in zip(piece.places, piece.sizes.tolist(), strict=True):
                try:
                    with closing_descriptor(self._opened(directory, name)) as descriptor:
                        if drops:
                            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                        resident = cached_bytes(descriptor, size)
                except OSError:
                    continue
                if resident is None:
                    return UNKNOWN
                total, cached = total + size, cached + resident
        if cached <= _COLD_SHARE * total:
            return COLD
        return CACHED if cached >= _CACHED_SHARE * total else MIXED

    def _opened(self, directory: int, name: bytes) -> int:
        """Open a file, if possible without changing its atime, by which evictors order files."""
        try:
            return os.open(name, self._flags, dir_fd=directory)
        except PermissionError as error:
            if error.errno != errno.EPERM:
                raise
            self._flags = OPEN_FILE
            return os.open(name, self._flags, dir_fd=directory)


def cached_bytes(descriptor: int, nbytes: int) -> int | None:
    """Return how many of a file's first bytes are in the page cache; None if unknown.

    Linux tells only the owner of the file and users who may write to it. To other users, every page
    seems to be cached. Raises OSError.
    """
    file = os.fstat(descriptor)
    nbytes = min(nbytes, file.st_size)
    if not nbytes:
        return 0
    if file.st_uid != os.geteuid() and not os.access(f"/proc/self/fd/{descriptor}", os.W_OK):
        return None
    with mmap.mmap(descriptor, nbytes, prot=mmap.PROT_READ) as mapping:
        view = np.frombuffer(mapping, dtype=np.uint8)
        resident = np.zeros(-(-nbytes // mmap.PAGESIZE), dtype=np.uint8)
        address, vector = ctypes.c_void_p(view.ctypes.data), ctypes.c_void_p(resident.ctypes.data)
        refused = LIBC.mincore(address, ctypes.c_size_t(nbytes), vector)
        del view
    if refused:
        return None
    return min(nbytes, int((resident & 1).sum()) * mmap.PAGESIZE)
