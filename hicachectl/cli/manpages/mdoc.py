"""Text as mdoc(7) macros.

In sentences, references to pages become links. Options, variables, members and texts in backticks
become bold.
"""

from __future__ import annotations

import re
import textwrap
from importlib.resources import files
from inspect import cleandoc
from itertools import zip_longest
from typing import TYPE_CHECKING

from hicachectl import __version__
from hicachectl.cli.prose import LITERAL, Item, is_literal, literal_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

    from hicachectl.cli.prose import Block

SEE_ALSO = "SEE ALSO"  # title of the section with names of pages, such as hcpack(5)
RELEASE_DATE = "November 29, 2026"  # the date of the newest version in CHANGELOG.md

NO_TEXT = r"\&"

# A page's name, such as hcpack(5), and the punctuation that has to stay beside it.
_REFERENCE = re.compile(r"(?:^| )([a-z][a-z-]*)\(([1-9])\)([.,:;)]*)(?= |$)")
# In turn: text in backticks, an option, a variable or a member with an underscore.
_NAME = re.compile(
    r"`([^`]+)`|((?<![\w-])--[a-z][a-z0-9-]*|(?<![\w./:-])[A-Za-z]\w*_\w+(?![\w/(=-]|\.\w))"
)

# Spaces in backticks become this character while text is wrapped, so that they end no line.
_QUOTED = re.compile("`[^`]+`")
_SPACE = "\0"

# Widths for wrapping a sentence, tried in turn, because escapes and marks make its lines longer.
_WIDTHS = (70, 60, 50, 40)
_LINE_BYTES = 80  # mandoc warns of longer lines


# In a hand-written page: a comment that names a file of hicachectl/packaging, then its content.
_LISTING = re.compile(r'^\.\\" file (\S+)\n\.Bd -literal\n.*?^\.Ed$', re.MULTILINE | re.DOTALL)


def with_listings(page: str) -> str:
    """Return a page with its listings replaced by the files as they are now."""

    def listing(found: re.Match[str]) -> str:
        text = files("hicachectl").joinpath("packaging", found[1]).read_text(encoding="utf-8")
        lines = map(literal_line, text.splitlines())
        return "\n".join([f'.\\" file {found[1]}', ".Bd -literal", *lines, ".Ed"])

    return _LISTING.sub(listing, page)


def name_list(names: Set[str]) -> Iterator[str]:
    """Return names in order, as a compact list."""
    yield ".Bl -item -compact -offset indent"
    for name in sorted(names):
        yield from (".It", text_line(name))
    yield ".El"


def table_lines(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield a table that fits a terminal: each member of a cell has a line of its own.

    The table is literal text, because groff breaks the rows of a `-column` list at their spaces.
    """
    members = [[cell.replace(", ", ",\n").split("\n") for cell in row] for row in (titles, *rows)]
    lines = [line for row in members for line in zip_longest(*row, fillvalue="")]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    yield ".Bd -literal"
    for line in lines:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        yield literal_line("  ".join(cells).rstrip())
    yield ".Ed"


def page_head(name: str, summary: str, section: int = 1) -> list[str]:
    """Return the lines up to SYNOPSIS."""
    return [
        f".Dd {RELEASE_DATE}",
        f".Dt {name.upper()} {section}",
        f".Os hicachectl {__version__}",
        ".nh",  # no hyphenation: a name that is divided at the end of a line cannot be copied
        ".Sh NAME",
        f".Nm {name}",
        f".Nd {text_line(summary)}",
        ".Sh SYNOPSIS",
    ]


def help_text(text: str) -> Iterator[str]:
    """Yield a help text as paragraphs. Blocks that click must not rewrap become literal."""
    paragraphs = cleandoc(text).split("\n\n")
    return section_lines(_indented(p) if p.startswith("\b") else p for p in paragraphs)


def _indented(text: str) -> str:
    """Return the literal block for a block that click must not rewrap."""
    return textwrap.indent(textwrap.dedent(text.removeprefix("\b\n")), LITERAL)


def flag_macros(names: str) -> str:
    """Return `-o, --output FILE` as mdoc flags."""
    *flags, last = names.split(", ")
    last, _, value = last.partition(" ")
    parts = [f"Fl {escaped(flag[1:])} ," for flag in flags] + [f"Fl {escaped(last[1:])}"]
    return " ".join([*parts, f"Ar {escaped(value)}"] if value else parts)


def example_section(epilog: str) -> list[str]:
    """Return the examples of a command's epilog; empty without examples."""
    _, title, examples = epilog.partition("Examples:\n")
    return [".Sh EXAMPLES", *section_lines([_indented(examples)])] if title else []


def sentence_lines(text: str) -> list[str]:
    """Return one sentence per line, as mdoc requires, with links and bold names."""
    flat = _QUOTED.sub(lambda found: found[0].replace(" ", _SPACE), " ".join(text.split()))
    sentences = re.split(r"(?<=[.;:])\s+(?=[A-Z])|(?<=\.)\s+(?=[a-z-])", flat)
    return [line for sentence in sentences for line in _wrapped(sentence)]


def _wrapped(sentence: str) -> list[str]:
    """Return a sentence as lines with links and bold names."""
    lines: list[str] = []
    for width in _WIDTHS:
        # A break within --to-profile would show as a space.
        parts = textwrap.wrap(sentence, width, break_on_hyphens=False, break_long_words=False)
        lines = [line for part in parts for line in _linked(part)]
        if all(len(line) <= _LINE_BYTES for line in lines):
            break
    return lines


def _linked(line: str) -> Iterator[str]:
    """Yield a line of text: its text with bold names, and a macro for each reference to a page."""
    end = 0
    for reference in _REFERENCE.finditer(line):
        if before := line[end : reference.start()].strip():
            yield _marked(before)
        name, section, punctuation = reference.groups()
        yield " ".join([".Xr", name, section, *punctuation])
        end = reference.end()
    if rest := line[end:].strip():
        yield _marked(rest)


def _marked(line: str) -> str:
    """Return a line of text with its names in bold."""
    said = _NAME.sub(lambda found: rf"\fB{found[1] or found[2]}\fR", line.replace(_SPACE, " "))
    return text_line(said).replace(r"\efB", r"\fB").replace(r"\efR", r"\fR")


def text_line(line: str) -> str:
    """Return a line of text."""
    said = escaped(line)
    return f"{NO_TEXT}{said}" if said[:1] in (".", "'") else said


def literal_line(line: str) -> str:
    """Return a line of a literal display."""
    return text_line(line.rstrip())


def escaped(text: str) -> str:
    """Return a text in which all characters that mdoc would interpret are escaped."""
    replacements = (("\\", "\\e"), ("-", "\\-"), ("…", "..."), ('"', "\\(dq"))
    for plain, escape in replacements:
        text = text.replace(plain, escape)
    return text


def section_lines(
    blocks: Iterable[Block], known: Mapping[str, Iterable[Item]] | None = None
) -> Iterator[str]:
    """Yield the lines of a section as mdoc. known: for each NAME, the items of a block `@NAME`."""
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
                yield f".It {_marked(item.term)}"
                yield from sentence_lines(item.text)
        elif is_literal(block):
            yield from (".Bd -literal -offset indent", *map(literal_line, literal_of(block)), ".Ed")
        else:
            assert isinstance(block, str)
            yield from ([".Pp"] if number else [])
            yield from sentence_lines(block)
    if in_list:
        yield ".El"
