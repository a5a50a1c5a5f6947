"""Tests of backends.hf3fs.snapshot with the json module, the real server and damaged files."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tracemalloc
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicachectl.backends.hf3fs import snapshot as hf3fs_snapshot
from hicachectl.backends.hf3fs.snapshot import (
    MAX_PAGES,
    read_snapshot,
    repeated_key,
    write_repaired,
)
from hicachectl.backends.page_tables import PageTable, Snapshot
from hicachectl.formats.errors import FormatError, StoreUnavailable
from tests.speed import chance_of_run, examples

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.hf3fs_server import MetadataServer

Document = dict[str, dict[str, Any]]

TRICKY = st.sampled_from(
    ["],[", "] ]", '"', "\\", '\\"]', "]]}", "é", "\U0001f600", "\x00", "a" * 70]
)
KEYS = st.one_of(st.text("ab0_-", max_size=6), st.lists(TRICKY, max_size=4).map("".join))
PAGES = st.one_of(st.integers(0, 20), st.integers(0, 2**63 - 1))
TABLES = st.fixed_dictionaries(
    {
        "num_pages": st.one_of(st.integers(0, 50), st.just(MAX_PAGES)),
        "free_pages": st.lists(PAGES, max_size=12),
        "key_to_index": st.lists(
            st.tuples(KEYS, PAGES).map(list), max_size=12, unique_by=lambda entry: entry[0]
        ),
    }
)
DOCUMENTS = st.dictionaries(
    st.sampled_from(["0:kv", "1:kv", "0:indexer", "12:mamba", "3"]), TABLES, max_size=3
)
WRITTEN: list[dict[str, Any]] = [
    {"indent": 4},
    {},
    {"separators": (",", ":")},
    {"separators": (" ,\n\n", "\t: ")},
    {"indent": 1, "ensure_ascii": False},
]
FORMS = st.sampled_from(WRITTEN)
DOCUMENT: Document = {
    "0:kv": {"num_pages": 9, "free_pages": [7, 10], "key_to_index": [["],[", 0], ['\\"é', 8]]},
    "3": {"num_pages": 0, "free_pages": [], "key_to_index": []},
}
SMALL = '{"0:kv": {"num_pages": 4, "free_pages": [0, 1], "key_to_index": [["a", 3], ["b", 2]]}}'


@pytest.fixture(scope="module", autouse=True)
def _small_pieces() -> Iterator[None]:
    """Read and parse a few bytes at a time, so that every boundary is tested."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hf3fs_snapshot, "_PIECE_BYTES", 16)
        patch.setattr(hf3fs_snapshot, "_BLOCK_BYTES", 7)
        patch.setattr(hf3fs_snapshot, "_WRITE_ROWS", 3)
        patch.setattr(hf3fs_snapshot, "_CHUNK_ROWS", 2)
        yield


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("snapshot") / "metadata.json"


def names_in(table: PageTable) -> list[bytes]:
    names: list[bytes] = table.names_at(np.arange(len(table.keys))).to_pylist()
    assert table.keys.to_pylist() == [f"{table.name}:".encode() + name for name in names]
    return names


def as_document(snapshot: Snapshot) -> Document:
    return {
        table.name: {
            "num_pages": table.num_pages,
            "free_pages": table.free.tolist(),
            "key_to_index": [
                [key.decode(), index]
                for key, index in zip(names_in(table), table.indices.tolist(), strict=True)
            ],
        }
        for table in snapshot.tables
    }


def with_namespaces(document: Document) -> Document:
    return {name if ":" in name else f"{name}:kv": table for name, table in document.items()}


def refusal(path: Path, text: str | bytes) -> str:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(FormatError) as caught:
        read_snapshot(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    return message


# reading


@pytest.mark.slow
@examples(60)
@given(document=DOCUMENTS, form=FORMS)
def test_what_is_read_is_what_the_json_module_reads(
    path: Path, document: Document, form: dict[str, Any]
) -> None:
    path.write_text(json.dumps(document, **form))
    assert as_document(read_snapshot(path)) == with_namespaces(document)


@pytest.mark.slow
@pytest.mark.parametrize("form", WRITTEN)
def test_a_snapshot_cut_anywhere_is_refused(path: Path, form: dict[str, Any]) -> None:
    text = json.dumps(DOCUMENT, **form).encode()
    for cut in range(len(text)):
        assert "the snapshot is cut short" in refusal(path, text[:cut])


@pytest.mark.slow
def test_a_changed_byte_is_refused_or_read_as_the_json_module_reads_it(path: Path) -> None:
    """Changes each byte of a document into some that mean something, and into any."""
    chance, words = chance_of_run()
    written = json.dumps(DOCUMENT, **WRITTEN[3]).encode()
    for at in range(len(written)):
        for byte in {*chance.sample(b'[]{}",:\\ 019-.e', 8), *chance.randbytes(1)}:
            text = written[:at] + bytes([byte]) + written[at + 1 :]
            path.write_bytes(text)
            with contextlib.suppress(FormatError):
                read = as_document(read_snapshot(path))
                assert read == with_namespaces(json.loads(text)), words


@examples(100)
@given(junk=st.binary(max_size=200))
def test_arbitrary_bytes_are_refused(path: Path, junk: bytes) -> None:
    if junk.split() != [b"{}"]:
        refusal(path, junk)


def test_the_columns_have_their_types_even_when_empty(path: Path) -> None:
    path.write_text('{"7": {"num_pages": 0, "free_pages": [], "key_to_index": [ ]}}')
    (table,) = read_snapshot(path).tables
    assert (table.rank, table.namespace, table.name) == (7, "kv", "7:kv")
    assert table.free.dtype == table.indices.dtype == np.int64
    assert table.keys.type == pa.binary()


def test_the_age_is_that_of_the_file(path: Path) -> None:
    path.write_text(SMALL)
    os.utime(path, ns=(5, 1_234_567_890))
    assert read_snapshot(path).saved_at_ns == 1_234_567_890


def test_the_fields_may_come_in_any_order(path: Path) -> None:
    table = json.loads(SMALL)["0:kv"]
    path.write_text(json.dumps({"0:kv": dict(reversed(table.items()))}))
    assert as_document(read_snapshot(path)) == {"0:kv": table}


# refusals


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("num_pages", "-1", "'num_pages' of 0:kv, near byte 23: not a whole number"),
        ("num_pages", "1.5", "not a whole number"),
        ("num_pages", "1e3", "not a whole number"),
        ("num_pages", "true", "not a whole number"),
        ("num_pages", str(MAX_PAGES + 1), "which no server can hold"),
        ("num_pages", "9" * 500, "which no server can hold"),
        ("free_pages", "[1, 2, -3]", "'free_pages' of 0:kv"),
        ("free_pages", "[1, 2, -3]", "Expected `int` >= 0 (entry 2)"),
        ("free_pages", "[9223372036854775808]", "Expected `int`"),
        ("free_pages", "[1, null]", "got `null` (entry 1)"),
        ("free_pages", "[1,, 2]", "malformed"),
        ("free_pages", "[1, ]", "trailing comma"),
        ("free_pages", "[,1]", "malformed"),
        ("free_pages", "3", "not an array"),
        ("key_to_index", '{"a": 1}', "not an array"),
        ("key_to_index", '[["a", 1], ["b", -2]]', "Expected `int` >= 0 (entry 1)"),
        ("key_to_index", '[["a", 18446744073709551616]]', "Expected `int`"),
        ("key_to_index", '[["a", "1"]]', "Expected `int`, got `str` (entry 0)"),
        ("key_to_index", "[[1, 1]]", "Expected `str`, got `int` (entry 0)"),
        ("key_to_index", '[["a"]]', "Expected `array` of length 2"),
        ("key_to_index", '[["a", 1, 2]]', "Expected `array` of length 2"),
        ("key_to_index", '[["a", [1]]]', "'key_to_index' of 0:kv"),
        ("key_to_index", '[["a", 1],]', "'key_to_index' of 0:kv"),
        ("key_to_index", '[["a", 1] ["b", 2]]', "'key_to_index' of 0:kv"),
        ("key_to_index", '[["\\ud800", 1]]', "'key_to_index' of 0:kv"),
        ("key_to_index", '[["ab", 1], ["c", 2], ["ab", 3]]', "the key 'ab' occurs twice"),
    ],
)
def test_a_field_the_server_would_not_write_is_named(
    path: Path, field: str, value: str, said: str
) -> None:
    fields = {"num_pages": "9", "free_pages": "[]", "key_to_index": "[]", field: value}
    text = ", ".join(f'"{name}": {written}' for name, written in fields.items())
    assert said in refusal(path, f'{{"0:kv": {{{text}}}}}')


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "it ends after 0 bytes"),
        ("[]", "near byte 0: not an object"),
        ("\x89PNG", "near byte 0: not an object"),
        (SMALL + "x", "text after the end"),
        (SMALL.replace("0:kv", "-1:kv"), "'-1:kv' is not RANK:NAMESPACE"),
        (SMALL.replace("0:kv", "0:a b"), "'0:a b' is not RANK:NAMESPACE"),
        (SMALL.replace("0:kv", "0:k\\n"), "is not RANK:NAMESPACE"),
        (SMALL.replace("0:kv", "9" * 10), "is not RANK:NAMESPACE"),
        (SMALL[:-1] + ", " + SMALL[1:], "0:kv occurs twice"),
        (SMALL[:-1] + ", " + SMALL[1:].replace("0:kv", "0"), "0:kv occurs twice"),
        (SMALL.replace("free_pages", "num_pages"), "'num_pages' of 0:kv"),
        (SMALL.replace("free_pages", "epoch"), "'epoch' of 0:kv"),
        ('{"0:kv": {"num_pages": 1}}', "is missing"),
        ('{"0:kv": {}}', "is missing"),
        ('{"0:kv": 3}', "0:kv, near byte 9: not an object"),
        ('{"0:kv" 3}', "expected a colon"),
        ("{0: 3}", "expected a name in quotes"),
        ('{"' + "a" * 5000 + '": 3}', "expected a name in quotes"),
    ],
)
def test_a_document_the_server_would_not_write_is_refused_in_one_line(
    path: Path, text: str, said: str
) -> None:
    message = refusal(path, text)
    assert said in message
    assert len(message) < len(str(path)) + 250


def test_a_byte_far_into_the_file_is_named_where_it_is(path: Path) -> None:
    pages = ", ".join(map(str, range(1000)))
    text = f'{{"0:kv": {{"free_pages": [{pages}], "num_pages": x}}}}'
    assert f"near byte {text.index('x')}" in refusal(path, text)


def test_a_missing_or_unreadable_file_is_an_unavailable_store(path: Path) -> None:
    for wrong in (path.with_name("none.json"), path.parent):
        with pytest.raises(StoreUnavailable, match="cannot read the snapshot"):
            read_snapshot(wrong)


@pytest.mark.slow
@pytest.mark.parametrize(
    "start",
    [
        b'{"0:kv": {"key_to_index": [["',
        b'{"0:kv": {"free_pages": [',
        b'{"0:kv": {"num_pages": ',
        b'{"',
        b'{"0:kv": {"num_pages": 1, "free_pages": ',
    ],
    ids=["key", "page", "number", "name", "value"],
)
def test_what_never_ends_takes_no_memory(
    path: Path, start: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf3fs_snapshot, "_PIECE_BYTES", 256 << 10)
    monkeypatch.setattr(hf3fs_snapshot, "_BLOCK_BYTES", 1 << 20)
    path.write_bytes(start + b"1" * (32 << 20))
    tracemalloc.start()
    try:
        with pytest.raises(FormatError):
            read_snapshot(path)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


# repeated keys


@given(st.lists(st.lists(st.binary(max_size=3), max_size=6), max_size=3), st.integers(0, 30))
def test_a_repeated_key_is_found_across_chunks(chunks: list[list[bytes]], again: int) -> None:
    keys = [key for chunk in chunks for key in chunk]
    if again < len(keys):
        chunks = [*chunks, [keys[again]]]
        keys.append(keys[again])
    found = repeated_key(pa.chunked_array(chunks, pa.binary()), hashes(*keys))
    repeated = {key for key in keys if keys.count(key) > 1}
    assert found in repeated if repeated else found is None


def test_keys_of_equal_hashes_are_compared_by_their_bytes() -> None:
    same = np.zeros(3, dtype=np.int64)
    assert repeated_key(pa.chunked_array([[b"a", b"b"], [b"c"]], pa.binary()), same) is None
    assert repeated_key(pa.chunked_array([[b"a", b"b"], [b"b"]], pa.binary()), same) == b"b"


def hashes(*keys: bytes) -> Any:
    return np.array([hash(key) for key in keys], dtype=np.int64)


# writing


@examples(30)
@given(document=DOCUMENTS)
def test_what_is_written_is_what_was_read(path: Path, document: Document) -> None:
    path.write_text(json.dumps(document))
    copy = path.with_name("copy.json")
    copy.unlink(missing_ok=True)
    snapshot = read_snapshot(path)
    write_repaired(snapshot.tables, copy)
    assert json.loads(copy.read_text(encoding="ascii")) == as_document(snapshot)


def test_an_existing_file_is_never_written_over(tmp_path: Path) -> None:
    snapshot = tmp_path / "metadata.json"
    snapshot.write_text(SMALL)
    with pytest.raises(FormatError, match="already exists"):
        write_repaired([], snapshot)
    assert snapshot.read_text() == SMALL
    assert list(tmp_path.iterdir()) == [snapshot]


def test_a_folder_that_is_not_there_is_an_error_of_one_line(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match="cannot write the snapshot: No such file"):
        write_repaired([], tmp_path / "none" / "repaired.json")


# snapshots of the real server


def test_the_server_s_snapshot_is_read_as_it_is(metadata_server: MetadataServer) -> None:
    metadata_server.initialize(0, 5)
    metadata_server.initialize(1, 3, "indexer")
    metadata_server.put(0, ["a-k", 'é"]],['])
    metadata_server.page_indices(0, ["a-k"])
    metadata_server.reserve(1, ["never confirmed"], "indexer")
    document = metadata_server.saved()
    assert as_document(read_snapshot(metadata_server.snapshot)) == document
    assert [key for key, _ in document["0:kv"]["key_to_index"]] == ['é"]],[', "a-k"]


def test_the_server_starts_with_what_was_written(
    metadata_server: MetadataServer, tmp_path: Path
) -> None:
    table = PageTable(
        rank=2,
        namespace="mamba",
        num_pages=4,
        free=np.array([0, 3], dtype=np.int64),
        keys=pa.chunked_array([[b"2:mamba:old", "2:mamba:n\u00e9w".encode()]], pa.binary()),
        indices=np.array([1, 2], dtype=np.int64),
    )
    repaired = tmp_path / "repaired.json"
    write_repaired([table], repaired)
    server = metadata_server
    server.kill()
    shutil.copy(repaired, server.snapshot)
    server.start()
    assert server.exists(2, ["old", "n\u00e9w", "x"], "mamba") == [True, True, False]
    assert server.put(2, ["next"], "mamba") == [3]
    assert server.keys_by_recency(2, "mamba") == ["old", "n\u00e9w", "next"]
