"""Query SGLang's own backend for the lengths that each rank could restore of chains of pages.

Runs inside the SGLang environment: `query_hits.py --question FILE PLACE… [--backend B]`. PLACE and
--backend are those of write_store.py. The question is JSON: deployments (of a manifest) and chains
(lists of page hashes). Backend `plugin` is the plug-in of this project, on files without trailers.
Prints a JSON list with an entry for each place, deployment and rank: place
and deployment (their numbers), pp, cp, tp, and for each chain restorable (the lengths that
`batch_exists_v2` reports) and kv (the leading pages of kv). 3FS reports only one length.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.conformance import attached_rank, prompt_nodes, rank_pools, write_store
    from tests.conformance.rank_pools import Rank, RankPools
    from tests.conformance.store_cases import Deployment
else:
    import attached_rank
    import prompt_nodes
    import rank_pools
    import write_store
    from store_cases import Deployment

_SGLANGS = ("file", "hf3fs", "mooncake", "nixl", "nixl-buffered")


def main() -> None:
    """Answer the question and print the answers."""
    parser = argparse.ArgumentParser(description="Ask SGLang what it could restore.")
    parser.add_argument("places", nargs="+")
    parser.add_argument("--backend", choices=(*_SGLANGS, "plugin"), default="file")
    parser.add_argument("--question", type=Path, required=True)
    options = parser.parse_args()
    question = json.loads(options.question.read_text())
    with contextlib.redirect_stdout(sys.stderr):
        answers = [
            {"deployment": number, **dataclasses.asdict(rank), **answer}
            for number, fields in enumerate(question["deployments"])
            for rank in rank_pools.ranks(fields["profile"])
            for answer in _ask(Deployment(**fields), rank, question["chains"], options)
        ]
    print(json.dumps(answers))


def _ask(
    deployment: Deployment, rank: Rank, chains: list[list[str]], options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Yield the answers of a rank, one for each place."""
    with rank_pools.parallel(deployment, rank), attached_rank.server_arguments(deployment):
        pools = rank_pools.build_pools(deployment, rank, pages=4)  # page_head needs some
        for number, text in enumerate(options.places):
            kind = "file" if options.backend == "plugin" else options.backend
            place = write_store.place(kind, text)
            controller = write_store.make_controller(deployment, pools, place)
            backend = controller.storage_backend
            if options.backend == "plugin":
                backend = _plugin(deployment, pools, controller.storage_config, text)
            found = [
                backend.batch_exists_v2(chain, prompt_nodes.queries(pools)) for chain in chains
            ]
            yield {
                "place": number,
                "restorable": [_lengths(result) for result in found],
                "kv": [result.extra_pool_hit_pages.get("kv", 0) for result in found],
            }


def _plugin(deployment: Deployment, pools: RankPools, config: Any, directory: str) -> Any:
    """Return the plug-in for one rank."""
    attached_rank.find_plugin()
    from hicachectl.backends.sglang.plugin import HiCacheStore

    settings = {
        "interface_v1": 1,
        "store": directory,
        "unstamped": "read",
        "identity": "tests",
    }
    backend = HiCacheStore(dataclasses.replace(config, extra_config=settings), {})
    backend.register_mem_pool_host(pools.host["kv"])
    for name, pool in pools.host.items():
        backend.register_mem_host_pool_v2(pool, name)
    backend.on_host_pools_registered()
    return backend


def _lengths(result: Any) -> list[int]:
    if result.restorable_prefix_pages is None:
        return [result.kv_hit_pages]
    lengths: list[int] = result.restorable_prefix_pages
    assert result.kv_hit_pages == max(lengths, default=0)
    return lengths
