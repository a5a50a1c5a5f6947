"""Run the command line in child processes: within limits for attacks, or as another user."""

from __future__ import annotations

import atexit
import functools
import json
import os
import resource
import select
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.processes import Closing, following
from tests.waiting import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

NOBODY = 65534
# Address space: the threads of libraries and of calls at once reserve most of it.
MEMORY_BYTES = 4 << 30


@dataclass(frozen=True)
class Ended:
    """How a child ended."""

    status: int
    stdout: bytes
    stderr: str

    def assert_sound(self) -> None:
        """Assert that the command has neither crashed nor met a bug."""
        assert self.status in (0, 2, 3, 4), self
        assert "Traceback" not in self.stderr, self

    @property
    def refusal(self) -> str:
        """The one line with which a command refuses its input."""
        assert self.status == 2, self
        assert not self.stdout, self
        line = self.stderr.strip().splitlines()[-1]
        assert len(line) < 1000, line
        return line


# Root imports everything first: other users may be unable to enter the interpreter's directory.
# Words and output are bytes, each a character of Latin-1, since JSON has no bytes.
_PROGRAM = """
import importlib, json, os, pkgutil, resource, sys, tempfile
import concurrent.futures.thread, csv, difflib, encodings.ascii, encodings.idna, encodings.latin_1
import encodings.unicode_escape, encodings.utf_8_sig, importlib.metadata, pwd, secrets, shutil
import tomllib, uuid
import blake3, click, numpy, prometheus_client.parser, pyarrow, pyarrow.compute, pyarrow.fs
import pyarrow.parquet
import hicachectl
APART = ("triton", "sglang", "__main__", "testing", "device.", "kernels.", ".client", "usrbio")
for module in pkgutil.walk_packages(hicachectl.__path__, "hicachectl."):
    if not any(part in module.name for part in APART):
        importlib.import_module(module.name)
from hicachectl.__main__ import main
from hicachectl.checks.codes import builtin_codes
builtin_codes()
answers = os.fdopen(os.dup(1), "w", buffering=1)
for line in sys.stdin:
    asked = json.loads(line)
    out, err = tempfile.TemporaryFile(), tempfile.TemporaryFile()
    child = os.fork()
    if not child:
        for number, file in enumerate((open(os.devnull), out, err)):
            os.dup2(file.fileno(), number)
        os.environ.clear()
        os.environ.update(asked["variables"])
        for limit, most in asked["limits"]:
            resource.setrlimit(limit, (most, most))
        if user := asked["user"]:
            os.setgroups([]); os.setgid(asked["group"]); os.setuid(user)
        exec(asked["before"], {})
        main([os.fsdecode(word.encode("latin-1")) for word in asked["words"]])
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    out.seek(0), err.seek(0)
    answer = [status, out.read().decode("latin-1"), err.read().decode("latin-1")]
    print(json.dumps(answer), file=answers)
"""
_OF_A_PROCESS = ("LC_", "PYTHON")  # variables that a fork would ignore
_BOUNDS = ((resource.RLIMIT_AS, MEMORY_BYTES), (resource.RLIMIT_CORE, 0))


class Forks(Closing):
    """A process that has imported the program, and forks a child for each command line."""

    def __init__(self, variables: Mapping[str, str] | None = None) -> None:
        """Start the process.

        variables: more environment variables of the process, which decide its locale.
        """
        self._variables = variables or {}
        self._process = subprocess.Popen(
            following(sys.executable, sys.executable, "-c", _PROGRAM),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=_environment(variables),
        )

    def run(
        self,
        *arguments: object,
        variables: Mapping[str, str] | None = None,
        user: int = 0,
        group: int = 0,
        bounded: bool = False,
        before: str = "",
    ) -> Ended:
        """Run a command line in a child. before: Python that the child executes first."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = {
            "words": [os.fsencode(str(word)).decode("latin-1") for word in arguments],
            "variables": _environment({**self._variables, **(variables or {})}),
            "user": user,
            "group": group,
            "limits": _BOUNDS if bounded else (),
            "before": before,
        }
        print(json.dumps(request), file=self._process.stdin, flush=True)
        if not select.select([self._process.stdout], [], [], PATIENCE_S)[0]:
            self.close()
        answer = self._process.stdout.readline()
        assert answer, f"no answer to {arguments}"
        status, out, err = json.loads(answer)
        return Ended(status, out.encode("latin-1"), err.encode("latin-1").decode(errors="replace"))

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


@functools.cache
def _forks() -> Forks:
    """Return the process that all tests of this process share."""
    forks = Forks()
    atexit.register(forks.close)
    return forks


def attacked(
    *arguments: object,
    variables: Mapping[str, str] | None = None,
    pass_fds: tuple[int, ...] = (),
) -> Ended:
    """Run the command line; assert that it neither crashes nor exceeds its limits."""
    if not pass_fds and not any(name.startswith(_OF_A_PROCESS) for name in variables or ()):
        ended = _forks().run(*arguments, variables=variables, bounded=True)
    else:
        found = subprocess.run(
            [sys.executable, "-m", "hicachectl", *map(str, arguments)],
            capture_output=True,
            timeout=PATIENCE_S,
            check=False,
            pass_fds=pass_fds,
            env=_environment(variables),
            preexec_fn=_bounded,
        )
        ended = Ended(found.returncode, found.stdout, found.stderr.decode(errors="replace"))
    ended.assert_sound()
    return ended


def all_attacked(
    commands: Sequence[Sequence[object]], variables: Mapping[str, str] | None = None
) -> list[Ended]:
    """Run many commands as `attacked` does, in forks of one process with some variables."""
    with Forks(variables) as forks:
        found = [forks.run(*command, bounded=True) for command in commands]
    for ended in found:
        ended.assert_sound()
    return found


def as_nobody(commands: Sequence[Sequence[object]], home: Path) -> list[Ended]:
    """Run commands one after another as user and group NOBODY."""
    home_of = {"HOME": str(home)}
    run = _forks().run
    return [run(*command, variables=home_of, user=NOBODY, group=NOBODY) for command in commands]


def as_user(command: Sequence[object], home: Path, user: int) -> Ended:
    """Run a command as a user of group NOBODY, with umask 022."""
    umask = "import os; os.umask(0o022)"
    home_of = {"HOME": str(home)}
    return _forks().run(*command, variables=home_of, user=user, group=NOBODY, before=umask)


def _environment(variables: Mapping[str, str] | None) -> dict[str, str]:
    return {**os.environ, "OPENBLAS_NUM_THREADS": "1", **(variables or {})}


def _bounded() -> None:
    for limit, most in _BOUNDS:
        resource.setrlimit(limit, (most, most))


def run(*arguments: object, home: Path, before: str = "") -> subprocess.CompletedProcess[str]:
    """Run the command line in a fork. before: Python that the fork executes first."""
    ended = _forks().run(*arguments, variables={"HOME": str(home)}, before=before)
    return subprocess.CompletedProcess(
        [*map(str, arguments)], ended.status, ended.stdout.decode(), ended.stderr
    )
