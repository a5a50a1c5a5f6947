"""Completion of stores and words of options, as the shells ask for it."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from hicachectl.cli.group import cli
from tests.stores import put, put_pages

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Invoke


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store of 100 pages of two models, named prod in the config."""
    directory = tmp_path / "store"
    directory.mkdir()
    put_pages(directory, range(100), "_org-small_0_2")
    put_pages(directory, range(2), "_org-large_0_1")
    put(directory, "notes.txt")
    return directory


@pytest.fixture
def config(tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A config with three stores, in HICACHECTL_CONFIG."""
    path = tmp_path / "config.toml"
    path.write_text(
        f'[stores.prod]\nurl = "{store}"\n[stores.preview]\nurl = "mooncake://nowhere:1"\n'
        f'[stores.gone]\nurl = "{tmp_path / "gone"}"\n'
    )
    monkeypatch.setenv("HICACHECTL_CONFIG", str(path))
    return path


def asked(*words: str, shell: str = "bash") -> list[str]:
    """Return what the program answers to a completion script; it must say nothing else."""
    done = subprocess.run(
        [sys.executable, "-m", "hicachectl"],
        env={
            **os.environ,
            "_HICACHECTL_COMPLETE": f"{shell}_complete",
            "COMP_WORDS": ("\n" if shell == "zsh" else " ").join(["hicachectl", *words]),
            "COMP_CWORD": words[-1] if shell == "fish" else str(len(words)),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


def offered(option: str, *words: str, incomplete: str = "") -> list[str]:
    """Return what a parameter offers after some words."""
    with cli.make_context("hicachectl", [*words, option], resilient_parsing=True) as root:
        name, command, rest = cli.resolve_command(root, [*words, option])
        assert command is not None
        with command.make_context(name, rest, parent=root, resilient_parsing=True) as ctx:
            found = (p for p in command.params if option in p.opts)
            param = command.params[0] if option == "STORE" else next(found)
            return [item.value for item in param.shell_complete(ctx, incomplete)]


@pytest.mark.slow
@pytest.mark.usefixtures("config")
def test_stores_of_the_config_and_directories_are_offered() -> None:
    assert asked("ls", "pr") == ["dir,pr", "plain,preview:", "plain,prod:"]
    assert asked("migrate", "prod:", "gon") == ["dir,gon", "plain,gone:"]


@pytest.mark.slow
@pytest.mark.usefixtures("config")
def test_bash_gets_what_follows_the_last_piece_of_a_word() -> None:
    assert asked("ls", "--format=js") == ["plain,json", "plain,jsonl"]
    assert asked("ls", "prod:", "--form") == ["plain,--format"]
    assert asked("migrate", "file:///a", "--to-tp", "2", "pre") == ["dir,pre", "plain,preview:"]


@pytest.mark.slow
def test_help_offers_the_commands_of_the_group_before_it() -> None:
    assert asked("help", "pre") == ["plain,prewarm"]
    assert asked("help", "quarantine", "") == ["plain,list", "plain,purge"]
    assert asked("help", "ls", "") == asked("help", "zzz", "") == []


def test_lists_offer_what_they_lack(invoke: Invoke) -> None:
    assert offered("--state", "ls", "/x", incomplete="whole,") == [
        "whole,partial", "whole,orphan", "whole,unknown",
    ]  # fmt: skip
    assert offered("--checks", "verify", "/x", incomplete="names,si") == ["names,sizes"]
    assert offered("--format", "ls", "/x", incomplete="p") == ["parquet"]
    assert offered("--repair-code", "verify", "/x", incomplete="all") == ["all-zero"]


@pytest.mark.slow
@pytest.mark.parametrize("text", ["not toml [", "[stores.a]\nurl = 3\n"])
def test_a_bad_config_is_silent(config: Path, text: str) -> None:
    config.write_text(text)
    assert asked("ls", "pr") == ["dir,pr"]
    assert asked("rm", "--bogus", "prod:", "--st") in ([], ["plain,--state"])
