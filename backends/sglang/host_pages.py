"""Addresses of the pages of a host pool."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hicachectl.backends.sglang.served import Piece, Pieces

# Attributes with a pool's memory: tensors, or lists of them.
_BUFFERS = (
    "kv_buffer",
    "k_buffer",
    "v_buffer",
    "index_k_with_scale_buffer",
    "temporal_buffer",
    "conv_buffer",
)
_COMPARED_PAGES = 8


class EvenPages:
    """`HostPages` at equal distances, as in all of SGLang's pools.

    page_indices: host indices of a page. count: pages of the pool. pieces: of a page, in the
    object's order: address in page 0, bytes to the next page, and bytes.
    """

    def __init__(
        self, page_indices: int, count: int, pieces: Sequence[tuple[int, int, int]]
    ) -> None:
        self._page_indices = page_indices
        self._count = count
        self._pieces = tuple(pieces)

    def pieces(self, host_indices: Sequence[int]) -> list[Pieces]:
        """See `HostPages`."""
        # Without numpy, whose first use in a call takes longer than the addresses of 128 pages.
        pages = [index // self._page_indices for index in host_indices]
        for index, page in zip(host_indices, pages, strict=True):
            if page * self._page_indices != index or not 0 <= page < self._count:
                raise ValueError(
                    f"host index {index}: not the start of one of {self._count} pages of "
                    f"{self._page_indices}"
                )
        if not self._pieces:
            return [()] * len(pages)
        columns = [
            [(at + step * page, nbytes) for page in pages] for at, step, nbytes in self._pieces
        ]
        return list(zip(*columns, strict=True))


def host_pages(
    name: str, host_pool: Any, alternating: int = 1
) -> tuple[EvenPages, tuple[int, ...]]:
    """Return where a pool's pages lie, and the bytes of each piece of a page.

    name: of the pool, in messages. alternating: SGLang lists the pieces of this many parts by
    turns; they are returned one part after the other. Raises ValueError if SGLang does not know the
    places of the pages, or they are unevenly spaced, or outside the pool's memory.
    """
    whole = f"pool {name}: {type(host_pool).__name__} in layout {host_pool.layout}"
    count = host_pool.size // host_pool.page_size

    def stated(page: int) -> Pieces:
        pieces = _stated(whole, host_pool, page)
        turns = range(alternating)
        return tuple(pieces[at] for turn in turns for at in range(turn, len(pieces), alternating))

    first, second = stated(0), stated(min(1, count - 1))
    pages = EvenPages(
        host_pool.page_size,
        count,
        [(at, then - at, n) for (at, n), (then, _) in zip(first, second, strict=True)],
    )
    buffers = list(_buffers(host_pool))
    for page in _some_pages(count):
        (pieces,) = pages.pieces([page * host_pool.page_size])
        if pieces != stated(page) or not all(_within(piece, buffers) for piece in pieces):
            raise ValueError(
                f"{whole}: its pages are unevenly spaced or outside its memory; use a newer "
                "hicachectl"
            )
    return pages, tuple(nbytes for _, nbytes in first)


def _stated(whole: str, host_pool: Any, page: int) -> Pieces:
    """Return the pieces of a page that SGLang states; () for a pool without memory."""
    import torch

    start = page * host_pool.page_size
    try:
        stated = host_pool.get_page_buffer_meta(torch.arange(start, start + host_pool.page_size))
    except Exception as error:  # of any kind: SGLang's pools refuse in several ways
        raise ValueError(
            f"{whole}: SGLang cannot store it from its place in memory ({error}); start with "
            "--hicache-mem-layout page_first or page_first_direct"
        ) from error
    return (
        () if stated is None else tuple(zip(map(int, stated[0]), map(int, stated[1]), strict=True))
    )


def _some_pages(count: int) -> list[int]:
    """Return the first and the last page, and some between them."""
    between = random.Random(count).sample(range(count), min(count, _COMPARED_PAGES))
    return [0, *between, count - 1]


def _buffers(host_pool: Any) -> Iterator[Piece]:
    """Yield the memory of each of a pool's tensors."""
    for name in _BUFFERS:
        found = getattr(host_pool, name, None)
        for tensor in found if isinstance(found, (list, tuple)) else [found]:
            if tensor is not None:
                yield tensor.data_ptr(), tensor.nbytes


def _within(piece: Piece, buffers: Sequence[Piece]) -> bool:
    address, nbytes = piece
    return any(start <= address and address + nbytes <= start + length for start, length in buffers)
