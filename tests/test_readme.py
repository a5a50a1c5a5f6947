"""Examples in README.md and hicachectl-scheduling(7): commands parse, files are valid."""

from __future__ import annotations

import itertools
import re
import shlex
import subprocess
from pathlib import Path
from textwrap import dedent
from typing import Any

import click
import kubernetes_validate
import pytest
import yaml

from hicachectl.cli.group import cli
from tests.skips import need_tool

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


def block_with(text: str) -> str:
    """Return the only block of the manual page that contains a text."""
    (block,) = [block for block in manual_blocks() if text in block]
    return block


def crontab_lines() -> list[str]:
    """Return the lines for cron of both documents."""
    lines = [line for block in readme_blocks() + manual_blocks() for line in block.splitlines()]
    return [line for line in lines if "* * " in line and "hicachectl -q" in line]


def check_arguments(arguments: list[str]) -> None:
    """Parse a command line with click without running the command."""
    own = next(at for at, text in enumerate(arguments) if not text.startswith("-"))
    with click.Context(cli, **cli.context_settings) as ctx:
        command = cli.get_command(ctx, arguments[own])
        assert command is not None, arguments[own]
        with command.make_context(arguments[own], arguments[own + 1 :], parent=ctx):
            pass


def commands() -> list[list[str]]:
    """Return the arguments of each `hicachectl …` in the README's blocks, without redirection."""
    found = []
    for block in readme_blocks():
        for line in block.replace("\\\n", " ").splitlines():
            if line.startswith("hicachectl "):
                arguments = shlex.split(line, comments=True)[1:]
                found.append(list(itertools.takewhile(lambda text: text != ">", arguments)))
    return found


@pytest.mark.parametrize("arguments", commands(), ids=" ".join)
def test_the_commands_of_the_readme_are_understood(arguments: list[str]) -> None:
    check_arguments(arguments)


def test_both_documents_have_the_same_lines_for_cron() -> None:
    lines = crontab_lines()
    assert len(lines) == 4
    assert lines[:2] == lines[2:]


@pytest.mark.parametrize("line", crontab_lines()[:2], ids=["verify", "prewarm"])
def test_a_crontab_line_is_understood(line: str) -> None:
    fields = line.split(None, 5)
    assert len(fields) == 6
    assert "%" not in fields[5].replace("\\%", "")  # cron makes an unescaped one a line end
    check_arguments(shlex.split(fields[5])[1:])


def test_the_units_of_systemd_are_valid(tmp_path: Path) -> None:
    service, timer = block_with("ExecStart="), block_with("OnCalendar=")
    (line,) = [line for line in service.splitlines() if line.startswith("ExecStart=")]
    check_arguments(shlex.split(line.removeprefix("ExecStart="))[1:])
    tool = need_tool("systemd-analyze", "systemd")
    (tmp_path / "hicachectl-prewarm.service").write_text(
        service.replace("/usr/local/bin/hicachectl", "/bin/true")
    )
    (tmp_path / "hicachectl-prewarm.timer").write_text(timer)
    done = subprocess.run(
        [tool, "verify", *map(str, tmp_path.iterdir())],
        capture_output=True,
        text=True,
        check=False,
    )
    ours = [line for line in done.stderr.splitlines() if "hicachectl-prewarm" in line]
    assert not ours, done.stderr


def test_the_cron_job_of_kubernetes_is_valid() -> None:
    job: dict[str, Any] = yaml.safe_load(block_with("kind: CronJob"))
    kubernetes_validate.validate(job, kubernetes_validate.latest_version(), strict=True)
    (container,) = job["spec"]["jobTemplate"]["spec"]["template"]["spec"]["containers"]
    check_arguments(container["args"])


def test_a_cron_job_that_is_wrong_would_be_noticed() -> None:
    job = yaml.safe_load(block_with("kind: CronJob"))
    job["spec"]["jobTemplate"]["spec"]["restartPolicy"] = "Never"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, kubernetes_validate.latest_version(), strict=True)
