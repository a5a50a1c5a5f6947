"""The object model: what one stored object holds, whatever store it lies in.

An object is named by a page hash and a `Coordinate`; a key codec (`formats.keys`) turns the
two into the backend's own name and back.
"""

from __future__ import annotations

from dataclasses import dataclass, field

AXES = ("tp", "pp", "cp", "dcp")  # along which objects have ranks

Sizes = tuple[int | None, ...]  # of tp, pp, cp, dcp, and the DCP page


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank coordinates of an object; None where the key does not say.

    `tp` is the attention TP rank and size. Ranks count from 0.
    """

    tp_rank: int | None = None
    tp_size: int | None = None
    pp_rank: int | None = None
    pp_size: int | None = None
    cp_rank: int | None = None
    cp_size: int | None = None
    dcp_rank: int | None = None
    dcp_size: int | None = None
    dcp_page_size: int | None = None  # logical page size, part of DCP keys only
    layers: tuple[int, int] | None = None  # half-open range of model layers (unified keys)
    heads: tuple[int, int] | None = None  # half-open range of head groups (unified, split heads)
    ranked: bool = True  # False: the key has no place for a rank at all (Mooncake MLA, old)

    @property
    def ranks(self) -> tuple[int | None, ...]:
        """The rank along each axis."""
        return self.tp_rank, self.pp_rank, self.cp_rank, self.dcp_rank

    @property
    def sizes(self) -> Sizes:
        """The size of each axis, and of the DCP page: what tells deployments apart."""
        return self.tp_size, self.pp_size, self.cp_size, self.dcp_size, self.dcp_page_size

    @property
    def axes(self) -> tuple[tuple[str, int | None, int | None], ...]:
        """The name, the rank and the size of each axis."""
        return tuple(zip(AXES, self.ranks, self.sizes, strict=False))

    def ranks_text(self) -> str:
        """Say the ranks for people: `tp 0/2 pp 1/4`; "" without any."""
        return " ".join(
            f"{axis} {rank}/{'?' if size is None else size}"
            for axis, rank, size in self.axes
            if rank is not None
        )

    def sizes_text(self) -> str:
        """Say the sizes for people: `tp size 2`; "without TP ranks" where there are none."""
        sizes = [f"{axis} size {size}" for axis, _, size in self.axes if size is not None]
        return " ".join(sizes) or "without TP ranks"


@dataclass(frozen=True, slots=True)
class Coordinate:
    """Everything that says what an object holds, except which page.

    model: served model name with "/" replaced by "-", as in the keys; "" where keys carry none.
    tag:   Mooncake `extra_backend_tag`, "" without.
    pool:  SGLang `PoolName` value ("kv", "indexer", ...).
    part:  the piece of the pool in this object ("k", "temporal", ...), None for the whole page.
           The exception is MLA on Mooncake: SGLang names an object of K and V together "k".
    """

    model: str
    pool: str = "kv"
    part: str | None = None
    tag: str = ""
    shard: Shard = field(default_factory=Shard)
