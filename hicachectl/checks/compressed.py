"""Numbers in rows of DeepSeek-V4, whose data and scales lie apart in a page.

Kind dsv4 (`formats.kinds.dsv4`) defines the rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hicachectl.checks.registry import ValueIssue
from hicachectl.formats.kinds.base import stored_rows
from hicachectl.formats.kinds.dsv4 import DSV4_ROWS
from hicachectl.kernels.values import is_inf, is_nan

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from hicachectl.formats.arrays import BoolArray
    from hicachectl.formats.kinds.dsv4 import Numbers, RowForm
    from hicachectl.formats.profile import Profile
    from hicachectl.formats.spec import ObjectSpec
    from hicachectl.kernels.values import Bytes

_UE8M0_NAN = 0xFF


@dataclass(frozen=True, slots=True)
class CompressedRows:
    """The rows of a spec's objects.

    layers: model layer numbers.
    fp8: dtype of codes.
    """

    pool: str
    form: RowForm
    layers: tuple[int, ...]
    rows: int
    fp8: str

    def issues(self, objects: Bytes) -> Iterator[ValueIssue]:
        """Yield what no healthy object [n, nbytes] has: NaN, infinities, and scales of NaN."""
        for index, content in enumerate(objects):
            pages = content.reshape(len(self.layers), -1)
            for code, kind in (("nan", "NaN"), ("inf", "Inf"), ("bad-scale", "bad scale")):
                found = [
                    (layer, name, marks)
                    for layer, page in zip(self.layers, pages, strict=True)
                    for name, marks in self._marked(page, code)
                    if marks.any()
                ]
                if found:
                    yield ValueIssue(index, code, _words(kind, found))

    def _marked(self, page: Bytes, code: str) -> Iterator[tuple[str, BoolArray]]:
        """Yield the bad numbers of one code in a layer, [rows, numbers], by name."""
        for numbers, part in self._numbers(page):
            if numbers.name == "scales":
                if code == "bad-scale":
                    yield numbers.name, self._not_a_number(part, numbers.dtype)
            elif code == "nan":
                yield numbers.name, self._not_a_number(part, numbers.dtype)
            elif code == "inf" and numbers.dtype == "bfloat16":
                yield numbers.name, is_inf(part, numbers.dtype)

    def _not_a_number(self, part: npt.NDArray[np.unsignedinteger], dtype: str) -> BoolArray:
        if dtype == "ue8m0":
            nan: BoolArray = part == _UE8M0_NAN
            return nan
        return is_nan(part, self.fp8 if dtype == "float8_e4m3fn" else dtype)

    def _numbers(self, page: Bytes) -> Iterator[tuple[Numbers, npt.NDArray[np.unsignedinteger]]]:
        form = self.form
        if form.interleaved:
            both = page[: self.rows * (form.data + form.scales)].reshape(self.rows, -1)
            data, scales = both[:, : form.data], both[:, form.data :]
        else:
            data, scales = (
                page[: self.rows * form.data].reshape(self.rows, form.data),
                page[self.rows * form.data :][: self.rows * form.scales].reshape(self.rows, -1),
            )
        for held, names in ((data, form.in_data), (scales, form.in_scales)):
            for numbers in names:
                width = 2 if numbers.dtype == "bfloat16" else 1
                start, stop = numbers.offset, numbers.offset + numbers.count * width
                yield numbers, held[:, start:stop].view(f"u{width}")


def _words(kind: str, found: list[tuple[int, str, BoolArray]]) -> str:
    count = sum(int(marks.sum()) for _, _, marks in found)
    layers = sorted({layer for layer, _, _ in found})
    layer, name, marks = found[0]
    row, item = np.argwhere(marks)[0].tolist()
    plural = "s" if kind == "bad scale" and count > 1 else ""
    where = f"layer {layers[0]}" if len(layers) == 1 else f"{len(layers)} layers"
    return (
        f"rows: {count} {kind}{plural} in {where}, the first at layer {layer}, row {row}, "
        f"number {item} of {name}"
    )


def compressed_rows(expected: ObjectSpec, profile: Profile, fp8: str) -> CompressedRows | None:
    """Return the rows of a spec's objects; None if they are of another kind."""
    pool = profile.pool(expected.pool)
    if pool is None or pool.kind != "dsv4" or not expected.layers:
        return None
    rows = stored_rows(pool, profile.page_size)
    return CompressedRows(expected.pool, DSV4_ROWS[pool.row], expected.layers, rows, fp8)
