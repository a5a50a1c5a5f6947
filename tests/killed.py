"""Run the command line in processes that are killed at a chosen point.

`Runner` starts one process that has imported all modules, and forks a child for each run. A child
counts the bytes that it writes and its steps: calls that create, rename, remove or sync a file or
a directory, or ask a server for a change. SIGKILL comes in the middle of the write that reaches a
number of bytes, or right before a step.
"""

from __future__ import annotations

import importlib
import json
import mmap
import os
import signal
import subprocess
import sys
import threading
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tests.processes import Closing

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

REPOSITORY = Path(__file__).parents[1]
PATIENCE_S = 120
_EVENTS = frozenset(
    {"os.rename", "os.remove", "os.link", "os.truncate", "os.mkdir", "os.rmdir", "os.utime"}
)

Unit = Literal["bytes", "steps"]
_IMPORTED_ONCE = (
    "hicachectl.backends.file.store",
    "hicachectl.backends.hf3fs.store",
    "hicachectl.backends.mooncake.store",
    "hicachectl.backends.pack.store",
    "hicachectl.cli.commands.migrate",
    "hicachectl.cli.commands.quarantine",
    "hicachectl.cli.commands.restore",
    "hicachectl.cli.commands.rm",
    "hicachectl.cli.commands.verify",
    "hicachectl.move.migration",
    "hicachectl.parts.migrate",
    "hicachectl.parts.running",
    "hicachectl.profiles.sources",
)
# Requests of stores to servers, and system calls that Python does not audit.
_CALLS = (
    ("hicachectl.backends.object_files.writing", "FileWriter.sync_data"),
    ("hicachectl.backends.hf3fs.metadata", "MetadataClient.reserve"),
    ("hicachectl.backends.hf3fs.metadata", "MetadataClient.confirm"),
    ("hicachectl.backends.hf3fs.metadata", "MetadataClient.delete"),
    ("hicachectl.backends.mooncake.client", "MooncakeClient.put_from"),
    ("hicachectl.backends.mooncake.client", "MooncakeClient.remove"),
)


@dataclass(frozen=True, slots=True)
class Run:
    """Result of a run. A killed run has code -9 and unknown counts.

    begun: whether the run read a page or changed anything.
    read: bytes requested from the source.
    """

    code: int
    stdout: str
    stderr: str
    begun: bool
    written: int = 0
    steps: int = 0
    read: int = 0

    @property
    def killed(self) -> bool:
        return self.code == -signal.SIGKILL

    @property
    def document(self) -> dict[str, Any]:
        assert self.code == 0, self
        assert "Traceback" not in self.stderr, self
        document: dict[str, Any] = json.loads(self.stdout)
        return document


class Runner(Closing):
    """Runs command lines, each in its own process. This is a context manager."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.killed"],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(
        self, *arguments: object, home: Path, kill: tuple[Unit, int] | None = None
    ) -> Run:  # fmt: skip
        """Run a command line, killed at a point if one is given."""
        request = {
            "arguments": [str(argument) for argument in arguments],
            "home": str(home),
            "kill": kill,
            "folder": str(self._folder),
        }
        run = self._answer(request)
        if run.code == -signal.SIGSEGV and not run.begun:
            # A forked child of a process with native threads can fail before its first step.
            run = self._answer(request)
        assert run.code in (0, 4, -signal.SIGKILL), run
        return run

    def _answer(self, request: dict[str, Any]) -> Run:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        assert answer, "the process that forks has ended"
        return Run(**json.loads(answer))

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()


class _Counter:
    """Counts bytes and steps of this process, and kills it; sets the first byte of `begun`."""

    def __init__(self, kill: tuple[Unit, int] | None, begun: mmap.mmap) -> None:
        self._begun = begun
        unit, at = kill or ("steps", 0)
        self._fatal_step = at if unit == "steps" else 0
        self._fatal_byte = at if unit == "bytes" else 0
        self._lock = threading.RLock()
        self.steps = self.written = self.read = 0

    def step(self) -> None:
        """Count a step, right before it happens."""
        with self._lock:
            self._begun[0] = 1
            self.steps += 1
            if self.steps == self._fatal_step:
                os.kill(os.getpid(), signal.SIGKILL)

    def writing(self, nbytes: int) -> int:
        """Count bytes to be written. Return how many to write before the kill; -1 for all."""
        with self._lock:
            self._begun[0] = 1
            before, self.written = self.written, self.written + nbytes
            if self._fatal_byte and before < self._fatal_byte <= self.written:
                return self._fatal_byte - before
            return -1

    def reading(self, nbytes: int) -> None:
        """Count bytes read from the source."""
        with self._lock:
            self._begun[0] = 1
            self.read += nbytes

    def install(self) -> None:
        """Wrap the counted calls."""
        write, pwrite, writev, pwritev = os.write, os.pwrite, os.writev, os.pwritev
        copy = os.copy_file_range

        def wrote(descriptor: int, data: Any) -> int:
            return self._written(len(data), lambda n: write(descriptor, data[:n]))

        def pwrote(descriptor: int, data: Any, offset: int) -> int:
            return self._written(len(data), lambda n: pwrite(descriptor, data[:n], offset))

        def wrotev(descriptor: int, buffers: Sequence[Any]) -> int:
            data = b"".join(buffers)
            return self._written(len(data), lambda n: writev(descriptor, [data[:n]]))

        def pwrotev(descriptor: int, buffers: Sequence[Any], offset: int) -> int:
            data = b"".join(buffers)
            return self._written(len(data), lambda n: pwritev(descriptor, [data[:n]], offset))

        def copied(source: int, target: int, count: int, *offsets: int) -> int:
            return self._written(count, lambda n: copy(source, target, n, *offsets))

        os.write, os.pwrite = wrote, pwrote
        os.writev, os.pwritev = wrotev, pwrotev  # type: ignore[assignment]
        os.copy_file_range = copied  # type: ignore[assignment]
        for name in ("fsync", "fdatasync"):
            setattr(os, name, self._stepped(getattr(os, name)))
        for module, path in _CALLS:
            owner, _, method = path.partition(".")
            of = getattr(sys.modules[module], owner)
            setattr(of, method, self._stepped(getattr(of, method)))
        system = sys.modules["hicachectl.backends.disk.durable"]
        system.rename_noreplace = self._stepped(system.rename_noreplace)  # type: ignore[attr-defined]
        tree = sys.modules["hicachectl.backends.object_files.tree"]
        tree.exchange = self._stepped(tree.exchange)  # type: ignore[attr-defined]
        self._count_reads()
        sys.addaudithook(self._audited)

    def _audited(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in _EVENTS or (event == "open" and arguments[2] & os.O_CREAT):
            self.step()

    def _count_reads(self) -> None:
        pipeline = sys.modules["hicachectl.io.pipeline"].Pipeline
        one = pipeline._one

        def counted(this: Any, upcoming: Any, *more: Any) -> Any:
            self.reading(upcoming.task.nbytes)
            return one(this, upcoming, *more)

        pipeline._one = counted

    def _written(self, nbytes: int, write: Callable[[int], int]) -> int:
        last = self.writing(nbytes)
        if last < 0:
            return write(nbytes)
        with self._lock:  # no other thread can write any more
            write(last)
            os.kill(os.getpid(), signal.SIGKILL)
            raise AssertionError("killed")

    def _stepped(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            self.step()
            return function(*arguments, **options)

        return call


def _child(arguments: list[str], home: str, counter: _Counter, report: Path) -> int:
    """Run a command line in this process, and record the counts."""
    os.environ["HOME"] = home
    counter.install()
    status = int(importlib.import_module("hicachectl.__main__").run(arguments))
    sys.stdout.flush()
    counts = {"written": counter.written, "steps": counter.steps, "read": counter.read}
    report.write_text(json.dumps(counts))
    return status


def _forked(arguments: list[str], home: str, kill: Any, folder: str) -> dict[str, Any]:
    """Run a command line in a child."""
    base = Path(folder)
    paths = [base / name for name in ("stdout", "stderr", "report")]
    for path in paths:
        path.unlink(missing_ok=True)
    begun = mmap.mmap(-1, 1)  # shared with the child
    child = os.fork()
    if not child:
        status = 1
        try:
            for number, path in enumerate(paths[:2], 1):
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
            status = _child(arguments, home, _Counter(kill, begun), paths[2])
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    _, status = os.waitpid(child, 0)
    report = json.loads(paths[2].read_text()) if paths[2].exists() else {}
    return {
        "code": os.waitstatus_to_exitcode(status),
        "stdout": paths[0].read_text(),
        "stderr": paths[1].read_text(),
        "begun": bool(begun[0]),
        **report,
    }


def _serve() -> None:
    """Answer requests until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    for line in sys.stdin:
        print(json.dumps(_forked(**json.loads(line))), file=answers)


if __name__ == "__main__":
    for name in _IMPORTED_ONCE:
        importlib.import_module(name)
    _serve()
