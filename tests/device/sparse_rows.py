"""Rows of page objects for the sparse loader, by the layout of the objects."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicachectl.kernels.sparse_triton import HostRows

if TYPE_CHECKING:
    import torch


def rows_of_layout(
    memory: torch.Tensor,
    pages: torch.Tensor,
    *,
    layout: str,
    layers: int,
    page_size: int,
    row_bytes: int,
    page_stride: int | None = None,
) -> HostRows:
    """Return rows of page objects in layout page_first, page_first_direct or layer_first.

    page_stride: bytes from one object to the next; default: objects touch.
    """
    by_token = layout == "page_first"
    return HostRows(
        memory=memory,
        pages=pages,
        layers=layers,
        page_size=page_size,
        row_bytes=row_bytes,
        page_stride=layers * page_size * row_bytes if page_stride is None else page_stride,
        token_stride=layers * row_bytes if by_token else row_bytes,
        layer_stride=row_bytes if by_token else page_size * row_bytes,
    )
