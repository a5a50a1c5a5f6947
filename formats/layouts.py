"""The order of the axes inside one stored object.

Nothing in an object says how it is ordered, and every layout of a pool has the same size. An
object is a run of tensors without gaps; a tensor is an axis order, a shape and an item type. Which
tensors a pool has, a kind of `formats.kinds` says.
Source: SGLang srt/mem_cache/pool_host/ {mha,mla,dsa,mamba}.py, `get_data_page` (flat pages) and
`get_page_buffer_meta` (objects of one part each).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from operator import mul
from typing import TYPE_CHECKING, Self

from hicachectl.formats.errors import ProfileError, UnsupportedByBackend

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

DTYPE_BYTES = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
}
# "uint8" is bytes with a form of their own: scaled MLA rows, indexer blocks.
TENSOR_DTYPE_BYTES = {**DTYPE_BYTES, "uint8": 1}

LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head", "page_unified")
QUANT_BLOCK = 128  # codes per fp32 scale: DSATokenToKVPool.quant_block_size
PAGE_FIRST_LAYOUTS = ("page_first", "page_first_direct")


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """One dense tensor of an object.

    axes:   byte order, outermost first: "layer", "token", "head", "channel", "block" (bytes),
            "state_0", "state_1", ...
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

    @property
    def strides(self) -> dict[str, int]:
        """Bytes from one index to the next, along each axis."""
        steps = accumulate(reversed(self.shape), mul, initial=self.itemsize)
        return dict(zip(reversed(self.axes), steps, strict=False))


@dataclass(frozen=True, slots=True)
class Column:
    """A run of equal items in each row of a tensor.

    offset:      bytes from the start of the row.
    scale_floor: for fp32 scales, the least that is legal; None for ordinary numbers.
    scales:      the column of scales for these codes, each for an equal share of them. Where a
                 scale of 0 is legal, the codes under it mean nothing and are not judged.
    axes, shape: what the items count, outermost first.
    """

    name: str
    offset: int
    items: int
    dtype: str
    scale_floor: float | None = None
    scales: Column | None = None
    axes: tuple[str, ...] = ()
    shape: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the column in one row."""
        return self.items * TENSOR_DTYPE_BYTES[self.dtype]


class Geometry:
    """What one rank stores of a pool in one page: layers, tokens, widths. The kinds define it."""

    __slots__ = ()

    # Whether SGLang cannot store the layers of a layer_first page as parts: they lie scattered in
    # host memory, and MooncakeStore takes those of MLA KV alone (_get_mha_buffer_meta raises).
    scattered = True

    def tensors(self, layout: str) -> Iterator[TensorLayout]:
        """Yield the tensors of a page, each at offset 0. Raises ProfileError.

        ProfileError: SGLang does not build the pool in the layout.
        """
        raise NotImplementedError

    def check_flat(self) -> None:
        """Raise UnsupportedByBackend if no object can hold a whole page of the pool."""

    def head_slice(self, slices: int) -> Self:
        """Return one of equal slices along the heads. Raises UnsupportedByBackend."""
        raise UnsupportedByBackend(f"this pool has no heads to split into {slices} slices")


def flat_page(geometry: Geometry, layout: str) -> tuple[TensorLayout, ...]:
    """Lay out an object that holds a whole page of a pool (file, 3FS without zero-copy).

    Raises ProfileError for a layout SGLang does not build the pool in, UnsupportedByBackend for
    one that has no flat page.
    """
    geometry.check_flat()
    placed, offset = [], 0
    for tensor in _tensors(geometry, layout):
        placed.append(replace(tensor, offset=offset))
        offset += tensor.nbytes
    return tuple(placed)


def part_objects(geometry: Geometry, layout: str) -> tuple[TensorLayout, ...]:
    """Lay out the objects of a page that hold one part each (Mooncake, 3FS -k and -v), in order.

    Raises ProfileError and UnsupportedByBackend like `flat_page`.
    """
    tensors = tuple(_tensors(geometry, layout))
    if layout == "layer_first" and geometry.scattered:
        raise UnsupportedByBackend(
            "layer_first pages of this pool lie scattered in host memory and cannot be stored "
            "as parts; page_first and page_first_direct can"
        )
    return tensors


def check_layout(layout: str, known: Collection[str], pool: str) -> None:
    """Raise ProfileError if SGLang does not build a pool (`pool`: its words) in a layout."""
    if layout not in known:
        raise ProfileError(
            f"layout: SGLang does not build {pool} in {layout!r}, only in {', '.join(known)}"
        )


def _tensors(geometry: Geometry, layout: str) -> Iterator[TensorLayout]:
    if layout == "page_unified":
        raise UnsupportedByBackend(
            "page_unified belongs to the unified key scheme; no SGLang store reads or writes it"
        )
    return geometry.tensors(layout)
