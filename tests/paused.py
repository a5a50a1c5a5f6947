"""Run the command line and stop it at a call: `paused.py FOLDER MODULE:CLASS.METHOD N ARGUMENT…`.

Right before call N of the method (counted from 1), FOLDER/reached appears and the call waits for
FOLDER/go. So a test can break a cluster at a known moment of a real run. From then on,
FOLDER/handled gets a byte for each SIGINT and SIGTERM that Python has handled.
"""

from __future__ import annotations

import importlib
import itertools
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hicachectl.__main__ import main
from tests.waiting import PATIENCE_S, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

_SETTLING_S = 0.3  # time in which an exception of a handler is caught


class Ended(NamedTuple):
    """Result of a run, and its duration since it was resumed."""

    code: int
    stdout: str
    stderr: str
    seconds: float


class Paused:
    """A run of the command line that is paused at a call."""

    def __init__(self, folder: Path, call: str, number: int, *arguments: object) -> None:
        folder.mkdir()
        self._folder = folder
        self._process = subprocess.Popen(
            [sys.executable, "-m", __spec__.name]
            + [str(argument) for argument in (folder, call, number, *arguments)],
            cwd=Path(__file__).parents[1],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._handled = 0
        try:
            self._await((folder / "reached").exists, f"{call} is not called {number} times")
        except BaseException:
            self.end()
            raise

    @property
    def running(self) -> bool:
        """Whether the run has not ended."""
        return self._process.poll() is None

    def send(self, number: int) -> None:
        """Send a signal, and wait until the run has handled it.

        Of two pending signals, Python would handle the lower number first.
        """
        self._handled += 1
        self._process.send_signal(number)
        self._await(lambda: self._count_handled() == self._handled, "a signal is not handled")
        time.sleep(_SETTLING_S)

    def resumed(self) -> Ended:
        """Resume the run and wait for its end. Fail if it does not end."""
        started = time.monotonic()
        (self._folder / "go").touch()
        try:
            stdout, stderr = self._process.communicate(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired as error:
            raise AssertionError("it hangs") from error
        return Ended(self._process.returncode, stdout, stderr, time.monotonic() - started)

    def end(self) -> None:
        """Kill the run if it has not ended."""
        self._process.kill()
        self._process.communicate()

    def _count_handled(self) -> int:
        path = self._folder / "handled"
        return path.stat().st_size if path.exists() else 0

    def _await(self, condition: Callable[[], bool], complaint: str) -> None:
        """Wait until a condition holds. Fail if the process ends first."""

        def met() -> bool:
            running = self.running
            if condition():
                return True
            assert running, self._process.communicate()[1]
            return False

        wait_until(met, complaint)


@contextmanager
def paused(folder: Path, call: str, number: int, *arguments: object) -> Iterator[Paused]:
    """Run a command until call `number`. Kill it at the end if it still runs."""
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


def _tell_signals(folder: Path) -> None:
    """Record each signal after its current handler has returned or raised."""
    install = signal.signal
    handlers: dict[int, Any] = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}

    def handle(number: int, frame: FrameType | None) -> None:
        try:
            handlers[number](number, frame)
        finally:
            with (folder / "handled").open("ab") as handled:
                handled.write(b".")

    def replace(number: int, handler: Any) -> Any:
        before, handlers[number] = handlers[number], handler
        return before

    for number in handlers:
        install(number, handle)
    signal.signal, signal.getsignal = replace, handlers.__getitem__  # type: ignore[assignment]


if __name__ == "__main__":
    _tell_signals(Path(sys.argv[1]))
    _pause(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
    main(sys.argv[4:])
