"""Back prompts up and prefetch them on all ranks of a deployment, each a process of its own.

Runs inside the SGLang environment: `plugin_ranks.py REQUEST`. The request is a JSON file:

    case        name in store_cases.py
    profile     fields that replace those of the case's profile
    pages, seed length and seed of the prompt (8, 0)
    backend     "dynamic", or a backend of SGLang
    settings    its extra_config
    ranks       settings of single ranks, by "PP.CP.TP"
    environment variables of all ranks
    steps       what all ranks do, one after another: "write", "read". Before each, the rank gets
                new host pools and attaches the backend; afterwards it detaches. Steps joined
                by "+" share pools and attachment; there is also "clear", by which the first rank
                removes the empty directory `obstacle`

Prints a JSON list with an entry for each rank: pp, cp, tp; steps, with the results of each (write:
the pages that each node's operation completed; read: attached_rank.Prefetched); pages (their
hashes); log, the plug-in's warnings; error, a traceback or "".
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import tempfile
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.conformance import attached_rank, prompt_nodes, rank_pools
    from tests.conformance.attached_rank import AttachedRank, Groups
    from tests.conformance.prompt_nodes import Prompt
    from tests.conformance.rank_pools import Rank
    from tests.conformance.store_cases import PLUGIN_CASES, Deployment
else:
    import attached_rank
    import prompt_nodes
    import rank_pools
    from attached_rank import AttachedRank, Groups
    from store_cases import PLUGIN_CASES

MOST_S = 100.0  # then ranks are killed: one of them hangs


def answer(question: dict[str, Any]) -> Any:
    """Run the ranks; return their reports."""
    with tempfile.TemporaryDirectory() as folder:
        return run_ranks(question, Path(folder))


def run_ranks(request: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """Return the report of each rank; a rank that hung or crashed says so as its error."""
    deployment = requested(request)
    everyone = rank_pools.ranks(deployment.profile)
    children = {}
    for number, rank in enumerate(everyone):
        child = os.fork()
        if not child:
            _run_rank(request, deployment, number, folder)
        children[child] = rank
    deadline = time.monotonic() + MOST_S
    for child in children:
        _wait(child, deadline)
    return [_report(rank, folder / str(number)) for number, rank in enumerate(everyone)]


def requested(request: dict[str, Any]) -> Deployment:
    """Return a request's deployment."""
    deployment = PLUGIN_CASES[request["case"]].deployments[0]
    return dataclasses.replace(
        deployment, profile={**deployment.profile, **request.get("profile", {})}
    )


def requested_prompt(request: dict[str, Any], deployment: Deployment) -> Prompt:
    """Return a request's prompt."""
    return prompt_nodes.random_prompt(
        request.get("pages", 8),
        deployment.profile["page_size"],
        PLUGIN_CASES[request["case"]].node_pages,
        request.get("seed", 0),
    )


def _run_rank(
    request: dict[str, Any], deployment: Deployment, number: int, folder: Path
) -> None:  # never returns
    import torch

    os.environ.update(request.get("environment", {}))
    rank = rank_pools.ranks(deployment.profile)[number]
    report: dict[str, Any] = {**dataclasses.asdict(rank), "steps": [], "error": ""}
    log = attached_rank.Warnings("hicachectl.sglang")
    try:
        torch.set_num_threads(1)
        _join(number, len(rank_pools.ranks(deployment.profile)), folder)
        with (
            rank_pools.parallel(deployment, rank),
            attached_rank.server_arguments(deployment),
        ):
            prompt = requested_prompt(request, deployment)
            report["pages"] = prompt.pages
            report["steps"] = _steps(request, deployment, rank, prompt)
    except BaseException:
        report["error"] = traceback.format_exc()
    report["log"] = log.texts
    (folder / str(number)).write_text(json.dumps(report))
    os._exit(0)


def _join(number: int, ranks: int, folder: Path) -> None:
    """Join the world of all ranks, over the loopback device."""
    import torch

    if ranks > 1:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{folder}/world", rank=number, world_size=ranks
        )


def _meet() -> None:
    """Wait until all ranks are here."""
    import torch

    if torch.distributed.is_initialized():
        torch.distributed.barrier()


def _steps(
    request: dict[str, Any], deployment: Deployment, rank: Rank, prompt: Prompt
) -> list[Any]:
    groups = Groups(deployment, rank)
    settings = {
        **request.get("settings", {}),
        **request.get("ranks", {}).get(f"{rank.pp}.{rank.cp}.{rank.tp}", {}),
    }
    results = []
    for step in request["steps"]:
        attached = AttachedRank(deployment, rank, len(prompt.pages), groups)
        with attached.attached(settings, request.get("backend", "dynamic")):
            for part in step.split("+"):
                _meet()
                if part != "clear":
                    results.append(_step(attached, part, prompt))
                elif rank == rank_pools.Rank(0, 0, 0):
                    Path(request["obstacle"]).rmdir()
    return results


def _step(attached: AttachedRank, step: str, prompt: Prompt) -> Any:
    if step == "write":
        return attached.back_up(prompt)
    found = attached.prefetch(prompt)
    return {name: getattr(found, name) for name in ("hit_pages", "pages", "trailing", "wrong")}


def _wait(child: int, deadline: float) -> None:
    while not os.waitpid(child, os.WNOHANG)[0]:
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.01)


def _report(rank: Rank, path: Path) -> dict[str, Any]:
    if path.exists():
        report: dict[str, Any] = json.loads(path.read_text())
        return report
    return {**dataclasses.asdict(rank), "steps": [], "log": [], "error": "it hung or crashed"}
