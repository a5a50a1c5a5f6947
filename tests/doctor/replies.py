"""A service that answers as an SGLang server does, for replies that the real one cannot give."""

from __future__ import annotations

import json
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tests.backends.http_scripts import serving

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from tests.backends.http_scripts import Call
    from tests.conftest import Invoke

# Of a server of the demo's deployment, `hicachectl.cli.demo_store.PROFILE`.
SETTINGS: dict[str, Any] = {
    "model_path": "/no/such/model",
    "served_model_name": "demo/hybrid-1b",
    "page_size": 16,
    "tp_size": 2,
    "pp_size": 1,
    "dp_size": 1,
    "attn_dp_size": 1,
    "kv_cache_dtype": "auto",
    "dtype": "auto",
    "enable_hierarchical_cache": True,
    "disable_radix_cache": False,
    "enable_metrics": False,
    "hicache_ratio": 2.0,
    "hicache_size": 0,
    "hicache_host_memory_fraction": None,
    "hicache_storage_backend": "file",
    "hicache_storage_backend_extra_config": None,
    "hicache_storage_prefetch_policy": "timeout",
    "hicache_write_policy": "write_through",
    "hicache_mem_layout": "page_first",
    "hicache_io_backend": "kernel",
    "weight_version": "default",
}


def info(*states: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """Return a /server_info. states: changes of each data-parallel rank; default: one, without."""
    top = {**SETTINGS, **changes}
    ranks = [{**top, **state, "world_size": 2} for state in states or ({},)]
    return {**top, "version": "0.5.23", "launch_command": "sglang", "internal_states": ranks}


@contextmanager
def answering(
    reply: Any,
    *,
    status: int = 200,
    body: bytes | None = None,
    metrics: bytes | None = None,
    on_prompt: Callable[[list[int]], None] | None = None,
) -> Iterator[str]:
    """Serve a /server_info; yield the URL.

    body: sent as it is, in place of `reply`.
    on_prompt: takes the tokens of each prompt, before it is answered; None refuses prompts.
    """

    def script(call: Call) -> None:
        if call.path == "/server_info":
            call.answer(json.dumps(reply).encode() if body is None else body, status)
        elif call.path == "/generate" and on_prompt is not None:
            on_prompt(json.loads(call.body)["input_ids"])
            call.answer(b"{}")
        elif call.path == "/metrics" and metrics is not None:
            call.answer(metrics)
        else:
            call.answer(b'{"detail":"Not Found"}', 404)

    with serving(script) as place:
        yield f"http://{place}"


def checks_of(
    invoke: Invoke, store: Path | str, *arguments: object, exit_code: int = 0
) -> dict[str, dict[str, Any]]:
    """Return the checks of `doctor` by group and name."""
    document = invoke.document("doctor", store, *arguments, exit_code=exit_code)
    return {f"{check['group']}/{check['name']}": check for check in document["checks"]}
