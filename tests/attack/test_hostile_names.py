"""Names that a terminal, a spreadsheet or a locale might interpret are written inert."""

from __future__ import annotations

import csv
import io
import json
import os
import unicodedata
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hicachectl.formats.profile import parse_profile
from hicachectl.text.terminal import escape_controls
from tests.attack.children import all_attacked, attacked
from tests.speed import ALL, some
from tests.stores import DSA, page, put

if TYPE_CHECKING:
    from collections.abc import Sequence

LOCALES = {
    "ascii": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    "utf8": {"PYTHONUTF8": "1"},
}
NAMES = [
    "Qwen-\u00e9\u4e2d\U0001f600",
    "esc\x1b[2Jape",
    "c1\u009b2J",
    "bidi\u202eexe.nib\u2066",
    "lines\u2028\u2029\x85end",
    "zero\u200b\u200d\ufeff\u00ad\u034f\ufe0f",
    "tags\U000e0041\U000e007f\ue000\U0010ffff",
    "tab\tnew\nline\r",
    'quote"back\\slash',
]
FORMULAS = ["=cmd|' -C calc'!A0", "+1+1", "-2+3", "@SUM(A1)", "\uff1d1", "\t=1", "\r=1"]
FORMATS = ("table", "json", "jsonl", "csv")
FOREIGN = b"\xff\xfe-no-utf8.bin"


def commands(store: Path, profile: Path) -> list[list[object]]:
    given = ["--profile", profile]
    return [
        ["ls", store],
        ["ls", store, "--objects"],
        ["ls", store, "--summary"],
        ["ls", store, *given],
        ["show", store, page(1)],
        ["verify", store, "--grace", "0s"],
        ["verify", store, *given],
        ["rm", store, "--model", NAMES[0], "--dry-run"],
        ["migrate", store, store.with_name("to"), *given, "--dry-run"],
    ]


def hostile_store(directory: Path, names: Sequence[str]) -> Path:
    directory.mkdir()
    for number, name in enumerate(names):
        put(directory, f"{page(number)}_{name}_0_1.bin")
        put(directory, f"{page(number)}.indexer_{name}_0_1.bin")
        put(directory, f"{name}.bin")
        put(directory, f"{page(number)}_{name}.bin")  # a model without ranks in its keys
    (directory / os.fsdecode(FOREIGN)).touch()
    return directory


def assert_harmless(written: bytes) -> None:
    for line in written.decode().splitlines(keepends=True):
        text = line.removesuffix("\n").removesuffix("\r")
        assert escape_controls(text) == text, line
        assert not any(unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp") for c in text)


def formats_of(command: list[object], number: int) -> Sequence[str]:
    """Return the formats to try: each command has some, and the listing of objects has all."""
    every = ("table", "json") if "--dry-run" in command else FORMATS
    return every if ALL or "--objects" in command else every[number % 2 :: 2]


@pytest.mark.parametrize("locale", LOCALES)
def test_no_name_commands_a_terminal_or_breaks_a_locale(locale: str, tmp_path: Path) -> None:
    store = hostile_store(tmp_path / "store", NAMES)
    profile = tmp_path / "profile.toml"
    profile.write_text(DSA.replace("x/dsa", NAMES[0]), encoding="utf-8")
    asked = [
        [*command, "--format", name]
        for number, command in enumerate(commands(store, profile))
        for name in formats_of(command, number)
    ]
    for arguments, found in zip(asked, all_attacked(asked, LOCALES[locale]), strict=True):
        assert found.status in (0, 4), found
        assert_harmless(found.stdout)
        assert_harmless(found.stderr.encode())
        if arguments[-1] == "json":
            assert json.loads(found.stdout)["schema"] == 1
        if arguments[-1] == "json" and "--objects" in arguments:
            keys = {row["key"] for row in json.loads(found.stdout)["objects"]}
            assert keys >= {f"{name}.bin" for name in NAMES}
            assert "\\xff\\xfe-no-utf8.bin" in keys


def test_no_name_breaks_a_file_of_output_in_any_locale(tmp_path: Path) -> None:
    store = hostile_store(tmp_path / "store", NAMES)
    profile = tmp_path / "profile.toml"
    profile.write_text(DSA.replace("x/dsa", NAMES[0]), encoding="utf-8")
    asked = [
        [*command, "--format", name, "-o", tmp_path / f"{number}.{name}"]
        for number, command in enumerate(commands(store, profile))
        for name in some(("table", "json"), ("table", "json")[number % 2])
    ]
    for arguments, found in zip(asked, all_attacked(asked, LOCALES["ascii"]), strict=True):
        assert found.status in (0, 4), found
        assert_harmless(Path(str(arguments[-1])).read_bytes())


@pytest.mark.parametrize("locale", LOCALES)
def test_what_options_say_is_quoted_harmlessly(locale: str, tmp_path: Path) -> None:
    store = hostile_store(tmp_path / "store", NAMES)
    options = "--page", "--model", "--profile", "--config", "--trace", "--since", "--no-such"
    asked: list[list[object]] = []
    for name in ("_".join(NAMES), "\udcff\udcfe"):
        for option in options:
            words: list[object] = ["ls", store, f"{option}={name}"]
            words = [words[2], *words[:2]] if option == "--config" else words
            words = ["prewarm", "--dry-run", words[2]] if option == "--trace" else words
            asked.append(words)
        for place in (name, f"{name}:", f"file:///{name}", f"none:///{name}", f"pack:///{name}"):
            asked.append(["ls", place])
    for found in all_attacked(asked, LOCALES[locale]):
        assert_harmless(found.stderr.encode())


def test_no_cell_of_csv_is_a_formula(tmp_path: Path) -> None:
    store = tmp_path / "store"
    for name in FORMULAS:
        put(store, f"{name}.bin")
    text = attacked("ls", store, "--objects", "--format", "csv").stdout.decode()
    keys = {row["key"] for row in csv.DictReader(io.StringIO(text))}
    assert "'=cmd|' -C calc'!A0.bin" in keys
    assert "\\x09=1.bin" in keys
    assert all(key.startswith(("'", "\\x")) for key in keys)
    assert len(keys) == len(FORMULAS)


def test_a_profile_is_utf8_in_any_locale(tmp_path: Path) -> None:
    path = tmp_path / "p.toml"
    path.write_text(DSA.replace("x/dsa", NAMES[0]), encoding="utf-8")
    for output_format in ("toml", "json"):
        arguments = ["profile", "--profile", path, "--format", output_format]
        found = attacked(*arguments, variables=LOCALES["ascii"])
        assert parse_profile(found.stdout.decode()).model == NAMES[0]
