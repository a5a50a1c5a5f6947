"""The catalog: recorded digests of a store's objects, in a Parquet file.

One row per object, with distinct keys. Columns:

    key            binary   the backend's name for the object
    page           string   page hash; null if the key has none
    pool           string   null if unknown
    nbytes         int64
    identity       binary   the store's identity of the object at digest time; null: unknown
    digest         binary   BLAKE3, 32 bytes
    first_seen_ns  int64    Unix nanoseconds
    last_verified_ns int64  Unix nanoseconds

File metadata: `hicachectl.catalog` (version of this form), `hicachectl.store` (URL) and
`hicachectl.identity` (comma-separated fields of identity, 8 bytes little-endian each).
"""

from __future__ import annotations

import io
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from hicachectl.formats.errors import FormatError

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

# Bounds on the sizes that a file claims, checked before allocation.
_MOST_ROWS = 100_000_000
_MOST_ROW_BYTES = 1024  # average over rows, all columns; keys have about 120 bytes


@dataclass(frozen=True, slots=True)
class Catalog:
    """Recorded digests. entries: a table of SCHEMA. store: URL of the store."""

    entries: pa.Table
    store: str
    identity_fields: tuple[str, ...]


def write_catalog(catalog: Catalog) -> bytes:
    """Serialise a catalog."""
    import pyarrow.parquet as pq

    metadata = {
        "hicachectl.catalog": FORM,
        "hicachectl.store": catalog.store,
        "hicachectl.identity": ",".join(catalog.identity_fields),
    }
    stream = io.BytesIO()
    table = catalog.entries.cast(SCHEMA).replace_schema_metadata(metadata)
    pq.write_table(
        table, stream, compression="zstd", use_dictionary=["page", "pool"], write_page_checksum=True
    )
    return stream.getvalue()


def read_catalog(data: bytes | memoryview, *, source: str = "catalog") -> Catalog:
    """Parse a catalog. Raises FormatError for other data, before allocating the rows."""
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True)
        metadata = file.schema_arrow.metadata or {}
        _check_claims(file, metadata, len(data), source)
        entries = file.read().replace_schema_metadata(None)
        entries.validate(full=True)
    # ValueError: pyarrow decodes the names in a damaged schema as UTF-8.
    except (pa.ArrowException, OSError, MemoryError, ValueError, OverflowError) as error:
        reason = " ".join(str(error).split())[:120]
        raise FormatError(
            f"{source}: not a catalog, or damaged: {reason}; {_RIGHT_FILE}"
        ) from error
    _check_rows(entries, source)
    fields = metadata.get(b"hicachectl.identity", b"").decode("utf-8", "replace")
    return Catalog(
        entries,
        metadata.get(b"hicachectl.store", b"").decode("utf-8", "replace"),
        tuple(fields.split(",")) if fields else (),
    )


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
        raise FormatError(f"{source}: its columns are not the columns of a catalog")
    claimed = file.metadata  # type: ignore[attr-defined]
    groups = [claimed.row_group(number) for number in range(claimed.num_row_groups)]
    uncompressed = sum(group.total_byte_size for group in groups)
    rows = claimed.num_rows
    if not 0 <= rows <= _MOST_ROWS or uncompressed > rows * _MOST_ROW_BYTES + (1 << 20):
        raise FormatError(
            f"{source}: claims {rows} entries in {uncompressed} bytes ({nbytes} compressed), "
            "outside the limits of a catalog"
        )


def _check_rows(entries: pa.Table, source: str) -> None:
    for field in SCHEMA:
        if not field.nullable and entries.column(field.name).null_count:
            raise FormatError(f"{source}: column {field.name} has nulls")
    if pc.count_distinct(entries.column("key")).as_py() != len(entries):
        raise FormatError(f"{source}: a key occurs twice; record a new catalog")
