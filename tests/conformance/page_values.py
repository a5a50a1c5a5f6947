"""Values of the conformance stores; each shows where in the model its element belongs.

Needs numpy only: the SGLang environment, which writes the values, and the tests, which compare
them, share this module. An element's value depends on its position in the whole model's page
(before sharding, in the order of the axes given below), and on the page and pool:

- 16-bit patterns: `(position + salt) mod 2**15` as sign, 7 exponent bits and 7 mantissa bits
  of a finite, normal bfloat16 of moderate size. Unique in any 32768 neighbouring positions.
- float32 states: the same in the 23 mantissa bits of a number in [1, 2).
- e4m3 codes: every code but the two NaNs in turn; with scales, the first of each block of 128 is
  the largest number, as quantisation by the block's maximum leaves it.
- float32 scales: in [2**-12, 2**-11), well above the smallest that SGLang writes (1e-4 / 448).
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    Parts = dict[str, NDArray[Any]]

FP8_BLOCK = 128  # codes that share a scale, in latent rows and in the indexer
_E4M3 = np.array([code for code in range(256) if code & 0x7F != 0x7F], dtype=np.uint8)
_E4M3_LARGEST = 0x7E


def page_salt(page_hash: str, pool: str, seed: int = 0) -> int:
    """Return a number that differs between pages, pools and seeds."""
    return int(page_hash[:8], 16) ^ zlib.crc32(f"{pool}/{seed}".encode())


def logical_page(pool: Mapping[str, Any], page_size: int, salt: int) -> Parts:
    """Return one page of a whole pool (all layers and heads), from the pool's profile table.

    mha: `page` uint16 (bfloat16 bits) or uint8 (e4m3 codes) [k or v, layer, token, head, dim]; if
        K and V differ in width: `k` and `v`, both with a first axis of length 1
    mla: `page` uint16 [layer, token, dim]; uint8 with row "fp8"; uint8 [layer, token, 656] with
        row "fp8_scaled"
    dsa_indexer: `page` uint8 [layer, keys of all tokens then their scales]
    dsv4, blocks: `page` uint8 [layer, bytes]
    opaque, logical: `page` uint8 [bytes]
    mamba: `temporal` float32 [layer, *shape], `conv_<i>` uint16 [layer, *shape]
    """
    if pool["kind"] in ("logical", "opaque"):
        return {"page": _bytes((pool.get("nbytes", 0),), salt)}
    layers = layer_count(pool)
    if pool["kind"] == "mha":
        return _keys_and_values(pool, (layers, page_size, pool["kv_heads"]), salt)
    if pool["kind"] != "mamba":
        rows = page_size // pool.get("compress_ratio", 1)
        return {"page": _shared_rows(pool, layers, rows, salt)}
    states = {"temporal": pool["temporal"]} if "temporal" in pool else {}
    states |= {f"conv_{index}": state for index, state in enumerate(pool.get("conv", ()))}
    return {
        part: _state((layers, *state["shape"]), state["dtype"], salt + zlib.crc32(part.encode()))
        for part, state in states.items()
    }


def tokens_of(parts: Parts, dcp_rank: int, dcp_size: int) -> Parts:
    """Return the rows of a latent page that one DCP rank holds: every dcp_size-th token."""
    return {"page": parts["page"][:, dcp_rank::dcp_size]}


def layer_count(pool: Mapping[str, Any]) -> int:
    """Return the number of layers of a pool's table, with packed draft layers as the last."""
    layers = pool["layers"]
    own = layers if isinstance(layers, int) else len(layers)
    return own + int(pool.get("packed_draft_layers", 0))


def shard(
    pool: Mapping[str, Any], parts: Parts, layers: slice, tp_rank: int, tp_size: int
) -> Parts:
    """Return one rank's part of `logical_page`: its layers and its heads or channels."""
    if pool["kind"] == "mha":
        # With fewer heads than ranks, neighbouring ranks hold the same head.
        heads = max(1, pool["kv_heads"] // tp_size)
        first = tp_rank * pool["kv_heads"] // tp_size
        mine = slice(first, first + heads)
        return {part: values[:, layers, :, mine] for part, values in parts.items()}
    if pool["kind"] != "mamba":
        return {"page": parts["page"][layers]}
    return {
        part: _shard_state(values[layers], _state_table(pool, part), tp_rank, tp_size)
        for part, values in parts.items()
    }


def _state_table(pool: Mapping[str, Any], part: str) -> Mapping[str, Any]:
    table: Mapping[str, Any] = (
        pool["temporal"] if part == "temporal" else pool["conv"][int(part.split("_")[1])]
    )
    return table


def _shard_state(
    values: NDArray[Any], state: Mapping[str, Any], tp_rank: int, tp_size: int
) -> NDArray[Any]:
    """Split each group of the sharded axis separately: q, k and v rows of a convolution."""
    axis = state.get("shard_axis", 0) + 1  # after the layers
    groups = state.get("groups") or [values.shape[axis]]
    shares = tp_size
    if least := state.get("least"):  # with fewer heads than ranks, neighbours hold the same head
        shares = min(tp_size, values.shape[axis] // least)
    share = tp_rank * shares // tp_size
    blocks = np.split(values, np.cumsum(groups)[:-1], axis=axis)
    mine = [
        block if number in state.get("whole", ()) else np.split(block, shares, axis=axis)[share]
        for number, block in enumerate(blocks)
    ]
    return np.concatenate(mine, axis=axis)


def _shared_rows(pool: Mapping[str, Any], layers: int, rows: int, salt: int) -> NDArray[Any]:
    """Return the rows or blocks of a pool that all TP ranks share."""
    if pool["kind"] == "dsv4":
        return _v4_blocks(layers, rows, salt)
    if pool["kind"] == "blocks":
        return _bytes((layers, pool["nbytes"]), salt)
    if pool["kind"] == "dsa_indexer":
        return _indexer_blocks(layers, rows, pool["index_head_dim"], salt)
    if pool["row"] == "fp8_scaled":
        return _scaled_rows(layers, rows, pool, salt)
    encode = _e4m3 if pool["row"] == "fp8" else _bfloat16
    return encode((layers, rows, pool["kv_lora_rank"] + pool["qk_rope_head_dim"]), salt)


def _keys_and_values(pool: Mapping[str, Any], outer: tuple[int, ...], salt: int) -> Parts:
    encodings: dict[str, Callable[[tuple[int, ...], int], NDArray[Any]]]
    encodings = {"bfloat16": _bfloat16, "float8_e4m3fn": _e4m3, "mxfp8": _e4m3}
    encode = encodings[pool["dtype"]]
    wide, narrow = pool["head_dim"], pool.get("v_head_dim", pool["head_dim"])
    if wide == narrow:
        return {"page": encode((2, *outer, wide), salt)}
    return {"k": encode((1, *outer, wide), salt), "v": encode((1, *outer, narrow), salt + 1)}


def _positions(shape: tuple[int, ...], salt: int) -> NDArray[np.int64]:
    return np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape) + salt


def _bytes(shape: tuple[int, ...], salt: int) -> NDArray[np.uint8]:
    numbers = _positions(shape, salt)
    return (numbers * 167 + (numbers >> 8)).astype(np.uint8)


def _bfloat16(shape: tuple[int, ...], salt: int) -> NDArray[np.uint16]:
    number = _positions(shape, salt) & 0x7FFF
    exponent = 56 + (number >> 7 & 0x7F)  # of 0..255: magnitudes 2**-71 to 2**56
    return (number >> 14 << 15 | exponent << 7 | number & 0x7F).astype(np.uint16)


def _state(shape: tuple[int, ...], dtype: str, salt: int) -> NDArray[Any]:
    if dtype == "float32":
        return (0x3F800000 | _positions(shape, salt) & 0x7FFFFF).astype(np.uint32).view(np.float32)
    if dtype == "bfloat16":
        return _bfloat16(shape, salt)
    raise ValueError(f"no encoding for states of dtype {dtype}")


def _e4m3(shape: tuple[int, ...], salt: int) -> NDArray[np.uint8]:
    return _E4M3[_positions(shape, salt) % len(_E4M3)]


def _scaled_e4m3(shape: tuple[int, ...], salt: int) -> NDArray[np.uint8]:
    codes = _e4m3(shape, salt)
    codes.reshape(-1, FP8_BLOCK)[:, 0] = _E4M3_LARGEST
    return codes


def _scales(shape: tuple[int, ...], salt: int) -> NDArray[np.float32]:
    return ((1 + (_positions(shape, salt) & 0xFFFF) / 2**16) * 2**-12).astype(np.float32)


def _scaled_rows(
    layers: int, page_size: int, pool: Mapping[str, Any], salt: int
) -> NDArray[np.uint8]:
    """Return 656-byte rows: codes, one float32 scale per 128 codes, and the bfloat16 rope part."""
    rank, rope = pool["kv_lora_rank"], pool["qk_rope_head_dim"]
    codes = _scaled_e4m3((layers, page_size, rank), salt)
    scales = _scales((layers, page_size, rank // FP8_BLOCK), salt)
    rotary = _bfloat16((layers, page_size, rope), salt)
    return np.concatenate([codes, scales.view(np.uint8), rotary.view(np.uint8)], axis=-1)


def _v4_blocks(layers: int, rows: int, salt: int) -> NDArray[np.uint8]:
    """Return blocks of rows of form v4: codes and rope part of all rows, then 8 scales of each."""
    codes = _e4m3((layers, rows, 448), salt)
    rotary = _bfloat16((layers, rows, 64), salt).view(np.uint8)
    data = np.concatenate([codes, rotary], axis=-1).reshape(layers, -1)
    scales = (_positions((layers, rows * 8), salt) % 255).astype(np.uint8)  # 255 is NaN
    padding = np.zeros((layers, -rows * 584 % 576), dtype=np.uint8)
    return np.concatenate([data, scales, padding], axis=-1)


def _indexer_blocks(layers: int, page_size: int, dim: int, salt: int) -> NDArray[np.uint8]:
    keys = _scaled_e4m3((layers, page_size, dim), salt).reshape(layers, -1)
    scales = _scales((layers, page_size, dim // FP8_BLOCK), salt).reshape(layers, -1)
    return np.concatenate([keys, scales.view(np.uint8)], axis=-1)
