"""Do a stage of a part in a process of its own, so that a crash does not end the parent.

`in_child` starts the process, as `python -m hicachectl.parts.child PARENT`. The order, with its
options and secrets, comes over stdin. A stage opens the job. If the order has the input of a part,
the stage then does the work of this part.

A message is MessagePack, sent by `multiprocessing.connection`. Tables are Arrow IPC streams.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection, Pipe
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa
from msgspec import Struct

from hicachectl.io.forking import end_with, packed_error
from hicachectl.parts.job import PartInput, StageResult

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from types import FrameType

    from hicachectl.parts.job import Job

_ROWS_AT_ONCE = 16_384  # rows of a piece
STOP_SECONDS = 30.0  # time for a cancelled child to end before it is killed
_LOOK_SECONDS = 0.5  # longest time until a cancelled task of Ray is noticed
_PROGRESS_SECONDS = 0.5  # least time between two messages about progress
_TERMINATED = 143


class Outcome(Struct, tag=True):
    """End of a stage, with members of its `StageResult`. Its tables were sent earlier in pieces."""

    facts: dict[str, Any] = {}
    settled: bool = True


class Order(Struct, kw_only=True):
    """A stage to do.

    job: pickled function that opens the job. It can be trusted as much as the code of a Ray task,
        because both come from the driver.
    given: input of the part to work on; None to open the job only.
    age: seconds from the listing's start to this order. The child computes `given.began` from this
        age, by its own clock.
    tables: tables of the part.
    """

    job: bytes
    given: PartInput | None = None
    age: float = 0.0
    tables: dict[str, bytes] = {}


class Piece(Struct, tag=True):
    """Rows of a result's table."""

    table: str
    content: bytes


class Moved(Struct, tag=True):
    """Progress of a part.

    new: bytes done since the last message.
    total: bytes of the whole part.
    """

    new: int
    total: int


class Failed(Struct, tag=True):
    """A stage failed.

    name: class in `formats.errors`; "" for a bug.
    text: message of the error; for a bug, the traceback.
    """

    name: str
    text: str


class Lost(Struct, tag=True):
    """The process of a stage ended without an outcome. text: how the process ended."""

    text: str


Answer = Outcome | Piece | Moved | Failed | Lost
ANSWERS: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)
ORDERS = msgspec.msgpack.Decoder(Order)
encoded = msgspec.msgpack.encode


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
    """Do an ordered stage in a child process. Yield its answers.

    The last answer is an Outcome, Failed or Lost. If the caller stops early, the child ends its
    work cleanly, as after SIGTERM. The child does not outlive this process.
    """
    (stdin, ordering), (answers, stdout) = Pipe(duplex=False), Pipe(duplex=False)
    with stdin, stdout:
        child = subprocess.Popen(
            [sys.executable, "-m", "hicachectl.parts.child", str(os.getpid())],
            stdin=stdin.fileno(),
            stdout=stdout.fileno(),
            env=_environment(),
            start_new_session=True,  # so that a terminal sends the child no signals
        )
    try:
        with suppress(BrokenPipeError), ordering:
            ordering.send_bytes(order)
        yield from _received(answers)
        if status := child.wait():
            yield encoded(Lost(_how(status)))
    finally:
        answers.close()  # a child that is blocked in a write then gets an error, and can end
        _end(child)


def _environment() -> dict[str, str]:
    """Return an environment in which a child imports the same modules as this process."""
    own = dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, sys.path)))
    if own.get("OMP_NUM_THREADS") == "1":  # Ray sets this for a task with one CPU
        del own["OMP_NUM_THREADS"]
    return own


def _received(answers: Connection) -> Iterator[bytes]:
    """Yield whole messages until the child closes its end, perhaps within a message."""
    with suppress(EOFError, OSError):
        while True:
            # Ray cancels a task with an exception, and an exception cannot interrupt a blocked
            # read.
            if answers.poll(_LOOK_SECONDS):
                yield answers.recv_bytes()


def _how(status: int) -> str:
    if status > 0:
        return f"the process ended with status {status}"
    return f"the process was killed by signal {-status} ({signal.strsignal(-status)})"


def _end(child: subprocess.Popen[bytes]) -> None:
    """Terminate a child that still works. If it has not ended after STOP_SECONDS, kill it."""
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
    """Answers to the parent. Any thread may send answers."""

    def __init__(self, parent: Connection) -> None:
        self.stopped = False
        self._parent = parent
        self._lock = threading.RLock()  # a signal may interrupt the thread that holds it
        self._sent = 0.0
        self._new = 0

    def send(self, message: Answer) -> None:
        """Send one answer. Other threads wait meanwhile, so answers do not mix."""
        with self._lock:
            self._parent.send_bytes(encoded(message))

    def moved(self, new: int, total: int) -> None:
        """Report progress, at most twice a second."""
        if self.stopped:  # C code may have discarded the exception that `stop` raised
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
        """End the main thread's work at the first SIGTERM. Ignore later signals."""
        if not self.stopped:
            self.stopped = True
            raise _StoppedError


def main(parent: int) -> None:
    """Do the stage that is ordered on stdin. Answer on stdout."""
    end_with(parent)
    answering = Answering(Connection(os.dup(1), readable=False))
    os.dup2(2, 1)  # stdout is for answers, so what libraries print there goes to stderr
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, answering.stop)
        with Connection(os.dup(0), writable=False) as orders:
            order = ORDERS.decode(orders.recv_bytes())
        answer(order, answering)
    except _StoppedError:
        os._exit(_TERMINATED)
    except BaseException as error:
        answering.send(Failed(*packed_error(error)))
    # A normal exit could abort while threads of libraries run. The stores are already closed.
    os._exit(0)


def answer(order: Order, answering: Answering) -> None:
    """Do a stage in this process, and answer with its result. Raises the errors of the job."""
    began = time.monotonic() - order.age
    open_job: Callable[[], AbstractContextManager[Job]] = pickle.loads(order.job)
    with open_job() as job:
        result = StageResult({})
        if order.given is not None:
            given = msgspec.structs.replace(order.given, began=began)
            tables = {name: partial(table_from, content) for name, content in order.tables.items()}
            result = job.work(given, tables, answering.moved)
    for name, table in result.tables.items():
        # Send at least one piece of each table, because the parent makes a table of the pieces.
        for start in range(0, max(len(table), 1), _ROWS_AT_ONCE):
            answering.send(Piece(name, table_bytes(table.slice(start, _ROWS_AT_ONCE))))
    answering.send(Outcome(result.facts, result.settled))


if __name__ == "__main__":
    main(int(sys.argv[1]))
