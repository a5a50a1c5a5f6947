"""Help: own options and examples on one screen, everything with --help-all; close names.

The commands help and version, and names by which other programs call what a command does.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import click
import pytest

from hicachectl import __version__
from hicachectl.cli.command import Command, Group
from hicachectl.cli.group import _OTHER_NAMES, COMMANDS, cli
from hicachectl.cli.parameters import sections

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.conftest import Invoke

# Commands with many options of their own need more lines than a screen has.
_LINES = {"verify": 44, "migrate": 44, "prewarm": 52, "rm": 47, "report": 42}


def every_command() -> Iterator[tuple[list[str], click.Command]]:
    """Yield the words of each command with the command, subcommands included."""
    ctx = click.Context(cli)
    for name in COMMANDS:
        command = cli.get_command(ctx, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from (([name, part], command.commands[part]) for part in command.commands)
        else:
            yield [name], command


def command_of(words: list[str]) -> click.Command:
    """Return the command of some words."""
    return next(command for own, command in every_command() if own == words)


COMMAND_WORDS = [pytest.param(words, id=" ".join(words)) for words, _ in every_command()]


def test_all_commands_are_of_our_classes() -> None:
    for words, command in every_command():
        assert isinstance(command, Command), words
    for name in COMMANDS:
        assert isinstance(cli.get_command(click.Context(cli), name), Command | Group), name


@pytest.mark.parametrize("words", COMMAND_WORDS)
def test_help_fits_a_screen_and_names_the_sections_that_it_leaves_out(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = invoke(*words, "--help").stdout
    assert len(shown.splitlines()) <= _LINES.get(words[0], 40), shown
    command = command_of(words)
    for title, options in sections(command.params).items():
        first = max(options[0].opts, key=len)
        if first != "--help-all":  # a command without options of its own
            assert title in shown
            assert first in shown, title
    if command.epilog:
        assert command.epilog.replace("\b\n", "").splitlines()[1].strip() in shown


@pytest.mark.parametrize("words", COMMAND_WORDS)
def test_help_all_has_every_option_once_and_the_whole_description(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = invoke(*words, "--help-all").stdout
    command = command_of(words)
    shown_options = [o for o in command.params if isinstance(o, click.Option) and not o.hidden]
    options = [max(o.opts, key=len) for o in shown_options]
    described = shown[shown.index("\nOptions:") :]
    for option in [*options, "--help"]:
        lines = re.findall(rf"^  (?:-\w, )?{option}\b(?!-)", described, re.MULTILINE)
        assert len(lines) == 1, option
    last = " ".join((command.help or "").split("\n\n")[-1].split()[-4:])
    assert last in " ".join(shown.split())


def test_own_options_and_examples_come_before_the_profile_options(invoke: Invoke) -> None:
    shown = invoke("ls", "--help-all").stdout
    places = [shown.index(f"\n{title}") for title in ("Options:", "  Examples:", "Profile:")]
    assert places == sorted(places)
    assert "--sort-by" in shown[places[0] : places[1]]
    assert "--kv-cache-dtype" in shown[places[2] :]


def test_help_all_needs_no_argument_and_runs_nothing(invoke: Invoke) -> None:
    assert invoke("rm", "--yes", "--help-all").stdout.startswith("Usage: hicachectl rm ")


@pytest.mark.parametrize("name", ["json", "jsonl", "csv", "parquet", "table", "arrow"])
def test_a_format_as_the_output_file_is_refused(invoke: Invoke, name: str) -> None:
    for words in (["ls", "/x"], ["verify", "/x"], ["rm", "/x"], ["prewarm"]):
        assert invoke(*words, "-o", name, exit_code=2).stderr == (
            f"hicachectl: -o {name}: is a format, not a file; use --format {name}, or -o ./{name} "
            "for a file of that name\n"
        )


def test_a_file_can_have_the_name_of_a_format(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "store").mkdir()
    invoke("ls", "store", "--format", "csv", "-o", "./json")
    assert (tmp_path / "json").read_text().startswith('"page"')


@pytest.mark.parametrize("words", [*COMMAND_WORDS, [], ["pack"], ["quarantine"]])
def test_help_of_a_command_is_its_own_help(invoke: Invoke, words: list[str]) -> None:
    assert invoke("help", *words) == invoke(*words, "--help")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("verfy", "No such command 'verfy'; did you mean verify"),
        ("quarantine prge", "No such command 'prge'; did you mean purge?"),
        ("quarantine du", "No such command 'du'; see hicachectl quarantine -h"),
        ("df", "No such command 'df'; hicachectl ls --summary shows "),
        ("ls x", "hicachectl ls has no commands of its own; see hicachectl ls --help"),
    ],
)
def test_help_of_no_command(invoke: Invoke, line: str, said: str) -> None:
    assert invoke("help", *line.split(), exit_code=2).stderr.startswith(f"hicachectl: {said}")


def test_version_is_that_of_the_option(invoke: Invoke) -> None:
    assert invoke("version") == invoke("--version") == (f"hicachectl {__version__}\n", "")


OTHER_NAMES = [(name, text) for names, text in _OTHER_NAMES.items() for name in names.split()]


@pytest.mark.parametrize(("name", "text"), OTHER_NAMES)
def test_the_name_of_another_program_is_answered_by_ours(
    invoke: Invoke, name: str, text: str
) -> None:
    said = invoke(name, "prod:", "--depth", 1, exit_code=2).stderr
    assert said == f"hicachectl: No such command {name!r}; hicachectl {text}\n"


@pytest.mark.parametrize("text", _OTHER_NAMES.values())
def test_an_answer_names_a_command_and_its_option(text: str) -> None:
    first, second, *_ = text.split()
    command = cli.get_command(click.Context(cli), first)
    assert command is not None
    if isinstance(command, click.Group):
        assert second in command.commands
    if second.startswith("--"):
        assert any(second in option.opts for option in command.params)


def test_each_other_name_has_one_answer_and_is_no_command() -> None:
    names = [name for name, _ in OTHER_NAMES]
    assert len(set(names)) == len(names)
    assert not set(names) & set(COMMANDS)
