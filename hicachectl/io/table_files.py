"""Parquet tables and JSON documents of a directory that several processes share.

A record in another file states the size and the rows of each file, so a file that is not whole is
noticed.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import pyarrow as pa
from msgspec import Meta, Struct

from hicachectl.formats.arrays import Count  # noqa: TC001 - msgspec reads it
from hicachectl.formats.documents import parse_json_object
from hicachectl.formats.errors import FormatError
from hicachectl.formats.forms import convert

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from hicachectl.backends.disk.directory import Directory


Share = dict[str, list[int]]  # row groups by file name
# A file name without a folder.
FileName = Annotated[str, Meta(pattern=r"\A[0-9A-Za-z][0-9A-Za-z_.-]{0,199}\Z")]

_GROUP_ROWS = 131_072  # most rows of a row group

# Bounds on the uncompressed size that a file states, which is checked before memory is allocated. A
# file may exceed one of the two bounds.
_MOST_ROW_BYTES = 4096  # average bytes of a row, all columns together
_MOST_RATIO = 1024  # uncompressed bytes for each compressed byte


class TableFile(Struct, frozen=True, kw_only=True):
    """Record of a whole file.

    name: name in its directory.
    nbytes: size on disk.
    rows: number of rows.
    """

    name: FileName
    nbytes: Count
    rows: Count


def write_table(
    directory: Directory,
    name: str,
    tables: Iterable[pa.Table],
    schema: pa.Schema,
    *,
    dictionary: Collection[str] = (),
) -> TableFile:
    """Write tables one after the other to a new file, durably.

    Each table becomes a row group. A table of more than a million rows becomes several.
    dictionary: names of columns with few distinct values.
    If the file cannot be written, it is removed, and OSError is raised.
    """
    import pyarrow.parquet as pq

    rows = 0
    descriptor = directory.create(name)
    try:
        with (
            os.fdopen(descriptor, "wb") as stream,
            pq.ParquetWriter(
                stream,
                schema,
                compression="zstd",
                compression_level=1,
                use_dictionary=list(dictionary),
                write_page_checksum=True,
            ) as writer,
        ):
            for table in tables:
                whole = (
                    pa.Table.from_batches([table]) if isinstance(table, pa.RecordBatch) else table
                )
                writer.write_table(whole)
                rows += len(whole)
            writer.close()
            stream.flush()
            os.fsync(descriptor)
            nbytes = os.fstat(descriptor).st_size
    except BaseException:
        directory.remove(name)
        raise
    directory.sync()
    return TableFile(name=name, nbytes=nbytes, rows=rows)


def named_table(
    directory: Directory, files: Iterable[TableFile], name: str, next_step: str
) -> TableFile:
    """Return the record of the file with a name. Raises FormatError if `files` has none."""
    for file in files:
        if file.name == name:
            return file
    raise FormatError(f"{directory.path}/{name}: the manifest does not list it; {next_step}")


def pieces(table: pa.Table) -> Iterator[pa.Table]:
    """Yield the rows of a table in pieces for `write_table`."""
    for start in range(0, len(table), _GROUP_ROWS):
        yield table.slice(start, _GROUP_ROWS)


def write_divided(
    directory: Directory,
    name: str,
    table: pa.Table,
    ends: Sequence[int],
    shares: Sequence[Share],
    *,
    dictionary: Collection[str] = (),
) -> TableFile:
    """Write a table that is divided among parts. No row group has rows of two parts.

    ends: [parts] end of each part's rows.
    shares: [parts] shares, to which the row groups of each part are added.
    For the other arguments and errors, see `write_table`.
    """

    def row_groups() -> Iterator[pa.Table]:
        number = 0
        for share, start, end in zip(shares, [0, *ends], ends, strict=False):
            for piece in pieces(table.slice(start, end - start)):
                share.setdefault(name, []).append(number)
                number += 1
                yield piece

    return write_table(directory, name, row_groups(), table.schema, dictionary=dictionary)


def read_share(
    directory: Directory,
    files: Iterable[TableFile],
    share: Share,
    schema: pa.Schema,
    next_step: str,
) -> pa.Table:
    """Return the rows of a part.

    files: files of one table.
    For the other arguments and errors, see `opened_table`.
    """
    tables = [schema.empty_table()]
    for file in files:
        if groups := share.get(file.name):
            with opened_table(directory, file, schema, next_step) as parquet:
                tables.append(parquet.read_row_groups(groups).cast(schema))
    return pa.concat_tables(tables)


@contextmanager
def opened_table(
    directory: Directory, file: TableFile, schema: pa.Schema, next_step: str
) -> Iterator[Any]:
    """Yield a file as a `ParquetFile` that compares checksums.

    next_step: end of the message about a damaged file.
    Raises FormatError for a file that is missing, is damaged or has other columns. Some damage
    shows only when the caller reads, so the `with` statement can raise FormatError, too. Raises
    OSError and UntrustedError.
    """
    import pyarrow.parquet as pq

    place = f"{directory.path}/{file.name}"
    try:
        descriptor = directory.open_file(file.name)
    except FileNotFoundError as error:
        raise FormatError(f"{place}: is missing; {next_step}") from error
    with os.fdopen(descriptor, "rb") as stream:
        found = os.fstat(descriptor).st_size
        if found != file.nbytes:
            raise FormatError(f"{place}: has {found} bytes, expected {file.nbytes}; {next_step}")
        try:
            parquet = pq.ParquetFile(stream, page_checksum_verification=True)
            _check_metadata(parquet, file, schema, place, next_step)
            yield parquet
        # A ValueError comes from names in a damaged schema that are not UTF-8.
        except (pa.ArrowException, OSError, MemoryError, ValueError, OverflowError) as error:
            reason = " ".join(str(error).split())[:120]
            raise FormatError(f"{place}: is damaged: {reason}; {next_step}") from error


def read_table(
    directory: Directory, file: TableFile, schema: pa.Schema, next_step: str
) -> pa.Table:
    """Read a whole file. See `opened_table`."""
    with opened_table(directory, file, schema, next_step) as parquet:
        table = parquet.read().replace_schema_metadata(schema.metadata)
        table.validate(full=True)
        return table


def _check_metadata(
    parquet: Any, file: TableFile, schema: pa.Schema, place: str, next_step: str
) -> None:
    if not parquet.schema_arrow.equals(schema):
        raise FormatError(f"{place}: has other columns than this release writes; {next_step}")
    stated = parquet.metadata
    if stated.num_rows != file.rows:
        raise FormatError(f"{place}: has {stated.num_rows} rows, expected {file.rows}; {next_step}")
    groups = (stated.row_group(number) for number in range(stated.num_row_groups))
    uncompressed = sum(group.total_byte_size for group in groups)
    most = max(file.rows * _MOST_ROW_BYTES, file.nbytes * _MOST_RATIO) + (1 << 20)
    if not 0 <= uncompressed <= most:
        raise FormatError(
            f"{place}: is damaged, because {file.rows} rows cannot have {uncompressed} bytes; "
            f"{next_step}"
        )


MOST_BYTES = 64 << 20
_MOST_VALUES = 16_000_000

Form = TypeVar("Form", bound=Struct)


def read_document(directory: Directory, name: str, form: type[Form], next_step: str) -> Form:
    """Read a document, within bounds. See `parse_document`.

    Also raises OSError (FileNotFoundError if the document is missing) and UntrustedError.
    """
    content = directory.read(name, MOST_BYTES + 1)
    return parse_document(content, f"{directory.path}/{name}", form, next_step)


def parse_document(
    content: bytes,
    source: str,
    form: type[Form],
    next_step: str,
    *,
    check: Callable[[Mapping[str, Any]], None] = lambda document: None,
) -> Form:
    """Parse a document.

    source: name of the document in messages.
    next_step: end of the message about a damaged document.
    check: function that is called with the JSON before its conversion, and may raise.
    Raises FormatError.
    """
    if len(content) > MOST_BYTES:
        raise FormatError(f"{source}: larger than {MOST_BYTES} bytes; {next_step}")
    try:
        document = parse_json_object(content, source, max_values=_MOST_VALUES)
    except FormatError as error:
        raise FormatError(f"{error}; {next_step}") from None
    check(document)
    try:
        return convert(document, form, source)
    except FormatError as error:
        raise FormatError(f"{error}; {next_step}") from None
