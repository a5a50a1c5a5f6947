"""The command line as a user who is not root."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

NOBODY = 65534

# Root imports everything first: other users may be unable to enter the interpreter's directory.
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
from hicachectl.__main__ import run
answers = []
for command in json.load(sys.stdin):
    out, err = tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")
    child = os.fork()
    if not child:
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
        os.setgroups([]); os.setgid(65534); os.setuid(65534)
        os._exit(run(command))
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    out.seek(0), err.seek(0)
    answers.append([status, out.read(), err.read()])
json.dump(answers, sys.stdout)
"""


class Answer(NamedTuple):
    """How a command ended."""

    status: int
    stdout: str
    stderr: str


def as_nobody(commands: Sequence[Sequence[object]], home: Path) -> list[Answer]:
    """Run commands one after another as user and group 65534."""
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        input=json.dumps([[str(word) for word in command] for command in commands]),
        env={**os.environ, "HOME": str(home)}, capture_output=True, text=True, check=False,
        timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [Answer(*answer) for answer in json.loads(done.stdout)]
