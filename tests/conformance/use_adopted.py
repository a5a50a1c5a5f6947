"""Use a file store as one rank of a server does, while a test gives its files trailers.

Runs inside the SGLang environment. The question is the request of plugin_ranks.py, for a deployment
of one rank, with role, log and until (files), and prompts. The script goes on until the file
`until` exists, and appends JSON lines to `log`.

    read    prefetch the prompt with empty host pages, again and again: {"hit_pages", "pages",
            "wrong"} for each, and trailing: pages of each trailing pool
    fill    back up that many prompts in turn; with max_size in the settings, HiCacheFile evicts.
            {"round": n} after each turn
"""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from itertools import count
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.conformance import attached_rank, plugin_ranks, prompt_nodes
    from tests.conformance.attached_rank import AttachedRank
else:
    import attached_rank
    import plugin_ranks
    import prompt_nodes
    from attached_rank import AttachedRank

_PAUSE_S = 0.01  # after each round: the processor is shared


def answer(question: dict[str, Any]) -> None:
    """Use the store until the file `until` exists."""
    logging.disable(logging.WARNING)
    deployment = plugin_ranks.requested(question)
    pages, prompts = question["pages"], question.get("prompts", 1)
    until, role = Path(question["until"]), {"read": _read, "fill": _fill}[question["role"]]
    with (
        attached_rank.sole_rank(deployment, (prompts + 2) * pages) as attached,
        attached.attached(question["settings"], question["backend"]),
        Path(question["log"]).open("w", buffering=1) as log,
    ):
        role(attached, question, until, log)


def _read(attached: AttachedRank, question: dict[str, Any], until: Path, log: IO[str]) -> None:
    prompt = plugin_ranks.requested_prompt(question, plugin_ranks.requested(question))
    while not until.exists():
        found = attached.prefetch(prompt)
        report = {
            name: getattr(found, name) for name in ("hit_pages", "pages", "trailing", "wrong")
        }
        log.write(json.dumps(report) + "\n")
        if found.hit_pages:
            attached.free(found.operation)
        time.sleep(_PAUSE_S)


def _fill(attached: AttachedRank, question: dict[str, Any], until: Path, log: IO[str]) -> None:
    deployment = plugin_ranks.requested(question)
    prompts = [
        plugin_ranks.requested_prompt({**question, "seed": seed}, deployment)
        for seed in range(question["prompts"])
    ]
    nodes = [list(prompt_nodes.back_up_operations(attached.pools, prompt)) for prompt in prompts]
    for number in count():
        if until.exists():
            break
        for operation in nodes[number % len(nodes)]:
            attached.write(
                operation, [dataclasses.replace(one) for one in operation.pool_transfers]
            )
            attached.written()
        log.write(json.dumps({"round": number}) + "\n")
        time.sleep(_PAUSE_S)
