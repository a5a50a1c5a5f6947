"""Parse untrusted JSON and TOML, with bounds on the number and depth of values.

The caller bounds the size of the text. The bounds here keep parsing time and memory proportional to
this size. Without these bounds, `tomllib` needs quadratic time and memory for a dotted key, and a
kilobyte for a five-byte table header.
"""

from __future__ import annotations

import json
import re
import tomllib
from typing import TYPE_CHECKING, Any

from hicachectl.formats.errors import FormatError, HicacheError

if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_VALUES = 1_000_000  # large real documents have ten thousand values
MAX_TABLES = 50_000  # keys, tables and arrays of one TOML document
MAX_KEY_PARTS = 8  # the TOML key a.b.c has three parts
MAX_DEPTH = 64
_MAX_REASON_CHARS = 200

# Strings and comments, which hold no structural brackets, commas or dots. `tomllib` stops at an
# unterminated string, so text after such a string needs no match.
_TOML_TEXT = re.compile(
    r'"""(?:[^\\]|\\.)*?"""'
    r"|'''.*?'''"
    r'|"(?:[^"\\\n]|\\.)*"'
    r"|'[^'\n]*'"
    r"|#[^\n]*",
    re.DOTALL,
)
_TOML_STRUCTURE = re.compile(r"[\n=,{}\[\]]")


def parse_json(
    text: str | bytes,
    source: str,
    *,
    refusal: type[HicacheError] = FormatError,
    max_values: int = MAX_VALUES,
    unique: bool = False,
) -> Any:
    """Parse untrusted JSON text.

    source: names the text in messages.
    unique: refuse repeated members of an object. Otherwise the last member counts.
    Raises `refusal`.
    """
    brackets = _count(text, "[") + _count(text, "{")
    values = brackets + _count(text, ",")
    if values > max_values:
        raise refusal(f"{source}: has {values} values; at most {max_values} are allowed")
    try:
        document = json.loads(text, object_pairs_hook=_unique if unique else None)
    except (ValueError, RecursionError) as error:  # a number of 5,000 digits is a ValueError, too
        # Without `from error`, because the error contains the text, which can contain credentials.
        raise refusal(f"{source}: not JSON: {_reason(error)}") from None
    if brackets > MAX_DEPTH:
        _check_depth(document, source, refusal)
    return document


def parse_json_object(
    text: str | bytes,
    source: str,
    *,
    refusal: type[HicacheError] = FormatError,
    max_values: int = MAX_VALUES,
) -> dict[str, Any]:
    """Parse untrusted JSON text that must be an object. See `parse_json`."""
    document = parse_json(text, source, refusal=refusal, max_values=max_values)
    if not isinstance(document, dict):
        raise refusal(f"{source}: not a JSON object")
    return document


def parse_toml(
    text: str, source: str, *, refusal: type[HicacheError] = FormatError
) -> dict[str, Any]:
    """Parse untrusted TOML text. For the arguments and errors, see `parse_json`."""
    structure = _TOML_TEXT.sub('""', text)
    tables = sum(structure.count(character) for character in "=[{")
    if tables > MAX_TABLES:
        raise refusal(
            f"{source}: has {tables} keys, tables and arrays; at most {MAX_TABLES} are allowed"
        )
    values = tables + structure.count(",")
    if values > MAX_VALUES:
        raise refusal(f"{source}: has {values} values; at most {MAX_VALUES} are allowed")
    parts = 1 + max(piece.count(".") for piece in _TOML_STRUCTURE.split(structure))
    if parts > MAX_KEY_PARTS:
        raise refusal(f"{source}: a key has {parts} parts; at most {MAX_KEY_PARTS} are allowed")
    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise refusal(f"{source}: not TOML: {_reason(error)}") from error
    _check_depth(document, source, refusal)
    return document


def decoded(data: bytes, source: str) -> str:
    """Return the text of an untrusted file. Raises FormatError."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise FormatError(f"{source}: not UTF-8 text; save the file as UTF-8") from error


def storable(text: str) -> str:
    r"""Replace lone surrogates, which JSON allows, by \uXXXX, so that the text can be encoded."""
    return text.encode(errors="backslashreplace").decode()


def shown(value: Any) -> str:
    """Return a parsed value for a message, in at most 60 characters."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # too deep, or an int over 4,300 digits (from TOML's hex)
        return "a huge value"
    return text if len(text) <= 60 else f"{text[:57]}..."


def _count(text: str | bytes, character: str) -> int:
    return text.count(character) if isinstance(text, str) else text.count(character.encode())


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in document if names.count(name) > 1)
        raise ValueError(f"member {twice!a:.60} occurs twice")
    return document


def _check_depth(document: Any, source: str, refusal: type[HicacheError]) -> None:
    level = [document]
    for _ in range(MAX_DEPTH):
        level = [value for outer in level for value in _inner(outer)]
        if not level:
            return
    raise refusal(f"{source}: nested more than {MAX_DEPTH} levels deep")


def _inner(value: Any) -> Iterable[Any]:
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [inner for inner in values if isinstance(inner, (dict, list))]


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return f"nested more than {MAX_DEPTH} levels deep"
    text = str(error).partition("; use sys.")[0]  # Python's advice for programmers
    return text if len(text) <= _MAX_REASON_CHARS else f"{text[:_MAX_REASON_CHARS]}..."
