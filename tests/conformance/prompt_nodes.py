"""Prompts of conformance stores: their pages, and the nodes that a server would back up.

Runs inside the SGLang environment, after sglang_env.prepare(). SGLang hashes the pages; this module
puts the values of page_values.py into the host pools, as a model's forward pass would.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tests.conformance import host_pages, page_values
    from tests.conformance.rank_pools import RankPools
    from tests.conformance.store_cases import is_trailing
else:
    import host_pages
    import page_values
    from store_cases import is_trailing

VOCABULARY = 151_936  # Qwen3's


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt of whole pages, and its node size in the radix tree."""

    tokens: list[int]
    pages: list[str]
    node_pages: int
    seed: int

    @property
    def page_size(self) -> int:
        return len(self.tokens) // len(self.pages)


def random_prompt(pages: int, page_size: int, node_pages: int, seed: int) -> Prompt:
    """Return the prompt of a seed."""
    chance = random.Random(seed)
    tokens = [chance.randrange(VOCABULARY) for _ in range(pages * page_size)]
    return Prompt(tokens, hash_pages(tokens, page_size), node_pages, seed)


def hash_pages(tokens: Sequence[int], page_size: int) -> list[str]:
    """Return SGLang's page hashes of a prompt."""
    from sglang.srt.mem_cache.utils import get_hash_str

    hashes: list[str] = get_hash_str(list(tokens), None, page_size=page_size)
    return hashes


def back_up_operations(pools: RankPools, prompt: Prompt) -> Iterator[Any]:
    """Yield the storage operation of each node, its values in newly allocated host pages."""
    from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import StorageOperation

    page_size = prompt.page_size
    for start in range(0, len(prompt.pages), prompt.node_pages):
        node = prompt.pages[start : start + prompt.node_pages]
        tokens = len(node) * page_size
        operation = StorageOperation(
            pools.host["kv"].alloc(tokens),
            prompt.tokens[start * page_size :][:tokens],
            hash_value=node,
            prefix_keys=prompt.pages[:start],
            pool_transfers=side_transfers(pools, node),
        )
        fill_node(pools, operation, prompt.seed)
        yield operation


def side_transfers(pools: RankPools, node: Sequence[str]) -> list[Any]:
    """Return a node's transfers of the pools other than kv, as the tree's components build them.

    mamba: the node's end (unified_cache/components/mamba.py); swa: its last pages (swa.py);
    compression states and some drafts' windows go with swa, the others with kv (SidecarPoolSpec,
    hybrid_pool_assembler.py).
    """
    from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

    transfers = []
    for table in _side_tables(pools):
        name = PoolName(table["name"])
        if not _trails(table):
            transfers.append(PoolTransfer(name=name, indices_from_pool=PoolName.KV))
            continue
        transfer = PoolTransfer(
            name=name,
            hit_policy=PoolHitPolicy.TRAILING_PAGES,
            indices_from_pool=_source(table),
        )
        if transfer.indices_from_pool is None:
            host = pools.host[table["name"]]
            transfer.keys = list(node[-table.get("trailing_pages", 1) :])
            transfer.host_indices = host.alloc(len(transfer.keys) * host.page_size)
        transfers.append(transfer)
    return transfers


def queries(pools: RankPools) -> list[Any]:
    """Return the transfers of a prefetch; those of trailing pools have one key per window page."""
    from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

    transfers = []
    for table in _side_tables(pools):
        trailing = _trails(table)
        transfers.append(
            PoolTransfer(
                name=PoolName(table["name"]),
                keys=[""] * table.get("trailing_pages", 1) if trailing else None,
                hit_policy=PoolHitPolicy.TRAILING_PAGES if trailing else PoolHitPolicy.ALL_PAGES,
                indices_from_pool=_source(table),
            )
        )
    return transfers


def _trails(table: Mapping[str, Any]) -> bool:
    """Return whether only the last pages of a node have a pool."""
    return is_trailing(table["name"]) or table.get("hit_policy") == "trailing_pages"


def _source(table: Mapping[str, Any]) -> Any:
    """Return the pool whose host indices a pool uses; None for indices of its own."""
    from sglang.srt.mem_cache.hicache_storage import PoolName

    if not _trails(table):
        return PoolName.KV
    return None if table["name"] in ("mamba", "swa") else PoolName.SWA


def alloc_page(pools: RankPools, name: str) -> Any:
    """Return the host indices of a new page of a pool."""
    host = pools.host["swa" if name.endswith("_state") else name]
    return host.alloc(page_indices(host))


def page_indices(host: Any) -> int:
    """Return the host indices of a page; under DCP, a rank holds the rows of some of them."""
    return int(getattr(host, "logical_page_size", host.page_size))


def _side_tables(pools: RankPools) -> list[Mapping[str, Any]]:
    """Return the profile's pools other than kv that the rank has."""
    return [table for table in pools.profile["pools"][1:] if table["name"] in pools.host]


def fill_node(pools: RankPools, operation: Any, seed: int) -> None:
    """Write the expected values of an operation's pages into the host pools."""
    kinds = {pool["name"]: pool["kind"] for pool in pools.profile["pools"]}
    for name, page, index in placed_pages(pools, operation):
        values = pools.values(name, page_values.page_salt(page, name, seed))
        host_pages.fill(
            host_pages.page_view(pools.host[name], kinds[name], index), values, kinds[name]
        )


def placed_pages(pools: RankPools, operation: Any) -> Iterator[tuple[str, str, int]]:
    """Yield (pool, page hash, host index) of every page that an operation moves."""
    # Pools without indices of their own have no keys until the controller resolves them.
    spans: dict[str, Any] = {"kv": (operation.hash_value, operation.host_indices)}
    for transfer in operation.pool_transfers:
        if transfer.indices_from_pool is None:
            spans[transfer.name.value] = transfer.keys, transfer.host_indices
    for transfer in operation.pool_transfers:
        if transfer.indices_from_pool is not None:
            spans[transfer.name.value] = spans[transfer.indices_from_pool.value]
    for name, (keys, indices) in spans.items():
        for number, page in enumerate(keys):
            yield name, page, int(indices[number * page_indices(pools.host[name])])
