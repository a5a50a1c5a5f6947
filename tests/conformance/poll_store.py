"""Poll SGLang's own backend for the existing pages of a prompt and for their missing sidecars.

Runs inside the SGLang environment. The question has place, backend and manifest, which are those of
write_store.py, and log and until (files).

Every rank queries a page's anchor with `batch_exists_v2`. If the anchor exists, the rank queries
each of the page's side pools in a separate call, since one call checks pools in no fixed order.
Runs until the file `until` exists. Appends a JSON line to `log` for each pass whose result differs
from the last, and at least every _SILENCE_S: {"seen", "half"}, the number of pages that all ranks
see, and [page, rank, pool] of each side object that was missing while its anchor existed.
"""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.conformance import rank_pools, write_store
    from tests.conformance.store_cases import Deployment
else:
    import rank_pools
    import write_store
    from store_cases import Deployment


_SILENCE_S = 0.1


def answer(question: dict[str, Any]) -> None:
    """Poll until the file `until` exists."""
    manifest = question["manifest"]
    logging.disable(logging.WARNING)  # SGLang warns of each miss
    with Path(question["log"]).open("w", buffering=1) as log:
        backends = _backends(manifest, write_store.place(question["backend"], question["place"]))
        said, at = None, 0.0
        while not Path(question["until"]).exists():
            found = _round(backends, manifest)
            if found != said or time.monotonic() - at > _SILENCE_S:
                said, at = found, time.monotonic()
                log.write(json.dumps(found) + "\n")


def _backends(manifest: dict[str, Any], place: write_store.Place) -> list[Any]:
    """Return the controller of each rank, with the pools that must stay alive."""
    deployment = Deployment(**manifest["deployments"][0])
    controllers = []
    for rank in rank_pools.ranks(deployment.profile):
        with rank_pools.parallel(deployment, rank):
            pools = rank_pools.build_pools(deployment, rank, len(manifest["pages"]))
            controllers.append((write_store.make_controller(deployment, pools, place), pools))
    return controllers


def _round(controllers: list[Any], manifest: dict[str, Any]) -> dict[str, Any]:
    sides: dict[str, set[str]] = {page: set() for page in manifest["pages"]}
    for entry in manifest["objects"]:
        if entry["pool"] != "kv":
            sides[entry["page"]].add(entry["pool"])
    seen, half = 0, []
    for page in manifest["pages"]:
        believers = 0
        for number, (controller, _) in enumerate(controllers):
            backend = controller.storage_backend
            if not backend.batch_exists_v2([page], None).kv_hit_pages:
                continue
            believers += 1
            half += [
                [page, number, pool]
                for pool in sorted(sides[page])
                if not backend.batch_exists_v2([page], [_query(pool)]).kv_hit_pages
            ]
        seen += believers == len(controllers)
    return {"seen": seen, "half": half}


def _query(pool: str) -> Any:
    from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

    return PoolTransfer(name=PoolName(pool), keys=[""], hit_policy=PoolHitPolicy.ALL_PAGES)
