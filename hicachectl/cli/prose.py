"""Hand-written sections of man pages.

The file of a page is `manpages/texts/PAGE.txt`. `# TITLE` begins a section. Blank lines divide the
section into blocks. A block is one of these:

- a paragraph
- an item: `- TERM`, with its text in the lines below
- literal lines, indented by four spaces
- `@NAME`, which stands for items that the program makes
- `@shared TITLE`, which stands for a section of `shared.txt`; `@shared` alone stands for the
  section of `shared.txt` with the title of the present section
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, NamedTuple

from hicachectl.formats.models.architectures import architectures
from hicachectl.formats.releases import NEWEST_SGLANG

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

LITERAL = "    "  # indentation of a literal line
_SHARED = "@shared"


class Item(NamedTuple):
    """A term and its text."""

    term: str
    text: str


Block = str | Item


@cache
def prose(page: str) -> Mapping[str, tuple[Block, ...]]:
    """Return the blocks of each section of a page, by title; {} for a page without a file."""
    file = files("hicachectl.cli.manpages").joinpath("texts", f"{page}.txt")
    if not file.is_file():
        return {}
    text = file.read_text(encoding="utf-8")
    text = text.replace("{newest}", NEWEST_SGLANG)
    text = text.replace("{architectures}", str(len(architectures())))
    sections: dict[str, list[Block]] = {}
    for block in text.rstrip("\n").split("\n\n"):
        if block.startswith("# "):
            title = block.removeprefix("# ")
            sections[title] = []
        elif block.startswith(_SHARED):
            named = block.removeprefix(_SHARED).strip() or title
            sections[title] += prose("shared")[named]
        else:
            sections[title].append(_block(block))
    return {title: tuple(_joined(blocks)) for title, blocks in sections.items()}


def _block(text: str) -> Block:
    if text.startswith("- "):
        term, _, said = text.removeprefix("- ").partition("\n")
        return Item(term, said)
    return text


def _joined(blocks: Iterable[Block]) -> Iterator[Block]:
    """Join literal blocks that only a blank line divides."""
    last: Block | None = None
    for block in blocks:
        both = last is not None and is_literal(last) and is_literal(block)
        if both:
            last = f"{last}\n\n{block}"
            continue
        if last is not None:
            yield last
        last = block
    if last is not None:
        yield last


def is_literal(block: Block) -> bool:
    """Return whether a block consists of literal lines."""
    return isinstance(block, str) and block.startswith(LITERAL)


def literal_of(block: Block) -> list[str]:
    """Return the lines of a literal block."""
    assert isinstance(block, str)
    return [line.removeprefix(LITERAL) for line in block.splitlines()]
