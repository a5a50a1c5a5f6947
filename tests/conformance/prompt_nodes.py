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
else:
    import host_pages
    import page_values

VOCABULARY = 151_936  # Qwen3's
TRAILING = ("mamba", "swa")  # pools that only the last pages of a node have


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
    the others go with kv (SidecarPoolSpec, hybrid_pool_assembler.py).
    """
    from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

    transfers = []
    for table in _side_tables(pools):
        name = PoolName(table["name"])
        if table["name"] not in TRAILING:
            transfers.append(PoolTransfer(name=name, indices_from_pool=PoolName.KV))
            continue
        host = pools.host[table["name"]]
        keys = list(node[-table.get("trailing_pages", 1) :])
        transfers.append(
            PoolTransfer(
                name=name,
                host_indices=host.alloc(len(keys) * host.page_size),
                keys=keys,
                hit_policy=PoolHitPolicy.TRAILING_PAGES,
            )
        )
    return transfers


def queries(pools: RankPools) -> list[Any]:
    """Return the transfers of a prefetch; those of trailing pools have one key per window page."""
    from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

    transfers = []
    for table in _side_tables(pools):
        trailing = table["name"] in TRAILING
        transfers.append(
            PoolTransfer(
                name=PoolName(table["name"]),
                keys=[""] * table.get("trailing_pages", 1) if trailing else None,
                hit_policy=PoolHitPolicy.TRAILING_PAGES if trailing else PoolHitPolicy.ALL_PAGES,
                indices_from_pool=None if trailing else PoolName.KV,
            )
        )
    return transfers


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
    spans: list[Any] = [("kv", operation.hash_value, operation.host_indices)]
    for transfer in operation.pool_transfers:
        # Sidecars of kv have no keys until the controller resolves them.
        own = transfer.indices_from_pool is None
        source = (transfer.keys, transfer.host_indices) if own else spans[0][1:]
        spans.append((transfer.name.value, *source))
    for name, keys, indices in spans:
        for number, page in enumerate(keys):
            yield name, page, int(indices[number * pools.host[name].page_size])
