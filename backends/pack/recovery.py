"""Rebuild the index of a pack from its records."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from hicachectl.backends.disk.durable import move_noreplace, sync_name
from hicachectl.backends.disk.io import CHECK_MOUNT, OPEN_FILE, write_all
from hicachectl.backends.disk.permissions import Permissions, as_umask_says
from hicachectl.backends.pack.file import (
    ObjectReader,
    PackEntries,
    RecordContent,
    RecordPlace,
    append_index,
    load_pack,
    lock_pack,
    open_pack,
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
from hicachectl.formats.wording import failed

if TYPE_CHECKING:
    from collections.abc import Callable

    import pyarrow as pa

# After a crash, records written since the last sync can have a valid head but incomplete content.
# Less than this is written between two syncs. Earlier content is checked when it is read.
CHECKED_TAIL_BYTES = 1 << 30
_MOST_CHECKED_BYTES = 256 << 20  # per object, which must fit into memory
_SEARCH_BYTES = 4 << 20
_COPY_BYTES = 8 << 20


@dataclass(slots=True)
class ScannedPack:
    """A pack's contents according to its records, without its index; or the result of a repair.

    end: offset after the last whole record.
    cut_bytes: bytes after `end`.
    unfinished: whether the bytes after `end` begin with an object's head.
    damaged_bytes: bytes between records.
    damaged: number of checked objects that do not match their digest.
    objects: number of the repaired pack's objects.
    nbytes: content bytes of the repaired pack's objects.
    was_valid: no repair was needed.
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
    """Read the heads of all records and check the content of the last ones.

    on_bytes: called with the bytes just passed and the file's size. Damage between records is
    skipped. Memory: about 500 bytes per object. Raises FormatError if the file is not a pack.
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
    """Return the head of a whole record at an offset, else None."""
    try:
        record = read_record(descriptor, at, pack_id)
    except FormatError:
        return None
    return record if record.length <= size - at else None


def _after_damage(descriptor: int, at: int, size: int, pack_id: bytes) -> tuple[int, bool] | None:
    """Return the next record's offset, and whether only a trailer is skipped; else None."""
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
        found.entries.rows.pop(record.key, None)
    elif record.kind is Kind.OBJECT:
        if check and record.nbytes <= _MOST_CHECKED_BYTES:
            try:
                reader.read(
                    record.key, RecordPlace.of(record, at), memoryview(bytearray(record.nbytes))
                )
            except FormatError:
                found.damaged += 1
                return
        found.entries.add(record, at)


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

    In place, only a tail without a whole record is cut off. output: a new file; the pack stays
    unchanged. Raises UsageError if output exists, FormatError if nothing can be saved,
    StoreUnavailable if another process writes to the pack or a system call fails.
    """
    if output is not None and Path(output).exists():
        raise _taken(output)
    writes_here = output is None and not dry_run
    descriptor = open_pack(path, os.O_RDWR if writes_here else os.O_RDONLY)
    try:
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
    except OSError as error:
        raise StoreUnavailable(
            failed(path, "repair the pack", error, "fix the cause, then run again")
        ) from error
    finally:
        os.close(descriptor)


def _taken(output: str) -> UsageError:
    return UsageError(f"{output}: already exists; choose another name")


def _counted(found: ScannedPack, entries: pa.Table) -> ScannedPack:
    found.objects, found.nbytes = len(entries), int(column_of(entries, "nbytes").sum())
    return found


def _copy(descriptor: int, path: str, found: ScannedPack, entries: pa.Table, output: str) -> None:
    """Write a new pack atomically from the records of a pack. Raises StoreUnavailable, UsageError.

    Unlike in `new_file`, the temporary file is locked, and a later run replaces it: killed runs
    leave at most one file, as large as the pack.
    """
    try:
        _write_copy(descriptor, path, found, entries, output)
    except FileExistsError as error:
        raise _taken(output) from error
    except OSError as error:
        next_step = "check the directory and its free space"
        raise StoreUnavailable(failed(output, "write the new pack", error, next_step)) from error


def _write_copy(
    descriptor: int, path: str, found: ScannedPack, entries: pa.Table, output: str
) -> None:
    import pyarrow as pa

    assert found.metadata is not None  # `repair` has checked this
    partial = Path(output).with_name(f".{Path(output).name}.tmp")
    target = _created(partial)
    try:
        content = build_metadata(found.metadata)
        record = plain_record(Kind.METADATA, content)
        head = [build_header(found.pack_id), build_record(record, found.pack_id), content]
        at = write_all(target, head, 0)
        moved = []
        for offset, length in zip(
            column_of(entries, "offset").tolist(),
            column_of(entries, "length").tolist(),
            strict=True,
        ):
            moved.append(at)
            at = _copy_bytes(descriptor, path, offset, length, target, at)
        place = entries.schema.get_field_index("offset")
        entries = entries.set_column(
            place, entries.schema.field(place), pa.array(moved, pa.int64())
        )
        append_index(target, found.pack_id, entries, found.metadata, at)
        source = Permissions.of_file(os.fstat(descriptor))
        os.fchmod(target, as_umask_says(source, os.fstat(target).st_gid))
        move_noreplace(None, os.fsencode(partial), None, os.fsencode(output))
    finally:
        os.close(target)
        partial.unlink(missing_ok=True)
    sync_name(output)


def _created(partial: Path) -> int:
    """Create and lock the temporary file; replace a killed run's file.

    Raises OSError, and StoreUnavailable if another process writes to the file.
    """
    with suppress(FileNotFoundError):
        abandoned = os.open(partial, OPEN_FILE)
        try:
            lock_pack(abandoned, str(partial))
            partial.unlink()
        finally:
            os.close(abandoned)
    target = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        lock_pack(target, str(partial))
    except BaseException:
        os.close(target)
        raise
    return target


def _copy_bytes(source: int, path: str, offset: int, length: int, target: int, at: int) -> int:
    end = offset + length
    while offset < end:
        try:
            data = os.pread(source, min(_COPY_BYTES, end - offset), offset)
        except OSError as error:
            raise StoreUnavailable(failed(path, "read the pack", error, CHECK_MOUNT)) from error
        if not data:
            raise FormatError(f"{path}: became shorter while it was read; run again")
        at += write_all(target, [data], at)
        offset += len(data)
    return at
