"""Run the command line on a Ray cluster from one process that stays connected.

A driver takes seconds to connect, and each stage of a part a second to start its process. Here one
process runs the commands one after another, and the workers of Ray do the stages themselves.
tests/parts/test_ray.py has drivers and stages in processes of their own.

`python -m tests.parts.connected ADDRESS` reads requests on stdin and answers on stdout.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from tests.parts.runs import ROOT
from tests.processes import Closing

if TYPE_CHECKING:
    from collections.abc import Iterator


class Ended(NamedTuple):
    """Result of a command."""

    status: int
    stdout: str
    stderr: str


class Connected(Closing):
    """A driver that stays connected to a cluster; a context manager."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.parts.connected", address],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: object) -> Ended:
        """Run a command with `--ray`."""
        words = [*map(str, arguments), "--ray", self._address]
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(words), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        assert answer, "the driver has ended"
        return Ended(*json.loads(answer))

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()


def in_worker(order: bytes) -> Iterator[bytes]:
    """Do a stage in this process; yield its answers. Takes the place of `child.in_child`."""
    child: Any = import_module("hicachectl.parts.child")
    errors: Any = import_module("hicachectl.formats.errors")
    answers: list[bytes] = []
    try:
        parent = SimpleNamespace(send_bytes=answers.append)
        child.answer(child.ORDERS.decode(order), child.Answering(parent))
    except errors.HicacheError as error:
        answers.append(child.encoded(child.Failed(*child.packed_error(error))))
    while answers:  # Ray sends into this generator, which no list takes
        yield answers.pop(0)


def _settle_worker() -> None:
    child: Any = import_module("hicachectl.parts.child")
    child.in_child = import_module("tests.parts.connected").in_worker


def _serve(address: str) -> None:
    ray: Any = import_module("ray")
    run = import_module("hicachectl.__main__").run
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    ray.init(
        address=address,
        log_to_driver=False,
        logging_level="ERROR",
        runtime_env={"worker_process_setup_hook": _settle_worker},
    )
    ray.init = lambda **options: None
    ray.shutdown = lambda: None
    with tempfile.TemporaryDirectory() as folder:
        for line in sys.stdin:
            print(json.dumps(_captured(run, json.loads(line), Path(folder))), file=answers)


def _captured(run: Any, arguments: list[str], folder: Path) -> Ended:
    """Run a command; stdout and stderr go to files, also those of libraries."""
    paths = [folder / "stdout", folder / "stderr"]
    for number, path in enumerate(paths, 1):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, number)
        os.close(descriptor)
    status = run(arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    return Ended(status, *(path.read_text() for path in paths))


if __name__ == "__main__":
    _serve(sys.argv[1])
