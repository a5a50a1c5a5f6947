"""Reads of objects from buckets and offset files, compared with their keys and CRCs."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np

from hicachectl.backends.base import ReadResult, Status, keys_of
from hicachectl.backends.disk.io import fill, raise_lost
from hicachectl.backends.disk.names import storable_ns
from hicachectl.formats.errors import UntrustedError
from hicachectl.formats.mooncake_ssd import has_crc, record_problem
from hicachectl.formats.wording import failed

if TYPE_CHECKING:
    from hicachectl.backends.base import Rows
    from hicachectl.backends.mooncake_ssd.index import DataFile, Index
    from hicachectl.formats.arrays import IntArray

VERSION_FIELDS = ("inode", "mtime", "offset", "sequence")
_UINT64 = (1 << 64) - 1


class Reading:
    """One call of `Store.read_into`."""

    def __init__(
        self, index: Index, rows: Rows, memory: memoryview, offsets: IntArray, capacities: IntArray
    ) -> None:
        self._index = index
        self._found = index.find(rows)
        self._keys = keys_of(rows)
        self._memory = memory
        self._offsets, self._capacities = offsets.tolist(), capacities.tolist()
        self._statuses = np.full(len(rows), Status.GONE, dtype=np.uint8)
        self._nbytes = np.full(len(rows), -1, dtype=np.int64)
        self._versions = np.zeros((len(rows), len(VERSION_FIELDS)), dtype=np.uint64)
        self._compared = np.zeros(len(rows), dtype=np.bool_)  # with their CRC
        self._errors: dict[int, str] = {}

    def read(self) -> ReadResult:
        """Read each object from its file. Raises StoreUnavailable if the file system is lost."""
        present = np.flatnonzero(self._found >= 0)
        files = self._index.objects["file"][self._found[present]]
        for number in np.unique(files).tolist():
            self._read_file(self._index.files[number], present[files == number].tolist())
        return ReadResult(
            self._statuses,
            self._errors,
            nbytes=self._nbytes,
            versions=self._versions,
            compared=self._compared,
        )

    def _read_file(self, file: DataFile, places: list[int]) -> None:
        try:
            descriptor = file.directory.open_file(file.name)
        except FileNotFoundError:
            return
        except (OSError, UntrustedError) as error:
            for at in places:
                self._fail(at, file, error)
            return
        try:
            facts = os.fstat(descriptor)
            for at in places:
                try:
                    self._read_object(file, descriptor, facts, at)
                except OSError as error:
                    self._fail(at, file, error)
        finally:
            os.close(descriptor)

    def _read_object(self, file: DataFile, descriptor: int, facts: os.stat_result, at: int) -> None:
        _, start, value, size, _, sequence = self._index.objects[self._found[at]].item()
        mtime_ns = storable_ns(facts.st_mtime_ns) & _UINT64  # before 1970: negative
        self._versions[at] = (facts.st_ino, mtime_ns, start, sequence)
        self._nbytes[at] = there = min(size, max(0, facts.st_size - value))
        if there < size:
            self._report(at, Status.ERROR, f"{file.path} ends before byte {value + size}")
            return
        if size != self._capacities[at]:
            self._statuses[at] = Status.SHORT if size < self._capacities[at] else Status.OVERSIZED
            return
        head = bytearray(value - start)
        target = self._memory[self._offsets[at] : self._offsets[at] + size]
        if fill(descriptor, (memoryview(head), target), start) < value + size - start:
            self._report(at, Status.ERROR, f"{file.path} ends before byte {value + size}")
            return
        self._statuses[at] = Status.OK
        stored = self._index.stored_forms(self._keys[at])
        if file.is_bucket:
            problem = "" if head in stored else "has another key than its .meta file"
            damaged = False
        else:
            problem, damaged = record_problem(bytes(head), target, stored, sequence)
            self._compared[at] = has_crc(head)
        if problem and not damaged and _differ(facts, file.facts):
            self._statuses[at], self._nbytes[at] = Status.GONE, -1  # a live client reused the place
        elif problem:
            status = Status.DAMAGED if damaged else Status.ERROR
            self._report(at, status, f"{file.path}: the object at byte {start} {problem}")

    def _fail(self, at: int, file: DataFile, error: OSError | UntrustedError) -> None:
        if isinstance(error, UntrustedError):
            self._report(at, Status.ERROR, str(error))
            return
        raise_lost(error, file.path, "read")
        self._report(at, Status.ERROR, failed(file.path, "read", error))

    def _report(self, at: int, status: Status, problem: str) -> None:
        self._statuses[at] = status
        self._errors[at] = problem


def _differ(now: os.stat_result, listed: os.stat_result) -> bool:
    """Return whether a file was replaced or written to after the listing."""
    return (now.st_ino, now.st_mtime_ns) != (listed.st_ino, listed.st_mtime_ns)
