"""Do a stage of a part in a process of its own, which a crash or a kill ends without its parent.

The order, with its options and secrets, comes over stdin. `python -m hicachectl.parts.child PARENT`
is that process; `in_child` starts it. A stage opens the job, or does the work of a part.

Each message is a frame: eight bytes with the length (little-endian), then MessagePack. Tables are
Arrow IPC streams.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import pyarrow as pa
from msgspec import Struct

from hicachectl.formats.errors import HicacheError
from hicachectl.io.forking import end_with, told
from hicachectl.parts.job import PartInput
from hicachectl.parts.manifest import parse_manifest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from types import FrameType

    from hicachectl.parts.job import Job, StageResult

Stage = Literal["open", "work"]
LENGTH_BYTES = 8
_ROWS_AT_ONCE = 16_384  # rows of a piece
STOP_SECONDS = 30.0  # for a cancelled child, until it is killed
_LOOK_SECONDS = 0.5  # the longest that a cancelled task of Ray goes unnoticed
_PROGRESS_SECONDS = 0.5  # between two messages
_CHUNK = 1 << 20
_TERMINATED = 143


class Outcome(Struct, tag=True):
    """End of a stage, with members of its `StageResult`; its tables were sent before, in pieces."""

    facts: dict[str, Any] = {}
    settled: bool = True


class Order(Struct, tag=True, kw_only=True):
    """A stage to do. Members without a description are those of `PartInput`.

    job: pickled function that opens the job. It comes from the driver, as the code of a Ray task
        does.
    manifest: the manifest as JSON.
    age: seconds since the listing when the order was written.
    spent: seconds since the driver began.
    """

    stage: Stage
    job: bytes
    manifest: bytes = b""
    part: int = 0
    owner: str = ""
    divided: int = 1
    parts_here: int = 1
    age: float = 0.0
    spent: float = 0.0
    tables: dict[str, bytes] = {}


class Piece(Struct, tag=True):
    """Rows of a result's table."""

    table: str
    content: bytes


class Moved(Struct, tag=True):
    """Progress: new bytes, and the total of the part."""

    new: int
    total: int


class Failed(Struct, tag=True):
    """A stage failed. name: class in `formats.errors`; "" for a bug, with its traceback as text."""

    name: str
    text: str


class Lost(Struct, tag=True):
    """The process of a stage ended without an outcome. text: how."""

    text: str


Answer = Outcome | Piece | Moved | Failed | Lost
# Decoders of messages without their lengths.
ANSWERS: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)
ORDERS = msgspec.msgpack.Decoder(Order)


def frame(message: Order | Answer) -> bytes:
    """Return a message as a frame."""
    content = msgspec.msgpack.encode(message)
    return len(content).to_bytes(LENGTH_BYTES, "little") + content


def table_bytes(table: pa.Table) -> bytes:
    """Return a table as an IPC stream."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    content: bytes = sink.getvalue().to_pybytes()
    return content


def table_from(content: bytes) -> pa.Table:
    """Read a table from an IPC stream."""
    return pa.ipc.open_stream(content).read_all()


# the parent


def in_child(order: bytes) -> Iterator[bytes]:
    """Do an ordered stage in a child process; yield its answers as messages without lengths.

    order: a frame. The last answer is an Outcome, Failed or Lost. If the caller stops early, the
    child ends its work cleanly, as after SIGTERM. The child does not outlive this process.
    """
    child = subprocess.Popen(
        [sys.executable, "-m", "hicachectl.parts.child", str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=_environment(),
        start_new_session=True,  # no signals from a terminal
    )
    try:
        assert child.stdin is not None
        with suppress(BrokenPipeError), child.stdin as stream:
            stream.write(order)
        yield from _answers(child)
    finally:
        _end(child)


def _environment() -> dict[str, str]:
    """Return the environment of a child, which imports from where this process does."""
    own = dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, sys.path)))
    if own.get("OMP_NUM_THREADS") == "1":  # Ray sets this for a task with one CPU
        del own["OMP_NUM_THREADS"]
    return own


def _answers(child: subprocess.Popen[bytes]) -> Iterator[bytes]:
    """Yield whole messages until the child closes its end; then Lost if its status is not 0."""
    assert child.stdout is not None
    descriptor = child.stdout.fileno()
    held = bytearray()
    while True:
        # Ray cancels a task with an exception, which cannot interrupt a blocked read.
        if not select.select([descriptor], [], [], _LOOK_SECONDS)[0]:
            continue
        chunk = os.read(descriptor, _CHUNK)
        if not chunk:
            break
        held += chunk
        while (message := _taken(held)) is not None:
            yield message
    status = child.wait()
    if status:
        yield frame(Lost(_how(status)))[LENGTH_BYTES:]


def _taken(held: bytearray) -> bytes | None:
    """Remove the first message from received bytes and return it; None if it is not whole."""
    nbytes = LENGTH_BYTES + int.from_bytes(held[:LENGTH_BYTES], "little")
    if len(held) < LENGTH_BYTES or len(held) < nbytes:
        return None
    message = bytes(held[LENGTH_BYTES:nbytes])
    del held[:nbytes]
    return message


def _how(status: int) -> str:
    if status > 0:
        return f"the process ended with status {status}"
    return f"the process was killed by signal {-status} ({signal.strsignal(-status)})"


def _end(child: subprocess.Popen[bytes]) -> None:
    """Terminate a child that still works; kill it after STOP_SECONDS."""
    assert child.stdout is not None
    child.stdout.close()  # a child that waits to write goes on
    if child.poll() is None:
        child.terminate()
        with suppress(subprocess.TimeoutExpired):
            child.wait(STOP_SECONDS)
        child.kill()
    child.wait()


# the child


class _StoppedError(BaseException):
    """SIGTERM, raised in the main thread to run `finally` blocks."""


class Answering:
    """Answers to the parent, from any thread."""

    def __init__(self, descriptor: int) -> None:
        self.stopped = False
        self._descriptor = descriptor
        self._lock = threading.RLock()  # a signal may interrupt the thread that holds it
        self._sent = 0.0
        self._new = 0

    def send(self, message: Answer) -> None:
        """Send one answer, whole."""
        content = memoryview(frame(message))
        with self._lock:
            while content:
                content = content[os.write(self._descriptor, content) :]

    def moved(self, new: int, total: int) -> None:
        """Report progress, at most twice a second."""
        if self.stopped:  # C code may have discarded the exception
            raise _StoppedError
        with self._lock:
            self._new += new
            now = time.monotonic()
            if now - self._sent < _PROGRESS_SECONDS:
                return
            new, self._new, self._sent = self._new, 0, now
        with suppress(BrokenPipeError):  # the parent is about to end this process
            self.send(Moved(new, total))

    def stop(self, _signal: int, _frame: FrameType | None) -> None:
        """Handle SIGTERM: end the main thread's work, once."""
        if not self.stopped:
            self.stopped = True
            raise _StoppedError


def main(parent: int) -> None:
    """Do the stage ordered on stdin; answer on stdout."""
    end_with(parent)
    answering = Answering(os.dup(1))
    os.dup2(2, 1)  # libraries print on stdout
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, answering.stop)
        head = sys.stdin.buffer.read(LENGTH_BYTES)
        content = sys.stdin.buffer.read(int.from_bytes(head, "little"))
        order = ORDERS.decode(content)
        del content
        answer(order, answering)
    except _StoppedError:
        os._exit(_TERMINATED)
    except BaseException as error:
        answering.send(Failed(*told(error)))
    # A normal exit could abort while threads of libraries run. The stores are closed here.
    os._exit(0)


def answer(order: Order, answering: Answering) -> None:
    """Do a stage in this process; answer with its result, or with an error that is no bug."""
    try:
        result = _done(order, answering)
    except HicacheError as error:
        answering.send(Failed(*told(error)))
        return
    if result is None:
        answering.send(Outcome())
        return
    for name, table in result.tables.items():
        for start in range(0, max(len(table), 1), _ROWS_AT_ONCE):  # at least one piece each
            answering.send(Piece(name, table_bytes(table.slice(start, _ROWS_AT_ONCE))))
    answering.send(Outcome(result.facts, result.settled))


def _done(order: Order, answering: Answering) -> StageResult | None:
    """Do a stage; return its result, or None for the stage `open`."""
    listed = time.monotonic() - order.age
    open_job: Callable[[], AbstractContextManager[Job]] = pickle.loads(order.job)
    with open_job() as job:
        if order.stage == "open":
            return None
        tables = {name: table_from(content) for name, content in order.tables.items()}
        given = PartInput(
            manifest=parse_manifest(order.manifest, "The driver's manifest"),
            part=order.part,
            owner=order.owner,
            tables={name: lambda table=table: table for name, table in tables.items()},  # type: ignore[misc]
            divided=order.divided,
            parts_here=order.parts_here,
            seconds_of=lambda limit: max(limit - order.spent, 0),  # parts follow one another
            age=lambda: time.monotonic() - listed,
        )
        return job.work(given, answering.moved)


if __name__ == "__main__":
    main(int(sys.argv[1]))
