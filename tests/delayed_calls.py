"""Run commands so that their calls to the files of a directory wait, and count these calls.

This suits quick tests: it needs no mount and no libfuse, and the command runs unchanged.
`delayed_calls.c` explains how.
"""

from __future__ import annotations

import platform
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tests.bench.slow_files.mounting import built
from tests.skips import missing

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_REFUSED = 126
_SECONDS = 120
_FOLDER = tempfile.TemporaryDirectory(prefix="hicachectl-delayed-calls-")


class Delayed(NamedTuple):
    """A command that has ended.

    calls: number of calls to the files of the directory, by name.
    at_once: largest number of calls that waited at the same time.
    """

    status: int
    stdout: str
    stderr: str
    calls: dict[str, int]
    at_once: int


@cache
def _program() -> Path:
    if platform.machine() != "x86_64":
        missing("an x86-64 processor", "run the tests on one")
    return built("delayed_calls.c", Path(_FOLDER.name))


def delayed_command(
    directory: Path, delay_ms: float, report: Path, words: Sequence[object]
) -> list[str]:
    """Return the words of a command that delays another, and writes a report at its end."""
    return [str(word) for word in (_program(), directory.resolve(), delay_ms, report, *words)]


def delayed(
    directory: Path,
    delay_ms: float,
    words: Sequence[object],
    folder: Path,
    environment: Mapping[str, str] | None = None,
) -> Delayed:
    """Run a command so that each call to the files of a directory waits. Skip without seccomp.

    folder: folder for the report. The report is removed once read.
    """
    report = folder / "delayed-calls"
    done = subprocess.run(
        delayed_command(directory, delay_ms, report, words),
        env=environment, capture_output=True, text=True, check=False, timeout=_SECONDS,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    if done.returncode == _REFUSED and not report.exists():
        missing("seccomp's user notification", "run the tests outside a container that forbids it")
    return Delayed(done.returncode, done.stdout, done.stderr, *read_report(report))


def read_report(report: Path) -> tuple[dict[str, int], int]:
    """Read and remove a report. Return the calls by name, and the most that waited at once."""
    lines = (line.split() for line in report.read_text().splitlines())
    calls = {name: int(count) for name, count in lines}
    report.unlink()
    return calls, calls.pop("at-once")
