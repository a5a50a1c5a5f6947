"""Completion typed in real shells: bash, zsh and fish."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from tests.skips import need_tool
from tests.stores import page, put_pages
from tests.waiting import PATIENCE_S

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

HOSTILE = ["$(touch pwned)", "`touch pwned`", "x;touch pwned", "a\nb", "-x", "a b", "q'", 'q"', "*"]
LINES = {
    "ls pro": "ls prod:",
    "ls prod:": "ls prod:",
    "migrate prod: gon": "migrate prod: gone:",
    "ls prod: --mo": "ls prod: --model",  # which --model-config continues
    "ls prod: --obj": "ls prod: --objects",
    "ls prod: --model org-s": "ls prod: --model org-s",  # no store is listed on TAB
    "verify prod: --checks names,si": "verify prod: --checks names,sizes",
    "ls prod: --state whole,pa": "ls prod: --state whole,partial",
    f"show prod: {page(1)[:5]}": f"show prod: {page(1)[:5]}",
    "ls bad: --model o": "ls bad: --model o",
    "explain missing-po": "explain missing-pool",
}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home with stores, and a program that completes as hicachectl and prints its arguments."""
    store = tmp_path / "store"
    store.mkdir()
    put_pages(store, range(3), "_org-small_0_2", *(f"_{name}_0_1" for name in HOSTILE))
    settings = tmp_path / ".config" / "hicachectl"
    settings.mkdir(parents=True)
    (settings / "config.toml").write_text(
        f'[stores.prod]\nurl = "{store}"\n[stores.gone]\nurl = "{tmp_path}/gone"\n'
        f'[stores.bad]\nurl = "no://thing"\n[stores."$(touch pwned)"]\nurl = "/x"\n'
    )
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "hicachectl"
    program.write_text(
        "#!/bin/sh\n"
        f'[ -z "$_HICACHECTL_COMPLETE" ] || exec {sys.executable} -m hicachectl\n'
        'echo "<$*>"\n'
    )
    program.chmod(0o755)
    return tmp_path


def environment(home: Path) -> dict[str, str]:
    path = f"{home / 'bin'}:{os.environ['PATH']}"
    return {**os.environ, "HOME": str(home), "ZDOTDIR": str(home), "PATH": path, "TERM": "dumb",
            "COLUMNS": "200"}  # fmt: skip


def typed(home: Path, command: list[str], lines: list[str]) -> list[str]:
    """Type lines, each ended by Tab and Enter; return the arguments that the program then gets."""
    child, terminal = pty.fork()
    if not child:
        os.chdir(home)
        os.execvpe(command[0], command, environment(home))
    seen = b""
    given: list[str] = []
    end = time.monotonic() + PATIENCE_S
    try:
        for line in ["echo '<'ready'>'", *lines]:
            tab = "\t" if given else ""
            os.write(terminal, (f"hicachectl {line}{tab}\r" if given else f"{line}\r").encode())
            before, given = len(given), []
            while len(given) <= before:
                assert select.select([terminal], [], [], end - time.monotonic())[0], seen
                seen += os.read(terminal, 1 << 16)
                given = [
                    text.strip()[1:-1]
                    for text in seen.decode(errors="replace").splitlines()
                    if text.strip().startswith("<") and text.strip().endswith(">")
                ]
    finally:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(terminal)
    assert b"Traceback" not in seen
    assert b"rror" not in seen
    return given[1:]


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_tab_completes_what_is_typed(home: Path, shell: str) -> None:
    program = need_tool(shell)
    scripts = home / "scripts"
    scripts.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "hicachectl", "completion", shell],
        stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    (scripts / "_hicachectl").write_text(done.stdout)
    (home / ".zshrc").write_text(
        "PS1='$ '; setopt no_beep; unsetopt automenu; fpath=(~/scripts $fpath)\n"
        "autoload -Uz compinit; compinit -D -u\n"
    )
    (home / ".bashrc").write_text("PS1='$ '; . ~/scripts/_hicachectl\n")
    assert typed(home, [program, "-i"], list(LINES)) == list(LINES.values())
    assert not list(home.rglob("pwned"))


def test_fish_offers_whole_words(home: Path) -> None:
    fish = need_tool("fish")
    scripts = home / ".config" / "fish" / "completions"
    scripts.mkdir(parents=True)
    with (scripts / "hicachectl.fish").open("w") as script:
        subprocess.run(
            [sys.executable, "-m", "hicachectl", "completion", "fish"], stdout=script, check=True
        )
    asks = "\n".join(f"complete -C 'hicachectl {line}'; echo --" for line in LINES)
    done = subprocess.run(
        [fish, "-c", asks], env=environment(home), cwd=home, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    assert done.stderr == ""
    answers = [part.splitlines() for part in done.stdout.split("--\n")]
    for (line, whole), answer in zip(LINES.items(), answers, strict=False):
        words = {text.partition("\t")[0] for text in answer}  # for STORE, with directories
        assert whole == line or whole.split()[-1] in words, (line, words)
        assert not words & set(HOSTILE)
    assert not list(home.rglob("pwned"))
