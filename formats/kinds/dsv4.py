"""Kind dsv4, rows of DeepSeek-V4. A row has the latents of one token or of several tokens.

A page is one block of bytes for each layer. Layers are outermost in every layout.

Sources: SGLang srt/mem_cache/memory_pool_host.py :: DeepSeekV4PagedHostPool,
kernels/ops/attention/dsv4/kv_layout.py :: KVLayout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hicachectl.formats.kinds.base import PoolKind, stored_rows
from hicachectl.formats.layouts import HEADLESS_LAYOUTS, PAGE_FIRST_LAYOUTS, Column, TensorLayout
from hicachectl.formats.wording import not_one_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicachectl.formats.kinds.pool import Pool


@dataclass(frozen=True, slots=True)
class Numbers:
    """Numbers of a row.

    offset: bytes from the start of the row's data or scales.
    count: number of items.
    dtype: a name of TENSOR_DTYPE_BYTES; _FP8 stands for the server's fp8.
    """

    name: str
    offset: int
    count: int
    dtype: str


@dataclass(frozen=True, slots=True)
class RowForm:
    """A form of rows (KVLayout).

    data, scales: bytes of a row's data and of its scales.
    align: a page is padded to a multiple of this number of bytes.
    in_data, in_scales: numbers that can be NaN, in the data and in the scales.
    interleaved: whether each row's scales follow its data. Otherwise a page has the data of all
        rows, then all scales.
    """

    data: int
    scales: int
    align: int
    in_data: tuple[Numbers, ...] = ()
    in_scales: tuple[Numbers, ...] = ()
    interleaved: bool = False

    def page_bytes(self, rows: int) -> int:
        """Return the bytes of one layer of a page."""
        return -(-rows * (self.data + self.scales) // self.align) * self.align


_FP8 = "float8_e4m3fn"
_CODES = (Numbers("codes", 0, 512, _FP8),)
_V4 = (Numbers("codes", 0, 448, _FP8), Numbers("rope", 448, 64, "bfloat16"))
_SCALES = (Numbers("scales", 0, 16, "ue8m0"),)
_FP4_SCALES = (Numbers("scales", 0, 32, _FP8),)  # they scale 512 e2m1 codes, which have no NaN
DSV4_ROWS = {
    "v4": RowForm(576, 8, 576, _V4, (Numbers("scales", 0, 7, "ue8m0"),)),  # the 8th scale is unused
    "v41": RowForm(512, 16, 512, _CODES, _SCALES),
    "v41_fp4": RowForm(256, 32, 256, (), _FP4_SCALES),
    "v41_new": RowForm(512, 16, 528, _CODES, _SCALES, interleaved=True),
    "v41_fp4_new": RowForm(256, 32, 288, (), _FP4_SCALES, interleaved=True),
    "uniform_fp8": RowForm(512, 0, 512, _CODES),
}


class Dsv4(PoolKind):
    """Rows of DeepSeek-V4, equal on all TP ranks."""

    name = "dsv4"
    summary = f"layers, row: {', '.join(DSV4_ROWS)}; compress_ratio if a row has several tokens."
    words = "a pool of DeepSeek-V4 rows"
    required = ("layers", "row")
    shards = False
    host_layouts = HEADLESS_LAYOUTS
    identified = False
    nixl_layouts = PAGE_FIRST_LAYOUTS

    def problems(self, pool: Pool) -> Iterator[str]:
        """Yield a message if `row` is unknown."""
        if pool.row and pool.row not in DSV4_ROWS:
            yield not_one_of("row", pool.row, tuple(DSV4_ROWS))

    def tensors(self, pool: Pool, layers: int, tokens: int, tp: int) -> tuple[TensorLayout, ...]:
        """Return one block per layer."""
        nbytes = DSV4_ROWS[pool.row].page_bytes(stored_rows(pool, tokens))
        return (TensorLayout("rows", ("layer", "block"), (layers, nbytes), "uint8"),)

    def columns(self, pool: Pool, tensor: TensorLayout, code_dtype: str) -> tuple[Column, ...]:
        """Return the numbers of all rows of a page, first in the data and then in the scales."""
        form = DSV4_ROWS[pool.row]
        row_bytes = form.data + form.scales
        rows = tensor.shape[-1] // row_bytes  # the padding of a page is shorter than a row
        if form.interleaved:
            places = ((form.in_data, 0, row_bytes), (form.in_scales, form.data, row_bytes))
        else:
            ends = rows * form.data
            places = ((form.in_data, 0, form.data), (form.in_scales, ends, form.scales))
        return tuple(
            Column(
                name=numbers.name,
                offset=start + numbers.offset,
                dtype=code_dtype if numbers.dtype == _FP8 else numbers.dtype,
                axes=("row", "number"),
                shape=(rows, numbers.count),
                scale_floor=0.0 if numbers.name == "scales" else None,
                pitch=pitch,
            )
            for group, start, pitch in places
            for numbers in group
        )
