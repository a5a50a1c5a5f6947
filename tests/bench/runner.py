"""What all measurements share: their options, scratch folders, and ways that take turns."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    Way = Callable[[], float]

HICACHECTL = (sys.executable, "-m", "hicachectl", "-q")


def options_of(doc: str | None, **defaults: Any) -> argparse.Namespace:
    """Parse the command line of a measurement.

    An option has the type of its default. False makes a flag, and a type an option without default.
    """
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in defaults.items():
        option = f"--{name.replace('_', '-')}"
        if default is False:
            parser.add_argument(option, action="store_true")
        elif isinstance(default, type):
            parser.add_argument(option, type=default)
        else:
            parser.add_argument(option, type=type(default), default=default)
    return parser.parse_args()


@contextmanager
def scratch(place: str | Path | None = None) -> Iterator[Path]:
    """Yield a folder that is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="hicachectl-bench-", dir=place) as folder:
        yield Path(folder)


class Turns(NamedTuple):
    """Seconds of ways that took turns: one row a round, one column a way."""

    names: list[str]
    seconds: np.ndarray

    def of(self, name: str) -> np.ndarray:
        """Return the seconds of a way by round."""
        column: np.ndarray = self.seconds[:, self.names.index(name)]
        return column

    def median(self, name: str) -> float:
        """Return the median seconds of a way."""
        return float(np.median(self.of(name)))

    def ratio(self, name: str, to: str) -> float:
        """Return the median over the rounds of a way's seconds, divided by another's."""
        return float(np.median(self.of(name) / self.of(to)))


def alternating(ways: Mapping[str, Way], runs: int, warm_up: int = 1) -> Turns:
    """Run the ways in turn, in rounds; each returns its seconds. Leave the first rounds out.

    Each way is first in some rounds: a disk can slow down, and memory can become scarce.
    """
    names = list(ways)
    seconds = np.zeros((warm_up + runs, len(names)))
    for number in range(len(seconds)):
        for way in np.roll(np.arange(len(names)), number).tolist():
            seconds[number, way] = ways[names[way]]()
    return Turns(names, seconds[warm_up:])


def timed(work: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> Way:
    """Return a way that does some work and returns its seconds by a clock."""

    def way() -> float:
        begun = clock()
        result = work()
        seconds = clock() - begun
        del result  # freeing it takes no part
        return seconds

    return way


class Command:
    """A way that runs a process, and discards its output.

    peak_mb: most memory of all runs, in MiB.
    processor_s: processor time of the last run, with the processes that it started.
    """

    def __init__(self, *words: object, env: Mapping[str, str] | None = None) -> None:
        self.peak_mb = self.processor_s = 0.0
        self._words, self._env = list(map(str, words)), env

    def __call__(self) -> float:
        """Return the wall seconds of one run; note the most memory of all runs."""
        begun = time.perf_counter()
        process = subprocess.Popen(self._words, stdout=subprocess.DEVNULL, env=self._env)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == 0, self._words
        self.peak_mb = max(self.peak_mb, usage.ru_maxrss / 1024)
        self.processor_s = usage.ru_utime + usage.ru_stime
        return time.perf_counter() - begun
