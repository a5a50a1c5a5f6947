"""Describe SGLang's host pools as the plug-in serves them, beside what SGLang itself says of them.

Runs inside the SGLang environment: `describe_pools.py REQUEST`. The request is a JSON list of
deployments: case (a name in store_cases.PLUGIN_CASES), profile (fields that replace those of the
case's profile) and pools (by name, fields that replace those of its pools).

Prints a JSON list with an entry for each pool of each rank of each deployment:

    profile              of the deployment, with the names of its weights
    pp, cp, tp, pool
    key, sglang_key      the file name of a page, and HiCacheFile's
    identity             in hexadecimal
    contexts             the fields of the server's context that change the identity
    nbytes, page_indices, trailing, writes
    sglang_writes        whether SGLang's controller has this rank write the pool
    parts                name and bytes of each
    wrong                host indices of pages whose bytes, piece by piece, are not HiCacheFile's
    microseconds         to find one page's pieces, of 128
"""

from __future__ import annotations

import ctypes
import dataclasses
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from hicachectl.backends.sglang.page_store import ServedPool
    from tests.conformance import prompt_nodes, rank_pools, write_store
    from tests.conformance.rank_pools import Rank
    from tests.conformance.store_cases import PLUGIN_CASES, Deployment
else:
    import prompt_nodes
    import rank_pools
    import write_store
    from store_cases import PLUGIN_CASES

_CHANGES: dict[str, Any] = {
    "weights": "other",
    "draft_weights": "other",
    "page_size": 1,
    "fp8": "float8_e4m3fnuz",
    "draft_fp8": "float8_e4m3fnuz",
    "row_form": "hnd",
    "opaque_rows": "uint8+other",
    "pp_partition": (3, 1),
}
PAGES = 6
PAGE = "ab" * 32
_NAMES = {"weights": "of the target", "draft_weights": "of the draft"}
_MEMORY = ("kv_buffer", "index_k_with_scale_buffer", "temporal_buffer", "conv_buffer")


def answer(question: list[Any]) -> list[Any]:
    """Describe the pools of each request."""
    return [row for request in question for row in _described(request)]


def _described(request: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for given in PLUGIN_CASES[request["case"]].deployments:
        changes = request.get("pools", {})
        pools = [{**pool, **changes.get(pool["name"], {})} for pool in given.profile["pools"]]
        profile = {**given.profile, "pools": pools, **_NAMES, **request.get("profile", {})}
        deployment = replace(given, profile=profile)
        for rank in rank_pools.ranks(profile):
            with rank_pools.parallel(deployment, rank), tempfile.TemporaryDirectory() as folder:
                for row in _rank(deployment, rank, Path(folder)):
                    yield {"profile": profile, **row}


def _rank(deployment: Deployment, rank: Rank, folder: Path) -> Iterator[dict[str, Any]]:
    from hicachectl.backends.sglang.context import Context
    from hicachectl.backends.sglang.plugin import as_transferred
    from hicachectl.backends.sglang.pools import served_pool
    from hicachectl.formats.keys.file import FileGrammar

    profile = deployment.profile
    pools = rank_pools.build_pools(deployment, rank, PAGES)
    controller = write_store.make_controller(deployment, pools, folder)
    dtypes = {table["name"]: table.get("dtype") or "float8_e4m3fn" for table in profile["pools"]}
    context = Context(
        weights=profile["weights"],
        draft_weights=profile["draft_weights"] if profile.get("speculative_algorithm") else "",
        page_size=profile["page_size"],
        fp8=dtypes["kv"],
        draft_fp8=dtypes.get("draft", dtypes["kv"]),
        pp_partition=tuple(profile.get("pp_partition", ())),
    )
    transfers = {transfer.name.value: transfer for transfer in prompt_nodes.queries(pools)}
    for name, host in pools.host.items():
        pool = served_pool(name, host, controller.storage_config, context)
        if name in transfers:  # kv is moved without one
            pool = as_transferred(pool, transfers[name])
        prefix, suffix = FileGrammar().affix(pool.coordinate)
        yield {
            **dataclasses.asdict(rank),
            "pool": name,
            "key": prefix + PAGE + suffix,
            "sglang_key": controller.storage_backend._get_component_key(PAGE, name) + ".bin",
            "identity": pool.identity.hash().hex(),
            "contexts": [
                field
                for field, value in _CHANGES.items()
                if served_pool(
                    name, host, controller.storage_config, replace(context, **{field: value})
                ).identity
                != pool.identity
            ],
            "nbytes": pool.nbytes,
            "page_indices": pool.page_indices,
            "trailing": pool.trailing,
            "writes": pool.writes,
            "sglang_writes": _sglang_writes(controller, name),
            "parts": [[part.name, part.nbytes] for part in pool.parts],
            "wrong": wrong_pages(pool, host),
            "microseconds": _microseconds(pool),
        }


def _sglang_writes(controller: Any, name: str) -> bool:
    from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer

    if name == "kv":
        return not controller.backup_skip
    return bool(controller.should_backup(PoolTransfer(name=PoolName(name))))


def wrong_pages(pool: ServedPool, host: Any) -> list[int]:
    """Return the host indices of pages whose pieces are not the bytes of HiCacheFile's page."""
    fill(host)
    last = host.size // pool.page_indices - 1
    indices = [page * pool.page_indices for page in (0, 1, 3, last)]
    return [
        index
        for index, pieces in zip(indices, pool.host.pieces(indices), strict=True)
        if b"".join(ctypes.string_at(*piece) for piece in pieces)
        != host.get_data_page(index, flat=True).view(torch.uint8).numpy().tobytes()
    ]


def fill(host: Any) -> None:
    """Give all bytes of a host pool different values."""
    torch.manual_seed(1)
    for name in _MEMORY:
        found = getattr(host, name, None)
        for tensor in found if isinstance(found, list) else [found]:
            if tensor is not None and tensor.numel():
                flat = tensor.view(-1).view(torch.uint8)
                flat.copy_(torch.randint(0, 256, flat.shape, dtype=torch.uint8))


def _microseconds(pool: ServedPool) -> float:
    indices = [number % PAGES * pool.page_indices for number in range(128)]
    times = []
    for _ in range(7):
        start = time.perf_counter()
        pool.host.pieces(indices)
        times.append(time.perf_counter() - start)
    return min(times) / len(indices) * 1e6
