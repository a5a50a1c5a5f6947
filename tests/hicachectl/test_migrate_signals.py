"""Ctrl-C and SIGTERM during a migration: what was begun is finished, and the next run goes on."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.hicachectl.migrations import PAGES, contents, demo_store, journals, migrated

if TYPE_CHECKING:
    from tests.conftest import Invoke

PATIENCE_S = 60
ENDS = {signal.SIGINT: (130, "interrupted"), signal.SIGTERM: (143, "terminated")}
# Two pages with states fit: several parcels, and one is at work when the signal comes.
OPTIONS = ("--buffer-bytes", "512KiB", "--jobs", "1", "--format", "json")

# Runs a command line whose first call of a method waits until a file is there, deaf to nothing.
_HELD_UP = """
import importlib, sys, time
from pathlib import Path
from hicachectl.__main__ import main

folder, module, owner, name = Path(sys.argv[1]), *sys.argv[2:5]
of = getattr(importlib.import_module(module), owner)
method = getattr(of, name)

def held_up(*arguments, **options):
    if not (folder / "reached").exists():
        (folder / "reached").touch()
        while not (folder / "go").exists():
            time.sleep(0.01)
    return method(*arguments, **options)

setattr(of, name, held_up)
main(sys.argv[5:])
"""
SYNC = ("hicachectl.backends.file", "FileStore", "_sync_data")
INDEX = ("hicachectl.backends.pack_writer", "PackWriter", "close")


class Run:
    """A command line that is at a certain call."""

    def __init__(self, folder: Path, call: tuple[str, str, str], *arguments: object) -> None:
        folder.mkdir()
        self._folder = folder
        self._process = subprocess.Popen(
            [sys.executable, "-c", _HELD_UP, folder, *call, *map(str, arguments)],
            cwd=Path(__file__).parents[2],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        deadline = time.monotonic() + PATIENCE_S
        while not (folder / "reached").exists():
            assert self._process.poll() is None, self._process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def signalled(self, *numbers: signal.Signals) -> tuple[int, str, str]:
        """Send signals, and let it go on; how it ends."""
        for number in numbers:
            self._process.send_signal(number)
            time.sleep(0.2)
        assert self._process.poll() is None, "it did not wait for what is at work"
        (self._folder / "go").touch()
        stdout, stderr = self._process.communicate(timeout=PATIENCE_S)
        return self._process.returncode, stdout, stderr


@pytest.mark.parametrize(
    "numbers",
    [
        *((number,) for number in ENDS),
        *itertools.product(ENDS, ENDS),
    ],
    ids=lambda numbers: "-".join(number.name for number in numbers),
)
def test_a_signal_lets_groups_at_work_finish_and_the_next_run_goes_on(
    invoke: Invoke, tmp_path: Path, numbers: tuple[signal.Signals, ...]
) -> None:
    source, target = demo_store(tmp_path / "source"), tmp_path / "target"
    run = Run(tmp_path / "run", SYNC, "migrate", source, target, *OPTIONS)
    code, stdout, stderr = run.signalled(*numbers)
    status, word = ENDS[numbers[0]]
    assert (code, stdout) == (status, ""), stderr
    assert [line for line in stderr.splitlines() if "--resume" in line] == [
        "hicachectl: what was begun is finished; the same command with --resume goes on"
    ]
    assert stderr.splitlines()[-1] == f"hicachectl: {word}"
    assert "Traceback" not in stderr
    there = contents(target)
    assert 0 < len(there) < len(contents(source))
    assert len(journals(tmp_path / "home")) == 1
    pages = {name[:64] for name in there}
    assert there == {n: held for n, held in contents(source).items() if n[:64] in pages}
    document = migrated(invoke, source, target, "--resume")
    assert document["resumed"] == document["skipped"] == len(pages)
    assert document["pages"] == PAGES - len(pages)
    assert contents(target) == contents(source)
    assert journals(tmp_path / "home") == []


def test_a_signal_lets_a_pack_be_finished(invoke: Invoke, tmp_path: Path) -> None:
    """Even while its index is being written, and whoever is impatient."""
    source, pack = demo_store(tmp_path / "source"), tmp_path / "a.hcpack"
    run = Run(tmp_path / "run", INDEX, "migrate", source, f"pack://{pack}", *OPTIONS)
    code, _, stderr = run.signalled(signal.SIGINT, signal.SIGINT)
    assert "Traceback" not in stderr
    assert code == 130
    back = tmp_path / "back"
    migrated(invoke, f"pack://{pack}", back)
    assert contents(back) == contents(source)


@pytest.mark.parametrize("number", ENDS)
def test_a_signal_during_a_move_leaves_each_page_somewhere(
    invoke: Invoke, tmp_path: Path, number: signal.Signals
) -> None:
    source, target = demo_store(tmp_path / "source"), tmp_path / "target"
    before = contents(source)
    run = Run(tmp_path / "run", SYNC, "migrate", source, target, *OPTIONS, "--move", "--yes")
    assert run.signalled(number)[0] == ENDS[number][0]
    assert contents(source) | contents(target) == before
    assert migrated(invoke, source, target, "--move", "--yes", "--resume")["complete"]
    assert contents(target) == before
    assert contents(source) == {}


def test_an_interrupted_dry_run_has_nothing_to_go_on_with(tmp_path: Path) -> None:
    source, target = demo_store(tmp_path / "source"), tmp_path / "target"
    scan = ("hicachectl.backends.file", "FileStore", "scan")
    run = Run(tmp_path / "run", scan, "migrate", source, target, *OPTIONS, "--dry-run")
    run._process.send_signal(signal.SIGINT)
    (tmp_path / "run" / "go").touch()
    _, stderr = run._process.communicate(timeout=PATIENCE_S)
    assert run._process.returncode == 130
    assert "--resume" not in stderr
    assert not target.exists()


def test_two_runs_of_one_migration_do_not_meet(invoke: Invoke, tmp_path: Path) -> None:
    source, target = demo_store(tmp_path / "source"), tmp_path / "target"
    run = Run(tmp_path / "run", SYNC, "migrate", source, target, *OPTIONS)
    output = invoke("migrate", source, target, exit_code=2)
    assert "another process is at this very migration" in output.stderr
    (tmp_path / "run" / "go").touch()
    stdout, _ = run._process.communicate(timeout=PATIENCE_S)
    assert json.loads(stdout)["pages"] == PAGES
    assert contents(target) == contents(source)
