"""The bytes that an object of a conformance store must have, built from the formats' description.

Independent of the code under test: uses page_values.py and the axis orders that formats/layouts.py
also states.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tests.conformance import page_values
else:
    import page_values


def expected_bytes(manifest: dict[str, Any], entry: dict[str, Any]) -> bytes:
    """Return the bytes of one object of a manifest: a file's flat page, or a part on Mooncake."""
    profile, table = _tables(manifest, entry)
    if table["kind"] == "logical":
        return b"\1" * int(entry["nbytes"])  # HiCacheNixl's marker
    salt = page_values.page_salt(entry["page"], entry["pool"], manifest["seed"])
    whole = page_values.logical_page(table, profile["page_size"], salt)
    layers, padding = _layers(profile, table, entry)
    parts = page_values.shard(table, whole, layers, *_tensor_shard(profile, table, entry))
    if entry.get("dcp_rank") is not None and entry["pool"] == "kv":
        parts = page_values.tokens_of(parts, entry["dcp_rank"], profile["dcp"])
    if entry["part"] in parts:
        parts = {entry["part"]: parts[entry["part"]]}
    elif table["kind"] == "mha" and entry["part"] is not None:
        side = "kv".index(entry["part"])
        parts = {"page": parts["page"][side : side + 1]}
    flat = [
        _in_order(table["kind"], profile["layout"], values, padding) for values in parts.values()
    ]
    return b"".join(values.tobytes() for values in flat)


def _tensor_shard(
    profile: dict[str, Any], table: dict[str, Any], entry: dict[str, Any]
) -> tuple[int, int]:
    """Return rank and size of the split of heads or channels."""
    if entry.get("heads"):
        first, end = map(int, entry["heads"].split("-"))
        return first // (end - first), profile["tp_lcm_size"] // (end - first)
    # An older release stores rank 0's state under a key without ranks.
    tp = profile.get("tp", 1) if table["kind"] in ("mha", "mamba") else 1
    return entry["tp_rank"] or 0, tp


def _tables(
    manifest: dict[str, Any], entry: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    for deployment in manifest["deployments"]:
        profile = deployment["profile"]
        if profile["model"].replace("/", "-") == entry["model"]:
            table = next(pool for pool in profile["pools"] if pool["name"] == entry["pool"])
            return profile, table
    raise AssertionError(f"no deployment serves {entry['model']}")


def _layers(
    profile: dict[str, Any], table: dict[str, Any], entry: dict[str, Any]
) -> tuple[slice, int]:
    """Return the rank's layers on the pool's layer axis, and the number of padding layers."""
    if table["kind"] in ("logical", "opaque"):
        return slice(None), 0
    count = page_values.layer_count(table)
    if entry["pp_rank"] is not None and not entry["pool"].startswith("draft"):
        before = sum(profile["pp_partition"][: entry["pp_rank"]])
        return slice(before, before + profile["pp_partition"][entry["pp_rank"]]), 0
    # Mooncake's keys have no CP rank, and only the first rank stores objects.
    size = profile.get("cp", 1) if profile.get("cp_layer_split") else 1
    rank = entry["cp_rank"] or 0
    share, more = divmod(count, size)
    start = rank * share + min(rank, more)
    mine = share + (rank < more)
    padded = -(-count // size) - mine if entry["pool"] == "kv" else 0
    return slice(start, start + mine), padded


def _in_order(kind: str, layout: str, values: NDArray[Any], padding: int) -> NDArray[Any]:
    if kind == "mla":
        values = np.concatenate([values, np.zeros_like(values[:1]).repeat(padding, axis=0)])
        return values.swapaxes(0, 1) if layout == "page_first" else values
    if kind != "mha":
        return values
    # From [k or v, layer, token, head, dim].
    orders = {"page_first": (0, 2, 1, 3, 4), "page_head": (0, 3, 2, 1, 4)}
    return values.transpose(orders.get(layout, (0, 1, 2, 3, 4)))
