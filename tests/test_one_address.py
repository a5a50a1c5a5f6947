"""No command, operation or check asks for a key grammar or a URL scheme by its name.

What differs between stores is an attribute of the grammar, the scheme or the store. A contract in
`pyproject.toml` refuses imports of one store or one grammar.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import hicachectl
from hicachectl.backends.urls import SCHEMES
from hicachectl.formats.keys import grammar_names

if TYPE_CHECKING:
    from collections.abc import Iterator

NAMES = {*SCHEMES, *grammar_names()}
PLAIN = {"file", "pack"}  # Also English words and a command: refused only where they can be asked.
ASKED = {"grammar_of", "object_specs", "profile_identities", "StoreUrl", "transfer_plan"}
# Parsing a module takes long, and few have such a literal at all.
QUOTED = re.compile(rf"""["'](?:{"|".join(map(re.escape, sorted(NAMES)))})["']""")
ROOT = Path(hicachectl.__file__).parent
LINKED = {"backends", "formats"}


def literals(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line and name of each literal that asks for a grammar or scheme."""
    if not QUOTED.search(text):
        return
    for node in ast.walk(ast.parse(text)):
        refused = NAMES - PLAIN
        parts: list[ast.AST] = [node]
        if isinstance(node, ast.Compare | ast.MatchValue):
            refused, parts = NAMES, list(ast.walk(node))
        elif isinstance(node, ast.Call) and called(node) in ASKED:
            refused = NAMES
            parts = [*node.args, *(keyword.value for keyword in node.keywords)]
        elif isinstance(node, ast.keyword) and node.arg in ("grammar", "scheme"):
            refused, parts = NAMES, [node.value]
        for part in parts:
            if isinstance(part, ast.Constant) and part.value in refused:
                yield part.lineno, str(part.value)


def called(node: ast.Call) -> str:
    return getattr(node.func, "id", getattr(node.func, "attr", ""))


def test_no_module_above_the_stores_names_a_grammar_or_scheme() -> None:
    modules = [path.relative_to(ROOT) for path in ROOT.rglob("*.py")]
    above = [path for path in modules if path.parts[0] not in LINKED]
    assert len(above) > 100
    found = {
        (f"{path}:{line}", name)
        for path in above
        for line, name in literals((ROOT / path).read_text(encoding="utf-8"))
    }
    assert not found, "ask the Grammar, the Scheme or the Store"


@pytest.mark.parametrize(
    "text",
    [
        'store.grammar == "mooncake"',
        'url.scheme not in ("file", "pack")',
        'object_specs(profile, "file")',
        'open_run(folder, grammar="file")',
        'rows = {"nixl": 1}',
        'match url.scheme:\n    case "file":\n        pass',
    ],
)
def test_such_literals_are_found(text: str) -> None:
    assert [*literals(text)]


@pytest.mark.parametrize("text", ['counted(3, "file")', '"this file store"', '{"pack": path}'])
def test_words_of_messages_are_not(text: str) -> None:
    assert not [*literals(text)]
