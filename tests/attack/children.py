"""Run the command line in child processes: within limits for attacks, or as another user."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.waiting import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

NOBODY = 65534
MEMORY_BYTES = 3 << 30  # address space; the libraries' threads reserve most of it


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
import importlib, json, os, pkgutil, sys, tempfile
import concurrent.futures.thread, csv, difflib, encodings.ascii, encodings.idna, encodings.latin_1
import encodings.utf_8_sig, importlib.metadata, pwd, secrets, shutil, tomllib, uuid
import blake3, click, numpy, pyarrow, pyarrow.compute, pyarrow.fs, pyarrow.parquet
import hicachectl
APART = ("triton", "sglang", "__main__", "testing", "device.", "kernels.", ".client", "usrbio")
for module in pkgutil.walk_packages(hicachectl.__path__, "hicachectl."):
    if not any(part in module.name for part in APART):
        importlib.import_module(module.name)
from hicachectl.__main__ import main
from hicachectl.checks.codes import builtin_codes
builtin_codes()
user = int(sys.argv[1])
answers = []
for command in json.load(sys.stdin):
    out, err = tempfile.TemporaryFile(), tempfile.TemporaryFile()
    child = os.fork()
    if not child:
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
        if user:
            os.setgroups([]); os.setgid(user); os.setuid(user)
        main([os.fsdecode(word.encode("latin-1")) for word in command])
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    out.seek(0), err.seek(0)
    answers.append([status, out.read().decode("latin-1"), err.read().decode("latin-1")])
json.dump(answers, sys.stdout)
"""


def attacked(
    *arguments: object,
    variables: Mapping[str, str] | None = None,
    stdin: bytes | None = None,
    pass_fds: tuple[int, ...] = (),
    cwd: Path | None = None,
) -> Ended:
    """Run the command line; assert that it neither crashes nor exceeds its limits."""
    found = subprocess.run(
        [sys.executable, "-m", "hicachectl", *map(str, arguments)],
        input=stdin,
        capture_output=True,
        timeout=PATIENCE_S,
        check=False,
        cwd=cwd,
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
    """Run many commands as `attacked` does, in forks of one process, which has their imports."""
    found = _in_forks(commands, _environment(variables), preexec_fn=_bounded)
    for ended in found:
        ended.assert_sound()
    return found


def as_nobody(commands: Sequence[Sequence[object]], home: Path) -> list[Ended]:
    """Run commands one after another as user and group NOBODY."""
    return _in_forks(commands, {**os.environ, "HOME": str(home)}, user=NOBODY)


def _in_forks(
    commands: Sequence[Sequence[object]],
    environment: Mapping[str, str],
    *,
    user: int = 0,
    preexec_fn: Callable[[], None] | None = None,
) -> list[Ended]:
    words = [[os.fsencode(str(word)).decode("latin-1") for word in one] for one in commands]
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(user)],
        input=json.dumps(words).encode(),
        capture_output=True,
        timeout=3 * PATIENCE_S,
        check=False,
        env=environment,
        preexec_fn=preexec_fn,
    )
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    return [
        Ended(status, out.encode("latin-1"), err.encode("latin-1").decode(errors="replace"))
        for status, out, err in json.loads(done.stdout)
    ]


def _environment(variables: Mapping[str, str] | None) -> dict[str, str]:
    return {**os.environ, "OPENBLAS_NUM_THREADS": "1", **(variables or {})}


def _bounded() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def run(*arguments: object, home: Path) -> subprocess.CompletedProcess[str]:
    """Run the command line in a separate process."""
    return subprocess.run(
        [sys.executable, "-m", "hicachectl", *map(str, arguments)],
        env={**os.environ, "HOME": str(home)}, capture_output=True, text=True, check=False,
        timeout=120,
    )  # fmt: skip
