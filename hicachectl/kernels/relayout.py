"""Carry out the copies of a transfer plan on pages in host memory, all pages at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicachectl.formats.strided import StridedCopy
    from hicachectl.formats.transfer import TransferUnit

    Pages = npt.NDArray[np.uint8]


def relayout(unit: TransferUnit, sources: Sequence[Pages], destinations: Sequence[Pages]) -> None:
    """Fill the destination objects of a unit from its source objects, page by page.

    sources, destinations: one array an object, [pages, object bytes] uint8; bytes of a page are
        contiguous, pages may lie apart. Every byte of a destination is written.
    Raises ValueError on arrays that a copy would leave.
    """
    for position in unit.padded:
        destinations[position][...] = 0
    for copy in unit.copies:
        _copy(copy, sources[copy.source], destinations[copy.destination])


def _copy(copy: StridedCopy, source: Pages, destination: Pages) -> None:
    if len(source) != len(destination):
        raise ValueError(f"{len(source)} source pages for {len(destination)} of the destination")
    if not len(source):
        return
    np.copyto(
        _view(destination, copy, copy.destination_offset, copy.destination_strides),
        _view(source, copy, copy.source_offset, copy.source_strides),
    )


def _view(pages: Pages, copy: StridedCopy, offset: int, strides: tuple[int, ...]) -> Pages:
    """View one side of a copy as [pages, *shape, item bytes]."""
    span = sum((n - 1) * step for n, step in zip(copy.shape, strides, strict=True))
    end = offset + span + copy.itemsize
    if pages.dtype != np.uint8 or pages.ndim != 2 or end > pages.shape[1] or pages.strides[1] != 1:
        raise ValueError(f"pages {pages.shape} do not hold contiguous bytes up to {end}")
    return np.lib.stride_tricks.as_strided(
        pages[:, offset:],
        (len(pages), *copy.shape, copy.itemsize),
        (pages.strides[0], *strides, 1),
    )
