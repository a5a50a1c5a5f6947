"""Names that look alike are told apart."""

from __future__ import annotations

import unicodedata

import pytest

from hicachectl.text.terminal import escape_controls


@pytest.mark.parametrize(
    "name", ["caf\u00e9", "\u00c5ngstr\u00f6m", "\ud55c\uae00", "\u4f60\u597d", "plain"]
)
def test_only_a_decomposed_name_is_escaped(name: str) -> None:
    assert escape_controls(name) == name
    decomposed = unicodedata.normalize("NFD", name)
    shown = escape_controls(decomposed)
    assert (shown == name) is (decomposed == name)
    assert unicodedata.is_normalized("NFC", shown)


def test_marks_without_a_composed_form_stay() -> None:
    assert escape_controls("x\u0304") == "x\u0304"


def test_a_sign_with_another_form_is_escaped() -> None:
    assert escape_controls("\u212b") == "\\u212b"
