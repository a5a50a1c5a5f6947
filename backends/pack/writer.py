"""Write a pack. Threads compress objects; the writer appends them in order."""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from blake3 import blake3
from msgspec.structs import replace

from hicachectl import __version__
from hicachectl.backends.base import Status, StatusArray
from hicachectl.backends.disk.durable import sync_name
from hicachectl.backends.disk.io import (
    NO_ROOM,
    closing_descriptor,
    errors_as,
    undo_on_error,
    write_all,
)
from hicachectl.backends.disk.permissions import Permissions, new_file_mode
from hicachectl.backends.pack.file import (
    PackEntries,
    RecordPlace,
    append_index,
    load_pack,
    lock_pack,
    open_pack,
    places_in,
    plain_record,
)
from hicachectl.backends.pack.recovery import walk
from hicachectl.formats.errors import (
    FormatError,
    ProfileError,
    StoreUnavailable,
    UnfinishedPackError,
    UnsupportedByBackend,
)
from hicachectl.formats.pack.planes import Encoder, PlanMemory
from hicachectl.formats.pack.records import (
    HEADER_BYTES,
    ID_BYTES,
    MAGIC,
    MOST_KEY_BYTES,
    Kind,
    Metadata,
    Record,
    build_header,
    build_metadata,
    build_record,
)
from hicachectl.formats.wording import failed, reason_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from concurrent.futures import Future

    from hicachectl.backends.pack.recovery import ScannedPack
    from hicachectl.formats.pack.planes import Plane

_MOST_ENCODERS = 4
# Space is kept free to finish a pack on a full disk. The index's head and the profile get
# _INDEX_BYTES, but at most 1/_INDEX_SHARE of the file system. Each object gets _INDEX_ROW_BYTES.
_INDEX_BYTES = 1 << 20
_INDEX_SHARE = 8
_INDEX_ROW_BYTES = 512

# Bytes and objects that a thread encodes together, and that one system call writes.
_HANDFUL_BYTES = 1 << 20
_HANDFUL_OBJECTS = 64
# Most bytes that a call has encoded and not yet appended. A single object may be larger.
_AHEAD_BYTES = 32 << 20

_Work = tuple[bytes, "int | None", memoryview]  # key, mtime_ns, content
_Encoded = tuple[Record, bytes, "list[Plane]"]  # record, its head as bytes, content


class PackWriter:
    """Writer of a locked pack file. Several threads may share a writer.

    metadata: grammar and profile of the pack. If `use_metadata` has changed them, they are written
        before the next object.
    remarks: state of an unfinished pack when it was opened; empty for another pack.
    """

    def __init__(self, path: str) -> None:
        """Open an existing or new pack.

        Raises StoreUnavailable, and FormatError if the file is not a pack or is damaged.
        """
        self.path = path
        # An existing file keeps its permissions.
        self._is_new = not os.path.lexists(path)
        self.descriptor = open_pack(path, os.O_RDWR | os.O_CREAT)
        self.pack_id = os.urandom(ID_BYTES)
        self.metadata = Metadata(grammar="")
        self.entries = PackEntries()
        self.remarks: tuple[str, ...] = ()
        self._end = 0
        self._is_valid = False  # whether the file ends with an index of all objects
        self._written: Metadata | None = None  # metadata in the file
        self._has_tail = False  # whether bytes follow the last whole record
        # Whether `close` finishes the file, because this run has written to it or taken it over.
        self.may_finish = False
        self._failed: OSError | None = None
        self._lock = threading.Lock()
        self._plans = PlanMemory()
        self._of_thread = threading.local()
        self._encoders: ThreadPoolExecutor | None = None
        self._limit = Permissions()
        self._ahead = min(_MOST_ENCODERS, len(os.sched_getaffinity(0)))
        with undo_on_error(partial(os.close, self.descriptor)):
            lock_pack(self.descriptor, path)
            self._continue()

    def _continue(self) -> None:
        """Find the end of the records in a file that may be cut off anywhere."""
        begun = os.pread(self.descriptor, HEADER_BYTES, 0)
        is_cut = len(begun) < HEADER_BYTES and begun[: len(MAGIC)] == MAGIC[: len(begun)]
        # The header is synced before any record, so a file without a header has no record.
        is_lost = os.fstat(self.descriptor).st_size <= HEADER_BYTES and not any(begun)
        if is_cut or is_lost:
            self._has_tail = bool(begun)
            return
        try:
            found = load_pack(self.descriptor, self.path)
        except UnfinishedPackError:
            walked = walk(self.descriptor, self.path)
            if walked.metadata is None and walked.entries:
                raise FormatError(
                    f"{self.path}: the pack's metadata is missing or damaged; write to a new pack"
                ) from None
            self.pack_id, self.entries, self._end = walked.pack_id, walked.entries, walked.end
            self._written, self._has_tail = walked.metadata, bool(walked.cut_bytes)
            self.remarks = (_continued(self.path, walked),)
        else:
            keys = found.entries.column("key").to_pylist()
            self.entries = PackEntries(zip(keys, places_in(found.entries), strict=True))
            self.pack_id = found.pack_id
            self._written, self._end, self._is_valid = found.metadata, found.end, True
        self.metadata = self._written or self.metadata

    def keep_private(self, permissions: Permissions) -> None:
        """Limit the pack's permissions. Until a new pack is finished, only its owner may read it.

        Raises StoreUnavailable.
        """
        with self._lock:
            self._limit = self._limit.intersection(permissions)
            st = os.fstat(self.descriptor)
            mode = stat.S_IMODE(st.st_mode)
            narrowed = mode & (self._limit.for_group(st.st_gid) | ~0o777)
            if narrowed != mode:
                try:
                    os.fchmod(self.descriptor, narrowed)
                except OSError as error:
                    raise StoreUnavailable(
                        f"{self.path}: more users may read the pack (mode {mode:04o}) than the "
                        f"source; chmod the pack to {narrowed:04o}"
                    ) from error

    def use_metadata(self, *, grammar: str | None = None, profile: str | None = None) -> None:
        """Set the grammar of the keys to write, or their profile.

        profile: the profile as TOML.
        Raises UnsupportedByBackend if the pack has objects with another grammar, ProfileError if
        the pack has objects with another profile.
        """
        if grammar is not None and grammar != self.metadata.grammar:
            if self.entries:
                raise UnsupportedByBackend(
                    f"{self.path}: the pack has objects with {self.metadata.grammar} keys; "
                    f"write {grammar} keys to a new pack"
                )
            self.metadata = replace(self.metadata, grammar=grammar)
        if profile is not None and profile != self.metadata.profile:
            if self.entries and self.metadata.profile:
                raise ProfileError(
                    f"{self.path}: the pack's profile describes another deployment or other "
                    "weights (print it with hicachectl profile); write to a new pack"
                )
            self.metadata = replace(self.metadata, profile=profile)

    def write(
        self,
        keys: Sequence[bytes],
        times: Sequence[int | None],
        objects: Sequence[memoryview],
        *,
        if_absent: bool,
    ) -> tuple[StatusArray, dict[int, str]]:
        """Append objects durably. Raises StoreUnavailable if the pack cannot be written."""
        statuses = np.zeros(len(keys), dtype=np.uint8)
        errors: dict[int, str] = {}
        self._begin()
        pending: deque[tuple[list[int], Future[list[_Encoded]]]] = deque()
        ahead_bytes = 0

        def append_first() -> None:
            nonlocal ahead_bytes
            indices, encoding = pending.popleft()
            ahead_bytes -= sum(len(objects[index]) for index in indices)
            encoded = encoding.result()
            try:
                answers = self._append(encoded, if_absent=if_absent)
            except OSError as error:
                answers = [error] * len(indices)
            for index, answer in zip(indices, answers, strict=True):
                if isinstance(answer, OSError):
                    full = answer.errno in NO_ROOM
                    statuses[index] = Status.FULL if full else Status.ERROR
                    errors[index] = reason_of(answer)
                else:
                    statuses[index] = answer

        wanted = self._wanted(keys, statuses, errors, if_absent=if_absent)
        try:
            for indices in _handfuls(wanted, objects):
                work = [(keys[index], times[index], objects[index]) for index in indices]
                pending.append((indices, self._pool().submit(self._encode_all, work)))
                ahead_bytes += sum(len(objects[index]) for index in indices)
                while len(pending) > 2 * self._ahead or ahead_bytes > _AHEAD_BYTES:
                    append_first()
            while pending:
                append_first()
        finally:  # the caller may reuse the memory after this call
            wait([encoding for _, encoding in pending])
        self.sync()
        return statuses, errors

    def _wanted(
        self,
        keys: Sequence[bytes],
        statuses: StatusArray,
        errors: dict[int, str],
        *,
        if_absent: bool,
    ) -> Iterator[int]:
        """Yield the rows of the objects to append. Set the statuses of all other rows."""
        for index, key in enumerate(keys):
            if not 0 < len(key) <= MOST_KEY_BYTES:
                statuses[index] = Status.ERROR
                errors[index] = f"the key has {len(key)} bytes; packs allow 1 to {MOST_KEY_BYTES}"
            elif if_absent and key in self.entries:
                statuses[index] = Status.EXISTS
            else:
                yield index

    def close(self) -> None:
        """Finish the pack if it has changed. Remove a pack that has no record.

        Raises StoreUnavailable if the index cannot be written. The objects are still safe then.
        """
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor < 0:
            return
        if self._encoders is not None:
            self._encoders.shutdown()
        repair = f"fix the cause, then run hicachectl pack repair {self.path}"
        with (
            errors_as(
                StoreUnavailable, self.path, "finish the pack", f"the objects are safe; {repair}"
            ),
            closing_descriptor(descriptor),
        ):
            unended = self._written is not None and not self._is_valid
            if self._written is not None and unended and self.may_finish and not self._failed:
                table = self.entries.table()
                append_index(descriptor, self.pack_id, table, self._written, self._end)
                if self._is_new:
                    group = os.fstat(descriptor).st_gid
                    os.fchmod(descriptor, new_file_mode(self._limit, group))
            elif self._written is None and os.fstat(descriptor).st_size <= HEADER_BYTES:
                Path(self.path).unlink(missing_ok=True)

    def _begin(self) -> None:
        """Write the header and the metadata if the file lacks them."""
        self.may_finish = True
        with self._lock:
            if self.descriptor < 0:
                raise ValueError("The pack is closed")
            if self._failed is not None:
                raise self._unavailable(self._failed)
            if not self.metadata.grammar:
                raise UnsupportedByBackend(
                    f"{self.path}: the grammar of the new pack's keys is not set; "
                    f"write pack://{self.path}?keys=file (or mooncake, hf3fs)"
                )
            try:
                if self._has_tail:
                    os.ftruncate(self.descriptor, self._end)
                    self._has_tail = False
                if self._written != self.metadata:
                    self._write_metadata()
            except OSError as error:
                raise self._unavailable(error) from error

    def _write_metadata(self) -> None:
        self.metadata = replace(self.metadata, version=__version__)
        content = build_metadata(self.metadata)
        record = plain_record(Kind.METADATA, content)
        if not self._end:
            self._put([build_header(self.pack_id)])
            os.fsync(self.descriptor)
            sync_name(self.path)
        self._put([build_record(record, self.pack_id), content])
        os.fdatasync(self.descriptor)  # without metadata, no object could be recovered
        self._written = self.metadata

    def _pool(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._encoders is None:
                self._encoders = ThreadPoolExecutor(self._ahead, thread_name_prefix="pack-encoder")
            return self._encoders

    def _encode_all(self, work: list[_Work]) -> list[_Encoded]:
        encoder: Encoder | None = getattr(self._of_thread, "encoder", None)
        if encoder is None:
            encoder = self._of_thread.encoder = Encoder()
        return [self._encode(encoder, *item) for item in work]

    def _encode(
        self, encoder: Encoder, key: bytes, mtime_ns: int | None, data: memoryview
    ) -> _Encoded:
        array = np.frombuffer(data, dtype=np.uint8)
        planes = encoder.encode(array, self._plans.plan(key, array, encoder))
        record = Record(
            kind=Kind.OBJECT,
            key=key,
            nbytes=len(data),
            stored=tuple(map(len, planes)),
            digest=blake3(data).digest(),
            mtime_ns=mtime_ns,
        )
        return record, build_record(record, self.pack_id), planes

    def withdraw(self, keys: Sequence[bytes]) -> list[bool]:
        """Remove appended objects. Return which of them existed.

        A record of each removal is appended for `walk`, which uses no index. If these records do
        not fit on the disk, only the next index leaves the objects out.
        """
        with self._lock:
            existed = [self.entries.pop(key, None) is not None for key in keys]
            removed = [key for key, had in zip(keys, existed, strict=True) if had]
            if removed:
                self.may_finish = True
                with suppress(OSError):
                    self._put([self._withdrawal(key) for key in removed])
            return existed

    def _withdrawal(self, key: bytes) -> bytes:
        nothing = blake3(b"").digest()
        record = Record(kind=Kind.WITHDRAWN, key=key, nbytes=0, stored=(0,), digest=nothing)
        return build_record(record, self.pack_id)

    def _append(self, encoded: list[_Encoded], *, if_absent: bool) -> list[Status | OSError]:
        """Append the objects that fit on the disk, in one system call."""
        answers: list[Status | OSError] = []
        buffers: list[Plane] = []
        added: dict[bytes, RecordPlace] = {}
        with self._lock:
            at = self._end
            room = free_bytes(self.descriptor, len(self.entries))
            for record, head, planes in encoded:
                # Another thread may have added the key, or the call has it twice.
                exists = record.key in self.entries or record.key in added
                if if_absent and exists:
                    answers.append(Status.EXISTS)
                elif record.length + _INDEX_ROW_BYTES > room:
                    answers.append(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
                else:
                    answers.append(Status.OK)
                    added[record.key] = RecordPlace.of(record, at)
                    buffers += [head, *planes]
                    at += record.length
                    room -= record.length + _INDEX_ROW_BYTES
            if buffers:
                self._put(buffers)
            self.entries.update(added)
            return answers

    def _put(self, buffers: Sequence[Plane]) -> None:
        """Append all buffers. If an error is raised, no buffer is appended."""
        self._is_valid = False
        try:
            self._end += write_all(self.descriptor, buffers, self._end)
        except OSError:
            with suppress(OSError):  # the next write starts at the same offset
                os.ftruncate(self.descriptor, self._end)
            raise

    def sync(self) -> None:
        """Make the file durable. Raises StoreUnavailable."""
        try:
            os.fdatasync(self.descriptor)
        except OSError as error:
            # Earlier writes may be lost. Only a new read of the file would show that.
            self._failed = error
            raise self._unavailable(error) from error

    def _unavailable(self, error: OSError) -> StoreUnavailable:
        next_step = "fix the cause, then run again"
        if self._written is not None:  # otherwise the file has no object to save
            next_step = f"fix the cause, then run hicachectl pack repair {self.path}"
        return StoreUnavailable(failed(self.path, "write the pack", error, next_step))


def free_bytes(descriptor: int, objects: int) -> int:
    """Return the free bytes for new objects, less the bytes for an index of `objects` objects.

    The result is negative if the index does not fit.
    """
    space = os.fstatvfs(descriptor)
    head = min(_INDEX_BYTES, space.f_blocks * space.f_frsize // _INDEX_SHARE)
    return space.f_bavail * space.f_frsize - head - _INDEX_ROW_BYTES * objects


def _handfuls(indices: Iterator[int], objects: Sequence[memoryview]) -> Iterator[list[int]]:
    """Yield indices in groups of bounded size, in order."""
    handful: list[int] = []
    nbytes = 0
    for index in indices:
        handful.append(index)
        nbytes += len(objects[index])
        if nbytes >= _HANDFUL_BYTES or len(handful) == _HANDFUL_OBJECTS:
            yield handful
            handful, nbytes = [], 0
    if handful:
        yield handful


def _continued(path: str, walked: ScannedPack) -> str:
    damaged = f", {walked.damaged} damaged objects left out" if walked.damaged else ""
    return (
        f"{path}: continuing an unfinished pack of {len(walked.entries)} objects; "
        f"{walked.cut_bytes} bytes after the last whole object are cut off{damaged}"
    )
