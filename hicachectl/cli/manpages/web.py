"""Man pages as Markdown, for readers of the repository on the web.

The pages of commands have none: they say what `hicachectl COMMAND --help-all` says.
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
_NAMED = re.compile(r"\b((?:hicachectl|hcpack)(?:(?:-|&#45;)[a-z]+)*)\(([157])\)")
_ITEM = re.compile(r"(?:\d+\.|[*+-])\t")  # the beginning of a list item


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
    made = subprocess.run(
        ["mandoc", "-T", "markdown", path], stdout=subprocess.PIPE, text=True, check=True
    ).stdout
    lines: list[str] = []
    in_list = False
    for line in made.rstrip("\n").split("\n")[:-1]:  # the last line has the system and the date
        if _ITEM.match(line):
            in_list = True
        elif line and not line.startswith("\t"):
            in_list = False
        literal = line.startswith("\t\t" if in_list else "\t")
        if literal and not in_list and lines and lines[-1] and not lines[-1].startswith("\t"):
            lines.append("")  # a table would continue the paragraph before it
        lines.append(line if literal else _linked(line, names))
    return "\n".join(lines).rstrip("\n") + "\n"


def _linked(line: str, names: set[str]) -> str:
    """Return a line of text with links to the pages that it names."""

    def link(found: re.Match[str]) -> str:
        name = f"{found[1].replace('&#45;', '-')}.{found[2]}"
        return f"[{found[0]}]({name}.md)" if name in names else found[0]

    return line if line.startswith("HICACHECTL") else _NAMED.sub(link, line)
