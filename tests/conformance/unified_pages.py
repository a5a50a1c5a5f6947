"""Cut pages into objects with SGLang's own unified key scheme.

Runs inside the SGLang environment: `unified_pages.py REQUEST FILE`. REQUEST is a JSON file: profile
(its first pool is cut, with `unified_head_group` and `unified_layer_partition`), pages (hashes),
seed. The values are those of page_values.py. Prints a JSON object: for each key the SHA-256 of the
bytes that `plan_unified_kv` and `PageUnifiedLayout` give it, over all ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.conformance import page_values, sglang_env
else:
    import page_values
    import sglang_env


def main() -> None:
    """Print the digest of every object."""
    parser = argparse.ArgumentParser(description="Cut pages as the unified key scheme does.")
    parser.add_argument("request", type=Path)
    request = json.loads(parser.parse_args().request.read_text())
    with contextlib.redirect_stdout(sys.stderr):
        found = {
            key: hashlib.sha256(value).hexdigest()
            for page in request["pages"]
            for key, value in _objects(request["profile"], page, request["seed"])
        }
    print(json.dumps(found))


def _objects(profile: dict[str, Any], page: str, seed: int) -> Iterator[tuple[str, bytes]]:
    """(key, bytes) of one page's objects, from the page block of each rank."""
    table = profile["pools"][0]
    salt = page_values.page_salt(page, table["name"], seed)
    whole = page_values.logical_page(table, profile["page_size"], salt)["page"]
    stages = profile.get("pp_partition") or [page_values.layer_count(table)]
    for stage, count in enumerate(stages):
        start = sum(stages[:stage])
        for rank in range(profile.get("tp", 1) if table["kind"] == "mha" else 1):
            held = page_values.shard(
                table, {"page": whole}, slice(start, start + count), rank, profile.get("tp", 1)
            )["page"]
            last = stage == len(stages) - 1
            for suffix, value in _chunks(profile, held, rank, (start, start + count), last=last):
                yield f"{page}_{suffix}", value


def _chunks(
    profile: dict[str, Any], held: Any, rank: int, layers: tuple[int, int], *, last: bool
) -> Iterator[tuple[str, bytes]]:
    from sglang.srt.mem_cache.hicache_key_scheme import plan_unified_kv
    from sglang.srt.mem_cache.pool_host.page_unified import PageUnifiedLayout

    table = profile["pools"][0]
    is_mla = table["kind"] == "mla"
    plan = plan_unified_kv(
        model_id=profile["model"],
        dtype="bfloat16",
        page_size=profile["page_size"],
        rank_replicated=is_mla,
        local_kv_heads=1 if is_mla else held.shape[3],
        attn_tp_rank=rank,
        attn_tp_size=profile.get("tp", 1),
        attn_cp_size=1,
        start_layer=layers[0],
        end_layer=layers[1],
        is_final_stage=last,
        head_group=profile.get("unified_head_group") or None,
        layer_partition=profile.get("unified_layer_partition") or None,
    )
    layout = PageUnifiedLayout(
        page_size=profile["page_size"],
        layer_num=layers[1] - layers[0],
        head_num=1 if is_mla else held.shape[3],
        head_group_num=plan.head_group_num,
        head_dim=held.shape[-1],
        itemsize=held.itemsize,
        is_mla=is_mla,
    )
    block = np.empty(layout.page_dims(1), held.dtype)
    if is_mla:
        block[0] = held
    else:
        for group, (first, end) in enumerate(plan.head_ranges):
            block[0, group] = held[:, :, :, first:end].swapaxes(0, 1)  # layer, then K and V
    data = block.tobytes()
    places = ((run, group) for run in plan.layer_ranges for group in range(plan.head_group_num))
    for suffix, (run, group) in zip(plan.suffixes, places, strict=True):
        offset, nbytes = layout.chunk_span(run, group)
        yield suffix, data[offset : offset + nbytes]


if __name__ == "__main__":
    sglang_env.prepare()
    main()
