"""Reads of a file store's objects, with or without trailers."""

from __future__ import annotations

import errno
import os
import stat
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from hicachectl.backends.base import ReadResult, Rows, Status, keys_of
from hicachectl.backends.capabilities import trailer_schema
from hicachectl.backends.disk.io import OPEN_FILE, fill, read_ahead
from hicachectl.backends.disk.names import VERSION, are_plain, check_key, version_fields
from hicachectl.backends.disk.permissions import NOBODY, Permissions
from hicachectl.backends.object_files.trailers import Verdict, trailer_in
from hicachectl.formats.errors import UntrustedError
from hicachectl.formats.trailer import NO_RANK, TRAILER_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicachectl.backends.object_files.faults import StoreFiles
    from hicachectl.formats.arrays import IntArray
    from hicachectl.formats.trailer import Trailer

_VERSION_BYTES = VERSION.size
_VERSION_FIELDS = VERSION.size // 8


def open_file(name: bytes, directory: int) -> int:
    """Open a file for reading, if possible (as its owner) without updating its atime."""
    try:
        return os.open(name, OPEN_FILE | os.O_NOATIME, dir_fd=directory)
    except PermissionError as error:
        if error.errno != errno.EPERM:
            raise
        return os.open(name, OPEN_FILE, dir_fd=directory)


def read_file(
    name: bytes, directory: int, target: memoryview
) -> tuple[int, os.stat_result, bytearray | None]:
    """Read a file of exactly the target's size, or of that and a trailer's.

    Return its size, its stat and the bytes after the target's; None if it has no such bytes. A
    file of another size is not read. Raises OSError.
    """
    descriptor = open_file(name, directory)
    try:
        facts = os.fstat(descriptor)
        size = facts.st_size
        if not stat.S_ISREG(facts.st_mode):
            raise OSError(errno.ENXIO, "")
        if size == len(target):
            return fill(descriptor, (target,)), facts, None
        if size != len(target) + TRAILER_BYTES:
            return size, facts, None
        tail = bytearray(TRAILER_BYTES)
        done = fill(descriptor, (target, memoryview(tail)))
        return done, facts, tail if done == size else None
    finally:
        os.close(descriptor)


class FileReader:
    """Reads objects of one store, and notes who may read them."""

    def __init__(self, files: StoreFiles) -> None:
        self._files = files
        self._objects = files.objects
        self._noting = threading.Lock()
        self.seen = Permissions()  # common to all files read

    def read(
        self, rows: Rows, memory: memoryview, offsets: IntArray, capacities: IntArray
    ) -> ReadResult:
        """Read objects as `Store.read_into` does."""
        statuses = np.zeros(len(rows), dtype=np.uint8)
        nbytes = np.full(len(rows), -1, dtype=np.int64)
        versions = bytearray(len(rows) * _VERSION_BYTES)
        errors: dict[int, str] = {}
        sizes = [-1] * len(rows)
        tails: list[tuple[int, bytearray]] = []
        keys = keys_of(rows)
        check = None if are_plain(keys) else check_key
        places = list(zip(keys, offsets.tolist(), capacities.tolist(), strict=True))

        def read_slice(start: int, stop: int) -> None:
            modes, groups, owners = 0o777, set[int](), set[int]()
            # This loop dominates reads of small objects: look up attributes once, and check keys
            # together.
            pack, objects, here = VERSION.pack_into, self._objects, self._objects.descriptor
            for index, (key, offset, capacity) in enumerate(places[start:stop], start):
                try:
                    if check is not None:
                        check(key)
                    if objects.folders:
                        here, _ = objects.place(key)
                    size, facts, tail = read_file(key, here, memory[offset : offset + capacity])
                except (OSError, UntrustedError) as error:
                    statuses[index] = self._files.unread(index, key, error, errors)
                    continue
                sizes[index] = size
                if tail is not None:
                    tails.append((index, tail))
                modes &= facts.st_mode
                groups.add(facts.st_gid)
                owners.add(facts.st_uid)
                pack(versions, index * _VERSION_BYTES, *version_fields(facts))
            if groups:
                self._note_readable(modes, groups, owners)

        self._files.concurrency.each("read", read_slice, len(rows))
        nbytes[:] = sizes
        if self._files.sizes.current():
            nbytes = self._files.sizes.payloads(rows, nbytes)
        known = nbytes >= 0
        statuses[known & (nbytes < capacities)] = Status.SHORT
        statuses[known & (nbytes > capacities)] = Status.OVERSIZED
        compared = np.zeros(len(rows), dtype=np.bool_)
        unranked = np.zeros(len(rows), dtype=np.bool_)
        for index, tail in tails:
            offset, capacity = int(offsets[index]), int(capacities[index])
            value = memory[offset : offset + capacity]
            status, compared[index], unranked[index] = self._checked(
                keys[index], value, tail, index, errors
            )
            statuses[index] = status
            nbytes[index] = sizes[index] if status == Status.OVERSIZED else capacity
        fields = np.frombuffer(versions, dtype="<u8").reshape(len(rows), _VERSION_FIELDS)
        return ReadResult(
            statuses,
            errors,
            nbytes=nbytes,
            versions=fields,
            compared=compared,
            unranked=unranked,
        )

    def _checked(
        self, key: bytes, value: memoryview, tail: bytearray, index: int, errors: dict[int, str]
    ) -> tuple[Status, bool, bool]:
        """Return the status of an object with a trailer.

        Then whether the trailer has a digest, and whether it names no rank.
        """
        trailer = trailer_in(tail)
        verdict = self._files.checks.check(key, trailer, (value,), len(value))
        if verdict.why:
            errors[index] = verdict.why
        if isinstance(trailer, Verdict):
            return verdict.status, False, False
        return verdict.status, trailer.digest_kind != "off", trailer.rank == NO_RANK

    def expect(self, rows: Rows, capacities: IntArray) -> None:
        """Let the system start reading files not yet in memory."""
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

        self._files.concurrency.each("expect", expect_slice, len(places))

    def trailers(self, rows: Rows) -> Any:
        """Return what the trailers state, as `Trailed.read_trailers` does."""
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
            facts = os.fstat(descriptor)
            nbytes = facts.st_size - TRAILER_BYTES
            if not stat.S_ISREG(facts.st_mode) or nbytes < 0:
                return None
            trailer = trailer_in(os.pread(descriptor, TRAILER_BYTES, nbytes))
        finally:
            os.close(descriptor)
        if isinstance(trailer, Verdict) or not self._files.checks.belongs(key, nbytes, trailer):
            return None
        return trailer

    def _note_readable(self, modes: int, groups: set[int], owners: set[int]) -> None:
        """Record the permissions common to some files; modes: their bitwise AND."""
        group = groups.pop() if len(groups) == 1 else None
        owner = owners.pop() if len(owners) == 1 else NOBODY
        seen = Permissions(modes & 0o777 | 0o700, group, None if modes & 0o004 else owner)
        with self._noting:
            self.seen = self.seen.both(seen)
