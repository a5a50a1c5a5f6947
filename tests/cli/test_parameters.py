"""Values that every parameter refuses: an empty text, an empty member of a list, a second one."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

import click
import pytest

from hicachectl.cli.group import COMMANDS, cli
from hicachectl.cli.parameters import Argument, CommaList, Option, long_name
from hicachectl.cli.settings import every_command
from tests.stores import contents, put_pages

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.conftest import Invoke


def commands() -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Yield the words of each command and group with it, the program itself with no word."""
    yield (), cli
    ctx = click.Context(cli)
    for name in COMMANDS:
        command = cli.get_command(ctx, name)
        assert command is not None
        yield (name,), command
        for part, below in getattr(command, "commands", {}).items():
            yield (name, part), below


ALL = {" ".join(words) or "hicachectl": (words, command) for words, command in commands()}


def with_values(command: click.Command) -> Iterator[tuple[click.Parameter, str, list[str]]]:
    """Yield each parameter that takes a value, its name in messages, and the words before it."""
    before: list[str] = []
    for parameter in command.params:
        if isinstance(parameter, click.Argument):
            yield parameter, parameter.human_readable_name.strip("[]"), list(before)
            before.append("x")
        elif isinstance(parameter, click.Option) and not (parameter.is_flag or parameter.count):
            yield parameter, long_name(parameter), [long_name(parameter)]


@pytest.mark.parametrize("name", ALL)
def test_every_parameter_is_of_the_classes_that_refuse(name: str) -> None:
    for parameter, named, _ in with_values(ALL[name][1]):
        assert isinstance(parameter, Option | Argument), named


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_no_parameter_takes_an_empty_value(invoke: Invoke, name: str) -> None:
    words, command = ALL[name]
    for parameter, named, before in with_values(command):
        for empty in ("", " ", "\t \n"):
            said = invoke(*words, *before, empty, exit_code=2).stderr
            assert said.startswith(f"hicachectl: {named}: empty; give a value"), said
            assert said.count("\n") == 1
        if isinstance(parameter.type, CommaList):
            for empty in (",", "names,", ",names", "names,,sizes", "names, ,sizes"):
                said = invoke(*words, *before, empty, exit_code=2).stderr
                assert said.startswith(f"hicachectl: {named}: {empty!r} has an empty member; ")


@pytest.mark.parametrize("name", ALL)
def test_no_option_of_one_value_takes_two(invoke: Invoke, name: str) -> None:
    words, command = ALL[name]
    for parameter, named, before in with_values(command):
        if isinstance(parameter, click.Argument) or parameter.multiple:
            continue
        given = (*before, "1", parameter.opts[0], "2")
        said = invoke(*words, *given, exit_code=2).stderr
        hidden = isinstance(parameter, Option) and parameter.hide_input
        values = "2" if hidden else "'1' and '2'"
        assert said == (f"hicachectl: {named}: takes one value, but has {values}; give only one\n")


def test_options_that_show_a_list_with_commas_are_of_its_type() -> None:
    for _, command in commands():
        for option, named, _ in with_values(command):
            text = f"{option.metavar or ''} {getattr(option, 'help', '')}"
            if re.search(r"\w,\w", text):
                assert isinstance(option.type, CommaList), named


def test_an_alias_is_the_same_option(invoke: Invoke, store: Path, tmp_path: Path) -> None:
    words = ("migrate", store, tmp_path / "new", "--page", "ab")
    said = invoke(*words, "--match", "ac", exit_code=2).stderr
    assert "takes one value, but has 'ab' and 'ac'" in said
    assert not (tmp_path / "new").exists()
    invoke(*words, "--match", "ab")


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store of pages of two models."""
    directory = tmp_path / "store"
    directory.mkdir()
    put_pages(directory, range(3), "_m_0_1")
    put_pages(directory, range(3), "_n_0_1")
    return directory


@pytest.mark.parametrize(
    "words",
    [
        ("rm", "--tag", ""),
        ("rm", "--model", ""),
        ("rm", "--model", "m", "--model", "n"),
        ("rm", "--model", "m", "--tag", ""),
        ("migrate", "--move", "--model", ""),
        ("migrate", "--move", "--page="),
    ],
)
def test_nothing_is_removed_by_an_unset_variable(
    invoke: Invoke, store: Path, tmp_path: Path, words: tuple[str, ...]
) -> None:
    before = contents(store)
    new = [tmp_path / "new"] if words[0] == "migrate" else []
    invoke(words[0], store, *new, *words[1:], "--yes", exit_code=2)
    assert contents(store) == before


def test_the_same_value_twice_is_one_value(invoke: Invoke, store: Path) -> None:
    invoke("rm", store, "--model", "m", "--model", "m", "--yes")
    assert all("_n_" in name for name in contents(store) if name.endswith(".bin"))


def test_the_untagged_pages_have_a_word(invoke: Invoke, store: Path) -> None:
    assert "--tag cannot be combined with --no-tag" in (
        invoke("rm", store, "--tag", "t", "--no-tag", "--yes", exit_code=2).stderr
    )
    assert "give a value, or --no-tag" in invoke("rm", store, "--tag", "", exit_code=2).stderr
    document = invoke("rm", store, "--no-tag", "--yes", "--format", "json").document
    assert document["pages"] == 6


def test_empty_variables_count_as_not_set(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, store: Path
) -> None:
    for command in every_command(click.Context(cli)):
        for option in command.params:
            if isinstance(option.envvar, str):
                monkeypatch.setenv(option.envvar, "")
    assert any(name.startswith("HICACHECTL_") for name in os.environ)
    assert len(invoke("ls", store, "--format", "json").document["pages"]) == 6


def test_a_variable_of_blanks_is_refused_by_its_name(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, store: Path
) -> None:
    monkeypatch.setenv("HICACHECTL_PROFILE", " ")
    said = invoke("ls", store, exit_code=2).stderr
    assert said.startswith("hicachectl: HICACHECTL_PROFILE: empty; ")
