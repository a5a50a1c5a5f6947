"""Keep a 3FS store busy with SGLang's own HiCacheHF3FS, as the ranks of a server do.

Runs inside the SGLang environment: `live_hf3fs.py CASE CONFIG --pages N --hot FILE --until FILE`,
as a script of session.py. The ranks repeatedly back up the nodes of a prompt of N pages in random
order. SGLang skips existing objects and rewrites evicted ones, to any free 3FS page. Every round
also backs up the first node, so it is never evicted, however slowly a process runs.
With --clear-every N, the ranks clear their tables after every N nodes, like a flush of the store.

Writes the hash of the prompt's first page to the --hot file, runs until the --until file exists,
and prints the number of nodes backed up.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import logging
import random
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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


def main() -> None:
    """Write until the --until file exists."""
    options = _parse_arguments()
    case = HF3FS_CASES[options.case]
    deployment = case.deployments[0]
    page_size = deployment.profile["page_size"]
    chance = random.Random(0)
    tokens = [chance.randrange(prompt_nodes.VOCABULARY) for _ in range(options.pages * page_size)]
    pages = prompt_nodes.hash_pages(tokens, page_size)
    options.hot.write_text(pages[0])
    logging.disable(logging.WARNING)
    with contextlib.redirect_stdout(sys.stderr):
        writers = [
            _Writer(deployment, rank, tokens, pages, case.node_pages, options.config)
            for rank in rank_pools.ranks(deployment.profile)
        ]
        deadline, nodes = time.monotonic() + _MOST_S, 0
        while not options.until.exists() and time.monotonic() < deadline:
            nodes += 1
            number = chance.randrange(len(pages) // case.node_pages)
            for writer in writers:
                writer.back_up(0)
                writer.back_up(number)
            if options.clear_every and nodes % options.clear_every == 0:
                for writer in writers:
                    writer.clear()
            time.sleep(_PAUSE_S)
    print(json.dumps(nodes))


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


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Keep a 3FS store busy with SGLang itself.")
    parser.add_argument("case", choices=sorted(HF3FS_CASES))
    parser.add_argument("config", help="SGLang's own JSON config")
    parser.add_argument("--pages", type=int, required=True)
    parser.add_argument("--hot", type=Path, required=True)
    parser.add_argument("--until", type=Path, required=True)
    parser.add_argument("--clear-every", type=int, default=0)
    return parser.parse_args()
