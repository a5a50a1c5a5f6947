"""Run work that is bound by the Python lock (GIL) in forked processes, which share memory.

A lock that another thread holds at the fork stays locked in the child. The parent's other threads
(Arrow's, the progress bar's) hold no lock then, because they are idle while the parent is in no
Arrow call. Arrow makes new thread pools in a child. The children make only Arrow calls that run in
the calling thread, such as slicing a table, taking a few rows and joining keys.
"""

from __future__ import annotations

import fcntl
import gc
import json
import os
import pickle
import queue
import signal
import threading
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
# A terminal or service manager sends these signals to the children, too. The children ignore them,
# because the parent ends its children.
_PARENTS_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_MESSAGE, _ERROR, _END = b"m", b"e", b"."


class SharedCounter:
    """Counter from 0 that forked processes share. Exactly one process draws each number."""

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
        # The system releases the lock of a killed process. A shared file position would need no
        # lock, but not every kind of file moves its position atomically.
        fcntl.lockf(self._file, fcntl.LOCK_EX)
        try:
            number = int.from_bytes(os.pread(self._file, 8, 0), "little")
            os.pwrite(self._file, (number + 1).to_bytes(8, "little"), 0)
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)
        return number


@dataclass(frozen=True, slots=True, eq=False)
class _Child:
    pid: int
    pipe: connection.Connection


class _Children(Closing):
    """Forked processes, each with a pipe to this one.

    Leaving the with block kills the processes. No child outlives this process, even if this process
    is killed.
    """

    def __init__(self, count: int, live: Callable[[connection.Connection], None]) -> None:
        """Start `count` processes, or fewer if the system allows no more.

        live: function that is called in each child with the child's end of the pipe.
        Raises OSError if no child can start.
        """
        self._children: list[_Child] = []
        self._lock = threading.Lock()
        self._how = "ended without a result"
        try:
            for _ in range(count):
                self._fork(live)
        except OSError:
            if not self._children:
                raise
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self._children)

    def close(self) -> None:
        """Kill every child. No child needs cleanup."""
        for child in self._children:
            child.pipe.close()
            with suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGKILL)
        while self._children:
            with suppress(ChildProcessError):  # if SIGCHLD is ignored, the system reaps the child
                os.waitpid(self._children[-1].pid, 0)
            self._children.pop()

    def _fork(self, live: Callable[[connection.Connection], None]) -> None:
        """Start and record a child.

        If a signal prevents the recording, the child ends once it cannot send.
        """
        ours, theirs = connection.Pipe()
        parent = os.getpid()
        # The parent's handlers must not run in the child.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _PARENTS_SIGNALS)
        try:
            with warnings.catch_warnings():
                # Python 3.12 warns of other threads; see the module docstring.
                warnings.filterwarnings("ignore", ".*multi-threaded", DeprecationWarning)
                pid = os.fork()
            if not pid:
                others = [ours, *(child.pipe for child in self._children)]
                _live(live, theirs, others, parent, mask)
            self._children.append(_Child(pid, ours))
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def _killed(self, child: _Child) -> UsageError:
        """Reap a child that ended, and return the error to raise.

        Later calls for this child return an error with the same text.
        """
        with self._lock:
            if child in self._children:  # after waitpid, another process may get the pid
                self._children.remove(child)
                child.pipe.close()
                with suppress(ChildProcessError):
                    _, status = os.waitpid(child.pid, 0)
                    if os.WIFSIGNALED(status):
                        number = os.WTERMSIG(status)
                        self._how = f"was killed by signal {number} ({signal.strsignal(number)})"
        return UsageError(
            f"A forked process {self._how}; if memory ran out, give a smaller --buffer-bytes, or "
            "--jobs 1"
        )


class Workers(_Children):
    """Forked processes that do the same work. Iterate once, to receive their messages.

    Iterating raises:

    - a HicacheError of a child, unchanged
    - RuntimeError with the child's traceback for any other exception of a child
    - UsageError if a child ends without a report, for example because it was killed
    """

    def __init__(self, count: int, work: Callable[[Send], None]) -> None:
        """Start the work in `count` processes, or fewer if the system allows no more.

        work: function that is called in each child. Its argument is a function that sends the
            parent a message of JSON types.
        Raises OSError if no child can start.
        """

        def live(pipe: connection.Connection) -> None:
            work(lambda message: pipe.send_bytes(_MESSAGE + json.dumps(message).encode()))
            pipe.send_bytes(_END)

        super().__init__(count, live)

    def __iter__(self) -> Iterator[Any]:
        busy = {child.pipe: child for child in self._children}
        while busy:
            for pipe in connection.wait(list(busy)):
                assert isinstance(pipe, connection.Connection)
                try:
                    received = pipe.recv_bytes()
                except (EOFError, OSError):  # the child ended, between messages or within one
                    raise self._killed(busy[pipe]) from None
                kind, content = received[:1], received[1:]
                if kind == _MESSAGE:
                    yield json.loads(content)
                elif kind == _ERROR:
                    raise _raised_by_child(content)
                else:
                    del busy[pipe]


class Callees(_Children):
    """Forked processes that call the methods of an object. Thread-safe.

    Each process makes one call at a time. A call raises the errors that iterating `Workers` raises.
    After a child has ended, every later call that meets this child raises the same error.
    """

    def __init__(self, count: int, make: Callable[[], object]) -> None:
        """Start `count` processes, or fewer if the system allows no more.

        make: function that is called in each child, and returns the object.
        Raises OSError if no child can start.
        """

        def live(pipe: connection.Connection) -> None:
            target = make()
            while True:
                try:
                    method, arguments, options = pipe.recv()
                except EOFError:  # the parent has closed the pipe
                    return
                try:
                    result = getattr(target, method)(*arguments, **options)
                    reply = _MESSAGE + pickle.dumps(result)
                except Exception as error:
                    reply = _error(error)
                pipe.send_bytes(reply)

        super().__init__(count, live)
        self._free: queue.SimpleQueue[_Child] = queue.SimpleQueue()
        for child in self._children:
            self._free.put(child)

    def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Call a method in a child, as soon as a child is free. Return the result of the method.

        Arguments and results are pickled.
        """
        child = self._free.get()
        try:
            child.pipe.send((method, arguments, options))
            received = child.pipe.recv_bytes()
        except (EOFError, OSError):
            raise self._killed(child) from None
        except BaseException:
            child.pipe.close()  # so that the next call does not receive the answer to this one
            raise
        finally:
            self._free.put(child)  # also a child that has ended, so that waiting calls fail, too
        if received[:1] == _ERROR:
            raise _raised_by_child(received[1:])
        return pickle.loads(received[1:])


def end_with(parent: int) -> None:
    """Have the system kill this process when its parent ends. parent: process id of the parent."""
    LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before prctl
        os._exit(0)


def _live(
    live: Callable[[connection.Connection], None],
    pipe: connection.Connection,
    others: list[connection.Connection],
    parent: int,
    mask: set[int],
) -> NoReturn:
    """Do the child's work, or send the error that ends it. Exit without the parent's cleanup."""
    try:
        for inherited in others:  # an open copy would hide that the parent has closed a pipe
            inherited.close()
        for number in _PARENTS_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        end_with(parent)
        gc.freeze()  # a collection would write to, and so copy, all shared memory
        live(pipe)
    except BaseException as error:
        with suppress(OSError):  # if the parent has ended
            pipe.send_bytes(_error(error))
    finally:
        os._exit(0)


def _error(error: BaseException) -> bytes:
    """Return the message that a child sends about an exception."""
    return _ERROR + json.dumps(packed_error(error)).encode()


def _raised_by_child(content: bytes) -> Exception:
    """Return the exception in a message of `_error`, without its first byte."""
    return unpacked_error(*json.loads(content), where="In a forked process")


def packed_error(error: BaseException) -> tuple[str, str]:
    """Return the name of an exception's class and its text, to send them to another process.

    The class is the exception's nearest class in `formats.errors`. For a bug, the name is "", and
    the text is the traceback.
    """
    if not isinstance(error, HicacheError):
        return "", "".join(traceback.format_exception(error))
    classes = type(error).__mro__
    name = next(cls.__name__ for cls in classes if cls.__module__ == errors.__name__)
    return name, str(error)


def unpacked_error(name: str, text: str, *, where: str) -> Exception:
    """Return the exception of another process, from the result of `packed_error`.

    where: name of that process, for the message of a bug.
    """
    if name:
        error: HicacheError = getattr(errors, name, HicacheError)(text)
        return error
    return RuntimeError(f"{where}:\n{text}")
