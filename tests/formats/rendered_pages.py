"""Objects of a page, rendered from the documented byte orders without the code under test.

A page has random content for the whole model. Each rank's share is cut out and ordered by hand, for
each layout and pool.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from hicachectl.formats.kinds.pool import Pool, StateTensor
    from hicachectl.formats.objects import Coordinate
    from hicachectl.formats.profile import Profile

    Bytes = npt.NDArray[np.uint8]

ITEM_BYTES = {"bfloat16": 2, "float32": 4, "float8_e4m3fn": 1}
DRAFTS = ("draft", "draft_indexer", "draft_swa")


def page_content(profile: Profile, seed: int) -> dict[str, Any]:
    """Return random content of every pool, unsharded; the last axis is bytes.

    mha: k, v [layer, token, head, bytes]. mla: rows [layer, token, bytes]. indexer: blocks
    [layer, bytes]. mamba: each state [layer, *shape, item bytes]. Packed drafts come last.
    """
    rng = np.random.default_rng(seed)
    return {pool.name: _content(profile, pool, rng) for pool in profile.pools}


def _content(profile: Profile, pool: Pool, rng: np.random.Generator) -> Any:
    layers = len(pool.layer_numbers) + pool.packed_draft_layers
    tokens = profile.page_size

    def draw(*shape: int) -> Bytes:
        return rng.integers(0, 256, shape, dtype=np.uint8)

    if pool.kind == "mha":
        widths = (pool.head_dim, pool.v_head_dim or pool.head_dim)
        item = ITEM_BYTES[pool.dtype]
        return [draw(layers, tokens, pool.kv_heads, width * item) for width in widths]
    if pool.kind == "mla":
        item = {"bf16": 2, "fp8": 1}[pool.row]
        return draw(layers, tokens, (pool.kv_lora_rank + pool.qk_rope_head_dim) * item)
    if pool.kind == "dsa_indexer":
        return draw(layers, tokens * (pool.index_head_dim + pool.index_head_dim // 128 * 4))
    return {
        name: draw(layers, *state.shape, ITEM_BYTES[state.dtype]) for name, state in states(pool)
    }


def states(pool: Pool) -> list[tuple[str, StateTensor]]:
    """Return the states of a mamba pool, in stored order."""
    named = [("temporal", pool.temporal)] if pool.temporal else []
    return [*named, *((f"conv_{n}", state) for n, state in enumerate(pool.conv))]


def rendered(profile: Profile, grammar: str, content: Any, coordinate: Coordinate) -> bytes:
    """Return the bytes of one object."""
    pool = next(pool for pool in profile.pools if pool.name == coordinate.pool)
    layers = _layers(profile, pool, coordinate)
    if pool.kind == "mha":
        heads = _heads(profile, pool, coordinate)
        sides = [values[layers][:, :, heads] for values in content[pool.name]]
        if coordinate.part is not None:
            sides = [sides["kv".index(coordinate.part)]]
        return b"".join(_mha_order(side, profile.layout).tobytes() for side in sides)
    if pool.kind == "mla":
        rows = content[pool.name][layers]
        return bytes((rows.swapaxes(0, 1) if profile.layout == "page_first" else rows).tobytes())
    if pool.kind == "dsa_indexer":
        return bytes(content[pool.name][layers].tobytes())
    cut = {
        name: _state_shard(content[pool.name][name][layers], state, coordinate, profile)
        for name, state in states(pool)
    }
    parts = list(cut) if coordinate.part is None else [coordinate.part]
    return b"".join(cut[part].tobytes() for part in parts)


def _layers(profile: Profile, pool: Pool, coordinate: Coordinate) -> list[int]:
    """Return the indices of a stage's layers on the pool's layer axis, packed drafts last."""
    own = len(pool.layer_numbers)
    packed = list(range(own, own + pool.packed_draft_layers))
    stage = coordinate.shard.pp_rank or 0
    if profile.pp == 1 or pool.name in DRAFTS:
        return [*range(own), *packed]
    start = sum(profile.pp_partition[:stage])
    end = start + profile.pp_partition[stage]
    held = [n for n, layer in enumerate(pool.layer_numbers) if start <= layer < end]
    return held + (packed if stage == profile.pp - 1 else [])


def _rank(profile: Profile, coordinate: Coordinate) -> int:
    shard = coordinate.shard
    if shard.tp_rank is None and shard.heads is not None:
        return shard.heads[0] * profile.tp // profile.tp_lcm_size
    return shard.tp_rank or 0


def _heads(profile: Profile, pool: Pool, coordinate: Coordinate) -> list[int]:
    if pool.name == "kv" and coordinate.shard.heads is not None:
        slices = np.split(np.arange(pool.kv_heads), profile.tp_lcm_size)
        return [int(head) for head in slices[coordinate.shard.heads[0]]]
    # The list of all ranks' heads repeats heads if there are fewer heads than ranks.
    copies = max(1, profile.tp // pool.kv_heads)
    dealt = np.split(np.repeat(np.arange(pool.kv_heads), copies), profile.tp)
    return [int(head) for head in dealt[_rank(profile, coordinate)]]


def _mha_order(values: Bytes, layout: str) -> Bytes:
    """Reorder [layer, token, head, bytes]."""
    if layout == "page_first":
        return values.transpose(1, 0, 2, 3)
    if layout == "page_head":
        return values.transpose(2, 1, 0, 3)
    return values


def _state_shard(
    values: Bytes, state: StateTensor, coordinate: Coordinate, profile: Profile
) -> Bytes:
    axis = state.shard_axis + 1
    blocks = np.split(values, np.cumsum(state.groups)[:-1], axis=axis) if state.groups else [values]
    rank, parts = _rank(profile, coordinate), profile.tp
    if state.least:
        parts = min(parts, values.shape[axis] // state.least)
        rank //= profile.tp // parts
    shares = [
        block if number in state.whole else np.split(block, parts, axis=axis)[rank]
        for number, block in enumerate(blocks)
    ]
    return np.concatenate(shares, axis=axis)
