"""Completion of stores and words of options, as the shells ask for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from hicachectl.cli.commands.completion import joined_words
from hicachectl.cli.group import cli
from tests.skips import need_tool
from tests.stores import put, put_pages

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Invoke


# The program, with time for a busy machine: it answers nothing after its limits.
PATIENT = (
    "import hicachectl.cli.commands.completion as c; c._LIMIT_S = 100.0;"
    "from hicachectl.__main__ import main; main()"
)


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
        [sys.executable, "-c", PATIENT],
        env={
            **os.environ,
            "_HICACHECTL_COMPLETE": f"{shell}_complete",
            "COMP_WORDS": (" " if shell == "fish" else "\n").join(["hicachectl", *words]),
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


def test_commands_and_options_are_completed() -> None:
    assert asked("ver") == ["plain,verify"]
    assert "plain,--summary" in asked("ls", "--su")


@pytest.mark.usefixtures("config")
def test_stores_of_the_config_and_directories_are_offered() -> None:
    assert asked("ls", "pr") == ["dir,pr", "plain,preview:", "plain,prod:"]
    assert asked("migrate", "prod", ":", "gon") == ["dir,gon", "plain,gone:"]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
@pytest.mark.usefixtures("config")
def test_other_shells_get_the_same(shell: str) -> None:
    assert "prod:" in "\n".join(asked("ls", "prod", shell=shell))


@pytest.mark.usefixtures("config")
def test_bash_divides_urls_at_colons() -> None:
    assert asked("migrate", "prod", ":", "pre") == ["dir,pre", "plain,preview:"]
    assert asked("ls", "prod", ":", "--form") == ["plain,--format"]


def test_words_of_bash_are_joined_as_they_were_written() -> None:
    for words in (
        ["ls", "prod:", "--model", ""],
        ["ls", "prod:", "x"],
        ["migrate", "prod:", "/mnt/x"],
        ["migrate", "file:///a", "mooncake://host:50051", ""],
        ["ls", "file:", "--objects"],
    ):
        split = [
            part
            for word in words
            for part in (word.replace(":", " : ").split() if ":" in word else [word])
        ]
        assert joined_words(split) == words


def test_lists_offer_what_they_lack(invoke: Invoke) -> None:
    assert offered("--state", "ls", "/x", incomplete="whole,") == [
        "whole,partial", "whole,orphan", "whole,unknown",
    ]  # fmt: skip
    assert offered("--checks", "verify", "/x", incomplete="names,si") == ["names,sizes"]
    assert offered("--format", "ls", "/x", incomplete="p") == ["parquet"]
    assert offered("--repair-code", "verify", "/x", incomplete="all") == ["all-zero"]


def test_explain_offers_the_codes() -> None:
    assert asked("explain", "missing-") == [
        "plain,missing-pool", "plain,missing-part", "plain,missing-rank",
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["not toml [", "[stores.a]\nurl = 3\n"])
def test_a_bad_config_is_silent(config: Path, text: str) -> None:
    config.write_text(text)
    assert asked("ls", "pr") == ["dir,pr"]
    assert asked("rm", "--bogus", "prod:", "--st") in ([], ["plain,--state"])


@pytest.mark.slow
def test_a_file_system_that_hangs_ends_after_a_second(tmp_path: Path) -> None:
    """A pipe in place of the config hangs in open(2), as a dead server of NFS does."""
    pipe = tmp_path / "config.toml"
    os.mkfifo(pipe)
    code = (
        "import os, hicachectl.backends.urls as urls;"
        f"urls.load_config = lambda path: os.open({str(pipe)!r}, os.O_RDONLY);"
        "from hicachectl.__main__ import main; main()"
    )
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={
            **os.environ,
            "_HICACHECTL_COMPLETE": "bash_complete",
            "COMP_WORDS": "hicachectl\nls\nx",
            "COMP_CWORD": "2",
        },
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    assert time.monotonic() - started >= 0.9  # it did hang


@pytest.mark.usefixtures("config")
def test_bash_completes_with_the_printed_script(invoke: Invoke, tmp_path: Path) -> None:
    script = tmp_path / "completion.bash"
    script.write_text(invoke("completion", "bash").stdout)
    program = tmp_path / "hicachectl"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{PATIENT}"\n')
    program.chmod(0o755)
    shell = (
        f"source {script}; COMP_WORDS=(hicachectl ls pro); COMP_CWORD=2;"
        f"_hicachectl_completion {program}; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    )
    done = subprocess.run(
        [need_tool("bash"), "-c", shell], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["prod:"]


@pytest.mark.parametrize(
    "name",
    ["$(touch x)", "`id`", "a;id", "a b", "*", "~", "!!", 'a"', "a'", "a\\b", "\x1b[31m"],
)
def test_names_that_mean_something_to_a_shell_are_not_offered(config: Path, name: str) -> None:
    entry = json.dumps(f"prod{name}")
    config.write_text(f'{config.read_text()}[stores.{entry}]\nurl = "/x"\n')
    assert offered("STORE", "ls", incomplete="prod") == ["prod", "prod:"]
