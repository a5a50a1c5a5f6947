"""The object model: what one stored object holds, whatever store it lies in.

An object is named by a page hash and a `Coordinate`; a key codec (`formats.keys`) turns the
two into the backend's own name and back.
"""

from __future__ import annotations

from dataclasses import dataclass, field


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


@dataclass(frozen=True, slots=True)
class Coordinate:
    """Everything that says what an object holds, except which page.

    model: served model name with "/" replaced by "-", as in the keys; "" where keys carry none.
    tag:   Mooncake `extra_backend_tag`, "" without.
    pool:  SGLang `PoolName` value ("kv", "indexer", ...).
    part:  the piece of the pool in this object ("k", "temporal", ...), None for the whole page.
    """

    model: str
    pool: str = "kv"
    part: str | None = None
    tag: str = ""
    shard: Shard = field(default_factory=Shard)
