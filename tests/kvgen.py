"""KV pages that resemble a model's, for tests of checks, benchmarks and codecs.

Each (layer, head, channel) has its own lognormal magnitude; a few outlier channels per head also
have an offset. Tokens repeat by Zipf's law; equal tokens have equal rows in the first layer and
similar rows in the others. Keys are rotated by their position (RoPE). Some layers are near zero.
No check is tuned on this generator: only the exponent entropy of real bf16 KV, 2.8 to 3.0 bits
(test_kvgen.py), determines its parameters.

Normal noise is cut out of one pool at pseudo-random offsets, so drawing costs only a copy.
"""

from __future__ import annotations

import zlib
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from hicachectl.formats.layouts import QUANT_BLOCK
from hicachectl.kernels.values import fp8_values

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from hicachectl.formats.kinds.pool import Pool
    from hicachectl.formats.layouts import TensorLayout
    from hicachectl.formats.profile import Profile
    from hicachectl.formats.spec import ObjectSpec

    Floats = NDArray[np.float32]
    Bytes = NDArray[np.uint8]

_CHANNEL_SIGMA = 0.39  # standard deviation of the logarithm of a channel's magnitude
_LAYER_SIGMA = 0.18
_OUTLIERS = 3  # outlier channels of each head
_NEAR_ZERO_EVERY = 40  # one layer in so many is near zero
_NEAR_ZERO = 2.0**-7
_VOCABULARY = 50_000
_ZIPF = 1.2
_ROPE_BASE = 500_000.0
_CONTEXT = 32_768  # first positions are below this
_POOL_ITEMS = 1 << 20
_FP8_LARGEST = 448.0


class KvGenerator:
    """Generator of objects of one kind for pages of one model.

    seed: number that stands for the model.

    The page number determines tokens and position, for all pools and ranks. Ranks that hold the
    same KV head make the same bytes.
    """

    def __init__(self, expected: ObjectSpec, profile: Profile, seed: int) -> None:
        pool = profile.pool(expected.coordinate.pool)
        assert pool is not None
        self.expected, self.pool, self.seed = expected, pool, seed
        self.page_size = profile.page_size
        shard = expected.coordinate.shard
        head = _first_head(pool, shard.tp_rank, shard.tp_size, shard.heads)
        self._salt = zlib.crc32(
            repr((pool.name, shard.pp_rank, shard.layers, shard.dcp_rank, head)).encode()
        )
        self._kinds = {tensor.name: self._magnitudes(tensor) for tensor in expected.tensors}

    def objects(self, pages: Iterable[int]) -> Bytes:
        """Return the objects of some pages: [pages, nbytes]."""
        numbers = list(pages)
        made = np.empty((len(numbers), self.expected.nbytes), np.uint8)
        step = max(1, 128 // self.page_size)
        for start in range(0, len(numbers), step):
            chunk = numbers[start : start + step]
            self._fill(made[start : start + step], chunk)
        return made

    def _fill(self, made: Bytes, pages: Sequence[int]) -> None:
        tokens = np.stack([page_tokens(self.seed, page, self.page_size) for page in pages])
        rngs = [np.random.default_rng([self.seed, page]) for page in pages]
        starts = np.array([rng.integers(_CONTEXT) for rng in rngs])
        for tensor in self.expected.tensors:
            part = made[:, tensor.offset : tensor.offset + tensor.nbytes]
            if self.pool.kind == "mamba":
                self._fill_states(part, tensor, pages)
            elif self.pool.kind == "dsa_indexer":
                self._fill_indexer(part, tensor, tokens, pages)
            else:
                self._fill_rows(part, tensor, tokens, starts, pages)

    def _magnitudes(self, tensor: TensorLayout) -> tuple[Floats, Floats]:
        """Draw the scale and offset of every channel: [kv, layer, head * channel] each."""
        lengths = dict(zip(tensor.axes, tensor.shape, strict=True))
        layers, heads = lengths["layer"], lengths.get("head", 1)
        channels = self._channels(tensor, lengths)
        kinds = lengths.get("kv", 1)
        rng = np.random.default_rng([self.seed, self._salt, zlib.crc32(tensor.name.encode())])
        shape = (kinds, layers, heads, channels)
        scale = np.exp(_CHANNEL_SIGMA * rng.standard_normal(shape))
        offset = np.zeros(shape)
        outliers = rng.random(shape).argsort(axis=-1)[..., :_OUTLIERS]
        grown = rng.uniform(4, 10, outliers.shape)
        np.put_along_axis(scale, outliers, grown, axis=-1)
        np.put_along_axis(offset, outliers, grown * rng.normal(0, 1.5, grown.shape), axis=-1)
        gain = np.exp(_LAYER_SIGMA * rng.standard_normal((kinds, layers, 1, 1)))
        near_zero = rng.permutation(layers)[: (layers + 8) // _NEAR_ZERO_EVERY]
        gain[:, near_zero] *= _NEAR_ZERO
        flat = (kinds, layers, heads * channels)
        return (
            (scale * gain).astype(np.float32).reshape(flat),
            (offset * gain).astype(np.float32).reshape(flat),
        )

    def _channels(self, tensor: TensorLayout, lengths: dict[str, int]) -> int:
        if self.pool.kind == "mla":
            return self.pool.kv_lora_rank + self.pool.qk_rope_head_dim
        if self.pool.kind == "dsa_indexer":
            return self.pool.index_head_dim
        return lengths.get("channel", lengths.get("state_0", 1))

    def _rows(
        self, tensor: TensorLayout, kv: int, layer: int, tokens: NDArray[Any], pages: Sequence[int]
    ) -> Floats:
        """Draw the rows of a layer before rotation: [pages, tokens, heads * channels]."""
        scale, offset = (kind[kv, layer] for kind in self._kinds[tensor.name])
        salt = self._salt + 7919 * layer + 104_729 * kv + zlib.crc32(tensor.name.encode())
        rows = _noise(tokens, salt, len(scale))
        if layer:
            places = np.array(pages)[:, None] * 4099 + np.arange(tokens.shape[1])
            rows *= np.float32(0.6)
            context = _noise(places, salt + 1, len(scale))
            context *= np.float32(0.8)
            rows += context
        rows *= scale
        rows += offset
        return rows

    def _fill_rows(
        self,
        part: Bytes,
        tensor: TensorLayout,
        tokens: NDArray[Any],
        starts: NDArray[Any],
        pages: Sequence[int],
    ) -> None:
        lengths = dict(zip(tensor.axes, tensor.shape, strict=True))
        held = tokens[:, : lengths["token"]]  # DCP ranks hold fewer
        positions = starts[:, None] + np.arange(held.shape[1])
        view = _by_axes(part, tensor)  # [pages, kv, layer, token, head, bytes]
        for kv in range(lengths.get("kv", 1)):
            rotated = tensor.name in ("k", "kv") and not kv
            for layer in range(lengths["layer"]):
                rows = self._rows(tensor, kv, layer, held, pages)
                if self.pool.kind == "mla":
                    _rotate(rows[..., self.pool.kv_lora_rank :], positions)
                elif rotated:
                    by_head = rows.reshape(*held.shape, lengths["head"], -1)
                    _rotate(by_head, positions[..., None])
                if tensor.dtype == "uint8":
                    stored = _scaled_rows(rows, self.pool.kv_lora_rank)
                else:
                    stored = encode(rows, tensor.dtype)
                view[:, kv, layer] = stored.reshape(view[:, kv, layer].shape)

    def _fill_indexer(
        self, part: Bytes, tensor: TensorLayout, tokens: NDArray[Any], pages: Sequence[int]
    ) -> None:
        blocks = part.reshape(len(part), *tensor.shape)
        dim = self.pool.index_head_dim
        for layer in range(tensor.shape[0]):
            rows = self._rows(tensor, 0, layer, tokens, pages)
            codes, scales = _quantise(rows, floor=1e-4)
            width = tokens.shape[1] * dim
            blocks[:, layer, :width] = codes.reshape(len(part), -1)
            blocks[:, layer, width:] = scales.view(np.uint8).reshape(len(part), -1)

    def _fill_states(self, part: Bytes, tensor: TensorLayout, pages: Sequence[int]) -> None:
        """Fill recurrent states: each index of the first axis has its own magnitude."""
        scale, _ = self._kinds[tensor.name]
        view = part.reshape(len(part), *tensor.shape[:2], -1)
        width = int(np.prod(tensor.shape[2:]))
        salt = self._salt + zlib.crc32(tensor.name.encode())
        for layer in range(tensor.shape[0]):
            places = np.array(pages)[:, None] * 65_537 + np.arange(tensor.shape[1])
            rows = _noise(places, salt + 7919 * layer, width)
            rows *= scale[0, layer][:, None]
            view[:, layer] = encode(rows, tensor.dtype).reshape(view[:, layer].shape)


def page_tokens(seed: int, page: int, count: int) -> NDArray[np.int64]:
    """Draw the tokens of a page. Frequent tokens repeat."""
    rng = np.random.default_rng([seed, page, 1])
    return np.minimum(rng.zipf(_ZIPF, count), _VOCABULARY)


def uniform_noise(expected: ObjectSpec, profile: Profile, count: int, seed: int) -> Bytes:
    """Return valid objects without structure: uniform values in [-1, 1), [count, nbytes]."""
    pool = profile.pool(expected.coordinate.pool)
    assert pool is not None
    rng = np.random.default_rng(seed)
    made = np.empty((count, expected.nbytes), np.uint8)

    def noise(*shape: int) -> Floats:
        return rng.random(shape, np.float32) * 2 - 1

    for tensor in expected.tensors:
        part = made[:, tensor.offset : tensor.offset + tensor.nbytes]
        if tensor.dtype != "uint8":
            part[:] = encode(noise(count, tensor.nbytes // tensor.itemsize), tensor.dtype)
        elif pool.kind == "mla":
            width = pool.kv_lora_rank + pool.qk_rope_head_dim
            rows = part.reshape(count, -1, tensor.shape[-1])
            rows[:] = _scaled_rows(noise(*rows.shape[:2], width), pool.kv_lora_rank)
        else:
            blocks = part.reshape(count, *tensor.shape)
            width = tensor.shape[1] * QUANT_BLOCK // (QUANT_BLOCK + 4)
            codes, scales = _quantise(noise(count, tensor.shape[0], width), floor=1e-4)
            blocks[..., :width] = codes
            blocks[..., width:] = scales.view(np.uint8)
    return made


def encode(values: Floats, dtype: str) -> Bytes:
    """Round values to a dtype: bytes along the last axis."""
    if dtype == "float32":
        return np.ascontiguousarray(values).view(np.uint8)
    if dtype == "float16":
        return values.astype(np.float16).view(np.uint8)
    bits = np.ascontiguousarray(values).view(np.uint32) + np.uint32(0x8000)
    bits >>= np.uint32(16)
    rounded = bits.astype(np.uint16)
    return rounded.view(np.uint8) if dtype == "bfloat16" else _fp8_of_bfloat16(dtype)[rounded]


@cache
def _fp8_of_bfloat16(dtype: str) -> Bytes:
    """Tabulate the nearest fp8 code of every bfloat16, saturating; only fnuz has no -0."""
    values = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)
    codes = np.arange(0x80, dtype=np.uint8)
    sizes = fp8_values(dtype)[codes]
    codes, sizes = codes[np.isfinite(sizes)], sizes[np.isfinite(sizes)]
    middles = (sizes[1:] + sizes[:-1]) / 2
    nearest = codes[np.searchsorted(middles, np.nan_to_num(np.abs(values), posinf=np.inf))]
    negative = np.signbit(values)
    if dtype == "float8_e4m3fnuz":
        negative &= nearest != 0
    table: Bytes = nearest | negative.astype(np.uint8) << np.uint8(7)
    return table


@cache
def _noise_pool() -> Floats:
    return np.random.default_rng(0).standard_normal(_POOL_ITEMS + (1 << 17), np.float32)


def _noise(places: NDArray[Any], salt: int, width: int) -> Floats:
    """Cut one run of normal noise out of the pool per index: [*places, width]."""
    windows = np.lib.stride_tricks.sliding_window_view(_noise_pool(), width)
    mixed = (places.astype(np.uint64) + np.uint64(salt)) * np.uint64(0x9E3779B97F4A7C15)
    cut: Floats = windows[(mixed >> np.uint64(40)).astype(np.int64) % _POOL_ITEMS]
    return cut


def _rotate(rows: Floats, positions: NDArray[Any]) -> None:
    """Apply RoPE in place: rows [..., channels], pairs of channels half the width apart."""
    half = rows.shape[-1] // 2
    speeds = _ROPE_BASE ** (-np.arange(half) / max(half, 1))
    angles = positions[..., None] * speeds
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    one, two = rows[..., :half], rows[..., half : 2 * half]
    turned = one * cos
    turned -= two * sin
    two *= cos
    two += one * sin
    one[...] = turned


def _quantise(rows: Floats, floor: float) -> tuple[Bytes, Floats]:
    """Quantise blocks of 128 along the last axis to e4m3fn: codes, and one scale per block."""
    blocks = rows.reshape(*rows.shape[:-1], -1, QUANT_BLOCK)
    scales = np.maximum(np.abs(blocks).max(axis=-1), np.float32(floor)) / np.float32(_FP8_LARGEST)
    with np.errstate(all="ignore"):
        codes = encode(blocks / scales[..., None], "float8_e4m3fn")
    return codes.reshape(rows.shape), np.ascontiguousarray(scales)


def _scaled_rows(rows: Floats, rank: int) -> Bytes:
    """Quantise latents and keep the rope part: the 656-byte form of [..., rank + rope] rows."""
    codes, scales = _quantise(np.ascontiguousarray(rows[..., :rank]), floor=0.0)
    rope = encode(rows[..., rank:], "bfloat16")
    return np.concatenate([codes, scales.view(np.uint8), rope], axis=-1)


def _by_axes(part: Bytes, tensor: TensorLayout) -> Bytes:
    """View a tensor's bytes [pages, ...] as [pages, kv, layer, token, head, bytes of channels]."""
    width = tensor.shape[-1] * tensor.itemsize
    view = part.reshape(len(part), *tensor.shape[:-1], width)
    axes = [axis for axis in tensor.axes[:-1] if axis != "head_group"]
    if "head_group" in tensor.axes:
        view = view[:, 0]
    for axis in ("kv", "head"):
        if axis not in axes:
            view, axes = view[..., None, :], [*axes, axis]
    order = [1 + axes.index(axis) for axis in ("kv", "layer", "token", "head")]
    return view.transpose(0, *order, len(axes) + 1)


def _first_head(
    pool: Pool, tp_rank: int | None, tp_size: int | None, heads: tuple[int, int] | None
) -> Any:
    """Return the first KV head of a rank. Ranks with replicas of a head share its number."""
    if pool.kind == "mha" and tp_rank is not None and tp_size and not pool.replicated:
        return tp_rank * pool.kv_heads // tp_size
    return heads if heads is not None else tp_rank
