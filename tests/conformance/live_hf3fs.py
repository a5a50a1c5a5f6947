"""Keep a 3FS store busy with SGLang's own HiCacheHF3FS, as the ranks of a server do.

Runs inside the SGLang environment. The question has case, config (SGLang's), pages, clear_every,
hot and until (files). The ranks repeatedly back up the nodes of a prompt of so many pages in random
order. SGLang skips existing objects and rewrites evicted ones, to any free 3FS page. Every round
also backs up the first node, so it is never evicted, however slowly a process runs. With
clear_every, the ranks clear their tables after every so many nodes, like a flush of the store.

Writes the hash of the prompt's first page to the file `hot`, and runs until the file `until`
exists.
"""

from __future__ import annotations

import dataclasses
import logging
import random
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Sequence

    from tests.conformance import prompt_nodes, rank_pools, write_store
    from tests.conformance.rank_pools import Rank
    from tests.conformance.store_cases import HF3FS_CASES, Deployment
else:
    import prompt_nodes
    import rank_pools
    import write_store
    from store_cases import HF3FS_CASES, Deployment

_PAUSE_S = 0.01  # after each node: verify needs processor time too
_MOST_S = 900.0  # the parent may have died, so this process limits itself


def answer(question: dict[str, Any]) -> int:
    """Write until the file `until` exists; return the number of nodes backed up."""
    case = HF3FS_CASES[question["case"]]
    deployment = case.deployments[0]
    page_size = deployment.profile["page_size"]
    chance = random.Random(0)
    length, clear_every = question["pages"] * page_size, question["clear_every"]
    tokens = [chance.randrange(prompt_nodes.VOCABULARY) for _ in range(length)]
    pages = prompt_nodes.hash_pages(tokens, page_size)
    Path(question["hot"]).write_text(pages[0])
    logging.disable(logging.WARNING)
    writers = [
        _Writer(deployment, rank, tokens, pages, case.node_pages, question["config"])
        for rank in rank_pools.ranks(deployment.profile)
    ]
    deadline, nodes = time.monotonic() + _MOST_S, 0
    while not Path(question["until"]).exists() and time.monotonic() < deadline:
        nodes += 1
        number = chance.randrange(len(pages) // case.node_pages)
        for writer in writers:
            writer.back_up(0)
            writer.back_up(number)
        if clear_every and nodes % clear_every == 0:
            for writer in writers:
                writer.clear()
        time.sleep(_PAUSE_S)
    return nodes


class _Writer:
    """One rank with all nodes of the prompt in its host pools."""

    def __init__(
        self,
        deployment: Deployment,
        rank: Rank,
        tokens: Sequence[int],
        pages: Sequence[str],
        node_pages: int,
        config: str,
    ) -> None:
        from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import StorageOperation

        self._deployment, self._rank = deployment, rank
        self._operations: list[Any] = []
        page_size = deployment.profile["page_size"]
        with self._as_rank():
            pools = rank_pools.build_pools(deployment, rank, len(pages))
            place = write_store.Hf3fsConfig(config)
            self._controller = write_store.make_controller(deployment, pools, place)
            for start in range(0, len(pages), node_pages):
                node = list(pages[start : start + node_pages])
                operation = StorageOperation(
                    pools.host["kv"].alloc(len(node) * page_size),
                    list(tokens[start * page_size :][: len(node) * page_size]),
                    hash_value=node,
                    pool_transfers=prompt_nodes.side_transfers(pools, node),
                )
                prompt_nodes.fill_node(pools, operation, seed=0)
                self._operations.append(operation)

    def back_up(self, number: int) -> None:
        """Have SGLang back up a node."""
        from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import StorageOperation

        known = self._operations[number]
        transfers = [dataclasses.replace(transfer) for transfer in known.pool_transfers]
        operation = StorageOperation(
            known.host_indices,
            known.token_ids,
            hash_value=known.hash_value,
            pool_transfers=transfers,
        )
        with self._as_rank():
            self._controller._page_backup(operation)

    def clear(self) -> None:
        """Have SGLang forget the rank's pages."""
        self._controller.storage_backend.clear()

    def _as_rank(self) -> contextlib.AbstractContextManager[None]:
        return rank_pools.parallel(self._deployment, self._rank)
