"""Run GIL-bound work in forked processes, which share the parent's memory.

A lock held at the fork would stay locked in the child. Other threads (Arrow's, the progress bar's)
hold none: they are idle, since the parent is not in an Arrow call. Arrow recreates its thread pools
in a child; the children's Arrow calls (slicing a table, taking a few rows, joining keys) run in the
calling thread.
"""

from __future__ import annotations

import fcntl
import gc
import json
import os
import signal
import traceback
import warnings
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import connection
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from hicachectl.backends.disk.io import LIBC, Closing
from hicachectl.formats import errors
from hicachectl.formats.errors import HicacheError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    Send = Callable[[Any], None]

T = TypeVar("T")

_PR_SET_PDEATHSIG = 1
# A terminal or service manager also sends these to the children, which ignore them; the parent
# ends its children.
_PARENTS_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_MESSAGE, _ERROR, _END = b"m", b"e", b"."


class SharedCounter:
    """Counter from 0, shared by forked processes; exactly one process draws each number."""

    def __init__(self) -> None:
        self._file = os.memfd_create("hicachectl-tickets")

    def deal(self, things: Sequence[T]) -> Iterator[T]:
        """Yield the things whose numbers this process draws."""
        while (number := self._draw()) < len(things):
            yield things[number]

    def close(self) -> None:
        """Close the counter's file."""
        os.close(self._file)

    def _draw(self) -> int:
        # The system releases a killed process's lock. A shared file position would need no lock,
        # but does not move atomically on every file.
        fcntl.lockf(self._file, fcntl.LOCK_EX)
        try:
            number = int.from_bytes(os.pread(self._file, 8, 0), "little")
            os.pwrite(self._file, (number + 1).to_bytes(8, "little"), 0)
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)
        return number


@dataclass(frozen=True, slots=True, eq=False)
class _Worker:
    pid: int
    inbox: connection.Connection


class Workers(Closing):
    """Forked processes that do the same work; iterate once for their messages.

    Iterating raises a child's HicacheError unchanged, its other exceptions as RuntimeError with the
    child's traceback, and UsageError if a child ends without a report, as when killed. Leaving the
    with block kills working children. No child outlives this process, even if this process
    is killed.
    """

    def __init__(self, count: int, work: Callable[[Send], None]) -> None:
        """Start the work in `count` processes, or fewer if the system allows no more.

        work: called in each child with a function that sends the parent a message of JSON types.
        Raises OSError if no child can start.
        """
        self._children: list[_Worker] = []
        try:
            for _ in range(count):
                self._fork(work)
        except OSError:
            if not self._children:
                raise
        except BaseException:
            self.close()
            raise

    def __iter__(self) -> Iterator[Any]:
        busy = {child.inbox: child for child in self._children}
        while busy:
            for inbox in connection.wait(list(busy)):
                assert isinstance(inbox, connection.Connection)
                try:
                    received = inbox.recv_bytes()
                except (EOFError, OSError):  # between messages, or within one
                    raise self._killed(busy[inbox]) from None
                kind, content = received[:1], received[1:]
                if kind == _MESSAGE:
                    yield json.loads(content)
                elif kind == _ERROR:
                    raise raised(*json.loads(content), where="In a forked process")
                else:
                    del busy[inbox]

    def close(self) -> None:
        """Kill every child; no child needs cleanup."""
        for child in self._children:
            child.inbox.close()
            with suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGKILL)
        while self._children:
            with suppress(ChildProcessError):  # if SIGCHLD is ignored, the system reaps it
                os.waitpid(self._children[-1].pid, 0)
            self._children.pop()

    def _fork(self, work: Callable[[Send], None]) -> None:
        """Start and record a child.

        If a signal prevents the recording, the child ends once it cannot send.
        """
        inbox, outbox = connection.Pipe(duplex=False)
        parent = os.getpid()
        # The parent's handlers must not run in the child.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _PARENTS_SIGNALS)
        try:
            with warnings.catch_warnings():
                # Python 3.12 warns of other threads; see the module docstring.
                warnings.filterwarnings("ignore", ".*multi-threaded", DeprecationWarning)
                pid = os.fork()
            if not pid:
                others = [inbox, *(child.inbox for child in self._children)]
                _live(work, outbox, others, parent, mask)
            self._children.append(_Worker(pid, inbox))
        except OSError:
            inbox.close()
            raise
        finally:
            outbox.close()
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def _killed(self, child: _Worker) -> UsageError:
        self._children.remove(child)  # after waitpid, another process may get the pid
        child.inbox.close()
        how = "ended without a result"
        with suppress(ChildProcessError):
            _, status = os.waitpid(child.pid, 0)
            if os.WIFSIGNALED(status):
                number = os.WTERMSIG(status)
                how = f"was killed by signal {number} ({signal.strsignal(number)})"
        return UsageError(
            f"A reader process {how}; if memory ran out, give a smaller --buffer-bytes, or --jobs 1"
        )


def end_with(parent: int) -> None:
    """Have the system kill this process when its parent ends. parent: its process id."""
    LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before prctl
        os._exit(0)


def _live(
    work: Callable[[Send], None],
    outbox: connection.Connection,
    others: list[connection.Connection],
    parent: int,
    mask: set[int],
) -> NoReturn:
    """Run the work in the child, send its end or error, and exit without the parent's cleanup."""
    try:
        for inherited in others:  # an open copy would hide that the parent has closed an inbox
            inherited.close()
        for number in _PARENTS_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        end_with(parent)
        gc.freeze()  # a collection would write to, and so copy, all shared memory
        work(lambda message: outbox.send_bytes(_MESSAGE + json.dumps(message).encode()))
        outbox.send_bytes(_END)
    except BaseException as error:
        with suppress(OSError):  # if the parent has ended
            outbox.send_bytes(_ERROR + json.dumps(told(error)).encode())
    finally:
        os._exit(0)


def told(error: BaseException) -> tuple[str, str]:
    """Return an exception for another process: the name of its class, and its text.

    The class is the nearest in `formats.errors`. Of a bug, the name is "", and the text is the
    traceback.
    """
    if not isinstance(error, HicacheError):
        return "", "".join(traceback.format_exception(error))
    classes = type(error).__mro__
    name = next(cls.__name__ for cls in classes if cls.__module__ == errors.__name__)
    return name, str(error)


def raised(name: str, text: str, *, where: str) -> Exception:
    """Return the exception of another process. where: names the process of a bug."""
    if name:
        error: HicacheError = getattr(errors, name, HicacheError)(text)
        return error
    return RuntimeError(f"{where}:\n{text}")
