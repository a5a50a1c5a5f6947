"""Key grammars, which state the objects of each backend's pages, and their keys."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from hicachectl.formats.errors import UsageError
from hicachectl.formats.wording import not_one_of

if TYPE_CHECKING:
    from hicachectl.formats.keys.base import Grammar


# Name of the grammar whose objects are whole pages of one rank.
WHOLE_PAGES = "file"


def grammar_of(name: str) -> Grammar:
    """Return the key grammar of a name. Raises UsageError for an unknown name."""
    grammars = _grammars()
    if name not in grammars:
        raise UsageError(not_one_of("Key scheme", name, grammars))
    return grammars[name]


def grammar_names() -> tuple[str, ...]:
    """Return the names of all key grammars."""
    return tuple(_grammars())


@cache
def _grammars() -> dict[str, Grammar]:
    from hicachectl.formats.keys.file import FileGrammar
    from hicachectl.formats.keys.hf3fs import Hf3fsGrammar
    from hicachectl.formats.keys.mooncake import MooncakeGrammar
    from hicachectl.formats.keys.nixl import NixlBufferedGrammar, NixlGrammar
    from hicachectl.formats.keys.unified import UnifiedGrammar

    every: tuple[Grammar, ...] = (
        FileGrammar(),
        Hf3fsGrammar(),
        MooncakeGrammar(),
        NixlGrammar(),
        NixlBufferedGrammar(),
        UnifiedGrammar(),
    )
    return {grammar.name: grammar for grammar in every}
