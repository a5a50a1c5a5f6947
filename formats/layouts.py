"""The order of the axes inside one stored object.

An object holds tensors without gaps. It does not record the order of their axes, and has the same
size in all layouts. `formats.kinds` defines a pool's tensors. `formats.pools` places the tensors in
objects.

Source: SGLang srt/mem_cache/pool_host/ {mha,mla,dsa,mamba}.py, `get_data_page` (flat pages) and
`get_page_buffer_meta` (objects of one part each).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from operator import mul

DTYPE_BYTES = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
}
# Why SGLang stores no pages of some of its KV dtypes (pool_host/mha_mxfp8.py).
UNSTORED_DTYPES = {
    "mxfp8": "SGLang does not store mxfp8 pages, whose scales lie outside the page; servers with a "
    "store need another --kv-cache-dtype"
}
# "uint8" marks structured bytes, such as scaled MLA rows. "ue8m0" marks powers of two.
TENSOR_DTYPE_BYTES = {**DTYPE_BYTES, "uint8": 1, "ue8m0": 1}

# The outermost axes in each layout, if the tensor has them. Other axes keep their order.
_OUTERMOST = {
    "layer_first": ("layer", "token", "head"),
    "page_first": ("token", "layer", "head"),
    "page_first_direct": ("layer", "token", "head"),
    "page_head": ("head", "token", "layer"),
}
LAYOUTS = tuple(_OUTERMOST)
HEADLESS_LAYOUTS = LAYOUTS[:3]
PAGE_FIRST_LAYOUTS = ("page_first", "page_first_direct")
QUANT_BLOCK = 128  # codes that share one fp32 scale (DSATokenToKVPool.quant_block_size)


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """One dense tensor of an object.

    axes:   names of the axes in the order of the bytes, outermost first: "layer", "token", "row"
            (of several tokens), "head", "channel", "block" (bytes), "state_0", "state_1", ...
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
        """Bytes per item."""
        return TENSOR_DTYPE_BYTES[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return prod(self.shape) * self.itemsize

    @property
    def strides(self) -> dict[str, int]:
        """Bytes from one index to the next, for each axis."""
        steps = accumulate(reversed(self.shape), mul, initial=self.itemsize)
        return dict(zip(reversed(self.axes), steps, strict=False))

    def in_layout(self, layout: str) -> TensorLayout:
        """Return the tensor in the axis order of a layout."""
        lengths = dict(zip(self.axes, self.shape, strict=True))
        outer = [axis for axis in _OUTERMOST[layout] if axis in lengths]
        axes = (*outer, *(axis for axis in self.axes if axis not in outer))
        return replace(self, axes=axes, shape=tuple(lengths[axis] for axis in axes))


@dataclass(frozen=True, slots=True)
class Column:
    """Items of one dtype and meaning in each row of a tensor.

    offset:      bytes from the start of the row.
    axes, shape: axes of the items and their lengths, outermost first.
    scale_floor: lowest legal fp32 scale; None if the items are not scales. Scales of other dtypes
                 are bad if they are NaN.
    scales:      column with the scales of these codes. Each scale belongs to equally many codes.
                 Codes with a legal scale of 0 are not checked.
    pitch:       bytes from one index of the first axis to the next. The items of one index lie
                 between two neighbouring multiples of the pitch. 0 means that all items are
                 consecutive.
    """

    name: str
    offset: int
    dtype: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    scale_floor: float | None = None
    scales: Column | None = None
    pitch: int = 0

    @property
    def items(self) -> int:
        """Items per row."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes per row."""
        return self.items * TENSOR_DTYPE_BYTES[self.dtype]
