"""Examples in README.md and hicachectl-scheduling(7): command lines parse."""

from __future__ import annotations

import itertools
import re
import shlex
from pathlib import Path
from textwrap import dedent

import click
import pytest

from hicachectl.cli.group import cli

ROOT = Path(__file__).parents[1]


def readme_blocks() -> list[str]:
    """Return the indented blocks of the README."""
    found: list[list[str]] = [[]]
    for line in (ROOT / "README.md").read_text().splitlines():
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
    """Return the lines for cron of both documents."""
    lines = [line for block in readme_blocks() + manual_blocks() for line in block.splitlines()]
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
    """Return the arguments of each `hicachectl …` in the README's blocks, without redirection."""
    found = []
    for block in readme_blocks():
        as_read = block.replace("\\\n", " ").replace("$(date +%F)", "2026-11-27")
        for line in as_read.splitlines():
            if line.startswith("hicachectl "):
                arguments = shlex.split(line, comments=True)[1:]
                found.append(list(itertools.takewhile(lambda text: text != ">", arguments)))
    return found


@pytest.mark.parametrize("arguments", commands(), ids=" ".join)
def test_the_commands_of_the_readme_are_understood(arguments: list[str]) -> None:
    check_arguments(arguments)


def test_both_documents_have_the_same_lines_for_cron() -> None:
    lines = crontab_lines()
    assert len(lines) == 6
    assert lines[:3] == lines[3:]


@pytest.mark.parametrize("line", crontab_lines()[:3], ids=["verify", "prewarm", "rm"])
def test_a_crontab_line_is_understood(line: str) -> None:
    fields = line.split(None, 5)
    assert len(fields) == 6
    assert "%" not in fields[5].replace("\\%", "")  # cron makes an unescaped one a line end
    check_arguments(shlex.split(fields[5])[1:])
