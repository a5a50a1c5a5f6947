from __future__ import annotations

import json
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicachectl.formats.documents import parse_json, parse_json_object, parse_toml, storable
from hicachectl.formats.errors import FormatError, ProfileError

DOTS = "a.b.c." * 100
BASIC, LITERAL = '"' * 3, "'" * 3
TOML_PIECES = (*"\"'\\#.=[]{},\n a1", BASIC, LITERAL)


def test_what_texts_and_comments_hold_is_no_structure() -> None:
    text = "\n".join(
        [
            f"# {DOTS} " + "[{" * 50_000,
            f'one = "{DOTS}#{"=[" * 50_000}\\"" # {DOTS}',
            f"two = '{DOTS}'",
            f'three = {BASIC}\n{DOTS} "text" \\{BASIC} [=\n{BASIC}',
            f"four = {LITERAL}\n{DOTS}\\{LITERAL}",
            f'"{DOTS}" = 1',
            "versions = [1.5, 2.5, 3.5, 4.5, 5.5, 6.5, 7.5, 8.5, 9.5, 10.5, 11.5]",
        ]
    )
    assert parse_toml(text, "p") == tomllib.loads(text)


@given(st.lists(st.sampled_from(TOML_PIECES), max_size=40).map("".join))
def test_toml_is_read_as_python_reads_it(text: str) -> None:
    try:
        expected = tomllib.loads(text)
    except ValueError:
        with pytest.raises(FormatError, match="p: "):
            parse_toml(text, "p")
    else:
        if text.count(".") < 8:  # parts of a key
            assert parse_toml(text, "p") == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (".".join("a" * 9) + " = 1", "a key has 9 parts; at most 8 are allowed"),
        ("[" + " . ".join('"a"' for _ in range(9)) + "]", "a key has 9 parts"),
        ("x = {" + ".".join("a" * 9) + " = 1}", "a key has 9 parts"),
        ("a = " + "[" * 65 + "]" * 65, "more than 64 levels"),
        ("a = [" + "1," * 1_000_001 + "]", "has 1000003 values; at most 1000000 are allowed"),
        ("[[a]]\n" * 25_001, "50002 keys, tables and arrays; at most 50000"),
    ],
)
def test_toml_beyond_its_bounds_is_refused_with_both_numbers(text: str, message: str) -> None:
    with pytest.raises(FormatError, match=f"p: .*{message}"):
        parse_toml(text, "p")


@pytest.mark.parametrize("encoded", [False, True])
def test_json_is_bounded_in_depth_and_values(encoded: bool) -> None:
    def parse(text: str) -> object:
        return parse_json(text.encode() if encoded else text, "p", refusal=ProfileError)

    assert parse("[" * 64 + "]" * 64)
    for deep in ("[" * 65 + "]" * 65, "[" * 10_000 + "]" * 10_000, '{"a":' * 65 + "1" + "}" * 65):
        with pytest.raises(ProfileError, match=r"p: .*more than 64 levels"):
            parse(deep)
    with pytest.raises(ProfileError, match=r"p: has 12 values; at most 10 are allowed"):
        parse_json("[" + "1," * 11, "p", refusal=ProfileError, max_values=10)


def test_a_member_stated_twice_is_refused_where_that_matters() -> None:
    assert parse_json('{"a": 1, "a": 2}', "p") == {"a": 2}
    with pytest.raises(FormatError, match=r"p: not JSON: member 'a' occurs twice"):
        parse_json('{"a": 1, "b": 1, "a": 2}', "p", unique=True)
    with pytest.raises(FormatError, match="p: not a JSON object"):
        parse_json_object("[]", "p")


@given(st.text(st.characters(codec=None)))
def test_a_storable_text_can_be_encoded_and_whole_ones_are_unchanged(text: str) -> None:
    shown = storable(text)
    shown.encode()
    assert json.loads(json.dumps(text)) == text
    assert (shown == text) == (not any("\ud800" <= c <= "\udfff" for c in text))
