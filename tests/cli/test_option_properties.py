"""Each option says what runs in parts and suggested commands do with it."""

from __future__ import annotations

import json
from importlib import import_module
from typing import TYPE_CHECKING

import click
import pytest

from hicachectl.cli.group import COMMANDS, cli
from hicachectl.cli.parameters import TRANSFORM, long_name, options_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from hicachectl.cli.parameters import Option
    from tests.conftest import Invoke


def commands_that_call(function: str) -> Iterator[str]:
    """Yield the commands whose module calls a function."""
    for name in COMMANDS:
        if hasattr(import_module(f"hicachectl.cli.commands.{name}"), function):
            yield name


DIVIDED = tuple(commands_that_call("run_divided"))
SUGGESTING = tuple(commands_that_call("mending_of"))


def options_named(name: str) -> list[Option]:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    return options_of(command)


def test_the_commands_are_found() -> None:
    assert set(DIVIDED) == {"verify", "migrate", "prewarm"}
    assert set(SUGGESTING) == {"verify", "report"}


@pytest.mark.parametrize("name", DIVIDED)
def test_every_option_says_what_a_run_in_parts_does_with_it(name: str) -> None:
    for option in options_named(name):
        assert option.divided is not None, f"{long_name(option)}: declare it with divided="


@pytest.mark.parametrize("name", SUGGESTING)
def test_every_option_says_whether_a_suggested_command_repeats_it(name: str) -> None:
    for option in options_named(name):
        assert option.repeats is not None, f"{long_name(option)}: declare it with repeats="


@pytest.mark.parametrize("name", SUGGESTING)
def test_the_suggested_command_has_the_options_that_it_repeats(name: str) -> None:
    """Findings are mended by another run of verify."""
    known = {long_name(option) for option in options_named("verify")}
    assert {long_name(option) for option in options_named(name) if option.repeats} <= known


@pytest.mark.parametrize("name", DIVIDED)
def test_parts_compare_the_options_that_they_must_have_in_common(
    invoke: Invoke, name: str, tmp_path: Path
) -> None:
    source, target, run = tmp_path / "source", tmp_path / "target", tmp_path / "run"
    invoke("demo", source, "--pages", 1)
    profile, asked = source / ".hicachectl" / "demo.toml", tmp_path / "asked.jsonl"
    asked.write_text(json.dumps(list(range(16))))
    words: dict[str, list[object]] = {
        "verify": [source, "--repair", "delete", "--dry-run"],
        "migrate": [source, target],
        "prewarm": [target, "--from", source, "--token-ids", asked],
    }
    invoke(name, *words[name], "--profile", profile, "--shard", "0/1", "--run", run)
    compared = set(json.loads((run / "run.json").read_text())["identity"])

    def is_compared(option: Option) -> bool:
        """A filter without a value, an alias and a store stand in the identity by other names."""
        known = {long_name(option), f"--{option.name}", str(option.name)}
        return bool(compared & known) or (option.name, "--tag" in compared) == ("no_tag", True)

    for option in options_named(name):
        assert option.divided is not None
        stands_in_profile = option.section is TRANSFORM or option.section.describes
        if not (stands_in_profile or option.divided.shared_by):
            assert is_compared(option) == option.divided.same, long_name(option)
