"""Rebuild the index of a pack from its records."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from hicachectl.backends.disk.durable import move_noreplace, sync_name
from hicachectl.backends.disk.io import (
    CHECK_MOUNT,
    OPEN_FILE,
    closing_descriptor,
    errors_as,
    undo_on_error,
    write_all,
)
from hicachectl.backends.disk.permissions import Permissions, new_file_mode
from hicachectl.backends.pack.file import (
    ObjectReader,
    PackEntries,
    RecordContent,
    RecordPlace,
    append_index,
    load_pack,
    lock_pack,
    open_pack,
    places_in,
    plain_record,
    read_header,
    read_metadata,
    read_record,
)
from hicachectl.formats.errors import FormatError, StoreUnavailable, UsageError
from hicachectl.formats.pack.index import column_of, read_index
from hicachectl.formats.pack.records import (
    HEADER_BYTES,
    RECORD_MAGIC,
    TRAILER_BYTES,
    Kind,
    Metadata,
    Record,
    build_header,
    build_metadata,
    build_record,
    parse_trailer,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    import pyarrow as pa

# After a crash, records written since the last sync can have a valid head but incomplete content.
# A writer writes fewer bytes than this between two syncs, so `walk` checks the content of this many
# bytes at the end. Earlier content is checked when it is read.
CHECKED_TAIL_BYTES = 1 << 30
_MOST_CHECKED_BYTES = 256 << 20  # a larger object is not checked, as it might not fit into memory
_SEARCH_BYTES = 4 << 20
_COPY_BYTES = 8 << 20


@dataclass(slots=True)
class ScannedPack:
    """A pack's contents, found by its records without its index, or the result of a repair.

    end: offset after the last whole record.
    cut_bytes: bytes after `end`.
    unfinished: whether the bytes after `end` begin with an object's head.
    damaged_bytes: bytes between records, without trailers.
    damaged: number of checked objects that do not match their digest.
    objects: number of the repaired pack's objects.
    nbytes: content bytes of the repaired pack's objects.
    was_valid: whether the pack was valid and needed no repair.
    """

    pack_id: bytes
    metadata: Metadata | None = None
    entries: PackEntries = field(default_factory=PackEntries, compare=False)
    end: int = HEADER_BYTES
    cut_bytes: int = 0
    unfinished: bool = False
    damaged_bytes: int = 0
    damaged: int = 0
    objects: int = 0
    nbytes: int = 0
    was_valid: bool = False


def walk(
    descriptor: int, path: str, *, on_bytes: Callable[[int, int], None] = lambda nbytes, total: None
) -> ScannedPack:
    """Read the heads of all records, and check the content of the last records.

    Damage between records is skipped. An object takes about 500 bytes of memory.
    on_bytes: takes the number of bytes just passed, and the file's size.
    Raises FormatError if the file is not a pack.
    """
    size = os.fstat(descriptor).st_size
    found = ScannedPack(read_header(descriptor, path))
    reader = ObjectReader(descriptor, found.pack_id)
    at, indexes = HEADER_BYTES, []
    while at < size:
        record = _record_at(descriptor, at, size, found.pack_id)
        if record is None:
            after = _after_damage(descriptor, at, size, found.pack_id)
            if after is None:
                break
            next_at, is_trailer = after
            found.damaged_bytes += 0 if is_trailer else next_at - at
        else:
            next_at = at + record.length
            if record.kind is Kind.INDEX:
                indexes.append((at, record))
            _note(found, record, at, reader, descriptor, check=size - at <= CHECKED_TAIL_BYTES)
        on_bytes(next_at - at, size)
        at = next_at
    found.end = at
    found.cut_bytes = size - at
    with suppress(FormatError):
        found.unfinished = read_record(descriptor, at, found.pack_id).kind is Kind.OBJECT
    while found.metadata is None and indexes:
        found.metadata = _metadata_of_index(descriptor, *indexes.pop(), path)
    return found


def _record_at(descriptor: int, at: int, size: int, pack_id: bytes) -> Record | None:
    """Return the head of the record at an offset; None if no whole record begins there."""
    try:
        record = read_record(descriptor, at, pack_id)
    except FormatError:
        return None
    return record if record.length <= size - at else None


def _after_damage(descriptor: int, at: int, size: int, pack_id: bytes) -> tuple[int, bool] | None:
    """Return the offset after a trailer or damage, and whether only a trailer is skipped.

    Return None if no whole record follows the damage.
    """
    if parse_trailer(os.pread(descriptor, TRAILER_BYTES, at), pack_id) is not None:
        return at + TRAILER_BYTES, True
    start = at + 1
    while start < size:
        data = os.pread(descriptor, _SEARCH_BYTES, start)
        place = data.find(RECORD_MAGIC)
        while place >= 0:
            if _record_at(descriptor, start + place, size, pack_id) is not None:
                return start + place, False
            place = data.find(RECORD_MAGIC, place + 1)
        if len(data) < len(RECORD_MAGIC):
            break
        start += len(data) - len(RECORD_MAGIC) + 1
    return None


def _note(
    found: ScannedPack,
    record: Record,
    at: int,
    reader: ObjectReader,
    descriptor: int,
    *,
    check: bool,
) -> None:
    if record.kind is Kind.METADATA:
        with suppress(FormatError):
            found.metadata = read_metadata(descriptor, record, at)
    elif record.kind is Kind.WITHDRAWN:
        found.entries.pop(record.key, None)
    elif record.kind is Kind.OBJECT:
        place = RecordPlace.of(record, at)
        if check and record.nbytes <= _MOST_CHECKED_BYTES:
            try:
                reader.read(record.key, place, memoryview(bytearray(record.nbytes)))
            except FormatError:
                found.damaged += 1
                return
        found.entries[record.key] = place


def _metadata_of_index(descriptor: int, at: int, record: Record, path: str) -> Metadata | None:
    """Return an index's copy of the metadata; None if the index is damaged."""
    try:
        content = RecordContent(descriptor, record, at)
        _, metadata = read_index(content, end=at, source=path)
        content.check()
    except FormatError:
        return None
    return metadata


def repair(
    path: str,
    *,
    output: str | None = None,
    dry_run: bool = False,
    on_bytes: Callable[[int, int], None] = lambda nbytes, total: None,
) -> ScannedPack:
    """Make a valid pack from all whole records, in place or as a new file.

    A repair in place cuts off only a tail without a whole record.
    output: path of a new file for the valid pack. The old pack then stays unchanged.
    on_bytes: see `walk`.
    Raises UsageError if `output` exists. Raises FormatError if no object can be recovered. Raises
    StoreUnavailable if another process writes to the pack or a system call fails.
    """
    if output is not None and Path(output).exists():
        raise _taken(output)
    writes_here = output is None and not dry_run
    descriptor = open_pack(path, os.O_RDWR if writes_here else os.O_RDONLY)
    with (
        errors_as(StoreUnavailable, path, "repair the pack", "fix the cause, then run again"),
        closing_descriptor(descriptor),
    ):
        lock_pack(descriptor, path)
        with suppress(FormatError):
            whole = load_pack(descriptor, path)
            if output is None:
                return _counted(ScannedPack(whole.pack_id, was_valid=True), whole.entries)
        found = walk(descriptor, path, on_bytes=on_bytes)
        if found.metadata is None:
            raise FormatError(
                f"{path}: the pack's metadata is missing or damaged, so no object can be "
                "recovered; write a new pack"
            )
        entries = found.entries.table()
        if writes_here:
            append_index(descriptor, found.pack_id, entries, found.metadata, found.end)
        elif output is not None and not dry_run:
            _copy(descriptor, path, found, entries, output)
        return _counted(found, entries)


def _taken(output: str) -> UsageError:
    return UsageError(f"{output}: already exists; choose another name")


def _counted(found: ScannedPack, entries: pa.Table) -> ScannedPack:
    found.objects, found.nbytes = len(entries), int(column_of(entries, "nbytes").sum())
    return found


def _copy(descriptor: int, path: str, found: ScannedPack, entries: pa.Table, output: str) -> None:
    """Write a new pack atomically from the records of a pack. Raises StoreUnavailable, UsageError.

    Unlike in `new_file`, the temporary file is locked, and a later run replaces it. So killed runs
    leave at most one file, which may be as large as the pack.
    """
    next_step = "check the directory and its free space"
    with errors_as(StoreUnavailable, output, "write the new pack", next_step):
        try:
            _write_copy(descriptor, path, found, entries, output)
        except FileExistsError as error:
            raise _taken(output) from error


def _write_copy(
    descriptor: int, path: str, found: ScannedPack, entries: pa.Table, output: str
) -> None:
    assert found.metadata is not None  # `repair` has checked this
    temporary = Path(output).with_name(f".{Path(output).name}.tmp")
    target = _created(temporary)
    try:
        content = build_metadata(found.metadata)
        record = plain_record(Kind.METADATA, content)
        head = [build_header(found.pack_id), build_record(record, found.pack_id), content]
        at = write_all(target, head, 0)
        moved = PackEntries()
        keys = entries.column("key").to_pylist()
        for key, place in zip(keys, places_in(entries), strict=True):
            moved[key] = place._replace(offset=at)
            at = _copy_bytes(descriptor, path, place, target, at)
        append_index(target, found.pack_id, moved.table(), found.metadata, at)
        source = Permissions.of_file(os.fstat(descriptor))
        os.fchmod(target, new_file_mode(source, os.fstat(target).st_gid))
        move_noreplace(None, os.fsencode(temporary), None, os.fsencode(output))
    finally:
        os.close(target)
        temporary.unlink(missing_ok=True)
    sync_name(output)


def _created(temporary: Path) -> int:
    """Create and lock the temporary file. Replace the file that a killed run left.

    Raises OSError, and StoreUnavailable if another process writes to the file.
    """
    with (
        suppress(FileNotFoundError),
        closing_descriptor(os.open(temporary, OPEN_FILE)) as abandoned,
    ):
        lock_pack(abandoned, str(temporary))
        temporary.unlink()
    target = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with undo_on_error(partial(os.close, target)):
        lock_pack(target, str(temporary))
    return target


def _copy_bytes(source: int, path: str, place: RecordPlace, target: int, at: int) -> int:
    offset, end = place.offset, place.offset + place.length
    while offset < end:
        with errors_as(StoreUnavailable, path, "read the pack", CHECK_MOUNT):
            data = os.pread(source, min(_COPY_BYTES, end - offset), offset)
        if not data:
            raise FormatError(f"{path}: became shorter while it was read; run again")
        at += write_all(target, [data], at)
        offset += len(data)
    return at
