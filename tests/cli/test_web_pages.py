"""The man pages for the web are those that mandoc makes, and their links lead to pages."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

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


def test_tables_are_blocks_lists_stay_together_and_examples_have_no_links(tmp_path: Path) -> None:
    need_tool("mandoc")
    page = tmp_path / "hicachectl-x.1"
    page.write_text(
        ".Dd May 1, 2026\n.Dt X 1\n.Os\n.Sh NAME\nSee hicachectl-ls(1) and hicachectl-no(1).\n"
        ".Bd -literal\nhicachectl-ls(1)\n.Ed\n.Bl -enum\n.It\nFirst.\nThen hicachectl-ls(1).\n.El\n"
    )
    text = web_page(page, {"hicachectl-ls.1"})
    assert "See [hicachectl-ls(1)](hicachectl-ls.1.md) and hicachectl-no(1).\n\n\thi" in text
    assert "\n\n\thicachectl-ls(1)\n" in text
    assert text.endswith("1.\tFirst.\n\tThen [hicachectl-ls(1)](hicachectl-ls.1.md).\n")
