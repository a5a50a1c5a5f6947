"""Host memory with pages, as SGLang's host pools have them, for tests of page stores."""

from __future__ import annotations

import ctypes
import mmap
from typing import TYPE_CHECKING

import numpy as np

from hicachectl.backends.sglang.page_store import ServedPool
from hicachectl.formats.identity import Identity
from hicachectl.formats.keys.base import Ranks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicachectl.backends.sglang.page_store import Pieces


class HostPool:
    """Pages of two pieces each, in two halves of one mapping, like K and V.

    pool: as the plug-in serves it.
    """

    def __init__(
        self,
        nbytes: int = 1000,
        count: int = 8,
        *,
        name: str = "kv",
        weights: str = "w",
        trailing: bool = False,
        model: str = "org-model",
        ranks: Ranks = Ranks(),  # noqa: B008 - immutable
        shared_anchor: bool = False,
    ) -> None:
        self._count, self._half = count, nbytes // 2
        self._other = nbytes - self._half
        self._memory = mmap.mmap(-1, max(1, nbytes * count))
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.pool = ServedPool(
            name=name,
            ranks=ranks,
            shared_anchor=shared_anchor,
            identity=Identity(model=model, weights=weights, pool=name, layer_bytes=nbytes),
            page_indices=1,
            nbytes=nbytes,
            parts=(),
            trailing=trailing,
            writes=True,
            host=self,
        )

    def pieces(self, host_indices: Sequence[int]) -> list[Pieces]:
        """Return the pieces of each page."""
        second = self._address + self._count * self._half
        return [
            (
                (self._address + index * self._half, self._half),
                (second + index * self._other, self._other),
            )
            for index in host_indices
        ]

    def fill(self, seed: int) -> None:
        """Give all pages random bytes."""
        self._memory[:] = np.random.default_rng(seed).bytes(len(self._memory))

    def page(self, index: int) -> bytes:
        """Return a page's bytes in the order of its object."""
        return b"".join(ctypes.string_at(*piece) for piece in self.pieces([index])[0])


def hashes(count: int, seed: int = 0) -> list[str]:
    """Return page hashes."""
    rng = np.random.default_rng(seed)
    return [rng.bytes(32).hex() for _ in range(count)]
