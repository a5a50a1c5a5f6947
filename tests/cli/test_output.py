"""Output: JSON equals the standard library's, files appear atomically, tables are aligned."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicachectl.cli.output import write_document
from hicachectl.formats.errors import UsageError
from hicachectl.text.jsontext import json_rows, json_values
from hicachectl.text.tables import NO_SCREEN, Screen, table_lines
from tests.stores import put_pages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

_ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "text": st.none() | st.text(),
            "number": st.none() | st.integers(-(2**63), 2**63 - 1),
            "real": st.none() | st.floats(allow_nan=False, allow_infinity=False),
            "flag": st.none() | st.booleans(),
            "list": st.none() | st.lists(st.none() | st.text(max_size=3), max_size=3),
        }
    ),
    max_size=8,
)
_SCHEMA = pa.schema(
    {
        "text": pa.string(),
        "number": pa.int64(),
        "real": pa.float64(),
        "flag": pa.bool_(),
        "list": pa.list_(pa.string()),
    }
)


@pytest.mark.slow
@given(_ROWS, st.integers(0, 3))
def test_rows_read_back_as_they_were(rows: list[dict[str, object]], start: int) -> None:
    table = pa.Table.from_pylist(rows, schema=_SCHEMA).slice(start)
    assert [json.loads(text) for text in json_rows(table).to_pylist()] == rows[start:]


def test_null_members_of_a_nested_object_are_left_out() -> None:
    nested = pa.array([{"kv": 1, "mamba": None}, {"kv": None, "mamba": 2}, None])
    assert json_values(nested).to_pylist() == ['{"kv": 1}', '{"mamba": 2}', "null"]


def test_dictionaries_are_written_as_their_values() -> None:
    encoded = pa.array(["a", None, 'q"']).dictionary_encode()
    assert json_values(encoded).to_pylist() == ['"a"', "null", '"q\\""']


ROWS = pa.table(
    {
        "key": ["k1", "k2"],
        "nbytes": [1, None],
        "pool": pa.array(["kv", None]).dictionary_encode(),
        "missing": [["a", "b"], []],
    }
)
PLAIN = [
    {"key": "k1", "nbytes": 1, "pool": "kv", "missing": ["a", "b"]},
    {"key": "k2", "nbytes": None, "pool": None, "missing": []},
]


def written(
    output_format: str, path: Path, lines: Callable[[Screen], Iterator[str]] = lambda _: iter(())
) -> bytes:
    write_document(
        {"objects": ROWS},
        rows=ROWS,
        name="objects",
        output_format=output_format,
        output=path,
        text=lines,
    )
    return path.read_bytes()


def test_every_format_holds_the_same_rows(tmp_path: Path) -> None:
    path = tmp_path / "out"
    document = json.loads(written("json", path))
    assert (document["schema"], document["objects"]) == (1, PLAIN)
    assert [json.loads(line) for line in written("jsonl", path).splitlines()] == PLAIN
    assert pq.read_table(io.BytesIO(written("parquet", path))).to_pylist() == PLAIN
    assert pa.ipc.open_file(written("arrow", path)).read_all().to_pylist() == PLAIN
    table = pyarrow.csv.read_csv(io.BytesIO(written("csv", path)))
    assert table.column("key").to_pylist() == ["k1", "k2"]
    assert table.column("missing").to_pylist() == ['["a", "b"]', "[]"]
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_cannot_be_written_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        written("json", tmp_path / "none" / "out")


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_text("old")

    def fail(_screen: Screen) -> Iterator[str]:
        yield "new"
        raise RuntimeError

    with pytest.raises(RuntimeError):
        written("table", path, fail)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.slow
def test_stdout_has_a_name(tmp_path: Path) -> None:
    """A log that the shell appends to is not replaced, and a page has nothing behind it."""
    store = tmp_path / "store"
    store.mkdir()
    put_pages(store, range(2), "_m_0_1")
    log = tmp_path / "log"
    log.write_text("before\n")
    for name, *command in (("/dev/stdout", "ls", "--format", "csv"), ("-", "report")):
        with log.open("a") as stdout:
            done = subprocess.run(
                [sys.executable, "-m", "hicachectl", *command, store, "-o", name],
                stdout=stdout, stderr=subprocess.PIPE, text=True, cwd=tmp_path, check=True,
            )  # fmt: skip
    assert done.stderr.splitlines()[-1].startswith("hicachectl: /dev/stdout: 2 objects, 2 pages")
    before, head, *rows, end = log.read_text().splitlines()
    assert (before, head[:4], end) == ("before", '"pag', "</html>")
    assert rows[2] == "<!DOCTYPE html>"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log", "store"]


def test_tables_line_up() -> None:
    rows = pa.table({"name": ["a", "long"], ">size": ["1 B", None]})
    assert list(table_lines(rows, NO_SCREEN)) == ["NAME  SIZE", "a      1 B", "long     -"]


def test_colours_mark_states_only() -> None:
    lines = list(table_lines(pa.table({"state": ["whole", "x"]}), Screen(colour=True)))
    assert lines == ["STATE", "\x1b[32mwhole\x1b[0m", "x"]


def test_control_characters_of_a_table_are_escaped() -> None:
    rows = pa.table({"name": ["a\nb\x1b", "\u009b é\xa0", None], ">n": ["1", "2", "3"]})
    lines = list(table_lines(rows, NO_SCREEN))
    assert lines[1:] == ["a\\x0ab\\x1b  1", "\\x9b é\xa0     2", "-           3"]
