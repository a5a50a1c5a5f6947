"""The catalog, a Parquet file with recorded digests of a store's objects.

One row per object, with distinct keys. Columns:

    key            binary   the backend's name for the object
    page           string   page hash; null if the key has none
    pool           string   null if unknown
    nbytes         int64
    identity       binary   the store's identity of the object at digest time; null if unknown
    digest         binary   BLAKE3, 32 bytes
    first_seen_ns  int64    first run that had the entry, Unix nanoseconds
    last_verified_ns int64  last run that read these bytes, Unix nanoseconds

File metadata: `hicachectl.catalog` (version of this form), `hicachectl.store` (URL) and
`hicachectl.identity` (comma-separated fields of identity, 8 bytes little-endian each).
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import IO, TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.formats.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

FORM = "1"
DIGEST_BYTES = 32
_RIGHT_FILE = "give a file that hicachectl verify --update-catalog wrote"

SCHEMA = pa.schema(
    [
        pa.field("key", pa.binary(), nullable=False),
        pa.field("page", pa.string()),
        pa.field("pool", pa.string()),
        pa.field("nbytes", pa.int64(), nullable=False),
        pa.field("identity", pa.binary()),
        pa.field("digest", pa.binary(DIGEST_BYTES), nullable=False),
        pa.field("first_seen_ns", pa.int64(), nullable=False),
        pa.field("last_verified_ns", pa.int64(), nullable=False),
    ]
)

# Bounds on the sizes that a file's metadata states, checked before allocation.
_MOST_ROWS = 100_000_000
_MOST_ROW_BYTES = 1024  # most bytes of a row, on average; keys have about 120 bytes
_BATCH_ROWS = 65_536


@dataclass(frozen=True, slots=True)
class Catalog:
    """Recorded digests.

    entries: a table of SCHEMA.
    store: URL of the store.
    identity_fields: names of the numbers in the column `identity`.
    """

    entries: pa.Table
    store: str
    identity_fields: tuple[str, ...]

    def with_entries(self, entries: pa.Table, source: str) -> Catalog:
        """Return a catalog with untrusted entries. Raises FormatError if they are invalid.

        entries: a table of SCHEMA that was read from Parquet.
        source: names the catalog in messages.
        """
        with _readable(source):
            entries.validate(full=True)
        # No null can be where SCHEMA forbids one, because Parquet cannot store such a null.
        if pc.count_distinct(entries.column("key")).as_py() != len(entries):
            raise FormatError(f"{source}: a key occurs twice; record a new catalog")
        return replace(self, entries=entries)


def write_catalog(
    stream: IO[bytes],
    tables: Iterable[pa.Table],
    *,
    store: str,
    identity_fields: Iterable[str] = (),
) -> int:
    """Write a catalog, table by table. Return the number of entries.

    tables: tables with the columns of SCHEMA.
    """
    import pyarrow.parquet as pq

    metadata = {
        "hicachectl.catalog": FORM,
        "hicachectl.store": store,
        "hicachectl.identity": ",".join(identity_fields),
    }
    schema, entries = SCHEMA.with_metadata(metadata), 0
    with pq.ParquetWriter(
        stream,
        schema,
        compression="zstd",
        use_dictionary=["page", "pool"],
        write_page_checksum=True,
    ) as writer:
        for table in tables:
            writer.write_table(table.cast(SCHEMA).cast(schema))
            entries += len(table)
    return entries


def read_catalog(data: bytes | memoryview, *, source: str = "catalog") -> Catalog:
    """Parse a catalog. Raises FormatError for other data.

    If a file's metadata states too many rows or bytes, the file is refused before its rows are
    allocated.
    """
    with _readable(source):
        file, described = _opened(data, source)
        entries = file.read().replace_schema_metadata(None)
    return described.with_entries(entries, source)


def stream_catalog(
    data: bytes | memoryview, *, source: str = "catalog"
) -> tuple[Catalog, Iterator[pa.RecordBatch]]:
    """Return a catalog without its entries, and its entries in batches of SCHEMA.

    The entries are not checked; `Catalog.with_entries` checks entries. Raises FormatError as
    `read_catalog` does, also while the caller iterates.
    """
    with _readable(source):
        file, described = _opened(data, source)

    def batches() -> Iterator[pa.RecordBatch]:
        with _readable(source):
            for batch in file.iter_batches(batch_size=_BATCH_ROWS):
                yield batch.replace_schema_metadata(None)

    return described, batches()


def count_entries(data: bytes | memoryview, *, source: str = "catalog") -> int:
    """Return the number of entries of a catalog. Raises FormatError for other data."""
    with _readable(source):
        file, _ = _opened(data, source)
        number: int = file.metadata.num_rows
    return number


@contextmanager
def _readable(source: str) -> Iterator[None]:
    try:
        yield
    # ValueError: pyarrow decodes the names in a damaged schema as UTF-8.
    except (pa.ArrowException, OSError, MemoryError, ValueError, OverflowError) as error:
        reason = " ".join(str(error).split())[:120]
        raise FormatError(
            f"{source}: not a catalog, or damaged: {reason}; {_RIGHT_FILE}"
        ) from error


def _opened(data: bytes | memoryview, source: str) -> tuple[Any, Catalog]:
    import pyarrow.parquet as pq

    file = pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True)
    metadata = file.schema_arrow.metadata or {}
    _check_claims(file, metadata, len(data), source)
    fields = metadata.get(b"hicachectl.identity", b"").decode("utf-8", "replace")
    store = metadata.get(b"hicachectl.store", b"").decode("utf-8", "replace")
    return file, Catalog(SCHEMA.empty_table(), store, tuple(fields.split(",")) if fields else ())


def _check_claims(file: object, metadata: dict[bytes, bytes], nbytes: int, source: str) -> None:
    form = metadata.get(b"hicachectl.catalog")
    if form is None:
        raise FormatError(f"{source}: a Parquet file, but not a hicachectl catalog; {_RIGHT_FILE}")
    if form.decode("utf-8", "replace") != FORM:
        raise FormatError(
            f"{source}: has catalog form {form!r:.20}, but this version reads form {FORM}; record "
            "a new catalog with --update-catalog"
        )
    if not file.schema_arrow.equals(SCHEMA):  # type: ignore[attr-defined]
        raise FormatError(f"{source}: its columns are not the columns of a catalog; {_RIGHT_FILE}")
    claimed = file.metadata  # type: ignore[attr-defined]
    groups = [claimed.row_group(number) for number in range(claimed.num_row_groups)]
    uncompressed = sum(group.total_byte_size for group in groups)
    rows = claimed.num_rows
    if not 0 <= rows <= _MOST_ROWS or uncompressed > rows * _MOST_ROW_BYTES + (1 << 20):
        raise FormatError(
            f"{source}: claims {rows} entries in {uncompressed} bytes ({nbytes} compressed), "
            f"outside the limits of a catalog; {_RIGHT_FILE}"
        )


# The catalog before entries are recorded, or while the entries are kept elsewhere.
NO_ENTRIES = Catalog(SCHEMA.empty_table(), "", ())
