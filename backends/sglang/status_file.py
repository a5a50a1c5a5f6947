"""The status of this rank in its store, written by a thread of its own.

No call of SGLang waits for it: a file system that hangs holds up this thread alone.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

from hicachectl.backends.disk.directory import Directory
from hicachectl.backends.disk.statuses import remove_ended, write_status
from hicachectl.formats.errors import HicacheError
from hicachectl.formats.plugin_status import WRITTEN_EVERY_S
from hicachectl.formats.wording import reason_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicachectl.backends.sglang.counters import Counters
    from hicachectl.formats.plugin_status import PluginStatus

_LONGEST_CLOSE_S = 0.5


class StatusFile:
    """Writes a rank's status into the directory of a store, now and every `WRITTEN_EVERY_S`."""

    def __init__(
        self, path: str, status: Callable[[bool], PluginStatus], counters: Counters
    ) -> None:
        """Start the thread. A directory that is missing or read-only gets no status.

        status: returns the status as it is now; its argument tells whether it is the last one.
        """
        self._path = path
        self._status = status
        self._counters = counters
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hicachectl-status", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # the system allows no more threads
            counters.failed("unreported", str(error))

    def close(self) -> None:
        """Let the thread write the last status and end; wait shortly for it."""
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join(_LONGEST_CLOSE_S)

    def _run(self) -> None:
        first, last = True, False
        while not last:
            last = self._closing.is_set()
            try:
                self._write(first=first, last=last)
            except (FileNotFoundError, NotADirectoryError):
                pass  # whoever reads or writes pages says so
            except (OSError, HicacheError) as error:
                self._counters.failed("unreported", reason_of(error))
            except Exception as error:  # any error: the thread goes on
                self._counters.failed("error", f"status: {error!r}")
            first = False
            self._closing.wait(WRITTEN_EVERY_S)

    def _write(self, *, first: bool, last: bool) -> None:
        with Directory.named(self._path, writes=True) as directory:
            here = directory.descriptor
            if not os.access(".", os.W_OK, dir_fd=here, effective_ids=True):
                return
            status = self._status(last)
            write_status(directory, status)
            if first:
                remove_ended(directory, status)
