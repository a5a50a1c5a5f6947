"""Kill a rank at random points of its backups, and look at what each kill leaves.

Runs inside the SGLang environment: `plugin_kills.py REQUEST`. The request is that of
plugin_ranks.py, for a deployment of one rank, with `kills` (their number) in place of steps. Each
kill hits the backup of a new prompt: before a call that creates, writes, renames or removes a file,
or in the middle of a write.

Prints a JSON list with an entry for each kill: at (the call, by number and name); pages, for each
page the pools that a new rank reads with right bytes, and wrong, those with wrong bytes; healed,
the pages that this rank prefetches after it backed the prompt up again.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import signal
import struct
import threading
import traceback
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.conformance import attached_rank, plugin_ranks
    from tests.conformance.attached_rank import AttachedRank
    from tests.conformance.prompt_nodes import Prompt
    from tests.conformance.store_cases import Deployment
else:
    import attached_rank
    import plugin_ranks
    from attached_rank import AttachedRank

_CALLS = ("open", "writev", "pwritev", "rename", "link", "unlink")
_LONGEST_REPORT = 1 << 16
# A thread writes the status of the plug-in at any time, so a later backup may have fewer calls.
_STATUS_CALLS = 6


def answer(question: dict[str, Any]) -> Any:
    """Kill backups as the request asks; return the findings after each."""
    return kill_backups(question, question["kills"])


def kill_backups(request: dict[str, Any], kills: int) -> list[dict[str, Any]]:
    """Return what each kill left."""
    deployment = plugin_ranks.requested(request)
    chance = random.Random(request.get("seed", 0))
    steps: int = _in_child(_backed_up, request, deployment, 0, 0)
    results = []
    for number in range(1, kills + 1):
        at = chance.randint(1, steps - _STATUS_CALLS)
        assert _in_child(_backed_up, request, deployment, number, at) is None
        results.append({"at": at, **_in_child(_left, request, deployment, number)})
    return results


def _backed_up(request: dict[str, Any], deployment: Deployment, seed: int, kill_at: int) -> int:
    """Back a prompt up; kill this process at a call, or return how many calls there were."""
    with attached_rank.sole_rank(deployment, request.get("pages", 8)) as attached:
        prompt = plugin_ranks.requested_prompt({**request, "seed": seed}, deployment)
        attached.attach(request["settings"])
        fatal = _FatalCall(kill_at)
        attached.back_up(prompt)
        return fatal.calls


def _left(request: dict[str, Any], deployment: Deployment, seed: int) -> dict[str, Any]:
    """Return what a new rank reads of a prompt, page by page, and after a complete backup."""
    with attached_rank.sole_rank(deployment, 3 * request.get("pages", 8)) as attached:
        prompt = plugin_ranks.requested_prompt({**request, "seed": seed}, deployment)
        with attached.attached(request["settings"]):
            pages = [_read_page(attached, prompt, page) for page in prompt.pages]
            attached.back_up(prompt)
            found = attached.prefetch(prompt)
        assert not found.wrong
        return {
            "pages": [sorted(read) for read, _ in pages],
            "wrong": [sorted(wrong) for _, wrong in pages],
            "healed": found.pages,
        }


def _read_page(attached: AttachedRank, prompt: Prompt, page: str) -> tuple[list[str], list[str]]:
    """Return the pools of a page that can be read, and those with wrong bytes."""
    from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer

    backend = attached.controller.storage_backend
    read: list[str] = []
    wrong: list[str] = []
    for name, host in attached.pools.host.items():
        indices = host.alloc(host.page_size)
        if name == "kv":
            (there,) = backend.batch_get_v1([page], indices)
        else:
            transfer = PoolTransfer(name=PoolName(name), host_indices=indices, keys=[page])
            (there,) = backend.batch_get_v2([transfer])[transfer.name]
        if there:
            right = attached.holds(prompt, name, page, int(indices[0]))
            (read if right else wrong).append(name)
        host.free(indices)
    return read, wrong


class _FatalCall:
    """Counts calls that change files, and kills this process at one of them."""

    def __init__(self, kill_at: int) -> None:
        self.calls = 0
        self._kill_at = kill_at
        self._lock = threading.Lock()
        for name in _CALLS:
            setattr(os, name, self._counted(name, getattr(os, name)))

    def _counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            if name == "open" and not arguments[1] & os.O_CREAT:
                return function(*arguments, **named)
            with self._lock:
                self.calls += 1
                if self.calls == self._kill_at:
                    if "write" in name:
                        os.write(arguments[0], _half(arguments[1]))
                    os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **named)

        return call


def _half(views: list[memoryview]) -> bytes:
    data = b"".join(views)
    return data[: len(data) // 2]


def _in_child(function: Callable[..., Any], *arguments: object) -> Any:
    """Return a function's result from a fork; None if it was killed."""
    with mmap.mmap(-1, _LONGEST_REPORT) as shared:
        child = os.fork()
        if not child:
            code = 1
            try:
                data = json.dumps(function(*arguments)).encode()
                shared[: 4 + len(data)] = struct.pack("<I", len(data)) + data
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
            return None
        if status:
            raise RuntimeError(f"a child ended with {status}; see stderr")
        (size,) = struct.unpack_from("<I", shared)
        return json.loads(shared[4 : 4 + size])
