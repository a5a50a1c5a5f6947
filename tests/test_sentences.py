"""Docstrings and trailing comments say whole phrases.

`rows: of the batch` and `LIMIT = 7  # of a part` can be read only together with the name beside
them. These forms are refused in the whole package.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import hicachectl

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(hicachectl.__file__).parent
_PREPOSITIONS = "of|as|by|from|whose|that|which"
_ATTRIBUTE = re.compile(rf"(?:^|[\s(])([a-z_][a-z_0-9]*: (?:{_PREPOSITIONS})) ", re.MULTILINE)
_TRAILING = re.compile(rf"# ?(?:{_PREPOSITIONS})\b")
# Parsing and cutting a module into tokens takes long, and few modules have such words at all.
_CANDIDATE = re.compile(rf": (?:{_PREPOSITIONS}) |# ?(?:{_PREPOSITIONS})\b")
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def fragments(source: str) -> Iterator[str]:
    """Yield each refused phrase of a module: its line number and text."""
    if not _CANDIDATE.search(source):
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, _DOCUMENTED):
            for match in _ATTRIBUTE.finditer(ast.get_docstring(node) or ""):
                name = getattr(node, "name", "the module")
                yield f"{name}: docstring: {match[1]} ..."
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        is_trailing = token.type == tokenize.COMMENT and token.line[: token.start[1]].strip()
        if is_trailing and _TRAILING.match(token.string):
            yield f"line {token.start[0]}: {token.string}"


def test_no_phrase_is_a_fragment() -> None:
    """No docstring has `name: of ...`, and no trailing comment continues its line."""
    rooms = [ROOT, ROOT / "backends", ROOT / "formats"]  # rglob follows no link
    modules = sorted({module for room in rooms for module in room.resolve().rglob("*.py")})
    assert len(modules) > 200
    found = [f"{module}: {text}" for module in modules for text in fragments(module.read_text())]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        '"""Rows.\n\nrows: of the batch.\n"""',
        'def f(rows):\n    """Count. rows: as listed."""',
        "LIMIT = 7  # of a part",
    ],
)
def test_a_fragment_is_seen(source: str) -> None:
    assert len(list(fragments(source))) == 1


@pytest.mark.parametrize(
    "source",
    [
        '"""Rows.\n\nrows: rows of the batch.\n"""',
        "LIMIT = 7  # parts of a run",
        "# of a part, in a line of its own\nLIMIT = 7",
    ],
)
def test_a_whole_phrase_is_allowed(source: str) -> None:
    assert list(fragments(source)) == []
