"""The page of `hicachectl report` in a real browser."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hicachectl.__main__ import run
from tests.browser import Browser, browser
from tests.stores import DSA, page, put, put_pages

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("browser")]

HOSTILE = "<script>alert(1)<\u2215script>\"'&]]><!--\u202e\u0627\u2028\x01{{7*7}}"
_LONG = "x" * 120
_WIDTHS = (400, 1400)

# Texts of charts beyond the edges of their SVG, with a pixel of tolerance.
_CUT_TEXTS = """
[...document.querySelectorAll("svg.chart")].filter(svg => svg.getClientRects().length)
  .flatMap(svg => {
    const edge = svg.getBoundingClientRect();
    return [...svg.querySelectorAll("text")].filter(text => {
      const box = text.getBoundingClientRect();
      return box.width && (box.left < edge.left - 1 || box.right > edge.right + 1
        || box.top < edge.top - 1 || box.bottom > edge.bottom + 1);
    }).map(text => text.textContent);
  })
"""
_OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
# Contrast of the texts of charts that are shown with the paper behind them.
_COLOURS = """
(() => {
  const paper = getComputedStyle(document.querySelector("section")).backgroundColor;
  const texts = [...document.querySelectorAll("svg.chart .role-axis-label text")]
    .filter(text => text.getClientRects().length);
  return [paper, ...new Set(texts.map(text => getComputedStyle(text).fill))];
})()
"""


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("browser")) as one:
        yield one


@pytest.fixture(scope="module")
def hostile_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the page of a store with every section, and names that attack it."""
    tmp_path = tmp_path_factory.mktemp("hostile")
    store = tmp_path / f"store {HOSTILE[:9]}\u202e"
    store.mkdir()
    now = time.time()
    for number in range(24):
        put_pages(
            store, range(number, number + 1), "_x-dsa", nbytes=9216, mtime=now - 3600 * number - 99
        )
        if number % 5:
            put_pages(
                store, range(number, number + 1), ".indexer_x-dsa", nbytes=1056, mtime=now - 9999
            )
    for model, tp in ((f"m{HOSTILE}", 2), (_LONG, 40)):
        for rank in range(tp):
            put_pages(store, range(100, 103), f"_{model}_{rank}_{tp}", mtime=now - 50_000)
    put(store, f"{page(100)}_m{HOSTILE}_1_2.bin").unlink()
    put(store, HOSTILE)
    put(store, "y" * 250)
    profile = tmp_path / "dsa.toml"
    profile.write_text(DSA)
    chains = tmp_path / "chains.jsonl"
    chains.write_text(
        "".join(json.dumps([page(n) for n in range(1, end)]) + "\n" for end in (4, 9, 24, 24))
    )
    made = tmp_path / "page.html"
    arguments = [
        "report", store, "--profile", profile, "--pages", chains, "--checks", "sizes,groups,values",
        "--mark", f"{HOSTILE}=2h", "--mark", "20h", "-o", made,
    ]  # fmt: skip
    assert run([str(word) for word in arguments]) == 4
    return made


def test_the_page_is_quiet_fits_and_shows_each_label(chromium: Browser, hostile_page: Path) -> None:
    assert hostile_page.stat().st_size < 1_000_000
    papers = {}
    for scheme in ("light", "dark"):
        for width in _WIDTHS:
            chromium.load(hostile_page, width=width, scheme=scheme)
            assert chromium.noise == []
            assert chromium.requests == [hostile_page.as_uri()]
            assert chromium.value(_OVERFLOW) <= 0, (scheme, width)
            assert chromium.value(_CUT_TEXTS) == [], (scheme, width)
            paper, *inks = chromium.value(_COLOURS)
            assert inks
            assert all(_contrast(paper, ink) >= 4.5 for ink in inks), (scheme, paper, inks)
            papers[scheme] = paper
    assert _light(papers["light"]) > 0.9
    assert _light(papers["dark"]) < 0.1


def test_paper_is_white_in_a_dark_browser(chromium: Browser, hostile_page: Path) -> None:
    chromium.load(hostile_page, width=720, scheme="dark", media="print")
    paper, *inks = chromium.value(_COLOURS)
    assert _light(paper) > 0.9
    assert all(_contrast(paper, ink) >= 4.5 for ink in inks)


def test_names_are_text_and_charts_have_a_name(chromium: Browser, hostile_page: Path) -> None:
    chromium.load(hostile_page, width=1400, scheme="light")
    assert chromium.value("document.scripts.length") == 0
    assert chromium.value("[...document.querySelectorAll('img, iframe, object, link')].length") == 0
    assert chromium.value(
        "[...document.querySelectorAll('*')].flatMap(e => [...e.attributes])"
        ".filter(a => a.name.startsWith('on') || /^\\s*(javascript|http)/i.test(a.value)"
        " && !a.name.startsWith('xmlns')).map(a => a.value)"
    ) == []  # fmt: skip
    text = chromium.value("document.body.textContent")
    assert "<script>alert(1)<\u2215script>\"'&]]><!--\\u202e\u0627\\u2028\\x01{{7*7}}" in text
    assert not {"\u202e", "\u2028", "\x01"} & set(text)
    assert chromium.value(
        "[...document.querySelectorAll('svg')]"
        ".every(s => s.getAttribute('role') === 'img' && s.getAttribute('aria-label'))"
    )
    names = chromium.value("[...document.querySelectorAll('[id]')].map(e => e.id)")
    assert len(names) == len(set(names))
    targets = chromium.value("[...document.querySelectorAll('a')].map(a => a.hash.slice(1))")
    assert set(targets) <= set(names)
    if folder := os.environ.get("HICACHECTL_KEEP_PAGES"):  # to look at it
        Path(folder, "hostile.html").write_bytes(hostile_page.read_bytes())


def _channels(colour: str) -> list[float]:
    """Return red, green and blue of `rgb(1, 2, 3)`, linear."""
    parts = [float(part) / 255 for part in colour.partition("(")[2].rstrip(")").split(",")[:3]]
    return [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]


def _light(colour: str) -> float:
    """Return the relative luminance of WCAG, from 0 to 1."""
    red, green, blue = _channels(colour)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _contrast(one: str, other: str) -> float:
    """Return the contrast ratio of WCAG."""
    low, high = sorted((_light(one), _light(other)))
    return (high + 0.05) / (low + 0.05)
