"""The index of a pack, an Arrow IPC stream with one row per object, in the order of the file.

The metadata of its schema repeats the pack's metadata record, for readers of only the index.
Message bodies are not compressed, so readers allocate nothing larger than the stream.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.formats.errors import FormatError, HicacheError
from hicachectl.formats.keys import grammar_of
from hicachectl.formats.keys.columns import (
    RANK_COLUMNS,
    SPAN_COLUMNS,
    TEXT_COLUMNS,
    coordinate_columns,
)
from hicachectl.formats.keys.resolve import resolve_affixes
from hicachectl.formats.keys.table import KeySplitter
from hicachectl.formats.pack.planes import PLANE_COUNTS
from hicachectl.formats.pack.records import (
    DIGEST_BYTES,
    FORM,
    HEADER_BYTES,
    MOST_KEY_BYTES,
    MOST_METADATA_BYTES,
    MOST_OBJECT_BYTES,
    RECORD_BYTES,
    Metadata,
    checked_metadata,
)
from hicachectl.formats.profile import parse_profile
from hicachectl.formats.spec import object_specs

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from io import RawIOBase

    from hicachectl.formats.arrays import IntArray
    from hicachectl.formats.keys.base import Affix
    from hicachectl.formats.objects import Coordinate


# Content and location of a record.
ENTRY_FIELDS = (
    pa.field("key", pa.binary(), nullable=False),
    pa.field("nbytes", pa.int64(), nullable=False),
    pa.field("mtime_ns", pa.int64()),
    pa.field("offset", pa.int64(), nullable=False),  # place of the record in the file
    pa.field("length", pa.int64(), nullable=False),  # bytes of the whole record
    pa.field("planes", pa.uint8(), nullable=False),
    pa.field("digest", pa.binary(DIGEST_BYTES), nullable=False),
)
ENTRIES = pa.schema(ENTRY_FIELDS)
# The entry and the coordinate of its key, for readers that cannot parse keys.
SCHEMA = pa.schema(
    [
        *ENTRY_FIELDS,
        pa.field("page", pa.string()),
        *(pa.field(name, pa.string()) for name in TEXT_COLUMNS),
        *(pa.field(name, pa.int32()) for name in RANK_COLUMNS),
        *(pa.field(name, pa.string()) for name in SPAN_COLUMNS),
    ]
)
_WRITE_AGAIN = "use the release that wrote it, or write the pack again"
_BATCH_ROWS = 1 << 16
_HASH_PLACE = 32  # most keys have a byte of the page hash at this place
_METADATA = {
    "form": "hicachectl.pack",
    "grammar": "hicachectl.grammar",
    "profile": "hicachectl.profile",
    "version": "hicachectl.version",
}
# Source: Arrow format/Message.fbs, the field RecordBatch.compression; Schema.fbs.
_MESSAGE_HEADER_SLOT = 2
_COMPRESSION_SLOT = 3


def write_index(entries: pa.Table, metadata: Metadata) -> bytes:
    """Serialise the index.

    entries: table of ENTRIES, sorted by offset, with distinct keys.
    """
    splitter = KeySplitter()
    pages, ids = [], [np.empty(0, dtype=np.int32)]
    for chunk in entries.column("key").chunks:
        chunk_pages, chunk_ids = splitter.split(chunk)
        pages.append(chunk_pages)
        ids.append(chunk_ids)
    known = _profiled_affixes(metadata)
    resolved = resolve_affixes(splitter.affixes, grammar_of(metadata.grammar), known)
    columns = {
        **{name: entries.column(name) for name in ENTRIES.names},
        "page": pa.chunked_array(pages, pa.string()),
        **coordinate_columns([resolved[affix] for affix in splitter.affixes], np.concatenate(ids)),
    }
    schema = SCHEMA.with_metadata(
        {
            _METADATA["form"]: str(FORM),
            _METADATA["grammar"]: metadata.grammar,
            _METADATA["profile"]: metadata.profile,
            _METADATA["version"]: metadata.version,
        }
    )
    table = pa.table([columns[f.name].cast(f.type) for f in SCHEMA], schema=schema)
    stream = pa.BufferOutputStream()
    with pa.ipc.new_stream(stream, schema) as writer:
        writer.write_table(table, max_chunksize=_BATCH_ROWS)
    written: bytes = stream.getvalue().to_pybytes()
    return written


def _profiled_affixes(metadata: Metadata) -> dict[Affix, Coordinate]:
    """Return the affixes that the pack's profile describes, with their coordinates.

    The result is empty without a profile, or for the profile of another kind of store.
    """
    if not metadata.profile:
        return {}
    grammar = grammar_of(metadata.grammar)
    try:
        expected = object_specs(parse_profile(metadata.profile), metadata.grammar)
        return {grammar.affix(one.coordinate): one.coordinate for one in expected}
    except HicacheError:  # a profile for another kind of store
        return {}


def read_index(
    content: bytes | memoryview | RawIOBase, *, end: int, source: str
) -> tuple[pa.Table, Metadata]:
    """Parse an index and check every row. Return a table of ENTRIES and the metadata.

    content: the stream, or a file with the stream. A read of the file may return fewer bytes than
        asked for only at the end of the file.
    end: byte offset in the pack at which the records end.
    The memory in use is that of the entries and twice the largest batch.
    Raises OSError. Raises FormatError if the content is not a valid index of this pack.
    """
    in_memory = isinstance(content, bytes | memoryview)
    stream = pa.BufferReader(content) if in_memory else pa.PythonFile(content, mode="r")
    pieces: dict[str, list[pa.Array]] = {name: [] for name in ENTRIES.names}
    rows, before = 0, 0
    try:
        schema, batches = _read_stream(stream)
        texts = _texts(schema.metadata or {})
        for batch in batches:
            batch.validate(full=True)
            _check_nulls(batch)
            before = _check_values(batch, before, end, rows)
            rows += len(batch)
            for name, arrays in pieces.items():
                arrays.append(_copied(batch.column(name)))
        table = _joined(pieces)
        _check_distinct(table.column("key"))
    # ValueError: pyarrow decodes the names in a damaged schema as UTF-8.
    except (pa.ArrowException, OSError, MemoryError, ValueError, OverflowError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # the system, not pyarrow
            raise
        reason = " ".join(str(error).split())[:120]
        raise FormatError(f"{source}: cannot read its index: {reason}; {_WRITE_AGAIN}") from error
    except HicacheError as error:
        raise FormatError(f"{source}: its index {error}; {_WRITE_AGAIN}") from error
    return table, texts


def _read_stream(stream: Any) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    reader = pa.ipc.MessageReader.open_stream(stream)
    message = _next_message(reader)
    if message is None or message.type != "schema":
        raise FormatError("does not begin with a schema")
    schema = pa.ipc.read_schema(message)
    if not schema.equals(SCHEMA):
        raise FormatError("does not have the columns of a pack index")
    return schema, _read_batches(reader, schema)


def _read_batches(reader: Any, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    while (message := _next_message(reader)) is not None:
        if message.type != "record batch" or _is_compressed(message.metadata):
            raise FormatError(f"has a compressed or unexpected message ({message.type})")
        yield pa.ipc.read_record_batch(message, schema)


def _copied(column: pa.Array) -> pa.Array:
    """Return a copy of a column, so that the memory of its whole message can be freed."""
    alone = pa.record_batch([column], ["copied"])
    return pa.ipc.read_record_batch(alone.serialize(), alone.schema).column(0)


def _joined(pieces: dict[str, list[pa.Array]]) -> pa.Table:
    """Return a table with few chunks, because pyarrow joins all chunks each time it takes rows.

    pieces: arrays of each column. The arrays of a column are dropped as soon as they are joined, so
        that the memory is not doubled.
    """
    joined = []
    for field in ENTRIES:
        column = pa.chunked_array(pieces.pop(field.name), field.type)
        joined.append(pa.table({field.name: column}).combine_chunks().column(0))
        del column
        pa.default_memory_pool().release_unused()
    return pa.Table.from_arrays(joined, schema=ENTRIES)


def _next_message(reader: Any) -> Any:
    try:
        return reader.read_next_message()
    except StopIteration:
        return None


def _is_compressed(metadata: Any) -> bool:
    """Return whether the flatbuffer of a record batch message states that the body is compressed.

    Such a body states its decompressed size, which Arrow trusts. The reader has verified the
    offsets of the flatbuffer (arrow::internal::VerifyMessage).
    """
    data = memoryview(metadata)
    (message,) = struct.unpack_from("<I", data, 0)
    header = _field(data, message, _MESSAGE_HEADER_SLOT)
    if header is None:
        raise FormatError("has a message without a header")
    batch = header + int(struct.unpack_from("<I", data, header)[0])
    return _field(data, batch, _COMPRESSION_SLOT) is not None


def _field(data: memoryview, table: int, slot: int) -> int | None:
    """Return the offset of a flatbuffer table's field; None if the table lacks the field.

    slot: number of the field in the vtable.
    """
    (back,) = struct.unpack_from("<i", data, table)
    vtable = table - back
    (vtable_bytes,) = struct.unpack_from("<H", data, vtable)
    place = 4 + 2 * slot
    if place + 2 > vtable_bytes:
        return None
    (offset,) = struct.unpack_from("<H", data, vtable + place)
    return table + int(offset) if offset else None


def _texts(found: Mapping[bytes, bytes]) -> Metadata:
    try:
        texts = {name: found[key.encode()].decode() for name, key in _METADATA.items()}
    except KeyError as error:
        raise FormatError(f"lacks the metadata {error}") from error
    except UnicodeDecodeError as error:
        raise FormatError("has metadata that is not valid UTF-8") from error
    if (form := texts.pop("form")) != str(FORM):
        raise FormatError(f"has form {form:.20}, but this version reads form {FORM}")
    if sum(map(len, found.values())) > MOST_METADATA_BYTES:
        raise FormatError(f"has metadata of more than {MOST_METADATA_BYTES} bytes")
    return checked_metadata(Metadata(**texts))


def _check_nulls(entries: pa.RecordBatch) -> None:
    for field in ENTRIES:
        if not field.nullable and entries.column(field.name).null_count:
            raise FormatError(f"has nulls in {field.name}")


def _check_values(entries: pa.RecordBatch, before: int, end: int, row: int) -> int:
    """Check the rows of a batch. Return the end of its last record.

    before: end of the last record before this batch.
    end: end of all records.
    row: number of the batch's first row in the index.
    """
    if not len(entries):
        return before
    nbytes, offset, length = (column_of(entries, n) for n in ("nbytes", "offset", "length"))
    planes = entries.column("planes").to_numpy().astype(np.int64)
    key_bytes = pc.binary_length(entries.column("key")).to_numpy().astype(np.int64)
    head = RECORD_BYTES + key_bytes
    problems = [
        ("an empty or too long key", (key_bytes < 1) | (key_bytes > MOST_KEY_BYTES)),
        ("an object of impossible size", (nbytes < 0) | (nbytes >= MOST_OBJECT_BYTES)),
        ("an invalid number of planes", ~np.isin(planes, PLANE_COUNTS)),
        ("planes of unequal size", nbytes % np.maximum(planes, 1) != 0),
        ("a record outside the file", (offset < HEADER_BYTES) | (offset > end)),
        ("a record that ends outside the file", (length < head) | (length > end - offset)),
        ("a record larger than its object", length - head > nbytes),
        ("a record that overlaps its neighbour", offset < np.append(before, offset + length)[:-1]),
    ]
    for text, wrong in problems:
        if wrong.any():
            at = int(np.argmax(wrong))
            raise FormatError(f"has {text}: row {row + at}, offset {offset[at]}")
    return int(offset[-1] + length[-1])


def _check_distinct(keys: pa.ChunkedArray) -> None:
    """Check that no key occurs twice. To save memory, count only some keys at a time."""
    parts = pc.binary_slice(keys, _HASH_PLACE, _HASH_PLACE + 1)
    for part in parts.unique():
        some = keys.filter(pc.equal(parts, part))
        if pc.count_distinct(some).as_py() != len(some):
            raise FormatError("has a key that occurs twice")


def column_of(entries: pa.Table | pa.RecordBatch, name: str) -> IntArray:
    """Return an int64 column without nulls as one array."""
    column: IntArray = entries.column(name).to_numpy()
    return column
