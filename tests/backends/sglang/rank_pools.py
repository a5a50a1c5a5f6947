"""Host pools of one rank of a deployment, as a profile describes it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hicachectl.backends.sglang.page_store import Part, ServedPool
from hicachectl.formats.identity import object_identity
from hicachectl.formats.spec import object_specs, ranks_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicachectl.backends.sglang.page_store import Pieces
    from hicachectl.formats.profile import Profile
    from hicachectl.formats.spec import ObjectSpec


class RankPool:
    """Pages of a host pool; each part has memory of its own, in two pieces.

    pool: as the plug-in serves it.
    """

    def __init__(self, profile: Profile, spec: ObjectSpec, count: int) -> None:
        identity = object_identity(profile, spec)
        assert identity is not None
        shard = spec.coordinate.shard
        self._memory = [np.zeros((count, tensor.nbytes), dtype=np.uint8) for tensor in spec.tensors]
        parts = [
            Part(name=tensor.name, nbytes=tensor.nbytes, pieces=slice(2 * n, 2 * n + 2))
            for n, tensor in enumerate(spec.tensors)
        ]
        self.pool = ServedPool(
            name=spec.pool,
            ranks=ranks_of(profile)._replace(
                tp_rank=shard.tp_rank or 0, pp_rank=shard.pp_rank or 0, cp_rank=shard.cp_rank or 0
            ),
            shared_anchor=profile.rank_replicated,
            identity=identity,
            page_indices=1 if spec.pool == "mamba" else profile.page_size,
            nbytes=spec.nbytes,
            parts=tuple(parts),
            trailing=spec.trailing,
            writes=True,
            host=self,
        )

    def pieces(self, host_indices: Sequence[int]) -> list[Pieces]:
        """Return the pieces of each page, by its number."""
        return [
            tuple(
                (int(memory[index].ctypes.data) + start, nbytes)
                for memory in self._memory
                for start, nbytes in _halves(memory.shape[1])
            )
            for index in host_indices
        ]

    def page(self, index: int) -> bytes:
        """Return a page's bytes in the order of its object."""
        return b"".join(memory[index].tobytes() for memory in self._memory)

    def part(self, index: int, number: int) -> bytes:
        """Return the bytes of one part of a page."""
        return bytes(self._memory[number][index])

    def fill(self, seed: int) -> None:
        """Give all pages random bytes."""
        rng = np.random.default_rng(seed)
        for memory in self._memory:
            memory[:] = rng.integers(0, 256, memory.shape, dtype=np.uint8)

    def pages(self, count: int) -> list[bytes]:
        """Return the first pages' bytes."""
        return [self.page(index) for index in range(count)]


def rank_pools(
    profile: Profile, *, tp_rank: int = 0, pp_rank: int = 0, count: int = 8
) -> dict[str, RankPool]:
    """Return the pools of a rank by name, the anchor first."""
    return {
        spec.pool: RankPool(profile, spec, count)
        for spec in object_specs(profile, "file")
        if spec.coordinate.shard.tp_rank in (None, tp_rank)
        and spec.coordinate.shard.pp_rank in (None, pp_rank)
    }


def _halves(nbytes: int) -> tuple[tuple[int, int], tuple[int, int]]:
    first = nbytes // 3
    return (0, first), (first, nbytes - first)
