"""Run the command line in a child process with limits of memory and time, for attacks."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.waiting import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

MEMORY_BYTES = 3 << 30  # address space; the libraries' threads reserve most of it


@dataclass(frozen=True)
class Ended:
    """How a child ended."""

    status: int
    stdout: bytes
    stderr: str

    @property
    def refusal(self) -> str:
        """The one line with which a command refuses its input."""
        assert self.status == 2, self
        assert not self.stdout, self
        line = self.stderr.strip().splitlines()[-1]
        assert len(line) < 1000, line
        return line


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
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1", **(variables or {})},
        preexec_fn=_bounded,
    )
    ended = Ended(found.returncode, found.stdout, found.stderr.decode(errors="replace"))
    assert ended.status in (0, 2, 3, 4), ended
    assert "Traceback" not in ended.stderr, ended
    return ended


def _bounded() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
