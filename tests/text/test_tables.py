"""Tables fit the terminal: long cells are shortened, then the least useful columns left out."""

from __future__ import annotations

import os
import pty
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicachectl.__main__ import run
from hicachectl.text.tables import NO_SCREEN, Screen, table_lines
from tests.speed import examples
from tests.stores import page, put_pages

if TYPE_CHECKING:
    from io import RawIOBase
    from pathlib import Path

    from tests.conftest import Invoke

NAMES = ["key", "model", "sizes", "pools", ">size", ">age", "state", "digest", "detail", "other"]
KEY = "4ebfa8a1f3c3" + "0" * 52 + "_org-model-7b_0_8.bin"


def test_a_table_that_fits_is_as_without_a_terminal() -> None:
    rows = pa.table({"key": ["a", "long"], ">size": ["1 B", None]})
    assert list(table_lines(rows, Screen(width=10))) == list(table_lines(rows, NO_SCREEN))


def test_a_key_keeps_both_ends_and_other_columns_stay_whole() -> None:
    rows = pa.table({"key": [KEY, "b"], "state": ["whole", "partial"]})
    head, first, second = table_lines(rows, Screen(width=40))
    assert head == "KEY" + " " * 30 + "STATE"
    assert first == f"{KEY[:15]}…{KEY[-15:]}  whole"
    assert second == "b" + " " * 32 + "partial"


def test_a_sentence_keeps_its_beginning() -> None:
    rows = pa.table({"code": ["truncated"], "detail": ["2100224 bytes, expected 2561024 bytes"]})
    assert list(table_lines(rows, Screen(width=38)))[1] == "truncated  2100224 bytes, expected 25…"


def test_the_least_useful_columns_go_first() -> None:
    rows = pa.table(
        {"key": [KEY], "model": ["org/model-7b-instruct"], "digest": ["0" * 16], ">age": ["3d"]}
    )
    assert next(table_lines(rows, Screen(width=46))).split() == ["KEY", "MODEL", "AGE"]
    assert next(table_lines(rows, Screen(width=40))).split() == ["KEY", "MODEL"]
    assert next(table_lines(rows, Screen(width=61))).split() == ["KEY", "MODEL", "DIGEST", "AGE"]


def test_colours_do_not_count() -> None:
    rows = pa.table({"key": [KEY], "state": ["whole"]})
    (_, plain), (_, coloured) = (
        table_lines(rows, Screen(colour=colour, width=31)) for colour in (False, True)
    )
    assert coloured.replace("\x1b[32m", "").replace("\x1b[0m", "") == plain
    assert coloured != plain


@pytest.mark.slow
@examples(40)
@given(
    st.lists(st.sampled_from(NAMES), min_size=1, unique=True),
    st.lists(st.text(max_size=90), min_size=1, max_size=4),
    st.integers(1, 200),
)
def test_no_line_is_wider_than_the_terminal(names: list[str], cells: list[str], width: int) -> None:
    rows = pa.table(dict.fromkeys(names, cells))
    lines = list(table_lines(rows, Screen(width=width)))
    assert len(lines) == len(cells) + 1
    assert max(map(len, lines)) <= width
    whole = list(table_lines(rows, NO_SCREEN))
    if max(map(len, whole)) <= width:
        assert lines == whole


def shown_on(columns: int, arguments: list[object]) -> list[str]:
    """Return the lines that a command writes to a terminal of a width."""
    terminal, ours = pty.openpty()
    with (
        ThreadPoolExecutor(1) as pool,
        os.fdopen(terminal, "rb", buffering=0) as screen,
        pytest.MonkeyPatch.context() as patch,
    ):
        output = pool.submit(read_to_the_end, screen)
        with os.fdopen(ours, "w") as stdout:
            patch.setattr(sys, "stdout", stdout)
            patch.setenv("COLUMNS", str(columns))
            patch.setenv("NO_COLOR", "1")
            assert run([str(argument) for argument in arguments]) == 0
        return output.result().decode().split("\r\n")[:-1]


def read_to_the_end(screen: RawIOBase) -> bytes:
    output = b""
    with suppress(OSError):  # the read fails with EIO after the command has closed its end
        while data := screen.read(1 << 16):
            output += data
    return output


def test_a_pipe_gets_the_whole_table_and_a_terminal_what_fits(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_pages(tmp_path, range(3), "_some-organisation-with-a-long-name-model_0_1")
    arguments: list[object] = ["ls", "--objects", tmp_path]
    monkeypatch.setenv("COLUMNS", "60")
    piped = invoke("-q", *arguments).stdout
    assert f"{page(0)}_some-organisation-with-a-long-name-model_0_1.bin" in piped
    narrow = shown_on(60, arguments)
    assert len(narrow) == 4
    assert max(map(len, narrow)) <= 60
    assert any(line.startswith(page(0)[:8]) for line in narrow)
    assert [line.rstrip() for line in shown_on(400, arguments)] == piped.splitlines()


def test_a_terminal_shows_whole_what_a_finding_says(tmp_path: Path) -> None:
    store, profile = tmp_path / "store", tmp_path / "profile.toml"
    store.mkdir()
    profile.write_text('model = "some/model"\npage_size = 4\npools = [{ name = "kv", '
                       'kind = "opaque", nbytes = 64 }]\n')  # fmt: skip
    put_pages(store, range(12), "_some-model_0_1")
    put_pages(store, range(12, 24), "_some-model_0_1", nbytes=128)
    judged = ["verify", store, "--checks", "names,groups,sizes", "--fail-on", "never"]
    compared = shown_on(80, judged)
    assert compared[1].startswith("warning   mixed-sizes")
    detail = compared[2 : compared.index("")]
    assert max(map(len, detail)) <= 80
    assert "dtypes or page sizes; give --profile of the" in " ".join(map(str.strip, detail))
    key, expected = shown_on(80, [*judged, "--profile", profile])[2].split()[::4]
    assert expected == "64"
    first = min(map(page, range(12, 24)))
    assert re.fullmatch(f"{first[:20]}[0-9a-f]*…[0-9a-f]+_some-model_0_1.bin", key)
