"""Read a store with SGLang's own backend and compare with the values that were written.

Runs inside the SGLang environment. Place, backend and manifest are those of write_store.py. A
profile replaces the manifest's first one, to read a re-sharded or re-ordered store like the server
that the store was made for.

The answer has an entry for each deployment and rank: model, pp, cp, tp (ranks);
hit_pages, the result of `batch_exists_v2` for the whole chain; read and wrong, which map each pool
with bytes to the chain positions that were read, and to those that are too short or have
unexpected values.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.conformance import (
        host_pages,
        page_values,
        prompt_nodes,
        rank_pools,
        write_store,
    )
    from tests.conformance.rank_pools import Rank, RankPools
    from tests.conformance.store_cases import Deployment
else:
    import host_pages
    import page_values
    import prompt_nodes
    import rank_pools
    import write_store
    from store_cases import Deployment


def answer(question: dict[str, Any]) -> list[dict[str, Any]]:
    """Read the store that the question names: place, backend, manifest and profile (or None)."""
    manifest, profile = question["manifest"], question["profile"]
    place = write_store.place(question["backend"], question["place"])
    deployments = [Deployment(**deployment) for deployment in manifest["deployments"]]
    if profile is not None:
        first = deployments[0]
        deployments = [Deployment(profile, first.linear_attention, first.attention_dp)]
    return [
        _read_rank(deployment, rank, manifest, place)
        for deployment in deployments
        for rank in rank_pools.ranks(deployment.profile)
    ]


def _read_rank(
    deployment: Deployment, rank: Rank, manifest: dict[str, Any], place: write_store.Place
) -> dict[str, Any]:
    profile, pages = deployment.profile, manifest["pages"]
    result: dict[str, Any] = {"model": profile["model"], **dataclasses.asdict(rank)}
    with rank_pools.parallel(deployment, rank):
        pools = rank_pools.build_pools(deployment, rank, len(pages))
        backend = write_store.make_controller(deployment, pools, place).storage_backend
        found = backend.batch_exists_v2(pages, prompt_nodes.queries(pools))
        result |= {"hit_pages": found.kv_hit_pages, "read": {}, "wrong": {}}
        for table in profile["pools"]:
            if table["kind"] == "logical":
                continue
            read, wrong = _read_pool(pools, backend, table, manifest)
            result["read"][table["name"]], result["wrong"][table["name"]] = read, wrong
    return result


def _read_pool(
    pools: RankPools, backend: Any, table: dict[str, Any], manifest: dict[str, Any]
) -> tuple[list[int], list[int]]:
    """Return the positions of pages that were read, and of short pages or wrong values."""
    name, kind = table["name"], table["kind"]
    host = pools.host[name]
    exists, load = _file_calls(backend) if hasattr(backend, "_read_page") else _calls(backend)
    read, wrong = [], []
    for position, page in enumerate(manifest["pages"]):
        if not exists(name, page):
            continue
        indices = prompt_nodes.alloc_page(pools, name)
        index = int(indices[0])
        if not load(name, page, host, indices):
            wrong.append(position)
            continue
        read.append(position)
        salt = page_values.page_salt(page, name, manifest["seed"])
        expected = pools.values(name, salt)
        if not host_pages.holds(host_pages.page_view(host, kind, index), expected, kind):
            wrong.append(position)
    return read, wrong


Calls = tuple["Callable[[str, str], bool]", "Callable[[str, str, Any, Any], bool]"]


def _file_calls(backend: Any) -> Calls:
    """Return functions that query and read a page's pool; the second returns whether it read."""

    def load(name: str, page: str, host: Any, indices: Any) -> bool:
        try:
            backend._read_page(name, page, host, int(indices[0]))
        except OSError:  # a short file: SGLang would lose the whole batch
            return False
        return True

    return lambda name, page: backend.exists(backend._log_key(name, page)), load


def _calls(backend: Any) -> Calls:
    """Return the same for 3FS, NIXL and Mooncake, which reads a short object with success."""
    from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer

    def exists(name: str, page: str) -> bool:
        if name == "kv":
            return bool(backend.batch_exists([page]) == 1)
        if hasattr(backend, "metadata_client"):
            key = backend._pool_component_key(page, PoolName(name))
            return all(backend.metadata_client.exists(backend.rank, [key], PoolName(name)))
        if hasattr(backend, "file_manager"):  # NIXL
            context = backend._hybrid_pool_ctx[PoolName(name)]
            parts = 1
            if context.is_zero_copy:
                parts = backend._get_hybrid_key_multiplier(PoolName(name), context.host_pool)
            keys = backend._get_hybrid_component_keys([page], PoolName(name), parts)
            return all(backend._query_keys_exist(keys))
        names, _ = backend._get_hybrid_page_component_keys(
            [page], PoolTransfer(name=PoolName(name))
        )
        return all(code == 1 for code in backend._batch_exist(backend._tag_keys(names)))

    def load(name: str, page: str, host: Any, indices: Any) -> bool:
        if name == "kv":
            return all(backend.batch_get_v1([page], indices))
        transfer = PoolTransfer(name=PoolName(name), host_indices=indices, keys=[page])
        return all(backend.batch_get_v2([transfer])[transfer.name])

    return exists, load
