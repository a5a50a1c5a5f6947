"""Write the status of this rank into its store, in a thread of its own.

A file system that hangs holds up only this thread. Of SGLang's calls, only `close` waits for the
thread, and at most `_LONGEST_CLOSE_S`.
"""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING, Any

from msgspec import structs

from hicachectl import __version__
from hicachectl.backends.disk.directory import Directory, Trust
from hicachectl.backends.disk.statuses import (
    process_start_ns,
    remove_ended,
    this_host,
    write_status,
)
from hicachectl.formats.errors import HicacheError
from hicachectl.formats.objects import ANCHOR
from hicachectl.formats.plugin_status import COUNTED, WRITTEN_EVERY_S, PluginStatus
from hicachectl.formats.wording import reason_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hicachectl.backends.sglang.context import Context
    from hicachectl.backends.sglang.counters import Counters
    from hicachectl.backends.sglang.page_store import ServedPool
    from hicachectl.backends.sglang.settings import Settings

_LONGEST_CLOSE_S = 0.5


class StatusFile:
    """Writes a rank's status into the directory of a store, now and every `WRITTEN_EVERY_S`."""

    def __init__(self, path: str, status: PluginStatus, counters: Counters) -> None:
        """Start the thread. A directory that is missing or read-only gets no status.

        path: path of the directory.
        status: a status with the fields that do not change (`first_status`).
        """
        self._path = path
        self._status = status
        self._counters = counters
        # The `Trust` of the directory is kept, because a new `Trust` may create a file to learn the
        # owner of new files.
        self._trust: Trust | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hicachectl-status", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # the system allows no more threads
            counters.failed("unreported", str(error))

    def close(self) -> None:
        """Let the thread write the last status and end; wait at most `_LONGEST_CLOSE_S`."""
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join(_LONGEST_CLOSE_S)

    def _run(self) -> None:
        first, last = True, False
        while not last:
            last = self._closing.is_set()
            try:
                self._write(first=first, last=last)
                first = False
            except (FileNotFoundError, NotADirectoryError):
                pass  # reads and writes of pages report a missing store
            except (OSError, HicacheError) as error:
                self._counters.failed("unreported", reason_of(error))
            except Exception as error:  # the thread goes on after any error
                self._counters.failed("error", f"status: {error!r}")
            self._closing.wait(WRITTEN_EVERY_S)

    def _write(self, *, first: bool, last: bool) -> None:
        with Directory.named(self._path, writes=True, trust=self._trust) as directory:
            self._trust = directory.trust
            here = directory.descriptor
            if not os.access(".", os.W_OK, dir_fd=here, effective_ids=True):
                return
            tally = self._counters.tally
            status = structs.replace(
                self._status,
                written_ns=time.time_ns(),
                closed=last,
                excluded=dict(tally.excluded),
                **{kind: tally.of(kind) for kind in COUNTED},
            )
            write_status(directory, status)
            if first:
                remove_ended(directory, status)


def first_status(
    config: Any, context: Context, settings: Settings, pools: Mapping[str, ServedPool]
) -> PluginStatus:
    """Return the status of a rank at the beginning of an attachment, with counts of 0.

    config: SGLang's HiCacheStorageConfig.
    """
    kv = pools.get(ANCHOR)
    host, namespace = this_host()
    now_ns = time.time_ns()
    return PluginStatus(
        release=__version__,
        host=host,
        pid=os.getpid(),
        pid_namespace=namespace,
        started_ns=process_start_ns(os.getpid()) or 0,
        tp_rank=config.tp_rank,
        tp_size=config.tp_size,
        pp_rank=config.pp_rank,
        pp_size=config.pp_size,
        cp_rank=config.attn_cp_rank,
        cp_size=config.attn_cp_size,
        dp_rank=config.dp_rank,
        model=str(config.model_name),
        weights=context.weights,
        draft_weights=context.draft_weights,
        page_size=context.page_size,
        dtype="" if kv is None else kv.identity.dtype,
        layout="" if kv is None else kv.identity.layout,
        pools=tuple(sorted(pools)),
        stores=settings.names,
        attached_ns=now_ns,
        written_ns=now_ns,
    )
