"""Catalogs read back as written; other data is refused with a reason."""

from __future__ import annotations

import contextlib
import io
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicachectl.formats.catalog import SCHEMA, Catalog, read_catalog, write_catalog
from hicachectl.formats.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_ENTRY = st.fixed_dictionaries(
    {
        "key": st.binary(max_size=20),
        "page": st.none() | st.just("0" * 64),
        "pool": st.none() | st.sampled_from(["kv", "mamba"]),
        "nbytes": st.integers(0, 2**62),
        "identity": st.none() | st.binary(min_size=32, max_size=32),
        "digest": st.binary(min_size=32, max_size=32),
        "first_seen_ns": st.integers(0, 2**62),
        "last_verified_ns": st.integers(0, 2**62),
    }
)


def catalog(entries: Sequence[Mapping[str, object]]) -> Catalog:
    table = pa.Table.from_pylist(list(entries), schema=SCHEMA)
    return Catalog(table, "file:///x", ("inode", "mtime", "ctime", "size"))


def written(catalog: Catalog) -> bytes:
    stream = io.BytesIO()
    fields = catalog.identity_fields
    write_catalog(stream, [catalog.entries], store=catalog.store, identity_fields=fields)
    return stream.getvalue()


@pytest.mark.slow
@given(st.lists(_ENTRY, max_size=5, unique_by=lambda entry: entry["key"]))
def test_what_was_written_is_read(entries: list[dict[str, object]]) -> None:
    wanted = catalog(entries)
    assert read_catalog(written(wanted)) == wanted


ENTRY = {
    "key": b"k", "page": None, "pool": None, "nbytes": 1, "identity": None,
    "digest": bytes(32), "first_seen_ns": 1, "last_verified_ns": 1,
}  # fmt: skip
GOOD = written(catalog([ENTRY, {**ENTRY, "key": b"l"}]))


@pytest.mark.parametrize("length", [0, 1, 4, 100, len(GOOD) // 2, len(GOOD) - 1])
def test_a_truncated_catalog_is_refused(length: int) -> None:
    with pytest.raises(FormatError, match=r"c\.parquet"):
        read_catalog(GOOD[:length], source="c.parquet")


@given(st.integers(0, len(GOOD) - 1), st.integers(1, 255))
def test_a_flipped_byte_never_raises_anything_else(position: int, flip: int) -> None:
    damaged = bytearray(GOOD)
    damaged[position] ^= flip
    with contextlib.suppress(FormatError):
        read_catalog(bytes(damaged))


def parquet(table: pa.Table, **metadata: str) -> bytes:
    stream = io.BytesIO()
    named = {f"hicachectl.{name}": value for name, value in metadata.items()}
    pq.write_table(table.replace_schema_metadata(named or None), stream)
    return stream.getvalue()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (parquet(pa.table({"a": [1]})), "not a hicachectl catalog"),
        (parquet(SCHEMA.empty_table(), catalog="99"), "form"),
        (parquet(pa.table({"a": [1]}), catalog="1"), "columns .*; give a file that .* --update-"),
        (written(catalog([ENTRY, ENTRY])), "twice"),
    ],
    ids=["another file", "another form", "other columns", "a key twice"],
)
def test_other_files_are_refused(data: bytes, said: str) -> None:
    with pytest.raises(FormatError, match=said):
        read_catalog(data)


def test_a_catalog_of_too_large_rows_is_refused_with_its_numbers() -> None:
    data = written(catalog([{**ENTRY, "key": bytes(3 << 20)}]))
    said = rf"c: claims 1 entries in 31\d+ bytes \({len(data)} compressed\), .*; give a file"
    with pytest.raises(FormatError, match=said):
        read_catalog(data, source="c")


@pytest.mark.slow
def test_a_bomb_is_refused_before_it_is_inflated() -> None:
    bomb = pa.table({**ENTRY, "key": [b"\0" * 300_000_000]} | {
        name: [value] for name, value in ENTRY.items() if name != "key"
    }, schema=SCHEMA)  # fmt: skip
    data = parquet(bomb, catalog="1", store="s", identity="")
    assert len(data) < 50_000_000
    with pytest.raises(FormatError, match="outside the limits of a catalog"):
        read_catalog(data)
