"""A gate for servers to wait at: repeat a run until it succeeds or its time is over."""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from hicachectl.cli.session import held_file
from hicachectl.formats.errors import HicacheError, UsageError
from hicachectl.text.units import counted, human_age

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from hicachectl.results import Result

_FIRST_PAUSE_SECONDS = 2.0
_LONGEST_PAUSE_SECONDS = 60.0  # pauses grow up to this, because each attempt lists stores
_HANGING_SECONDS = 60.0  # when the time of the gate is over, an attempt still has this long to end


class Gate:
    """Repeated attempts at one run, until one succeeds or the time is over."""

    def __init__(
        self,
        seconds: float,
        nothing: Result,
        say: Callable[[str], None],
        write: Callable[[Result], None],
    ) -> None:
        """Set up the gate.

        seconds: time after which the gate opens.
        nothing: result of a run that did nothing.
        say: prints a message; called after each failed attempt.
        write: writes the result if an attempt hangs when the gate opens.
        """
        self._seconds = seconds
        self._result = nothing
        self._say = say
        self._write = write
        self._attempts = 0
        self._failure = "the time was over before the first attempt"
        self._decided = threading.Lock()

    def passed(self, attempt: Callable[[float], Result], *, waited: float) -> Result:
        """Return the result of the last attempt. If the attempt failed, mark the result as excused.

        A run that fails or raises HicacheError is repeated. A signal and any other exception end
        the gate.

        attempt: does the run. Its argument is the time left, in seconds.
        waited: seconds that earlier processes have waited at the gate.
        """
        ends = time.monotonic() + self._seconds - waited
        pause = _FIRST_PAUSE_SECONDS
        with self._watched(ends):
            while (left := ends - time.monotonic()) > 0:
                self._attempts += 1
                try:
                    self._result = result = attempt(left)
                except HicacheError as error:
                    self._failure = str(error)
                else:
                    if result.succeeded or _is_signal(result.ending):
                        return self._told(opened_anyway=False)
                    ending = "" if result.ending is None else str(result.ending)
                    self._failure = ending or next(reversed(result.undone), "not done")
                self._wait(pause, ends - time.monotonic())
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
        return self._excused()

    def _wait(self, pause: float, left: float) -> None:
        """Report the failure, and wait for the next attempt or for the end of the gate's time."""
        if left <= 0:
            return
        again = f"prewarm tries again in {human_age(pause)}, and " if pause < left else ""
        latest = f"the gate opens in {human_age(left)}{' at the latest' if again else ''}"
        self._say(
            f"--open-after: attempt {self._attempts} failed: {self._failure}; {again}{latest}"
        )
        time.sleep(min(pause, left))

    def _excused(self) -> Result:
        """Return the result of a gate that opens because its time is over."""
        said = (
            f"--open-after: OPENED ANYWAY after {human_age(self._seconds)} and "
            f"{counted(self._attempts, 'failed attempt')}; the store is not warm: {self._failure}"
        )
        told = self._told(opened_anyway=True).with_undone(said)
        return replace(told, failed=True, ending=None, excused=True)

    def _told(self, *, opened_anyway: bool) -> Result:
        """Return the last result. Its document also has the members about the gate."""
        document = {**self._result.document, "attempts": self._attempts}
        document["opened_anyway"] = opened_anyway
        document["complete"] &= not opened_anyway
        return replace(self._result, document=document)

    @contextmanager
    def _watched(self, ends: float) -> Iterator[None]:
        """End the process if the block hangs, for example in a call to a dead file system."""

        def leave() -> None:
            if not self._decided.acquire(blocking=False):
                return
            try:
                self._failure = f"attempt {self._attempts} hangs"
                self._write(self._excused())
                sys.stdout.flush()
            finally:
                os._exit(0)

        timer = threading.Timer(max(0.0, ends - time.monotonic()) + _HANGING_SECONDS, leave)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            # If the timer is ending the process, the timer holds the lock, and this never returns.
            self._decided.acquire()


def _is_signal(ending: BaseException | None) -> bool:
    return ending is not None and not isinstance(ending, Exception)


@contextmanager
def waited_since(path: Path | None) -> Iterator[float]:
    """Yield the age of a file in seconds. Create a missing file, and remove it after the block.

    If an exception or a kill ends the block, the file stays, so that the next process continues
    the count from the file's time. Without a path, yield 0.

    Raises UsageError if the file cannot be created or has content, UntrustedError for a link or a
    file of an untrusted user.
    """
    if path is None:
        yield 0.0
        return
    with held_file(f"--open-since {path}", path, "make the file", os.fstat) as (directory, facts):
        if facts.st_size:  # the file has another purpose, and this function would remove it
            raise UsageError(
                f"--open-since {path}: has {counted(facts.st_size, 'byte')}, so it is no file of a "
                "gate; give another name"
            )
        yield max(0.0, time.time() - facts.st_mtime)
        with suppress(OSError):  # if the file stays, a later gate opens early
            directory.remove(path.name)
