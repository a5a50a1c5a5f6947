"""README.md is true: commands, outputs, pictures, links and numbers. Lines for cron parse."""

from __future__ import annotations

import base64
import itertools
import re
import shlex
import tomllib
from pathlib import Path
from textwrap import dedent
from typing import TYPE_CHECKING

import click
import pytest

from hicachectl import __version__
from hicachectl.cli.group import COMMANDS, cli
from hicachectl.cli.manpages.access import access
from hicachectl.formats.models.architectures import architectures
from hicachectl.formats.models.families.base import Family
from hicachectl.formats.releases import NEWEST_SGLANG
from tests.browser import browser
from tests.pictures import MAN, made_demo, report_picture, verify_picture

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.browser import Browser
    from tests.pictures import Demo

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Blocks of two pictures of one page that may differ, as a share: times and free space change.
_CHANGING = 0.01
_DIFFERENCE = """
(() => {
  const [one, other] = [...document.images].map(image => {
    const canvas = document.createElement("canvas");
    [canvas.width, canvas.height] = [image.naturalWidth / 20, image.naturalHeight / 20];
    const context = canvas.getContext("2d");
    context.imageSmoothingQuality = "high";
    context.drawImage(image, 0, 0, canvas.width, canvas.height);
    return context.getImageData(0, 0, canvas.width, canvas.height).data;
  });
  return one.length !== other.length ? 1
    : one.filter((value, at) => Math.abs(value - other[at]) > 24).length / one.length;
})()
"""


def readme_blocks() -> list[str]:
    """Return the indented blocks of the README."""
    found: list[list[str]] = [[]]
    for line in README.splitlines():
        if line.startswith("    ") or (not line.strip() and found[-1]):
            found[-1].append(line)
        elif found[-1]:
            found.append([])
    return [dedent("\n".join(block)).strip() + "\n" for block in found if block]


def manual_blocks(page: str = "hicachectl-scheduling.7") -> list[str]:
    """Return the literal blocks of a manual page, without the escapes of mdoc."""
    source = (ROOT / "man" / page).read_text()
    found = re.findall(r"^\.Bd -literal$\n(.*?)^\.Ed$", source, re.MULTILINE | re.DOTALL)
    return [text.replace("\\-", "-").replace("\\e", "\\") for text in found]


def crontab_lines() -> list[str]:
    """Return the lines for cron of hicachectl-scheduling(7)."""
    lines = [line for block in manual_blocks() for line in block.splitlines()]
    return [line for line in lines if "* * " in line and "hicachectl -q" in line]


def check_arguments(arguments: list[str]) -> None:
    """Parse a command line with click without running the command."""
    own = next(at for at, text in enumerate(arguments) if not text.startswith("-"))
    with click.Context(cli, **cli.context_settings) as ctx:
        command: click.Command | None = cli
        while isinstance(command, click.Group):
            name, arguments = arguments[own], arguments[own + 1 :]
            command, own = command.get_command(ctx, name), 0
            assert command is not None, name
        assert command is not None
        with command.make_context(name, arguments, parent=ctx):
            pass


def commands() -> list[list[str]]:
    """Return the arguments of each `hicachectl …` in blocks and tables of the README."""
    blocks = "".join(readme_blocks()).replace("\\\n", " ")
    lines = re.findall(r"^(?:\$ )?hicachectl (.*)", blocks, re.MULTILINE)
    lines += re.findall(r"^\|.*`hicachectl ([^`]+)` \|$", README, re.MULTILINE)
    found = [shlex.split(line, comments=True) for line in lines]
    return [list(itertools.takewhile(lambda text: text != ">", words)) for words in found]


def anchors(text: str) -> set[str]:
    """Return the anchors that a web page gives to the headings of a Markdown text."""
    headings = re.findall(r"^#+ (.*)", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


def table(head: str) -> dict[str, str]:
    """Return the rows of a table of the README: the rest of a row by its first column."""
    rows = README.split(f"\n{head}\n")[1].split("\n\n")[0].splitlines()[1:]
    return {
        first.strip(): rest.strip(" |") for _, first, rest in (row.split("|", 2) for row in rows)
    }


@pytest.fixture(scope="module")
def demo() -> Iterator[Demo]:
    with made_demo() as demo:
        yield demo


@pytest.mark.parametrize("arguments", commands(), ids=" ".join)
def test_the_commands_of_the_readme_are_understood(arguments: list[str]) -> None:
    check_arguments(arguments)


def test_the_readme_has_a_command_for_each_symptom_and_each_family() -> None:
    assert len(table("| You see | Run |")) == 4
    families = README.split("\n## The commands\n")[1].split("\n## ")[0].split("\n**")[1:]
    counts = [family.count("\n    hicachectl ") for family in families]
    assert len(counts) == 6
    assert set(counts) == {3, 4}


@pytest.mark.slow
def test_the_outputs_of_the_readme_are_those_of_the_commands(demo: Demo) -> None:
    (session,) = (block for block in readme_blocks() if block.startswith("$ hicachectl "))
    assert session.count("$ ") == 3
    for step in session.split("$ ")[1:]:
        command, _, shown = step.partition("\n")
        assert masked(demo.run(command)) == masked(shown), command


@pytest.mark.slow
def test_the_picture_of_verify_is_its_output(demo: Demo) -> None:
    picture = (MAN / "verify.svg").read_text()
    assert masked(picture) == masked(verify_picture(demo)), "run `python -m tests.pictures`"
    assert "no findings" in demo.printed.split("# A copy of it, damaged")[0]


@pytest.mark.slow
@pytest.mark.xdist_group("browser")
def test_the_picture_of_the_report_is_its_first_page(demo: Demo) -> None:
    """Blocks of 20 pixels are compared, so that other times and digits do not matter."""
    committed = (MAN / "report.png").read_bytes()
    with browser(demo.folder) as chromium:
        now = report_picture(demo, chromium)
        healthy = report_picture(demo, chromium, "demo-store")
        same = difference(demo, chromium, committed, now)
        assert same < _CHANGING, "run `python -m tests.pictures`"
        assert difference(demo, chromium, committed, healthy) > 2 * _CHANGING


def masked(text: str) -> str:
    """Return a text without ages and free space."""
    text = re.sub(r"\b\d+[smhd]\b", "0h", text)
    return re.sub(r"[\d.]+ [KMGT]iB free", "0 B free", text)


def difference(demo: Demo, chromium: Browser, *pictures: bytes) -> float:
    """Return the share of blocks in which two pictures differ."""
    data = [base64.b64encode(picture).decode() for picture in pictures]
    page = demo.folder / "both.html"
    page.write_text("".join(f'<img src="data:image/png;base64,{text}">' for text in data))
    chromium.load(page, width=1200, scheme="light")
    share: float = chromium.value(_DIFFERENCE)
    return share


def test_the_links_of_the_readme_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)]+)\)", README)
    assert len(links) > 10
    for link in links:
        path, _, anchor = link.partition("#")
        text = (ROOT / path).read_text() if anchor and path else README
        assert anchor in anchors(text) if anchor else (ROOT / path).exists(), link
    # A manual page is a link wherever it is named.
    assert not re.search(r"(?<!\[)\b(?:hicachectl|hcpack)[a-z-]*\([157]\)", README)


def test_the_readme_has_the_extras_of_the_package() -> None:
    rows = table("| Extra | For |")
    named = [name for first, rest in rows.items() for name in re.findall("`([a-z-]+)`", first)]
    assert "mooncake-cpu" in rows["`mooncake`"]
    assert sorted([*named, "mooncake-cpu"]) == sorted(PROJECT["optional-dependencies"])


def test_the_readme_has_the_releases_that_are_supported() -> None:
    rows = table("| Software | Releases |")
    families = {name for name, x in architectures().items() if isinstance(x, Family)}
    assert f"to {NEWEST_SGLANG};" in rows["SGLang"]
    known = f"{len(families)} of the {len(architectures())} architectures of SGLang {NEWEST_SGLANG}"
    assert rows["Models"].startswith(f"{known}: ")
    extras = PROJECT["optional-dependencies"]
    assert extras["mooncake"][0].split(">=")[1] in rows["Mooncake"]
    assert f"{PROJECT['requires-python'][2:]} or later" in rows["Python"]
    assert [text.split(">=")[1] in rows["GPU"] for text in extras["gpu"]] == [True, True]
    assert f"version {__version__}," in README


def test_commands_that_the_readme_calls_reading_write_nothing() -> None:
    said = README.split("- **Reads only**: ")[1].split(";")[0]
    reading = re.findall("`([a-z]+)`", said)
    assert set(reading) < set(COMMANDS)
    for row in access().commands:
        if row.words[0] in reading:
            changed = {*row.places.get("writes", []), *row.places.get("removes", [])}
            assert changed <= {"TMPDIR"}, row


@pytest.mark.parametrize("line", crontab_lines(), ids=["verify", "prewarm", "rm"])
def test_a_crontab_line_is_understood(line: str) -> None:
    fields = line.split(None, 5)
    assert len(fields) == 6
    assert "%" not in fields[5].replace("\\%", "")  # cron makes an unescaped one a line end
    check_arguments(shlex.split(fields[5])[1:])
