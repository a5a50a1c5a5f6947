"""Tell what the plug-in reads of servers: their weights, and forms that no pool shows.

Runs inside the SGLang environment: `read_contexts.py REQUEST`. The request is a JSON object: model,
the directory of a model; servers, a list of: fields (resolved fields of a server, in place of
SGLang's defaults for the model), settings (the plug-in's keys), environment, version (of weights
that the server got after its start), path (from which it got weights after its start), hangs (its
file system does not answer).

Prints a JSON list: for each server, the fields of its Context and `version`, its weights version
now; or `refusal`, the message of a ValueError.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

if TYPE_CHECKING:
    pass
else:
    pass


def answer(question: dict[str, Any]) -> list[Any]:
    """Answer for each server."""
    return [_answer(question["model"], **server) for server in question["servers"]]


def _answer(
    model: str,
    fields: dict[str, Any],
    settings: dict[str, Any],
    environment: dict[str, str],
    version: str | None = None,
    path: str | None = None,
    *,
    hangs: bool = False,
) -> dict[str, Any]:
    from sglang.srt import runtime_context
    from sglang.srt.server_args import ServerArgs

    from hicachectl.backends.sglang import context
    from hicachectl.backends.sglang.settings import parse_settings

    server = runtime_context.publish(ServerArgs(model_path=model, device="cpu"), role="scheduler")
    if version is not None:  # scheduler.py :: record_weight_version_change
        server.override("scheduler.weight_version", weight_version=version)
    if path is not None:  # model_runner.py :: update_model_fields
        server.override("model_runner.update_model_fields", model_path=path, load_format="auto")
    given = parse_settings({"interface_v1": 1, "store": "file:///mnt/hicache", **settings})
    with mock.patch.dict("os.environ", environment), contextlib.ExitStack() as resolved:
        names = ("model", "spec", "memory", "schedule", "lora")
        for bag in (*map(server.config_bag, names), server.config_bag("exec").moe):
            resolved.enter_context(bag.override(**{f: fields[f] for f in fields if f in bag}))
        if hangs:
            hung = threading.Event()
            resolved.enter_context(mock.patch.object(context, "_LONGEST_READ_S", 0.1))
            resolved.enter_context(mock.patch.object(Path, "exists", side_effect=hung.wait))
            resolved.callback(hung.set)
        try:
            found = dataclasses.asdict(context.read_context(given))
        except ValueError as error:
            return {"refusal": str(error)}
    return {**found, "version": context.weight_version()}
