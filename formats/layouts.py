"""The order of the axes inside one stored object, per kind of pool and host memory layout.

Nothing in an object says how it is ordered, and every layout of a pool has the same size. An
object is a run of tensors without gaps; a tensor is an axis order, a shape and an item type.
Source: SGLang srt/mem_cache/pool_host/ {mha,mla,dsa,mamba,page_unified}.py, `get_data_page`
(flat pages) and `get_page_buffer_meta` (objects of one part each).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

from hicachectl.formats.errors import ProfileError, UnsupportedByBackend
from hicachectl.formats.profile import DTYPE_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

# "uint8" is bytes with a form of their own: scaled MLA rows, indexer blocks.
TENSOR_DTYPE_BYTES = {**DTYPE_BYTES, "uint8": 1}

INDEX_QUANT_BLOCK = 128  # codes per fp32 scale: DSATokenToKVPool.quant_block_size
_SCALE_BYTES = 4

_MHA_AXES = {
    "layer_first": ("layer", "token", "head", "channel"),
    "page_first": ("token", "layer", "head", "channel"),
    "page_first_direct": ("layer", "token", "head", "channel"),
    "page_head": ("head", "token", "layer", "channel"),
}
_MLA_AXES = {
    "layer_first": ("layer", "token", "channel"),
    "page_first": ("token", "layer", "channel"),
    "page_first_direct": ("layer", "token", "channel"),
}
_ASYMMETRIC_LAYOUTS = ("page_first", "page_first_direct")
_INDEXER_LAYOUTS = ("layer_first", "page_first", "page_first_direct")
_STATE_LAYOUTS = ("page_first", "page_first_direct")


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """One dense tensor of an object.

    axes:   byte order, outermost first: "head_group", "layer", "kv" (0 is K), "token", "head",
            "channel", "block" (bytes), "state_0", "state_1", ...
    dtype:  a name of TENSOR_DTYPE_BYTES.
    offset: bytes from the start of the object.
    """

    name: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    offset: int = 0

    @property
    def itemsize(self) -> int:
        """Bytes of one item."""
        return TENSOR_DTYPE_BYTES[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return prod(self.shape) * self.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class MhaGeometry:
    """K and V of one rank: `heads` KV heads of `head_dim` (V: `v_head_dim`) channels."""

    layers: int
    tokens: int
    heads: int
    head_dim: int
    v_head_dim: int
    dtype: str

    @property
    def asymmetric(self) -> bool:
        """Whether K and V have rows of different width."""
        return self.head_dim != self.v_head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaGeometry:
    """Latent rows: `channels` items a token and layer."""

    layers: int
    tokens: int
    channels: int
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerGeometry:
    """Index keys: per layer and page one block, the fp8 keys of all tokens, then their scales."""

    layers: int
    tokens: int
    index_head_dim: int

    @property
    def block_bytes(self) -> int:
        """Bytes of one layer's block."""
        scales = self.index_head_dim // INDEX_QUANT_BLOCK * _SCALE_BYTES
        return self.tokens * (self.index_head_dim + scales)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateGeometry:
    """Recurrent states of one rank: (name, shape of one layer, dtype), in stored order."""

    layers: int
    states: tuple[tuple[str, tuple[int, ...], str], ...]


Geometry = MhaGeometry | MlaGeometry | IndexerGeometry | StateGeometry


def flat_page(geometry: Geometry, layout: str) -> tuple[TensorLayout, ...]:
    """Lay out an object that holds a whole page of a pool (file, 3FS without zero-copy).

    Raises ProfileError for a layout SGLang does not build the pool in, UnsupportedByBackend for
    one that has no flat page.
    """
    if isinstance(geometry, MhaGeometry) and geometry.asymmetric:
        raise UnsupportedByBackend(
            f"K and V of different width ({geometry.head_dim}, {geometry.v_head_dim}) have no "
            "flat page: SGLang stores such models on Mooncake only"
        )
    return tuple(_placed(_tensors(geometry, layout)))


def part_objects(geometry: Geometry, layout: str) -> tuple[TensorLayout, ...]:
    """Lay out the objects of a page that hold one part each (Mooncake, 3FS -k and -v), in order.

    Raises ProfileError and UnsupportedByBackend like `flat_page`.
    """
    tensors = tuple(_tensors(geometry, layout))
    if layout == "layer_first" and not isinstance(geometry, MlaGeometry):
        # MooncakeStore takes scattered layers for MLA KV alone (_get_mha_buffer_meta raises).
        raise UnsupportedByBackend(
            "layer_first pages of this pool lie scattered in host memory and cannot be stored "
            "as parts; page_first and page_first_direct can"
        )
    return tensors


def _tensors(geometry: Geometry, layout: str) -> Iterator[TensorLayout]:
    if layout == "page_unified":
        raise UnsupportedByBackend(
            "page_unified belongs to the unified key scheme; no SGLang store reads or writes it"
        )
    if isinstance(geometry, MhaGeometry):
        yield from _mha_tensors(geometry, layout)
    elif isinstance(geometry, MlaGeometry):
        yield _mla_tensor(geometry, _MLA_AXES[_known(layout, tuple(_MLA_AXES), "an MLA pool")])
    elif isinstance(geometry, IndexerGeometry):
        # Layer-major blocks in all three, so the layout does not show in the bytes.
        _known(layout, _INDEXER_LAYOUTS, "a DSA indexer pool")
        blocks = (geometry.layers, geometry.block_bytes)
        yield TensorLayout("indexer", ("layer", "block"), blocks, "uint8")
    else:
        _known(layout, _STATE_LAYOUTS, "a Mamba pool")
        for name, shape, dtype in geometry.states:
            axes = ("layer", *(f"state_{axis}" for axis in range(len(shape))))
            yield TensorLayout(name, axes, (geometry.layers, *shape), dtype)


def _mha_tensors(geometry: MhaGeometry, layout: str) -> Iterator[TensorLayout]:
    if geometry.asymmetric:
        _known(layout, _ASYMMETRIC_LAYOUTS, "an MHA pool with K and V of different width")
    axes = _MHA_AXES[_known(layout, tuple(_MHA_AXES), "an MHA pool")]
    lengths = {"layer": geometry.layers, "token": geometry.tokens, "head": geometry.heads}
    for name, width in (("k", geometry.head_dim), ("v", geometry.v_head_dim)):
        shape = tuple(({**lengths, "channel": width})[axis] for axis in axes)
        yield TensorLayout(name, axes, shape, geometry.dtype)


def _mla_tensor(geometry: MlaGeometry, axes: tuple[str, ...]) -> TensorLayout:
    lengths = {"layer": geometry.layers, "token": geometry.tokens, "channel": geometry.channels}
    return TensorLayout("kv", axes, tuple(lengths[axis] for axis in axes), geometry.dtype)


def _placed(tensors: Iterator[TensorLayout]) -> Iterator[TensorLayout]:
    """Set the tensors one after another, without gaps."""
    offset = 0
    for tensor in tensors:
        yield replace(tensor, offset=offset)
        offset += tensor.nbytes


def _known(layout: str, known: tuple[str, ...], pool: str) -> str:
    if layout not in known:
        raise ProfileError(
            f"layout: SGLang does not build {pool} in {layout!r}, only in {', '.join(known)}"
        )
    return layout
