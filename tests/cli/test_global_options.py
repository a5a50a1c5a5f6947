"""-v, -q and --config mean the same before and behind the name of a command."""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING

import click
import pytest

from hicachectl.cli.command import global_options
from hicachectl.cli.group import cli
from hicachectl.cli.parameters import long_name
from hicachectl.cli.settings import every_command
from tests.cli.test_completion import asked
from tests.stores import put_pages

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Invoke


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A config in which prod names a store that gets a remark, as a file is no object of it."""
    store, path = tmp_path / "store", tmp_path / "config.toml"
    store.mkdir()
    put_pages(store, range(2), "_m_0_1")
    (store / "notes.txt").write_text("")
    path.write_text(f'[stores.prod]\nurl = "{store}"\n')
    return path


def test_every_command_has_them_once() -> None:
    names = [name for option in global_options() for name in option.opts]
    for command in every_command(click.Context(cli)):
        counts = Counter(name for option in command.params for name in option.opts)
        assert [counts[name] for name in names] == [1] * len(names), command.name
        assert set(counts.values()) == {1}, command.name


PLACES = ["{} ls prod:", "ls {} prod:", "ls prod: {}", "ls prod: --limit 1 {} --format table"]


@pytest.mark.parametrize("line", PLACES)
def test_config_and_quiet_stand_anywhere(invoke: Invoke, config: Path, line: str) -> None:
    words = line.format(f"--config {config}").split()
    shown = invoke(*words)
    assert shown.stdout.startswith("PAGE")
    assert shown.stderr
    assert invoke(*line.format(f"-q --config {config}").split()) == (shown.stdout, "")


@pytest.mark.parametrize("line", ["{} quarantine list X", "quarantine {} list X"])
def test_they_stand_behind_the_name_of_a_group(invoke: Invoke, config: Path, line: str) -> None:
    words = line.format(f"--config {config}").replace("X", "gone:").split()
    assert f"{config} (it names prod)" in invoke(*words, exit_code=2).stderr


def test_a_store_name_with_a_typing_error_is_recognised(
    invoke: Invoke, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name without its colon is a path. It names the store only if the path does not exist."""
    monkeypatch.chdir(tmp_path)
    given = ("--config", config, "ls")
    said = invoke(*given, "prod", exit_code=3).stderr
    assert said == (
        f"hicachectl: {tmp_path}/prod: No such file or directory; did you mean prod:?\n"
    )
    assert "did you mean" not in invoke(*given, "prods", exit_code=3).stderr
    assert "did you mean" not in invoke(*given, "./prod", exit_code=3).stderr
    said = invoke(*given, "pord:", exit_code=2).stderr
    assert said == f"hicachectl: No store 'pord' in {config} (it names prod); did you mean prod:?\n"
    assert "did you mean" not in invoke(*given, "backup:", exit_code=2).stderr
    (tmp_path / "prod").mkdir()
    assert f"{tmp_path}/prod is empty" in invoke(*given, "prod").stderr


def test_no_directory_with_the_name_of_a_store_is_created(
    invoke: Invoke, config: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forgotten colon does not fill the file system of the working directory."""
    monkeypatch.chdir(tmp_path)
    copy = ("--config", config, "migrate", source)
    assert invoke(*copy, "prod", exit_code=2).stderr == (
        "hicachectl: prod: does not exist, and a store has this name; write prod: for the store, "
        "or ./prod for a new directory\n"
    )
    assert not (tmp_path / "prod").exists()
    invoke(*copy, "./prod")
    assert (tmp_path / "prod").is_dir()
    invoke(*copy, "prod")


@pytest.mark.parametrize(
    ("line", "level"),
    [("ls X", "WARNING"), ("-v ls X", "INFO"), ("ls X -v", "INFO"), ("-v ls -v X", "DEBUG"),
     ("ls X -vv", "DEBUG"), ("pack info X -vv", "DEBUG"), ("ls -q X -v", "ERROR")],
)  # fmt: skip
def test_each_v_counts(invoke: Invoke, tmp_path: Path, line: str, level: str) -> None:
    words = [str(tmp_path) if word == "X" else word for word in line.split()]
    invoke(*words, exit_code=3 if words[0] == "pack" else 0)
    assert logging.getLevelName(logging.getLogger().level) == level


@pytest.mark.parametrize(
    "line",
    [
        "--config {} ls prod: --config {}",
        "ls --config {} prod: --config {}",
        "--config {} pack info X --config {}",
        "pack --config {} info X --config {}",
    ],
)
def test_two_configs_are_refused(invoke: Invoke, config: Path, line: str) -> None:
    said = invoke(*line.format(config, "b.toml").split(), exit_code=2).stderr
    assert said == (
        f"hicachectl: --config: takes one value, but has '{config}' and 'b.toml'; give only one\n"
    )


def test_one_config_may_be_given_twice(invoke: Invoke, config: Path) -> None:
    assert invoke("--config", config, "ls", "prod:", "--config", config).stdout


def test_the_command_line_beats_the_variable_anywhere(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, config: Path
) -> None:
    monkeypatch.setenv("HICACHECTL_VERBOSE", "1")
    for words in (["-v", "ls"], ["ls", "-v"]):
        invoke(*words, config.parent)
        assert logging.getLogger().level == logging.INFO
    monkeypatch.setenv("HICACHECTL_CONFIG", "/none")
    said = invoke("ls", "prod:", exit_code=2).stderr
    assert said.startswith("hicachectl: HICACHECTL_CONFIG: config /none: cannot read")
    invoke("ls", "prod:", "--config", config)
    said = invoke("ls", "prod:", "--config", "/gone", exit_code=2).stderr
    assert said.startswith("hicachectl: config /gone: cannot read")
    assert "HICACHECTL_CONFIG" not in said


@pytest.mark.parametrize("before", [True, False])
def test_a_suggested_command_names_the_config_once(
    invoke: Invoke, config: Path, tmp_path: Path, *, before: bool
) -> None:
    words = ["verify", "prod:", "--shard", "1/2", "--run", tmp_path / "run", "--wait", "0s"]
    given = ["--config", config]
    said = invoke(*(given + words if before else words + given), exit_code=3).stderr
    assert said.splitlines()[-1].count(f"--config {config}") == 1


@pytest.mark.slow
def test_shells_offer_them_and_the_stores_of_a_config_behind_the_name(config: Path) -> None:
    assert asked("ls", "--conf") == ["plain,--config"]
    assert asked("ls", "--config", str(config), "pr") == ["dir,pr", "plain,prod:"]
    assert asked("--config", str(config), "ls", "pr") == ["dir,pr", "plain,prod:"]


def test_the_program_says_what_they_are(invoke: Invoke) -> None:
    said = [invoke(*words).stdout for words in (["--help"], ["ls", "--help-all"])]
    for option in global_options():
        assert all(long_name(option) in text for text in said)
