"""Run the command line as on another host, in processes of one that has imported all modules.

`python -m tests.parts.disturbed` forks a process for each request on stdin; `Hosts` asks it.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from tests.processes import Closing

_IMPORTED_ONCE = (
    "hicachectl.backends.file.store",
    "hicachectl.cli.commands.migrate",
    "hicachectl.cli.commands.verify",
    "hicachectl.parts.migrate",
    "hicachectl.parts.prewarm",
    "hicachectl.parts.running",
    "hicachectl.parts.verify",
    "hicachectl.profiles.sources",
)


def settle(values: dict[str, str]) -> None:
    """Change this process's host and clock. values: host, and ahead (seconds of the right time)."""
    if "ahead" in values:
        real, real_ns, ahead = time.time, time.time_ns, float(values["ahead"])
        time.time = lambda: real() + ahead
        time.time_ns = lambda: real_ns() + int(ahead * 1e9)
    if "host" in values:
        socket.gethostname = lambda: values["host"]


class Hosts(Closing):
    """Starts processes of the command line on other hosts."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.parts.disturbed"],
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(
        self,
        arguments: list[str],
        said: Path,
        environment: dict[str, str],
        settings: dict[str, str],
        listing: float,
    ) -> int:
        """Start a command line; return its pid.

        said: file for stderr. settings: see `settle`. listing: seconds that a listing takes longer.
        """
        pid: int = self._answer("start", arguments, str(said), environment, settings, listing)
        return pid

    def status(self, pid: int) -> int | None:
        """Return the exit status of an ended process, once; None while it runs."""
        ended: int | None = self._answer("status", pid)
        return ended

    def kill(self, pid: int) -> None:
        """Kill a process, and wait for its end."""
        self._answer("kill", pid)

    def _answer(self, name: str, *arguments: object) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([name, *arguments]), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        assert answer, "the process that forks has ended"
        return json.loads(answer)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()


def _start(
    arguments: list[str],
    said: str,
    environment: dict[str, str],
    settings: dict[str, str],
    listing: float,
) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.dup2(os.open(os.devnull, os.O_RDWR), 1)
        os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        os.environ.update(environment)
        time.tzset()
        settle(settings)
        _slow_listings(listing)
        status = int(importlib.import_module("hicachectl.__main__").run(arguments))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _slow_listings(seconds: float) -> None:
    store: Any = importlib.import_module("hicachectl.backends.file.store")
    scan = store.FileStore.scan

    def slow(*arguments: Any, **named: Any) -> Any:
        time.sleep(seconds)
        return scan(*arguments, **named)

    store.FileStore.scan = slow


def _status(pid: int) -> int | None:
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def _serve() -> None:
    """Answer requests until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    does: dict[str, Any] = {"start": _start, "status": _status, "kill": _kill}
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print(json.dumps(does[name](*arguments)), file=answers)


if __name__ == "__main__":
    for module in _IMPORTED_ONCE:
        importlib.import_module(module)
    _serve()
