"""Man pages as Markdown, for readers of the repository on the web.

The man pages of commands have no Markdown, because `hicachectl COMMAND --help-all` says the same.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

PAGES = ("hicachectl.1", "*.5", "*.7")
FOLDER = "web"

# mandoc turns a literal display in a list into a quote, and characters beyond ASCII into `<?>`.
# So literal displays bypass mandoc.
_DISPLAY = re.compile(r"^\.Bd -literal.*\n((?:.*\n)*?)\.Ed$", re.MULTILINE)
_PLACE = re.compile(r"(.*)LiteralDisplay(\d+)")  # the line of Markdown that a display replaces
_FENCE = "```"

# The escapes of literal displays: a character by its number, by two letters or by one.
_ESCAPE = re.compile(r"\\(?:\[u([0-9A-F]+)\]|\((..)|(.))")
_ESCAPED = {"e": "\\", "-": "-", "&": "", "dq": '"', "aq": "'"}

# mandoc confuses code and text after this macro, so `.Li` replaces it.
_QUOTED_CODE = re.compile(r"^\.Ql ", re.MULTILINE)

_MARKER = re.compile(r"\d+\.|[*+-]")  # the beginning of a list item
_NAMED = re.compile(r"\b((?:hicachectl|hcpack)(?:(?:-|&#45;)[a-z]+)*)\(([157])\)")


def write_web_pages(man: Path) -> None:
    """Write man/web/PAGE.md for each of PAGES, and remove other files there.

    Without mandoc, the folder stays as it is, and a line on stderr says so.
    """
    if shutil.which("mandoc") is None:
        sys.stderr.write(f"{man / FOLDER}: unchanged, because mandoc is not installed\n")
        return
    folder = man / FOLDER
    folder.mkdir(exist_ok=True)
    paths = sorted(path for pattern in PAGES for path in man.glob(pattern))
    names = {path.name for path in paths}
    for path in paths:
        (folder / f"{path.name}.md").write_text(web_page(path, names), encoding="utf-8")
    for left in folder.glob("*.md"):
        if left.stem not in names:
            left.unlink()


def web_page(path: Path, names: set[str]) -> str:
    """Return a page as Markdown.

    names: pages that a reference such as `hicachectl-ls(1)` links to.
    """
    displays: list[str] = []

    def place(found: re.Match[str]) -> str:
        displays.append(found[1])
        return f".Pp\nLiteralDisplay{len(displays) - 1}\n.Pp"

    text = _DISPLAY.sub(place, path.read_text(encoding="utf-8"))
    made = subprocess.run(
        ["mandoc", "-T", "markdown"],
        input=_QUOTED_CODE.sub(".Li ", text),
        stdout=subprocess.PIPE,
        encoding="utf-8",
        check=True,
    ).stdout
    lines: list[str] = []
    for line in made.rstrip("\n").split("\n")[:-1]:  # the last line has the system and the date
        if found := _PLACE.match(line):
            inner = _MARKER.sub("", found[1])
            shown = [_plain(each) for each in displays[int(found[2])].splitlines()]
            lines.append(found[1] + _FENCE)
            lines += [(inner + each).rstrip() for each in (*shown, _FENCE)]
        else:
            lines.append(_linked(line, names))
    return "\n".join(lines).rstrip("\n") + "\n"


def _plain(line: str) -> str:
    """Return a line of a literal display without the escapes of mdoc."""

    def character(found: re.Match[str]) -> str:
        number, pair, single = found.groups()
        return chr(int(number, 16)) if number else _ESCAPED[pair or single]

    return _ESCAPE.sub(character, line)


def _linked(line: str, names: set[str]) -> str:
    """Return a line of text with links to the pages that it names."""

    def link(found: re.Match[str]) -> str:
        name = f"{found[1].replace('&#45;', '-')}.{found[2]}"
        return f"[{found[0]}]({name}.md)" if name in names else found[0]

    return line if line.startswith("HICACHECTL") else _NAMED.sub(link, line)
