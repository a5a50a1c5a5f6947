"""Runs in parts: of commands, and of the toy command in this process and in others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hicachectl.parts.directory import RunDirectory
from hicachectl.parts.job import MODULES
from hicachectl.parts.results import merge_run
from hicachectl.parts.running import begin, join, run_part
from tests.parts.toy import ToyJob

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hicachectl.parts.running import PartOutcome
    from hicachectl.results import Result
    from tests.conftest import Invoke, Outcome

ROOT = Path(__file__).parents[2]
NUMBERS = 12  # objects in the toy store


class ToyRun:
    """A toy store, destination and run directory below a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = folder / "store"
        self.destination = folder / "destination"
        self.path = folder / "run"
        self.store.write_text("\n".join(map(str, range(NUMBERS))))
        self.destination.mkdir()

    def part(self, part: int, parts: int, **settings: Any) -> PartOutcome:
        """Do a part in this process; part 0 must come first."""
        job = ToyJob(self.store, self.destination, **settings)
        with RunDirectory.create(self.path, job.permissions, job.trust) as run:
            if part:
                manifest = join(run, job, parts, wait_seconds=0, lister="toy 0/N")
            else:
                manifest = begin(run, job, parts)
            return run_part(run, job, manifest, part)

    def all(self, parts: int) -> None:
        """Do all parts in this process."""
        for part in range(parts):
            self.part(part, parts)

    def start(self, part: int, parts: int, **settings: Any) -> subprocess.Popen[str]:
        """Do a part in a process of its own."""
        given = [f"{name}={value}" for name, value in settings.items()]
        places = [self.store, self.destination, self.path]
        return subprocess.Popen(
            [sys.executable, "-m", "tests.parts.toy", *places, f"{part}/{parts}", *given],
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
        )

    def merged(self) -> Result:
        """Merge the run, as often as this is called."""
        with RunDirectory.existing(self.path) as run:
            return merge_run(run)

    @property
    def listings(self) -> int:
        """Number of listings of the store."""
        return len((self.folder / "listings").read_text().splitlines())


class CommandRun:
    """A run of a command in parts, in this process.

    command: words of the command line, without --shard and --run.
    """

    def __init__(self, invoke: Invoke, path: Path, *command: object) -> None:
        self.invoke = invoke
        self.path = path
        self.command = command

    def arguments(self, part: int, parts: int, *more: object) -> tuple[object, ...]:
        """Return the command line of a part."""
        return (*self.command, *more, "--shard", f"{part}/{parts}", "--run", self.path)

    def part(self, part: int, parts: int, *more: object, exit_code: int = 0) -> str:
        """Do a part; return stderr."""
        return self.invoke(*self.arguments(part, parts, *more), exit_code=exit_code).stderr

    def all(self, parts: int, order: Iterable[int] | None = None) -> None:
        """Do parts; by default part 0, then the others from the last one on."""
        for part in [0, *range(parts - 1, 0, -1)] if order is None else order:
            self.part(part, parts)

    def merged(self, *more: object, exit_code: int = 0) -> Outcome:
        """Merge the run as JSON, as often as this is called."""
        options = ("--again", "--format", "json", *more)
        return self.invoke("merge", self.path, *options, exit_code=exit_code)


def names_in(directory: Path) -> list[str]:
    """Return the names in a directory, sorted."""
    return sorted(entry.name for entry in directory.iterdir())


@pytest.fixture
def toy_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ToyRun:
    """Return a run that has not begun."""
    monkeypatch.setitem(MODULES, "toy", "tests.parts.toy")
    return ToyRun(tmp_path)
