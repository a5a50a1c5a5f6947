"""The man pages for the web are whole: their links lead to pages, and their code is as written."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

from markdown_it import MarkdownIt

from hicachectl.cli.manpages.web import FOLDER, PAGES, web_page, write_web_pages
from tests.skips import need_tool

MAN = Path(__file__).parents[2] / "man"


def test_the_committed_pages_are_those_that_would_be_written(tmp_path: Path) -> None:
    need_tool("mandoc")
    for pattern in PAGES:
        for path in MAN.glob(pattern):
            shutil.copy(path, tmp_path)
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "hicachectl-gone.1.md").write_text("a page of an earlier command")
    write_web_pages(tmp_path)
    written = {path.name: path.read_text() for path in (tmp_path / FOLDER).iterdir()}
    committed = {path.name: path.read_text() for path in (MAN / FOLDER).iterdir()}
    assert committed == written, "run `make man`"


def test_the_links_of_the_pages_lead_to_pages() -> None:
    pages = {path.name for path in (MAN / FOLDER).iterdir()}
    assert "hicachectl-runbooks.7.md" in pages
    for page in pages:
        links = re.findall(r"\]\(([^)#]+\.md)\)", (MAN / FOLDER / page).read_text())
        assert set(links) <= pages, page


def test_displays_are_code_lists_stay_together_and_code_has_no_links(tmp_path: Path) -> None:
    need_tool("mandoc")
    display = ".Bd -literal -offset indent\n\\&.x [<\\-\\e\\[u2026]\n\nhicachectl\\-ls(1)\n.Ed\n"
    page = tmp_path / "hicachectl-x.1"
    page.write_text(
        ".Dd May 1, 2026\n.Dt X 1\n.Os\n.Sh NAME\nSee hicachectl-ls(1) and hicachectl-no(1).\n"
        f"{display}Then.\n.Bl -enum\n.It\nFirst\n.Ql \\-q [x] .\nThen hicachectl-ls(1).\n"
        f"{display}.It\n{display}.El\n.Bl -tag -width Ds\n.It Fl a\nAn a.\n{display}An end.\n.El\n"
    )
    shown = ("```", ".x [<-\\…", "", "hicachectl-ls(1)", "```")

    def block(prefix: str) -> str:
        return "\n".join((prefix + line).rstrip() for line in shown)

    text = web_page(page, {"hicachectl-ls.1"})
    link = "[hicachectl-ls(1)](hicachectl-ls.1.md)"
    assert f"See {link} and hicachectl-no(1).\n\n{block('')}\n\nThen.\n" in text
    item = block("\t")
    assert f"1.\tFirst\n\t`-q [x]`.\n\tThen {link}.\n\n{item}\n\n2.{item}\n" in text
    assert text.endswith(f"**-a**\n\n> An a.\n\n{block('> ')}\n\n> An end.\n")


def test_no_character_is_lost_and_no_code_has_an_escape() -> None:
    for page in (MAN / FOLDER).iterdir():
        text = page.read_text()
        assert "<?>" not in text, page.name
        assert "\N{REPLACEMENT CHARACTER}" not in text, page.name
        blocks, spans = _code(text)
        for code in (*blocks, *spans):
            assert not re.search(r"&#?\w+;|\\[]\[_*<>`#(.-]", code), (page.name, code)


def test_each_literal_display_is_a_code_block_with_its_lines() -> None:
    need_tool("mandoc")
    for page in (MAN / FOLDER).iterdir():
        source = (MAN / page.stem).read_text()
        blocks, _ = _code(page.read_text())
        assert blocks == _displays(source), page.name


def _code(text: str) -> tuple[list[str], list[str]]:
    """Return the blocks and the spans of code that a reader of a page sees."""
    tokens = MarkdownIt("commonmark").parse(text)
    blocks = [token.content for token in tokens if token.type in ("fence", "code_block")]
    inline = (child for token in tokens for child in token.children or ())
    return blocks, [token.content for token in inline if token.type == "code_inline"]


def _displays(source: str) -> list[str]:
    """Return the literal displays of a man page, as mandoc shows them on a terminal."""
    displays = re.findall(r"^\.Bd -literal.*\n((?:.*\n)*?)\.Ed$", source, re.MULTILINE)
    mark = "The end of a display.\n"
    head = f".Dd May 1, 2026\n.Dt X 1\n.Os\n.Sh NAME\n.Bd -literal\n{mark}"
    shown = subprocess.run(
        ["mandoc", "-T", "utf8"],
        input=head + "".join(display + mark for display in displays) + ".Ed\n",
        stdout=subprocess.PIPE,
        encoding="utf-8",
        check=True,
    ).stdout
    return re.sub("^ {5}", "", shown, flags=re.MULTILINE).split(mark)[1:-1]
