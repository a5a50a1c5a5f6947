"""Read a file store's objects, with or without trailers."""

from __future__ import annotations

import errno
import os
import stat
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pyarrow as pa

from hicachectl.backends.base import ReadResult, Rows, Status, keys_of
from hicachectl.backends.capabilities import trailer_schema
from hicachectl.backends.disk.io import OPEN_FILE, chunks, fill, read_ahead, read_up_to
from hicachectl.backends.disk.names import VERSION, are_plain, check_key, version_fields
from hicachectl.backends.disk.permissions import NOBODY, Permissions
from hicachectl.backends.object_files.trailers import Verdict, trailer_in
from hicachectl.formats.catalog import DIGEST_BYTES
from hicachectl.formats.errors import UntrustedError
from hicachectl.formats.trailer import NO_RANK, TRAILER_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy.typing as npt

    from hicachectl.backends.object_files.store_files import StoreFiles
    from hicachectl.formats.arrays import BoolArray, IntArray
    from hicachectl.formats.trailer import Trailer

    # A pair: a trailer, or the reason why a file has none, and the outcome of the comparison.
    _Checked = tuple[Trailer | Verdict, Verdict]

_VERSION_BYTES = VERSION.size
_VERSION_FIELDS = VERSION.size // 8

S = TypeVar("S")
T = TypeVar("T")


def open_file(name: bytes, directory: int) -> int:
    """Open a file for reading. If the system lets this user do so, reads leave the atime as is."""
    try:
        return os.open(name, OPEN_FILE | os.O_NOATIME, dir_fd=directory)
    except PermissionError as error:
        if error.errno != errno.EPERM:
            raise
        return os.open(name, OPEN_FILE, dir_fd=directory)


def read_file(
    name: bytes, directory: int, target: memoryview
) -> tuple[int, os.stat_result, bytearray | None]:
    """Read a file that is as long as the target, or longer by a trailer.

    Return the file's size, its stat, and the bytes of its trailer. In place of the bytes, return
    None if there is no trailer. A file of another size is not read. Raises OSError.
    """
    descriptor = open_file(name, directory)
    try:
        st = os.fstat(descriptor)
        size = st.st_size
        if not stat.S_ISREG(st.st_mode):
            raise OSError(errno.ENXIO, "")
        if size == len(target):
            return fill(descriptor, (target,)), st, None
        if size != len(target) + TRAILER_BYTES:
            return size, st, None
        tail = bytearray(TRAILER_BYTES)
        done = fill(descriptor, (target, memoryview(tail)))
        return done, st, tail if done == size else None
    finally:
        os.close(descriptor)


def _note_version(versions: bytearray, index: int, st: os.stat_result) -> None:
    VERSION.pack_into(versions, index * _VERSION_BYTES, *version_fields(st))


def _note_none(versions: bytearray, index: int, st: os.stat_result) -> None:
    pass


class FileReader:
    """Reads objects of one store, and notes who may read them."""

    def __init__(self, files: StoreFiles) -> None:
        self._files = files
        self._objects = files.objects
        self._noting = threading.Lock()
        self.seen = Permissions()  # permissions common to all files read

    def read(
        self,
        rows: Rows,
        memory: memoryview,
        offsets: IntArray,
        capacities: IntArray,
        *,
        identify: bool,
    ) -> ReadResult:
        """Read objects as `Store.read_into` does."""
        places = zip(offsets.tolist(), capacities.tolist(), strict=True)
        values = [memory[offset : offset + capacity] for offset, capacity in places]

        def check(key: bytes, index: int, tail: bytearray) -> _Checked:
            value, trailer = values[index], trailer_in(tail)
            return trailer, self._files.checks.check(key, trailer, (value,), len(value))

        return self._read("read", rows, capacities, read_file, values, check, identify=identify)

    def digest(
        self, rows: Rows, capacities: IntArray, wanted: BoolArray
    ) -> tuple[ReadResult, npt.NDArray[np.uint8]]:
        """Read and digest objects as `Digesting.digest` does."""
        from blake3 import blake3

        digests = np.zeros((len(rows), DIGEST_BYTES), dtype=np.uint8)

        def read(key: bytes, here: int, index: int) -> tuple[int, os.stat_result, _Checked | None]:
            state = blake3() if wanted[index] else None
            found = self._digest_file(key, here, int(capacities[index]), state)
            if state is not None:
                digests[index] = np.frombuffer(state.digest(), dtype=np.uint8)
            return found

        def check(_key: bytes, _index: int, checked: _Checked) -> _Checked:
            return checked

        result = self._read("digest", rows, capacities, read, range(len(rows)), check)
        return result, digests

    def _digest_file(
        self, name: bytes, directory: int, nbytes: int, state: Any
    ) -> tuple[int, os.stat_result, _Checked | None]:
        """Read a file in pieces, which update `state` unless it is None.

        Return the file's size, its stat, and its trailer with the outcome of the comparison. In
        place of the trailer and the outcome, return None if there is no trailer. A file of another
        size is not read.
        nbytes: size of the file without a trailer.
        Raises OSError.
        """

        def pieces() -> Iterator[memoryview]:
            for piece in chunks(descriptor, nbytes):
                if state is not None:
                    state.update(piece)
                yield piece

        checked = None
        descriptor = open_file(name, directory)
        try:
            st = os.fstat(descriptor)
            size = st.st_size
            if not stat.S_ISREG(st.st_mode):
                raise OSError(errno.ENXIO, "")
            if size not in {nbytes, nbytes + TRAILER_BYTES}:
                return size, st, None
            value = pieces()
            if size != nbytes:
                tail = read_up_to(descriptor, TRAILER_BYTES, nbytes)
                if len(tail) != TRAILER_BYTES:
                    return nbytes + len(tail), st, None
                trailer = trailer_in(tail)
                checked = trailer, self._files.checks.check(name, trailer, value, nbytes)
            for _ in value:  # pieces that the comparison did not need
                pass
        except EOFError:  # a writer has shortened the file meanwhile
            return min(os.fstat(descriptor).st_size, nbytes - 1), st, None
        finally:
            os.close(descriptor)
        return size, st, checked

    def _read(
        self,
        kind: str,
        rows: Rows,
        capacities: IntArray,
        read: Callable[[bytes, int, S], tuple[int, os.stat_result, T | None]],
        targets: Sequence[S],
        check: Callable[[bytes, int, T], _Checked],
        *,
        identify: bool = True,
    ) -> ReadResult:
        """Read each object by `read`, several at once.

        kind: kind of these calls, see `Concurrency`.
        read: takes name, directory and target. Returns size, stat, and the trailer in the form that
            `check` takes; the last is None for an object without a trailer. Raises OSError.
        targets: [n], third argument of `read` for each object.
        check: takes key, row and trailer of an object with a trailer.
        identify: whether to return versions.
        """
        statuses = np.zeros(len(rows), dtype=np.uint8)
        nbytes = np.full(len(rows), -1, dtype=np.int64)
        versions = bytearray(len(rows) * _VERSION_BYTES)
        errors: dict[int, str] = {}
        sizes = [-1] * len(rows)
        tails: list[tuple[int, T]] = []
        keys = keys_of(rows)
        check_name = None if are_plain(keys) else check_key
        pairs = list(zip(keys, targets, strict=True))

        def read_slice(start: int, stop: int) -> None:
            modes, groups, owners = 0o777, set[int](), set[int]()
            # This loop dominates reads of small objects. So attributes are looked up once, and all
            # keys are checked together.
            objects, here = self._objects, self._objects.descriptor
            note = _note_version if identify else _note_none
            for index, (key, target) in enumerate(pairs[start:stop], start):
                try:
                    if check_name is not None:
                        check_name(key)
                    if objects.folders:
                        here, _ = objects.place(key)
                    size, st, tail = read(key, here, target)
                except (OSError, UntrustedError) as error:
                    statuses[index] = self._files.unread(index, key, error, errors)
                    continue
                sizes[index] = size
                if tail is not None:
                    tails.append((index, tail))
                modes &= st.st_mode
                groups.add(st.st_gid)
                owners.add(st.st_uid)
                note(versions, index, st)
            if groups:
                self._note_readable(modes, groups, owners)

        self._files.concurrency.each(kind, read_slice, len(rows), unlocked=True)
        nbytes[:] = sizes
        if self._files.sizes.current():
            nbytes = self._files.sizes.payloads(rows, nbytes)
        known = nbytes >= 0
        statuses[known & (nbytes < capacities)] = Status.SHORT
        statuses[known & (nbytes > capacities)] = Status.OVERSIZED
        fields = np.frombuffer(versions, dtype="<u8").reshape(len(rows), _VERSION_FIELDS)
        result = ReadResult(
            statuses,
            errors,
            nbytes=nbytes,
            versions=fields,
            compared=np.zeros(len(rows), dtype=np.bool_),
            unranked=np.zeros(len(rows), dtype=np.bool_),
        )
        for index, tail in tails:
            trailer, verdict = check(keys[index], index, tail)
            whole = verdict.status != Status.OVERSIZED
            nbytes[index] = capacities[index] if whole else sizes[index]
            _enter(result, index, trailer, verdict)
        return result

    def expect(self, rows: Rows, capacities: IntArray) -> None:
        """Let the system start to read those files that are not in memory yet."""
        places = list(zip(keys_of(rows), capacities.tolist(), strict=True))

        def expect_slice(start: int, stop: int) -> None:
            for key, capacity in places[start:stop]:
                with suppress(OSError, UntrustedError):  # the read will report the error
                    check_key(key)
                    directory, name = self._objects.place(key)
                    descriptor = open_file(name, directory)
                    try:
                        read_ahead(descriptor, capacity)
                    finally:
                        os.close(descriptor)

        self._files.concurrency.each("expect", expect_slice, len(places), unlocked=True)

    def trailers(self, rows: Rows) -> Any:
        """Return the objects' trailers as `Trailed.read_trailers` does."""
        keys = keys_of(rows)
        found = list(zip(keys, self._trailers(keys), strict=True))
        columns = (
            [None if one is None else one.identity for _, one in found],
            [None if one is None else one.digest_kind for _, one in found],
            [None if one is None else one.digest for _, one in found],
            [None if one is None else self._files.checks.has_rank(key, one) for key, one in found],
            [None if one is None else one.rank != NO_RANK for _, one in found],
        )
        schema = trailer_schema()
        arrays = [pa.array(column, f.type) for column, f in zip(columns, schema, strict=True)]
        return pa.table(arrays, schema=schema)

    def _trailers(self, keys: list[bytes]) -> Iterator[Trailer | None]:
        for index, key in enumerate(keys):
            try:
                yield self._trailer(key)
            except (OSError, UntrustedError) as error:
                self._files.unread(index, key, error, {})
                yield None

    def _trailer(self, key: bytes) -> Trailer | None:
        check_key(key)
        directory, name = self._objects.place(key)
        descriptor = open_file(name, directory)
        try:
            st = os.fstat(descriptor)
            nbytes = st.st_size - TRAILER_BYTES
            if not stat.S_ISREG(st.st_mode) or nbytes < 0:
                return None
            trailer = trailer_in(os.pread(descriptor, TRAILER_BYTES, nbytes))
        finally:
            os.close(descriptor)
        if isinstance(trailer, Verdict) or not self._files.checks.belongs(key, nbytes, trailer):
            return None
        return trailer

    def _note_readable(self, modes: int, groups: set[int], owners: set[int]) -> None:
        """Limit `seen` to the permissions common to files. modes: bitwise AND of their modes."""
        group = groups.pop() if len(groups) == 1 else None
        owner = owners.pop() if len(owners) == 1 else NOBODY
        seen = Permissions(modes & 0o777 | 0o700, group, None if modes & 0o004 else owner)
        with self._noting:
            self.seen = self.seen.intersection(seen)


def _enter(result: ReadResult, index: int, trailer: Trailer | Verdict, verdict: Verdict) -> None:
    """Enter a row's trailer, and the outcome of its comparison, into the result."""
    assert result.compared is not None
    assert result.unranked is not None
    result.statuses[index] = verdict.status
    if verdict.why:
        result.errors[index] = verdict.why
    if not isinstance(trailer, Verdict):
        result.compared[index] = trailer.digest_kind != "off"
        result.unranked[index] = trailer.rank == NO_RANK
