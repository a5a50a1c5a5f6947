"""The man pages match the commands and are well formed."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from textwrap import dedent
from typing import TYPE_CHECKING

import click
import pytest
from msgspec.structs import fields

from hicachectl.checks.reasons import reasons
from hicachectl.checks.registry import codes
from hicachectl.cli import manpages
from hicachectl.cli.exit_codes import BUG, DONE, EXIT_CODES, FINDINGS, INTERRUPTED, TERMINATED
from hicachectl.cli.group import COMMANDS, cli
from hicachectl.cli.manpages.mdoc import (
    SEE_ALSO,
    sentence_lines,
    with_listings,
)
from hicachectl.cli.manpages.pages import build, without_own_name
from hicachectl.cli.prose import Item, is_literal, literal_of, prose
from hicachectl.formats.models.recorded import recorded
from hicachectl.formats.profile import Profile, parse_profile
from tests.skips import need_tool

if TYPE_CHECKING:
    from hicachectl.checks.codes import Code
    from hicachectl.checks.reasons import Reason

MAN = Path(__file__).parents[2] / "man"
TEXTS = Path(manpages.__file__).parent / "texts"
BY_HAND = {
    "hcpack.5",
    "hicachectl-concepts.7",
    "hicachectl-kubernetes.7",
    "hicachectl-plugin.7",
    "hicachectl-python.7",
    "hicachectl-runbooks.7",
    "hicachectl-scaling.7",
    "hicachectl-scheduling.7",
}
SYSTEM_PAGES = {("crontab", "5"), ("systemd.timer", "5")}


def unmarked(page: str) -> str:
    """Return a page without links, bold names and escapes of characters."""
    text = re.sub(r"^\.Xr (\S+) (\d) ?(.*)$", r"\1(\2)\3", page, flags=re.MULTILINE)
    text = re.sub(r"\\f[BR]", "", text)
    return text.replace("\\-", "-").replace("\\(dq", '"')


def test_the_committed_pages_are_those_that_would_be_built(tmp_path: Path) -> None:
    build(tmp_path)
    built = {path.name: path.read_text() for path in tmp_path.iterdir()}
    pages = (path for path in MAN.glob("*.[157]") if path.name not in BY_HAND)
    committed = {path.name: path.read_text() for path in pages}
    assert committed == built, "run `make man`"


@pytest.mark.parametrize("path", sorted(MAN.glob("*.7")), ids=lambda path: path.name)
def test_a_page_lists_files_as_they_are(path: Path) -> None:
    page = path.read_text()
    assert page == with_listings(page), "run `make man`"


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_option_is_documented(name: str) -> None:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    page = (MAN / f"hicachectl-{name}.1").read_text().replace("\\-", "-")
    for parameter in command.params:
        if isinstance(parameter, click.Option) and not parameter.hidden:
            assert parameter.help, parameter.name
            for option in parameter.opts:
                assert re.search(rf"Fl {re.escape(option[1:])}\b", page), option


def test_every_exit_code_is_documented() -> None:
    page = (MAN / "hicachectl.1").read_text()
    for code in {DONE, BUG, FINDINGS, INTERRUPTED, TERMINATED, *EXIT_CODES.values()}:
        assert f"\n.It {code}\n" in page


def test_the_example_of_a_profile_file_is_one() -> None:
    (example,) = filter(is_literal, prose("hicachectl-profile")["PROFILE FILE"])
    text = "\n".join(literal_of(example))
    assert [pool.name for pool in parse_profile(text).pools] == ["kv", "mamba"]


@pytest.mark.parametrize("page", [p.stem for p in TEXTS.glob("hicachectl*.txt")])
def test_every_text_is_on_its_page(page: str) -> None:
    (path,) = MAN.glob(f"{page}.[17]")
    built = path.read_text()
    for title, blocks in prose(page).items():
        assert title == "VALUES" or f"{title}\n" in built, title
        for block in blocks if title != SEE_ALSO else ():
            if isinstance(block, Item):
                assert sentence_lines(block.text)[0] in built, block
            elif not (is_literal(block) or block.startswith("@")):
                said = without_own_name("\n".join(sentence_lines(block)), path.name)
                assert said in built, block


def test_every_field_of_a_profile_is_on_its_page() -> None:
    page = unmarked((MAN / "hicachectl-profile.1").read_text())
    for field in fields(Profile):
        assert re.search(rf"\b{field.encode_name}\b", page), field.encode_name


def test_every_architecture_is_on_the_page_of_models_once() -> None:
    listed = re.findall(r"^\.It\n(\w+)$", (MAN / "hicachectl-models.7").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(recorded().architectures)


def test_every_code_and_every_reason_is_explained_as_explain_does() -> None:
    page = unmarked((MAN / "hicachectl-findings.7").read_text())
    explained: list[Code | Reason] = [*codes(), *reasons()]
    assert re.findall(r"^\.Ss (\S+)$", page, re.MULTILINE) == [one.name for one in explained]
    flat = " ".join(page.split())
    for one in explained:
        for text in filter(None, one.explanation().values()):
            assert text in flat, one.name


@pytest.mark.parametrize("name", list(COMMANDS))
def test_examples_look_as_in_the_help(name: str) -> None:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    assert command.epilog is not None
    page = (MAN / f"hicachectl-{name}.1").read_text().replace("\\-", "-").replace("\\e", "\\")
    shown = re.search(r"^\.Sh EXAMPLES\n\.Bd .*\n((?:.*\n)*?)\.Ed$", page, re.MULTILINE)
    assert shown is not None
    examples = command.epilog.replace("\b", "").strip().removeprefix("Examples:\n")
    assert shown[1] == dedent(examples) + "\n"


@pytest.mark.parametrize("name", list(COMMANDS))
def test_a_page_does_not_refer_to_itself(name: str) -> None:
    description = unmarked((MAN / f"hicachectl-{name}.1").read_text()).split(".Sh OPTIONS")[0]
    assert f"hicachectl-{name}(1)" not in description


def test_sentences_have_links_and_bold_names() -> None:
    assert sentence_lines("Give --grace 0s; see TRACES in hicachectl-prewarm(1). Or `ls`.") == [
        r"Give \fB\-\-grace\fR 0s; see TRACES in",
        ".Xr hicachectl-prewarm 1 .",
        r"Or \fBls\fR.",
    ]
    assert sentence_lines(f"{'x' * 60} `hicachectl ls STORE`") == [
        "x" * 60,
        r"\fBhicachectl ls STORE\fR",
    ]
    assert sentence_lines("Both have HICACHECTL_TP, not /server_info or a_b.data (ls(1)).") == [
        r"Both have \fBHICACHECTL_TP\fR, not /server_info or a_b.data (ls(1)).",
    ]


@pytest.mark.slow
def test_mandoc_has_nothing_to_say() -> None:
    pages = sorted(MAN.glob("*.[1-9]"))
    assert len(pages) > len(COMMANDS)
    said = subprocess.run(
        [need_tool("mandoc"), "-T", "lint", *map(str, pages)],
        capture_output=True,
        text=True,
        check=False,
    ).stdout
    # mandoc looks for referenced pages on the system only; ours are beside this one.
    missing = r".*STYLE: referenced manual not found: Xr (\S+) (\d)(?: \(\d+ times\))?"
    # The footer names the program, and not the system on which a page is read.
    footer = ": STYLE: operating system explicitly specified: Os hicachectl (NetBSD)"
    for line in said.splitlines():
        if line.endswith(footer):
            continue
        reference = re.fullmatch(missing, line)
        assert reference is not None, line
        if reference[1].startswith(("hicachectl", "hcpack")):
            assert (MAN / f"{reference[1]}.{reference[2]}").is_file(), line
        else:  # a page of the system, which may not be installed here
            assert (reference[1], reference[2]) in SYSTEM_PAGES, line
