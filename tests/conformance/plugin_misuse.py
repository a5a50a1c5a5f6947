"""Call the plug-in's methods as SGLang never should, and write after sidecars that raise.

Runs inside the SGLang environment: `plugin_misuse.py DIRECTORY`. Prints a JSON object: raised, the
calls that raised; written, by a way to fail, what KV and a later question said of two pages whose
sidecar failed in the first ("right": did not; "repeated": failed, and then did not); closed, what
calls after `close` answered; threads, the names of ours that were left then.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.conformance import attached_rank
    from tests.conformance.store_cases import PLUGIN_CASES
else:
    import attached_rank
    from store_cases import PLUGIN_CASES

KEYS = ["11" * 32, "22" * 32]


def answer(question: str) -> Any:
    """Misuse a plug-in that serves MLA pages with an indexer from a directory; return a report."""
    return _report(Path(question))


def _report(directory: Path) -> dict[str, Any]:
    deployment = PLUGIN_CASES["mla_indexer"].deployments[0]
    with attached_rank.sole_rank(deployment, pages=8) as rank:
        rank.attach({"store": f"file://{directory}"})
        store = rank.controller.storage_backend
        try:
            report = {"raised": _raised(store), "written": _written(store, rank)}
        finally:
            rank.detach()
        store.close()
        report["closed"] = _answers(store, rank)
        deadline = time.monotonic() + 10
        while _threads() and time.monotonic() < deadline:
            time.sleep(0.05)
        report["threads"] = _threads()
    return report


def _raised(store: Any) -> list[str]:
    """Return the calls that raised, of many with wrong arguments."""
    import torch

    indices = torch.arange(4)
    wrong: list[Any] = [None, [], "x", [None], ["\ud800" * 64, "a\0" * 32], [1], KEYS, 7]
    places = [None, indices, indices[:0], torch.full((10**4,), -1), torch.full((4,), 2**62), "x"]
    names = [None, "kv", "indexer", "unknown", 5]
    transfers: list[Any] = [None, [], [None], [SimpleNamespace()], 7]
    transfers += [
        [SimpleNamespace(name=name, keys=keys, host_indices=place, hit_policy=policy)]
        for name in names
        for keys in (None, [], KEYS)
        for place in (None, indices)
        for policy in (None, "all_pages", "x")
    ]
    raised = []

    def call(method: str, *arguments: Any) -> None:
        try:
            getattr(store, method)(*arguments)
        except Exception as error:
            raised.append(f"{method}{arguments!r}: {error!r}")

    for keys in wrong:
        call("exists", keys)
        call("batch_exists", keys)
        for place in places:
            call("batch_get_v1", keys, place)
            call("batch_set_v1", keys, place)
        for one in transfers:
            call("batch_exists_v2", keys, one)
    for one in transfers:
        call("batch_get_v2", one)
        call("batch_set_v2", one)
    call("register_mem_host_pool_v2", SimpleNamespace(), "draft")
    call("register_mem_host_pool_v2", None, "draft")
    call("get_stats")
    return raised


def _written(store: Any, rank: Any) -> dict[str, Any]:
    """Fail sidecars in several ways; then write the KV of the same pages, and ask for them."""
    import torch

    tokens = rank.profile["page_size"] * len(KEYS)
    whole = torch.arange(tokens)
    ways = {
        "none": None, "short": whole[:1], "outside": whole + 10**9, "text": "x", "right": whole,
    }  # fmt: skip
    results = {}
    for number, (way, place) in enumerate(ways.items()):
        keys = [f"{number:02x}" + key[2:] for key in KEYS]
        store.batch_set_v2([_transfer(keys, place)])
        results[way] = [store.batch_set_v1(keys, whole), store.batch_exists(keys)]
    keys = [f"{len(ways):02x}" + key[2:] for key in KEYS]
    for place in (None, whole):
        store.batch_set_v2([_transfer(keys, place)])
    results["repeated"] = [store.batch_set_v1(keys, whole), store.batch_exists(keys)]
    return results


def _answers(store: Any, rank: Any) -> list[Any]:
    import torch

    place = torch.arange(rank.profile["page_size"] * len(KEYS))
    return [
        store.batch_exists(KEYS),
        store.batch_exists_v2(KEYS, [_transfer(KEYS, None)]).kv_hit_pages,
        store.batch_get_v1(KEYS, place),
        store.batch_set_v1(KEYS, place),
        [*store.batch_set_v2([_transfer(KEYS, place)]).values()],
        store.clear(),
        store.close(),
    ]


def _transfer(keys: list[str], place: Any) -> Any:
    from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer

    return PoolTransfer(name=PoolName("indexer"), keys=keys, host_indices=place)


def _threads() -> list[str]:
    return sorted(t.name for t in threading.enumerate() if t.name.startswith("hicachectl"))
