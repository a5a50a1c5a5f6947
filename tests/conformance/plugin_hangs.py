"""Serve from a store whose system calls hang, and release them after SGLang has gone on.

Runs inside the SGLang environment: `plugin_hangs.py REQUEST`. The request is that of
plugin_ranks.py, for a deployment of one rank and without steps. `node_pages` is the length of the
nodes written, `write_seconds` the time of a slow write, `slow_timeout` the seconds that a call has
then. The calls of os.open, os.preadv and os.writev block here, as they do on a network file system
without its server.

Prints a JSON object with an entry for each kind of call, "exists", "read" and "write":

    seconds   until SGLang's operation ended
    detached  seconds until the backend was detached, while the calls still hung
    hung      calls that hung
    pages     that the operation found, read or wrote
    untouched whether all bytes of its host pages are as they were overwritten after its end, when
              the calls had been released
    new       names of objects that appeared in the directory after that

and "slow": the pages that were written while each write was slow, on one thread.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.conformance import attached_rank, plugin_ranks, prompt_nodes
    from tests.conformance.attached_rank import AttachedRank
    from tests.conformance.prompt_nodes import Prompt
else:
    import attached_rank
    import plugin_ranks
    import prompt_nodes
    from attached_rank import AttachedRank

_CALLS = ("open", "pread", "preadv", "writev", "pwritev")
_REUSED = 0x5A  # byte of host pages that SGLang uses again
_SETTLED_S = 0.5  # for released threads to go on


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """Hang each kind of call; return what happened."""
    deployment = plugin_ranks.requested(question)
    length = question["node_pages"]
    with attached_rank.sole_rank(deployment, 3 * length) as attached:
        stored = plugin_ranks.requested_prompt(question, deployment)
        other, third = (
            prompt_nodes.random_prompt(length, stored.page_size, length, seed) for seed in (1, 2)
        )
        with attached.attached(question["settings"]):
            attached.back_up(stored)
        hung = Hung()
        return {
            "exists": _exists(attached, stored, question, hung),
            "read": _read(attached, stored, question, hung),
            "write": _write(attached, other, question, hung),
            "slow": _written_slowly(attached, third, question, hung),
        }


def _exists(
    attached: AttachedRank, prompt: Prompt, request: dict[str, Any], hung: Hung
) -> dict[str, Any]:
    attached.attach(request["settings"])
    with hung.calls("open", "pread"):
        begun = time.monotonic()
        found = attached.query(prompt)
        seconds = time.monotonic() - begun
        detached = _detached(attached)
        count = hung.count
    return {"seconds": seconds, "detached": detached, "hung": count, "pages": found.hit_pages}


def _read(
    attached: AttachedRank, prompt: Prompt, request: dict[str, Any], hung: Hung
) -> dict[str, Any]:
    attached.attach(request["settings"])
    found = attached.query(prompt)
    attached.place(found.operation)
    with hung.calls("preadv"):
        begun = time.monotonic()
        attached.read(found)
        seconds = time.monotonic() - begun
        attached.spoil(found.operation, _REUSED)
        detached = _detached(attached)
        count = hung.count
    time.sleep(_SETTLED_S)
    return {
        "seconds": seconds,
        "detached": detached,
        "hung": count,
        "pages": found.pages,
        "untouched": attached.is_spoiled(found.operation, _REUSED),
    }


def _write(
    attached: AttachedRank, prompt: Prompt, request: dict[str, Any], hung: Hung
) -> dict[str, Any]:
    attached.attach(request["settings"])
    operation = next(prompt_nodes.back_up_operations(attached.pools, prompt))
    with hung.calls("writev", "pwritev"):
        begun = time.monotonic()
        attached.write(operation)
        done = attached.written()
        seconds = time.monotonic() - begun
        attached.spoil(operation, _REUSED)
        detached = _detached(attached)
        count, before = hung.count, _names(request)
    time.sleep(_SETTLED_S)
    return {
        "seconds": seconds,
        "detached": detached,
        "hung": count,
        "pages": done.completed_tokens // prompt.page_size,
        "untouched": attached.is_spoiled(operation, _REUSED),
        "new": sorted(_names(request) - before),
    }


def _written_slowly(
    attached: AttachedRank, prompt: Prompt, request: dict[str, Any], hung: Hung
) -> int:
    operation = next(prompt_nodes.back_up_operations(attached.pools, prompt))
    settings = {**request["settings"], "threads": 1, "op_timeout": request["slow_timeout"]}
    with (
        attached.attached(settings),
        hung.delayed("writev", request["write_seconds"]),
    ):
        attached.write(operation)
        return int(attached.written().completed_tokens) // prompt.page_size


def _detached(attached: AttachedRank) -> float:
    begun = time.monotonic()
    attached.detach()
    return time.monotonic() - begun


def _names(request: dict[str, Any]) -> set[str]:
    """Return the names in the store directory, temporary files included."""
    directory = request["settings"]["store"].removeprefix("file://")
    return {path.name for path in Path(directory).iterdir()}


class Hung:
    """System calls of threads other than this one, which hang or are slow on demand."""

    def __init__(self) -> None:
        self.count = 0
        self._hanging: tuple[str, ...] = ()
        self._delays: dict[str, float] = {}
        self._released = threading.Event()
        self._main = threading.get_ident()
        for name in _CALLS:
            setattr(os, name, self._wrapped(name, getattr(os, name)))

    @contextlib.contextmanager
    def calls(self, *names: str) -> Iterator[None]:
        """Let calls of these names hang until the end of a block."""
        self.count, self._hanging = 0, names
        self._released.clear()
        try:
            yield
        finally:
            self._hanging = ()
            self._released.set()

    @contextlib.contextmanager
    def delayed(self, name: str, seconds: float) -> Iterator[None]:
        """Let each call of this name take longer until the end of a block."""
        self._delays = {name: seconds}
        try:
            yield
        finally:
            self._delays = {}

    def _wrapped(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            if name in self._hanging and threading.get_ident() != self._main:
                self.count += 1
                self._released.wait()
            time.sleep(self._delays.get(name, 0))
            return function(*arguments, **named)

        return call
