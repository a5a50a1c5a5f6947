"""Run the command line and stop it at a call: `paused.py FOLDER MODULE:CLASS.METHOD N ARGUMENT…`.

Right before call N of the method (counted from 1) FOLDER/reached appears, and the call waits for
FOLDER/go. A test can so break a cluster at a known moment of a real run.
"""

from __future__ import annotations

import importlib
import itertools
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hicachectl.__main__ import main

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PATIENCE_S = 120


class Ended(NamedTuple):
    """How a run ended, and in what time since it went on."""

    code: int
    stdout: str
    stderr: str
    seconds: float


class Paused:
    """A run of the command line that waits at a call."""

    def __init__(self, folder: Path, call: str, number: int, *arguments: object) -> None:
        folder.mkdir()
        self._folder = folder
        self._process = subprocess.Popen(
            [sys.executable, "-m", __spec__.name]
            + [str(argument) for argument in (folder, call, number, *arguments)],
            cwd=Path(__file__).parents[2],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        deadline = time.monotonic() + PATIENCE_S
        while not (folder / "reached").exists():
            assert self._process.poll() is None, self._process.communicate()[1]
            assert time.monotonic() < deadline, f"{call} is not called {number} times"
            time.sleep(0.01)

    def send(self, number: int) -> None:
        """Send it a signal while it waits."""
        self._process.send_signal(number)

    def resumed(self) -> Ended:
        """Let it go on until it ends; fails when it does not."""
        started = time.monotonic()
        (self._folder / "go").touch()
        try:
            stdout, stderr = self._process.communicate(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired as error:
            raise AssertionError("it hangs") from error
        return Ended(self._process.returncode, stdout, stderr, time.monotonic() - started)

    def end(self) -> None:
        """Kill what is left of it."""
        self._process.kill()
        self._process.communicate()


@contextmanager
def paused(folder: Path, call: str, number: int, *arguments: object) -> Iterator[Paused]:
    """Run a command until call `number`; killed at the end if need be."""
    process = Paused(folder, call, number, *arguments)
    try:
        yield process
    finally:
        process.end()


def _pause(folder: Path, call: str, number: int) -> None:
    """Wrap the method."""
    module, _, path = call.partition(":")
    class_name, _, name = path.partition(".")
    owner = getattr(importlib.import_module(module), class_name)
    method: Callable[..., Any] = getattr(owner, name)
    calls = itertools.count(1)

    def waiting(*arguments: Any, **options: Any) -> Any:
        if next(calls) == number:
            (folder / "reached").touch()
            while not (folder / "go").exists():
                time.sleep(0.01)
        return method(*arguments, **options)

    setattr(owner, name, waiting)


if __name__ == "__main__":
    _pause(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
    main(sys.argv[4:])
