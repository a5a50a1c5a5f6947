"""Replay requests against SGLang's own backend, with a limit: how many leading pages each hits.

Runs inside the SGLang environment. The question has deployment, backend, places (those of
write_store.py), requests (page hashes, and how many of them a server may look up) and, for files,
limits: max_size and eviction_ratio of each place. The answer has a list of hits for each place.

A request looks pages up on all ranks, reads the longest prefix that all have, and writes its other
pages as one node. SGLang's controller decides what is read and written, in which order.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.conformance import prompt_nodes, rank_pools, write_store
    from tests.conformance.rank_pools import Rank, RankPools
    from tests.conformance.store_cases import Deployment
else:
    import prompt_nodes
    import rank_pools
    import write_store
    from store_cases import Deployment

_LIMITS = ("SGLANG_HICACHE_FILE_BACKEND_MAX_SIZE", "SGLANG_HICACHE_FILE_BACKEND_EVICTION_RATIO")
_BATCH = 128


def answer(question: dict[str, Any]) -> list[list[int]]:
    """Answer for each place."""
    return [_replay(number, question) for number in range(len(question["places"]))]


def _replay(number: int, question: dict[str, Any]) -> list[int]:
    for name, value in zip(_LIMITS, question.get("limits", {}).get(str(number), ()), strict=False):
        os.environ[name] = str(value)
    deployment = Deployment(**question["deployment"])
    place = write_store.place(question["backend"], question["places"][number])
    longest = max(len(pages) for pages, _ in question["requests"])
    servers = [
        _server(deployment, rank, place, longest) for rank in rank_pools.ranks(deployment.profile)
    ]
    return [_hit(servers, pages, reach) for pages, reach in question["requests"]]


def _hit(servers: Sequence[_Server], pages: list[str], reach: int) -> int:
    """Serve a request; return the pages that it hits."""
    lengths = [server.restorable(pages[:reach]) for server in servers]
    hit = max(set.intersection(*lengths), default=0)
    for server in servers if hit else ():
        server.read(pages[:hit])
    for server in servers if pages[hit:] else ():
        server.write(pages[hit:], pages[:hit])
    return hit


class _Server(NamedTuple):
    """One rank of a server."""

    deployment: Deployment
    rank: Rank
    pools: RankPools
    controller: Any

    def restorable(self, pages: list[str]) -> set[int]:
        """Return the lengths of a prefix that the rank can restore."""
        backend = self.controller.storage_backend
        found = backend.batch_exists_v2(pages, prompt_nodes.queries(self.pools))
        if found.restorable_prefix_pages is None:  # 3FS
            return set(range(found.kv_hit_pages + 1))
        return set(found.restorable_prefix_pages)

    def read(self, pages: list[str]) -> None:
        """Read a prefix: batches of kv and of the pools that go with it, then trailing pools."""
        from sglang.srt.mem_cache.hicache_storage import PoolName

        operation = self._operation(pages, [])
        transfers = operation.pool_transfers
        with_kv = [one for one in transfers if one.indices_from_pool == PoolName.KV]
        size = self.controller.page_size
        with rank_pools.parallel(self.deployment, self.rank):
            for start in range(0, len(pages), _BATCH):
                batch = pages[start : start + _BATCH]
                indices = operation.host_indices[start * size :][: len(batch) * size]
                read = self.controller._page_transfer_kv_batch(
                    operation, batch, indices, None, with_kv
                )
                assert read == len(batch)
            self.controller._resolve_sidecar_nonkv_derived_pool_transfers(operation)
            others = [one for one in transfers if one not in with_kv]
            done = self.controller.storage_backend.batch_get_v2(others)
            assert all(all(each) for each in done.values())
        self._release(operation)

    def write(self, pages: list[str], before: list[str]) -> None:
        """Write a node."""
        operation = self._operation(pages, before)
        with rank_pools.parallel(self.deployment, self.rank):
            self.controller._page_backup(operation)
        self._release(operation)

    def _operation(self, pages: list[str], before: list[str]) -> Any:
        from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import StorageOperation

        tokens = len(pages) * self.controller.page_size
        operation = StorageOperation(
            self.pools.host["kv"].alloc(tokens),
            [0] * tokens,
            hash_value=pages,
            prefix_keys=before,
            pool_transfers=prompt_nodes.side_transfers(self.pools, pages),
        )
        operation.is_terminated = lambda: False
        operation.request_id = pages[0]
        return operation

    def _release(self, operation: Any) -> None:
        self.pools.host["kv"].free(operation.host_indices)
        for transfer in operation.pool_transfers:
            if transfer.indices_from_pool is None:
                self.pools.host[transfer.name.value].free(transfer.host_indices)


def _server(deployment: Deployment, rank: Rank, place: write_store.Place, longest: int) -> _Server:
    with rank_pools.parallel(deployment, rank):
        pools = rank_pools.build_pools(deployment, rank, longest)
        controller = write_store.make_controller(deployment, pools, place)
    zero_copy = controller.page_set_func == controller._page_set_zero_copy
    controller.page_get_func = (
        controller._page_get_zero_copy if zero_copy else controller._generic_page_get
    )
    return _Server(deployment, rank, pools, controller)
