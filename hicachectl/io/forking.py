"""Work in forked processes, which share what is in memory and tell their parent how they fare.

For work that the GIL keeps threads from doing at the same time. Other threads may live when this
process forks: Arrow's, and the progress bar's. They wait for work, and hold no lock that a child
would inherit locked, since the parent is between two calls of Arrow; Arrow itself makes its
thread pools anew in a child. What children ask of Arrow (a slice of a table, a few rows of it,
its keys) is done in the thread that asks.
"""

from __future__ import annotations

import ctypes
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
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar

from hicachectl.formats import errors
from hicachectl.formats.errors import HicacheError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    Send = Callable[[Any], None]

T = TypeVar("T")

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)
# Sent to all processes of a terminal or a service: the parent decides, and ends its children.
_PARENTS_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_MESSAGE, _ERROR, _END = b"m", b"e", b"."


class SharedCounter:
    """Numbers from 0 on, each drawn by one of the processes that share this across a fork."""

    def __init__(self) -> None:
        self._file = os.memfd_create("hicachectl-tickets")

    def deal(self, things: Sequence[T]) -> Iterator[T]:
        """Give the things whose numbers this process draws, until all are drawn."""
        while (number := self._draw()) < len(things):
            yield things[number]

    def close(self) -> None:
        """Close the file behind it."""
        os.close(self._file)

    def _draw(self) -> int:
        # The system gives up the lock of a process that is killed. (Moving the file's position,
        # which processes share, needs no lock but is not atomic on every file.)
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


class Workers:
    """Forked processes that each do the same work; iterate once, for the messages they send.

    What a child raises is raised to the iterating thread: a HicacheError as it is, anything else
    as RuntimeError with the child's traceback; UsageError when a child is killed. Leaving the
    with block kills those that are still at work. None outlives this process, however it ends.
    """

    def __init__(self, count: int, work: Callable[[Send], None]) -> None:
        """Begin the work in `count` processes, fewer where the system has no more.

        work: called in each child, with what sends one message of JSON's types. Raises OSError
        when there can be no child at all.
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
                    raise _raised(*json.loads(content))
                else:
                    del busy[inbox]

    def close(self) -> None:
        """End every child; they own nothing that would have to be put in order."""
        for child in self._children:
            child.inbox.close()
            with suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGKILL)
        while self._children:
            with suppress(ChildProcessError):  # where SIGCHLD is ignored, the system waits
                os.waitpid(self._children[-1].pid, 0)
            self._children.pop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _fork(self, work: Callable[[Send], None]) -> None:
        """Add a child. One that a signal keeps us from noting ends when it cannot send."""
        inbox, outbox = connection.Pipe(duplex=False)
        parent = os.getpid()
        # No handler of the parent's may run in the child before it has its own.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _PARENTS_SIGNALS)
        try:
            with warnings.catch_warnings():
                # Python 3.12 warns of other threads; the head of this module is about them.
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
        """Say how a child ended that has not said so itself."""
        self._children.remove(child)  # once waited for, its number may be another process's
        child.inbox.close()
        how = "has ended"
        with suppress(ChildProcessError):
            _, status = os.waitpid(child.pid, 0)
            if os.WIFSIGNALED(status):
                number = os.WTERMSIG(status)
                how = f"was ended by signal {number} ({signal.strsignal(number)})"
        return UsageError(
            f"a process that was reading {how}; if memory ran out, give a smaller "
            "--buffer-bytes, or --jobs 1"
        )


def _live(
    work: Callable[[Send], None],
    outbox: connection.Connection,
    others: list[connection.Connection],
    parent: int,
    mask: set[int],
) -> NoReturn:
    """Be the child: work, say how it went, and leave without the parent's clean-up and output."""
    try:
        for inherited in others:  # or a child would not notice that nobody listens any more
            inherited.close()
        for number in _PARENTS_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the line above
            os._exit(0)
        gc.freeze()  # a collection would write to, and so copy, every page the parent shares
        work(lambda message: outbox.send_bytes(_MESSAGE + json.dumps(message).encode()))
        outbox.send_bytes(_END)
    except BaseException as error:
        name, text = type(error).__name__, str(error)
        if not isinstance(error, HicacheError):
            name, text = "", traceback.format_exc()
        with suppress(OSError):  # the parent is gone
            outbox.send_bytes(_ERROR + json.dumps([name, text]).encode())
    finally:
        os._exit(0)


def _raised(name: str, text: str) -> Exception:
    """Make the exception that a child has told of."""
    if name:
        error: HicacheError = getattr(errors, name, HicacheError)(text)
        return error
    return RuntimeError(f"in a forked process:\n{text}")
