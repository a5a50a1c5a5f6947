"""The README's examples for schedulers: what they call exists, and their files are valid."""

from __future__ import annotations

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

README = Path(__file__).parents[1] / "README.md"


def blocks() -> list[str]:
    """The indented blocks of the README."""
    found: list[list[str]] = [[]]
    for line in README.read_text().splitlines():
        if line.startswith("    ") or (not line.strip() and found[-1]):
            found[-1].append(line)
        elif found[-1]:
            found.append([])
    return [dedent("\n".join(block)).strip() + "\n" for block in found if block]


def block_with(text: str) -> str:
    """The only block that contains a text."""
    (block,) = [block for block in blocks() if text in block]
    return block


def check_arguments(arguments: list[str]) -> None:
    """Let click read a command line, and run nothing."""
    own = next(at for at, text in enumerate(arguments) if not text.startswith("-"))
    with click.Context(cli, **cli.context_settings) as ctx:
        command = cli.get_command(ctx, arguments[own])
        assert command is not None, arguments[own]
        with command.make_context(arguments[own], arguments[own + 1 :], parent=ctx):
            pass


def commands() -> list[list[str]]:
    """Every `hicachectl …` of the README's blocks."""
    found = []
    for block in blocks():
        for line in block.replace("\\\n", " ").splitlines():
            if line.startswith("hicachectl "):
                found.append(shlex.split(line, comments=True)[1:])
    return found


@pytest.mark.parametrize("arguments", commands(), ids=" ".join)
def test_the_commands_of_the_readme_are_understood(arguments: list[str]) -> None:
    check_arguments(arguments)


def test_the_crontab_line_is_understood() -> None:
    fields = block_with("40 5 * * 1-5  hicachectl").split(None, 5)
    assert len(fields) == 6
    check_arguments(shlex.split(fields[5])[1:])


def test_the_units_of_systemd_are_valid(tmp_path: Path) -> None:
    text = block_with("OnCalendar=")
    service, timer = text.split("\n\n[Unit]", 1)
    (line,) = [line for line in service.splitlines() if line.startswith("ExecStart=")]
    check_arguments(shlex.split(line.removeprefix("ExecStart="))[1:])
    tool = need_tool("systemd-analyze", "systemd")
    (tmp_path / "hicachectl-prewarm.service").write_text(
        service.replace("/usr/local/bin/hicachectl", "/bin/true")
    )
    (tmp_path / "hicachectl-prewarm.timer").write_text("[Unit]" + timer)
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
