"""The index of packs: its coordinates of keys; every impossible row is refused."""

from __future__ import annotations

import re
import struct
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicachectl.formats.errors import FormatError
from hicachectl.formats.keys import grammar_of
from hicachectl.formats.kinds.pool import Pool
from hicachectl.formats.pack.index import ENTRIES, SCHEMA, read_index, write_index
from hicachectl.formats.pack.records import Metadata
from hicachectl.formats.profile import Profile, dump_profile
from tests.backends.pack import pack_files

END = 1 << 20
KEYS = tuple(f"{n:064x}_m_0_1.bin".encode() for n in range(3))
HEAD = 104 + len(KEYS[0])


def row(number: int, **changed: Any) -> dict[str, Any]:
    """Return a row of adjacent records with 100 bytes of content each."""
    length = HEAD + 100
    sound = {
        "key": KEYS[number],
        "nbytes": 100,
        "mtime_ns": None,
        "offset": 32 + number * length,
        "length": length,
        "planes": 2,
        "digest": bytes(32),
    }
    return {**sound, **changed}


def read(data: bytes, end: int = END) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = read_index(data, end=end, source="x")[0].to_pylist()
    return rows


def entries(rows: list[dict[str, Any]]) -> pa.Table:
    return pa.Table.from_pylist(rows, schema=ENTRIES)


def test_an_index_is_read_as_it_was_written() -> None:
    metadata = Metadata(grammar="file", profile="", version="3")
    table = entries([row(0, mtime_ns=5), row(1), row(2)])
    found, texts = read_index(write_index(table, metadata), end=END, source="x")
    assert found.equals(table)
    assert texts == metadata


def test_an_index_written_by_hand_is_read() -> None:
    assert read(pack_files.index([row(0), row(2)])) == [row(0), row(2)]
    assert read(pack_files.index([])) == []


def test_other_programs_find_what_the_keys_say() -> None:
    page = "ab" * 32
    key = f"m_{page}_1_0_k".encode()
    table = entries([row(0, key=key), row(1, key=b"foreign")])
    data = write_index(table, Metadata(grammar="mooncake"))
    known, foreign = pa.ipc.open_stream(data).read_all().to_pylist()
    (reading, *_) = grammar_of("mooncake").readings("m_", "_1_0_k")
    assert (known["page"], known["model"], known["pool"]) == (
        page,
        reading.names.model,
        reading.pool,
    )
    assert (foreign["page"], foreign["pool"]) == (None, None)


def test_a_profile_decides_what_keys_leave_open() -> None:
    key = f"{'0' * 64}_x_0_2.bin".encode()  # the MLA model x_0_2, or rank 0 of 2 of x
    mla = Pool(name="kv", kind="mla", layers=2, kv_lora_rank=8, qk_rope_head_dim=8, row="bf16")
    profile = Profile(model="x_0_2", page_size=4, pools=(mla,))
    said = []
    for text in ("", dump_profile(profile)):
        data = write_index(entries([row(0, key=key)]), Metadata(grammar="file", profile=text))
        said.append(pa.ipc.open_stream(data).read_all().column("model").to_pylist())
    assert said == [[None], ["x_0_2"]]


LIES: dict[str, tuple[dict[str, Any], str]] = {
    "before the file": ({"offset": -1}, "outside the file"),
    "in the header": ({"offset": 31}, "outside the file"),
    "least offset": ({"offset": -(2**63)}, "outside the file"),
    "behind the file": ({"offset": END + 1}, "outside the file"),
    "largest offset": ({"offset": 2**63 - 1}, "outside the file"),
    "ends behind the file": ({"length": END}, "ends outside the file"),
    "largest length": ({"length": 2**63 - 1}, "ends outside the file"),
    "negative length": ({"length": -1}, "ends outside the file"),
    "no room for its head": ({"length": HEAD - 1}, "ends outside the file"),
    "negative size": ({"nbytes": -2}, "impossible size"),
    "impossible size": ({"nbytes": 1 << 62}, "impossible size"),
    "larger than its object": ({"nbytes": 98}, "larger than its object"),
    "three planes": ({"planes": 3}, "planes"),
    "no plane": ({"planes": 0}, "planes"),
    "unequal planes": ({"nbytes": 101}, "unequal size"),
    "no key": ({"key": b""}, "empty or too long key"),
    "key too long": ({"key": b"k" * 70_000, "length": 71_000}, "empty or too long key"),
    "key twice": ({"key": KEYS[0]}, "a key that occurs twice"),
    "overlapping": ({"offset": 40 + HEAD}, "overlaps"),
    "disordered": ({"offset": 32 + 10 * HEAD}, "overlaps"),
}


@pytest.mark.parametrize("name", LIES)
def test_a_row_that_cannot_be_is_refused(name: str) -> None:
    changed, text = LIES[name]
    with pytest.raises(FormatError, match=text) as caught:
        read(pack_files.index([row(0), row(1, **changed), row(2)]))
    assert str(caught.value).startswith("x: its index")


@pytest.mark.parametrize("name", ["overlapping", "disordered", "key twice", "behind the file"])
def test_rows_of_different_batches_are_compared(name: str) -> None:
    """A row that contradicts an earlier batch is refused, with its number in the index."""
    changed, text = LIES[name]
    rows = [row(0), row(1, **changed), row(2)]
    whole = pa.Table.from_pylist(rows, schema=SCHEMA)
    data = as_stream(pa.concat_tables([whole.slice(0, 1), whole.slice(1)]), SCHEMA)
    with pytest.raises(FormatError, match=text) as caught:
        read(data)
    assert ": row " not in str(caught.value) or re.search(": row [12],", str(caught.value))


def test_nulls_are_refused() -> None:
    for name in ("key", "nbytes", "offset", "length", "planes", "digest"):
        fields = [pa.field(f.name, f.type, metadata=f.metadata) for f in SCHEMA]
        table = pa.Table.from_pylist([row(0, **{name: None})], schema=pa.schema(fields))
        with pytest.raises(FormatError, match=f"nulls in {name}|does not have the columns"):
            read(as_stream(table, SCHEMA))


def as_stream(table: pa.Table, schema: pa.Schema, **options: Any) -> bytes:
    """Write batches under a possibly different schema, as a hostile writer would."""
    metadata = {"hicachectl.pack": "1", "hicachectl.grammar": "file"}
    metadata |= {"hicachectl.profile": "", "hicachectl.version": "0"}
    schema = schema.with_metadata(metadata)
    stream = pa.BufferOutputStream()
    with pa.ipc.new_stream(stream, schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        for batch in table.to_batches():
            writer.write_batch(pa.RecordBatch.from_arrays(batch.columns, schema=schema))
    written: bytes = stream.getvalue().to_pybytes()
    return written


@pytest.mark.parametrize("compression", ["zstd", "lz4"])
def test_compressed_bodies_are_refused_before_they_are_expanded(compression: str) -> None:
    table = pa.Table.from_pylist([row(n) for n in range(3)], schema=SCHEMA)
    data = as_stream(table, SCHEMA, compression=compression)
    before = pa.total_allocated_bytes()
    with pytest.raises(FormatError, match=r"unexpected message \(record batch"):
        read(data)
    assert pa.total_allocated_bytes() - before < 1 << 16


def test_other_columns_and_dictionaries_are_refused() -> None:
    table = pa.table({"key": pa.array([b"k"], pa.binary())})
    with pytest.raises(FormatError, match="does not have the columns"):
        read(as_stream(table, table.schema))
    coded = pa.table({"key": pa.array(["k"]).dictionary_encode()})
    with pytest.raises(FormatError, match="does not have the columns"):
        read(as_stream(coded, coded.schema))


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"hicachectl.grammar": "s3"}, "s3"),
        ({"hicachectl.pack": "2"}, "its index has form 2, but this version reads form 1"),
        ({"hicachectl.profile": b"\xff"}, "not valid UTF-8"),
        ({"hicachectl.profile": b"x" * (5 << 20)}, "metadata of more than 4194304 bytes"),
        ({"hicachectl.version": None}, "lacks"),
    ],
)
def test_metadata_that_cannot_be_is_refused(changed: dict[str, Any], text: str) -> None:
    table = pa.ipc.open_stream(pack_files.index([row(0)])).read_all()
    metadata = {k.decode(): v for k, v in table.schema.metadata.items()} | changed
    metadata = {k: v for k, v in metadata.items() if v is not None}
    stream = pa.BufferOutputStream()
    table = table.replace_schema_metadata(metadata)
    with pa.ipc.new_stream(stream, table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(FormatError, match=f"{text}.*; use the release that wrote it, or write"):
        read(stream.getvalue().to_pybytes())


SOUND = pack_files.index([row(n) for n in range(3)])


@given(data=st.binary(max_size=300))
def test_arbitrary_bytes_are_no_index(data: bytes) -> None:
    with pytest.raises(FormatError):
        read(data)


@pytest.mark.parametrize("seed", range(20))
def test_damage_is_refused_or_leaves_rows_that_can_be(seed: int) -> None:
    """Digests do not help here, because an attacker can recompute them."""
    rng = np.random.default_rng(seed)
    for _ in range(200):
        damaged = bytearray(SOUND)
        for place in rng.integers(0, len(SOUND), rng.integers(1, 4)):
            damaged[place] ^= 1 << rng.integers(8)
        if rng.random() < 0.3:  # a number of 8 bytes, in the flatbuffers and in the bodies
            at = rng.integers(len(SOUND) // 8) * 8
            struct.pack_into("<q", damaged, int(at), int(rng.choice([-1, 2**62, 2**31, -(2**63)])))
        if rng.random() < 0.2:
            del damaged[rng.integers(len(SOUND)) :]
        before = pa.total_allocated_bytes()
        try:
            found = read(bytes(damaged))
        except FormatError:
            continue
        finally:
            assert pa.total_allocated_bytes() - before < 1 << 20
        assert all(32 <= r["offset"] <= END - r["length"] for r in found)
