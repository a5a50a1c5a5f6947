"""Query SGLang's own backend for the lengths that each rank could restore of chains of pages.

Runs inside the SGLang environment. The question has deployments (of a manifest), chains (lists of
page hashes), places and backend, which are those of write_store.py. Backend `plugin` is the plug-in
of this project, on files without trailers. The answer has an entry for each place, deployment and
rank: place and deployment (their numbers), pp, cp, tp, and for each chain restorable (the lengths
that `batch_exists_v2` reports) and kv (the leading pages of kv). 3FS reports only one length.
"""

from __future__ import annotations

import dataclasses
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


def answer(question: dict[str, Any]) -> list[dict[str, Any]]:
    """Answer for each deployment, rank and place."""
    return [
        {"deployment": number, **dataclasses.asdict(rank), **found}
        for number, fields in enumerate(question["deployments"])
        for rank in rank_pools.ranks(fields["profile"])
        for found in _ask(Deployment(**fields), rank, question)
    ]


def _ask(deployment: Deployment, rank: Rank, question: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the answers of a rank, one for each place."""
    asked = question["backend"]
    with rank_pools.parallel(deployment, rank), attached_rank.server_arguments(deployment):
        pools = rank_pools.build_pools(deployment, rank, pages=4)  # page_head needs some
        for number, text in enumerate(question["places"]):
            place = write_store.place("file" if asked == "plugin" else asked, text)
            controller = write_store.make_controller(deployment, pools, place)
            backend = controller.storage_backend
            if asked == "plugin":
                backend = _plugin(deployment, pools, controller.storage_config, text)
            found = [
                backend.batch_exists_v2(chain, prompt_nodes.queries(pools))
                for chain in question["chains"]
            ]
            yield {
                "place": number,
                "restorable": [_lengths(result) for result in found],
                "kv": [result.extra_pool_hit_pages.get("kv", 0) for result in found],
            }


def _plugin(deployment: Deployment, pools: RankPools, config: Any, directory: str) -> Any:
    """Return the plug-in for one rank."""
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
