"""The command line: help, exit codes, one-line errors, closed pipes and signals."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
from contextlib import redirect_stderr
from typing import TYPE_CHECKING

import click
import pytest

from hicachectl.__main__ import run
from hicachectl.cli.exit_codes import BAD_INPUT, UNAVAILABLE, exit_code
from hicachectl.cli.group import COMMANDS, cli
from hicachectl.formats import errors
from tests.stores import page, put_pages

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Invoke


@pytest.mark.parametrize("name", list(COMMANDS))
def test_the_table_of_commands_says_what_each_command_says(name: str) -> None:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    assert command.name == name
    assert command.help
    assert command.epilog
    assert "Examples:" in command.epilog


@pytest.mark.slow
def test_help_imports_nothing_heavy() -> None:
    """One process asks for the help of all commands in turn."""
    code = f"""
import sys
from hicachectl.__main__ import run
for arguments in ["--help"], *([name, "--help"] for name in {list(COMMANDS)}):
    assert run(arguments) == 0
    heavy = {{"torch", "pyarrow", "numpy", "mooncake", "tqdm"}} & set(sys.modules)
    assert not heavy, (arguments, heavy)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("command", ["ls", "show", "hits"])
def test_commands_that_look_import_no_operation(command: str, tmp_path: Path) -> None:
    """Each import delays the answer, and a store of one page shows most of the delay."""
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / f"{page(1)}_m.bin").write_bytes(b"kv")
    pages = tmp_path / "pages.jsonl"
    pages.write_text(json.dumps([page(1)]))
    words = {"show": [page(1)], "hits": ["--pages", str(pages)]}.get(command, [])
    code = f"""
import sys
from hicachectl.__main__ import run
assert run({[command, str(tmp_path / "store"), *words]}) == 0
rooms = {{name.split(".")[1] for name in sys.modules if name.startswith("hicachectl.")}}
unused = rooms & {{"api", "device", "kernels", "move", "parts", "prewarming", "report"}}
assert not unused, unused
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_exception_class_has_an_exit_code() -> None:
    classes = [
        v for v in vars(errors).values() if isinstance(v, type) and v is not errors.HicacheError
    ]
    assert {exit_code(cls("x")) for cls in classes} == {BAD_INPUT, UNAVAILABLE}


def one_line(invoke: Invoke, *arguments: object, exit_code: int) -> str:
    """Return the only line on stderr of a failing call; stdout must be empty."""
    outcome = invoke(*arguments, exit_code=exit_code)
    assert outcome.stdout == ""
    assert "Traceback" not in outcome.stderr
    lines = outcome.stderr.splitlines()
    assert len(lines) == 1, outcome.stderr
    return lines[0]


def test_log_messages_go_to_the_stderr_of_the_moment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Proves that a command leaves no logger that writes to a stream of earlier."""
    earlier = io.StringIO()
    with redirect_stderr(earlier):
        assert run(["-v", "ls", str(tmp_path)]) == 0
    said = earlier.getvalue()
    earlier.close()
    logging.getLogger("hicachectl.device").warning("a \x1b[31m%s\nof two lines", "two words")
    assert capsys.readouterr().err == "hicachectl: a \\x1b[31mtwo words\nof two lines\n"
    assert "two words" not in said
    with redirect_stderr(None):
        logging.getLogger("hicachectl").warning("lost")
    with redirect_stderr(earlier):  # closed
        logging.getLogger("hicachectl").warning("lost")
    assert "lost" not in capsys.readouterr().err


@pytest.mark.slow
def test_an_empty_store_is_no_error(invoke: Invoke, tmp_path: Path) -> None:
    verify = ["verify", "--allow-empty"]
    for command in (["ls"], ["ls", "--objects"], ["ls", "--summary"], verify):
        for output_format in ("table", "json", "jsonl", "csv"):
            invoke(*command, tmp_path, "--format", output_format)


def test_a_directory_of_foreign_files_is_listed_and_noted(invoke: Invoke, tmp_path: Path) -> None:
    for name in ("a.txt", "b.bin", "c"):
        (tmp_path / name).write_text("mine")
    assert invoke("ls", tmp_path, "--objects", "--format", "jsonl").stdout.count("\n") == 3
    every = invoke("verify", tmp_path, "--all-findings", "--allow-empty").stdout
    assert every.count("foreign-object") == 4  # three findings and the verdict


def test_a_prefix_of_several_pages_names_some(invoke: Invoke, tmp_path: Path) -> None:
    put_pages(tmp_path, range(64), "_m_0_1")
    same = [page(n) for n in range(64) if page(n).startswith(page(0)[0])]
    assert len(same) > 1
    line = one_line(invoke, "show", tmp_path, page(0)[0], exit_code=2)
    assert f"{len(same)} pages" in line
    assert min(same) in line


@pytest.mark.slow
def test_a_closed_pipe_is_no_error(tmp_path: Path) -> None:
    put_pages(tmp_path, range(3000), "_m_0_1", nbytes=0)
    command = f"{sys.executable} -m hicachectl ls {tmp_path} --objects; echo $? >&2"
    found = subprocess.run(
        ["bash", "-c", f"({command}) | head -1"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert found.stdout.startswith("KEY")
    assert found.stderr == "0\n"


@pytest.mark.slow
def test_a_command_ends_whatever_other_threads_still_do(tmp_path: Path) -> None:
    """Arrow's threads may wait for the interpreter at its end, which would abort the process."""
    code = (
        "import sys, threading, time; from hicachectl.__main__ import main;"
        "threading.Thread(target=time.sleep, args=(600,)).start(); main(sys.argv[1:])"
    )
    for place, status in ((tmp_path, 0), (tmp_path / "no", 3)):
        found = subprocess.run(
            [sys.executable, "-c", code, "ls", str(place), "--format", "csv"],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert found.returncode == status, found.stderr
        assert bool(found.stdout) == (not status)  # written output arrives, at least its head


def test_named_stores_come_from_the_config(invoke: Invoke, tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    put_pages(store, range(2), "_m_0_1")
    config = tmp_path / "config.toml"
    config.write_text(f'[stores.prod]\nurl = "{store}"\n')
    assert invoke("--config", config, "ls", "prod:", "--format", "jsonl").stdout.count("\n") == 2
    assert "nope" in one_line(invoke, "--config", config, "ls", "nope:", exit_code=2)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_name_the_program(invoke: Invoke, shell: str) -> None:
    assert "_HICACHECTL_COMPLETE" in invoke("completion", shell).stdout
