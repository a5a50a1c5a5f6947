"""Ask, read and write at the same time, for some seconds, from SGLang's own threads.

Runs inside the SGLang environment: `plugin_load.py REQUEST`. The request is that of
plugin_ranks.py, for a deployment of one rank, with `seconds` and `prompts` (how many there are) in
place of steps. Pages of prompts are removed from the directory now and then, so that all prompts
are written again and again.

Prints a JSON object: found, read and written (pages), wrong (positions of pages by pool), and
samples of [seconds, resident bytes, descriptors, threads] at regular intervals.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import resource
import time
from pathlib import Path
from queue import Empty
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.conformance import attached_rank, page_values, plugin_ranks, prompt_nodes
    from tests.conformance.attached_rank import AttachedRank
    from tests.conformance.prompt_nodes import Prompt
else:
    import attached_rank
    import plugin_ranks
    import prompt_nodes
    from attached_rank import AttachedRank

_IN_FLIGHT = 3  # prefetches, and operations of backups
_REMOVED = 0.3  # share of backups before which the prompt's objects are removed
_SAMPLES = 20


def answer(question: dict[str, Any]) -> Any:
    """Load a store as the request asks; return what happened."""
    deployment = plugin_ranks.requested(question)
    pages = (question["prompts"] + _IN_FLIGHT) * question.get("pages", 8)
    with attached_rank.sole_rank(deployment, pages) as attached:
        prompts = [
            plugin_ranks.requested_prompt({**question, "seed": seed}, deployment)
            for seed in range(question["prompts"])
        ]
        with attached.attached(question["settings"]):
            load = _Load(attached, prompts, question)
            load.run(question["seconds"])
    return load.report


class _Load:
    def __init__(
        self, attached: AttachedRank, prompts: list[Prompt], request: dict[str, Any]
    ) -> None:
        self._attached = attached
        self._prompts = prompts
        self._chance = random.Random(request.get("seed", 0))
        self._directory = Path(request["settings"]["store"].removeprefix("file://"))
        self._prefetches: dict[Any, Prompt] = {}  # by operation
        self._backups: set[int] = set()
        self._nodes = [
            list(prompt_nodes.back_up_operations(attached.pools, prompt)) for prompt in prompts
        ]
        self._values: dict[tuple[str, str], page_values.Parts] = {
            (name, page): attached.values(prompt, name, page)
            for prompt in prompts
            for page in prompt.pages
            for name in attached.pools.host
        }
        self.report: dict[str, Any] = {
            "found": 0, "read": 0, "written": 0, "wrong": {}, "samples": []
        }  # fmt: skip

    def run(self, seconds: float) -> None:
        """Keep all threads busy for some seconds, then wait for them."""
        begun = time.monotonic()
        interval = seconds / _SAMPLES
        while (now := time.monotonic() - begun) < seconds:
            if now >= interval * len(self.report["samples"]):
                self.report["samples"].append([now, *_used()])
            self._begin()
            self._go_on()
            self._attached.controller.storage_backend.get_stats()
        deadline = time.monotonic() + attached_rank.PATIENCE_S
        while self._prefetches or self._backups:
            self._go_on()
            assert time.monotonic() < deadline, (len(self._prefetches), len(self._backups))
        self.report["samples"].append([time.monotonic() - begun, *_used()])

    def _begin(self) -> None:
        """Begin prefetches and backups; now and then, remove a prompt's objects."""
        while len(self._prefetches) < _IN_FLIGHT:
            prompt = self._chance.choice(self._prompts)
            self._prefetches[self._attached.ask(prompt)] = prompt
        while len(self._backups) < _IN_FLIGHT:
            number = self._chance.randrange(len(self._prompts))
            if self._chance.random() < _REMOVED:
                self._remove(self._prompts[number])
            for operation in self._nodes[number]:
                transfers = [dataclasses.replace(one) for one in operation.pool_transfers]
                self._backups.add(self._attached.write(operation, transfers))

    def _remove(self, prompt: Prompt) -> None:
        for page in prompt.pages:
            for path in self._directory.glob(f"{page}*"):
                path.unlink(missing_ok=True)

    def _go_on(self) -> None:
        """Take what the controller's threads have finished."""
        controller, queues = self._attached.controller, 0
        for queue, take in (
            (controller.prefetch_hit_queue, self._found),
            (controller.ack_prefetch_queue, self._read),
            (controller.ack_backup_queue, self._written),
        ):
            with contextlib.suppress(Empty):
                take(queue.get_nowait())
                queues += 1
        if not queues:
            time.sleep(0.0005)

    def _found(self, operation: Any) -> None:
        if not operation.storage_hit_count:
            del self._prefetches[operation]
            return
        self.report["found"] += len(operation.hash_value)
        self._attached.place(operation)
        self._attached.spoil(operation)
        self._attached.controller.prefetch_buffer.put(operation)

    def _read(self, ack: Any) -> None:
        operation = ack.operation
        if ack.completed_tokens is not None:
            operation.completed_tokens = ack.completed_tokens
        if not ack.completed_req:
            return
        prompt = self._prefetches.pop(operation)
        pages = operation.completed_tokens // prompt.page_size
        self.report["read"] += pages
        for name, page, index in prompt_nodes.placed_pages(self._attached.pools, operation):
            position = prompt.pages.index(page)
            values = self._values[name, page]
            if position < pages and not self._attached.has(name, index, values):
                self.report["wrong"].setdefault(name, []).append(position)
        self._attached.free(operation)

    def _written(self, operation: Any) -> None:
        self._backups.remove(operation.id)
        self.report["written"] += operation.completed_tokens // self._attached.profile["page_size"]


def _used() -> tuple[int, ...]:
    """Return resident bytes, and the numbers of descriptors and threads."""
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    count = [len(list(Path("/proc/self", name).iterdir())) for name in ("fd", "task")]
    return resident, *count
