"""Sections of the man pages that are written by hand, in `texts/PAGE.txt`.

`# TITLE` begins a section. Blank lines divide its blocks: paragraphs, `- TERM` with its text in
the lines below, and literal lines, indented by four. `@NAME` stands for items that the program
knows, and `@shared` for the section of this title, or of the title behind it, in `shared.txt`.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, NamedTuple

from hicachectl.cli.manpages.mdoc import literal_line, sentence_lines, text_line
from hicachectl.formats.models.architectures import architectures
from hicachectl.formats.releases import NEWEST_SGLANG

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

SEE_ALSO = "SEE ALSO"  # title of the section with names of pages, such as hcpack(5)
_LITERAL = "    "
_SHARED = "@shared"


class Item(NamedTuple):
    """A term and its text."""

    term: str
    text: str


Block = str | Item


@cache
def prose(page: str) -> Mapping[str, tuple[Block, ...]]:
    """Return the blocks of each section of a page, by title; none for a page without a file."""
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
    """Return whether a block is shown as it is."""
    return isinstance(block, str) and block.startswith(_LITERAL)


def literal_of(block: Block) -> list[str]:
    """Return the lines of a literal block."""
    assert isinstance(block, str)
    return [line.removeprefix(_LITERAL) for line in block.splitlines()]


def section_lines(
    blocks: Iterable[Block], known: Mapping[str, Iterable[Item]] | None = None
) -> Iterator[str]:
    """Yield the lines of a section as mdoc. known: items by the name that stands for them."""
    in_list = False
    for number, block in enumerate(blocks):
        items: Iterable[Item] = ()
        if isinstance(block, Item):
            items = [block]
        elif block.startswith("@"):
            items = (known or {})[block.removeprefix("@")]
        elif in_list:
            yield ".El"
            in_list = False
        if items:
            if not in_list:
                yield ".Bl -tag -width Ds"
                in_list = True
            for item in items:
                yield f".It {text_line(item.term)}"
                yield from sentence_lines(item.text)
        elif is_literal(block):
            yield from (".Bd -literal -offset indent", *map(literal_line, literal_of(block)), ".Ed")
        else:
            assert isinstance(block, str)
            yield from ([".Pp"] if number else [])
            yield from sentence_lines(block)
    if in_list:
        yield ".El"
