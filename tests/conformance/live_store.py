"""Keep a file store busy with SGLang's own file backend, as one rank of a server does.

Runs inside the SGLang environment. The question has role (write, fill or read), place (a
directory), manifest, rank, log and until (files), and perhaps max_bytes, of this rank.

The writer repeatedly backs up every node of the manifest's prompt: SGLang skips existing objects
and writes missing ones. The filler appends the prompt's tokens to the chain in each round, so every
page is new; with max_bytes SGLang evicts the oldest objects.
The reader queries each page and reads all its pools.
All run until the file `until` exists, and append JSON lines to `log`:

    writer   {"round": n} after each pass through the prompt; the filler too
    reader   {"page", "start", "wrong"} for each page that was read whole; start is Unix
             nanoseconds, taken before the query whether the page exists
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import time
from itertools import repeat
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.conformance import (
        host_pages,
        page_values,
        prompt_nodes,
        rank_pools,
        write_store,
    )
    from tests.conformance.rank_pools import RankPools
    from tests.conformance.store_cases import Deployment
else:
    import host_pages
    import page_values
    import prompt_nodes
    import rank_pools
    import write_store
    from store_cases import Deployment

_PAUSE_S = 0.01  # after each node of the filler, which would write a gigabyte in seconds


def answer(question: dict[str, Any]) -> None:
    """Write or read until the file `until` exists."""
    manifest = question["manifest"]
    deployment = Deployment(**manifest["deployments"][0])
    rank = rank_pools.ranks(deployment.profile)[question["rank"]]
    logging.disable(logging.WARNING)  # SGLang warns of each miss
    if "max_bytes" in question:
        os.environ["SGLANG_HICACHE_FILE_BACKEND_MAX_SIZE"] = str(question["max_bytes"])
    with (
        rank_pools.parallel(deployment, rank),
        Path(question["log"]).open("w", buffering=1) as log,
    ):
        pools = rank_pools.build_pools(deployment, rank, len(manifest["pages"]))
        controller = write_store.make_controller(deployment, pools, Path(question["place"]))
        act = {"write": _write, "fill": _fill, "read": _read}[question["role"]]
        rounds = act(pools, controller, manifest, log)
        while not Path(question["until"]).exists():
            next(rounds)


def _write(
    pools: RankPools, controller: Any, manifest: dict[str, Any], log: IO[str]
) -> Iterator[None]:
    return _back_up(pools, controller, manifest, log, repeat(manifest["pages"]))


def _fill(
    pools: RankPools, controller: Any, manifest: dict[str, Any], log: IO[str]
) -> Iterator[None]:
    for _ in _back_up(pools, controller, manifest, log, _continued(manifest)):
        time.sleep(_PAUSE_S)
        yield


def _continued(manifest: dict[str, Any]) -> Iterator[list[str]]:
    """Yield the page hashes of the prompt's tokens, repeated after the prompt without end."""
    from sglang.srt.mem_cache.utils import get_hash_str

    pages = manifest["pages"]
    while True:
        pages = get_hash_str(manifest["tokens"], pages[-1], page_size=manifest["page_size"])
        yield pages


def _back_up(
    pools: RankPools,
    controller: Any,
    manifest: dict[str, Any],
    log: IO[str],
    prompts: Iterator[list[str]],
) -> Iterator[None]:
    """Back up prompts one after another, each with the bytes of the manifest's pages."""
    from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import StorageOperation

    page_size, per_node = manifest["page_size"], manifest["node_pages"]
    operations = []
    for start in range(0, len(manifest["pages"]), per_node):
        node = manifest["pages"][start : start + per_node]
        arguments = (
            pools.host["kv"].alloc(len(node) * page_size),
            manifest["tokens"][start * page_size :][: len(node) * page_size],
        )
        transfers = prompt_nodes.side_transfers(pools, node)
        operation = StorageOperation(*arguments, hash_value=node, pool_transfers=transfers)
        prompt_nodes.fill_node(pools, operation, manifest["seed"])
        operations.append((arguments, slice(start, start + per_node), transfers))
    for number, pages in enumerate(prompts, 1):
        for arguments, part, transfers in operations:
            node = pages[part]
            controller._page_backup(
                StorageOperation(
                    *arguments,
                    hash_value=node,
                    pool_transfers=[_of_node(transfer, node) for transfer in transfers],
                )
            )
            yield
        log.write(json.dumps({"round": number}) + "\n")


def _of_node(transfer: Any, node: list[str]) -> Any:
    """Return a transfer of the same slots for another node; sidecars of kv have no keys here."""
    keys = transfer.keys and node[-len(transfer.keys) :]
    return dataclasses.replace(transfer, keys=keys)


def _read(
    pools: RankPools, controller: Any, manifest: dict[str, Any], log: IO[str]
) -> Iterator[None]:
    backend = controller.storage_backend
    kinds = {table["name"]: table["kind"] for table in pools.profile["pools"]}
    places = {name: int(host.alloc(host.page_size)[0]) for name, host in pools.host.items()}
    while True:
        for page in manifest["pages"]:
            start = time.time_ns()
            if not backend.exists(page):
                continue
            read = [
                name
                for name in kinds
                if backend._read_page(name, page, pools.host[name], places[name])
            ]
            needed = [name for name in kinds if name != "mamba"]
            if not set(needed) <= set(read):
                continue  # a miss: the prefix ends before this page
            wrong = [
                name for name in read if not _holds(pools, kinds, name, places, page, manifest)
            ]
            log.write(json.dumps({"page": page, "start": start, "wrong": wrong}) + "\n")
        yield


def _holds(
    pools: RankPools,
    kinds: dict[str, str],
    name: str,
    places: dict[str, int],
    page: str,
    manifest: dict[str, Any],
) -> bool:
    expected = pools.values(name, page_values.page_salt(page, name, manifest["seed"]))
    view = host_pages.page_view(pools.host[name], kinds[name], places[name])
    return host_pages.holds(view, expected, kinds[name])
