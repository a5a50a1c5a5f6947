"""The object model of all stores.

A page hash and a `Coordinate` together name an object. Key grammars (`formats.keys`) convert this
pair to the backend's key, and the key to the pair.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

PAGE_DIGITS = 64  # A page hash in a key is lowercase hexadecimal, two digits for each byte.
ANCHOR = "kv"  # SGLang's name for the pool that servers look for to find a page.
HALVES = ("k", "v")  # Parts of a page, with the keys and the values of its tokens.
AXES = ("tp", "pp", "cp", "dcp")  # axes of ranks
# Most ranks along one axis, far above any deployment. The key of one rank states the number of
# ranks, and so implies the other ranks. An untrusted key must not imply an unlimited number.
MAX_RANKS = 4096

Sizes = tuple[int | None, ...]  # tp, pp, cp, dcp, then tokens of the DCP page


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank coordinates of an object. A coordinate that the key does not state is None.

    tp_rank, tp_size: the attention TP rank and size. Ranks count from 0.
    """

    tp_rank: int | None = None
    tp_size: int | None = None
    pp_rank: int | None = None
    pp_size: int | None = None
    cp_rank: int | None = None
    cp_size: int | None = None
    dcp_rank: int | None = None
    dcp_size: int | None = None
    dcp_page_size: int | None = None  # logical page size, in DCP keys only
    layers: tuple[int, int] | None = None  # half-open range of model layers (unified keys)
    heads: tuple[int, int] | None = None  # half-open range of head groups (unified, split heads)
    ranked: bool = True  # False if the key has no rank field (MLA on Mooncake, up to 0.5.7)

    @property
    def ranks(self) -> tuple[int | None, ...]:
        """Ranks along the axes."""
        return self.tp_rank, self.pp_rank, self.cp_rank, self.dcp_rank

    @property
    def sizes(self) -> Sizes:
        """Sizes of the axes and the DCP page, which distinguish deployments."""
        return self.tp_size, self.pp_size, self.cp_size, self.dcp_size, self.dcp_page_size

    @property
    def axes(self) -> tuple[tuple[str, int | None, int | None], ...]:
        """Name, rank and size of each axis."""
        return tuple(zip(AXES, self.ranks, self.sizes, strict=False))

    @property
    def is_bounded(self) -> bool:
        """Whether no axis has more than MAX_RANKS ranks or heads."""
        counts = [size for _, _, size in self.axes if size is not None]
        if self.heads is not None:
            counts.append(self.heads[1] - self.heads[0])
        return all(count <= MAX_RANKS for count in counts)

    def ranks_text(self) -> str:
        """Return the stated ranks for messages, such as `tp 0/2 pp 1/4`; "" without any."""
        return " ".join(
            f"{axis} {rank}/{'?' if size is None else size}"
            for axis, rank, size in self.axes
            if rank is not None
        )

    def sizes_text(self) -> str:
        """Return the stated sizes for messages, such as `tp 2`; else "without TP ranks"."""
        sizes = [f"{axis} {size}" for axis, _, size in self.axes if size is not None]
        return " ".join(sizes) or "without TP ranks"


# Columns of tables that `Names` fill.
NAME_COLUMNS = ("model", "tag")


class Names(NamedTuple):
    """The names that the keys of a deployment state.

    model: served model name as in keys, "-" for "/"; "" if keys have no model.
    tag: Mooncake `extra_backend_tag`; "" without one.
    """

    model: str = ""
    tag: str = ""

    @property
    def text(self) -> str:
        """Tag and model as one text, because keys do not show where the tag ends."""
        return "_".join(filter(None, (self.tag, self.model)))

    @property
    def columns(self) -> dict[str, str | None]:
        """Values of the columns of these names; None for a name that keys lack."""
        return {name: getattr(self, name) or None for name in NAME_COLUMNS}


@dataclass(frozen=True, slots=True)
class Coordinate:
    """Identity of an object within its page.

    names: names of the deployment.
    pool:  SGLang `PoolName` value ("kv", "indexer", ...).
    part:  piece of the pool in this object ("k", "temporal", ...); None for the whole page.
           On Mooncake, the part of an MLA object is named "k", although it holds K and V.
    """

    names: Names
    pool: str = ANCHOR
    part: str | None = None
    shard: Shard = field(default_factory=Shard)
